"""The vocabulary: every fact that an engine can record.

An event is a fact in the past tense. It stores outcomes (block ids, tokens, finish reasons), never recipes, so that a
journal folds under a newer policy or allocator. Facts about a whole step are columnar: parallel lists with one place per
entry of the step, in batch order. Facts that are rare are one event each. Fields that hold their default are not written.

Inside, a request is an integer handle, given at admission in journal order and never reused. A client's `request_id`
appears once, in `RequestSubmitted`.

Every token of output is accounted for by exactly one of `OutputDelivered`, `StaleOutputConsumed` and `WorkerLost`
(law L1): each names entries of an in-flight step, and each entry is named exactly once.
"""

from typing import Literal

import msgspec

SCHEMA_VERSION = 1

StalePolicy = Literal["deliver", "drop"]
FinishReason = Literal["stop", "length", "abort", "error", "capacity"]
PreemptReason = Literal["kv_pressure", "cache_reset"]
Policy = Literal["fcfs", "priority"]


class Event(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A fact. Subclasses are tagged by their class name in the field `type`."""


class Sampling(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """How a request's tokens are chosen. Concrete: the seed is drawn before the request is journaled.

    `temperature` 0 means greedy. `top_k` 0 means no limit. `stop_token_ids` finish the request with reason `stop`, as
    does the model's end of sequence unless `ignore_eos`; both are masked until `min_tokens` tokens are out.
    """

    seed: int
    max_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


class EngineConfig(msgspec.Struct, frozen=True, gc=False, kw_only=True, forbid_unknown_fields=True):
    """All that decisions depend on. Written whole (defaults too): a journal explains itself.

    `max_in_flight_steps` is the depth of the window; 1 is synchronous scheduling. `max_num_batched_tokens` is the token
    budget of a step. `long_prefill_token_threshold` caps one request's prefill in a step (0: no cap).
    `watermark_blocks` stay free at admission while something runs. `admit_full_sequence` admits a request only if
    all its known tokens fit, not just its first chunk. `vocab_size` bounds what a worker may answer.
    """

    model: str
    model_fingerprint: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_in_flight_steps: int = 2
    policy: Policy = "fcfs"
    enable_prefix_caching: bool = True
    long_prefill_token_threshold: int = 0
    watermark_blocks: int = 0
    admit_full_sequence: bool = True


class EngineOpened(Event, frozen=True, tag=True):
    """An engine took the journal over. Every life of an engine starts with one."""

    engine_epoch: int
    refold_version: str
    root_seed: int
    config: EngineConfig


class EngineClosed(Event, frozen=True, tag=True):
    """An engine left in good order. A life without one ended in a crash."""

    engine_epoch: int
    reason: str


class WorkerStarted(Event, frozen=True, tag=True):
    """A worker is ready for its first step. `environment` is what its numbers depend on (device, versions, threads)."""

    generation: int
    kind: str
    environment: dict[str, str]


class WorkerLost(Event, frozen=True, tag=True):
    """A worker is gone, and with it every step in flight and every block's content.

    `handles` had work in flight or blocks; each moves to its next epoch under the `drop` policy and computes again.
    """

    generation: int
    reason: str
    steps: list[int]
    handles: list[int]


class RequestSubmitted(Event, frozen=True, tag=True):
    """A request was admitted to the queue."""

    handle: int
    request_id: str
    prompt_token_ids: list[int]
    sampling: Sampling
    arrival_ns: int
    priority: int = 0
    cache_salt: str = ""


class Admission(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A request that enters the running batch with this step.

    `entry` is its index in the step's columns, `epoch` the epoch it runs in, `hit_block_ids` the cached blocks that it
    shares: the first `len(hit_block_ids) * block_size` tokens are not computed again.
    """

    entry: int
    epoch: int
    hit_block_ids: list[int] = []


class BlockAllocation(msgspec.Struct, frozen=True, gc=False, kw_only=True, forbid_unknown_fields=True):
    """Blocks newly owned by the request of entry `entry`, appended to its block table in this order."""

    entry: int
    block_ids: list[int]


class StepScheduled(Event, frozen=True, tag=True):
    """The work order of one step.

    Columns, one place per entry: `handles`; `num_tokens` to compute; `first_positions`, the position of the first of them.
    `chunk_entries` are the entries (by index) that end before the request's last known position and so sample nothing;
    every other entry samples. `evicted_block_ids` lost their cached content to the allocations of this step.
    """

    step: int
    handles: list[int]
    num_tokens: list[int]
    first_positions: list[int]
    chunk_entries: list[int] = []
    admissions: list[Admission] = []
    allocations: list[BlockAllocation] = []
    evicted_block_ids: list[int] = []


class RequestPreempted(Event, frozen=True, tag=True):
    """A running request lost its blocks and its place, and will recompute.

    Its epoch rises: `num_stale_output_tokens` scheduled tokens of its entries in flight are stale from now on and are
    treated by `stale_policy` when they return (an entry already marked `drop` stays so). `for_handle` is the request that
    needed `needed_blocks` while `free_blocks` were free; a request may be preempted for itself.
    """

    handle: int
    reason: PreemptReason
    stale_policy: StalePolicy
    released_block_ids: list[int]
    num_computed_tokens: int
    num_stale_output_tokens: int
    for_handle: int | None = None
    needed_blocks: int = 0
    free_blocks: int = 0


class OutputDelivered(Event, frozen=True, tag=True):
    """The current entries of step `step` came back.

    Columns, one place per entry: `handles`; `first_output_indices`, the output index of the entry's first token.
    `token_ids` is flat. `counts` says how many of them belong to each entry; empty means one each (an entry that samples
    nothing has count 0).
    """

    step: int
    handles: list[int]
    token_ids: list[int]
    first_output_indices: list[int]
    counts: list[int] = []


class StaleOutputConsumed(Event, frozen=True, tag=True):
    """The stale entries of step `step` came back: their epoch is over.

    Columns, one place per entry: `handles`; `num_tokens` scheduled, which leave the stale counter; `delivered`, whether
    the tokens were handed out (policy `deliver`) or thrown away (`drop`); `first_output_indices` of what was delivered
    (-1 where nothing was); `counts` and the flat `token_ids` that came back, thrown away ones included.
    """

    step: int
    handles: list[int]
    num_tokens: list[int]
    delivered: list[bool]
    counts: list[int]
    token_ids: list[int]
    first_output_indices: list[int]


class RequestFinished(Event, frozen=True, tag=True):
    """A request has ended; nothing is delivered to it after this. `stop_token_id` is the token that ended it."""

    handle: int
    reason: FinishReason
    num_output_tokens: int
    stop_token_id: int | None = None
    message: str = ""


class RequestAborted(Event, frozen=True, tag=True):
    """Someone outside ended a request. Always followed by its `RequestFinished`."""

    handle: int
    cause: str


class CacheReset(Event, frozen=True, tag=True):
    """Every cached block was forgotten. Running requests were preempted first, under the `drop` policy."""

    reset_running: bool


class StateDigest(Event, frozen=True, tag=True):
    """What the folded state hashed to just before this event. Replay checks itself against it (law L11)."""

    digest: str


AnyEvent = (
    EngineOpened
    | EngineClosed
    | WorkerStarted
    | WorkerLost
    | RequestSubmitted
    | StepScheduled
    | RequestPreempted
    | OutputDelivered
    | StaleOutputConsumed
    | RequestFinished
    | RequestAborted
    | CacheReset
    | StateDigest
)
EVENT_TYPES: tuple[type[Event], ...] = AnyEvent.__args__
