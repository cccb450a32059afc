"""What `refold copy` says when it ends before it is done: what is wrong, with which of both journals, and a command that goes on.

The same command goes on once a disk has room again, or after Ctrl-C. It doesn't where the source is damaged: it would meet the same
damage. There a backup goes on from where the target ends; an end that is lost can be accepted.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from refold.engine.cli.console import streams_of
from refold.engine.cli.failures import GOES_ON, Complaint, explain
from refold.engine.cli.output import in_code, named, note, write_json
from refold.engine.cli.typed import typed
from refold.engine.history.plain import count, safe
from refold.journal.ends import EndInDoubt
from refold.journal.errors import JournalCorrupt, JournalError, JournalOwned, RefoldError
from refold.journal.naming import place_of_reader
from refold.journal.replicas import ReplicaStore


class UnderWay:
    """A copy as far as it has come: `store` once the target is open, `stream` once one is copied."""

    __slots__ = ("source", "store", "stream", "target")

    def __init__(self, source: str, target: str) -> None:
        self.source, self.target = source, target
        self.store: ReplicaStore | None = None
        self.stream: str | None = None

    def num_there(self) -> int | None:
        """How many records of the stream the target has; None if there's none, or it can't tell."""
        if self.store is None or self.stream is None:
            return None
        try:
            return self.store.head(self.stream).position if self.stream in streams_of(self.store) else 0
        except JournalError:
            return None

    def failed(self, message: str) -> dict[str, object]:
        """The report of a copy that failed."""
        told = {"schema": "refold.copy/1", "from": self.source, "to": self.target, "stream": self.stream, "ok": False}
        return told | {"num_records": self.num_there(), "message": message}


@contextmanager
def telling_what_is_there(under_way: UnderWay, *, as_json: bool) -> Iterator[None]:
    """Of a copy that isn't finished, say how many records the target has, and what goes on from there.

    One that has none looks like a journal that nobody has written to. It isn't removed, for it may have been there before, and
    somebody may have opened it since.
    """
    try:
        yield
    except KeyboardInterrupt:
        if under_way.stream is not None:
            note(f"refold: {_so_far(under_way)}")
        if as_json:
            write_json(under_way.failed("interrupted"))
        raise
    except (RefoldError, Complaint) as error:
        if as_json:
            write_json(under_way.failed(str(error)))
        if not isinstance(error, JournalError) or isinstance(error, JournalOwned) or under_way.stream is None:
            raise
        line, hint, status = explain(error, "refold copy", under_way.source, under_way.stream)
        way_on = _way_on(error, under_way)
        raise Complaint(line, way_on if hint in {"", GOES_ON} else f"{hint}; {way_on}", status) from error


def _way_on(error: JournalError, under_way: UnderWay) -> str:
    if not isinstance(error, JournalCorrupt):
        return _so_far(under_way)
    source, target = under_way.source, under_way.target
    assert under_way.store is not None, "a stream is copied to a target that is open"
    if error.place == place_of_reader(under_way.store):
        return f"{in_code(typed('copy', source, 'NEW'))} makes another copy"
    if isinstance(error, EndInDoubt):
        return f"{in_code(typed('copy', source, target, options=('--accept-end',)))} takes that for the end"
    has = f"{named(target)} has {_those_there(under_way)}, which are whole"
    return f"{has}: {in_code(typed('copy', 'BACKUP', target))} goes on from there"


def _so_far(under_way: UnderWay) -> str:
    target, num_there = named(under_way.target), under_way.num_there()
    if num_there is None:
        return f"{target} can't tell how many records it has: the same command finds out, and goes on"
    if not num_there:
        return f"{target} has no record yet: the same command goes on; remove it, if you don't want it"
    return f"{target} has {_those_there(under_way)}: the same command goes on from there"


def _those_there(under_way: UnderWay) -> str:
    assert under_way.stream is not None, "one is copied"
    return f"{count(under_way.num_there() or 0, 'record')} of stream {safe(under_way.stream)}"
