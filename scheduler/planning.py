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
    block_size, free, special, num_drafts = plan.block_size, plan.free, plan.is_special, plan.num_drafts
    handles, num_tokens, first_positions = plan.handles, plan.num_tokens, plan.first_positions
    budget = plan.token_budget
    for index, request in enumerate(plan.state.queues.running):
        if index >= plan.num_running or not budget:
            break
        end, first = len(request.tokens) + request.num_output_placeholders, request.num_computed_tokens
        if end >= request.max_total_tokens:
            continue
        n = wanted = end - first
        shape = None
        if wanted != 1 or special or request.grammar or request.media or request.drafts:
            plan.token_budget = budget
            shape = shaping.running(plan, request, wanted)
            n = shape.num_tokens
            if n == 0:
                continue
        elif num_drafts:
            n += num_drafts
            if n > budget or end + n > request.max_total_tokens:
                n = max(min(n, budget, request.max_total_tokens - end), 1)
        new_block_ids: list[int] = []
        if first + n > len(request.block_ids) * block_size:
            missing = -(-(first + n) // block_size) - len(request.block_ids)
            if not make_room(plan, request, missing):
                continue
            new_block_ids = free.take(missing)
            plan.allocate(new_block_ids)
        if shape is not None:
            plan.note_shape(n, shape)
        elif num_drafts:
            plan.draft_counts.append(n - 1)
        handles.append(request.handle)
        num_tokens.append(n)
        first_positions.append(first)
        budget -= n
        full, published = (first + n) // block_size, request.num_published_blocks
        if full > published and len(request.block_hashes) > published:
            prefix_cache.promise(plan, request, request.block_ids + new_block_ids, published, full)
    plan.token_budget = budget


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
