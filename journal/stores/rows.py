"""The row of a stream, and what its records say: which of both is wrong?

The row in `journal_streams` guards appends: it names the head and the engine epoch. It isn't covered by any hash, and a hand can
change it. The records carry their own hashes, and beside a SQLite file a mark names the last record that was acknowledged. Where this
one is the last that is there, nothing is lost whatever the row says, and the records are read up to it. Without such a witness,
the row or the record may be the changed one, and it stays a question: the record that the row doesn't name is not vouched for.

An engine epoch in the row is damage if it is before the last record's, or one that no engine ever reaches: each opening raises
it by one, and `LAST_EPOCH` openings take a million a second 285 years.
"""

from typing import NamedTuple

from refold.journal.beside import DamageBeside
from refold.journal.record import EMPTY_HEAD, Head, short

LAST_EPOCH = 2**53 - 1  # also the last number that every reader of JSON knows


class StreamRow(NamedTuple):
    """What is stored of a stream's end.

    Attributes:
        name: the stream.
        head: as its row has it.
        tail: the head after its last record; None if no record is there.
    """

    name: str
    head: Head
    tail: Head | None


class Judged(NamedTuple):
    """The head to read a stream by, and what is wrong with its row, if no record shows it."""

    head: Head
    damage: DamageBeside | None = None


def stream_row(name: str, head: tuple[object, object, object], tail: tuple[object, object, object]) -> StreamRow:
    """From what a table has: `tail` is the last record's position, hash and engine epoch, or begins with None.

    What is of another type than it was stored as, which a flipped bit can do, is read as what no stream has.
    """
    position, digest, epoch = tail
    end = None if not isinstance(position, int) else _as_head(position + 1, digest, epoch)
    return StreamRow(name, _as_head(*head), end)


def _as_head(position: object, digest: object, epoch: object) -> Head:
    return Head(
        position if isinstance(position, int) else -1,
        digest if isinstance(digest, bytes) else b"",
        epoch if isinstance(epoch, int) else -1,
    )


def judge(row: StreamRow, mark: tuple[int, bytes] | None = None) -> Judged:
    """Is the row what was written? `mark`: the acknowledged position, and the hash before it, if something beside the table tells."""
    stored, tail = row.head, row.tail or _without_records(row.head)
    if stored[:2] != tail[:2]:
        return _by_witness(row, stored, tail, mark)
    if stored.engine_epoch < tail.engine_epoch:
        return Judged(tail, _damage(row, f"{_epoch(stored)}, and its last record was written in {tail.engine_epoch}"))
    if stored.engine_epoch >= LAST_EPOCH > tail.engine_epoch:
        return Judged(tail, _damage(row, f"{_epoch(stored)}, which no engine has reached"))
    return Judged(stored)


def _by_witness(row: StreamRow, stored: Head, tail: Head, mark: tuple[int, bytes] | None) -> Judged:
    """The row and the last record say otherwise. A reader meets the end of what the row names, unless records are behind it."""
    if stored.position <= tail.position and tail[:2] == mark:
        return Judged(
            tail, _damage(row, f"that it ends at {end_of(stored)}, and it ends at {end_of(tail)}, as its mark says")
        )
    head = stored if stored.position >= 0 else EMPTY_HEAD
    if stored.position >= tail.position:
        return Judged(head)
    says = f"that it ends at {end_of(stored)}, and records up to {tail.position - 1} are there: the row was changed, or they were put in"
    return Judged(
        head,
        _told(
            row,
            f"{says} (edited); restore a backup, or `refold copy --accept-end` copies what is before",
            "edited",
            head.position,
        ),
    )


def end_of(head: Head) -> str:
    """An end as messages have it: its position, and the beginning of the hash before it."""
    return f"{head.position} with hash {short(head.hash)}"


def _without_records(stored: Head) -> Head:
    """The end of a stream whose table has no record: it's new, or they are archived, and nothing here tells of which epoch."""
    return stored._replace(engine_epoch=min(stored.engine_epoch, LAST_EPOCH - 1)) if stored.position > 0 else EMPTY_HEAD


def _epoch(head: Head) -> str:
    return f"that it is in engine epoch {head.engine_epoch}"


def _damage(row: StreamRow, says: str) -> DamageBeside:
    way = "the row was changed, and no record with it (unindexed); `refold copy` makes a journal of the records"
    return _told(row, f"{says}: {way}", "unindexed", 0)


def _told(row: StreamRow, says: str, kind: str, position: int) -> DamageBeside:
    line = f"the row of stream {row.name!r} in journal_streams says {says}"
    return DamageBeside(line, kind=kind, position=position, stream=row.name)
