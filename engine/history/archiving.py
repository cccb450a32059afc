"""Retention: the oldest records go to a compressed file, the journal goes on without them, and nothing is lost on the way.

    snapshot at the border ──▶ file, synced ──▶ read back, verified ──▶ border moved ──▶ records deleted, some at a time

Each arrow is a point at which a kill does no harm. Before the border has moved, the records are all in the store and the file
counts for nothing; afterwards the file has them, and what is still in the store is deleted by whoever comes next. The record
before the head always stays: it says where the journal ends.
"""

import re
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

from refold.engine.folding import head_before, nearest, snapshot_of, warn_of_doubt
from refold.engine.opening import fold_on
from refold.engine.snapshotting import thin_out
from refold.journal.archives import Archive, ArchivingStore, border_of
from refold.journal.contents import Attestation
from refold.journal.errors import JournalCorrupt, JournalError, Rejected
from refold.journal.naming import naming
from refold.journal.record import Head, Record, follows, head_after
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
        Rejected: `stop` is beyond the record that must stay, or the folder holds another file of that name, or one in which
            something is erased that isn't here, or the other way round.
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


def adopt_archives(store: JournalStore, stream: str, folder: Path) -> list[Archive]:
    """List a stream's archives anew, if its list is lost: the files in `folder` that lead to its records. It's open for this.

    Raises:
        Rejected: the files don't lead to where the stream's own records begin, or have what was redacted since.
        JournalCorrupt: a file isn't what was written.
        JournalError: the store or a file failed.
    """
    assert isinstance(store, ArchivingStore), store
    found, head = list[Archive](), border_of(store, stream)  # one that was killed goes on
    files = _by_start(folder, stream)
    while path := files.pop(head.position, None):
        head, start = _end_of(path, head), head.position
        found.append(_archived(path, start, head))
    if not found:
        raise Rejected(
            f"{folder} has no archive of stream {stream!r} that begins with record {head.position}, which is the first that its "
            "list doesn't have: nothing is to be adopted, or name another folder"
        )
    following = next(iter(store.read(stream, head.position, head.position + 1)), None)
    if following is None or not follows(head, following):
        raise Rejected(
            f"the archives in {folder} end with record {head.position - 1}, and the stream doesn't go on from there: name the "
            "folder with all of them"
        )
    _check_attested(store, stream, found)
    for archive in found:
        store.add_archive(stream, archive)
    return found


def _by_start(folder: Path, stream: str) -> dict[int, Path]:
    """The archives of a stream in a folder, by their first position; of several, the longest."""
    pattern = re.compile(re.escape(_slug(stream)) + r"-(\d{12})-(\d{12})\.(?:refold-archive|parquet)")
    try:
        names = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise JournalError(f"cannot read {folder}: {error.strerror}; name the folder of the archives") from error
    return {int(match[1]): folder.absolute() / match[0] for match in filter(None, map(pattern.fullmatch, names))}


def _end_of(path: Path, start: Head) -> Head:
    """The head behind an archive's last record, each of which was checked to follow from `start` on."""
    from refold.journal.archive_file import read_archive  # noqa: PLC0415 - only who archives needs it

    head = start
    for record in verified(read_archive(path), start, is_whole=False):
        head = head_after(record)
    return head


def _archived(path: Path, start: int, head: Head) -> Archive:
    from refold.journal.archive_file import describe  # noqa: PLC0415 - only who archives needs it

    return describe(path, start, head)


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

    path = folder.absolute() / f"{_slug(stream)}-{start.position:012d}-{goal.position:012d}{SUFFIXES[form]}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise JournalError(f"cannot make {folder}: {error.strerror}; name another folder") from error
    if path.exists():  # from an attempt that was killed after this, if it is the same
        try:
            _check(path, start, goal)
        except JournalError as error:
            raise Rejected(f"{path} exists and holds something else ({error}): name another folder") from error
        _check_says_the_same(path, store, stream, start, goal)
    else:
        records = store.read(stream, start.position, goal.position)
        with naming(store):
            write_archive(path, stream, _counted(verified(records, start, goal, is_whole=False), on_records))
        _check(path, start, goal)
    return describe(path, start.position, goal)


def _slug(stream: str) -> str:
    """What a stream is called in the names of its archives."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", stream)[:40]


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


def _check_says_the_same(path: Path, store: JournalStore, stream: str, start: Head, goal: Head) -> None:
    """The chain holds whether content was erased or not: what an older file still says mustn't come back, nor what it has lost be lost here.

    Raises:
        Rejected: it says something else than the journal.
    """
    from refold.journal.archive_file import read_archive  # noqa: PLC0415 - only who archives needs it

    ours = verified(store.read(stream, start.position, goal.position), start, goal, is_whole=False)
    for there, here in zip(read_archive(path), ours, strict=True):
        if there.content != here.content:
            raise Rejected(
                f"{path} exists, and of record {here.position} it has another content than the journal: one of the two was redacted "
                "since; remove that file, if it is an older one of this journal, or name another folder"
            )


def _check_attested(store: JournalStore, stream: str, found: list[Archive]) -> None:
    """What archives have lost, or have still, is what the records behind them say was redacted.

    Raises:
        Rejected: it isn't.
    """
    from refold.journal.archive_file import read_archive  # noqa: PLC0415 - only who archives needs it

    contents = Attestation(found[0].start)
    archived = chain.from_iterable(read_archive(Path(archive.path)) for archive in found)
    try:
        for record in chain(archived, store.read(stream, found[-1].stop)):
            contents.observe(record)
        contents.settle()
    except JournalCorrupt as error:
        raise Rejected(
            f"these archives aren't those of this journal as it is now: {error}; name a folder with archives that were written after "
            "the last redaction"
        ) from error


def _counted(records: Iterator[Record], on_records: Callable[[int], None]) -> Iterator[Record]:
    for record in records:
        yield record
        on_records(1)
