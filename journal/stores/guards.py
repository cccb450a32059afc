"""What every store checks before it writes: the new records continue the head that this handle knows.

Together with the guard inside the store's own transaction (nobody else moved the head or raised the engine epoch) this
makes a stream that a reader can trust: dense positions, one chain, epochs that never fall.
"""

from collections.abc import Sequence

from refold.journal.errors import Fenced, JournalCorrupt, JournalError, PositionConflict
from refold.journal.record import EMPTY_HEAD, Head, Record, follows, hash_after, head_after, was_sealed_after
from refold.journal.stores.rows import LAST_EPOCH, StreamRow, end_of, judge

_MAX_NAME_LENGTH = 200


def check_stream_name(stream: str) -> None:
    """A stream's name is 1 to 200 printable characters.

    Raises:
        JournalError: it isn't.
    """
    if not 0 < len(stream) <= _MAX_NAME_LENGTH or not stream.isprintable():
        raise JournalError(f"{stream[:40]!r} is no stream name: use 1 to {_MAX_NAME_LENGTH} printable characters")


def check_continues(head: Head, records: Sequence[Record]) -> Head:
    """The head after `records`, which must continue `head` without gap, in its engine epoch and on its chain.

    Of the hashes only the first record's is checked: the others were chained to it by the same hand. Where this process has just
    chained it, that is whether it was to this head.

    Raises:
        PositionConflict: the first record belongs to another position or another chain.
        Fenced: a record was made in another engine epoch.
    """
    assert records, "append needs at least one record"
    first = records[0]
    if first.position != head.position:
        raise PositionConflict(
            f"record {first.position} does not continue the stream, whose head is at {head.position}: open it again"
        )
    for offset, record in enumerate(records):
        assert record.position == head.position + offset, "records of one append are dense"
        if record.engine_epoch != head.engine_epoch:
            raise Fenced(
                f"record {record.position} was made in engine epoch {record.engine_epoch}, the stream was opened in "
                f"{head.engine_epoch}: open it again"
            )
    if not was_sealed_after(head, first) and first.hash != hash_after(head, first):
        raise PositionConflict(f"record {first.position} is chained to another history: open the stream again")
    return head_after(records[-1])


def check_replicates(head: Head, records: Sequence[Record]) -> Head:
    """As `check_continues`, for records that were made elsewhere: in any epoch, and each one's hash is computed again.

    Raises:
        PositionConflict: a record belongs to another position or another chain.
        Fenced: a record is of an older epoch than the one before it.
    """
    assert records, "append needs at least one record"
    after = head
    for record in records:
        if record.position != after.position or not follows(after, record):
            raise PositionConflict(
                f"record {record.position} does not continue this stream at {after.position}: it is of another history"
            )
        if record.engine_epoch < after.engine_epoch:
            raise Fenced(
                f"record {record.position} was made in engine epoch {record.engine_epoch}, the stream is in "
                f"{after.engine_epoch} already: an engine has opened it; copy to another journal"
            )
        after = head_after(record)
    return after


def taken_over(stream: str, ours: int) -> Fenced:
    """The error of an owner that isn't one any more."""
    return Fenced(
        f"stream {stream!r} was taken over: this engine has epoch {ours}, and it is not the stream's; stop it"
    )


def refuse(stream: str, ours: Head, theirs: Head) -> Fenced | PositionConflict:
    """Why the store's head `theirs` is not the head `ours` that this handle last knew."""
    if theirs.engine_epoch != ours.engine_epoch:
        return Fenced(
            f"stream {stream!r} was taken over: engine epoch {theirs.engine_epoch} now, this engine has "
            f"{ours.engine_epoch}; stop this engine"
        )
    return PositionConflict(
        f"stream {stream!r} has its head at {theirs.position}, expected {ours.position}: someone else appended; "
        "open it again"
    )


def not_open(stream: str) -> JournalError:
    """The error of an append to a stream that this handle never opened."""
    return JournalError(f"stream {stream!r} is not open for writing here: call open_stream first")


def check_tail(stream: str, head: Head, tail: tuple[int, int, bytes] | None) -> None:
    """The stored head and the last stored record (position, engine epoch, hash) tell the same story, and it can go on.

    Raises:
        JournalCorrupt: they do not: the tail was cut off or edited, or the stream's row was.
    """
    position, epoch, digest = tail if tail is not None else (-1, 0, EMPTY_HEAD.hash)
    end = Head(position + 1, digest, epoch)
    if end.position != head.position:
        raise JournalCorrupt(
            f"stream {stream!r} ends at {end.position}, its head says {head.position}: restore it from a backup",
            position=max(min(end.position, head.position), 0),
            kind="truncated" if end.position < head.position else "edited",
        )
    if digest != head.hash:
        says = f"stream {stream!r} ends at {end_of(end)}, its head says {end_of(head)}"
        raise _tail_damage(position, f"{says}: record {position} was changed, or the row that names it")
    if (damage := judge(StreamRow(stream, head, end)).damage) is not None:
        raise damage
    if head.engine_epoch >= LAST_EPOCH:
        says = f"stream {stream!r} is in engine epoch {head.engine_epoch}, and record {position} was written in {epoch}"
        raise _tail_damage(position, f"{says}: no engine has come that far, and none can come after it")


def _tail_damage(position: int, what: str) -> JournalCorrupt:
    return JournalCorrupt(f"{what}; restore it from a backup", position=max(position, 0), kind="edited")
