"""Conduct: what breaks no law and is wrong all the same.

A law says what state may never be. Conduct says what an order must lead to: a paused engine schedules nothing, a full window
of cadence keeps its distance, the victim is the last of the policy's order, a known prefix is used, a step that could go on
does. It is judged from the facts and the state before and after them, with none of the planner's code.
"""

from collections.abc import Callable, Sequence
from typing import Any

from refold.journal.events import (
    CacheReset,
    EngineOpened,
    Event,
    OutputDelivered,
    RequestFinished,
    RequestPreempted,
    RequestQuarantined,
    RequestSubmitted,
    SessionExtended,
    SessionTurnEnded,
    StaleOutputConsumed,
    StepScheduled,
    WorkerLost,
)
from refold.projections.requests import RUNNING, WAITING, Request
from refold.scheduler.commands import Command, CompleteStep, ExpireSessions, LiftQuarantine, ScheduleStep
from refold.scheduler.state import State
from tests.kit.idle_blocks import IdleBlocks
from tests.kit.misconduct import Misconduct, must
from tests.kit.plan_conduct import judge_plan, judge_room, tried_alone
from tests.kit.suspects import Suspects

_SHARE = 1 << 20


class Conduct:
    """Watches one engine. `plan` is called with what a command decided, before it is folded; `fact` around each event."""

    def __init__(self) -> None:
        self.tags: dict[str, int] = {}
        self.finishes: dict[int, int] = {}
        self.virtual_now = 0
        self.num_turns = 0
        self.idle_since = IdleBlocks()
        self.suspects = Suspects()
        self._after: dict[type[Event], Callable[[State, Any], None]] = {
            EngineOpened: self._opened,
            RequestSubmitted: self._submitted,
            SessionExtended: self._turn,
            SessionTurnEnded: self._turn,
            StepScheduled: self._scheduled,
            OutputDelivered: self._delivered,
            CacheReset: judge_reset,
        }

    def plan(self, state: State, command: Command, events: Sequence[Event]) -> None:
        """Judge a decision. The state is the one that it was taken in."""
        if type(command) is ScheduleStep:
            judge_plan(state, events)
        elif type(command) is CompleteStep:
            judge_statistics(state, command, events)
            judge_refusals(state, command, events)

    def before(self, state: State, event: Event) -> None:
        """Judge an event by the state that it is about to change."""
        kind = type(event)
        if kind is RequestPreempted:
            judge_preemption(state, event)
        elif kind is WorkerLost or kind is RequestQuarantined:
            self.suspects.before(state, event)

    def after(self, state: State, event: Event) -> None:
        """Judge an event by the state that it led to."""
        judge = self._after.get(type(event))
        if judge is not None:
            judge(state, event)
        self.idle_since.observe(state, event)
        self.suspects.after(state, event)

    def obeyed(self, state: State, command: Command) -> None:
        """Judge the state that a command led to."""
        if type(command) is LiftQuarantine:
            kept = [name for _, name in state.suspicion.quarantined.values() if name == command.request_id]
            must(not kept, "trial", kept, "is still quarantined")
        if type(command) is ExpireSessions:
            late = [r.request_id for r in state.queues.idle if r.idle_since_ns <= command.idle_before_ns]
            must(not late, "expiry", late, "are idle since", command.idle_before_ns, "or longer and live")

    # -- the policy's order -------------------------------------------------------------------------------------------

    def _opened(self, state: State, event: EngineOpened) -> None:
        self.tags.clear()
        self.virtual_now = 0
        for request in sorted(state.requests.live(), key=lambda r: r.queue_key[1]):
            self._place(state, request, request.queue_key[1])

    def _submitted(self, state: State, event: RequestSubmitted) -> None:
        must(state.paused != "drain", "pause", event.request_id, "was let in while the engine drains")
        self._place(state, state.requests.by_handle[event.handle], event.handle + self.num_turns)

    def _turn(self, state: State, event: SessionExtended | SessionTurnEnded) -> None:
        """A session whose next turn begins goes behind whoever has come meanwhile."""
        request = state.requests.by_handle[event.handle]
        if request.status is WAITING and not any(event is chunk for chunk in request.chunks):
            self.num_turns += 1
            self._place(state, request, state.requests.next_handle - 1 + self.num_turns)

    def _place(self, state: State, request: Request, arrival: int) -> None:
        """Where a request belongs: by arrival, by priority, or by its tenant's share of what was served."""
        first = 0
        if state.config.policy == "priority":
            first = request.priority
        elif state.config.policy == "fair_share":
            weight = state.config.tenant_weights.get(request.tenant, 1)
            first = max(self.virtual_now, self.tags.get(request.tenant, 0))
            first += (request.max_total_tokens - request.num_computed_tokens) * _SHARE // weight
            self.tags[request.tenant] = first
        self.finishes[request.handle] = first
        must(
            request.queue_key == (first, arrival),
            "policy",
            request.request_id,
            "has key",
            request.queue_key,
            "and belongs to",
            (first, arrival),
        )

    # -- after a step -------------------------------------------------------------------------------------------------

    def _scheduled(self, state: State, event: StepScheduled) -> None:
        for admission in event.admissions:
            self.virtual_now = max(self.virtual_now, self.finishes[event.handles[admission.entry]])
        for handle in event.handles:
            request = state.requests.by_handle[handle]
            if request.drafts:
                raise Misconduct(f"drafts: {request.request_id} keeps drafts that were scheduled")
            if request.media:
                judge_media(request)
        if event.admissions:
            judge_room(state, event)
        if event.encoder_inputs:
            judge_encoder(state, event)

    def _delivered(self, state: State, event: OutputDelivered) -> None:
        for handle in event.handles:
            request = state.requests.by_handle[handle]
            if request.media and request.status is RUNNING:
                judge_media(request)


def judge_preemption(state: State, event: RequestPreempted) -> None:
    """The right victim, for a reason, under the right policy. Before it is folded."""
    victim = state.requests.by_handle[event.handle]
    drops = event.reason not in ("kv_pressure", "isolated")
    must(drops == (event.stale_policy == "drop"), "preemption", event.reason, "with policy", event.stale_policy)
    if event.reason == "cache_reset":
        return
    if event.reason == "isolated":
        tried = tried_alone(state)
        must(
            tried is not None and victim.handle not in tried, "trial", victim.request_id, "gives way, tried are", tried
        )
        return
    idle = [r for r in state.queues.idle if r.block_ids and r is not victim]
    if event.reason == "session_reclaimed":
        return  # judged with the plan: whose blocks a newcomer of the same step shares keeps them
    must(not idle, "preemption", victim.request_id, "gives way while a session is idle with blocks")
    must(victim is state.queues.running[-1], "policy", victim.request_id, "gives way and is not the last")
    must(event.for_handle is not None, "preemption", victim.request_id, "gives way for nobody")
    needy = state.requests.by_handle[event.for_handle or 0]
    must(needy.queue_key <= victim.queue_key, "policy", victim.request_id, "gives way to its lesser")


# -- media, statistics ------------------------------------------------------------------------------------------------


def judge_media(request: Request) -> None:
    """What was computed and may be computed again, or will be, has its encoder output at hand."""
    for index, media in enumerate(request.media):
        if media.start < request.num_computed_tokens and media.start + media.num_tokens > request.next_position:
            must(index in request.media_held, "encoder", request.request_id, "has lost", media.digest, "too early")


def judge_encoder(state: State, step: StepScheduled) -> None:
    """The step's encoder work fits its budget, and nothing is dropped and computed at once."""
    digests = []
    for item in step.encoder_inputs:
        media = state.requests.by_handle[step.handles[item.entry]].media[item.media]
        if item.computed:
            digests.append((media.digest, media.num_tokens))
    total = sum(size for _, size in digests)
    must(total <= state.config.encoder_budget_tokens, "encoder", total, "embeddings in step", step.step)
    again = {digest for digest, _ in digests} & set(step.encoder_evictions)
    must(not again, "encoder", again, "dropped and computed in step", step.step)


def judge_reset(state: State, event: CacheReset) -> None:
    """Nothing that was known before a reset is known after it."""
    must(not state.pool.block_by_hash and not state.pool.free_cached, "reset", "the prefix cache remembers")
    must(not state.encoder.sizes, "reset", "the encoder cache remembers")


def judge_refusals(state: State, command: CompleteStep, events: Sequence[Event]) -> None:
    """Whom the grammar refuses ends in error, unless the tokens are thrown away anyway."""
    if not command.refused_entries:
        return
    step = state.window.in_flight[0]
    ended = {e.handle for e in events if isinstance(e, RequestFinished) and e.reason == "error"}
    for entry in command.refused_entries:
        if command.counts[entry] and step.stale.get(entry) != "drop":
            must(
                step.handles[entry] in ended, "grammar", step.requests[entry].request_id, "goes on with refused tokens"
            )


def judge_statistics(state: State, command: CompleteStep, events: Sequence[Event]) -> None:
    """What was accepted is what came back but for its last token, stale or not, kept or not."""
    step = state.window.in_flight[0]
    if not step.num_drafts:
        return
    accepted: dict[int, int] = {}
    for event in events:
        if isinstance(event, OutputDelivered | StaleOutputConsumed):
            accepted.update(zip(event.handles, event.accepted_drafts, strict=True))
    expected = {h: max(count - 1, 0) for h, count in zip(step.handles, command.counts, strict=True)}
    must(accepted == expected, "statistics", f"step {step.step}: {accepted} accepted, {expected} came back")
