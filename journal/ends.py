"""What a reader may know of a stream that no record tells: whether somebody vouches for its end, and whether a part is missing."""

import shlex
from typing import Literal, Protocol, runtime_checkable

from refold.journal.errors import JournalCorrupt
from refold.journal.snapshots import SnapshotReader, checksum_of
from refold.journal.store import DEFAULT_STREAM, JournalReader


class EndInDoubt(JournalCorrupt):
    """A stream doesn't end where it was acknowledged to (kind `truncated`), or nobody can tell whether it does (`unmarked`).

    Attributes:
        num_known: how many records it had, as far as something beside them proves; 0 if nothing proves more than are there.
        told_by: what proves it; `head` is the head that is stored with the records.
    """

    def __init__(
        self,
        message: str,
        *,
        position: int,
        num_known: int = 0,
        told_by: Literal["mark", "snapshot", "head"] | None = None,
        kind: Literal["unmarked", "truncated"] = "unmarked",
    ) -> None:
        super().__init__(message, position=position, kind=kind)
        self.num_known, self.told_by = num_known, told_by


@runtime_checkable
class EndChecked(Protocol):
    """A reader that reads a stream also where it can't vouch for its end."""

    def check_end(self, stream: str = DEFAULT_STREAM) -> None:
        """See whether it can.

        Raises:
            EndInDoubt: it can't.
        """
        ...


def check_end(reader: JournalReader, stream: str = DEFAULT_STREAM) -> None:
    """See to it that nobody has to doubt whether a stream still ends where it was acknowledged to.

    Raises:
        EndInDoubt: everybody has to.
    """
    if isinstance(reader, EndChecked):
        reader.check_end(stream)


class ReaderWithSnapshots(SnapshotReader, JournalReader, Protocol):
    """A reader of records and of snapshots of them."""


def check_snapshots(reader: ReaderWithSnapshots, stream: str, place: str) -> None:
    """See to it that no snapshot is of more records than there are: it was made of records on disk, and stored behind them.

    For stores that keep both in one database, where neither can be lost without the other. One whose bytes aren't what was stored proves
    nothing.

    Raises:
        EndInDoubt: one is; kind `truncated`.
    """
    entries = reader.snapshots(stream)  # before the head: an engine may be writing both
    head = reader.head(stream)
    for entry in reversed([entry for entry in entries if entry.position > head.position]):
        snapshot = reader.load_snapshot(stream, entry.position)
        if snapshot is None or snapshot.position != entry.position or checksum_of(snapshot) != snapshot.checksum:
            continue
        raise EndInDoubt(
            f"{place} ends at {head.position}, but a snapshot was made of {entry.position} records, which were acknowledged: its end was "
            f"lost; it names the head {entry.position}:{snapshot.hash.hex()}; restore a backup, or copy what is here by "
            f"`refold copy --accept-end {shlex.quote(place)} NEW`",
            position=head.position,
            num_known=entry.position,
            told_by="snapshot",
            kind="truncated",
        )


@runtime_checkable
class InParts(Protocol):
    """A reader of streams that are kept in parts, which are looked at for less than their records."""

    def check_parts(self, stream: str, stop: int) -> None:
        """See to it that of the parts with records before `stop` none is missing.

        Raises:
            JournalCorrupt: one is; kind `deleted`.
        """
        ...


@runtime_checkable
class Indexed(Protocol):
    """A reader of streams whose records are found by an index that holds none of them."""

    def check_indexes(self, stream: str) -> None:
        """See whether the index is what was written; records are read without it.

        Raises:
            JournalCorrupt: it isn't; kind `unindexed`.
        """
        ...


def check_indexes(reader: JournalReader, stream: str) -> None:
    """See to it that what finds records is whole, where they are read without it too.

    Raises:
        JournalCorrupt: it isn't, and no record is affected; kind `unindexed`.
    """
    if isinstance(reader, Indexed):
        reader.check_indexes(stream)


def check_parts(reader: JournalReader, stream: str, stop: int) -> None:
    """See to it that no part of a stream before `stop` is missing, as far as that shows without reading it.

    For whoever begins at a snapshot: that spares him the records before it, and so their absence.

    Raises:
        JournalCorrupt: one is; kind `deleted`.
    """
    if isinstance(reader, InParts):
        reader.check_parts(stream, stop)
