"""Opening a journal by its URL. Drivers are imported on use: a reader never loads SQLAlchemy."""

from refold.journal.errors import JournalError
from refold.journal.store import JournalReader, JournalStore
from refold.journal.stores.location import locate, sqlite_path

__all__ = ["engine_owner", "open_reader", "open_store"]


def open_store(url: str) -> JournalStore:
    """A store for writing. Its tables must exist: `refold.migrations.ensure(url)` creates or upgrades them.

    Args:
        url: `memory:`, `sqlite:///FILE` or a plain path.

    Raises:
        JournalError: the URL names no store, or the file isn't a journal with today's tables.
    """
    location = locate(url)
    if location.path is None:
        from refold.journal.stores.memory import MemoryStore  # noqa: PLC0415

        return MemoryStore()
    from refold.journal.stores.sql import SqlStore  # noqa: PLC0415

    return SqlStore(url)


def open_reader(url: str) -> JournalReader:
    """A reader that can't write, on a journal that may be live.

    Raises:
        NotFound: there is no journal.
        JournalError: it can't be read or isn't ours.
    """
    location = locate(url)
    if location.path is None:
        raise JournalError("a memory: journal is readable inside its own process only: name a journal file")
    from refold.journal.stores.sqlite_reader import SqliteReader  # noqa: PLC0415

    return SqliteReader(location.path)


def engine_owner(url: str) -> int | None:
    """The process id of the live engine that writes this journal; 0 if unknown, None if nobody does."""
    from refold.journal.stores.ownership import owner_of  # noqa: PLC0415

    return owner_of(sqlite_path(url))
