"""Asking the read model: one SELECT on a connection that can't write."""

import re
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from refold.engine.audit.place import Place, derived, lost_parts
from refold.engine.history.plain import is_unicode
from refold.journal.errors import Rejected
from refold.journal.stores.location import shown
from refold.journal.stores.sqlite_file import connect_readonly, explain
from refold.projections.audit.parts import IN_POSTGRESQL, IN_SQLITE, lost_tables, lost_views
from refold.projections.audit.schema import TABLES

_FETCH_ROWS = 1_000
_PATIENCE_OPCODES = 200_000
_MAX_VALUE_BYTES = 256 << 20
_ABOUT_THE_FILE = {
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_NOTADB,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_CANTOPEN,
}
_READS = {"select", "with", "values", "explain"}
_BLANKS = re.compile(r"(?:\s+|--[^\n]*(?:\n|\Z)|/\*.*?\*/|\()+", re.DOTALL)
_WORD = re.compile(r"[A-Za-z]+")


class Answer(NamedTuple):
    """Rows with their columns' names. The rows come as they are read: take them before the next question."""

    columns: tuple[str, ...]
    rows: Iterator[tuple[Any, ...]]


def check_reads(sql: str) -> str:
    """The statement, if it begins as one that reads does.

    Raises:
        Rejected: it begins otherwise.
    """
    word = _first_word(sql)
    if word.lower() not in _READS:
        what = repr(word.upper()) if word else "no word"
        raise Rejected(f"the statement begins with {what}: only SELECT, WITH, VALUES and EXPLAIN are run, read-only")
    if "\0" in sql:
        raise Rejected("the statement has a NUL character in it: leave it out")
    if not is_unicode(sql):
        raise Rejected("the statement has bytes in it that are no UTF-8: leave them out")
    return sql


def is_reading(text: str) -> bool:
    """Whether a text begins as a statement that reads does, with more behind its first word."""
    return _first_word(text).lower() in _READS and len(text.split()) > 1


def _first_word(sql: str) -> str:
    blank = _BLANKS.match(sql)
    word = _WORD.match(sql, blank.end() if blank else 0)
    return word[0] if word else ""


class Questions:
    """A read-only connection to one read model. Close it."""

    def __init__(self, place: Place) -> None:
        """Connect.

        Raises:
            JournalError: it can't be opened.
        """
        self._place = place
        self._name = shown(place.url) if place.url is not None else str(place.path)
        self._sqlite = _open_sqlite(place.path) if place.path is not None else None
        self._postgres = _Postgres(place.url) if place.url is not None else None

    @property
    def mark(self) -> str:
        """The placeholder for a parameter."""
        return "?" if self._sqlite is not None else "%s"

    def ask(self, sql: str, parameters: Sequence[Any] = ()) -> Answer:
        """The rows of one statement.

        Raises:
            Rejected: it isn't one that reads, or isn't SQL.
            JournalError: the read model has lost what it asks about.
            KeyboardInterrupt: the user has had enough.
        """
        check_reads(sql)
        try:
            return self._ask(sql, parameters)
        except Rejected as error:
            if lost := [name for name in self._lost() if name in str(error)]:
                raise lost_parts(self._place, lost) from error
            raise

    def _lost(self) -> list[str]:
        """What has been dropped of the read model; nothing, where there has never been one."""
        rows = self._ask(IN_POSTGRESQL if self._postgres is not None else IN_SQLITE, ()).rows
        there = {name for (name,) in rows}
        tables = lost_tables(there)
        return [] if len(tables) == len(TABLES) else [*tables, *lost_views(there)]

    def _ask(self, sql: str, parameters: Sequence[Any]) -> Answer:
        if self._postgres is not None:
            return self._postgres.ask(sql, parameters)
        assert self._sqlite is not None
        with _rejected(self._name):
            cursor = self._sqlite.execute(sql, tuple(parameters))
        if cursor.description is None:
            raise Rejected("the statement has no rows to show: write a SELECT")
        return Answer(tuple(column[0] for column in cursor.description), _rows_of(cursor, self._name))

    def close(self) -> None:
        """Free the connection."""
        if self._sqlite is not None:
            self._sqlite.close()
        if self._postgres is not None:
            self._postgres.close()


def _open_sqlite(path: Path) -> sqlite3.Connection:
    connection = connect_readonly(path)
    connection.set_progress_handler(lambda: 0, _PATIENCE_OPCODES)  # lets Ctrl-C in during a long query
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_VALUE_BYTES)
    return connection


def _rows_of(cursor: sqlite3.Cursor, path: str) -> Iterator[tuple[Any, ...]]:
    while True:
        with _rejected(path):
            page = cursor.fetchmany(_FETCH_ROWS)
        if not page:
            return
        yield from page


@contextmanager
def _rejected(path: str) -> Iterator[None]:
    """SQLite's complaint about a statement as the caller's fault, unless it's about the file."""
    try:
        yield
    except (sqlite3.Error, sqlite3.Warning) as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code == sqlite3.SQLITE_INTERRUPT:
            raise KeyboardInterrupt from error
        if code in _ABOUT_THE_FILE:
            raise explain(error, Path(path), "ask") from error
        if code == sqlite3.SQLITE_READONLY:
            raise Rejected("the statement writes, and this connection only reads") from error
        raise Rejected(f"SQL: {' '.join(str(error).split())}") from error


class _Postgres:
    """A session that only reads."""

    def __init__(self, url: str) -> None:
        from refold.journal.stores import postgres_engine  # noqa: PLC0415

        self._explain, self._name = postgres_engine.explain, shown(url)
        settings = {"default_transaction_read_only": "on", "enable_seqscan": "on"}
        self._engine = postgres_engine.create_engine(url, settings)
        self._connection: Any = None

    def ask(self, sql: str, parameters: Sequence[Any]) -> Answer:
        """The rows of one statement; the server holds them back until they are taken."""
        import psycopg  # noqa: PLC0415
        import sqlalchemy as sa  # noqa: PLC0415

        try:
            if self._connection is None:
                self._connection = self._engine.connect()
            raw = self._connection.connection.driver_connection
            cursor = raw.execute(
                sql, tuple(parameters) or None, prepare=True
            )  # prepared: never more than one statement
        except psycopg.errors.ReadOnlySqlTransaction as error:
            raise Rejected("the statement writes, and this connection only reads") from error
        except psycopg.OperationalError as error:
            raise self._explain(sa.exc.DBAPIError(sql, None, error), self._name, "ask") from error
        except psycopg.Error as error:
            raise Rejected(f"SQL: {str(error).splitlines()[0] if str(error) else type(error).__name__}") from error
        except sa.exc.SQLAlchemyError as error:
            raise self._explain(error, self._name, "ask") from error
        if cursor.description is None:
            raise Rejected("the statement has no rows to show: write a SELECT")
        return Answer(tuple(column.name for column in cursor.description), iter(cursor))

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._engine.dispose()


def is_unasked(asked: Questions) -> bool:
    """Whether a read model has its tables and nothing in them: nobody has ever asked for it."""
    try:
        return next(asked.ask("SELECT 1 FROM audit_projections LIMIT 1").rows, None) is None
    except Rejected:  # there are no such tables
        return False


@contextmanager
def questions(place: Place) -> Iterator[Questions]:
    """`Questions` that are closed afterwards."""
    with derived(place):
        asked = Questions(place)
        try:
            yield asked
        finally:
            asked.close()
