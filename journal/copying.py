"""Copying a stream from one store to another, record for record: same positions, epochs, times, contents and hashes.

What is in the target already is not copied again, so a copy that was killed goes on where it was. First it's made sure that the
target is a beginning of the source: the record before the target's end has the same hash there, and a hash stands for
everything before it. Every record is verified against its chain on its way in, and the target is read and verified at the end.

What was erased from the source before it was copied is not in the copy; what is erased later is erased there too, when the record that
says so is copied (`refold.journal.copied_redactions`).

The source may be written meanwhile: what was there when the copying began is copied, or, to follow, whatever comes.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from refold.journal.beside import check_row
from refold.journal.copied_redactions import append_copied
from refold.journal.ends import EndInDoubt, check_end
from refold.journal.errors import JournalCorrupt, Rejected
from refold.journal.naming import naming
from refold.journal.record import EMPTY_HEAD, Head, Record, head_after, in_groups
from refold.journal.replicas import ReplicaStore
from refold.journal.snapshots import SnapshotReader, SnapshotStore
from refold.journal.store import Erased, JournalReader
from refold.journal.verify import attestation_of, verified, verified_part

BATCH_RECORDS = 1024
BATCH_BYTES = 4 << 20


class Copied(NamedTuple):
    """What a copy did: the target's head, how many of its records were there before, and why the source's end isn't vouched for."""

    head: Head
    num_found: int
    doubt: EndInDoubt | None = None


def copy_stream(
    source: JournalReader,
    target: ReplicaStore,
    stream: str,
    *,
    on_records: Callable[[int], None] = lambda _: None,
    on_erased: Callable[[Erased], None] = lambda _: None,
    accepts_end: bool = False,
) -> Copied:
    """Copy what the source has now. The target's stream is open for copying when this returns.

    Args:
        source: where from; may be live.
        target: where to.
        stream: of both.
        on_records: called with the number of records that have been found or copied.
        on_erased: called after each redaction that has erased something from the target.
        accepts_end: copy what is whole also where nobody can tell whether the source's end is gone. The copy won't show it.

    Raises:
        Rejected: the target holds something else.
        JournalCorrupt: the source is damaged; what is before the damage has been copied. Or its end can't be vouched for, and
            nothing has been.
        JournalOwned: a live engine writes the target.
        JournalError: a store failed; the copy can go on later.
    """
    doubt = check_source(source, stream, accepts_end=accepts_end)
    goal = source.head(stream)
    with naming(target):
        start = target.open_replica(stream)
    check_beginning(source, stream, start, goal)
    on_records(start.position)
    try:
        copy_on(source, target, stream, start, goal, on_records, on_erased)
    except JournalCorrupt as error:  # the source has less than its head says: all there is has been copied
        if not accepts_end or (in_doubt := _doubt_of_end(error, goal)) is None:
            raise
        doubt = in_doubt
    return Copied(target.head(stream), start.position, doubt)


def _doubt_of_end(error: JournalCorrupt, goal: Head) -> EndInDoubt | None:
    """The error, if all that it puts in doubt is the end: also a last record that the head doesn't name, and that is left out."""
    if isinstance(error, EndInDoubt):
        return error
    if (error.position, error.kind) != (goal.position - 1, "edited"):
        return None
    return EndInDoubt(str(error), position=error.position, num_known=goal.position, told_by="head", kind="truncated")


def check_source(source: JournalReader, stream: str, *, accepts_end: bool = False) -> EndInDoubt | None:
    """See to it that there's something to copy: an end that is vouched for, and a first record. To be asked before a target is made.

    Returns why the end isn't vouched for, if it's accepted.

    Raises:
        JournalCorrupt: the first record is damaged, or the end can't be vouched for. With `accepts_end` only if nothing is whole.
        JournalError: the source can't be read.
    """
    doubt = None
    try:
        check_end(source, stream)
    except EndInDoubt as error:
        if not accepts_end or not source.head(stream).position:
            raise
        doubt = error
    with naming(source):
        if not accepts_end:
            check_row(source, stream)
        first = list(source.read(stream, 0, 1))
        for _ in verified(first, expect=None if first else source.head(stream), is_whole=False):
            pass
    return doubt


def copy_on(
    source: JournalReader,
    target: ReplicaStore,
    stream: str,
    start: Head,
    goal: Head,
    on_records: Callable[[int], None] = lambda _: None,
    on_erased: Callable[[Erased], None] = lambda _: None,
) -> Head:
    """Copy the records from `start`, where the target ends, up to `goal`. Raises as `copy_stream`."""
    head = start
    there = start._replace(engine_epoch=0)
    damage: list[JournalCorrupt] = []
    # Also of what was copied before: a redaction of it isn't copied until the source is through with it.
    contents = attestation_of(source, stream, looks_ahead=False)
    records = _before_damage(verified_part(source, stream, there, goal.position, goal, contents=contents), damage)
    for batch in in_groups(records, BATCH_RECORDS, BATCH_BYTES):
        head = append_copied(source, target, stream, batch, on_erased)
        on_records(len(batch))
    if damage:
        raise damage[0]
    return head


def _before_damage(records: Iterator[Record], damage: list[JournalCorrupt]) -> Iterator[Record]:
    """The same records; where one is damaged they end, and it's noted: those before it are to be copied first."""
    try:
        yield from records
    except JournalCorrupt as error:
        damage.append(error)


def check_beginning(source: JournalReader, stream: str, there: Head, goal: Head) -> None:
    """See to it that a stream that ends at `there` is a beginning of the source's.

    Raises:
        Rejected: it isn't.
    """
    if there.position > goal.position:
        raise Rejected(
            f"the target has {there.position} records of stream {stream!r}, the source {goal.position}: it is no copy of the "
            "source, or has what the source has lost; keep it, and copy to another journal"
        )
    if there.position == 0:
        return
    last = next(iter(source.read(stream, there.position - 1, there.position)), None)
    if last is None:
        raise Rejected(
            f"record {there.position - 1} of stream {stream!r} is in the target, and the source has lost it: the target is the better "
            "of the two; keep it, or copy to another journal"
        )
    if last.hash != there.hash:
        raise Rejected(
            f"record {there.position - 1} of stream {stream!r} is another one in the target than in the source: it is no copy "
            "of the source; copy to another journal"
        )


def verify_copy(
    target: JournalReader, stream: str, expect: Head, on_records: Callable[[int], None] = lambda _: None
) -> None:
    """Read the target's stream from the start and verify that it leads to `expect`.

    Raises:
        JournalCorrupt: it doesn't.
    """
    head = EMPTY_HEAD
    with naming(target):
        for record in verified(target.read(stream), expect=expect, is_whole=False):
            head = head_after(record)
            on_records(1)
    if (head.position, head.hash) != (expect.position, expect.hash):
        raise JournalCorrupt(
            f"the copy of stream {stream!r} ends at {head.position}, expected {expect.position}: copy it again, to another "
            "journal",
            position=head.position,
            kind="edited",
        )


def copy_newest_snapshot(source: JournalReader, target: object, stream: str, stop: int) -> int | None:
    """Take over the newest snapshot of the source that is not beyond `stop`; its position. It's checked when it is used."""
    if not isinstance(source, SnapshotReader) or not isinstance(target, SnapshotStore):
        return None
    for entry in reversed(source.snapshots(stream)):
        if entry.position <= stop and (snapshot := source.load_snapshot(stream, entry.position)) is not None:
            target.save_snapshot(stream, snapshot)
            return entry.position
    return None
