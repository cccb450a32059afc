"""The fold: what each event does to the state.

`fold` is the only caller of appliers, and appliers are the only code that changes state. Live running, replay, recovery
and audit fold with the same code; there is no flag that tells them apart.

An applier decides nothing. It asserts that the event fits the state, because an event that doesn't is either a bug of ours
or a damaged journal, and both must stop here.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from refold.journal.events import (
    Admission,
    CacheReset,
    EngineClosed,
    EngineOpened,
    Event,
    OutputDelivered,
    RequestAborted,
    RequestFinished,
    RequestPreempted,
    RequestSubmitted,
    StaleOutputConsumed,
    StateDigest,
    StepScheduled,
    WorkerLost,
    WorkerStarted,
)
from refold.projections import blocks, queues, requests, steps
from refold.projections.requests import PREEMPTED, RUNNING, WAITING, Request
from refold.projections.steps import InFlightStep, PendingPublication
from refold.scheduler.state import State


def fold(state: State, event: Event) -> None:
    """Apply one event.

    Raises:
        AssertionError: the event contradicts the state. A journal written by this engine never does.
    """
    APPLIERS[type(event)](state, event)


def fold_all(state: State, events: Iterable[Event]) -> None:
    """Apply events in order."""
    for event in events:
        APPLIERS[type(event)](state, event)


def _engine_opened(state: State, event: EngineOpened) -> None:
    assert not state.window.in_flight, "an engine opens with an empty window"
    assert not state.queues.running, "an engine opens with nothing running"
    assert event.engine_epoch > state.engine_epoch, (event.engine_epoch, state.engine_epoch)
    state.opened_config = event.config
    state.engine_epoch = event.engine_epoch
    state.is_open = True
    state.pool = blocks.BlockPool(event.config.num_blocks, event.config.block_size)
    for request in state.requests.live():
        requests.configure(request, event.config)
    queues.reorder(state.queues, event.config.policy)


def _engine_closed(state: State, event: EngineClosed) -> None:
    assert event.engine_epoch == state.engine_epoch, (event.engine_epoch, state.engine_epoch)
    state.is_open = False


def _worker_started(state: State, event: WorkerStarted) -> None:
    assert not state.worker_alive, "one worker at a time"
    assert event.generation == state.worker_generation + 1, (event.generation, state.worker_generation)
    state.worker_generation = event.generation
    state.worker_alive = True


def _worker_lost(state: State, event: WorkerLost) -> None:
    assert state.worker_alive, "no worker to lose"
    assert event.generation == state.worker_generation, (event.generation, state.worker_generation)
    assert event.steps == [step.step for step in state.window.in_flight], event.steps
    state.worker_alive = False
    state.window.in_flight.clear()
    for request in list(state.requests.by_handle.values()):
        requests.lose_in_flight(request)
        requests.forget_if_drained(state.requests, request)
    for handle in event.handles:
        _start_over(state, state.requests.by_handle[handle])
    config = state.config
    state.pool = blocks.BlockPool(config.num_blocks, config.block_size)


def _start_over(state: State, request: Request) -> None:
    requests.raise_epoch(request, 0)
    requests.forget_computed(request)
    if request.status is RUNNING:
        queues.leave(state.queues, request)
        queues.enter(state.queues, request, PREEMPTED)


def _request_submitted(state: State, event: RequestSubmitted) -> None:
    request = requests.submit(state.requests, event, state.config)
    request.queue_key = queues.QUEUE_KEYS[state.config.policy](request)
    queues.enter(state.queues, request, WAITING)


def _step_scheduled(state: State, event: StepScheduled) -> None:
    """Entry by entry, in order: an entry may share what an earlier entry of the same step is about to write."""
    step = steps.open_step(state.window, event)
    by_handle, block_size, chunks = state.requests.by_handle, state.pool.block_size, step.chunk_entries
    admissions = {admission.entry: admission for admission in event.admissions}
    allocations = {allocation.entry: allocation.block_ids for allocation in event.allocations}
    evicted: list[int] = []
    for entry, (handle, n, first) in enumerate(zip(event.handles, event.num_tokens, event.first_positions, strict=True)):
        request = by_handle[handle]
        if entry in admissions:
            _admit(state, request, admissions[entry])
        if entry in allocations:
            evicted += blocks.take(state.pool, allocations[entry])
            request.block_ids.extend(allocations[entry])
        assert request.num_computed_tokens == first, (request.request_id, request.num_computed_tokens, first)
        assert request.status is RUNNING, request.request_id
        requests.schedule(request, event.step, n, entry not in chunks)
        step.epochs.append(request.epoch)
        if n > 1 or (first + n) % block_size == 0:
            _publish_filled(state, step, request)
    assert evicted == event.evicted_block_ids, (evicted, event.evicted_block_ids)


def _admit(state: State, request: Request, admission: Admission) -> None:
    assert request.epoch == admission.epoch, (request.request_id, request.epoch, admission.epoch)
    assert request.num_deliverable_stale_tokens == 0, request.request_id
    assert not request.block_ids, request.request_id
    queues.leave(state.queues, request)
    queues.enter(state.queues, request, RUNNING)
    blocks.share(state.pool, admission.hit_block_ids)
    request.block_ids = list(admission.hit_block_ids)
    request.num_published_blocks = len(admission.hit_block_ids)
    request.num_computed_tokens = len(admission.hit_block_ids) * state.pool.block_size


def _publish_filled(state: State, step: InFlightStep, request: Request) -> None:
    """Publish what `step` fills: now if the tokens are known, when it comes back if they aren't yet."""
    full = request.num_computed_tokens // state.pool.block_size
    known = min(full, len(request.block_hashes))
    assert len(request.block_ids) >= full, (request.request_id, len(request.block_ids), full)
    for i in range(request.num_published_blocks, known):
        blocks.publish(state.pool, request.block_ids[i], request.block_hashes[i], step.step)
        step.written.append(request.block_ids[i])
    request.num_published_blocks = max(request.num_published_blocks, known)
    if full > known and state.config.enable_prefix_caching:
        step.pending_publications.append(PendingPublication(request, request.epoch, full))


def _request_preempted(state: State, event: RequestPreempted) -> None:
    request = state.requests.by_handle[event.handle]
    assert request.status is RUNNING, request.request_id
    assert event.num_stale_output_tokens == request.num_in_flight_tokens, request.request_id
    queues.leave(state.queues, request)
    released = _end_epoch(state, request, event.stale_policy == "deliver")
    assert released == event.released_block_ids, request.request_id
    request.num_preemptions += 1
    queues.enter(state.queues, request, PREEMPTED)


def _end_epoch(state: State, request: Request, deliver: bool) -> list[int]:
    """Make what is in flight stale and let the blocks go."""
    deliverable = steps.mark_stale(state.window, request, "deliver" if deliver else "drop")
    fence = request.last_step if request.num_in_flight_tokens else None
    requests.raise_epoch(request, deliverable)
    released = requests.forget_computed(request)
    blocks.release(state.pool, released, fence)
    return released


def _output_delivered(state: State, event: OutputDelivered) -> None:
    step = state.window.in_flight[0]
    assert step.step == event.step, (step.step, event.step)
    block_size = state.pool.block_size if state.config.enable_prefix_caching else 0
    by_handle, tokens = state.requests.by_handle, iter(event.token_ids)
    counts = event.counts or [1] * len(event.handles)
    current = _entries(step, stale=False)
    for handle, count, index in zip(event.handles, counts, event.first_output_indices, strict=True):
        entry = next(current)
        request = by_handle[handle]
        assert step.handles[entry] == handle, (event.step, entry, handle)
        assert step.epochs[entry] == request.epoch, (request.request_id, step.epochs[entry], request.epoch)
        assert index == len(request.tokens) - request.num_prompt_tokens, (request.request_id, index)
        requests.settle_current(request, step.num_tokens[entry], entry not in step.chunk_entries)
        for _ in range(count):
            requests.append_token(request, next(tokens), block_size)
    assert next(tokens, None) is None, event.step
    step.delivered = True
    _resolve(state, step, len(event.handles))


def _stale_output_consumed(state: State, event: StaleOutputConsumed) -> None:
    step = state.window.in_flight[0]
    assert step.step == event.step, (step.step, event.step)
    block_size = state.pool.block_size if state.config.enable_prefix_caching else 0
    stale, tokens = _entries(step, stale=True), iter(event.token_ids)
    for i, (handle, count) in enumerate(zip(event.handles, event.counts, strict=True)):
        entry = next(stale)
        request = state.requests.by_handle[handle]
        assert step.handles[entry] == handle, (event.step, entry, handle)
        assert step.num_tokens[entry] == event.num_tokens[i], (event.step, handle)
        deliverable = step.stale[entry] == "deliver"
        requests.settle_stale(request, event.num_tokens[i], deliverable)
        returned = [next(tokens) for _ in range(count)]
        assert deliverable or not event.delivered[i], (event.step, handle)
        for token in returned if event.delivered[i] else ():
            requests.append_token(request, token, block_size)
        requests.forget_if_drained(state.requests, request)
    assert next(tokens, None) is None, event.step
    _resolve(state, step, len(event.handles))


def _entries(step: InFlightStep, *, stale: bool) -> Iterator[int]:
    """The entries of the step that are stale, or those that are not, in order."""
    return (entry for entry in range(len(step.handles)) if (entry in step.stale) is stale)


def _resolve(state: State, step: InFlightStep, num_entries: int) -> None:
    if not steps.resolve(state.window, step, num_entries):
        return
    blocks.step_came_back(state.pool, step.step, step.written)
    for request, epoch, full in step.pending_publications:
        if request.epoch != epoch:
            continue
        known = min(full, len(request.block_hashes))
        for i in range(request.num_published_blocks, known):
            blocks.publish(state.pool, request.block_ids[i], request.block_hashes[i], None)
        request.num_published_blocks = max(request.num_published_blocks, known)


def _request_finished(state: State, event: RequestFinished) -> None:
    request = state.requests.by_handle[event.handle]
    assert event.num_output_tokens == request.num_output_tokens, request.request_id
    queues.leave(state.queues, request)
    _end_epoch(state, request, deliver=False)
    requests.finish(state.requests, request, event.reason)


def _cache_reset(state: State, event: CacheReset) -> None:  # noqa: ARG001
    assert not state.queues.running, "a cache is reset with nothing running"
    blocks.forget_content(state.pool)


def _says_nothing_new(state: State, event: Event) -> None:
    """A fact for the audit: what it did is told by the events around it."""


APPLIERS: dict[type[Event], Callable[[State, Any], None]] = {
    EngineOpened: _engine_opened,
    EngineClosed: _engine_closed,
    WorkerStarted: _worker_started,
    WorkerLost: _worker_lost,
    RequestSubmitted: _request_submitted,
    StepScheduled: _step_scheduled,
    RequestPreempted: _request_preempted,
    OutputDelivered: _output_delivered,
    StaleOutputConsumed: _stale_output_consumed,
    RequestFinished: _request_finished,
    RequestAborted: _says_nothing_new,
    CacheReset: _cache_reset,
    StateDigest: _says_nothing_new,
}
