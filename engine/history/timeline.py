"""The timeline: a journal that one can walk about in.

    with Timeline.open("refold.db") as timeline:
        timeline.seek(812).portrait()["running"]     # the state behind record 812
        timeline.seek_step(40); timeline.back(); timeline.forward(10)
        for place in timeline: place.record, place.events, place.state
        timeline.diff(800, 812)                      # what changed in between
        timeline.first(lambda state: state.pool.num_free == 0)

There is one cursor. `state` is the state behind the record that it is at; the object changes as the cursor moves, so keep a
`copy()` to compare. Forward, records are folded; back, the fold starts again at the nearest of: a checkpoint that an earlier
pass left in memory, a snapshot in the store, the beginning. So what a seek costs doesn't grow with the journal.

A journal that is being written may be walked about in: its length is that of the opening, or of the last `refresh`.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self

from refold.engine.folding import Base, beginning, nearest
from refold.engine.history.checkpoints import Checkpoints, image_of, state_of
from refold.engine.history.differences import Difference, differences
from refold.engine.history.portrait import portrait
from refold.engine.history.relations import Names, handles_of
from refold.engine.history.replay import Replayed, fold_event, unheard
from refold.engine.history.times import position_of_time, record_at
from refold.journal.codec import decode
from refold.journal.errors import JournalCorrupt, NotFound
from refold.journal.events import Event, RequestSubmitted, StepScheduled
from refold.journal.naming import naming
from refold.journal.record import Record, head_after
from refold.journal.snapshots import SnapshotReader
from refold.journal.store import DEFAULT_STREAM, JournalReader
from refold.journal.verify import verified_part
from refold.scheduler.state import State

BEFORE_ALL = -1
_PROBE_RECORDS = 64
Predicate = Callable[[State], object]


class Timeline:
    """See the module's text. Positions are those of records; -1 is before the first."""

    def __init__(self, reader: JournalReader, stream: str = DEFAULT_STREAM) -> None:
        self.reader = reader
        self.stream = stream
        self.checkpoints = Checkpoints()
        self.names = Names()
        self._length = reader.head(stream).position
        self._base = beginning()
        self._last: Record | None = None
        self._events: list[Event] = []
        self._since_checkpoint = 0
        self._named_until = 0
        self._told = set[int]()

    @classmethod
    def open(cls, url: str, stream: str = DEFAULT_STREAM) -> "Timeline":
        """The timeline of a journal by its URL; close it, or use it in a `with`.

        Raises:
            NotFound: there is no such journal.
            JournalError: it can't be read.
        """
        from refold.journal.stores import open_reader  # noqa: PLC0415 - who has a reader needs no stores

        return cls(open_reader(url), stream)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the reader."""
        self.reader.close()

    def __len__(self) -> int:
        """How many records there are."""
        return self._length

    def refresh(self) -> int:
        """Look how long the journal is by now."""
        self._length = self.reader.head(self.stream).position
        return self._length

    # -- where it is --------------------------------------------------------------------------------------------------

    @property
    def position(self) -> int:
        """Of the record that the cursor is at; -1 before the first."""
        return self._base.head.position - 1

    @property
    def state(self) -> State:
        """The state behind that record. It changes as the cursor moves."""
        return self._base.folded.state

    @property
    def record(self) -> Record | None:
        """The record that the cursor is at; None before the first."""
        if self._last is None and self.position >= 0:
            self._last = record_at(self.reader, self.position, self.stream)
        return self._last

    @property
    def events(self) -> list[Event]:
        """Its events."""
        record = self.record
        if record is not None and not self._events:
            with naming(self.reader):
                self._events = decode(record)
        return self._events

    def copy(self) -> State:
        """The state as it is here, of its own."""
        return state_of(image_of(self.state))

    def portrait(self) -> dict[str, Any]:
        """The state as plain data."""
        return portrait(self.state)

    # -- going somewhere ----------------------------------------------------------------------------------------------

    def seek(self, position: int) -> "Timeline":
        """Go to the record at `position`; negative ones other than -1 are no positions.

        Raises:
            NotFound: there is no such record.
            JournalCorrupt, Contradiction: what lies between can't be folded.
        """
        if not BEFORE_ALL <= position < self._length:
            end = f"the last record is at {self._length - 1}" if self._length else "the journal is empty"
            raise NotFound(f"position {position}: {end}")
        stop = position + 1
        with naming(self.reader):
            self._rebase(stop)
            if self._base.head.position < stop:
                for _ in self._walk(stop):
                    pass
        return self

    def seek_time(self, time_ns: int) -> "Timeline":
        """Go to the last record made at or before a time; before all, if there is none. Assumes that the clock went forward."""
        return self.seek(self.position_of_time(time_ns))

    def seek_step(self, step: int) -> "Timeline":
        """Go to the record that scheduled a step.

        Raises:
            NotFound: there is no such step.
        """
        return self.seek(self.position_of_step(step))

    def forward(self, records: int = 1) -> "Timeline":
        """Go on; not beyond the last record."""
        return self.seek(min(self.position + records, self._length - 1))

    def back(self, records: int = 1) -> "Timeline":
        """Go back; not beyond the beginning."""
        return self.seek(max(self.position - records, BEFORE_ALL))

    def __iter__(self) -> Iterator[Replayed]:
        """Every record from the first on, with its events and the state behind it. Moves the cursor."""
        self._set(beginning())
        return self._walk(self._length)

    def onward(self, stop: int | None = None) -> Iterator[Replayed]:
        """The records behind the cursor, one after the other, up to position `stop` (exclusive)."""
        return self._walk(self._length if stop is None else min(stop, self._length))

    def warm(self, on_record: Callable[[], object] = unheard) -> "Timeline":
        """Fold everything once, and leave checkpoints everywhere. The cursor ends at the last record."""
        for _ in self:
            on_record()
        return self

    def next_of(self, request_id: str) -> bool:
        """Go on to the next record that names a request; False, and no move, if there is none."""
        return self._next(lambda events: self._names_it(request_id, events))

    def next_event(self, *kinds: type[Event]) -> bool:
        """Go on to the next record with an event of one of these kinds; False, and no move, if there is none."""
        return self._next(lambda events: any(type(event) in kinds for event in events))

    # -- questions ----------------------------------------------------------------------------------------------------

    def diff(self, left: int, right: int) -> list[Difference]:
        """What differs between the states at two positions. The cursor ends at `right`."""
        before = self.seek(left).portrait()
        return differences(before, self.seek(right).portrait())

    def first(self, predicate: Predicate, low: int = BEFORE_ALL, high: int | None = None) -> int | None:
        """The first position at which `predicate` of the state holds, if it is one that stays true once it is.

        Asks about log2(n) states. None if it doesn't hold at `high` (the last record) either. For one that comes and goes, what
        is found is a position where it begins to hold, maybe not the first: see `scan`.
        """
        high = self._length - 1 if high is None else high
        if high < 0 or not predicate(self.seek(high).state):
            return None
        while high - low > 1:
            middle = (low + high) // 2
            if predicate(self.seek(middle).state):
                high = middle
            else:
                low = middle
        return high

    def scan(self, predicate: Predicate, start: int = 0, on_record: Callable[[], object] = unheard) -> int | None:
        """The first position from `start` on at which it holds, asking at each."""
        self.seek(start - 1)
        for place in self.onward():
            on_record()
            if predicate(place.state):
                return place.record.position
        return None

    def position_of_time(self, time_ns: int) -> int:
        """The position of the last record made at or before a time; -1 if there is none."""
        return position_of_time(self.reader, time_ns, self.stream, self._length)

    def position_of_step(self, step: int) -> int:
        """The position of the record that scheduled a step. Raises as `seek_step`."""
        found = bisect_left(range(self._length), True, key=lambda p: self._step_from(p)[0] >= step)
        if found < self._length:
            number, position = self._step_from(found)
            if number == step and position < self._length:
                return position
        raise NotFound(f"step {step}: the journal has no such step")

    # -- inside -------------------------------------------------------------------------------------------------------

    def _walk(self, stop: int) -> Iterator[Replayed]:
        """Fold on from the cursor, leaving checkpoints on the way."""
        with naming(self.reader):
            yield from self._folded(stop)

    def _folded(self, stop: int) -> Iterator[Replayed]:
        state, head = self._base.folded.state, self._base.head
        for record in verified_part(self.reader, self.stream, head, stop):
            events = decode(record)
            for index, event in enumerate(events):
                fold_event(state, event, record.position, index)
                self._since_checkpoint += len(getattr(event, "handles", ())) or 1
            head = head_after(record)
            self._base = Base(self._base.folded, head)
            self._last, self._events = record, events
            if self._since_checkpoint >= self.checkpoints.every:
                self._since_checkpoint = 0
                self.checkpoints.keep(state, head)
            yield Replayed(record, events, state)
            if self._base.head is not head:
                raise RuntimeError("the cursor was moved while it walked: use another timeline for that")
        if head.position < stop:
            raise JournalCorrupt(
                f"the stream ends at {head.position}, {stop} records were there",
                position=head.position,
                kind="truncated",
            )

    def _rebase(self, stop: int) -> None:
        """Start from wherever the fold to `stop` is shortest."""
        here, kept = self._base.head.position, self.checkpoints.nearest_position(stop)
        stored = self._stored_position(stop)
        if here <= stop and here >= max(kept, stored):
            return
        if stored > kept:
            base = nearest(self.reader, self.stream, stop, self._told)
            if base.head.position > kept:
                self._set(base)
                self.checkpoints.keep(base.folded.state, base.head)
                return
        if here > stop or kept > here:
            self._set(self.checkpoints.nearest(stop))

    def _stored_position(self, stop: int) -> int:
        """Where the store's nearest snapshot is; not asked for where checkpoints are dense anyway."""
        if not isinstance(self.reader, SnapshotReader) or len(self.checkpoints) > 1:
            return 0
        return max((e.position for e in self.reader.snapshots(self.stream) if e.position <= stop), default=0)

    def _set(self, base: Base) -> None:
        self._base, self._last, self._events, self._since_checkpoint = base, None, [], 0

    def _step_from(self, position: int) -> tuple[int, int]:
        """The first step scheduled at or behind a position, and where; beyond all numbers if there is none."""
        with naming(self.reader):
            for record in self.reader.read(self.stream, position, self._length):
                if b'"StepScheduled"' in record.body:
                    for event in decode(record):
                        if isinstance(event, StepScheduled):
                            return event.step, record.position
        return 1 << 62, self._length

    def _next(self, wanted: Callable[[list[Event]], bool]) -> bool:
        with naming(self.reader):
            for record in self.reader.read(self.stream, self.position + 1, self._length):
                if wanted(decode(record)):
                    self.seek(record.position)
                    return True
        return False

    def _names_it(self, request_id: str, events: list[Event]) -> bool:
        self.learn_names()
        handle = self.names.handle_of(request_id)
        return handle is not None and any(handle in handles_of(event) for event in events)

    def learn_names(self) -> None:
        """Learn every client's id, once."""
        with naming(self.reader):
            for record in self.reader.read(self.stream, self._named_until, self._length):
                if b'"RequestSubmitted"' in record.body:
                    for event in decode(record):
                        if isinstance(event, RequestSubmitted):
                            self.names.observe(event)
        self._named_until = self._length
