"""What passes between the scheduler's shell and a worker. By position, and nothing else is shared.

A worker is a machine of its own: it holds for each running request a slot with tokens, a block table and a length, and it
rolls that slot forward with its own samples. So the asynchronous window needs no hand-back: the input token of step N+1
is the worker's own sample of step N. What it sampled *for* (the position) comes back with each output, and the scheduler
checks it against what it knows: the two can't drift apart silently.

Order of work at a step: drop the slots in `released`; make the slots of `admitted` anew (a re-admitted request replaces its
old slot); append the step's new blocks to the block tables; compute; sample for each entry that is no chunk.
"""

from typing import Protocol, runtime_checkable

import msgspec

from refold.journal.events import Sampling, StepScheduled
from refold.journal.surprisals import EntrySurprisals


class AdmittedRequest(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A request as it enters the batch: all its known tokens, prompt and outputs so far.

    They are to be computed from its entry's first position on. `hit_block_ids` is the block table that it comes in with, this step's allocations not included.
    """

    entry: int
    handle: int
    epoch: int
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: Sampling
    hit_block_ids: list[int]


class WorkOrder(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """One step's work: the journaled `StepScheduled`, and what the worker can't know from earlier orders.

    `admitted` is parallel to `scheduled.admissions`. `released` are handles whose slots are no longer needed (finished or
    preempted since the last order).
    """

    generation: int
    scheduled: StepScheduled
    admitted: list[AdmittedRequest]
    released: list[int]


_ENCODER = msgspec.msgpack.Encoder()
_ORDERS = msgspec.msgpack.Decoder(WorkOrder)


def unshared(order: WorkOrder) -> WorkOrder:
    """A copy that shares nothing with the original, for a worker that may change what it's given."""
    return _ORDERS.decode(_ENCODER.encode(order))


class StepOutput(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """What a step produced. Columns, one place per entry of the step, in its order.

    `counts`: tokens sampled (0 for a chunk; with drafts, the accepted ones and one more); `token_ids`: flat; `positions`: the position of the entry's first sampled
    token in its request (prompt and outputs counted from 0), -1 for a chunk. `digests`, parallel to `token_ids`, of the row of logits
    that each token was chosen from (`refold.gpu.digest`); empty if they aren't asked for.

    `logprobs`, of entries whose request asks for them, in order: of each token that they sampled. `prompt_logprobs`, of entries
    that sample their request's first output and whose request asks: of each token of the prompt but the first.
    """

    step: int
    generation: int
    counts: list[int]
    token_ids: list[int]
    positions: list[int]
    digests: list[int] = []
    logprobs: list[EntrySurprisals] = []
    prompt_logprobs: list[EntrySurprisals] = []


class Worker(Protocol):
    """Executes orders, one at a time, in the order given. Any exception from `execute` means that the worker is lost."""

    kind: str

    def environment(self) -> dict[str, str]:
        """What the numbers depend on: device, versions, threads, dtype, weights digest. Journaled at start."""
        ...

    def execute(self, order: WorkOrder) -> StepOutput:
        """Run one step to its end. Blocking. The order is the worker's own copy; its answer is copied before it is checked."""
        ...

    def close(self) -> None:
        """Free the device. Idempotent."""
        ...


@runtime_checkable
class TakesAhead(Protocol):
    """A worker that can be given orders before their turn, so that it has no pause between two of them.

    One caller at a time, which may be another thread than that of `execute`.
    """

    def offer(self, order: WorkOrder) -> bool:
        """Take an order behind those that it was given, if that needs no waiting; False if it wasn't taken."""
        ...

    def hand_over(self, order: WorkOrder) -> None:
        """Have the order that is due, whole, by the return: to be called before `execute`. Blocking. May raise as `execute`."""
        ...
