"""Appliers of what happens to steps: one enters the window, its output comes back. For the fold."""

from itertools import compress, repeat

from refold.journal.events import Admission, OutputDelivered, StaleOutputConsumed, StepScheduled
from refold.projections import blocks, counters, encoder, queues, requests, steps, suspicion
from refold.projections.requests import RUNNING, Request
from refold.projections.steps import InFlightStep
from refold.scheduler.media import hold_media, let_go_media
from refold.scheduler.state import State


def step_scheduled(state: State, event: StepScheduled) -> None:
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
        counters.note_plain(entries[entry], block_size, num_drafts)
    for item in event.encoder_inputs:
        hold_media(state, step, entries[item.entry], item)


def _enter_window(state: State, step: InFlightStep, event: StepScheduled, num_running: int) -> None:
    """Count the entries as scheduled. Those who ran already mostly decode, one token each."""
    entries, chunks, start = step.requests, step.chunk_entries, 0
    positions, num_tokens = event.first_positions, event.num_tokens
    only_decodes = num_tokens[:num_running].count(1) == num_running and not (chunks and min(chunks) < num_running)
    if only_decodes and state.config.speculation == "off":
        start = num_running
        counters.schedule_decodes(step.step, entries[:start], positions[:start])
    if start < len(entries):
        samples = [entry not in chunks for entry in range(start, len(entries))]
        drafts = step.num_drafts[start:] or [0] * len(samples)
        counters.schedule(step.step, entries[start:], num_tokens[start:], positions[start:], samples, drafts)


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


def output_delivered(state: State, event: OutputDelivered) -> None:
    """The current entries of the oldest step came back."""
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
        step.filled = counters.settle_drafts(entries, num_tokens, num_drafts, counts, tokens, block_size)
    elif event.counts:
        step.filled = counters.settle_chunks(entries, num_tokens, event.counts, tokens, block_size)
    else:
        step.filled = counters.settle_decodes(entries, num_tokens, tokens, block_size)
    for request in entries if state.encoder.sizes else ():
        let_go_media(state, request, request.next_position)
    if state.suspicion.num_losses or state.suspicion.is_unproved:
        suspicion.got_tokens(state.suspicion, compress(event.handles, event.counts) if event.counts else event.handles)
    step.delivered = True
    _resolve(state, step, len(entries))


def _hashed_block_size(state: State) -> int:
    return state.pool.block_size if state.config.enable_prefix_caching else 0


def stale_output_consumed(state: State, event: StaleOutputConsumed) -> None:
    """The stale entries of the oldest step came back."""
    step = state.window.in_flight[0]
    assert step.step == event.step, (step.step, event.step)
    stale, tokens = sorted(step.stale), iter(event.token_ids)
    assert event.handles == [step.handles[entry] for entry in stale], event.step
    assert event.num_tokens == [step.num_tokens[entry] for entry in stale], event.step
    for entry, n, count, delivered in zip(stale, event.num_tokens, event.counts, event.delivered, strict=True):
        request, deliverable = step.requests[entry], step.stale[entry] == "deliver"
        assert deliverable or not delivered, (event.step, request.request_id)
        counters.settle_stale(request, n, deliverable)
        returned = [next(tokens) for _ in range(count)]
        if delivered:
            counters.append_stale(request, returned, _hashed_block_size(state))
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
                counters.note_plain(request, block_size, num_drafts)
