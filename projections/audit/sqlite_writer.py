"""The read model in a SQLite file: the journal's own, or one beside it. Standard library only.

A batch is one `BEGIN IMMEDIATE` transaction, short enough that a live engine's append waits for it and notices little. It isn't
synced: a power cut may take the last batches, whole ones, and they are projected again. Like every connection but the engine's,
this one never checkpoints the WAL (see `refold.journal.stores.sqlite_file`). When the last connection to a file closes, SQLite
moves the WAL into the file by itself: who has the file open for reading as well should close that connection first.
"""

import contextlib
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from refold.journal.stores.sqlite_file import explain
from refold.projections.audit.writer import AuditWriter

_PRAGMAS = (
    "wal_autocheckpoint=0",
    "synchronous=NORMAL",
    "mmap_size=0",
    "temp_store=MEMORY",
    "cache_size=-65536",
    "secure_delete=1",
)


class SqliteAuditWriter(AuditWriter):
    """Writes into the file at `path`, whose tables are there."""

    def __init__(self, path: Path, *, busy_timeout_s: float = 10.0) -> None:
        """Open the file, and wait up to `busy_timeout_s` for other writers' transactions.

        Raises:
            JournalError: it can't be opened for writing.
        """
        self._path = path
        self._busy_timeout_s = busy_timeout_s
        self._connection: sqlite3.Connection | None = self._connect()

    def _connect(self) -> sqlite3.Connection:
        uri = f"file:{quote(str(self._path))}?mode=rw"
        with self._explained("open"):
            connection = sqlite3.connect(
                uri, uri=True, timeout=self._busy_timeout_s, isolation_level=None, check_same_thread=False
            )
            for pragma in _PRAGMAS:
                connection.execute(f"PRAGMA {pragma}").fetchall()
        return connection

    @contextmanager
    def transaction(self, *, lock_all: bool = False) -> Iterator[None]:  # noqa: ARG002 - it locks the file
        """`BEGIN IMMEDIATE` to `COMMIT`."""
        self.execute("BEGIN IMMEDIATE")
        try:
            yield
            self.execute("COMMIT")
        except BaseException:
            if self._connection is not None and self._connection.in_transaction:
                with contextlib.suppress(sqlite3.Error):
                    self._connection.execute("ROLLBACK")
            raise

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """One statement."""
        assert self._connection is not None, "the writer is open"
        with self._explained("write"):
            return self._connection.execute(sql, parameters).fetchall()

    def execute_many(self, sql: str, rows: Sequence[Sequence[Any]]) -> None:
        """One statement for each row."""
        assert self._connection is not None, "the writer is open"
        with self._explained("write"):
            self._connection.executemany(sql, rows)

    def close(self) -> None:
        """Close the file."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    @contextmanager
    def _explained(self, doing: str) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OverflowError, UnicodeEncodeError) as error:
            raise explain(error, self._path, doing) from error
