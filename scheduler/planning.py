"""Planning a step: continuous batching with one rule.

Each request's computed tokens catch up with its known tokens, as far as the budgets allow. A prompt, a chunk of one, a
decode and a recomputation after preemption are the same thing: `n` tokens from `num_computed_tokens` on. An entry that
reaches the last known (or promised) position samples one more; one that doesn't is a chunk.

First those who run, in the order of the policy; if one needs blocks that aren't there, idle sessions give theirs up, then
sessions that wait, then the last of those who run gives way. Then, if nobody had to give way and nobody waits for a fence,
those who wait. A request whose deliverable stale output is still in flight is passed over: it would sample a position that
is about to be filled.

What is in flight counts against a request's limit, drafts as if accepted, so no step is wasted at any depth of the window.
Without drafts a placeholder is a token that will come; with them, a request that may have reached its limit waits to hear.
"""

from refold.journal.events import Admission, BlockAllocation, Event
from refold.projections.batch import without
from refold.projections.requests import Request
from refold.scheduler import prefix_cache, shaping
from refold.scheduler.commands import ScheduleStep
from refold.scheduler.plan_parts import Hit, Shape
from refold.scheduler.room import fits, make_room, needed_blocks
from refold.scheduler.scratch import Plan
from refold.scheduler.state import State
from refold.scheduler.trials import on_trial


def plan_step(state: State, command: ScheduleStep) -> list[Event]:  # noqa: ARG001 - there is nothing to say
    """The next step, with the preemptions that it takes; empty if there is nothing to do or no room in the window."""
    if not (state.is_open and state.worker_alive) or len(state.window.in_flight) >= state.config.max_in_flight_steps:
        return []
    if state.paused == "all":
        return []
    if not (state.queues.running or state.queues.waiting):
        return []
    plan = Plan(state)
    trial = on_trial(state)
    if trial is not None and plan.isolate(trial):
        return plan.events()
    _plan_running(plan)
    if not plan.preemptions and not plan.starved:
        _plan_waiting(plan, trial)
    return plan.events()


def _plan_running(plan: Plan) -> None:
    """In order. Decodes make runs, which become columns at once; whoever wants anything else is planned alone.

    That takes a budget for all who are left. Where it is short, each of them is planned alone.
    """
    running, n = plan.state.queues.running, 1 + plan.num_drafts
    if plan.is_special or n * len(running) > plan.token_budget:
        return _plan_each(plan, 0)
    handles, firsts = _running_columns(plan)
    assert len(handles) == len(running), (len(handles), len(running))
    start = 0
    for index in [i for i, request in enumerate(running) if request.num_computed_tokens >= request.plain_until]:
        if index >= plan.num_running:
            break
        request, first = running[index], firsts[index]
        is_decode = _is_decode(request, first, n)
        if is_decode and _take_blocks(plan, request, first + n, len(plan.handles) + index - start):
            continue
        _end_run(plan, handles, firsts, start, index)
        start = index + 1
        if not is_decode:
            _plan_alone(plan, request)
            if n * (len(running) - start) > plan.token_budget:
                return _plan_each(plan, start)
    return _end_run(plan, handles, firsts, start, len(running))


def _running_columns(plan: Plan) -> tuple[list[int], list[int]]:
    """Handles and computed tokens of those who run: mostly the last step's, less those who have left."""
    running, in_flight = plan.state.queues.running, plan.state.window.in_flight
    if in_flight and in_flight[-1].sampled_positions:
        last, left = in_flight[-1], sorted(in_flight[-1].stale, reverse=True)
        if without(last.requests, left) == running:
            return without(last.handles, left), without(last.sampled_positions, left)
    batch = plan.state.window.last_batch
    handles = batch.handles if batch.requests == running else [request.handle for request in running]
    return handles, [request.num_computed_tokens for request in running]


def _plan_each(plan: Plan, start: int) -> None:
    """All from `start` on alone, as long as there is budget."""
    for index in range(start, plan.num_running):
        if index >= plan.num_running or not plan.token_budget:
            return
        _plan_alone(plan, plan.state.queues.running[index])


def _is_decode(request: Request, first: int, n: int) -> bool:
    """Whether a request decodes `n` tokens, its drafts included, and nobody has a say in that."""
    return not (
        len(request.tokens) > first + 1
        or first + n >= request.max_total_tokens
        or request.grammar
        or request.media
        or request.drafts
    )


def _end_run(plan: Plan, handles: list[int], firsts: list[int], start: int, stop: int) -> None:
    """Add the running requests from `start` to `stop`: each decodes, and has its blocks."""
    stop = min(stop, plan.num_running)
    count, n = stop - start, 1 + plan.num_drafts
    if count <= 0:
        return
    assert n * count <= plan.token_budget, (n, count, plan.token_budget)
    plan.handles += handles[start:stop]
    plan.first_positions += firsts[start:stop]
    plan.num_tokens += [n] * count
    if plan.num_drafts:
        plan.draft_counts += [n - 1] * count
    plan.token_budget -= n * count


def _take_blocks(plan: Plan, request: Request, end: int, entry: int) -> bool:
    """Blocks for a running request's positions up to `end`, if it has none; False if it can't have them now."""
    block_size, table, published = plan.block_size, request.block_ids, request.num_published_blocks
    has_news = len(request.block_hashes) > published and bool(plan.state.queues.waiting)
    if end > len(table) * block_size:
        missing = -(-end // block_size) - len(table)
        if (plan.starved or plan.free.num_free < missing) and not make_room(plan, request, missing):
            return False
        new_block_ids = plan.free.take(missing)
        plan.allocations.append(BlockAllocation(entry=entry, block_ids=new_block_ids))
        if has_news:
            table = table + new_block_ids
    if has_news:
        prefix_cache.promise(plan, request, table, published, end // block_size)
    return True


def _plan_alone(plan: Plan, request: Request) -> None:
    """Whatever a request that runs may want."""
    first, known = request.num_computed_tokens, len(request.tokens)
    end = known if known > first else first + 1  # behind all that is known, or will be
    if end >= request.max_total_tokens:
        return
    shape = shaping.running(plan, request, end - first)
    if shape.num_tokens == 0 or not _take_blocks(plan, request, first + shape.num_tokens, len(plan.handles)):
        return
    _add(plan, request.handle, first, shape)


def _plan_waiting(plan: Plan, trial: frozenset[int] | None) -> None:
    held_back = plan.state.paused is not None
    for request in plan.state.queues.waiting:
        if not plan.token_budget or plan.num_running >= plan.state.config.max_num_seqs:
            return
        if shaping.passed_over(plan, request, held_back) or (trial is not None and request.handle not in trial):
            continue
        hit = prefix_cache.prefix_hit(plan, request)
        while not fits(plan, hit, needed := needed_blocks(plan, request, hit)):
            if plan.starved or not plan.reclaim_session(request, needed):
                return
            hit = prefix_cache.prefix_hit(plan, request)
        _admit(plan, request, hit)


def _admit(plan: Plan, request: Request, hit: Hit) -> None:
    first = request.num_computed_tokens if request.block_ids else len(hit.block_ids) * plan.block_size
    shape, entry = shaping.waiting(plan, request, first), len(plan.handles)
    end = first + shape.num_tokens
    if end == first:
        return
    table = request.block_ids or hit.block_ids
    if hit.idle:
        plan.free.share(hit.idle)
    plan.admissions.append(Admission(entry=entry, epoch=request.epoch, hit_block_ids=hit.block_ids))
    missing = -(-end // plan.block_size) - len(table)
    if missing > 0:
        new_block_ids = plan.free.take(missing)
        plan.allocations.append(BlockAllocation(entry=entry, block_ids=new_block_ids))
        table = table + new_block_ids
    _add(plan, request.handle, first, shape)
    plan.num_running += 1
    prefix_cache.promise(plan, request, table, first // plan.block_size, end // plan.block_size)


def _add(plan: Plan, handle: int, first: int, shape: Shape) -> None:
    """One more entry."""
    plan.note_shape(shape)
    plan.handles.append(handle)
    plan.num_tokens.append(shape.num_tokens)
    plan.first_positions.append(first)
    plan.token_budget -= shape.num_tokens
