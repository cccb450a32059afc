"""The SQL store: SQLAlchemy owns connections, transactions and dialects; the hot path is two prepared statements.

An append is one transaction: move the head from exactly where this handle knows it, in exactly this engine epoch, then
insert the records. If no row matches, someone else wrote, and the row says who: a higher engine epoch (`Fenced`) or
another head (`PositionConflict`). The same row makes a commit of unknown outcome decidable: after any error the head is
read again, and it's either the one before (nothing happened) or the one after (all of it did). Nothing is guessed.

One connection writes, under a lock; readers take their own from the pool, a page of records at a time.
"""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import sqlalchemy as sa

from refold.journal.errors import JournalError
from refold.journal.record import EMPTY_HEAD, Head, Record, content_to_store, restored, size_of
from refold.journal.store import DEFAULT_STREAM
from refold.journal.stores import sqlite_engine
from refold.journal.stores.guards import check_continues, check_stream_name, check_tail, not_open, refuse
from refold.journal.stores.location import sqlite_path
from refold.journal.stores.ownership import OwnerLock
from refold.journal.stores.sqlite_file import require_current
from refold.journal.stores.sqlite_reader import FOREVER, HEAD_SQL, PAGE_RECORDS, PAGE_SQL, STREAMS_SQL
from refold.journal.stores.tables import journal_records, journal_streams

WAL_BOUND_BYTES = 8 << 20
_PAGE_BYTES = 4096
_PAGES_PER_COMMIT = 3

_MOVE_HEAD = """
UPDATE journal_streams SET head_position = ?, head_hash = ?
WHERE stream_id = ? AND engine_epoch = ? AND head_position = ? AND head_hash = ?
"""
_INSERT = """
INSERT INTO journal_records
(stream_id, position, engine_epoch, schema_version, time_ns, body, content, content_hash, hash)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)
"""
_S, _R = journal_streams.c, journal_records.c
_HEAD_COLUMNS = (_S.head_position, _S.head_hash, _S.engine_epoch)


class _Opened(NamedTuple):
    stream_id: int
    head: Head


class SqlStore:
    """A journal in a SQL database; SQLite for now."""

    def __init__(self, url: str, *, exclusive: bool = True, busy_timeout_s: float = 5.0) -> None:
        """Open the journal; its tables must be there.

        Args:
            url: `sqlite:///FILE` or a plain path.
            exclusive: hold the owner lock while a stream is open, so that a second engine is refused at once. Without
                it, the engine epoch is the only fence and a second opener takes the journal away from the first.
            busy_timeout_s: how long to wait for another program's lock on the file.

        Raises:
            NotFound: there is no journal.
            JournalError: it can't be opened, isn't ours, or needs a migration.
        """
        self._path = sqlite_path(url)
        require_current(self._path)
        self._exclusive = exclusive
        self._engine = sqlite_engine.create_engine(self._path, busy_timeout_s=busy_timeout_s)
        self._lock = threading.RLock()
        self._opened: dict[str, _Opened] = {}
        self._owner: OwnerLock | None = None
        self._writer: sa.Connection | None = None
        self._closed = False
        self._wal_bytes = 0

    def open_stream(self, stream: str = DEFAULT_STREAM) -> Head:
        """Take the stream over in a new engine epoch, after a look at whether its tail is whole."""
        check_stream_name(stream)
        with self._lock:
            if self._exclusive and self._owner is None:
                self._check_usable()
                self._owner = OwnerLock(self._path)
            try:
                opened = self._take_over(stream)
            except BaseException:
                if not self._opened:
                    self._stop_writing()
                raise
            self._opened[stream] = opened
            return opened.head

    def append(self, stream: str, records: Sequence[Record]) -> Head:
        """Add records at the head, all or none; on disk when this returns."""
        with self._lock:
            opened = self._opened.get(stream)
            if opened is None:
                raise not_open(stream)
            after = check_continues(opened.head, records)
            rows = [(opened.stream_id, *record_to_row(record)) for record in records]
            try:
                self._append_rows(stream, opened, after, rows)
            except sa.exc.SQLAlchemyError as error:
                self._settle(stream, opened.head, after, error)
            self._opened[stream] = _Opened(opened.stream_id, after)
            self._wal_bytes += _PAGE_BYTES * (_PAGES_PER_COMMIT + len(rows)) + sum(map(size_of, records))
            if self._wal_bytes > 4 * WAL_BOUND_BYTES:
                self.maintain()
            return after

    def read(self, stream: str = DEFAULT_STREAM, start: int = 0, stop: int | None = None) -> Iterator[Record]:
        """Records at positions start <= p < stop, in order."""
        assert start >= 0, f"positions start at 0, not {start}"
        end = FOREVER if stop is None else stop
        while start < end:
            page = self._query(PAGE_SQL, (stream, start, end, PAGE_RECORDS))
            for row in page:
                yield restored(row)
            if len(page) < PAGE_RECORDS:
                return
            start = page[-1][0] + 1

    def head(self, stream: str = DEFAULT_STREAM) -> Head:
        """The end of the stream."""
        rows = self._query(HEAD_SQL, (stream,))
        return Head._make(rows[0]) if rows else EMPTY_HEAD

    def streams(self) -> list[str]:
        """The names of all streams."""
        return [name for (name,) in self._query(STREAMS_SQL, ())]

    def maintain(self, *, idle: bool = False) -> None:
        """Checkpoint the WAL if it has grown past its bound, or if there's anything in it and time for it.

        Never needed for durability: errors here cost disk space only and are left to the next append to find.
        """
        with self._lock:
            if self._writer is None or self._wal_bytes <= (0 if idle else WAL_BOUND_BYTES):
                return
            self._wal_bytes = 0
            with contextlib.suppress(sa.exc.SQLAlchemyError, sqlite_engine.DriverError):
                sqlite_engine.checkpoint(self._writer, "PASSIVE")

    def close(self) -> None:
        """Fold the WAL into the file, close every connection, let the next engine in. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._opened.clear()
            self._stop_writing()
            self._engine.dispose()

    def _take_over(self, stream: str) -> _Opened:
        connection = self._writing()
        try:
            with connection.begin():
                row = connection.execute(
                    sa.select(_S.stream_id, *_HEAD_COLUMNS).where(_S.name == stream).with_for_update()
                ).first()
                stream_id, head = (row[0], Head._make(row[1:])) if row else (None, EMPTY_HEAD)
                if stream_id is not None:
                    check_tail(stream, head, self._tail(connection, stream_id))
                head = head._replace(engine_epoch=head.engine_epoch + 1)
                return _Opened(_save_epoch(connection, stream, stream_id, head), head)
        except sa.exc.SQLAlchemyError as error:
            self._drop_writer()
            raise self._explain(error, "write") from error

    def _append_rows(self, stream: str, opened: _Opened, after: Head, rows: list[tuple[Any, ...]]) -> None:
        before = opened.head
        guard = (opened.stream_id, before.engine_epoch, before.position, before.hash)
        connection = self._writing()
        with connection.begin():
            moved = connection.exec_driver_sql(_MOVE_HEAD, (after.position, after.hash, *guard)).rowcount
            if moved != 1:
                theirs = connection.execute(sa.select(*_HEAD_COLUMNS).where(_S.stream_id == opened.stream_id)).one()
                raise refuse(stream, before, Head._make(theirs))
            connection.exec_driver_sql(_INSERT, rows)

    def _settle(self, stream: str, before: Head, after: Head, error: sa.exc.SQLAlchemyError) -> None:
        """After an error in or around a commit: return if the records are in, raise if they aren't or nobody knows."""
        self._drop_writer()
        cause = self._explain(error, "write")
        try:
            now = self.head(stream)
        except JournalError as second:
            raise JournalError(
                f"{cause}; and the head can't be read, so records {before.position} to {after.position - 1} may or may "
                "not be in: open the journal again to find out"
            ) from second
        if now == after:
            return
        if now != before:
            raise refuse(stream, before, now) from error
        raise cause from error

    def _tail(self, connection: sa.Connection, stream_id: int) -> tuple[int, int, bytes] | None:
        row = connection.execute(
            sa.select(_R.position, _R.engine_epoch, _R.hash)
            .where(_R.stream_id == stream_id)
            .order_by(_R.position.desc())
            .limit(1)
        ).first()
        return (row[0], row[1], row[2]) if row else None

    def _query(self, sql: str, parameters: tuple[Any, ...]) -> Sequence[sa.Row[Any]]:
        self._check_usable()
        try:
            with self._engine.connect().execution_options(**sqlite_engine.READING) as connection:
                return connection.exec_driver_sql(sql, parameters).all()
        except sa.exc.SQLAlchemyError as error:
            raise self._explain(error, "read") from error

    def _writing(self) -> sa.Connection:
        """The one connection that writes."""
        self._check_usable()
        if self._writer is None:
            try:
                self._writer = self._engine.connect()
            except sa.exc.SQLAlchemyError as error:
                raise self._explain(error, "open") from error
            sqlite_engine.enter_wal(self._writer, self._path)
        return self._writer

    def _drop_writer(self) -> None:
        """Forget the writing connection after an error: whatever state it's in, the next use starts afresh."""
        if self._writer is not None:
            with contextlib.suppress(sa.exc.SQLAlchemyError, sqlite_engine.DriverError):
                self._writer.invalidate()
                self._writer.close()
            self._writer = None

    def _stop_writing(self) -> None:
        if self._writer is not None:
            with contextlib.suppress(sa.exc.SQLAlchemyError, sqlite_engine.DriverError):
                sqlite_engine.driver(self._writer).execute("PRAGMA busy_timeout=200")
                sqlite_engine.checkpoint(self._writer, "TRUNCATE")
            self._drop_writer()
        if self._owner is not None:
            self._owner.release()
            self._owner = None

    def _check_usable(self) -> None:
        if self._closed:
            raise JournalError(f"the journal {self._path} is closed: open it again")

    def _explain(self, error: sa.exc.SQLAlchemyError, doing: str) -> JournalError:
        return sqlite_engine.explain_sqlalchemy(error, self._path, doing)


def _save_epoch(connection: sa.Connection, stream: str, stream_id: int | None, head: Head) -> int:
    if stream_id is not None:
        connection.execute(
            sa.update(journal_streams).where(_S.stream_id == stream_id).values(engine_epoch=head.engine_epoch)
        )
        return stream_id
    inserted = connection.execute(
        sa.insert(journal_streams).values(
            name=stream, head_position=head.position, head_hash=head.hash, engine_epoch=head.engine_epoch
        )
    )
    key = inserted.inserted_primary_key
    assert key is not None
    return int(key[0])


def record_to_row(record: Record) -> tuple[Any, ...]:
    """A record's columns, in the order of `_INSERT`, the stream apart."""
    content, content_hash = content_to_store(record)
    text = None if content is None else content.decode()
    return (*record[:4], record.body.decode(), text, content_hash, record.hash)
