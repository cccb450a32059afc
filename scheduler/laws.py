"""The laws: what holds after every event, whatever happened.

`check_state` looks at one state. `LawBook` also remembers: it follows a journal event by event beside the fold, keeps its
own account of steps, outputs and block contents, and compares. It shares no code with the appliers that it judges.

A broken law is a bug of ours (`InvariantViolation`), never the fault of an input.
"""

from collections.abc import Callable
from typing import Any

from refold.journal.errors import InvariantViolation
from refold.journal.events import (
    Event,
    OutputDelivered,
    RequestFinished,
    RequestSubmitted,
    StaleOutputConsumed,
    StateDigest,
    StepScheduled,
    WorkerLost,
)
from refold.projections.requests import FINISHED, PREEMPTED, RUNNING, WAITING, Request, block_hash, root_hash
from refold.scheduler.state import State, digest

LAWS: dict[str, str] = {
    "L1": "each entry of a step is resolved exactly once (delivered, stale-consumed or lost), steps in order",
    "L2": "the counters equal the sums over the window; 0 <= stale <= in flight; placeholders >= 0",
    "L3": "owned + fenced + blank + cached = all blocks; reference counts equal owners; a shared block is full and hashed",
    "L4": "a block's hash is the chain hash of the tokens computed into it",
    "L5": "output indices of a request are 0, 1, 2, ... without gap or repeat",
    "L6": "every live request is in exactly one queue, the one of its status, and the queues are in order",
    "L7": "a waiting or preempted request has nothing computed, no placeholders and no blocks",
    "L8": "token budget, sequence limit and model length hold; every entry has at least one token",
    "L9": "a request finishes once; after that only stale output names it",
    "L10": "with nothing live and nothing in flight, every block is free",
    "L11": "the recorded digest equals the digest of the fold",
}


def _broken(law: str, message: str) -> InvariantViolation:
    return InvariantViolation(f"{law} broken ({LAWS[law]}): {message}")


def check_state(state: State) -> None:
    """L2, L3, L6, L7, L8 (limits) and L10 on one state.

    Raises:
        InvariantViolation: a law is broken; the message names it.
    """
    _check_counters(state)
    _check_blocks(state)
    _check_queues(state)
    _check_idle_requests(state)
    if state.is_quiescent:
        free = state.pool.num_free
        if free != state.pool.num_blocks:
            raise _broken("L10", f"{free} of {state.pool.num_blocks} blocks free")


def _check_counters(state: State) -> None:
    sums = {handle: [0, 0, 0, 0, 0] for handle in state.requests.by_handle}
    for step in state.window.in_flight:
        for entry, (handle, n, epoch) in enumerate(zip(step.handles, step.num_tokens, step.epochs, strict=True)):
            if handle not in sums:
                raise _broken("L1", f"step {step.step} in flight names unknown handle {handle}")
            request, row = state.requests.by_handle[handle], sums[handle]
            is_stale = epoch < request.epoch
            if is_stale != (entry in step.stale):
                raise _broken("L2", f"{request.request_id} in step {step.step}: the stale mark contradicts the epoch")
            if step.delivered and not is_stale:
                continue
            row[0] += n
            row[1] += n * is_stale
            row[2] += n * (step.stale.get(entry) == "deliver")
            samples = not is_stale and entry not in step.chunk_entries
            row[3] += samples
            row[4] += samples
    for handle, request in state.requests.by_handle.items():
        kept = [
            request.num_in_flight_tokens,
            request.num_stale_output_tokens,
            request.num_deliverable_stale_tokens,
            request.num_output_placeholders,
            request.num_sampling_in_flight,
        ]
        if kept != sums[handle]:
            raise _broken("L2", f"{request.request_id}: {kept} kept, {sums[handle]} summed")


def _check_blocks(state: State) -> None:
    pool = state.pool
    owners = [0] * pool.num_blocks
    for request in state.requests.by_handle.values():
        for block in request.block_ids:
            owners[block] += 1
    if owners != pool.ref_counts:
        raise _broken("L3", f"owners {owners}, reference counts {pool.ref_counts}")
    fenced = [block for _, idle in pool.fences for block in idle]
    places = [*fenced, *pool.free_blank, *pool.free_cached, *(b for b in range(pool.num_blocks) if owners[b])]
    if not sorted(places) == list(range(pool.num_blocks)):
        raise _broken("L3", f"places of blocks: {sorted(places)}")
    if pool.num_fenced != len(fenced):
        raise _broken("L3", f"{pool.num_fenced} counted fenced, {len(fenced)} are")
    for block, content_hash in enumerate(pool.hashes):
        if not (owners[block] < 2 or content_hash is not None):
            raise _broken("L3", f"block {block} is shared and not hashed")
        if content_hash is not None:
            found = pool.block_by_hash.get(content_hash)
            if found != block:
                raise _broken("L4", f"the hash of block {block} finds {found}")
    hashed = sum(content_hash is not None for content_hash in pool.hashes)
    if not len(pool.block_by_hash) == hashed:
        raise _broken("L4", f"{len(pool.block_by_hash)} hashes found, {hashed} blocks hashed")
    stray = [b for b in pool.free_blank if pool.hashes[b] is not None] + [
        b for b in pool.free_cached if pool.hashes[b] is None
    ]
    if stray:
        raise _broken("L3", f"free blocks {stray} are in the wrong list")


def _check_queues(state: State) -> None:
    queues = state.queues
    for name, queue, statuses in (
        ("running", queues.running, {RUNNING}),
        ("waiting", queues.waiting, {WAITING, PREEMPTED}),
    ):
        wrong = [r.request_id for r in queue if r.status not in statuses]
        if wrong:
            raise _broken("L6", f"{wrong} are in {name}")
        keys = [r.queue_key for r in queue]
        if keys != sorted(set(keys)):
            raise _broken("L6", f"{name} is out of order")
    queued = sorted(r.handle for r in (*queues.running, *queues.waiting))
    live = sorted(r.handle for r in state.requests.live())
    if queued != live:
        raise _broken("L6", f"queued {queued}, live {live}")
    limit = state.config.max_num_seqs if state.was_opened else 0
    if not len(queues.running) <= limit:
        raise _broken("L8", f"{len(queues.running)} running, limit {limit}")


def _check_idle_requests(state: State) -> None:
    for r in state.requests.by_handle.values():
        if r.status is RUNNING:
            end = len(r.tokens) + r.num_output_placeholders
            if not r.num_computed_tokens <= end <= state.config.max_model_len:
                raise _broken("L8", f"{r.request_id} overruns")
            continue
        idle = r.num_computed_tokens == r.num_output_placeholders == r.num_sampling_in_flight == 0 and not r.block_ids
        if not idle:
            raise _broken("L7", f"{r.request_id} is {r.status} with {r.num_computed_tokens} computed tokens")
        if r.status is FINISHED and r.num_in_flight_tokens == 0:
            raise _broken("L9", f"{r.request_id} finished, drained and still kept")


class LawBook:
    """Follows a journal beside the fold and raises at the first event that breaks a law.

    `observe(state, event)` is called after `event` was folded into `state`; `num_checks` counts the events judged.
    """

    def __init__(self) -> None:
        self.num_checks = 0
        self._unresolved: dict[int, list[int]] = {}
        self._next_step = 0
        self._transcripts: dict[int, list[int]] = {}
        self._prompts: dict[int, RequestSubmitted] = {}
        self._finished: set[int] = set()
        self._content: dict[int, tuple[int, int, set[int]]] = {}
        self._proved: dict[int, bytes] = {}
        self._watchers: dict[type[Event], Callable[[State, Any], None]] = {
            RequestSubmitted: self._submitted,
            StepScheduled: self._scheduled,
            OutputDelivered: self._delivered,
            StaleOutputConsumed: self._stale,
            RequestFinished: self._ended,
            WorkerLost: self._worker_lost,
            StateDigest: self._digested,
        }

    def observe(self, state: State, event: Event) -> None:
        """Judge one event and the state after it.

        Raises:
            InvariantViolation: a law is broken; the message names it.
        """
        self.num_checks += 1
        watch = self._watchers.get(type(event))
        if watch is not None:
            watch(state, event)
        if type(event) is StepScheduled or type(event) is OutputDelivered or type(event) is StaleOutputConsumed:
            self._check_published(state)
        check_state(state)

    def output_tokens(self, handle: int) -> list[int]:
        """What the journal delivered to a request so far."""
        return self._transcripts[handle][len(self._prompts[handle].prompt_token_ids) :]

    # -- what each event must say -------------------------------------------------------------------------------------

    def _submitted(self, state: State, event: RequestSubmitted) -> None:  # noqa: ARG002
        if not event.handle not in self._prompts:
            raise _broken("L9", f"handle {event.handle} was used before")
        self._prompts[event.handle] = event
        self._transcripts[event.handle] = list(event.prompt_token_ids)

    def _scheduled(self, state: State, event: StepScheduled) -> None:
        if event.step != self._next_step:
            raise _broken("L1", f"step {event.step} scheduled, {self._next_step} is next")
        self._next_step += 1
        self._unresolved[event.step] = list(event.handles)
        gone = [h for h in event.handles if h in self._finished]
        if gone:
            raise _broken("L9", f"finished handles {gone} scheduled in step {event.step}")
        total, limit = sum(event.num_tokens), state.config.max_num_batched_tokens
        if not total <= limit:
            raise _broken("L8", f"step {event.step} has {total} tokens, budget {limit}")
        if not min(event.num_tokens) >= 1:
            raise _broken("L8", f"step {event.step} has an entry without tokens")
        if not len(set(event.handles)) == len(event.handles):
            raise _broken("L8", f"step {event.step} names a request twice")
        depth = len(self._unresolved)
        if not depth <= state.config.max_in_flight_steps:
            raise _broken("L8", f"{depth} steps in flight")
        for allocation in event.allocations:
            for block in allocation.block_ids:
                self._content.pop(block, None)
                self._proved.pop(block, None)
        for handle, n, first in zip(event.handles, event.num_tokens, event.first_positions, strict=True):
            self._write(state.requests.by_handle[handle], first, n, state.pool.block_size)

    def _write(self, request: Request, first: int, n: int, block_size: int) -> None:
        for position in range(first, first + n):
            index = position // block_size
            if not index < len(request.block_ids):
                raise _broken("L8", f"{request.request_id} has no block for {position}")
            block = request.block_ids[index]
            owner, owned_index, written = self._content.setdefault(block, (request.handle, index, set()))
            if not ((owner, owned_index) == (request.handle, index) and position % block_size not in written):
                raise _broken("L4", f"{request.request_id} writes position {position} into block {block} a second time")
            written.add(position % block_size)

    def _delivered(self, state: State, event: OutputDelivered) -> None:
        counts = event.counts or [1] * len(event.handles)
        self._settle(event.step, event.handles)
        offset = 0
        for handle, count, index in zip(event.handles, counts, event.first_output_indices, strict=True):
            self._append(handle, event.token_ids[offset : offset + count], index)
            offset += count
            self._check_transcript(state, handle)

    def _stale(self, state: State, event: StaleOutputConsumed) -> None:
        self._settle(event.step, event.handles)
        offset = 0
        for i, (handle, count) in enumerate(zip(event.handles, event.counts, strict=True)):
            tokens = event.token_ids[offset : offset + count]
            offset += count
            if event.delivered[i]:
                self._append(handle, tokens, event.first_output_indices[i])
                self._check_transcript(state, handle)

    def _settle(self, step: int, handles: list[int]) -> None:
        oldest = min(self._unresolved, default=-1)
        if step != oldest:
            raise _broken("L1", f"output of step {step}, {oldest} is the oldest in flight")
        for handle in handles:
            if handle not in self._unresolved[step]:
                raise _broken("L1", f"handle {handle} resolved twice in step {step}")
            self._unresolved[step].remove(handle)
        if not self._unresolved[step]:
            del self._unresolved[step]

    def _append(self, handle: int, tokens: list[int], index: int) -> None:
        transcript = self._transcripts[handle]
        if not (not tokens or handle not in self._finished):
            raise _broken("L9", f"handle {handle} got output after its end")
        expected = len(transcript) - len(self._prompts[handle].prompt_token_ids)
        if index != expected:
            raise _broken("L5", f"handle {handle}: output index {index} delivered, {expected} is next")
        transcript += tokens

    def _check_transcript(self, state: State, handle: int) -> None:
        request = state.requests.by_handle.get(handle)
        if request is not None:
            same = len(request.tokens) == len(self._transcripts[handle])
            if not same:
                raise _broken(
                    "L5", f"{request.request_id} holds {len(request.tokens)} tokens, the journal tells otherwise"
                )

    def _ended(self, state: State, event: RequestFinished) -> None:  # noqa: ARG002
        if not event.handle not in self._finished:
            raise _broken("L9", f"handle {event.handle} finished twice")
        self._finished.add(event.handle)
        outputs = len(self._transcripts[event.handle]) - len(self._prompts[event.handle].prompt_token_ids)
        same = outputs == event.num_output_tokens
        if not same:
            raise _broken(
                "L5", f"handle {event.handle} finished with {event.num_output_tokens} outputs, {outputs} seen"
            )

    def _worker_lost(self, state: State, event: WorkerLost) -> None:  # noqa: ARG002
        lost = sorted(self._unresolved)
        if event.steps != lost:
            raise _broken("L1", f"steps {event.steps} lost, {lost} were in flight")
        self._unresolved.clear()
        self._content.clear()
        self._proved.clear()

    def _digested(self, state: State, event: StateDigest) -> None:
        actual = digest(state)
        if actual != event.digest:
            raise _broken("L11", f"recorded {event.digest[:16]}, folded {actual[:16]}")

    # -- L4: what is published was computed ---------------------------------------------------------------------------

    def _check_published(self, state: State) -> None:
        for content_hash, block in state.pool.block_by_hash.items():
            if self._proved.get(block) == content_hash:
                continue
            if block not in self._content:
                raise _broken("L4", f"block {block} is published and was never written")
            handle, index, written = self._content[block]
            size = state.pool.block_size
            if not len(written) == size:
                raise _broken("L4", f"block {block} is published with {len(written)} of {size}")
            proof = self._chain(handle, index, size)
            if proof != content_hash:
                raise _broken("L4", f"block {block} is published under another content's hash")
            self._proved[block] = content_hash

    def _chain(self, handle: int, index: int, size: int) -> bytes:
        tokens, parent = self._transcripts[handle], root_hash(self._prompts[handle].cache_salt)
        for i in range(index + 1):
            packed = b"".join(t.to_bytes(8, "little", signed=True) for t in tokens[i * size : (i + 1) * size])
            parent = block_hash(parent, packed)
        return parent
