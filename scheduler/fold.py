"""The fold: what each event does to the state.

`fold` is the only caller of appliers, and appliers are the only code that changes state. Live running, replay, recovery
and audit fold with the same code; there is no flag that tells them apart.

An applier decides nothing. It asserts that the event fits the state: one that doesn't is a bug of ours or a damaged journal.
"""

from collections.abc import Callable, Iterable
from itertools import compress, repeat
from typing import Any

from refold.journal.content import is_placeholder
from refold.journal.events import (
    Admission,
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
from refold.projections import asking, blocks, encoder, queues, requests, steps, suspicion
from refold.projections.encoder import EncoderCache
from refold.projections.requests import IDLE, PREEMPTED, RUNNING, Request
from refold.projections.steps import InFlightStep
from refold.scheduler.media import hold_media, let_go_media
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
    state.opened_config = event.config
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
        requests.lose_in_flight(request)
        requests.forget_if_drained(state.requests, request)
    for handle in event.handles:
        _start_over(state, state.requests.by_handle[handle])
    state.pool = blocks.BlockPool(state.config.num_blocks, state.config.block_size)
    state.encoder = EncoderCache(state.config.encoder_cache_tokens)
    suspicion.suspect(state.suspicion, event.suspects, alone=was_alone)


def _start_over(state: State, request: Request) -> None:
    requests.raise_epoch(request, 0)
    requests.forget_computed(request)
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
    requests.end_turn(request, event.time_ns)
    steps.mark_stale(state.window, request, "drop")
    requests.raise_epoch(request, 0)
    if request.chunks:
        _begin_turn(state, request)
    else:
        queues.enter(state.queues, request, IDLE)


def _begin_turn(state: State, request: Request) -> None:
    """Apply the next chunk of a session that is in no queue, and let it wait for a place: a new one."""
    released = requests.begin_turn(request, request.chunks.popleft(), state.config)
    blocks.release(state.pool, released, steps.last_step_of(state.window, request))
    asking.note_wishes(state.requests, request)
    queues.arrive(state.queues, request, state.config, state.requests.next_handle - 1)
    queues.forget_past(state.queues)


def _step_scheduled(state: State, event: StepScheduled) -> None:
    """Who ran already first, then who comes in, one by one: each may share what those before it are about to write."""
    entries = list(map(state.requests.by_handle.__getitem__, event.handles))
    step = steps.open_step(state.window, event, entries)
    num_running = event.admissions[0].entry if event.admissions else len(entries)
    assert [a.entry for a in event.admissions] == list(range(num_running, len(entries))), event.step
    evicted: list[int] = []
    allocations = {allocation.entry: allocation.block_ids for allocation in event.allocations}
    for entry, block_ids in allocations.items():
        if entry < num_running:
            evicted += _allocate(state, entries[entry], block_ids)
    for digest in event.encoder_evictions:
        encoder.evict(state.encoder, digest)
    unsettled = [entry for entry, request in enumerate(entries[:num_running]) if not request.plain_until]
    for entry in unsettled:
        if len(entries[entry].block_hashes) > entries[entry].num_published_blocks:
            _publish_known(state, step, event, entry)
    for admission in event.admissions:
        entry = admission.entry
        _admit(state, entries[entry], admission)
        if entry in allocations:
            evicted += _allocate(state, entries[entry], allocations[entry])
        _publish_known(state, step, event, entry)
    assert evicted == event.evicted_block_ids or state.unknown, (evicted, event.evicted_block_ids)
    _enter_window(state, step, event, num_running)
    block_size, num_drafts = state.pool.block_size, state.config.num_speculative_tokens
    for entry in {*unsettled, *allocations, *range(num_running, len(entries))}:
        requests.note_plain(entries[entry], block_size, num_drafts)
    for item in event.encoder_inputs:
        hold_media(state, step, entries[item.entry], item)


def _enter_window(state: State, step: InFlightStep, event: StepScheduled, num_running: int) -> None:
    """Count the entries as scheduled. Those who ran already mostly decode, one token each."""
    entries, chunks, start = step.requests, step.chunk_entries, 0
    if event.num_tokens[:num_running].count(1) == num_running and not (chunks and min(chunks) < num_running):
        start = num_running
        requests.schedule_decodes(step.step, entries[:start], event.first_positions[:start])
    if start < len(entries):
        samples = [entry not in chunks for entry in range(start, len(entries))]
        requests.schedule(step.step, entries[start:], event.num_tokens[start:], event.first_positions[start:], samples)
    if step.num_drafts or state.config.speculation != "off":
        requests.schedule_drafts(entries, step.num_drafts or repeat(0, len(entries)))


def _allocate(state: State, request: Request, block_ids: list[int]) -> list[int]:
    assert request.status is RUNNING, request.request_id
    request.block_ids.extend(block_ids)
    return blocks.take(state.pool, block_ids)


def _admit(state: State, request: Request, admission: Admission) -> None:
    assert request.epoch == admission.epoch, (request.request_id, request.epoch, admission.epoch)
    assert request.num_deliverable_stale_tokens == 0, request.request_id
    queues.leave(state.queues, request)
    queues.enter(state.queues, request, RUNNING)
    if request.block_ids:
        assert not admission.hit_block_ids, request.request_id
        return
    for block, content_hash in (
        zip(admission.hit_block_ids, request.block_hashes, strict=False) if state.unknown else ()
    ):
        blocks.believe(state.pool, block, content_hash)
    blocks.share(state.pool, admission.hit_block_ids)
    request.block_ids = list(admission.hit_block_ids)
    request.num_published_blocks = len(admission.hit_block_ids)
    request.num_computed_tokens = len(admission.hit_block_ids) * state.pool.block_size


def _publish_known(state: State, step: InFlightStep, event: StepScheduled, entry: int) -> None:
    """Publish what an entry of `step` fills with tokens that are known already."""
    request = step.requests[entry]
    full = (event.first_positions[entry] + event.num_tokens[entry]) // state.pool.block_size
    assert len(request.block_ids) >= full, (request.request_id, len(request.block_ids), full)
    known = min(full, len(request.block_hashes))
    if known <= request.num_published_blocks:
        return
    new = slice(request.num_published_blocks, known)
    blocks.publish(state.pool, request.block_ids[new], request.block_hashes[new], step.step)
    step.written += request.block_ids[new]
    request.num_published_blocks = known


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
    requests.raise_epoch(request, deliverable)
    released = requests.forget_computed(request)
    blocks.release(state.pool, released, fence)
    if request.media_held:
        let_go_media(state, request)
    return released


def _output_delivered(state: State, event: OutputDelivered) -> None:
    step = state.window.in_flight[0]
    assert step.step == event.step, (step.step, event.step)
    entries, handles, num_tokens, num_drafts = step.requests, step.handles, step.num_tokens, step.num_drafts
    if step.stale:
        current = [i for i in range(len(entries)) if i not in step.stale]
        entries = [entries[i] for i in current]
        handles = [handles[i] for i in current]
        num_tokens = [num_tokens[i] for i in current]
        num_drafts = [num_drafts[i] for i in current] if num_drafts else []
    assert event.handles == handles, event.step
    assert event.first_output_indices == [len(r.tokens) - r.first_output_position for r in entries], event.step
    block_size, tokens = _hashed_block_size(state), event.token_ids
    if num_drafts:
        counts = event.counts or repeat(1, len(entries))
        step.filled = requests.settle_drafts(entries, num_tokens, num_drafts, counts, tokens, block_size)
    elif event.counts:
        step.filled = requests.settle_chunks(entries, num_tokens, event.counts, tokens, block_size)
    else:
        step.filled = requests.settle_decodes(entries, num_tokens, tokens, block_size)
    for request in entries if state.encoder.sizes else ():
        let_go_media(state, request, request.next_position)
    if state.suspicion.num_losses or state.suspicion.is_unproved:
        suspicion.got_tokens(state.suspicion, compress(event.handles, event.counts) if event.counts else event.handles)
    step.delivered = True
    _resolve(state, step, len(entries))


def _hashed_block_size(state: State) -> int:
    return state.pool.block_size if state.config.enable_prefix_caching else 0


def _stale_output_consumed(state: State, event: StaleOutputConsumed) -> None:
    step = state.window.in_flight[0]
    assert step.step == event.step, (step.step, event.step)
    stale, tokens = sorted(step.stale), iter(event.token_ids)
    assert event.handles == [step.handles[entry] for entry in stale], event.step
    assert event.num_tokens == [step.num_tokens[entry] for entry in stale], event.step
    for entry, n, count, delivered in zip(stale, event.num_tokens, event.counts, event.delivered, strict=True):
        request, deliverable = step.requests[entry], step.stale[entry] == "deliver"
        assert deliverable or not delivered, (event.step, request.request_id)
        requests.settle_stale(request, n, deliverable)
        returned = [next(tokens) for _ in range(count)]
        if delivered:
            requests.append_stale(request, returned, _hashed_block_size(state))
            suspicion.got_tokens(state.suspicion, [request.handle] if count else [])
        requests.forget_if_drained(state.requests, request)
    assert next(tokens, None) is None, event.step
    _resolve(state, step, len(stale))


def _resolve(state: State, step: InFlightStep, num_entries: int) -> None:
    if not steps.resolve(state.window, step, num_entries):
        return
    blocks.step_came_back(state.pool, step.step, step.written)
    block_size, num_drafts = state.pool.block_size, state.config.num_speculative_tokens
    for request in step.filled:
        # The last token is known but not computed: where drafts were rejected, its place holds another's keys and values.
        full = (len(request.tokens) - 1) // block_size
        if full > request.num_published_blocks:
            new = slice(request.num_published_blocks, full)
            blocks.publish(state.pool, request.block_ids[new], request.block_hashes[new], None)
            request.num_published_blocks = full
            if request.status is RUNNING:
                requests.note_plain(request, block_size, num_drafts)


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
    requests.attach_drafts(state.requests.by_handle[event.handle], event.token_ids)


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
    StepScheduled: _step_scheduled,
    DraftsProposed: _drafts_proposed,
    RequestPreempted: _request_preempted,
    OutputDelivered: _output_delivered,
    StaleOutputConsumed: _stale_output_consumed,
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
