"""The table of stores: what a kind of URL opens. A new store is one line here and its URL in `location.py`.

Each entry imports its driver on use, so that nobody pays for a store that he doesn't use.
"""

from collections.abc import Callable
from typing import NamedTuple

from refold.journal.store import JournalReader, JournalStore
from refold.journal.stores.location import Location, NoStore, file_path, sqlite_path


class Kind(NamedTuple):
    """How journals of one kind are opened.

    Attributes:
        open_store: a handle that writes.
        open_reader: a handle that can't.
        owner: the process id of the live engine that writes a stream, or any where the owner has the whole journal; 0 if
            unknown, None if nobody does.
        doubt: why it can't be told whether its end is the acknowledged one, without an error; empty if it can.
    """

    open_store: Callable[[Location], JournalStore]
    open_reader: Callable[[Location], JournalReader]
    owner: Callable[[Location, str], int | None]
    doubt: Callable[[Location], str] = lambda _location: ""


def _open_memory(_location: Location) -> JournalStore:
    from refold.journal.stores.memory import MemoryStore  # noqa: PLC0415

    return MemoryStore()


def _read_memory(_location: Location) -> JournalReader:
    raise NoStore("a memory: journal is readable inside its own process only: name a journal file")


def _own_memory(_location: Location, _stream: str) -> int | None:
    raise NoStore("memory: is no journal file: use sqlite:///FILE or a plain file path")


def _open_sqlite(location: Location) -> JournalStore:
    from refold.journal.stores.sql import SqlStore  # noqa: PLC0415

    return SqlStore(location.url)


def _read_sqlite(location: Location) -> JournalReader:
    from refold.journal.stores.sqlite_reader import SqliteReader  # noqa: PLC0415

    return SqliteReader(sqlite_path(location.url))


def _own_sqlite(location: Location, _stream: str) -> int | None:
    from refold.journal.stores.ownership import owner_of  # noqa: PLC0415

    return owner_of(sqlite_path(location.url))


def _doubt_sqlite(location: Location) -> str:
    from refold.journal.stores.sqlite_marks import doubt_of  # noqa: PLC0415

    return doubt_of(sqlite_path(location.url))


def _open_postgresql(location: Location) -> JournalStore:
    from refold.journal.stores.sql import SqlStore  # noqa: PLC0415

    return SqlStore(location.url)


def _read_postgresql(location: Location) -> JournalReader:
    from refold.journal.stores.postgres import open_postgres_reader  # noqa: PLC0415

    return open_postgres_reader(location.url)


def _own_postgresql(location: Location, stream: str) -> int | None:
    from refold.journal.stores.postgres import owner_of_database  # noqa: PLC0415

    return owner_of_database(location.url, stream)


def _open_segments(location: Location) -> JournalStore:
    from refold.journal.stores.segments.store import SegmentStore  # noqa: PLC0415

    return SegmentStore(file_path(location))


def _read_segments(location: Location) -> JournalReader:
    from refold.journal.stores.segments.reader import SegmentReader  # noqa: PLC0415

    return SegmentReader(file_path(location))


def _own_segments(location: Location, _stream: str) -> int | None:
    from refold.journal.stores.ownership import owner_of  # noqa: PLC0415

    return owner_of(file_path(location))


KINDS: dict[str, Kind] = {
    "memory": Kind(_open_memory, _read_memory, _own_memory),
    "sqlite": Kind(_open_sqlite, _read_sqlite, _own_sqlite, _doubt_sqlite),
    "postgresql": Kind(_open_postgresql, _read_postgresql, _own_postgresql),
    "segments": Kind(_open_segments, _read_segments, _own_segments),
}
