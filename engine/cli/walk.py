"""A walk along a journal that finds the events which somebody asked for, and checks the hash chain on the way."""

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from refold.engine.history.relations import Names, handles_of, steps_of
from refold.journal.codec import decode
from refold.journal.errors import JournalError
from refold.journal.events import (
    ContentRedacted,
    EngineClosed,
    Event,
    QuarantineLifted,
    RequestSubmitted,
    StepScheduled,
)
from refold.journal.record import EMPTY_HEAD, Record, head_after
from refold.journal.store import DEFAULT_STREAM, JournalReader
from refold.journal.verify import verified_part

_MARK = b'"RequestSubmitted"'
_BETWEEN_LIVES = (b'"ContentRedacted"', b'"QuarantineLifted"')


class Line(NamedTuple):
    """One event with its place: the record, and which of its events it is."""

    record: Record
    which: int
    event: Event


class Wanted(NamedTuple):
    """What the reader asked for; None asks for everything."""

    request_id: str | None
    step: int | None
    kinds: frozenset[str] | None


EVERYTHING = Wanted(None, None, None)


class Walk:
    """Walks along a stream of a journal, checks the hash chain on the way, and finds the events that are wanted."""

    def __init__(self, reader: JournalReader, names: Names, wanted: Wanted, stream: str = DEFAULT_STREAM) -> None:
        self._reader = reader
        self._names = names
        self._wanted = wanted
        self._stream = stream
        self._at = EMPTY_HEAD
        self._head = reader.head(stream)
        self._last: Record | None = None
        self._first_step: int | None = None
        self._last_step: int | None = None

    @property
    def steps(self) -> tuple[int, int] | None:
        """The first and the last step that was scheduled in the records asked for, if a step was asked for; None without any."""
        return None if self._first_step is None or self._last_step is None else (self._first_step, self._last_step)

    @property
    def end(self) -> int:
        """How far the journal went when somebody looked last."""
        return self._head.position

    @property
    def reached(self) -> int:
        """How far the walk has come: every record before this position was read, and follows from the one before it."""
        return self._at.position

    @property
    def finds_all(self) -> bool:
        """Whether every event is wanted."""
        return self._wanted == EVERYTHING

    def anew(self) -> "Walk":
        """A walk for the same, from the start."""
        return Walk(self._reader, self._names, self._wanted, self._stream)

    @property
    def is_open(self) -> bool:
        """Whether the last record of an engine walked over is one of an engine that has not closed."""
        return self._last is not None and not any(type(event) is EngineClosed for event in decode(self._last))

    def look_again(self) -> bool:
        """Whether the journal has grown."""
        self._head = self._reader.head(self._stream)
        return self._head.position > self._at.position

    def lines(self, since: int, stop: int) -> Iterator[Line]:
        """The wanted events from position `since` on, before `stop`. What lies before is only searched for names of requests.

        Raises:
            JournalCorrupt: a record isn't what was written, or there is none.
        """
        for record in self._records(stop):
            before = record.position < since
            if before and _MARK not in record.body:
                continue
            events = decode(record)
            if _MARK in record.body:
                for event in events:
                    if type(event) is RequestSubmitted:
                        self._names.observe(event)
            if before:
                continue
            if self._wanted.step is not None:
                self._observe_steps(events)
            for index in _choose(events, self._names, self._wanted):
                yield Line(record, index, events[index])

    def _observe_steps(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, StepScheduled):
                self._first_step = event.step if self._first_step is None else self._first_step
                self._last_step = event.step

    def _records(self, stop: int) -> Iterator[Record]:
        """The records from where the walk stopped, each after its place in the chain was checked."""
        start, is_whole = self._at, self._at == EMPTY_HEAD and stop == self.end
        expect = self._head if stop == self.end else None
        for record in verified_part(self._reader, self._stream, start, stop, expect, is_whole=is_whole):
            self._at = head_after(record)
            if not _is_between_lives(record):
                self._last = record
            yield record


def last_lines(walk: Walk, since: int, stop: int, limit: int | None) -> tuple[deque[Line], JournalError | None]:
    """The last lines, all without a limit. Where the journal can't be read on, the last ones before that, and why it can't.

    Events are decoded only where they may be among the last: each record has at least one. Of a journal that ends sooner than it
    should, they lie further back, and it's walked along again.
    """
    lines: deque[Line] = deque(maxlen=limit)
    begin = max(since, stop - limit) if walk.finds_all and limit is not None else since
    try:
        lines.extend(walk.lines(begin, stop))
    except JournalError as error:
        if begin > since and limit is not None:
            lines.clear()
            lines.extend(walk.anew().lines(max(since, walk.reached - limit), walk.reached))
        return lines, error
    return lines, None


def _is_between_lives(record: Record) -> bool:
    """Whether a record may be of no engine: a redaction, or a lift of a quarantine, of a journal that no engine has open."""
    return any(mark in record.body for mark in _BETWEEN_LIVES) and all(
        type(event) in (ContentRedacted, QuarantineLifted) for event in decode(record)
    )


def _choose(events: list[Event], names: Names, wanted: Wanted) -> list[int]:
    """The indices of the wanted events of one record. A step's record is its decision: it counts as a whole."""
    request_id, step, kinds = wanted
    if step is not None and not any(step in steps_of(event) for event in events):
        return []
    chosen = list(range(len(events)))
    if kinds is not None:
        chosen = [i for i in chosen if type(events[i]).__name__ in kinds]
    if request_id is not None:
        handle = names.handle_of(request_id)
        chosen = [] if handle is None else [i for i in chosen if handle in handles_of(events[i])]
    return chosen
