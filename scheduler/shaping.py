"""Shaping an entry: how many tokens of a request a step takes, and what goes with them.

The plain decode needs none of this. It is asked for prompts and chunks (budgets and caps), under pipeline parallelism
(the distance between two samples of a request), with speculation (drafts), with media (the encoder's output must be there
before the places that it fills) and with grammars (a constrained token needs all earlier tokens known).
"""

from refold.journal.events import EngineConfig
from refold.projections.requests import WAITING, Request
from refold.scheduler.drafting import prompt_lookup
from refold.scheduler.plan_parts import Shape
from refold.scheduler.scratch import Plan

_NOT_NOW = Shape(0, is_chunk=True)


def running(plan: Plan, request: Request, wanted: int) -> Shape:
    """The shape of a request that runs and wants to compute `wanted` tokens."""
    config = plan.state.config
    if (config.decode_stagger > 1 or request.grammar) and request.num_sampling_in_flight:
        too_close = plan.state.window.next_step - request.last_sampling_step < config.decode_stagger
        if too_close or request.grammar:
            return _NOT_NOW
    if wanted > 1 or request.media:
        return _prefill(plan, request, request.num_computed_tokens, wanted)
    return _decode(plan, request, config)


def waiting(plan: Plan, request: Request, first: int) -> Shape:
    """The shape of a request that comes in and computes from `first` on."""
    return _prefill(plan, request, first, len(request.tokens) - first)


def passed_over(plan: Plan, request: Request, held_back: bool) -> bool:
    """Whether others may go before a waiting request in this step."""
    never_ran = request.status is WAITING and request.num_earlier_outputs == 0 and not request.block_ids
    return (
        request.num_deliverable_stale_tokens > 0
        or request.waits_for_grammar
        or request.handle in plan.reclaimed
        or (held_back and never_ran)
    )


def capped(wanted: int, config: EngineConfig, token_budget: int) -> int:
    """What the token budget and the long-prefill cap leave of it."""
    assert wanted >= 1, wanted
    cap = config.long_prefill_token_threshold
    return min(wanted, token_budget, cap) if cap else min(wanted, token_budget)


def _prefill(plan: Plan, request: Request, first: int, wanted: int) -> Shape:
    n = capped(wanted, plan.state.config, plan.token_budget)
    if not request.media:
        return Shape(n, is_chunk=n < wanted)
    proposal = plan.encoder_room().propose(request, first, n)
    return Shape(proposal.num_tokens, is_chunk=proposal.num_tokens < wanted, encoder=proposal)


def _decode(plan: Plan, request: Request, config: EngineConfig) -> Shape:
    most = _most_drafts(plan, request)
    if most <= 0:
        return Shape(1, is_chunk=False)
    if request.drafts:
        drafts = request.drafts[:most]
        return Shape(1 + len(drafts), is_chunk=False, num_drafts=len(drafts), draft_token_ids=drafts)
    if config.speculation == "worker" and not request.grammar:
        return Shape(1 + most, is_chunk=False, num_drafts=most)
    if config.speculation == "ngram" and not request.num_sampling_in_flight and not request.grammar:
        drafts = prompt_lookup(request.tokens, most)
        return Shape(1 + len(drafts), is_chunk=False, num_drafts=len(drafts), draft_token_ids=drafts)
    return Shape(1, is_chunk=False)


def _most_drafts(plan: Plan, request: Request) -> int:
    """How many drafts may ride along: none that could pass the request's last token, nor the step's budget."""
    certain = len(request.tokens) + request.num_output_placeholders
    return min(plan.num_drafts, plan.token_budget - 1, request.max_total_tokens - certain - 1)
