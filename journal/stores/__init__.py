"""Opening a journal by its URL. Drivers are imported on use: a reader never loads SQLAlchemy."""

from typing import Protocol, runtime_checkable

from refold.journal.store import DEFAULT_STREAM, JournalReader, JournalStore
from refold.journal.stores.kinds import KINDS
from refold.journal.stores.location import locate

__all__ = ["doubt_of", "doubt_of_end", "engine_owner", "open_reader", "open_store"]


def open_store(url: str) -> JournalStore:
    """A store for writing. It must exist: `refold.migrations.ensure(url)` creates or upgrades it.

    Args:
        url: `memory:`, `sqlite:///FILE` or a plain path; see `location.py`.

    Raises:
        JournalError: the URL names no store, or what it names isn't a journal with today's tables.
    """
    location = locate(url)
    return KINDS[location.kind].open_store(location)


def open_reader(url: str) -> JournalReader:
    """A reader that can't write, on a journal that may be live.

    Raises:
        NotFound: there is no journal.
        JournalError: it can't be read or isn't ours.
    """
    location = locate(url)
    return KINDS[location.kind].open_reader(location)


def engine_owner(url: str, stream: str = DEFAULT_STREAM) -> int | None:
    """The process id of the live engine that writes this stream, or this journal where it has one owner; 0 if unknown, None if nobody does."""
    location = locate(url)
    return KINDS[location.kind].owner(location, stream)


@runtime_checkable
class Doubtful(Protocol):
    """A reader or store of a journal whose end may be in doubt, which is no error."""

    def doubt(self) -> str:
        """Why nobody can tell whether the journal still ends where it was acknowledged to; empty if somebody can."""
        ...


def doubt_of(reader: JournalReader) -> str:
    """As `doubt_of_end`, of a journal that is open; ask before a stream of it is opened for writing."""
    return reader.doubt() if isinstance(reader, Doubtful) else ""


def doubt_of_end(url: str) -> str:
    """Why nobody can tell whether this journal still ends where it was acknowledged to; empty if somebody can.

    It's no error, and to be said to whoever opens the journal. Segments refuse instead: their mark decides about the last group.
    """
    return KINDS[(location := locate(url)).kind].doubt(location)
