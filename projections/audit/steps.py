"""Steps in rows: what was scheduled, and what came of each entry."""

from collections import Counter
from collections.abc import Sequence

from refold.journal.content import is_placeholder
from refold.journal.events import Admission, OutputDelivered, StaleOutputConsumed, StepScheduled
from refold.projections.audit.now import Now, release, resumed, settle_stale
from refold.projections.audit.schema import (
    CHUNK,
    DECODE,
    DELIVERED,
    PREFILL,
    STALE_DELIVERED,
    STALE_DROPPED,
    bucket_of,
)
from refold.projections.audit.story import Request, Step, Written


def step_scheduled(now: Now, event: StepScheduled) -> None:
    """A step enters the window."""
    story, handles = now.story, event.handles
    entries = [story.requests[handle] for handle in handles]
    if event.step in story.steps:
        now.violated("contradiction", "a step was scheduled twice", None, event.step)
    _hand_out_blocks(now, event, entries)
    kinds = _kinds(event, entries)
    prefill = sum(n for n, kind in zip(event.num_tokens, kinds, strict=True) if kind != DECODE)
    num_hit_tokens = sum(len(a.hit_block_ids) for a in event.admissions) * story.block_size
    step = Step(
        step=event.step,
        position=now.position,
        event_index=now.index,
        time_ns=now.time_ns,
        engine_epoch=now.engine_epoch,
        num_entries=len(handles),
        num_tokens=sum(event.num_tokens),
        num_prefill_tokens=prefill,
        num_decode_entries=kinds.count(DECODE),
        num_prefill_entries=kinds.count(PREFILL),
        num_chunk_entries=len(event.chunk_entries),
        num_admitted=len(event.admissions),
        num_hit_tokens=num_hit_tokens,
        num_drafts=sum(event.num_drafts),
        num_new_blocks=sum(len(a.block_ids) for a in event.allocations),
        num_evicted_blocks=len(event.evicted_block_ids),
        num_owned_blocks=len(story.owners),
        num_blocks=story.life.num_blocks if story.life is not None else 0,
        num_running=story.num_running,
        num_waiting=story.num_waiting,
        num_steps_in_flight=len(story.steps) + 1,
        handles=handles,
        tokens=event.num_tokens,
        first_positions=event.first_positions,
        drafts=event.num_drafts,
        kinds=kinds,
        epochs=[request.epoch for request in entries],
    )
    story.steps[event.step] = step
    _schedule(now, event, step, entries)


def _hand_out_blocks(now: Now, event: StepScheduled, entries: Sequence[Request]) -> None:
    """Who ran already first, then who comes in, one by one: each may share what those before it are about to write."""
    first_new = event.admissions[0].entry if event.admissions else len(entries)
    late = {}
    for allocation in event.allocations:
        if allocation.entry < first_new:
            _allocate(now, event.step, entries[allocation.entry], allocation.block_ids)
        else:
            late[allocation.entry] = allocation.block_ids
    for admission in event.admissions:
        _admit(now, event, entries[admission.entry], admission)
        if admission.entry in late:
            _allocate(now, event.step, entries[admission.entry], late[admission.entry])


def _kinds(event: StepScheduled, entries: Sequence[Request]) -> list[int]:
    """What each entry computes."""
    drafts = event.num_drafts or [0] * len(entries)
    kinds = [
        DECODE if n - d == 1 and first >= request.prompt_end else PREFILL
        for request, n, d, first in zip(entries, event.num_tokens, drafts, event.first_positions, strict=True)
    ]
    for entry in event.chunk_entries:
        kinds[entry] = CHUNK
    return kinds


def _schedule(now: Now, event: StepScheduled, step: Step, entries: Sequence[Request]) -> None:
    """Count the entries."""
    story, rows = now.story, now.rows
    for request, n, first in zip(entries, event.num_tokens, event.first_positions, strict=True):
        if request.num_computed != first:
            now.violated("contradiction", f"first position {first}, {request.num_computed} computed", request.handle)
        request.num_computed = first + n
        request.num_in_flight_tokens += n
        request.num_scheduled_tokens += n
        rows.requests[request.handle] = request
        if request.is_session:
            _publish(now, request, (first + n) // story.block_size)
    for request, drafts in zip(entries, event.num_drafts, strict=False):
        request.num_drafted_tokens += drafts
    counts = rows.minutes[now.minute]
    counts.add(num_steps=1, num_scheduled_tokens=step.num_tokens, num_prefill_tokens=step.num_prefill_tokens)
    counts.add(num_entries=step.num_entries, num_hit_tokens=step.num_hit_tokens, num_drafted_tokens=step.num_drafts)
    counts.add(num_owned_blocks=step.num_owned_blocks, max_owned_blocks=step.num_owned_blocks)
    counts.add(max_running=step.num_running, max_waiting=step.num_waiting)
    _count_tenants(now, entries, event.num_tokens, 2)
    story.num_request_events += step.num_entries
    if story.life is not None:
        story.life.num_steps += 1


def _publish(now: Now, request: Request, full: int) -> None:
    """As many blocks of a session as are full are found by their content."""
    life = now.story.life
    if life is not None and life.has_prefix_caching:
        request.num_published = max(request.num_published, min(full, request.num_known // life.block_size))


def _admit(now: Now, event: StepScheduled, request: Request, admission: Admission) -> None:
    """A request comes in, with the blocks that it shares or kept."""
    story = now.story
    now.expect(request.epoch, admission.epoch, "epoch at admission", request.handle)
    num_hit = len(admission.hit_block_ids) * story.block_size
    if request.status != "running":
        story.num_running += 1
        story.num_waiting -= 1
    if request.preemption:
        resumed(now, request, event.step, num_hit)
    if request.first_scheduled_ns is None:
        request.first_scheduled_ns, request.first_scheduled_step = now.time_ns, event.step
        request.num_cached_tokens = num_hit
        now.lasted("queued", request.submitted_ns)
    request.status = "running"
    if request.block_ids:
        return
    for block in admission.hit_block_ids:
        story.owners[block] = story.owners.get(block, 0) + 1
    request.block_ids = list(admission.hit_block_ids)
    request.num_computed = num_hit
    request.num_published = len(admission.hit_block_ids)
    _tell_hits(now, event.step, admission, request)


def _tell_hits(now: Now, step: int, admission: Admission, request: Request) -> None:
    """One row for each run of shared blocks that one request had filled in one step."""
    writers, size, start = now.story.writers, now.story.block_size, 0
    blocks = admission.hit_block_ids
    sources = [writers.get(block) for block in blocks]
    for index, source in enumerate(sources):
        if source is not None and source.index != index:
            message = f"block {blocks[index]} is shared as number {index}, it was filled as number {source.index}"
            now.violated("prefix cache", message, request.handle, step)
        if index + 1 < len(blocks) and _who(sources[index + 1]) == _who(source):
            continue
        num = index + 1 - start
        place = (now.rows.projection_id, step, admission.entry, start, request.handle)
        now.rows.hits.append((*place, start * size, num * size, num, *_who(source)))
        start = index + 1


def _who(source: Written | None) -> tuple[int | None, int | None]:
    return (None, None) if source is None else (source.handle, source.step)


def _allocate(now: Now, step: int, request: Request, block_ids: Sequence[int]) -> None:
    """A request owns new blocks."""
    owners, writers = now.story.owners, now.story.writers
    index = len(request.block_ids)
    for block in block_ids:
        if block in owners:
            now.violated("blocks", f"block {block} was taken while somebody owns it", request.handle, step)
        owners[block] = 1
        writers[block] = Written(request.handle, index, step)
        index += 1
    request.block_ids.extend(block_ids)


# -- what came of it --------------------------------------------------------------------------------------------------


def output_delivered(now: Now, event: OutputDelivered) -> None:
    """The current entries of a step came back."""
    story, rows, handles = now.story, now.rows, event.handles
    step = story.steps[event.step]
    entries: Sequence[int] = range(step.num_entries)
    if step.stale:
        entries = [entry for entry in entries if entry not in step.stale]
        if [step.handles[entry] for entry in entries] != handles:
            raise ValueError(f"step {event.step} came back for {handles[:20]}, which are not its current entries")
    elif handles != step.handles:
        raise ValueError(f"step {event.step} came back for {handles[:20]}, which are not its entries")
    counts = event.counts or [1] * len(handles)
    accepted = event.accepted_drafts or [0] * len(handles)
    drafts, target = step.drafts, rows.entry_updates if step.is_written else rows.entries
    head, index, tokens = (rows.projection_id, event.step), now.index, step.tokens
    columns = zip(entries, handles, counts, event.first_output_indices, accepted, strict=True)
    for entry, handle, count, first, num_accepted in columns:
        n, num_drafts = tokens[entry], drafts[entry] if drafts else 0
        fate = (DELIVERED, index, count, first if count else None, num_accepted)
        place = (step.epochs[entry], step.first_positions[entry], n, num_drafts, step.kinds[entry])
        target.append((*head, entry, handle, *place, *fate))
        request = story.requests[handle]
        request.num_in_flight_tokens -= n
        rows.requests[handle] = request
        if num_drafts and count:
            request.num_computed -= num_drafts + 1 - count
            _verified(now, request, num_drafts, num_accepted)
    _give_out(
        now, step, [*zip(entries, handles, counts, event.first_output_indices, accepted, strict=True)], event.token_ids
    )
    step.is_delivered = True
    step.num_output_tokens += len(event.token_ids)
    story.num_request_events += len(handles)
    if len(handles) == step.num_entries:
        _came_back(now, step)


def _verified(now: Now, request: Request, num_drafts: int, num_accepted: int) -> None:
    """Drafts were verified: which of them were right, by their place."""
    request.num_accepted_tokens += num_accepted
    for place in range(num_drafts):
        counts = now.rows.speculation[place, now.minute]
        counts[0] += 1
        counts[1] += place < num_accepted
    now.rows.minutes[now.minute].add(num_accepted_tokens=num_accepted)


_Given = tuple[int, int, int, int, int]


def _give_out(now: Now, step: Step, given: Sequence[_Given], token_ids: Sequence[int]) -> None:
    """Tokens went out: `given` is entry, handle, how many, index of the first, accepted drafts."""
    story, rows, gaps = now.story, now.rows, Counter[int]()
    pid, number, time_ns, offset = rows.projection_id, step.step, now.time_ns, 0
    for entry, handle, count, first, accepted in given:
        if not count:
            continue
        request = story.requests[handle]
        if first != request.num_output_tokens:
            message = f"output {first} was delivered, {request.num_output_tokens} is next"
            now.violated("output order", message, handle, number)
        for place in range(count):
            token = token_ids[offset + place]
            known = None if is_placeholder(token) else token
            rows.tokens.append((pid, handle, first + place, known, number, entry, int(place < accepted)))
        offset += count
        if request.last_token_ns is None:
            request.first_token_ns = time_ns
            now.lasted("first_token", request.submitted_ns)
        else:
            gap = time_ns - request.last_token_ns
            gaps[gap] += 1
            if request.max_inter_token_ns is None or gap > request.max_inter_token_ns:
                request.max_inter_token_ns = gap
        if count > 1:
            gaps[0] += count - 1
        request.last_token_ns = time_ns
        request.num_output_tokens += count
        request.num_known += count
        rows.requests[handle] = request
    for gap, number_of in gaps.items():
        rows.durations[now.minute, "inter_token", bucket_of(gap) if gap > 0 else 0] += number_of
    if offset:
        rows.minutes[now.minute].add(num_output_tokens=offset)
        _count_tenants(now, [story.requests[g[1]] for g in given], [g[2] for g in given], 3)
        if story.life is not None:
            story.life.num_output_tokens += offset


def stale_output_consumed(now: Now, event: StaleOutputConsumed) -> None:
    """The stale entries of a step came back."""
    story, rows = now.story, now.rows
    step, offset = story.steps[event.step], 0
    stale = sorted(step.stale)
    if [step.handles[entry] for entry in stale] != event.handles:
        raise ValueError(f"step {event.step} came back stale for {event.handles[:20]}, which are not its stale entries")
    accepted = event.accepted_drafts or [0] * len(stale)
    target = rows.entry_updates if step.is_written else rows.entries
    for place, entry in enumerate(stale):
        request, count, first = (
            story.requests[event.handles[place]],
            event.counts[place],
            event.first_output_indices[place],
        )
        is_out = event.delivered[place]
        outcome = STALE_DELIVERED if is_out else STALE_DROPPED
        now.expect(step.tokens[entry], event.num_tokens[place], "stale tokens", request.handle)
        fate = (outcome, now.index, count, first if is_out else None, accepted[place])
        target.append(rows.entry(step, entry, fate))
        settle_stale(now, step.stale[entry], outcome, count)
        request.num_in_flight_tokens -= step.tokens[entry]
        if is_out:
            given = (entry, request.handle, count, first, accepted[place])
            _give_out(now, step, [given], event.token_ids[offset : offset + count])
            request.num_stale_tokens_delivered += count
            step.num_output_tokens += count
        else:
            request.num_stale_tokens_dropped += count
        offset += count
        now.touch(request)
        forget_if_over(now, request)
    delivered = sum(count for count, is_out in zip(event.counts, event.delivered, strict=True) if is_out)
    rows.minutes[now.minute].add(
        num_stale_tokens_delivered=delivered, num_stale_tokens_dropped=sum(event.counts) - delivered
    )
    story.num_request_events += len(stale)
    _came_back(now, step)


def _came_back(now: Now, step: Step) -> None:
    """All of a step's entries are resolved."""
    step.outcome, step.resolved_position, step.resolved_ns = DELIVERED, now.position, now.time_ns
    now.rows.steps.append(step)
    del now.story.steps[step.step]
    older = min(now.story.steps, default=step.step)
    if older < step.step:
        now.violated("step order", f"step {step.step} came back before step {older}", None, step.step)
    for handle in step.handles:
        request = now.story.requests.get(handle)
        if request is not None and request.is_session and request.block_ids:
            _publish(now, request, (request.num_known - 1) // now.story.block_size)


def _count_tenants(now: Now, entries: Sequence[Request], counts: Sequence[int], place: int) -> None:
    tenants, minute = now.rows.tenants, now.minute
    if len(now.story.tenants) == 1 and entries:
        tenants[entries[0].tenant, minute][place] += sum(counts)
        return
    for request, count in zip(entries, counts, strict=True):
        tenants[request.tenant, minute][place] += count


def forget_if_over(now: Now, request: Request) -> None:
    """A request that has ended is forgotten when nothing of it is in flight any more."""
    if request.status == "finished" and not request.num_in_flight_tokens:
        now.story.requests.pop(request.handle, None)
        preemption = now.story.preemptions.pop(request.preemption, None)
        if preemption is not None:
            preemption.is_over = True


__all__ = ["forget_if_over", "output_delivered", "release", "stale_output_consumed", "step_scheduled"]
