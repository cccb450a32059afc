"""What differs between SQL databases, behind one face. The logic of the store is in `sql.py` and knows none of it.

A database has a pool of connections that read, and one connection that writes and holds the right to. After an error that
may have broken it, that connection is thrown away, and the next use makes a new one.
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar

import sqlalchemy as sa

from refold.journal.beside import DamageBeside
from refold.journal.errors import JournalError
from refold.journal.record import Head, Record, content_digest
from refold.journal.stores.sql_read_model import forget_redacted
from refold.journal.stores.sql_snapshots import drop_all_snapshots
from refold.journal.stores.tables import journal_records


class Fate(Enum):
    """What an error says about the records that were to be appended."""

    NOT_IN = "they are not in, and trying again is of no use"
    AGAIN = "they are not in, and trying again may help"
    HEAD_TELLS = "the head tells, once and for all: what isn't in now never will be"
    UNKNOWN = "nobody knows, and what is not in now may still get in"


class Database(ABC):
    """One database with the journal's tables.

    Attributes:
        name: how messages call it; no password.
        patience_s: how long to go on after an error whose fate is `AGAIN` or `UNKNOWN`.
        folder: where the journal's file is; None if it isn't one.
        missing: tables that are gone, which records are read without.
    """

    page_sql: ClassVar[str]
    reading: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, name: str, engine: sa.Engine, patience_s: float) -> None:
        self.name = name
        self.patience_s = patience_s
        self.engine = engine
        self.writer: sa.Connection | None = None
        self.folder: Path | None = None
        self.missing: frozenset[str] = frozenset()

    def doubt(self) -> str:
        """Why it can't be told whether the journal ends where it was acknowledged to, without an error; empty if it can."""
        return ""

    def select(self, statement: sa.Select[Any]) -> Sequence[sa.Row[Any]]:
        """As `query`, of a statement of SQLAlchemy's: for what isn't read often."""
        with explained(self, "read"), self.engine.connect().execution_options(**self.reading) as connection:
            return connection.execute(statement).all()

    def query(self, sql: str, parameters: tuple[Any, ...]) -> Sequence[sa.Row[Any]]:
        """Rows, on a connection of the pool.

        Raises:
            JournalError: they can't be read.
        """
        with explained(self, "read"), self.engine.connect().execution_options(**self.reading) as connection:
            return connection.exec_driver_sql(sql, parameters).all()

    def writing(self) -> sa.Connection:
        """The one connection that writes."""
        if self.writer is None:
            self.writer = self.engine.connect()
            try:
                self.prepare_writer(self.writer)
            except BaseException:
                self.drop_writer()
                raise
        return self.writer

    def drop_writer(self) -> None:
        """Forget the writing connection, whatever state it's in."""
        if self.writer is not None:
            with contextlib.suppress(sa.exc.SQLAlchemyError, *self.driver_errors):
                self.writer.invalidate()
                self.writer.close()
            self.writer = None

    def close(self) -> None:
        """Give the right to write back and close every connection."""
        self.stop_writing()
        self.engine.dispose()

    @property
    @abstractmethod
    def driver_errors(self) -> tuple[type[Exception], ...]:
        """What the driver raises where SQLAlchemy isn't between."""

    @abstractmethod
    def heads(self, stream: str | None = None) -> dict[str, Head]:
        """The end of each stream, or of one if it's there, by its name."""

    def beside(self) -> list[DamageBeside]:
        """What is wrong beside the records; see `refold.journal.beside`. Whoever opens a SQLite file has asked."""
        return []

    @abstractmethod
    def record_of(self, row: Sequence[Any]) -> Record:
        """The record in a row of `page_sql`."""

    @abstractmethod
    def check_not_orphaned(self) -> None:
        """Asked where a stream isn't in the table of streams: are there records that were of it?

        Raises:
            JournalCorrupt: there are records whose stream isn't there.
        """

    @abstractmethod
    def enter(self, stream: str, *, exclusive: bool) -> None:
        """What comes before a stream's engine epoch is raised; with `exclusive`, take the right to write it.

        Raises:
            JournalOwned: a live engine has it.
        """

    @abstractmethod
    def prepare_writer(self, connection: sa.Connection) -> None:
        """What a new writing connection needs."""

    @abstractmethod
    def transaction(self, connection: sa.Connection) -> AbstractContextManager[Any]:
        """A transaction on the writing connection."""

    @abstractmethod
    def caught_up(self, connection: sa.Connection, stream_id: int, stored: Head, tail: tuple[int, int, bytes]) -> Head:
        """The stream's head, where the one that is stored may lag behind the last record (position, epoch, hash)."""

    @abstractmethod
    def append(self, stream_id: int, before: Head, after: Head, records: Sequence[Record]) -> bool:
        """Append atomically if the stream's head is `before`; whether it was. Durable on return."""

    @abstractmethod
    def append_within(
        self, connection: sa.Connection, stream_id: int, before: Head, after: Head, records: Sequence[Record]
    ) -> bool:
        """`append`, in a transaction of the caller's."""

    def erase(
        self,
        stream_id: int,
        before: Head,
        after: Head,
        records: Sequence[Record],
        contents: Mapping[int, bytes | None],
    ) -> bool:
        """Append and replace contents atomically, as `append`. The contents' digests stay what they were.

        Snapshots go: what was erased may be in them. So does what the read model has of it.
        """
        connection = self.writing()
        try:
            with self.transaction(connection):
                if not self.append_within(connection, stream_id, before, after, records):
                    raise _Moved  # noqa: TRY301 - it ends the transaction
                _replace_contents(connection, stream_id, contents)
                drop_all_snapshots(connection, stream_id)
                forget_redacted(connection, stream_id, records)
        except _Moved:
            return False
        return True

    @abstractmethod
    def scrub(self) -> str:
        """Free the database's files of what was erased; says what may be left of it, and what to do, if anything."""

    @abstractmethod
    def after_error(self, error: sa.exc.SQLAlchemyError) -> Fate:
        """What has become of an append that failed. Drops the writing connection if it can't be used any more."""

    @abstractmethod
    def explain(self, error: sa.exc.SQLAlchemyError, doing: str) -> JournalError:
        """The journal's error for one of SQLAlchemy's."""

    @abstractmethod
    def appended(self, stream_id: int, after: Head, records: Sequence[Record]) -> None:
        """Told after each append, for housekeeping."""

    @abstractmethod
    def wrote(self, num_bytes: int) -> None:
        """Told after a write of anything but records, for housekeeping."""

    @abstractmethod
    def maintain(self, *, idle: bool) -> None:
        """Housekeeping that is due; with `idle`, whatever there is."""

    def add_room(self) -> bool:
        """A little room on the disk for what will be appended; whether more would be of use."""
        return False

    @abstractmethod
    def vacuum(self) -> None:
        """Give the room of what was deleted back to whom it came from. All or nothing, and it may take a while."""

    @abstractmethod
    def stop_writing(self) -> None:
        """Give the right to write back, in good order if possible."""


@contextlib.contextmanager
def explained(database: Database, doing: str) -> Iterator[None]:
    """SQLAlchemy's errors as the journal's."""
    try:
        yield
    except sa.exc.SQLAlchemyError as error:
        raise database.explain(error, doing) from error


class _Moved(Exception):
    """The head isn't where it was expected: the transaction is given up."""


_R = journal_records.c
_PAGE_POSITIONS = 500


def _replace_contents(connection: sa.Connection, stream_id: int, contents: Mapping[int, bytes | None]) -> None:
    """Put what is left in the place of each content, and keep the digest of what was there, now that it can't be computed."""
    positions = sorted(contents)
    update = (
        sa.update(journal_records)
        .where(_R.stream_id == stream_id, _R.position == sa.bindparam("at"))
        .values(content=sa.bindparam("left"), content_hash=sa.bindparam("digest"))
    )
    for start in range(0, len(positions), _PAGE_POSITIONS):
        page = positions[start : start + _PAGE_POSITIONS]
        rows = connection.execute(
            sa.select(_R.position, _R.content, _R.content_hash).where(_R.stream_id == stream_id, _R.position.in_(page))
        ).all()
        assert len(rows) == len(page), f"{len(rows)} of {len(page)} records are there"
        values = []
        for position, content, digest in rows:
            left = contents[position]
            kept = digest if digest is not None else content_digest((content or "").encode())
            values.append({"at": position, "left": None if left is None else left.decode(), "digest": kept})
        connection.execute(update, values)
