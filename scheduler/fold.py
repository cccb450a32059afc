"""The fold: what each event does to the state.

`fold` is the only caller of appliers, and appliers are the only code that changes state. Live running, replay, recovery
and audit fold with the same code; there is no flag that tells them apart.

An applier decides nothing. It asserts that the event fits the state: one that doesn't is a bug of ours or a damaged journal.
"""

from collections.abc import Callable, Iterable
from typing import Any

from refold.journal.content import is_placeholder
from refold.journal.events import (
    CacheReset,
    ContentRedacted,
    DraftsProposed,
    EngineClosed,
    EngineOpened,
    EnginePaused,
    EngineResumed,
    Event,
    GrammarReady,
    LogitsRecorded,
    LogprobsDelivered,
    OutputDelivered,
    PromptLogprobsDelivered,
    QuarantineLifted,
    RequestAborted,
    RequestFinished,
    RequestPreempted,
    RequestQuarantined,
    RequestSubmitted,
    SessionClosed,
    SessionExtended,
    SessionTurnEnded,
    StaleOutputConsumed,
    StateDigest,
    StepScheduled,
    WorkerLost,
    WorkerStarted,
)
from refold.projections import asking, blocks, counters, queues, requests, steps, suspicion
from refold.projections.encoder import EncoderCache
from refold.projections.requests import IDLE, PREEMPTED, RUNNING, Request
from refold.scheduler.fold_steps import output_delivered, stale_output_consumed, step_scheduled
from refold.scheduler.media import let_go_media
from refold.scheduler.redaction import content_redacted
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
    state.config = event.config
    state.engine_epoch = event.engine_epoch
    state.is_open = True
    state.pool = blocks.BlockPool(event.config.num_blocks, event.config.block_size)
    state.encoder = EncoderCache(event.config.encoder_cache_tokens)
    state.paused = None
    for request in state.requests.live():
        requests.reconfigure(request, event.config)
    queues.reorder(state.queues, event.config)


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
    was_alone = bool(event.suspects) and len(state.window.in_flight[0].requests) == 1
    state.window.in_flight.clear()
    for request in list(state.requests.by_handle.values()):
        counters.lose_in_flight(request)
        requests.forget_if_drained(state.requests, request)
    for handle in event.handles:
        _start_over(state, state.requests.by_handle[handle])
    state.pool = blocks.BlockPool(state.config.num_blocks, state.config.block_size)
    state.encoder = EncoderCache(state.config.encoder_cache_tokens)
    suspicion.suspect(state.suspicion, event.suspects, alone=was_alone)


def _start_over(state: State, request: Request) -> None:
    requests.forget_computed(request)
    counters.raise_epoch(request, 0)
    request.media_held.clear()
    if request.status is RUNNING:
        queues.leave(state.queues, request)
        queues.enter(state.queues, request, PREEMPTED)


def _request_submitted(state: State, event: RequestSubmitted) -> None:
    request = requests.submit(state.requests, event, state.config)
    asking.note_wishes(state.requests, request)
    if is_placeholder(event.prompt_token_ids[0]):
        state.unknown.add(event.handle)
    queues.arrive(state.queues, request, state.config, state.requests.next_handle - 1)
    queues.forget_past(state.queues)


def _grammar_ready(state: State, event: GrammarReady) -> None:
    request = state.requests.by_handle[event.handle]
    assert request.waits_for_grammar, request.request_id
    request.waits_for_grammar = False


def _session_extended(state: State, event: SessionExtended) -> None:
    request = state.requests.by_handle[event.handle]
    assert not request.input_closed, request.request_id
    request.chunks.append(event)
    if request.status is IDLE:
        queues.leave(state.queues, request)
        _begin_turn(state, request)


def _session_closed(state: State, event: SessionClosed) -> None:
    request = state.requests.by_handle[event.handle]
    assert not request.input_closed, request.request_id
    request.input_closed = True


def _session_turn_ended(state: State, event: SessionTurnEnded) -> None:
    request = state.requests.by_handle[event.handle]
    assert event.num_output_tokens == request.num_output_tokens, request.request_id
    assert request.resumable, request.request_id
    queues.leave(state.queues, request)
    steps.mark_stale(state.window, request, "drop")
    counters.raise_epoch(request, 0)
    requests.end_turn(request, event.time_ns)
    if request.chunks:
        _begin_turn(state, request)
    else:
        queues.enter(state.queues, request, IDLE)


def _begin_turn(state: State, request: Request) -> None:
    """Apply the next chunk of a session that is in no queue, and let it wait for a place: a new one."""
    if request.run is not None:
        blocks.split(state.pool, request.run)
        request.run = None
    released = requests.begin_turn(request, request.chunks.popleft(), state.config)
    blocks.release(state.pool, released, steps.last_step_of(state.window, request))
    asking.note_wishes(state.requests, request)
    queues.arrive(state.queues, request, state.config, state.requests.next_handle - 1)
    queues.forget_past(state.queues)


def _request_preempted(state: State, event: RequestPreempted) -> None:
    request = state.requests.by_handle[event.handle]
    assert (request.status is RUNNING) == (event.reason != "session_reclaimed"), request.request_id
    assert event.num_stale_output_tokens == request.num_in_flight_tokens, request.request_id
    released = _end_epoch(state, request, event.stale_policy == "deliver")
    assert released == event.released_block_ids, request.request_id
    if request.status is RUNNING:
        request.num_preemptions += 1
        queues.leave(state.queues, request)
        queues.enter(state.queues, request, PREEMPTED)


def _end_epoch(state: State, request: Request, deliver: bool) -> list[int]:
    """Make what is in flight stale and let the blocks go."""
    deliverable, fence = steps.mark_stale(state.window, request, "deliver" if deliver else "drop")
    counters.raise_epoch(request, deliverable)
    run, released = request.run, requests.forget_computed(request)
    blocks.release(state.pool, released, fence, run)
    if request.media_held:
        let_go_media(state, request)
    return released


def _request_finished(state: State, event: RequestFinished) -> None:
    request = state.requests.by_handle[event.handle]
    assert event.num_output_tokens == request.next_output_index, request.request_id
    queues.leave(state.queues, request)
    _end_epoch(state, request, deliver=False)
    requests.finish(state.requests, request, event.reason)
    suspicion.forget(state.suspicion, request.handle)


def _cache_reset(state: State, event: CacheReset) -> None:  # noqa: ARG001
    assert not state.queues.running, "a cache is reset with nothing running"
    blocks.forget_content(state.pool)
    state.encoder = EncoderCache(state.config.encoder_cache_tokens)


def _drafts_proposed(state: State, event: DraftsProposed) -> None:
    counters.attach_drafts(state.requests.by_handle[event.handle], event.token_ids)


def _pause_changed(state: State, event: EnginePaused | EngineResumed) -> None:
    state.paused = event.mode if isinstance(event, EnginePaused) else None


def _request_quarantined(state: State, event: RequestQuarantined) -> None:
    request_id = state.requests.by_handle[event.handle].request_id
    assert state.suspicion.num_losses[event.handle] == event.num_lost_workers, request_id
    suspicion.quarantine(state.suspicion, event.content_digest, event.handle, request_id)


def _quarantine_lifted(state: State, event: QuarantineLifted) -> None:
    suspicion.lift(state.suspicion, [event.handle])


def _says_nothing_new(state: State, event: Event) -> None:
    """A fact for the audit: what it did is told by the events around it."""


APPLIERS: dict[type[Event], Callable[[State, Any], None]] = {
    EngineOpened: _engine_opened,
    EngineClosed: _engine_closed,
    WorkerStarted: _worker_started,
    WorkerLost: _worker_lost,
    RequestSubmitted: _request_submitted,
    GrammarReady: _grammar_ready,
    SessionExtended: _session_extended,
    SessionClosed: _session_closed,
    SessionTurnEnded: _session_turn_ended,
    StepScheduled: step_scheduled,
    DraftsProposed: _drafts_proposed,
    RequestPreempted: _request_preempted,
    OutputDelivered: output_delivered,
    StaleOutputConsumed: stale_output_consumed,
    RequestFinished: _request_finished,
    CacheReset: _cache_reset,
    EnginePaused: _pause_changed,
    EngineResumed: _pause_changed,
    RequestQuarantined: _request_quarantined,
    QuarantineLifted: _quarantine_lifted,
    ContentRedacted: content_redacted,
    **dict.fromkeys(
        (RequestAborted, LogprobsDelivered, PromptLogprobsDelivered, LogitsRecorded, StateDigest),
        _says_nothing_new,
    ),
}
