"""The SQL store: an append is one guarded transaction, and what became of it is never guessed.

An append names the head that it continues, and the engine epoch that it belongs to. If the database finds another, it
changes nothing and the stream says who wrote: a higher engine epoch (`Fenced`) or another head (`PositionConflict`).

The same guard makes a commit of unknown outcome decidable. After an error the head is read again, on another connection. If
it's the one after, all is in. If it's the one before, it depends on the database whether that's final: a server may still
be working on a statement whose client is gone. There the *same* records are appended again: whichever attempt comes second
finds the head moved, to exactly the hash that it would have made, so nothing gets in twice. This goes on with growing,
jittered pauses until somebody knows or the patience ends, and then the error says that nobody knows.

One connection writes, under a lock; readers take their own from the pool, a page of records at a time. What differs
between databases is in `database.py` and its kinds.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

import sqlalchemy as sa

from refold.journal.archives import Archive, check_files
from refold.journal.errors import JournalError
from refold.journal.record import EMPTY_HEAD, Head, Record, head_after, size_of
from refold.journal.snapshots import Snapshot
from refold.journal.store import DEFAULT_STREAM, Erased
from refold.journal.stores import sql_snapshots
from refold.journal.stores.database import Database, Fate
from refold.journal.stores.guards import (
    check_continues,
    check_replicates,
    check_stream_name,
    check_tail,
    not_open,
    refuse,
    taken_over,
)
from refold.journal.stores.location import Location, locate
from refold.journal.stores.patience import Patience
from refold.journal.stores.room import writing
from refold.journal.stores.sql_reader import SqlReader
from refold.journal.stores.tables import journal_records, journal_streams

_S, _R = journal_streams.c, journal_records.c
_BYTES_PER_DELETED = 4096


class _Opened(NamedTuple):
    stream_id: int
    head: Head
    is_replica: bool = False
    redacted_at: int = 0


class SqlStore(SqlReader):
    """A journal in a SQL database: SQLite or PostgreSQL, by its URL."""

    def __init__(
        self, url: str, *, exclusive: bool = True, busy_timeout_s: float = 5.0, patience_s: float = 30.0
    ) -> None:
        """Open the journal; its tables must be there.

        Args:
            url: `sqlite:///FILE`, a plain path, or `postgresql://USER@HOST/DATABASE`.
            exclusive: hold the owner lock while a stream is open, so that a second engine is refused at once. Without
                it, the engine epoch is the only fence and a second opener takes the journal away from the first.
            busy_timeout_s: how long the database waits for somebody else's lock before it says so.
            patience_s: how long to find out what became of an append whose server went away.

        Raises:
            NotFound: there is no journal.
            JournalError: it can't be opened, isn't ours, or needs a migration.
        """
        location = locate(url)
        if location.kind not in _DATABASES:
            raise JournalError(
                f"{url!r} is no SQL database: use sqlite:///FILE, a plain file path, or postgresql://..."
            )
        super().__init__(_DATABASES[location.kind](location, busy_timeout_s, patience_s))
        self._exclusive = exclusive
        self._lock = threading.RLock()
        self._opened: dict[str, _Opened] = {}

    def claim_stream(self, stream: str = DEFAULT_STREAM) -> bool:
        """Keep other engines out of a stream, without a change to it; see `ClaimingStore`. Erasures are never half done here."""
        check_stream_name(stream)
        with self._opening():
            self._database.enter(stream, exclusive=self._exclusive)
        return True

    def open_stream(self, stream: str = DEFAULT_STREAM) -> Head:
        """Take the stream over in a new engine epoch, after a look at whether its tail is whole."""
        return self._open(stream, is_replica=False)

    def open_replica(self, stream: str = DEFAULT_STREAM) -> Head:
        """Take the stream over for records made elsewhere; see `refold.journal.replicas`."""
        return self._open(stream, is_replica=True)

    def _open(self, stream: str, *, is_replica: bool) -> Head:
        check_stream_name(stream)
        with self._opening():
            self._database.enter(stream, exclusive=self._exclusive)
            opened = self._opened[stream] = self._take_over(stream, is_replica=is_replica)
            return opened.head

    @contextlib.contextmanager
    def _opening(self) -> Iterator[None]:
        """If it fails, the right to write is given back."""
        with self._lock:
            self._check_usable()
            try:
                yield
            except sa.exc.SQLAlchemyError as error:
                self._database.after_error(error)
                self._give_up_opening()
                raise self._database.explain(error, "write") from error
            except BaseException:
                self._give_up_opening()
                raise

    def append(self, stream: str, records: Sequence[Record]) -> Head:
        """Add records at the head, all or none; on disk when this returns."""
        with self._lock:
            opened = self._opened.get(stream)
            if opened is None:
                raise not_open(stream)
            if opened.is_replica:
                check_replicates(opened.head, records)
                for epoch, group in groupby(records, key=attrgetter("engine_epoch")):
                    opened = self._append_group(stream, self._in_epoch(stream, opened, epoch), list(group))
                return opened.head
            check_continues(opened.head, records)
            return self._append_group(stream, opened, records).head

    def erase_content(self, stream: str, records: Sequence[Record], contents: Mapping[int, bytes | None]) -> Erased:
        """Add records at the head, replace contents before it, and forget every snapshot: all or nothing."""
        with self._lock:
            opened = self._opened.get(stream)
            if opened is None:
                raise not_open(stream)
            if opened.is_replica:
                check_replicates(opened.head, records)
                opened = self._in_epoch(stream, opened, records[-1].engine_epoch)
            check_continues(opened.head, records)
            assert all(0 <= position < opened.head.position for position in contents), (
                "only what is there can be erased"
            )
            after = self._append_group(stream, opened, records, contents).head
            self._opened[stream] = self._opened[stream]._replace(redacted_at=after.position)
            return Erased(after, self._database.scrub())

    def _append_group(
        self,
        stream: str,
        opened: _Opened,
        records: Sequence[Record],
        contents: Mapping[int, bytes | None] | None = None,
    ) -> _Opened:
        after = head_after(records[-1])
        attempt = partial(self._database.append, opened.stream_id, opened.head, after, records)
        if contents is not None:
            attempt = partial(self._database.erase, opened.stream_id, opened.head, after, records, contents)
        self._append_for_certain(stream, opened.head, after, records, attempt)
        opened = self._opened[stream] = _Opened(opened.stream_id, after, opened.is_replica, opened.redacted_at)
        self._database.appended(opened.stream_id, after, records)
        return opened

    def _in_epoch(self, stream: str, opened: _Opened, epoch: int) -> _Opened:
        """The replica, in the engine epoch of the records that come next."""
        if epoch == opened.head.engine_epoch:
            return opened
        with self._owning(stream) as (connection, stream_id):
            sql_snapshots.raise_epoch(connection, stream_id, epoch)
        opened = self._opened[stream] = opened._replace(head=opened.head._replace(engine_epoch=epoch))
        return opened

    def save_snapshot(self, stream: str, snapshot: Snapshot) -> None:
        """Keep a snapshot, in the place of one at the same position; not one from before a redaction, which may know too much."""
        if (opened := self._opened.get(stream)) is not None and snapshot.position < opened.redacted_at:
            return
        with self._owning(stream, len(snapshot.body)) as (connection, stream_id):
            sql_snapshots.save_snapshot(connection, stream_id, snapshot)

    def drop_snapshots(self, stream: str, positions: Sequence[int]) -> None:
        """Forget snapshots."""
        with self._owning(stream) as (connection, stream_id):
            sql_snapshots.drop_snapshots(connection, stream_id, positions)

    def add_archive(self, stream: str, archive: Archive) -> None:
        """Move the border."""
        with self._owning(stream) as (connection, stream_id):
            sql_snapshots.add_archive(connection, stream_id, archive)

    def drop_archived(self, stream: str, limit: int) -> int:
        """Delete the oldest records before the border; how many."""
        with self._owning(stream, _BYTES_PER_DELETED * limit) as (connection, stream_id):
            # Where the stored head lags behind the records, nothing may go that the head is known by.
            _save_head(connection, stream, stream_id, self._opened[stream].head)
            first = sql_snapshots.first_position(connection, stream_id)
            if first is not None:
                check_files(self.archives(stream), self._database.folder, first)
            return sql_snapshots.drop_archived(connection, stream_id, limit)

    def compact(self, stream: str = DEFAULT_STREAM) -> None:
        """Give the room of deleted records and snapshots back.

        Raises:
            JournalError: the stream isn't open here, or the storage failed; the journal is as it was.
        """
        with self._lock:
            if stream not in self._opened:
                raise not_open(stream)
            try:
                self._database.vacuum()
            except sa.exc.SQLAlchemyError as error:
                self._database.after_error(error)
                raise self._database.explain(error, "compact") from error

    @contextlib.contextmanager
    def _owning(self, stream: str, num_bytes: int = 0) -> Iterator[tuple[sa.Connection, int]]:
        """One transaction of this stream's owner, about anything but its records; it writes about so many bytes."""
        with self._lock:
            opened = self._opened.get(stream)
            if opened is None:
                raise not_open(stream)
            try:
                connection = self._database.writing()
                with self._database.transaction(connection):
                    if not sql_snapshots.is_owner(connection, opened.stream_id, opened.head.engine_epoch):
                        raise taken_over(stream, opened.head.engine_epoch)
                    yield connection, opened.stream_id
            except sa.exc.SQLAlchemyError as error:
                self._database.after_error(error)
                raise self._database.explain(error, "write") from error
            self._database.wrote(num_bytes)

    def maintain(self, *, idle: bool = False) -> None:
        """Do the database's housekeeping if it's due, or, with `idle`, if there's anything to do.

        Never needed for durability: errors here are left to the next append to find.
        """
        with self._lock:
            if not self._closed:
                self._database.maintain(idle=idle)

    def add_room(self) -> bool:
        """Take a millisecond or two in which nobody waits to make later appends quicker; whether there is more to do."""
        with self._lock:
            return not self._closed and self._database.add_room()

    def close(self) -> None:
        """Leave the journal tidy, close every connection, let the next engine in. Idempotent."""
        with self._lock:
            self._opened.clear()
            super().close()

    def _give_up_opening(self) -> None:
        if not self._opened:
            self._database.stop_writing()

    def _take_over(self, stream: str, *, is_replica: bool) -> _Opened:
        connection = self._database.writing()
        with self._database.transaction(connection):
            row = connection.execute(
                sa.select(_S.stream_id, _S.head_position, _S.head_hash, _S.engine_epoch)
                .where(_S.name == stream)
                .with_for_update()
            ).first()
            stream_id, head = (row[0], Head._make(row[1:])) if row else (None, EMPTY_HEAD)
            if stream_id is not None:
                tail = _tail(connection, stream_id)
                head = head if tail is None else self._database.caught_up(connection, stream_id, head, tail)
                check_tail(stream, head, tail)
            if not is_replica:
                head = head._replace(engine_epoch=head.engine_epoch + 1)
            return _Opened(_save_head(connection, stream, stream_id, head), head, is_replica)

    def _append_for_certain(
        self, stream: str, before: Head, after: Head, records: Sequence[Record], attempt: Callable[[], bool]
    ) -> None:
        """Append; return when the records are in, raise when they aren't, or when the patience ends and nobody knows."""
        patience: Patience | None = None
        in_doubt = False
        while True:
            try:
                if attempt():
                    return
                raise refuse(stream, before, self.head(stream))
            except sa.exc.SQLAlchemyError as failure:
                patience = patience or Patience(self._database.patience_s)
                doing = writing(before.position, after.position - 1, sum(map(size_of, records)))
                error, cause = failure, self._database.explain(failure, doing)
                fate = self._database.after_error(failure)
            now = self._head_if_readable(stream)
            if now == after:
                return
            if now is not None and now != before:
                raise refuse(stream, before, now) from error
            in_doubt |= fate is Fate.UNKNOWN or (fate is Fate.HEAD_TELLS and now is None)
            is_final = fate in {Fate.NOT_IN, Fate.HEAD_TELLS}
            if is_final or not patience.wait():
                raise (_nobody_knows(cause, before, after) if in_doubt else cause) from error

    def _head_if_readable(self, stream: str) -> Head | None:
        try:
            return self.head(stream)
        except JournalError:
            return None


def _nobody_knows(cause: JournalError, before: Head, after: Head) -> JournalError:
    return JournalError(
        f"{cause}; and records {before.position} to {after.position - 1} may or may not be in, which nobody can find out "
        "now: open the journal again to find out"
    )


def _tail(connection: sa.Connection, stream_id: int) -> tuple[int, int, bytes] | None:
    """Position, engine epoch and hash of the last record."""
    row = connection.execute(
        sa.select(_R.position, _R.engine_epoch, _R.hash)
        .where(_R.stream_id == stream_id)
        .order_by(_R.position.desc())
        .limit(1)
    ).first()
    return (row[0], row[1], row[2]) if row else None


def _save_head(connection: sa.Connection, stream: str, stream_id: int | None, head: Head) -> int:
    values = {"head_position": head.position, "head_hash": head.hash, "engine_epoch": head.engine_epoch}
    if stream_id is not None:
        connection.execute(sa.update(journal_streams).where(_S.stream_id == stream_id).values(**values))
        return stream_id
    key = connection.execute(sa.insert(journal_streams).values(name=stream, **values)).inserted_primary_key
    assert key is not None
    return int(key[0])


def _sqlite(location: Location, busy_timeout_s: float, _patience_s: float) -> Database:
    from refold.journal.stores.sqlite_database import SqliteDatabase  # noqa: PLC0415

    assert location.path is not None
    return SqliteDatabase(location.path, busy_timeout_s)


def _postgresql(location: Location, busy_timeout_s: float, patience_s: float) -> Database:
    from refold.journal.stores.postgres import open_database  # noqa: PLC0415

    return open_database(location.url, busy_timeout_s=busy_timeout_s, patience_s=patience_s)


_DATABASES: dict[str, Callable[[Location, float, float], Database]] = {"sqlite": _sqlite, "postgresql": _postgresql}
