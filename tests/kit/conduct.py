"""Conduct: what breaks no law and is wrong all the same.

A law says what state may never be. Conduct says what an order must lead to: a paused engine schedules nothing, a full window
of cadence keeps its distance, the victim is the last of the policy's order, a known prefix is used, a step that could go on
does. It is judged from the facts and the state before and after them, with none of the planner's code.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from refold.journal.events import (
    CacheReset,
    EngineOpened,
    Event,
    OutputDelivered,
    RequestFinished,
    RequestPreempted,
    RequestSubmitted,
    StaleOutputConsumed,
    StepScheduled,
)
from refold.projections.requests import IDLE, RUNNING, WAITING, Request
from refold.scheduler.commands import Command, CompleteStep, ExpireSessions, ScheduleStep
from refold.scheduler.stall import stall_report
from refold.scheduler.state import State

_SHARE = 1 << 20


class Misconduct(AssertionError):
    """An order was obeyed in a way that it should not be. The message starts with the rule's name."""


def must(holds: object, rule: str, *what: object) -> None:
    if not holds:
        raise Misconduct(f"{rule}: " + " ".join(str(each) for each in what))


class Conduct:
    """Watches one engine. `plan` is called with what a command decided, before it is folded; `fact` around each event."""

    def __init__(self) -> None:
        self.tags: dict[str, int] = {}
        self.finishes: dict[int, int] = {}
        self.virtual_now = 0
        self.idle_since = IdleBlocks()
        self._after: dict[type[Event], Callable[[State, Any], None]] = {
            EngineOpened: self._opened,
            RequestSubmitted: self._submitted,
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
        if type(event) is RequestPreempted:
            judge_preemption(state, event)

    def after(self, state: State, event: Event) -> None:
        """Judge an event by the state that it led to."""
        judge = self._after.get(type(event))
        if judge is not None:
            judge(state, event)
        self.idle_since.observe(state, event)

    def obeyed(self, state: State, command: Command) -> None:
        """Judge the state that a command led to."""
        if type(command) is ExpireSessions:
            late = [r.request_id for r in state.queues.idle if r.idle_since_ns <= command.idle_before_ns]
            must(not late, "expiry", late, "are idle since", command.idle_before_ns, "or longer and live")

    # -- the policy's order -------------------------------------------------------------------------------------------

    def _opened(self, state: State, event: EngineOpened) -> None:
        self.tags.clear()
        self.virtual_now = 0
        for request in state.requests.live():
            self._arrive(state, request)

    def _submitted(self, state: State, event: RequestSubmitted) -> None:
        must(state.paused != "drain", "pause", event.request_id, "was let in while the engine drains")
        self._arrive(state, state.requests.by_handle[event.handle])

    def _arrive(self, state: State, request: Request) -> None:
        """Where a request belongs: by arrival, by priority, or by its tenant's share of what was served."""
        first = 0
        if state.config.policy == "priority":
            first = request.priority
        elif state.config.policy == "fair_share":
            weight = state.config.tenant_weights.get(request.tenant, 1)
            first = max(self.virtual_now, self.tags.get(request.tenant, 0))
            first += request.max_total_tokens * _SHARE // weight
            self.tags[request.tenant] = first
        self.finishes[request.handle] = first
        must(
            request.queue_key == (first, request.handle),
            "policy",
            f"{request.request_id} has key {request.queue_key}, ({first}, {request.handle}) is its place",
        )

    # -- after a step -------------------------------------------------------------------------------------------------

    def _scheduled(self, state: State, event: StepScheduled) -> None:
        for admission in event.admissions:
            self.virtual_now = max(self.virtual_now, self.finishes[event.handles[admission.entry]])
        for handle in event.handles:
            request = state.requests.by_handle[handle]
            must(not request.drafts, "drafts", request.request_id, "keeps drafts that were scheduled")
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


# -- a plan -----------------------------------------------------------------------------------------------------------


def judge_plan(state: State, events: Sequence[Event]) -> None:
    """The facts of a `ScheduleStep`: preemptions, then a step or none."""
    if events:
        must(state.paused != "all", "pause", "a paused engine plans")
    step = events[-1] if events and type(events[-1]) is StepScheduled else None
    taken = {event.handle for event in events if type(event) is RequestPreempted}
    if step is not None:
        _judge_entries(state, step)
        _judge_admissions(state, step, taken)
    elif not taken and not state.window.in_flight:
        report = stall_report(state)
        must(not report.is_wedged, "stall", report)
    if taken:
        _judge_need(state, step, events)
    must(
        step is None or not step.admissions or all(e.reason != "kv_pressure" for e in events[:-1]),
        "preemption",
        "somebody comes in with the step for which another gave way",
    )
    _judge_diligence(state, step, taken)


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
        must(not request.waits_for_grammar, "grammar", request.request_id, "runs before its grammar is ready")
        must(drafts <= most_drafts, "drafts", drafts, "in a batch that may have", most_drafts)
        must(not cap or n - drafts <= cap, "prefill cap", request.request_id, "computes", n, "of at most", cap)
        end = len(request.tokens) + request.num_output_placeholders
        samples = entry not in step.chunk_entries
        must(samples == (first + n - drafts == end), "chunks", request.request_id, "ends at", first + n, "of", end)
        must(not (drafts and not samples), "chunks", request.request_id, "has drafts in a chunk")
        must(
            end + (drafts + 1) * samples <= request.max_total_tokens,
            "early stop",
            f"{request.request_id} computes for {end + drafts + samples}, {request.max_total_tokens} is its end",
        )
        if entry < num_running:
            must(last is None or last < request.queue_key, "policy", request.request_id, "runs before its betters")
            last = request.queue_key
            must(not _held_by_cadence(state, request), "cadence", request.request_id, "samples too soon")


def _held_by_cadence(state: State, request: Request) -> bool:
    """Whether an own sample in flight keeps a request from the next step."""
    if not request.num_sampling_in_flight:
        return False
    if request.grammar:
        return True
    stagger = state.config.decode_stagger
    if stagger == 1:
        return False
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


def _judge_admissions(state: State, step: StepScheduled, taken: set[int]) -> None:
    """Nobody comes in before his betters, but for those who can't come in now."""
    if not step.admissions:
        return
    by_handle = state.requests.by_handle
    came = [by_handle[step.handles[admission.entry]] for admission in step.admissions]
    holders = [r.queue_key for r in came if r.block_ids]
    others = [r.queue_key for r in came if not r.block_ids]
    must([bool(r.block_ids) for r in came] == [True] * len(holders) + [False] * len(others), "policy", "holders late")
    must(holders == sorted(holders) and others == sorted(others), "policy", "admissions out of order")
    for request, admission in zip(came, step.admissions, strict=True):
        must(not _never_ran(request) or state.paused is None, "pause", request.request_id, "is new and comes in")
        must(request.handle not in taken, "preemption", request.request_id, "comes back in the step that preempts it")
        _judge_hit(state, step, request, admission.hit_block_ids, taken)
    last = max(others, default=None)
    for request in state.queues.waiting:
        if request in came or last is None or (request.queue_key > last and not request.block_ids):
            continue
        excused = (
            request.num_deliverable_stale_tokens
            or request.waits_for_grammar
            or request.media
            or request.handle in taken
            or (state.paused is not None and _never_ran(request))
        )
        must(excused, "policy", request.request_id, "is passed over")


def _never_ran(request: Request) -> bool:
    return request.status is WAITING and not request.num_earlier_outputs and not request.block_ids


def _judge_hit(state: State, step: StepScheduled, request: Request, hit: Sequence[int], taken: set[int]) -> None:
    """A prefix that is known is used, up to the last token."""
    pool, have = state.pool, len(hit)
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
        end = len(request.tokens) + request.num_output_placeholders
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


# -- preemption -------------------------------------------------------------------------------------------------------


def judge_preemption(state: State, event: RequestPreempted) -> None:
    """The right victim, for a reason, under the right policy. Before it is folded."""
    victim = state.requests.by_handle[event.handle]
    drops = event.reason != "kv_pressure"
    must(drops == (event.stale_policy == "drop"), "preemption", event.reason, "with policy", event.stale_policy)
    if event.reason == "cache_reset":
        return
    idle = [r for r in state.queues.idle if r.block_ids and r is not victim]
    if event.reason == "session_reclaimed":
        must(
            victim.status is IDLE or not idle or event.for_handle is None, "preemption", "an idle session holds blocks"
        )
        return
    must(not idle, "preemption", victim.request_id, "gives way while a session is idle with blocks")
    must(victim is state.queues.running[-1], "policy", victim.request_id, "gives way and is not the last")
    must(event.for_handle is not None, "preemption", victim.request_id, "gives way for nobody")
    needy = state.requests.by_handle[event.for_handle or 0]
    must(needy.queue_key <= victim.queue_key, "policy", victim.request_id, "gives way to its lesser")


class IdleBlocks:
    """Since when each block with known content lies idle, so that the longest idle goes first, the tail of a table first.

    A step that also takes blocks from somebody is not judged: what he gives back comes when others are gone already.
    """

    def __init__(self) -> None:
        self.now = 0
        self.given_back = False
        self.since: dict[int, int] = {}
        self.place: dict[int, tuple[int, int]] = {}
        self.shared: set[int] = set()

    def observe(self, state: State, event: Event) -> None:
        """Look at what became idle and what was taken, after an event."""
        if type(event) is StepScheduled:
            if event.evicted_block_ids and not self.given_back:
                self._judge(state, event)
            self._settle(state, event)
        self.given_back = type(event) is RequestPreempted
        cached = state.pool.free_cached
        if cached.keys() != self.since.keys():
            self.now += 1
            self.since = {block: self.since.get(block, self.now) for block in cached}

    def _settle(self, state: State, event: StepScheduled) -> None:
        """Remember whose each block is, and where in the table. One that is shared goes when its last owner does."""
        for each in (*event.allocations, *event.admissions):
            handle = event.handles[each.entry]
            for index, block in enumerate(state.requests.by_handle[handle].block_ids):
                self.place[block] = (handle, index)
        for allocation in event.allocations:
            self.shared.difference_update(allocation.block_ids)
        for admission in event.admissions:
            self.shared.update(admission.hit_block_ids)

    def _judge(self, state: State, event: StepScheduled) -> None:
        pool, evicted = state.pool, event.evicted_block_ids
        must(not pool.free_blank, "eviction", "of", evicted, "with blank blocks free")
        for block in evicted:
            since = self.since.get(block)
            if since is None:
                continue
            for other in pool.free_cached:
                must(self.since.get(other, since) >= since, "eviction", block, "goes and", other, "was idle for longer")
                if self.since.get(other) != since or not self.shared.isdisjoint((block, other)):
                    continue
                handle, index = self.place.get(block, (0, 0))
                if self.place.get(other, (0, 0))[0] == handle:
                    must(self.place[other][1] < index, "eviction", block, "goes before", other, "nearer to the tail")


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
