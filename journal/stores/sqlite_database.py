"""The SQL store's database as one SQLite file.

An append moves the stream's head from exactly where the writer knows it, and inserts the records, in one transaction. The
right to write is a lock beside the file. Errors are final: SQLite works in our own process, so after a failed commit the
head is where it will stay.
"""

import contextlib
import sqlite3
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from refold.journal.errors import JournalCorrupt, JournalError
from refold.journal.record import Head, Record, restored, size_of
from refold.journal.stores import sqlite_append, sqlite_engine
from refold.journal.stores.database import Database, Fate
from refold.journal.stores.ownership import OwnerLock
from refold.journal.stores.patience import Patience
from refold.journal.stores.sqlite_file import connect_readonly, has_wal, require_current
from refold.journal.stores.sqlite_marks import Marks, doubt_of
from refold.journal.stores.sqlite_reader import HEAD_SQL, HEADS_SQL, PAGE_SQL
from refold.journal.stores.sqlite_taking import check_takeable
from refold.journal.stores.sqlite_wal import WAL_BOUND_BYTES, Wal

# ruff: noqa: D102 - the methods are documented in Database

_PAGES_PER_COMMIT = 5
_SCRUB_PATIENCE_S = 5.0


class SqliteDatabase(Database):
    """A SQLite file with the journal's tables."""

    page_sql = PAGE_SQL
    reading = sqlite_engine.READING

    def __init__(self, path: Path, busy_timeout_s: float) -> None:
        require_current(path)
        super().__init__(str(path), sqlite_engine.create_engine(path, busy_timeout_s=busy_timeout_s), patience_s=0.0)
        self._path = path
        self._busy_timeout_s = busy_timeout_s
        self.folder = path.parent
        self._owner: OwnerLock | None = None
        self._driver: sqlite3.Connection | None = None  # the writing connection's own
        self._wal = Wal(path)
        self._has_written = self._is_refused = False
        self._marks = Marks(path)

    @property
    def driver_errors(self) -> tuple[type[Exception], ...]:
        return sqlite_engine.DRIVER_ERRORS

    def heads(self, stream: str | None = None) -> dict[str, Head]:
        if stream is None:
            return {row[0]: Head._make(row[1:]) for row in self.query(HEADS_SQL, ())}
        rows = self.query(HEAD_SQL, (stream,))
        return {stream: Head._make(rows[0])} if rows else {}

    def record_of(self, row: Sequence[Any]) -> Record:
        return restored(row)

    def check_not_orphaned(self) -> None:
        """Whoever opens the file has asked: `check_streams` to read, `check_takeable` to write."""

    def enter(self, stream: str, *, exclusive: bool) -> None:
        if exclusive and self._owner is None:
            self._owner = OwnerLock(self._path)
        try:
            check_takeable(self._path, stream)
        except JournalCorrupt:
            self._is_refused = True
            raise

    def doubt(self) -> str:
        return doubt_of(self._path)

    def prepare_writer(self, connection: sa.Connection) -> None:
        self._has_written = True
        sqlite_engine.enter_wal(connection, self._path)
        self._driver = sqlite_engine.driver(connection)
        self._driver.execute("PRAGMA busy_timeout=0")  # see `begin_immediate`
        sqlite_append.prepare(self._driver)
        self._wal.emptied()
        self._wal.keep_room(self._driver)

    def transaction(self, connection: sa.Connection) -> AbstractContextManager[Any]:
        return connection.begin()

    def caught_up(
        self,
        connection: sa.Connection,  # noqa: ARG002
        stream_id: int,  # noqa: ARG002
        stored: Head,
        tail: tuple[int, int, bytes],  # noqa: ARG002
    ) -> Head:
        return stored

    def append(
        self,
        stream_id: int,
        before: Head,
        after: Head,  # noqa: ARG002 - the records say it
        records: Sequence[Record],
    ) -> bool:
        """Through the driver itself: SQLAlchemy's share of a transaction was measured to be two thirds of its time."""
        driver = self._driver if self.writer is not None else sqlite_engine.driver(self.writing())
        assert driver is not None, "a writing connection was prepared"
        try:
            return sqlite_append.append(driver, stream_id, before.hash, records, self._busy_timeout_s)
        except sqlite_engine.DRIVER_ERRORS as error:
            raise _as_sqlalchemy_would("append", error) from error

    def append_within(
        self,
        connection: sa.Connection,
        stream_id: int,
        before: Head,
        after: Head,  # noqa: ARG002
        records: Sequence[Record],
    ) -> bool:
        try:
            return sqlite_append.append_within(sqlite_engine.driver(connection), stream_id, before.hash, records)
        except sqlite_engine.DRIVER_ERRORS as error:
            raise _as_sqlalchemy_would("append", error) from error

    def scrub(self) -> str:
        """Move the WAL into the file and cut it to nothing. What was overwritten in the file, SQLite fills with zeros."""
        patience = Patience(_SCRUB_PATIENCE_S)
        while True:
            with contextlib.suppress(sa.exc.SQLAlchemyError, *sqlite_engine.DRIVER_ERRORS):
                if sqlite_engine.checkpoint(self.writing(), "TRUNCATE"):
                    self._wal.emptied()
                    return ""
            if not patience.wait():
                return f"{self._path}-wal, which another program is reading: it is emptied when this journal is closed"

    def after_error(self, error: sa.exc.SQLAlchemyError) -> Fate:  # noqa: ARG002 - all of them are alike
        self.drop_writer()
        return Fate.HEAD_TELLS

    def explain(self, error: sa.exc.SQLAlchemyError, doing: str) -> JournalError:
        return sqlite_engine.explain_sqlalchemy(error, self._path, doing)

    def appended(self, stream_id: int, after: Head, records: Sequence[Record]) -> None:
        self._marks.move(stream_id, after)
        self._wal.committed(sqlite_engine.PAGE_BYTES * (_PAGES_PER_COMMIT + len(records)) + sum(map(size_of, records)))
        if self._wal.used_bytes > 4 * WAL_BOUND_BYTES:
            self.maintain(idle=False)

    def wrote(self, num_bytes: int) -> None:
        self._wal.committed(num_bytes)

    def maintain(self, *, idle: bool) -> None:
        """Checkpoint the WAL if it has grown past its bound, or if there's anything in it and time for it."""
        if self.writer is None or self._driver is None:
            return
        if self._wal.used_bytes > (0 if idle else WAL_BOUND_BYTES):
            self._wal.moved()
            with contextlib.suppress(sa.exc.SQLAlchemyError, *sqlite_engine.DRIVER_ERRORS):
                sqlite_engine.checkpoint(self.writer, "PASSIVE")
        self._wal.keep_room(self._driver)

    def add_room(self) -> bool:
        return self.writer is not None and self._driver is not None and self._wal.add_room(self._driver)

    def vacuum(self) -> None:
        """In WAL mode, where a killed one is undone by whoever reads next; the pages keep their size."""
        connection = self.writing()
        driver = sqlite_engine.driver(connection)
        try:
            driver.execute(f"PRAGMA busy_timeout={round(self._busy_timeout_s * 1000)}")
            driver.execute("VACUUM")
            sqlite_engine.checkpoint(connection, "TRUNCATE")
            driver.execute("PRAGMA busy_timeout=0")
        except sqlite_engine.DRIVER_ERRORS as error:
            raise _as_sqlalchemy_would("VACUUM", error) from error
        self._wal.emptied()

    def close(self) -> None:
        """As ever; but of a journal that is damaged, or was never written to here, nothing is changed: its WAL may be evidence.

        The last connection to close folds the WAL into the file, if it can write: so the last one is one that can't.
        """
        with contextlib.ExitStack() as held:
            if has_wal(self._path) and (self._is_refused or not self._has_written):
                with contextlib.suppress(JournalError):
                    held.enter_context(contextlib.closing(connect_readonly(self._path)))
            super().close()

    def stop_writing(self) -> None:
        """Fold the WAL into the file, and let go of the lock."""
        if self.writer is not None:
            with contextlib.suppress(sa.exc.SQLAlchemyError, *sqlite_engine.DRIVER_ERRORS):
                sqlite_engine.driver(self.writer).execute("PRAGMA busy_timeout=200")
                sqlite_engine.checkpoint(self.writer, "TRUNCATE")
            self.drop_writer()
        self._marks.close()
        if self._owner is not None:
            self._owner.release()
            self._owner = None


def _as_sqlalchemy_would(statement: str, error: Exception) -> sa.exc.DBAPIError:
    """The driver's error as it would come through SQLAlchemy."""
    return sa.exc.DBAPIError(statement, None, error)
