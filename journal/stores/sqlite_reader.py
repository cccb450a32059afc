"""Reading a SQLite journal with the standard library alone: the command line's first row must not wait for SQLAlchemy.

A page of records has a read transaction of its own (`paging.py`), so that a reader never pins the writer's WAL. The body is
fetched as raw bytes, because a damaged body may not be UTF-8 and must reach the verifier, not end in a driver's error.
"""

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from refold.journal.archives import Archive, read_across
from refold.journal.beside import DamageBeside, check_harmless, check_streams_there
from refold.journal.ends import check_snapshots
from refold.journal.errors import JournalCorrupt, JournalError
from refold.journal.record import EMPTY_HEAD, Head, Record, restored
from refold.journal.snapshots import Snapshot, SnapshotEntry
from refold.journal.store import DEFAULT_STREAM
from refold.journal.stores.missing import check_there
from refold.journal.stores.paging import in_pages
from refold.journal.stores.rows import Judged
from refold.journal.stores.sparing_tables import ARCHIVES, SNAPSHOTS
from refold.journal.stores.sqlite_beside import RECORD_SQL, beside, judged_rows, missing_tables
from refold.journal.stores.sqlite_file import check_pages, check_streams, connect_readonly, explain, require_current
from refold.journal.stores.sqlite_marks import check_accepted, check_known, check_marks, doubt_of, marks_of
from refold.journal.stores.strangers import STRANGERS_SQL

HEAD_SQL = "SELECT head_position, head_hash, engine_epoch FROM journal_streams WHERE name = ?"
# The second comparison of stream ids is on the row itself (the index search trusts its order), so a row with a damaged stream id isn't found.
PAGE_SQL = f"""{RECORD_SQL}JOIN journal_streams AS s ON s.stream_id = r.stream_id
WHERE s.name = ? AND +r.stream_id = s.stream_id AND r.position >= ? AND r.position < ? ORDER BY r.position LIMIT ?
"""
SNAPSHOTS_SQL = """
SELECT position, length(body) FROM journal_snapshots AS x JOIN journal_streams AS s ON s.stream_id = x.stream_id
WHERE s.name = ? ORDER BY position
"""
SNAPSHOT_SQL = """
SELECT x.position, x.engine_epoch, x.hash, x.version, x.digest, x.body, x.checksum
FROM journal_snapshots AS x JOIN journal_streams AS s ON s.stream_id = x.stream_id WHERE s.name = ? AND x.position = ?
"""
ARCHIVES_SQL = """
SELECT x.start, x.stop, x.engine_epoch, x.hash, x.path, x.num_bytes, x.checksum
FROM journal_archives AS x JOIN journal_streams AS s ON s.stream_id = x.stream_id WHERE s.name = ? ORDER BY x.start
"""
ENDS_SQL = "SELECT stream_id, head_position, head_hash FROM journal_streams"
HEADS_SQL = "SELECT name, head_position, head_hash, engine_epoch FROM journal_streams ORDER BY name"


class SqliteReader:
    """The reading half of the port over one SQLite file, live or not."""

    __slots__ = ("_connection", "_missing", "_path")

    def __init__(self, path: Path) -> None:
        """Open `path` read-only.

        Raises:
            NotFound: there is no journal at `path`.
            JournalError: it can't be read, isn't a journal, or needs a migration or a newer refold.
        """
        require_current(path)
        self._path = path
        self._connection: sqlite3.Connection | None = connect_readonly(path)
        self._check(check_streams)
        self._missing = missing_tables(self._fetch)
        marks = marks_of(path)
        known = {row[0] for row in self._fetch(ENDS_SQL, ())}
        check_known(path, marks, known if marks.keys() <= known else known | self._numbers())

    @property
    def place(self) -> str:
        """Where the journal is, as messages call it."""
        return str(self._path)

    def doubt(self) -> str:
        """Why it can't be told whether the end of the journal is gone, without an error; empty if it can."""
        return doubt_of(self._path)

    def inspect(self) -> None:
        """Look at the pages that no record is on, at what else is beside the records, and whether all that was acknowledged is there.

        Raises:
            JournalCorrupt: a page is damaged, or the end of a stream is gone, or a stream.
        """
        self._check(check_pages)
        check_streams_there(self)
        marks = marks_of(self._path)
        heads = {number: judged.head for (number, _), judged in judged_rows(self._fetch, self._path).items()}
        check_marks(self._path, marks, {number: head[:2] for number, head in heads.items()})
        check_harmless(self)

    def beside(self) -> Sequence[DamageBeside]:
        """What is wrong beside the records; see `refold.journal.beside`."""
        return beside(self._fetch, self._path)

    def _numbers(self) -> set[int]:
        """The streams whose rows are gone, and whose records are there: `beside` tells of them."""
        return {row[0] for row in self._fetch(STRANGERS_SQL, ())}

    def check_end(self, stream: str = DEFAULT_STREAM) -> None:
        """See whether all of the stream that was acknowledged is there.

        Raises:
            EndInDoubt: it isn't; kind `truncated`.
        """
        marks = marks_of(self._path)
        for (stream_id, _), judged in judged_rows(self._fetch, self._path, stream).items():
            if stream_id in marks:
                check_accepted(self._path, stream_id, marks[stream_id], judged.head[:2])
        check_snapshots(self, stream, self.place)

    def read(self, stream: str = DEFAULT_STREAM, start: int = 0, stop: int | None = None) -> Iterator[Record]:
        """Records at positions start <= p < stop, in order."""
        assert start >= 0, f"positions start at 0, not {start}"
        yield from read_across(self.archives(stream), self._path.parent, partial(self._read_own, stream), start, stop)

    def _read_own(self, stream: str, start: int, stop: int | None) -> Iterator[Record]:
        def fetch(at: int, end: int, most: int) -> list[tuple[Any, ...]]:
            return self._fetch(PAGE_SQL, (stream, at, end, most), at)

        for number, page in enumerate(in_pages(fetch, start, stop)):
            if not number:
                check_there(self, stream, fetch, start, page)
            yield from map(restored, page)

    def head(self, stream: str = DEFAULT_STREAM) -> Head:
        """The end of the stream."""
        for judged in self._judged(stream).values():
            return judged.head
        return EMPTY_HEAD

    def heads(self) -> dict[str, Head]:
        """The end of every stream, by its name."""
        return {name: judged.head for (_, name), judged in self._judged().items()}

    def _judged(self, stream: str | None = None) -> dict[tuple[int, str], Judged]:
        """The rows of streams; as they are stored, where the last record is on a page that can't be read."""
        try:
            return judged_rows(self._fetch, self._path, stream)
        except JournalCorrupt:
            rows = self._fetch(HEADS_SQL, ())
            return {(0, name): Judged(Head._make(rest)) for name, *rest in rows if stream in {None, name}}

    def streams(self) -> list[str]:
        """The names of all streams."""
        return list(self.heads())

    def snapshots(self, stream: str = DEFAULT_STREAM) -> list[SnapshotEntry]:
        """What snapshots there are, by position."""
        rows = [] if SNAPSHOTS in self._missing else self._fetch(SNAPSHOTS_SQL, (stream,))
        return [SnapshotEntry._make(row) for row in rows]

    def load_snapshot(self, stream: str, position: int) -> Snapshot | None:
        """The snapshot at a position, unchecked."""
        rows = [] if SNAPSHOTS in self._missing else self._fetch(SNAPSHOT_SQL, (stream, position))
        return Snapshot._make(rows[0]) if rows else None

    def archives(self, stream: str = DEFAULT_STREAM) -> list[Archive]:
        """Where the oldest records are, in order."""
        rows = [] if ARCHIVES in self._missing else self._fetch(ARCHIVES_SQL, (stream,))
        return [Archive._make(row) for row in rows]

    def close(self) -> None:
        """Close the file."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _check(self, check: Callable[[sqlite3.Connection, Path], None]) -> None:
        assert self._connection is not None, "the reader is open"
        try:
            check(self._connection, self._path)
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise explain(error, self._path, "read") from error

    def _fetch(self, sql: str, parameters: tuple[Any, ...], position: int = 0) -> list[tuple[Any, ...]]:
        if self._connection is None:
            raise JournalError(f"the reader of {self._path} is closed: open it again")
        try:
            return self._connection.execute(sql, parameters).fetchall()
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise explain(error, self._path, "read", position) from error
