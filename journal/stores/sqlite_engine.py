"""A SQLAlchemy engine for SQLite as the journal needs it.

Every transaction states its kind on the `begin` event: `BEGIN IMMEDIATE` by default, because a deferred transaction that
turns from reading to writing fails at once, without waiting for the lock; `BEGIN` for those that say they only read.
The driver's own transaction handling is off (`isolation_level=None`), which makes DDL transactional too.

A record of a large step is a few kilobytes, which is bad for SQLite's usual pages of 4: a row leaves half a page empty, and each
commit writes several. With pages of 1024 bytes, measured on records of 3.3 KB, a commit writes 8.6 KB instead of 21.8
and takes four fifths of the time, and the file is a quarter smaller; on records of 61 KB nothing changes.

`synchronous=FULL` in WAL mode means that a commit has reached the disk when it returns. Nothing checkpoints on its own:
`checkpoint` is called by the one writer. `secure_delete` is on from a file's first row: what is erased later is then
overwritten wherever SQLite had left a copy of it.
"""

import sqlite3
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from refold.journal.errors import JournalError
from refold.journal.stores.patience import Patience
from refold.journal.stores.sqlite_file import BUSY_TIMEOUT_S, explain, lossy_text

DRIVER_ERRORS = (
    sqlite3.Error,
    UnicodeDecodeError,
)  # SQLite's message may quote a damaged text, which the driver can't read
_BEGIN = "refold_begin"
READING = {_BEGIN: "BEGIN"}  # execution options of a connection that only reads

PAGE_BYTES = 1024
_PRAGMAS = (
    f"page_size={PAGE_BYTES}",  # of a new file; one that is there keeps its own
    "synchronous=FULL",
    "wal_autocheckpoint=0",
    "foreign_keys=1",
    "mmap_size=0",
    "journal_size_limit=67108864",
    "temp_store=MEMORY",
    "secure_delete=1",
)


def create_engine(path: Path, *, busy_timeout_s: float = BUSY_TIMEOUT_S) -> sa.Engine:
    """An engine over the file at `path`; connections are made on use and may cross threads."""
    engine = sa.create_engine(
        sa.URL.create("sqlite", database=str(path)),
        connect_args={"isolation_level": None, "timeout": busy_timeout_s, "check_same_thread": False},
    )
    sa.event.listen(engine, "connect", _on_connect)
    sa.event.listen(engine, "begin", partial(_on_begin, busy_timeout_s=busy_timeout_s))
    sa.event.listen(engine, "handle_error", _on_error)
    return engine


def _on_error(context: sa.ExceptionContext) -> Exception | None:
    """An error whose message is no text is one of the database's too."""
    error = context.original_exception
    return sa.exc.DBAPIError(context.statement, None, error) if isinstance(error, UnicodeDecodeError) else None


def _on_connect(connection: sqlite3.Connection, _record: Any) -> None:
    connection.text_factory = lossy_text
    try:
        for pragma in _PRAGMAS:
            connection.execute(f"PRAGMA {pragma}").fetchall()
    except UnicodeDecodeError as error:
        raise sa.exc.DBAPIError("PRAGMA", None, error) from error


def _on_begin(connection: sa.Connection, *, busy_timeout_s: float) -> None:
    if (statement := connection.get_execution_options().get(_BEGIN)) is not None:
        connection.exec_driver_sql(statement)
        return
    try:
        begin_immediate(driver(connection), busy_timeout_s)
    except DRIVER_ERRORS as error:
        raise sa.exc.DBAPIError("BEGIN IMMEDIATE", None, error) from error


def begin_immediate(connection: sqlite3.Connection, patience_s: float) -> None:
    """Begin a transaction that writes, when whoever else writes is done.

    The connection should not wait by itself (`busy_timeout` 0): SQLite would wait in the same rhythm as everybody else who
    waits, and two that collide would do so again.

    Raises:
        sqlite3.Error: nobody else was done in time, or it's no question of time.
    """
    patiently(connection, "BEGIN IMMEDIATE", (), patience_s)


def patiently(connection: sqlite3.Connection, sql: str, parameters: Sequence[Any], patience_s: float) -> None:
    """Execute a statement that takes the write lock first of all, when whoever else writes is done; see `begin_immediate`.

    Raises:
        sqlite3.Error: nobody else was done in time, or it's no question of time.
    """
    patience: Patience | None = None
    while True:
        try:
            connection.execute(sql, parameters)
        except sqlite3.OperationalError as error:
            patience = patience or Patience(patience_s)
            if not is_busy(error) or not patience.wait():
                raise
        else:
            return


def is_busy(error: sqlite3.Error) -> bool:
    """Whether somebody else's lock is in the way."""
    return error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY


def driver(connection: sa.Connection) -> sqlite3.Connection:
    """The driver's connection, for what must run outside any transaction."""
    raw = connection.connection.driver_connection
    assert isinstance(raw, sqlite3.Connection)
    return raw


def enter_wal(connection: sa.Connection, path: Path, *, patience_s: float = BUSY_TIMEOUT_S) -> None:
    """Put the file in WAL mode, which it keeps. SQLite doesn't wait for others here, so we do.

    Raises:
        JournalError: it can't be (a read-only or network file system, or another program holds the file).
    """
    patience = Patience(patience_s)
    while True:
        try:
            (mode,) = driver(connection).execute("PRAGMA journal_mode=WAL").fetchone()
            break
        except DRIVER_ERRORS as error:
            is_lock = isinstance(error, sqlite3.OperationalError) and is_busy(error)
            if not is_lock or not patience.wait():
                raise explain(error, path, "open") from error
    if mode != "wal":
        raise JournalError(f"{path} can't be kept in WAL mode (SQLite answers {mode!r}): move it to a local disk")


def checkpoint(connection: sa.Connection, mode: str) -> bool:
    """Move the WAL's content into the file. Whether all of it is there now (a reader can hold some of it back)."""
    busy, in_wal, moved = driver(connection).execute(f"PRAGMA wal_checkpoint({mode})").fetchone()
    return bool(busy == 0 and in_wal == moved)


def explain_sqlalchemy(error: sa.exc.SQLAlchemyError, path: Path, doing: str) -> JournalError:
    """The journal's error for one of SQLAlchemy's about `path`."""
    original = getattr(error, "orig", None)
    if isinstance(original, DRIVER_ERRORS):
        return explain(original, path, doing)
    return JournalError(f"cannot {doing} {path}: {error}; see the cause")
