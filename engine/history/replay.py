"""Replay: the journal, record by record, with the state that it folds to.

    for step in replay(reader): step.record, step.events, step.state

There is one fold, and this is it again: the state here is the state that the engine had at that position.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from refold.engine.folding import Base, beginning, nearest
from refold.engine.history.causes import Cause, cause_of_law, cause_of_refusal, class_of_law
from refold.journal.codec import decode
from refold.journal.errors import InvariantViolation, JournalCorrupt, NotFound
from refold.journal.events import Event
from refold.journal.naming import naming, place_of_reader
from refold.journal.record import Head, Record
from refold.journal.store import DEFAULT_STREAM, JournalReader
from refold.journal.verify import verified_part
from refold.scheduler.fold import fold
from refold.scheduler.state import State


class Contradiction(InvariantViolation):
    """An event doesn't fit the state that the events before it make: a bug of the engine that wrote it, or a forgery.

    Attributes:
        position: of the record.
        index: of the event in its record.
        law: the law that is broken; `fold` if the fold itself refuses the event, `L12` if today's code decides otherwise.
        cause: the class of the fault, see `refold.engine.history.causes`.
    """

    def __init__(self, message: str, *, position: int, index: int, law: str, cause: Cause | None = None) -> None:
        super().__init__(message)
        self.position = position
        self.index = index
        self.law = law
        self.cause = cause or class_of_law(law)


class Replayed(NamedTuple):
    """One record, its events, and the state after them. The state is the same object each time."""

    record: Record
    events: list[Event]
    state: State


def unheard() -> None:
    """The progress of a walk that nobody watches."""


def replay(
    reader: JournalReader,
    stream: str = DEFAULT_STREAM,
    stop: int | None = None,
    base: Base | None = None,
    expect: Head | None = None,
    before: Callable[[Record, list[Event], State], object] | None = None,
) -> Iterator[Replayed]:
    """Fold records up to position `stop` (exclusive), each after its place in the hash chain was checked.

    From the first one on, or from `base` on, whose state then changes. `expect` is a head that they must reach. `before` is called
    with each record and the state that it is about to change.

    Raises:
        JournalCorrupt: a record doesn't follow from the one before.
        Contradiction: an event doesn't fit the state.
    """
    with naming(reader):
        yield from _replayed(reader, stream, stop, base or beginning(), expect, before)


def _replayed(
    reader: JournalReader,
    stream: str,
    stop: int | None,
    base: Base,
    expect: Head | None,
    before: Callable[[Record, list[Event], State], object] | None,
) -> Iterator[Replayed]:
    (state, *_), head = base
    for record in verified_part(reader, stream, head, stop, expect, is_whole=stop is None):
        events = decode(record)
        if before is not None:
            before(record, events, state)
        for index, event in enumerate(events):
            fold_event(state, event, record.position, index)
        yield Replayed(record, events, state)


def fold_event(state: State, event: Event, position: int, index: int) -> None:
    """Fold one event of a journal that may have been written by anyone.

    Raises:
        Contradiction: the event doesn't fit the state.
    """
    try:
        fold(state, event)
    except Exception as error:
        detail = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        cause = _cause(state, event)
        raise Contradiction(
            f"{type(event).__name__} (event {index} of record {position}) does not fit the state before it: {detail}"
            + (f"; {cause.words}" if cause.words else ""),
            position=position,
            index=index,
            law="fold",
            cause=cause,
        ) from error


def _cause(state: State, event: Event) -> Cause:
    """The class of a refusal. The refused event may have changed some of the state already: no second error from that."""
    try:
        return cause_of_refusal(state, event)
    except (LookupError, TypeError, ValueError):
        return cause_of_law("fold", event)


def state_at(reader: JournalReader, position: int | None = None, stream: str = DEFAULT_STREAM) -> Replayed | None:
    """The state after the record at `position`, or after the last one. None: the journal is empty.

    Starts at the nearest snapshot, so what it costs doesn't grow with the journal.

    Raises:
        NotFound: there is no record at `position`.
        JournalCorrupt, Contradiction: a record on the way there isn't sound, or is gone.
    """
    if position is not None:
        _require_record(reader, position, stream)
    head = reader.head(stream)
    stop = head.position if position is None else position + 1
    base = nearest(reader, stream, stop)
    if stop and base.head.position == stop:
        (record,) = reader.read(stream, stop - 1, stop)
        return Replayed(record, decode(record), base.folded.state)
    last = _last(replay(reader, stream, stop, base, head if stop == head.position else None))
    end = -1 if last is None else last.record.position
    if end != stop - 1:
        raise JournalCorrupt(
            f"{place_of_reader(reader)}: record {end + 1} is not there, the stream's head says {head.position} (truncated); "
            "restore a backup",
            position=end + 1,
            kind="truncated",
        )
    return last


def _require_record(reader: JournalReader, position: int, stream: str) -> None:
    if position < 0:
        raise NotFound(f"position {position}: positions start at 0")
    head = reader.head(stream).position
    if position >= head:
        end = f"the last record is at {head - 1}" if head else "the journal is empty"
        raise NotFound(f"position {position}: {end}")


def _last(steps: Iterable[Replayed]) -> Replayed | None:
    last = None
    for last in steps:  # noqa: B007
        pass
    return last
