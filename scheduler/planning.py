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
from refold.projections.requests import WAITING, Request
from refold.scheduler import prefix_cache, shaping
from refold.scheduler.free_blocks import Hit
from refold.scheduler.scratch import Plan
from refold.scheduler.state import State


def plan_step(state: State) -> list[Event]:
    """The next step, with the preemptions that it takes; empty if there is nothing to do or no room in the window."""
    if not (state.is_open and state.worker_alive) or len(state.window.in_flight) >= state.config.max_in_flight_steps:
        return []
    if state.paused == "all":
        return []
    plan = Plan(state)
    _plan_running(plan)
    if not plan.preemptions and not plan.starved:
        _plan_waiting(plan)
    return plan.events()


def _plan_running(plan: Plan) -> None:
    block_size, free, special, num_drafts = plan.block_size, plan.free, plan.is_special, plan.num_drafts
    handles, num_tokens, first_positions = plan.handles, plan.num_tokens, plan.first_positions
    for index, request in enumerate(plan.state.queues.running):
        if index >= plan.num_running or not plan.token_budget:
            return
        end, first = len(request.tokens) + request.num_output_placeholders, request.num_computed_tokens
        if end >= request.max_total_tokens:
            continue
        n = wanted = end - first
        shape = None
        if wanted != 1 or special or request.grammar or request.media or request.drafts:
            shape = shaping.running(plan, request, wanted)
            n = shape.num_tokens
            if n == 0:
                continue
        elif num_drafts:
            n += num_drafts
            if n > plan.token_budget or end + n > request.max_total_tokens:
                n = max(min(n, plan.token_budget, request.max_total_tokens - end), 1)
        new_block_ids: list[int] = []
        missing = -(-(first + n) // block_size) - len(request.block_ids)
        if missing > 0:
            if not _make_room(plan, request, missing):
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
        plan.token_budget -= n
        published = request.num_published_blocks
        if len(request.block_hashes) > published < (first + n) // block_size:
            prefix_cache.promise(plan, request, request.block_ids + new_block_ids, published, (first + n) // block_size)


def _make_room(plan: Plan, request: Request, missing: int) -> bool:
    """Free `missing` blocks for a running request, at the cost of those who come later.

    False if the request can't be scheduled now: it waits for blocks behind a fence, or was preempted itself. Whoever
    waits for a fence keeps later requests from taking what it waits for. A fenced victim is no reason for one more.
    """
    running = plan.state.queues.running
    if plan.starved:
        return False
    while plan.free.num_free < missing:
        if plan.free.num_free + plan.free.num_fenced >= missing:
            plan.starved = True
            return False
        if plan.reclaim_session(request, missing):
            continue
        victim = running[plan.num_running - 1]
        plan.preempt(victim, request, missing)
        if victim is request:
            return False
    return True


def _plan_waiting(plan: Plan) -> None:
    held_back = plan.state.paused is not None
    for request in plan.state.queues.waiting:
        if not plan.token_budget or plan.num_running >= plan.state.config.max_num_seqs:
            return
        if _passed_over(plan, request, held_back):
            continue
        hit = prefix_cache.prefix_hit(plan, request)
        while not _fits(plan, hit, needed := _needed_blocks(plan, request, hit)):
            if plan.starved or not plan.reclaim_session(request, needed):
                return
            hit = prefix_cache.prefix_hit(plan, request)
        _admit(plan, request, hit)


def _passed_over(plan: Plan, request: Request, held_back: bool) -> bool:
    """Whether others may go before a waiting request in this step."""
    never_ran = request.status is WAITING and request.num_earlier_outputs == 0 and not request.block_ids
    return (
        request.num_deliverable_stale_tokens > 0
        or request.waits_for_grammar
        or request.handle in plan.reclaimed
        or (held_back and never_ran)
    )


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


def _needed_blocks(plan: Plan, request: Request, hit: Hit) -> int:
    """What must be free for a waiting request to come in: for its known tokens (or its first chunk), and the watermark."""
    config, block_size = plan.state.config, plan.block_size
    held = request.block_ids or hit.block_ids
    first = request.num_computed_tokens if request.block_ids else len(held) * block_size
    n = len(request.tokens) - first
    if not config.admit_full_sequence:
        n = shaping.capped(n, config, plan.token_budget)
    missing = -(-(first + n) // block_size) - len(held)
    return max(missing, 0) + (config.watermark_blocks if plan.num_running else 0)


def _fits(plan: Plan, hit: Hit, needed: int) -> bool:
    """Whether `needed` blocks are free beside the hit. Those behind a fence are as good as free: nobody else gives way."""
    room = plan.free.num_free - len(hit.idle)
    plan.starved = room < needed <= room + plan.free.num_fenced
    return needed <= room
