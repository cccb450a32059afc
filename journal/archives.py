"""Archives: where the oldest records of a stream went, and reading across the border.

An archived stream begins at a border. The store keeps the border's position, the hash and the epoch of the record before it, and
where the records before it are. The chain goes on over the border: the first record that is left follows the anchor, and
the archive ends in it.

Readers read across without being asked: what lies before the border comes from the archive. If that can't be read, they say
what is missing and where it should be; everything from the border on is still there, and a snapshot at the border
lets an engine open.
"""

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

from refold.journal.errors import JournalError
from refold.journal.record import EMPTY_HEAD, Head, Record
from refold.journal.store import DEFAULT_STREAM, JournalStore


class Archive(NamedTuple):
    """Records start <= p < stop of a stream, in a file.

    Attributes:
        start: position of the first record in it.
        stop: position of the first record after it: the border.
        engine_epoch: of its last record.
        hash: of its last record; what the record at `stop` is chained to.
        path: of the file. If it isn't there, a file of that name beside the journal, or in a folder of that name there, will do.
        num_bytes: of the file.
        checksum: SHA-256 of the file; 32 bytes.
    """

    start: int
    stop: int
    engine_epoch: int
    hash: bytes
    path: str
    num_bytes: int
    checksum: bytes

    @property
    def head(self) -> Head:
        """The anchor: the head of a stream that ends where the archive does."""
        return Head(self.stop, self.hash, self.engine_epoch)


@runtime_checkable
class ArchivedReader(Protocol):
    """A store or reader whose streams may have archives."""

    def archives(self, stream: str = DEFAULT_STREAM) -> list[Archive]:
        """In order; each begins where the one before ended, the first at 0."""
        ...


@runtime_checkable
class ArchivingStore(JournalStore, ArchivedReader, Protocol):
    """A store that can let its oldest records go. Both methods need the stream open."""

    def add_archive(self, stream: str, archive: Archive) -> None:
        """Move the border to `archive.stop`, at once and durably. From now on the records before it are the archive's.

        The archive begins at the border that there was, and is on disk, whole.
        """
        ...

    def drop_archived(self, stream: str, limit: int) -> int:
        """Delete up to `limit` of the records before the border; how many there were. 0: they are all gone."""
        ...


def border_of(reader: object, stream: str) -> Head:
    """Where the records of a stream begin: `EMPTY_HEAD` if it has no archive."""
    archives = reader.archives(stream) if isinstance(reader, ArchivedReader) else []
    return archives[-1].head if archives else EMPTY_HEAD


def read_across(
    archives: list[Archive],
    beside: Path | None,
    read: Callable[[int, int | None], Iterator[Record]],
    start: int,
    stop: int | None,
) -> Iterator[Record]:
    """Records start <= p < stop: from the archives as far as they go, then by `read`.

    Raises:
        JournalError: an archive is needed and can't be read.
    """
    for archive in archives:
        end = archive.stop if stop is None else min(stop, archive.stop)
        if start < end:
            path = find_file(archive, beside)
            _check_is_it(archive, path)
            yield from _read_file(path, start, end)
            start = end
    if stop is None or start < stop:
        yield from read(start, stop)


def check_files(archives: list[Archive], beside: Path | None, first: int) -> None:
    """See to it that the archives of records from `first` on are there, before these are deleted: they would be the only ones.

    Raises:
        JournalError: one isn't, or can't be read, or isn't what was written.
    """
    for archive in archives:
        if archive.stop <= first:
            continue
        path = find_file(archive, beside)
        try:
            with path.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").digest()
        except OSError as error:
            raise JournalError(f"{path} can't be read: {error.strerror}; check its permissions") from error
        if found != archive.checksum:
            raise JournalError(
                f"{path} isn't what was written as the archive of records {archive.start} to {archive.stop - 1}, which are here as well: "
                "they stay; put the right file in its place"
            )


def _check_is_it(archive: Archive, path: Path) -> None:
    """Another journal's archive may have the same name; the hash of its last record tells it, and all before that one."""
    last = next(_read_file(path, archive.stop - 1, archive.stop), None)
    if last is None or last.hash != archive.hash:
        raise JournalError(
            f"{path} is not the archive of this journal's records {archive.start} to {archive.stop - 1}: record "
            f"{archive.stop - 1} {'is not in it' if last is None else 'is another one'}; put the right file in its place"
        )


def _read_file(path: Path, start: int, stop: int) -> Iterator[Record]:
    from refold.journal.archive_file import read_archive  # noqa: PLC0415 - most journals have none

    return read_archive(path, start, stop)


def find_file(archive: Archive, beside: Path | None) -> Path:
    """The archive's file: where it was put, or beside the journal.

    Raises:
        JournalError: it is nowhere.
    """
    recorded = Path(archive.path)
    places = [recorded]
    if beside is not None:
        places += [beside / recorded.name, beside / recorded.parent.name / recorded.name]
    for place in places:
        if place.is_file():
            return place
    raise JournalError(
        f"records {archive.start} to {archive.stop - 1} are archived in {recorded}, and it isn't there: put the file back, "
        "or beside the journal"
    )
