"""Waits: who waited, how long, and for what.

A request waits when a step is planned without it and nothing of it is in flight. Why, the stall report says, asked at each
plan as if the window had room: that steps come back before the next is planned is the pace of things, not a wait. One
reason that holds from plan to plan is one wait; it ends when the reason changes or the request is scheduled.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from refold.engine.history.plain import count, listed, safe
from refold.engine.history.replay import replay, unheard
from refold.journal.events import (
    CacheReset,
    EngineOpened,
    EngineResumed,
    Event,
    GrammarReady,
    OutputDelivered,
    RequestFinished,
    RequestPreempted,
    SessionExtended,
    SessionTurnEnded,
    StaleOutputConsumed,
    WorkerStarted,
)
from refold.journal.record import Record
from refold.journal.store import DEFAULT_STREAM, JournalReader
from refold.projections.requests import FINISHED, IDLE, RUNNING
from refold.scheduler.stall import WAIT_WORDS, StallReport, WaitReason, stall_report
from refold.scheduler.state import State

MAX_HOLDERS = 6
_SETTLING = (OutputDelivered, StaleOutputConsumed)
_MEMORY = (RequestFinished, RequestPreempted, SessionTurnEnded, CacheReset)
_ENDS: dict[WaitReason, tuple[type[Event], ...]] = {
    "blocks": _MEMORY,
    "fence": (*_MEMORY, StaleOutputConsumed),
    "seat": _MEMORY,
    "turn": _MEMORY,
    "encoder": _MEMORY,
    "stale_output": (StaleOutputConsumed,),
    "grammar": (GrammarReady,),
    "pause": (EngineResumed, EngineOpened),
    "worker": (WorkerStarted,),
    "input": (SessionExtended,),
}


class Wait(NamedTuple):
    """A request waited for one reason, from the record at `start` to the one at `stop` (None: it waits still).

    `needed_blocks` and `free_blocks` are those at its beginning, `holders` who held blocks then, the most first. `ended_by` is
    the position of the event that made an end of it, if there is one.
    """

    request_id: str
    handle: int
    reason: WaitReason
    start: int
    start_ns: int
    stop: int | None
    duration_ns: int
    needed_blocks: int
    free_blocks: int
    holders: list[tuple[str, int]]
    ended_by: int | None

    @property
    def words(self) -> str:
        """What it waited for, without its name and its length."""
        text = WAIT_WORDS[self.reason]
        if self.reason in ("blocks", "fence"):
            text = f"{count(self.needed_blocks, 'block')}, {self.free_blocks} free"
            text += " (others behind a step in flight)" if self.reason == "fence" else ""
        if self.reason in ("blocks", "fence", "seat", "turn") and self.holders:
            text += f"; held by {listed([f'{safe(name)} ({number})' for name, number in self.holders], MAX_HOLDERS)}"
        return text


class _Open(NamedTuple):
    """A wait that goes on."""

    reason: WaitReason
    start: int
    start_ns: int
    needed_blocks: int
    free_blocks: int
    holders: list[tuple[str, int]]


class Waits:
    """Follows a journal. `observe` every record with the state behind it; it returns the waits that end there.

    `only` is a client's id, or None for all.
    """

    def __init__(self, only: str | None = None) -> None:
        self.only = only
        self._open: dict[int, _Open] = {}
        self._names: dict[int, str] = {}
        self._last: dict[type[Event], int] = {}
        self._last_ns = 0

    def observe(self, record: Record, events: Sequence[Event], state: State) -> list[Wait]:
        """Follow one record."""
        self._last_ns = record.time_ns
        for event in events:
            self._last[type(event)] = record.position
        ended = [h for h in self._open if (r := state.requests.by_handle.get(h)) is None or r.status is FINISHED]
        over = [self._end(handle, record) for handle in ended]
        if all(isinstance(event, _SETTLING + _MEMORY) for event in events) or not state.was_opened:
            return over
        return over + list(self._plan_was_made(record, state))

    def rest(self) -> list[Wait]:
        """The waits that go on at the end."""
        return [self._wait(handle, wait, None, self._last_ns) for handle, wait in self._open.items()]

    def _plan_was_made(self, record: Record, state: State) -> Iterator[Wait]:
        if not self._anyone_waits(state) and not self._open:
            return
        report, by_handle = stall_report(state, heed_window=False), state.requests.by_handle
        waiting: dict[int, _Open] = {}
        for waiter in report.waiters:
            handle = state.requests.handle_by_id[waiter.request_id]
            request = by_handle[handle]
            if (request.status is RUNNING and request.num_in_flight_tokens) or self._passes(waiter.request_id):
                continue
            reason = self._reason(state, report, waiter.reason, waiter.needed_blocks)
            if reason == "input" and request.status is not IDLE:
                continue
            self._names[handle] = waiter.request_id
            waiting[handle] = _Open(
                reason,
                record.position,
                record.time_ns,
                waiter.needed_blocks,
                report.num_free,
                report.holders[:MAX_HOLDERS],
            )
        for handle in [h for h, wait in self._open.items() if h not in waiting or waiting[h].reason != wait.reason]:
            yield self._end(handle, record)
        for handle, wait in waiting.items():
            self._open.setdefault(handle, wait)

    def _passes(self, request_id: str) -> bool:
        return self.only is not None and request_id != self.only

    def _anyone_waits(self, state: State) -> bool:
        queues = state.queues
        if queues.waiting or queues.idle:
            return True
        return any(request.num_in_flight_tokens == 0 for request in queues.running)

    @staticmethod
    def _reason(state: State, report: StallReport, reason: WaitReason, needed: int) -> WaitReason:
        """Whoever lacks nothing waits for the next plan."""
        has_room = needed + state.config.watermark_blocks <= report.num_free
        return "window" if reason in ("blocks", "fence") and has_room else reason

    def _end(self, handle: int, record: Record) -> Wait:
        return self._wait(handle, self._open.pop(handle), record.position, record.time_ns)

    def _wait(self, handle: int, wait: _Open, stop: int | None, stop_ns: int) -> Wait:
        ends = [self._last.get(kind, -1) for kind in _ENDS.get(wait.reason, ())]
        ended_by = max(ends, default=-1)
        return Wait(
            request_id=self._names[handle],
            handle=handle,
            reason=wait.reason,
            start=wait.start,
            start_ns=wait.start_ns,
            stop=stop,
            duration_ns=max(stop_ns - wait.start_ns, 0),
            needed_blocks=wait.needed_blocks,
            free_blocks=wait.free_blocks,
            holders=wait.holders,
            ended_by=ended_by if stop is not None and ended_by >= wait.start else None,
        )


def all_waits(
    reader: JournalReader,
    stream: str = DEFAULT_STREAM,
    only: str | None = None,
    on_record: Callable[[], object] = unheard,
) -> Iterator[Wait]:
    """Every wait of a journal, in the order in which they end; those that go on last.

    Raises:
        JournalCorrupt, Contradiction: as `replay`.
    """
    waits = Waits(only)
    for record, events, state in replay(reader, stream, expect=reader.head(stream)):
        yield from waits.observe(record, events, state)
        on_record()
    yield from waits.rest()


def by_reason(waits: Sequence[Wait]) -> dict[WaitReason, int]:
    """Nanoseconds by reason, the longest first."""
    sums: dict[WaitReason, int] = {}
    for wait in waits:
        sums[wait.reason] = sums.get(wait.reason, 0) + wait.duration_ns
    return dict(sorted(sums.items(), key=lambda item: -item[1]))
