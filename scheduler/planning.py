"""Planning a step: continuous batching with one rule.

Each request's computed tokens catch up with its known tokens, as far as the budgets allow. A prompt, a chunk of one, a
decode and a recomputation after preemption are the same thing: `n` tokens from `num_computed_tokens` on. An entry that
reaches the last known (or promised) position samples one more; one that doesn't is a chunk.

First those who run, in the order of the policy; if one needs blocks that aren't there, the last in that order gives way.
Then, if nobody had to give way and nobody waits for a fence, those who wait. A request whose deliverable stale output is
still in flight is passed over: it would sample a position that is about to be filled.

The step that is certain to reach a request's last token is its last: outputs known plus sampling entries in flight
count against the limit, so no step is wasted at any depth of the window.
"""

from refold.journal.events import Admission, EngineConfig, Event
from refold.projections.requests import Request
from refold.scheduler.scratch import Plan
from refold.scheduler.state import State


def plan_step(state: State) -> list[Event]:
    """The next step, with the preemptions that it takes; empty if there is nothing to do or no room in the window."""
    if not state.worker_alive or len(state.window.in_flight) >= state.config.max_in_flight_steps:
        return []
    plan = Plan(state)
    _plan_running(plan)
    if not plan.preemptions and not plan.starved:
        _plan_waiting(plan)
    return plan.events()


def _plan_running(plan: Plan) -> None:
    config, block_size, free = plan.state.config, plan.state.pool.block_size, plan.free
    for index, request in enumerate(plan.state.queues.running):
        if index >= plan.num_running or not plan.token_budget:
            return
        num_known, first = len(request.tokens), request.num_computed_tokens
        if num_known + request.num_sampling_in_flight >= request.max_total_tokens:
            continue
        wanted = num_known + request.num_output_placeholders - first
        n = 1 if wanted == 1 else _capped(wanted, config, plan.token_budget)
        table = request.block_ids
        missing = -(-(first + n) // block_size) - len(table)
        if missing > 0:
            if not _make_room(plan, request, missing):
                continue
            new_block_ids = free.take(missing)
            table = table + new_block_ids
            plan.allocate(new_block_ids)
        plan.add(request.handle, first, n, n == wanted)
        if n > 1 or not (first + 1) % block_size:
            _promise(plan, request, table, first + n)


def _capped(wanted: int, config: EngineConfig, token_budget: int) -> int:
    assert wanted >= 1, wanted
    cap = config.long_prefill_token_threshold
    return min(wanted, token_budget, cap) if cap else min(wanted, token_budget)


def _make_room(plan: Plan, request: Request, missing: int) -> bool:
    """Free `missing` blocks for a running request by preempting from the end of the order.

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
        victim = running[plan.num_running - 1]
        plan.preempt(victim, request, missing, "kv_pressure", "deliver")
        if victim is request:
            return False
    return True


def _plan_waiting(plan: Plan) -> None:
    config, free, block_size = plan.state.config, plan.free, plan.state.pool.block_size
    for request in plan.state.queues.waiting:
        if not plan.token_budget or plan.num_running >= config.max_num_seqs:
            return
        if request.num_deliverable_stale_tokens:
            continue
        hit = _prefix_hit(plan, request)
        if not _fits(plan, request, hit):
            return
        first, wanted = len(hit) * block_size, len(request.tokens) - len(hit) * block_size
        n = _capped(wanted, config, plan.token_budget)
        free.share(hit)
        new_block_ids = free.take(-(-(first + n) // block_size) - len(hit))
        plan.admissions.append(Admission(entry=len(plan.handles), epoch=request.epoch, hit_block_ids=hit))
        plan.allocate(new_block_ids)
        plan.add(request.handle, first, n, n == wanted)
        plan.num_running += 1
        _promise(plan, request, hit + new_block_ids, first + n)


def _prefix_hit(plan: Plan, request: Request) -> list[int]:
    """Blocks that hold the longest known prefix, at most all tokens but one: something must be computed to sample from."""
    hit: list[int] = []
    pool = plan.state.pool
    limit = (len(request.tokens) - 1) // pool.block_size
    for content_hash in request.block_hashes[:limit]:
        block = pool.block_by_hash.get(content_hash, plan.hashes.get(content_hash, -1))
        if block < 0 or block in plan.free.evicted or pool.is_fenced(block):
            break
        hit.append(block)
    return hit


def _fits(plan: Plan, request: Request, hit: list[int]) -> bool:
    """Whether a waiting request may come in: its known tokens (or its first chunk) fit, and the watermark stays free."""
    config, block_size = plan.state.config, plan.state.pool.block_size
    first = len(hit) * block_size
    n = len(request.tokens) - first
    if not config.admit_full_sequence:
        n = _capped(n, config, plan.token_budget)
    missing = -(-(first + n) // block_size) - len(hit)
    reserve = config.watermark_blocks if plan.num_running else 0
    return missing + reserve <= plan.free.num_free - plan.free.num_idle(hit)


def _promise(plan: Plan, request: Request, table: list[int], end: int) -> None:
    """Let later entries of this step share what this one is about to fill with known tokens."""
    pool = plan.state.pool
    full = min(end // pool.block_size, len(request.block_hashes))
    for i in range(request.num_published_blocks, full):
        if request.block_hashes[i] not in pool.block_by_hash:
            plan.hashes.setdefault(request.block_hashes[i], table[i])
