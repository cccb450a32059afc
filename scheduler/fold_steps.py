"""Appliers of what happens to steps: one enters the window, its output comes back. For the fold."""

from itertools import compress, repeat
from operator import add, sub

from refold.journal.events import Admission, OutputDelivered, StaleOutputConsumed, StepScheduled
from refold.projections import blocks, counters, encoder, queues, requests, steps, suspicion
from refold.projections.requests import RUNNING, Request
from refold.projections.steps import InFlightStep
from refold.scheduler.media import hold_media, let_go_media
from refold.scheduler.state import State


def step_scheduled(state: State, event: StepScheduled) -> None:
    """Who ran already first, then who comes in, one by one: each may share what those before it are about to write."""
    step = steps.open_step(state.window, event, state.requests.by_handle)
    entries, admissions = step.requests, event.admissions
    num_running = len(entries) - len(admissions)
    running = entries[:num_running] if admissions else entries
    allocations = {each.entry: each.block_ids for each in event.allocations}
    growing = [(entries[entry], block_ids) for entry, block_ids in allocations.items() if entry < num_running]
    evicted = _allocate_each(state, growing) if growing else []
    for digest in event.encoder_evictions:
        encoder.evict(state.encoder, digest)
    margin = 2 if state.config.speculation == "off" else 0
    step.due_entries = _due_entries(running, margin)
    _publish_known(state, step, event, [entry for entry in step.due_entries if not entries[entry].plain_until])
    if admissions:
        evicted += _admit_each(state, step, event, allocations)
    assert evicted == event.evicted_block_ids or state.unknown, (evicted, event.evicted_block_ids)
    _enter_window(state, step, event, num_running)
    _look_anew(state, step, num_running)
    for item in event.encoder_inputs:
        hold_media(state, step, entries[item.entry], item)


def _admit_each(state: State, step: InFlightStep, event: StepScheduled, allocations: dict[int, list[int]]) -> list[int]:
    """The newcomers, in order. Returns the blocks that lost a content by it."""
    evicted: list[int] = []
    for entry, admission in enumerate(event.admissions, len(step.requests) - len(event.admissions)):
        assert admission.entry == entry, (event.step, admission.entry, entry)
        request = step.requests[entry]
        _admit(state, request, admission)
        if entry in allocations:
            evicted += _allocate_each(state, [(request, allocations[entry])])
        _publish_known(state, step, event, [entry])
        step.due_entries.append(entry)
    return evicted


def _look_anew(state: State, step: InFlightStep, num_running: int) -> None:
    """Of those who are due: until when they decode plainly from here on, and whose token will be the last."""
    block_size, num_drafts = state.pool.block_size, state.max_drafts
    requests, samples_all = step.requests, bool(step.sampled_positions)
    for entry in step.due_entries:
        request = requests[entry]
        if request.num_computed_tokens > request.plain_until or entry >= num_running:
            counters.note_plain(request, block_size, num_drafts)
        if samples_all and request.num_computed_tokens + 1 >= request.max_total_tokens:
            step.last_entries.append(entry)


def _due_entries(running: list[Request], margin: int) -> list[int]:
    """The entries that aren't sure to be plain decodes, or may not be `margin` positions later.

    The token that an entry brings lies one behind the place that it computes; if it's the last of a block, the first of one or
    at the limit, a margin of 2 has noticed it.
    """
    return [e for e, request in enumerate(running) if request.num_computed_tokens + margin >= request.plain_until]


def _enter_window(state: State, step: InFlightStep, event: StepScheduled, num_running: int) -> None:
    """Count the entries as scheduled. Those who ran already mostly decode, one token each."""
    entries, chunks, start = step.requests, step.chunk_entries, 0
    positions, num_tokens = event.first_positions, event.num_tokens
    if state.config.speculation == "off" and not chunks:
        step.sampled_positions = list(map(add, positions, num_tokens))
        if num_tokens[:num_running].count(1) == num_running:
            start = num_running
            if start == len(entries):
                counters.schedule_decodes(step.step, entries, positions, step.sampled_positions)
                return
            counters.schedule_decodes(step.step, entries[:start], positions[:start], step.sampled_positions[:start])
    if start < len(entries):
        samples = [entry not in chunks for entry in range(start, len(entries))]
        drafts = step.num_drafts[start:] or [0] * len(samples)
        counters.schedule(step.step, entries[start:], num_tokens[start:], positions[start:], samples, drafts)


def _allocate_each(state: State, allocations: list[tuple[Request, list[int]]]) -> list[int]:
    """New blocks for requests that run; returns those that lost a content by it."""
    taken: list[int] = []
    for request, block_ids in allocations:
        assert request.status is RUNNING, request.request_id
        request.block_ids.extend(block_ids)
        taken += block_ids
    return blocks.take(state.pool, taken) if taken else taken


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
    request.run = blocks.share(state.pool, admission.hit_block_ids)
    request.block_ids = list(admission.hit_block_ids)
    request.num_published_blocks = len(admission.hit_block_ids)
    request.num_computed_tokens = len(admission.hit_block_ids) * state.pool.block_size


def _publish_known(state: State, step: InFlightStep, event: StepScheduled, chosen: list[int]) -> None:
    """Publish what these entries of `step` fill with tokens that are known already."""
    block_size, written, hashes = state.pool.block_size, step.written, []
    num_written, requests = len(written), step.requests
    firsts, num_tokens = event.first_positions, event.num_tokens
    for entry in chosen:
        request = requests[entry]
        full = (firsts[entry] + num_tokens[entry]) // block_size
        assert len(request.block_ids) >= full, (request.request_id, len(request.block_ids), full)
        published, known = request.num_published_blocks, len(request.block_hashes)
        known = known if known < full else full
        if known > published:
            written += request.block_ids[published:known]
            hashes += request.block_hashes[published:known]
            request.num_published_blocks = known
    if hashes:
        blocks.publish(state.pool, written[num_written:], hashes, step.step)


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
    assert event.first_output_indices == _next_indices(step, entries), event.step
    block_size, tokens = _hashed_block_size(state), event.token_ids
    if step.sampled_positions and not step.stale:
        assert not event.counts, event.step
        step.filled = counters.settle_decodes(step, tokens, block_size)
    else:
        counts, drafts = event.counts or repeat(1, len(entries)), num_drafts or repeat(0, len(entries))
        step.filled = counters.settle(entries, num_tokens, drafts, counts, tokens, block_size)
    for request in entries if state.encoder.sizes else ():
        let_go_media(state, request, request.next_position)
    if state.suspicion.num_losses or state.suspicion.is_unproved:
        suspicion.got_tokens(state.suspicion, compress(event.handles, event.counts) if event.counts else event.handles)
    step.delivered = True
    _resolve(state, step, len(entries))


def _next_indices(step: InFlightStep, current: list[Request]) -> list[int]:
    """The output index of the next token of each current entry; `settle_decodes` sees to it that the sampled positions are right."""
    if step.sampled_positions and not step.stale:
        return list(map(sub, step.sampled_positions, step.batch.first_output_positions))
    return [len(request.tokens) - request.first_output_position for request in current]


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
    blocks.step_came_back(state.pool, step.step)
    if step.filled:
        _publish_filled(state, step.filled)


def _publish_filled(state: State, filled: list[Request]) -> None:
    """Publish blocks that were filled with tokens not known when their step was scheduled."""
    block_size, num_drafts = state.pool.block_size, state.max_drafts
    block_ids: list[int] = []
    hashes: list[bytes] = []
    for request in filled:
        # The last token is known but not computed: where drafts were rejected, its place holds another's keys and values.
        full, published = (len(request.tokens) - 1) // block_size, request.num_published_blocks
        if full > published:
            block_ids += request.block_ids[published:full]
            hashes += request.block_hashes[published:full]
            request.num_published_blocks = full
            if request.status is RUNNING:
                counters.note_plain(request, block_size, num_drafts)
    if hashes:
        blocks.publish(state.pool, block_ids, hashes, None)
