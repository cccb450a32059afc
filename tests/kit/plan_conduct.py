"""Conduct of a plan: what a `ScheduleStep` must lead to, judged from its facts and the state that it was decided in."""

from collections import Counter
from collections.abc import Sequence

from refold.journal.events import Event, RequestPreempted, StepScheduled
from refold.projections.requests import WAITING, Request
from refold.scheduler.stall import stall_report
from refold.scheduler.state import State
from tests.kit.misconduct import Misconduct, must


def judge_plan(state: State, events: Sequence[Event]) -> None:
    """The facts of a `ScheduleStep`: preemptions, then a step or none."""
    if events:
        must(state.paused != "all", "pause", "a paused engine plans")
    step = events[-1] if events and type(events[-1]) is StepScheduled else None
    taken = {event.handle for event in events if type(event) is RequestPreempted}
    tried = tried_alone(state)
    if step is not None:
        _judge_entries(state, step)
        _judge_admissions(state, step, taken, tried)
        must(
            tried is None or tried.issuperset(step.handles), "trial", step.handles, "run and", tried, "are tried alone"
        )
    elif not taken and not state.window.in_flight:
        report = stall_report(state)
        must(not report.is_wedged, "stall", report)
    if taken:
        _judge_reclaims(state, step, events)
        _judge_need(state, step, events)
        gave_way = [e for e in events if type(e) is RequestPreempted and e.reason == "kv_pressure"]
        comes_in = step is not None and step.admissions
        must(not (gave_way and comes_in), "preemption", "somebody comes in with the step for which another gave way")
    if not taken or not any(type(e) is RequestPreempted and e.reason == "isolated" for e in events):
        _judge_diligence(state, step, taken)


def tried_alone(state: State) -> set[int] | None:
    """The first half of those whom the most workers were lost with, if that was no accident; after a verdict, the others."""
    losses, by_handle = state.suspicion.num_losses, state.requests.by_handle
    if not losses:
        return None
    ready = [h for h in losses if losses[h] > 1 and by_handle[h].status in ("running", "preempted")]
    harmless = {h for h, r in by_handle.items() if r.status in ("running", "preempted") and h not in losses}
    if ready and state.suspicion.is_unproved and harmless:
        return harmless
    worst = [h for h in sorted(ready) if all(losses[h] >= losses[other] for other in ready)]
    return set(worst[: len(worst) // 2] or worst) if worst else None


def _judge_reclaims(state: State, step: StepScheduled | None, events: Sequence[Event]) -> None:
    """Sessions that wait give their blocks up after those that are idle, but for those that a newcomer shares."""
    shared = {block for admission in (step.admissions if step else ()) for block in admission.hit_block_ids}
    idle = {r.handle for r in state.queues.idle if r.block_ids and shared.isdisjoint(r.block_ids)}
    for event in events:
        if type(event) is not RequestPreempted or event.reason != "session_reclaimed":
            continue
        waits = state.requests.by_handle[event.handle].status is WAITING
        must(not waits or not idle, "preemption", event.handle, "waits and gives way, idle sessions hold blocks:", idle)
        idle.discard(event.handle)


def _judge_need(state: State, step: StepScheduled | None, events: Sequence[Event]) -> None:
    """Nobody gives way while there is room, or will be when a step in flight has come back."""
    pool, by_handle = state.pool, state.requests.by_handle
    room, released = pool.num_free + pool.num_fenced, Counter[int]()
    for event in events:
        if type(event) is not RequestPreempted:
            continue
        if event.reason == "kv_pressure":
            needy, used = by_handle[event.for_handle or 0], 0
            for each in step.allocations if step is not None else ():
                used += len(each.block_ids) * (by_handle[step.handles[each.entry]].queue_key < needy.queue_key)
            must(room - used < event.needed_blocks, "preemption", f"for {event.needed_blocks} blocks of {room - used}")
        for block in event.released_block_ids:
            released[block] += 1
            room += released[block] == pool.ref_counts[block]


def _judge_entries(state: State, step: StepScheduled) -> None:
    config, by_handle = state.config, state.requests.by_handle
    most_drafts = drafts_allowed(state)
    num_running = len(step.handles) - len(step.admissions)
    cap, last = config.long_prefill_token_threshold, None
    for entry, (handle, n, first) in enumerate(zip(step.handles, step.num_tokens, step.first_positions, strict=True)):
        request = by_handle[handle]
        drafts = step.num_drafts[entry] if step.num_drafts else 0
        end, name = max(len(request.tokens), request.num_computed_tokens + 1), request.request_id
        samples = entry not in step.chunk_entries
        must(samples == (first + n - drafts == end), "chunks", name, "ends at", first + n, "of", end)
        if request.waits_for_grammar:
            raise Misconduct(f"grammar: {name} runs before its grammar is ready")
        if cap and n - drafts > cap:
            raise Misconduct(f"prefill cap: {name} computes {n} of at most {cap}")
        if drafts and (drafts > most_drafts or not samples):
            raise Misconduct(f"drafts: {name} has {drafts} in a batch that may have {most_drafts}, or in a chunk")
        if end + (drafts + 1) * samples > request.max_total_tokens:
            raise Misconduct(f"early stop: {name} computes for {end + drafts + samples} of {request.max_total_tokens}")
        if entry < num_running:
            must(last is None or last < request.queue_key, "policy", name, "runs before its betters")
            last = request.queue_key
            must(not _held_by_cadence(state, request), "cadence", name, "samples too soon")


def _held_by_cadence(state: State, request: Request) -> bool:
    """Whether an own sample in flight keeps a request from the next step."""
    stagger = state.config.decode_stagger
    if (stagger == 1 and not request.grammar) or not request.num_sampling_in_flight:
        return False
    if request.grammar:
        return True
    last = -stagger
    for step in state.window.in_flight:
        if request.handle in step.handles and not step.delivered:
            entry = step.handles.index(request.handle)
            if step.epochs[entry] == request.epoch and entry not in step.chunk_entries:
                last = step.step
    return state.window.next_step - last < stagger


def drafts_allowed(state: State) -> int:
    """The most drafts that an entry may have in a batch like this."""
    config = state.config
    if config.speculation == "off":
        return 0
    if not config.speculation_by_batch:
        return config.num_speculative_tokens
    rows = [drafts for batch, drafts in config.speculation_by_batch if len(state.queues.running) <= batch]
    return min(rows[0], config.num_speculative_tokens) if rows else 0


def _judge_admissions(state: State, step: StepScheduled, taken: set[int], tried: set[int] | None) -> None:
    """Nobody comes in before his betters, but for those who can't come in now."""
    if not step.admissions:
        return
    by_handle = state.requests.by_handle
    came = [by_handle[step.handles[admission.entry]] for admission in step.admissions]
    keys = [r.queue_key for r in came]
    must(keys == sorted(keys), "policy", "admissions out of order")
    for request, admission in zip(came, step.admissions, strict=True):
        must(not _never_ran(request) or state.paused is None, "pause", request.request_id, "is new and comes in")
        must(request.handle not in taken, "preemption", request.request_id, "comes back in the step that preempts it")
        _judge_hit(state, step, request, admission.hit_block_ids, taken)
    for request in state.queues.waiting:
        if request in came or request.queue_key > keys[-1]:
            continue
        excused = (
            request.num_deliverable_stale_tokens
            or request.waits_for_grammar
            or request.media
            or request.handle in taken
            or (tried is not None and request.handle not in tried)
            or (state.paused is not None and _never_ran(request))
        )
        must(excused, "policy", request.request_id, "is passed over")


def _never_ran(request: Request) -> bool:
    return request.status is WAITING and not request.num_earlier_outputs and not request.block_ids


def _judge_hit(state: State, step: StepScheduled, request: Request, hit: Sequence[int], taken: set[int]) -> None:
    """A prefix that is known is used, up to the last token; but whose prompt is to be told of computes all of it."""
    pool, have = state.pool, len(hit)
    if request.sampling.prompt_logprobs is not None and len(request.tokens) == request.num_prompt_tokens:
        must(not hit, "prefix", request.request_id, "shares", have, "blocks of the prompt that is to be told of")
        return
    if request.block_ids or have >= (len(request.tokens) - 1) // pool.block_size or have >= len(request.block_hashes):
        return
    block = pool.block_by_hash.get(request.block_hashes[have])
    if block is None or pool.is_fenced(block) or block in step.evicted_block_ids:
        return
    released = [b for handle in taken for b in state.requests.by_handle[handle].block_ids]
    must(block in released, "prefix", request.request_id, "computes what block", block, "holds, after", have, "hits")


def _judge_diligence(state: State, step: StepScheduled | None, taken: set[int]) -> None:
    """Whoever runs and needs nothing but tokens is in the step, if there are tokens left."""
    config = state.config
    if state.paused == "all" or not state.worker_alive or len(state.window.in_flight) >= config.max_in_flight_steps:
        return
    left = config.max_num_batched_tokens - (sum(step.num_tokens) if step is not None else 0)
    if left <= 0:
        return
    in_step, most_drafts = frozenset(step.handles if step is not None else ()), drafts_allowed(state)
    for request in state.queues.running:
        if request.handle in in_step or request.media or request.handle in taken:
            continue
        end = max(len(request.tokens), request.num_computed_tokens + 1)
        needs = min(end + most_drafts, request.num_computed_tokens + config.max_num_batched_tokens)
        if end >= request.max_total_tokens:
            continue
        if needs > len(request.block_ids) * config.block_size and (step is None or not step.admissions):
            continue
        must(_held_by_cadence(state, request), "diligence", request.request_id, "is left out with", left, "tokens left")


def judge_room(state: State, step: StepScheduled) -> None:
    """Who came in left the watermark free and, if it must, had room for all its tokens. After the step."""
    config, pool = state.config, state.pool
    num_running = len(step.handles) - len(step.admissions)
    was_running = len(state.queues.running) - len(step.admissions)
    assert num_running <= was_running, step.step
    if was_running or len(step.admissions) > 1:
        must(pool.num_free >= config.watermark_blocks, "watermark", pool.num_free, "free after step", step.step)
    if config.admit_full_sequence:
        handle = step.handles[-1]
        request = state.requests.by_handle[handle]
        missing = -(-len(request.tokens) // pool.block_size) - len(request.block_ids)
        spare = config.watermark_blocks if was_running or len(step.admissions) > 1 else 0
        must(missing + spare <= pool.num_free, "full fit", request.request_id, "came in,", missing, "blocks short")
