"""The SQL store's database as PostgreSQL.

An append is one statement and one round trip: it locks the stream's row in the writer's engine epoch, checks that the
record before the first is the one that the writer knows, and inserts. Nothing is updated, on purpose. A row that every
append changes leaves a dead version each time, and while some forgotten transaction holds a snapshot, none of them can be
cleared away: measured, 20,000 appends later each one took three times as long. Locking a row leaves no version behind.

So the head is the last record's, and the head that is stored in `journal_streams` lags behind: it's written when the
stream is opened and closed, when the writer has nothing to do, and every so many records. A stream that ends before it
was cut off. Opening reads the head under the lock of the row, so it waits for an append that's under way, the last gasp of
a dead engine included, and no append of an older epoch gets in after it.

Bodies are stored without the server's compression, which was measured to cost twice the rest of the append.
"""

import contextlib
import os
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from refold.journal import naming
from refold.journal.beside import DamageBeside
from refold.journal.errors import JournalError
from refold.journal.record import GENESIS_HASH, Head, Record
from refold.journal.store import DEFAULT_STREAM
from refold.journal.stores import postgres_append, postgres_beside, postgres_engine, postgres_owner
from refold.journal.stores.columns import RECORD_COLUMNS, row_to_record
from refold.journal.stores.database import Database, Fate, explained
from refold.journal.stores.location import shown
from refold.journal.stores.sparing_tables import check_none_missing
from refold.journal.stores.sql_reader import SqlReader

if TYPE_CHECKING:
    import psycopg

# ruff: noqa: D102, S608 - the methods are documented in Database; what is put into SQL are names of columns

_SAVE_EVERY_RECORDS = 1024
_PAGE = f"""
SELECT {", ".join(f"r.{name}" for name in RECORD_COLUMNS)}
FROM journal_records AS r JOIN journal_streams AS s ON s.stream_id = r.stream_id
WHERE s.name = %s AND r.position >= %s AND r.position < %s ORDER BY r.position LIMIT %s
"""
_STREAM_ID = "SELECT stream_id FROM journal_streams WHERE name = %s"
_NEW_STREAM = """
INSERT INTO journal_streams (name, head_position, head_hash, engine_epoch) VALUES (%s, 0, %b, 0) ON CONFLICT DO NOTHING
"""
_HASH_BEFORE = "SELECT hash FROM journal_records WHERE stream_id = %s AND position = %s - 1"
_SAVE_HEAD = """
UPDATE journal_streams SET head_position = %s, head_hash = %b
WHERE stream_id = %s AND engine_epoch = %s AND head_position < %s
"""


class PostgresDatabase(Database):
    """A PostgreSQL database with the journal's tables."""

    page_sql = _PAGE

    def __init__(self, name: str, engine: sa.Engine, patience_s: float) -> None:
        super().__init__(name, engine, patience_s)
        self._claims: dict[int, bool] = {}  # stream -> whether the writing session has its lock
        self._heads: dict[int, Head] = {}
        self._saved: dict[int, int] = {}
        self._num_since_saved = 0  # records, at most
        self._appends: postgres_append.Appends | None = None  # of the writing session
        _live.add(self)

    @property
    def driver_errors(self) -> tuple[type[Exception], ...]:
        import psycopg  # noqa: PLC0415

        return (psycopg.Error,)

    def record_of(self, row: Sequence[Any]) -> Record:
        return row_to_record(row)

    def heads(self, stream: str | None = None) -> dict[str, Head]:
        with explained(self, "read"), self.engine.connect() as connection:
            return {name: judged.head for name, judged in postgres_beside.judged_rows(connection, stream).items()}

    def beside(self) -> list[DamageBeside]:
        with explained(self, "read"), self.engine.connect() as connection:
            return postgres_beside.beside(connection, self.name, self.missing)

    def check_not_orphaned(self) -> None:
        with explained(self, "read"), self.engine.connect() as connection:
            for damage in postgres_beside.strangers(connection):
                if damage.kind == "deleted":
                    raise naming.name(damage, self.name)

    def enter(self, stream: str, *, exclusive: bool) -> None:
        """Make the stream's row, in epoch 0: its number is the lock's key, and two openers must not both insert it."""
        connection = self.writing()
        for damage in postgres_beside.beside(connection, self.name, self.missing):
            if damage.stream in {None, stream}:
                raise damage
        stream_id = connection.exec_driver_sql(_STREAM_ID, (stream,)).scalar()
        if stream_id is None:
            connection.exec_driver_sql(_NEW_STREAM, (stream, GENESIS_HASH))
            stream_id = connection.exec_driver_sql(_STREAM_ID, (stream,)).scalar_one()
        if exclusive and not self._claims.get(stream_id):
            postgres_owner.lock(connection, stream_id, stream, self.name)
            self._claims[stream_id] = True

    def prepare_writer(self, connection: sa.Connection) -> None:
        """Take back the locks that went with the last connection, those that can be had."""
        self._appends = postgres_append.Appends(_driver(connection))
        for stream_id in self._claims:
            self._claims[stream_id] = postgres_owner.try_lock(connection, stream_id)

    def transaction(self, connection: sa.Connection) -> AbstractContextManager[Any]:
        return _transaction(connection)

    def caught_up(self, connection: sa.Connection, stream_id: int, stored: Head, tail: tuple[int, int, bytes]) -> Head:
        position, _, digest = tail
        if position + 1 <= stored.position:
            return stored
        there = connection.exec_driver_sql(_HASH_BEFORE, (stream_id, stored.position)).scalar()
        # A stored head that isn't on the way to the last record goes to the check as it is, and fails it.
        return stored if there not in {None, stored.hash} else Head(position + 1, digest, stored.engine_epoch)

    def append(self, stream_id: int, before: Head, after: Head, records: Sequence[Record]) -> bool:
        return self.append_within(self.writing(), stream_id, before, after, records)

    def append_within(
        self,
        connection: sa.Connection,
        stream_id: int,
        before: Head,
        after: Head,  # noqa: ARG002
        records: Sequence[Record],
    ) -> bool:
        assert connection is self.writer, "appends go through the writing session"
        assert self._appends is not None, "it was made ready for them"
        return self._appends.append(stream_id, before, records)

    def scrub(self) -> str:
        return (
            "the server's files: run VACUUM FULL journal_records, audit_tokens there, and mind its write-ahead log and backups, which keep "
            "what was erased until they are recycled"
        )

    def after_error(self, error: sa.exc.SQLAlchemyError) -> Fate:
        fate = postgres_engine.fate_of(error)
        if fate is Fate.UNKNOWN or postgres_engine.is_lost(error):
            self.drop_writer()
        return fate

    def explain(self, error: sa.exc.SQLAlchemyError, doing: str) -> JournalError:
        return postgres_engine.explain(error, self.name, doing)

    def drop_writer(self) -> None:
        super().drop_writer()
        self._claims = dict.fromkeys(self._claims, False)

    def appended(self, stream_id: int, after: Head, records: Sequence[Record]) -> None:
        self._heads[stream_id] = after
        self._num_since_saved += len(records)

    def wrote(self, num_bytes: int) -> None:
        """The server looks after its own."""

    def maintain(self, *, idle: bool) -> None:
        """Store the heads that have moved far, or with `idle` at all, and ask again for a lock that was lost."""
        if not idle and self._num_since_saved < _SAVE_EVERY_RECORDS and False not in self._claims.values():
            return
        due = [
            (stream_id, head)
            for stream_id, head in self._heads.items()
            if head.position - self._saved.get(stream_id, 0) >= (1 if idle else _SAVE_EVERY_RECORDS)
        ]
        if self.writer is None or not (due or not all(self._claims.values())):
            return
        try:
            for stream_id, had in self._claims.items():
                self._claims[stream_id] = had or postgres_owner.try_lock(self.writer, stream_id)
            for stream_id, head in due:
                self._saved[stream_id] = head.position
                guard = (stream_id, head.engine_epoch, head.position)
                self.writer.exec_driver_sql(_SAVE_HEAD, (head.position, head.hash, *guard))
        except sa.exc.SQLAlchemyError as error:
            self.after_error(error)
        moved = (head.position - self._saved.get(stream_id, 0) for stream_id, head in self._heads.items())
        self._num_since_saved = max(moved, default=0)

    def vacuum(self) -> None:
        """Mark the room as free for new rows; the server needs no more, and a full one would lock everybody out."""
        self.writing().exec_driver_sql("VACUUM journal_records, journal_snapshots, journal_archives")

    def stop_writing(self) -> None:
        if self.writer is not None:
            self.maintain(idle=True)
        if self.writer is not None:
            with contextlib.suppress(sa.exc.SQLAlchemyError):
                postgres_owner.unlock_all(self.writer)
        self._claims.clear()
        self._heads.clear()
        self.drop_writer()

    def forget_in_child(self) -> None:
        """In a forked child, let go of the sockets without a word: the sessions are the parent's."""
        if self.writer is not None:
            with contextlib.suppress(Exception):
                raw: Any = self.writer.connection.driver_connection
                nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
                os.dup2(nowhere, raw.pgconn.socket, inheritable=False)
                os.close(nowhere)
        self.engine.dispose(close=False)


def _driver(connection: sa.Connection) -> "psycopg.Connection[Any]":
    """The driver's connection: appends go through it, as SQLite's do; SQLAlchemy's share of their time would be the larger."""
    driver: Any = connection.connection.driver_connection
    return driver  # type: ignore[no-any-return]


@contextlib.contextmanager
def _transaction(connection: sa.Connection) -> Any:
    """BEGIN and COMMIT on a connection that commits by itself."""
    connection.exec_driver_sql("BEGIN")
    try:
        yield
    except sa.exc.DBAPIError as error:
        if not error.connection_invalidated:
            connection.exec_driver_sql("ROLLBACK")
        raise
    except BaseException:
        connection.exec_driver_sql("ROLLBACK")
        raise
    connection.exec_driver_sql("COMMIT")


_live: "weakref.WeakSet[PostgresDatabase]" = weakref.WeakSet()


def _forget_in_child() -> None:
    for database in list(_live):
        database.forget_in_child()


# A forked worker must not keep the stream owned after its engine was killed.
os.register_at_fork(after_in_child=_forget_in_child)


def open_database(url: str, *, busy_timeout_s: float, patience_s: float, read_only: bool = False) -> PostgresDatabase:
    """The database behind a URL, once it's known to have today's tables.

    Raises:
        NotFound: there is no journal.
        JournalError: it can't be reached, isn't ours, or needs a migration.
    """
    settings = {"synchronous_commit": "on", "lock_timeout": str(max(1, int(busy_timeout_s * 1000)))}
    if read_only:
        settings["default_transaction_read_only"] = "on"
    database = PostgresDatabase(shown(url), postgres_engine.create_engine(url, settings), patience_s)
    try:
        with explained(database, "open"), database.engine.connect() as connection:
            database.missing = postgres_engine.require_current(connection, database.name)
            if not read_only:
                check_none_missing(database.name, database.missing)
            postgres_engine.require_utf8(connection, database.name)
    except BaseException:
        database.engine.dispose()
        raise
    return database


def open_postgres_reader(url: str) -> SqlReader:
    """A reader that can't write.

    Raises:
        NotFound: there is no journal.
        JournalError: it can't be read or isn't ours.
    """
    return SqlReader(open_database(url, busy_timeout_s=5.0, patience_s=0.0, read_only=True))


def owner_of_database(url: str, stream: str = DEFAULT_STREAM) -> int | None:
    """The process id of the live engine that writes the stream, 0 if it hides its id, None if there's no owner."""
    database = open_database(url, busy_timeout_s=5.0, patience_s=0.0, read_only=True)
    try:
        with explained(database, "read"), database.engine.connect() as connection:
            stream_id = connection.exec_driver_sql(_STREAM_ID, (stream,)).scalar()
            return dict(postgres_owner.owners(connection)).get(stream_id or 0)
    finally:
        database.close()
