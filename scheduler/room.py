"""Room for a request's blocks: what it needs, whether that is there, and who gives way if it isn't.

Idle sessions give theirs up first, then sessions that wait, then, to those who run, the last of those who run. Blocks behind
a fence are as good as free, one step later: they are waited for, and nobody gives way for want of them.
"""

from refold.projections.requests import Request
from refold.scheduler import shaping
from refold.scheduler.plan_parts import Hit
from refold.scheduler.scratch import Plan


def make_room(plan: Plan, request: Request, missing: int) -> bool:
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


def needed_blocks(plan: Plan, request: Request, hit: Hit) -> int:
    """What must be free for a waiting request to come in: for its known tokens (or its first chunk), and the watermark."""
    config, block_size = plan.state.config, plan.block_size
    held = request.block_ids or hit.block_ids
    first = request.num_computed_tokens if request.block_ids else len(held) * block_size
    n = len(request.tokens) - first
    if not config.admit_full_sequence:
        n = shaping.capped(n, config, plan.token_budget)
    missing = -(-(first + n) // block_size) - len(held)
    return max(missing, 0) + (config.watermark_blocks if plan.num_running else 0)


def fits(plan: Plan, hit: Hit, needed: int) -> bool:
    """Whether `needed` blocks are free beside the hit. Those behind a fence are as good as free: nobody else gives way."""
    room = plan.free.num_free - len(hit.idle)
    plan.starved = room < needed <= room + plan.free.num_fenced
    return needed <= room
