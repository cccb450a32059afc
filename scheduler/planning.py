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

from collections.abc import Iterable

from refold.journal.events import Admission, Event
from refold.projections.requests import Request
from refold.scheduler import prefix_cache, shaping
from refold.scheduler.free_blocks import Hit
from refold.scheduler.room import fits, make_room, needed_blocks
from refold.scheduler.scratch import Plan
from refold.scheduler.state import State
from refold.scheduler.trials import on_trial


def plan_step(state: State) -> list[Event]:
    """The next step, with the preemptions that it takes; empty if there is nothing to do or no room in the window."""
    if not (state.is_open and state.worker_alive) or len(state.window.in_flight) >= state.config.max_in_flight_steps:
        return []
    if state.paused == "all":
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
    """In order: runs of plain decodes as columns, the others one by one."""
    running = plan.state.queues.running
    handles = [request.handle for request in running]
    firsts = [request.num_computed_tokens for request in running]
    careful: Iterable[int] = range(len(running))
    if not plan.is_special:
        careful = [
            i for i, (first, request) in enumerate(zip(firsts, running, strict=True)) if first >= request.plain_until
        ]
    start = 0
    for index in careful:
        _plan_plain(plan, handles, firsts, start, index)
        if index >= plan.num_running or not plan.token_budget:
            return
        _plan_careful(plan, running[index])
        start = index + 1
    _plan_plain(plan, handles, firsts, start, len(running))


def _plan_plain(plan: Plan, handles: list[int], firsts: list[int], start: int, stop: int) -> None:
    """Decodes that need nothing but their token, of the running requests `start` to `stop`: see `note_plain`."""
    stop, n = min(stop, plan.num_running), 1 + plan.num_drafts
    if (stop - start) * n > plan.token_budget:
        for request in plan.state.queues.running[start:stop]:
            if plan.token_budget:
                _plan_careful(plan, request)
        return
    if stop <= start:
        return
    plan.handles += handles[start:stop]
    plan.first_positions += firsts[start:stop]
    plan.num_tokens += [n] * (stop - start)
    if plan.num_drafts:
        plan.draft_counts += [n - 1] * (stop - start)
    plan.token_budget -= n * (stop - start)


def _plan_careful(plan: Plan, request: Request) -> None:
    """Whatever a request that runs may want."""
    first, block_size, num_drafts = request.num_computed_tokens, plan.block_size, plan.num_drafts
    end = len(request.tokens) + request.num_output_placeholders
    if end >= request.max_total_tokens:
        return
    n, shape = 1, None
    if end - first != 1 or plan.is_special or request.grammar or request.media or request.drafts:
        shape = shaping.running(plan, request, end - first)
        n = shape.num_tokens
        if n == 0:
            return
    elif num_drafts:  # the worker proposes them: as many as the budget and the limit leave
        n = max(min(1 + num_drafts, plan.token_budget, request.max_total_tokens - end), 1)
    full, published, table = (first + n) // block_size, request.num_published_blocks, request.block_ids
    if first + n > len(table) * block_size:
        missing = -(-(first + n) // block_size) - len(table)
        if not make_room(plan, request, missing):
            return
        new_block_ids = plan.free.take(missing)
        plan.allocate(new_block_ids)
        table = table + new_block_ids
    if shape is not None:
        plan.note_shape(n, shape)
    elif num_drafts:
        plan.draft_counts.append(n - 1)
    plan.handles.append(request.handle)
    plan.num_tokens.append(n)
    plan.first_positions.append(first)
    plan.token_budget -= n
    if full > published and len(request.block_hashes) > published:
        prefix_cache.promise(plan, request, table, published, full)


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
    shape = shaping.waiting(plan, request, first)
    n = shape.num_tokens
    if n == 0:
        return
    held = request.block_ids or hit.block_ids
    plan.free.share(hit.idle)
    missing = -(-(first + n) // plan.block_size) - len(held)
    new_block_ids = plan.free.take(missing) if missing > 0 else []
    plan.admissions.append(Admission(entry=len(plan.handles), epoch=request.epoch, hit_block_ids=hit.block_ids))
    if new_block_ids:
        plan.allocate(new_block_ids)
    plan.note_shape(n, shape)
    plan.handles.append(request.handle)
    plan.num_tokens.append(n)
    plan.first_positions.append(first)
    plan.token_budget -= n
    plan.num_running += 1
    prefix_cache.promise(plan, request, held + new_block_ids, first // plan.block_size, (first + n) // plan.block_size)
