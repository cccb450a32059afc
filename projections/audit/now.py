"""The place in the stream that is being projected, with what is remembered and what is being made."""

from refold.projections.audit.rows import Rows
from refold.projections.audit.schema import CHUNK, STALE_DELIVERED, bucket_of
from refold.projections.audit.story import Preemption, Request, Stale, Step, Story

_NS_PER_MINUTE = 60_000_000_000
_MAX_TEXT = 2_000
_MIN_INT, _MAX_INT = -(2**63), 2**63 - 1


class Now:
    """One event's place: its record's position, time and engine epoch, and its index in the record."""

    __slots__ = ("engine_epoch", "index", "minute", "num_violations", "position", "rows", "story", "time_ns")

    def __init__(self, story: Story, rows: Rows) -> None:
        self.story = story
        self.rows = rows
        self.position = self.index = self.time_ns = self.engine_epoch = self.minute = self.num_violations = 0

    def enter(self, position: int, time_ns: int, engine_epoch: int) -> None:
        """The next record."""
        self.position, self.time_ns, self.engine_epoch = position, time_ns, engine_epoch
        self.minute = time_ns // _NS_PER_MINUTE
        self.num_violations = 0

    def tell(self, kind: str, handle: int, detail: str = "", step: int | None = None, num: int | None = None) -> None:
        """A row of `audit_events`; handle 0 is the engine itself."""
        place = (self.rows.projection_id, self.position, self.index, handle)
        self.rows.events.append((*place, self.time_ns, self.engine_epoch, kind, step, num, clean(detail)))

    def violated(self, rule: str, message: str, handle: int | None = None, step: int | None = None) -> None:
        """A row of `audit_violations`."""
        place = (self.rows.projection_id, self.position, self.index, self.num_violations)
        self.rows.violations.append((*place, self.time_ns, rule, handle, step, clean(message)))
        self.num_violations += 1

    def expect(self, found: object, told: object, what: str, handle: int | None = None) -> None:
        """The journal tells what the projection has found."""
        if found != told:
            self.violated("contradiction", f"{what}: the event says {told}, those before it make {found}", handle)

    def lasted(self, kind: str, start_ns: int | None) -> int | None:
        """A duration has ended: count it. None if it never began; a clock that was set back measures nothing."""
        if start_ns is None:
            return None
        duration_ns = self.time_ns - start_ns if self.time_ns > start_ns else 0
        self.rows.durations[self.minute, kind, bucket_of(duration_ns)] += 1
        return duration_ns

    def touch(self, request: Request) -> Request:
        """The request's row changes."""
        self.rows.requests[request.handle] = request
        return request


def clean(text: str) -> str:
    """Text that any database takes."""
    if text.isascii() and "\0" not in text and len(text) <= _MAX_TEXT:
        return text
    return text[:_MAX_TEXT].replace("\0", "\ufffd").encode("utf-8", "replace").decode()


def int64(number: int) -> int:
    """The number, or the nearest that a column holds."""
    return min(max(number, _MIN_INT), _MAX_INT)


# -- epochs -----------------------------------------------------------------------------------------------------------


def unresolved(story: Story, request: Request) -> list[tuple[Step, int]]:
    """The request's entries in flight."""
    found = []
    for step in story.steps.values() if request.num_in_flight_tokens else ():
        if request.handle in step.handles:
            entry = step.handles.index(request.handle)
            if entry in step.stale or not step.is_delivered:
                found.append((step, entry))
    return found


def placeholders(step: Step, entry: int) -> int:
    """1 and the drafts of an entry that samples; 0 of a chunk."""
    if step.kinds[entry] == CHUNK:
        return 0
    return 1 + (step.drafts[entry] if step.drafts else 0)


def end_epoch(now: Now, request: Request, cause: str, policy: str, preemption: int = 0) -> int:
    """What the request has in flight is stale from now on; returns how many entries turned stale now."""
    turned = 0
    for step, entry in unresolved(now.story, request):
        stale = step.stale.get(entry)
        if stale is None:
            turned += 1
            stale = step.stale[entry] = Stale(
                step=step.step,
                entry=entry,
                handle=request.handle,
                epoch=step.epochs[entry],
                num_tokens=step.tokens[entry],
                num_placeholders=placeholders(step, entry),
                cause=cause,
                first_policy=policy,
                policy=policy,
                stale_position=now.position,
                stale_event=now.index,
                stale_ns=now.time_ns,
                preemption=preemption,
            )
            step.num_stale_entries += 1
        elif policy == "drop" and stale.policy != "drop":
            stale.policy, stale.dropped_position, stale.dropped_event = "drop", now.position, now.index
        now.rows.stale[stale.step, stale.entry] = stale
    request.epoch += 1
    return turned


def settle_stale(now: Now, stale: Stale, outcome: int, num_outputs: int) -> None:
    """A stale entry came back, or never will."""
    stale.outcome, stale.num_outputs = outcome, num_outputs
    stale.resolved_position, stale.resolved_event, stale.resolved_ns = now.position, now.index, now.time_ns
    now.rows.stale[stale.step, stale.entry] = stale
    if outcome == STALE_DELIVERED and stale.policy != "deliver":
        now.violated("stale output", "dropped by its policy, and delivered", stale.handle, stale.step)
    preemption = now.story.preemptions.get(stale.preemption)
    if preemption is not None:
        preemption.num_pending -= 1
        if not preemption.num_pending:
            drained(now, stale.preemption, preemption)


def drained(now: Now, serial: int, preemption: Preemption) -> None:
    """Nothing that a preemption made stale is in flight any more."""
    preemption.drained_position, preemption.drained_ns = now.position, now.time_ns
    changed(now, serial, preemption)


def changed(now: Now, serial: int, preemption: Preemption) -> None:
    """The preemption's row changes; when it is over and drained, it is forgotten."""
    now.rows.preemptions[preemption.position, preemption.event_index] = preemption
    if preemption.is_over and preemption.drained_position is not None:
        now.story.preemptions.pop(serial, None)


def resumed(now: Now, request: Request, step: int, num_hit_tokens: int) -> None:
    """A preempted request runs again."""
    preemption = now.story.preemptions.get(request.preemption)
    serial, request.preemption = request.preemption, 0
    if preemption is None:
        return
    recomputed = preemption.num_computed_tokens - min(num_hit_tokens, preemption.num_computed_tokens)
    preemption.resumed_position, preemption.resumed_ns, preemption.resumed_step = now.position, now.time_ns, step
    preemption.num_hit_tokens, preemption.num_recomputed_tokens, preemption.is_over = num_hit_tokens, recomputed, True
    request.num_recomputed_tokens += recomputed
    delay_ns = now.lasted("preempted", preemption.time_ns)
    request.preempted_ns += delay_ns or 0
    now.rows.minutes[now.minute].add(num_recomputed_tokens=recomputed)
    changed(now, serial, preemption)


# -- blocks -----------------------------------------------------------------------------------------------------------


def release(story: Story, request: Request, kept: int = 0) -> list[int]:
    """Disown the request's blocks from index `kept` on."""
    released, request.block_ids = request.block_ids[kept:], request.block_ids[:kept]
    owners = story.owners
    for block in released:
        count = owners.get(block, 0) - 1
        if count > 0:
            owners[block] = count
        else:
            owners.pop(block, None)
    return released
