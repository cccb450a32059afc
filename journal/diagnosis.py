"""What became of a record? What lies in its place and behind it tells one that was changed from one put in, taken out or moved.

The records come as they lie, one behind another. A position is only what a record says of itself: rows have been renumbered, and a
group of records lies wherever somebody put it. The hash alone says which record belongs where.

So the record that belongs here is looked for in all that follows. If it's there, whatever lies before it is in a wrong place: it was
moved if it's missed further on, and put in if it isn't. If it isn't there, it's gone or changed, and if nothing belongs here, since
the stream is known to end here, then what lies here was put in.

The rest of a damaged stream is read for that, once, and nothing of a sound one.
"""

from collections.abc import Iterable, Iterator
from itertools import chain as joined
from typing import NamedTuple

import msgspec

from refold.journal.errors import JournalCorrupt
from refold.journal.record import Head, Record, follows, head_after

_MAX_DELETED = 4096
_MAX_STRANGERS = 4096


class Finding(NamedTuple):
    """The first bad position, the kind of damage (of `refold.journal.verify.KINDS`), and the words that follow `record 12`."""

    position: int
    kind: str
    what: str


def first_finding(start: Head, records: Iterable[Record], end: int | None = None) -> Finding | None:
    """The first record, of all that lie behind `start`, that isn't the one that belongs there; None if each is. `end` as in `diagnose`."""
    before, head, rest = start, start, iter(records)
    for record in rest:
        if record.position != head.position or not follows(head, record):
            return diagnose(before, head, record, rest, end)
        if record.engine_epoch < head.engine_epoch:
            return of_an_older_epoch(head, record.engine_epoch)
        before, head = head, head_after(record)
    return None


def of_an_older_epoch(head: Head, engine_epoch: int) -> Finding:
    """What follows `head` was written in an epoch that had ended then."""
    what = f"was written in engine epoch {engine_epoch}, after one of epoch {head.engine_epoch}"
    return Finding(head.position, "reordered", what)


def diagnose(before: Head, head: Head, record: Record, rest: Iterator[Record], end: int | None = None) -> Finding:
    """Why `record` isn't the one that belongs at `head`.

    Args:
        before: the head before the last good record.
        head: behind that record.
        record: what lies there.
        rest: what lies behind it.
        end: where the stream ends, if that is known: from there on nothing is missing.

    Raises:
        JournalCorrupt: the rest can't be read, and whoever reads it knows of damage that begins here or before.
    """
    try:
        return _found(before, head, record, rest, end)
    except JournalCorrupt as further:
        if further.position <= head.position:
            raise
        return _named(head, record, is_last=False, end=end)


def _found(before: Head, head: Head, record: Record, rest: Iterator[Record], end: int | None) -> Finding:
    at = head.position
    if record.hash == head.hash:
        return Finding(at, "inserted", "is the one before it once more")
    if before is not head and follows(before, record):
        return Finding(
            before.position, "inserted", f"was never written; the one that was lies {_where(before, record, 1)}"
        )
    after = next(rest, None)
    if gap := _num_deleted(record, after):
        if moved := next((other for other in rest if follows(head, other)), None):
            return Finding(at, "reordered", f"lies at position {moved.position}")
        return Finding(at, "deleted", f"is not there, nor are {gap - 1} more" if gap > 1 else "is not there")
    strangers = [record]
    following = iter(()) if after is None else joined([after], rest)
    for distance, other in enumerate(following, start=1):
        if follows(head, other):
            where = _where(head, other, distance)
            if _are_missed(strangers, head_after(other._replace(position=at)), following):
                return Finding(at, "reordered", f"lies {where}")
            return Finding(at, "inserted", f"was never written; the one that was lies {where}")
        if len(strangers) < _MAX_STRANGERS:
            strangers.append(other)
    return _named(head, record, is_last=after is None, end=end)


def _where(head: Head, record: Record, distance: int) -> str:
    """Where the record lies that belongs at `head`: at the position that it says, or so many records behind what lies there."""
    if record.position != head.position:
        return f"at position {record.position}"
    return f"behind {distance} other record{'s' * (distance > 1)}"


def _named(head: Head, record: Record, *, is_last: bool, end: int | None) -> Finding:
    """The damage at `head`, if the record that belongs there is nowhere."""
    at = head.position
    if follows(head, record):
        return Finding(at, "edited", f"says that its position is {record.position}")
    if record.position != at and end is not None and at >= end:
        return Finding(
            at, "inserted", f"was never written: the stream ends here, and record {record.position} lies behind it"
        )
    if record.position > at:
        return Finding(at, "deleted", f"is not there; the next is {record.position}")
    if record.position < at:
        kind = "reordered" if end is None else "deleted"
        return Finding(at, kind, f"has {record.position} in its place")
    if is_last and _is_cut_off(record):
        return Finding(at, "torn", "was written in part")
    return Finding(at, "edited", "does not follow from the one before: its bytes were changed")


def _num_deleted(record: Record, after: Record | None) -> int:
    """How many records are missing before `record`, if the one after it follows from it under a later position."""
    if after is None or after.position != record.position + 1:
        return 0
    for gap in range(_MAX_DELETED):
        place = Head(after.position + gap, record.hash, record.engine_epoch)
        if follows(place, after):
            return gap
    return 0


def _are_missed(strangers: list[Record], head: Head, rest: Iterator[Record]) -> bool:
    """Whether one of the strangers belongs where the rest of the stream, from `head` on, doesn't go on, whatever positions it has now."""
    for record in rest:
        if not follows(head, record):
            break
        head = Head(head.position + 1, record.hash, record.engine_epoch)
    return any(follows(head, stranger) for stranger in strangers)


def _is_cut_off(record: Record) -> bool:
    """Whether body or content are the beginning of a JSON array, or end in zeros that nobody overwrote."""
    return any(isinstance(part, bytes) and _is_beginning(part) for part in (record.body, record.content))


def _is_beginning(text: bytes) -> bool:
    if not text or text.endswith(b"]"):
        return False
    if text.endswith(b"\0"):
        return True
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return "truncated" in str(error)
    return False
