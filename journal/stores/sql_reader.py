"""Reading a journal in any SQL database."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import sqlalchemy as sa

from refold.journal.archives import Archive, read_across
from refold.journal.beside import DamageBeside, check_harmless, check_streams_there
from refold.journal.ends import check_snapshots
from refold.journal.errors import JournalError
from refold.journal.record import EMPTY_HEAD, Head, Record
from refold.journal.snapshots import Snapshot, SnapshotEntry
from refold.journal.store import DEFAULT_STREAM
from refold.journal.stores import sql_snapshots
from refold.journal.stores.database import Database
from refold.journal.stores.missing import check_there
from refold.journal.stores.paging import in_pages
from refold.journal.stores.sparing_tables import ARCHIVES, SNAPSHOTS


class SqlReader:
    """The reading half of the port over a database."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._closed = False

    @property
    def place(self) -> str:
        """Where the journal is, as messages call it."""
        return self._database.name

    def doubt(self) -> str:
        """Why it can't be told whether the end of the journal is gone, without an error; empty if it can."""
        return self._database.doubt()

    def inspect(self) -> None:
        """Look at what is beside the records.

        Raises:
            JournalCorrupt: something isn't as it was made; of a kind in `HARMLESS` if no record is concerned.
        """
        check_streams_there(self)
        check_harmless(self)

    def beside(self) -> Sequence[DamageBeside]:
        """What is wrong beside the records; see `refold.journal.beside`."""
        self._check_usable()
        return self._database.beside()

    def check_end(self, stream: str = DEFAULT_STREAM) -> None:
        """See whether a snapshot tells of more records than there are.

        Raises:
            EndInDoubt: one does; kind `truncated`.
        """
        check_snapshots(self, stream, self.place)

    def read(self, stream: str = DEFAULT_STREAM, start: int = 0, stop: int | None = None) -> Iterator[Record]:
        """Records at positions start <= p < stop, in order."""
        assert start >= 0, f"positions start at 0, not {start}"
        archives, folder = self.archives(stream), self._database.folder
        yield from read_across(archives, folder, partial(self._read_own, stream), start, stop)

    def _read_own(self, stream: str, start: int, stop: int | None) -> Iterator[Record]:
        def fetch(*bounds: int) -> Sequence[Sequence[Any]]:
            return self._query(self._database.page_sql, (stream, *bounds))

        for number, page in enumerate(in_pages(fetch, start, stop)):
            if not number:
                check_there(self, stream, fetch, start, page)
            if not page and not start:
                self.head(stream)  # it tells a stream that nobody has begun from one that was lost
            yield from map(self._database.record_of, page)

    def head(self, stream: str = DEFAULT_STREAM) -> Head:
        """The end of the stream."""
        self._check_usable()
        heads = self._database.heads(stream)
        if not heads:
            self._database.check_not_orphaned()
        return heads.get(stream, EMPTY_HEAD)

    def heads(self) -> dict[str, Head]:
        """The end of every stream, by its name."""
        self._check_usable()
        heads = self._database.heads()
        if not heads:
            self._database.check_not_orphaned()
        return dict(sorted(heads.items()))

    def streams(self) -> list[str]:
        """The names of all streams."""
        self._check_usable()
        self._database.check_not_orphaned()
        return list(self.heads())

    def snapshots(self, stream: str = DEFAULT_STREAM) -> list[SnapshotEntry]:
        """What snapshots there are, by position."""
        if SNAPSHOTS in self._database.missing:
            return []
        return [SnapshotEntry(*row) for row in self._select(sql_snapshots.snapshots_of(stream))]

    def load_snapshot(self, stream: str, position: int) -> Snapshot | None:
        """The snapshot at a position, unchecked."""
        if SNAPSHOTS in self._database.missing:
            return None
        rows = self._select(sql_snapshots.snapshot_at(stream, position))
        return Snapshot(*rows[0]) if rows else None

    def archives(self, stream: str = DEFAULT_STREAM) -> list[Archive]:
        """Where the oldest records are, in order."""
        if ARCHIVES in self._database.missing:
            return []
        return [Archive(*row) for row in self._select(sql_snapshots.archives_of(stream))]

    def close(self) -> None:
        """Close every connection. Idempotent."""
        if not self._closed:
            self._closed = True
            self._database.close()

    def _query(self, sql: str, parameters: tuple[Any, ...]) -> Sequence[sa.Row[Any]]:
        self._check_usable()
        return self._database.query(sql, parameters)

    def _select(self, statement: sa.Select[Any]) -> Any:
        self._check_usable()
        return self._database.select(statement)

    def _check_usable(self) -> None:
        if self._closed:
            raise JournalError(f"the journal {self._database.name} is closed: open it again")
