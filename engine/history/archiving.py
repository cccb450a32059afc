"""Retention: the oldest records go to a compressed file, the journal goes on without them, and nothing is lost on the way.

    snapshot at the border ──▶ file, synced ──▶ read back, verified ──▶ border moved ──▶ records deleted, some at a time

Each arrow is a point at which a kill does no harm. Before the border has moved, the records are all in the store and the file
counts for nothing; afterwards the file has them, and what is still in the store is deleted by whoever comes next. The record
before the head always stays: it says where the journal ends.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from refold.engine.folding import head_before, nearest, snapshot_of, warn_of_doubt
from refold.engine.opening import fold_on
from refold.engine.snapshotting import thin_out
from refold.journal.archives import Archive, ArchivingStore, border_of
from refold.journal.errors import JournalCorrupt, JournalError, Rejected
from refold.journal.naming import naming
from refold.journal.record import Head, Record
from refold.journal.replicas import ReplicaStore
from refold.journal.snapshots import SnapshotStore
from refold.journal.store import JournalReader, JournalStore
from refold.journal.verify import verified

DELETE_RECORDS = 2048
SUFFIXES = {"zstd": ".refold-archive", "parquet": ".parquet"}


def position_at_time(reader: JournalReader, stream: str, time_ns: int) -> int:
    """The position before which everything was written before `time_ns`, as far as that goes without a gap.

    Raises:
        JournalError: the journal can't be read.
    """
    low, high = border_of(reader, stream).position, reader.head(stream).position
    while low < high:
        middle = (low + high) // 2
        (record,) = reader.read(stream, middle, middle + 1)
        low, high = (middle + 1, high) if record.time_ns < time_ns else (low, middle)
    return low


def archive_until(
    store: JournalStore,
    stream: str,
    stop: int,
    folder: Path,
    *,
    form: str = "zstd",
    on_records: Callable[[int], None] = lambda _: None,
) -> Archive | None:
    """Move the records before `stop` to a file in `folder`; None if there is nothing to move. The stream is open for this.

    Raises:
        Rejected: `stop` is beyond the record that must stay, or the folder holds another file of that name.
        JournalCorrupt: a record is damaged; nothing was moved.
        JournalError: a store or the folder failed.
    """
    assert isinstance(store, ArchivingStore), store
    head, border = store.head(stream), border_of(store, stream)
    if stop >= head.position:
        raise Rejected(
            f"position {stop}: the last record, {head.position - 1}, stays in the journal; archive until {head.position - 1} "
            "at most"
        )
    if stop <= border.position:
        return None
    goal = head_before(store, stream, stop)
    _keep_snapshot(store, stream, goal)
    archive = _write(store, stream, border, goal, folder, form, on_records)
    store.add_archive(stream, archive)
    return archive


def delete_archived(store: JournalStore, stream: str, on_records: Callable[[int], None] = lambda _: None) -> int:
    """Delete the records that the archives have, some at a time; how many there were. The stream is open for this."""
    if not isinstance(store, ArchivingStore):
        return 0
    deleted = 0
    while count := store.drop_archived(stream, DELETE_RECORDS):
        deleted += count
        on_records(count)
    return deleted


def open_for_keeping(store: JournalStore, stream: str) -> None:
    """Take the stream over without beginning a new life of the engine.

    Raises:
        JournalOwned: a live engine has it.
        JournalError: the store can't be opened so.
    """
    if not isinstance(store, ReplicaStore):
        raise JournalError(f"{type(store).__name__} can't be opened without an engine: it has no open_replica")
    warn_of_doubt(store)
    store.open_replica(stream)


def compact_stream(store: JournalStore, stream: str, on_records: Callable[[int], None] = lambda _: None) -> int:
    """Delete what is archived and the snapshots that are too many; how many records went. The stream is open for this."""
    deleted = delete_archived(store, stream, on_records)
    if isinstance(store, SnapshotStore):
        thin_out(store, stream)
    return deleted


def _keep_snapshot(store: JournalStore, stream: str, goal: Head) -> None:
    """The snapshot at the border stands for the archive: with it, an engine opens without it."""
    if isinstance(store, SnapshotStore):
        base = fold_on(store, stream, nearest(store, stream, goal.position), goal, is_whole=False)
        store.save_snapshot(stream, snapshot_of(*base))


def _write(
    store: JournalStore,
    stream: str,
    start: Head,
    goal: Head,
    folder: Path,
    form: str,
    on_records: Callable[[int], None],
) -> Archive:
    from refold.journal.archive_file import describe, write_archive  # noqa: PLC0415 - only who archives needs it

    slug = re.sub(r"[^A-Za-z0-9_-]", "_", stream)[:40]
    path = folder.absolute() / f"{slug}-{start.position:012d}-{goal.position:012d}{SUFFIXES[form]}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise JournalError(f"cannot make {folder}: {error.strerror}; name another folder") from error
    if path.exists():  # from an attempt that was killed after this, if it is the same
        try:
            _check(path, start, goal)
        except JournalError as error:
            raise Rejected(f"{path} exists and holds something else ({error}): name another folder") from error
    else:
        records = store.read(stream, start.position, goal.position)
        with naming(store):
            write_archive(path, stream, _counted(verified(records, start, goal, is_whole=False), on_records))
        _check(path, start, goal)
    return describe(path, start.position, goal)


def _check(path: Path, start: Head, goal: Head) -> None:
    """The file leads from `start` to `goal`, record by record."""
    from refold.journal.archive_file import read_archive  # noqa: PLC0415 - only who archives needs it

    count = sum(1 for _ in verified(read_archive(path), start, goal, is_whole=False))
    if count != goal.position - start.position:
        raise JournalCorrupt(
            f"{path} has {count} records, expected {goal.position - start.position}: remove it, and archive again",
            position=start.position + count,
            kind="truncated",
        )


def _counted(records: Iterator[Record], on_records: Callable[[int], None]) -> Iterator[Record]:
    for record in records:
        yield record
        on_records(1)
