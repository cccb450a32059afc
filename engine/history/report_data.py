"""What a report shows, gathered in one pass: figures, the lives of the slowest requests, counters over time, waits."""

from collections.abc import Callable, Iterable, Sequence
from heapq import nlargest
from typing import Any, NamedTuple

import msgspec

from refold.engine.history.figures import Figures, Meter
from refold.engine.history.relations import Names
from refold.engine.history.replay import unheard
from refold.engine.history.waits import Wait, Waits, by_reason
from refold.engine.history.words import preemption_in_words
from refold.journal.events import (
    EngineOpened,
    Event,
    RequestFinished,
    RequestPreempted,
    RequestSubmitted,
    SessionExtended,
    SessionTurnEnded,
    StepScheduled,
    WorkerLost,
)
from refold.journal.record import Record
from refold.scheduler.state import State

MAX_LIVES = 48
MAX_KEPT = 20_000
MAX_ROWS = 60
NUM_BUCKETS = 480


class Span(NamedTuple):
    """A request did something from here to there, in nanoseconds since the first record."""

    what: str
    start_ns: int
    stop_ns: int


class LifeLine(msgspec.Struct):
    """One request's spans, and how it ended."""

    name: str
    start_ns: int
    spans: list[Span] = []
    end: str = "unfinished"
    num_preemptions: int = 0

    @property
    def duration_ns(self) -> int:
        """From its submission to its end."""
        return (self.spans[-1].stop_ns if self.spans else self.start_ns) - self.start_ns


class Sample(NamedTuple):
    """Counters at a time."""

    time_ns: int
    owned: int
    fenced: int
    cached: int
    running: int
    waiting: int


class Incident(NamedTuple):
    """A preemption or a lost worker."""

    position: int
    time_ns: int
    name: str
    words: str


class ReportData(NamedTuple):
    """All that the page shows."""

    num_records: int
    num_engines: int
    models: list[str]
    first_ns: int
    duration_ns: int
    num_blocks: int
    figures: Figures
    lives: list[LifeLine]
    num_lives: int
    samples: list[Sample]
    incidents: list[Incident]
    num_incidents: int
    waits: dict[str, int]
    longest_waits: list[Wait]


class _Gather:
    """The pass."""

    def __init__(self) -> None:
        self.names = Names()
        self.meter = Meter()
        self.follower = Waits()
        self.waits: list[Wait] = []
        self.merged: dict[str, int] = {}
        self.longest: list[Wait] = []
        self.lives: dict[int, LifeLine] = {}
        self.over: list[LifeLine] = []
        self.doing: dict[int, tuple[str, int]] = {}
        self.samples: list[Sample] = []
        self.incidents: list[Incident] = []
        self.models: list[str] = []
        self.num_records = self.num_engines = self.num_blocks = self.num_incidents = self.num_lives = 0
        self.first_ns: int | None = None
        self.last_ns = 0

    def observe(self, record: Record, events: Sequence[Event], state: State) -> None:
        if self.first_ns is None:
            self.first_ns = record.time_ns
        now = max(record.time_ns - self.first_ns, self.last_ns)
        self.last_ns = now
        self.num_records += 1
        self.meter.block_size = state.pool.block_size
        self.meter.observe(record.time_ns, events)
        for event in events:
            self._tell(now, record, event)
        self.waits += self.follower.observe(record, events, state)
        if len(self.waits) > 20_000:
            self._merge_waits()
        pool, queues = state.pool, state.queues
        self.num_blocks = max(self.num_blocks, pool.num_blocks)
        owned = pool.num_blocks - pool.num_free - pool.num_fenced
        self.samples.append(
            Sample(now, owned, pool.num_fenced, len(pool.free_cached), len(queues.running), len(queues.waiting))
        )
        if len(self.samples) > 64 * NUM_BUCKETS:
            self.samples = thinned(self.samples, 16 * NUM_BUCKETS)

    def _merge_waits(self) -> None:
        sums = dict(self.merged)
        for reason, spent in by_reason(self.waits).items():
            sums[reason] = sums.get(reason, 0) + spent
        self.merged = sums
        self.longest = nlargest(MAX_ROWS, [*self.longest, *self.waits], key=lambda wait: wait.duration_ns)
        self.waits = []

    def _tell(self, now: int, record: Record, event: Event) -> None:
        teller = _TELLERS.get(type(event))
        if teller is not None:
            teller(self, now, record, event)

    def _opened(self, now: int, record: Record, event: EngineOpened) -> None:  # noqa: ARG002
        self.num_engines += 1
        if event.config.model not in self.models:
            self.models.append(event.config.model)

    def _submitted(self, now: int, record: Record, event: RequestSubmitted) -> None:  # noqa: ARG002
        self.names.observe(event)
        self.num_lives += 1
        self.lives[event.handle] = LifeLine(event.request_id, now)
        self.doing[event.handle] = ("queued", now)

    def _scheduled(self, now: int, record: Record, event: StepScheduled) -> None:  # noqa: ARG002
        for admission in event.admissions:
            self._turn_to(event.handles[admission.entry], "running", now)

    def _preempted(self, now: int, record: Record, event: RequestPreempted) -> None:
        if event.reason == "session_reclaimed":
            return
        self._turn_to(event.handle, "preempted", now)
        if event.handle in self.lives:
            self.lives[event.handle].num_preemptions += 1
        self._incident(record, now, self.names[event.handle], f"preempted {preemption_in_words(event, self.names)}")

    def _worker_lost(self, now: int, record: Record, event: WorkerLost) -> None:
        self._incident(record, now, f"worker {event.generation}", f"lost: {event.reason}")
        for handle in event.handles:
            self._turn_to(handle, "preempted", now)

    def _turn_ended(self, now: int, record: Record, event: SessionTurnEnded) -> None:  # noqa: ARG002
        self._turn_to(event.handle, "idle", now)

    def _extended(self, now: int, record: Record, event: SessionExtended) -> None:  # noqa: ARG002
        if self.doing.get(event.handle, ("", 0))[0] == "idle":
            self._turn_to(event.handle, "queued", now)

    def _finished(self, now: int, record: Record, event: RequestFinished) -> None:  # noqa: ARG002
        self._turn_to(event.handle, None, now)
        life = self.lives.pop(event.handle, None)
        if life is not None:
            life.end = event.reason
            self.over.append(life)
            if len(self.over) > MAX_KEPT:
                self.over = slowest(self.over, MAX_KEPT // 2)

    def _turn_to(self, handle: int, what: str | None, now: int) -> None:
        life, doing = self.lives.get(handle), self.doing.pop(handle, None)
        if life is None:
            return
        if doing is not None:
            life.spans = [*life.spans, Span(*doing, now)]
        if what is not None:
            self.doing[handle] = (what, now)

    def _incident(self, record: Record, now: int, name: str, words: str) -> None:
        self.num_incidents += 1
        if len(self.incidents) < MAX_ROWS:
            self.incidents.append(Incident(record.position, now, name, words))

    def data(self) -> ReportData:
        for handle in list(self.doing):
            self._turn_to(handle, None, self.last_ns)
        self.waits += self.follower.rest()
        self._merge_waits()
        lives = all_along([*self.over, *self.lives.values()], self.last_ns)
        return ReportData(
            num_records=self.num_records,
            num_engines=self.num_engines,
            models=self.models,
            first_ns=self.first_ns or 0,
            duration_ns=self.last_ns,
            num_blocks=self.num_blocks,
            figures=self.meter.figures(),
            lives=lives,
            num_lives=self.num_lives,
            samples=thinned(self.samples, NUM_BUCKETS),
            incidents=self.incidents,
            num_incidents=self.num_incidents,
            waits=dict(sorted(self.merged.items(), key=lambda item: -item[1])),
            longest_waits=self.longest[:20],
        )


_TELLERS: dict[type[Event], Callable[[_Gather, int, Record, Any], None]] = {
    EngineOpened: _Gather._opened,  # noqa: SLF001 - the table of this module's own methods
    RequestSubmitted: _Gather._submitted,  # noqa: SLF001
    StepScheduled: _Gather._scheduled,  # noqa: SLF001
    RequestPreempted: _Gather._preempted,  # noqa: SLF001
    WorkerLost: _Gather._worker_lost,  # noqa: SLF001
    SessionTurnEnded: _Gather._turn_ended,  # noqa: SLF001
    SessionExtended: _Gather._extended,  # noqa: SLF001
    RequestFinished: _Gather._finished,  # noqa: SLF001
}


def gather(
    replayed: Iterable[tuple[Record, Sequence[Event], State]], on_record: Callable[[], object] = unheard
) -> ReportData:
    """Gather what a report shows of a whole replay."""
    pass_ = _Gather()
    for record, events, state in replayed:
        pass_.observe(record, events, state)
        on_record()
    return pass_.data()


def slowest(lives: Sequence[LifeLine], number: int) -> list[LifeLine]:
    """Those that took longest."""
    return nlargest(number, lives, key=lambda life: life.duration_ns)


def all_along(lives: Sequence[LifeLine], duration_ns: int) -> list[LifeLine]:
    """As many as fit on a page, in order: of each stretch of time the one that took longest."""
    if len(lives) > MAX_LIVES:
        width, longest = duration_ns // MAX_LIVES + 1, dict[int, LifeLine]()
        for life in lives:
            slot = life.start_ns // width
            if slot not in longest or longest[slot].duration_ns < life.duration_ns:
                longest[slot] = life
        lives = list(longest.values())
    return sorted(lives, key=lambda life: life.start_ns)


def thinned(samples: Sequence[Sample], buckets: int) -> list[Sample]:
    """Of each stretch of time, the largest of each counter; so no peak is lost."""
    if len(samples) <= buckets:
        return list(samples)
    width = max((samples[-1].time_ns - samples[0].time_ns) // buckets, 1)
    kept: list[Sample] = []
    for sample in samples:
        slot = (sample.time_ns - samples[0].time_ns) // width
        if kept and (kept[-1].time_ns - samples[0].time_ns) // width == slot:
            kept[-1] = Sample(kept[-1].time_ns, *map(max, kept[-1][1:], sample[1:]))
        else:
            kept.append(sample)
    return kept
