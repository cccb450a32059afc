"""Is this the journal that was written? The hash chain answers, at the price of one sha256 per record.

A record's hash covers its header, its body and the hash before it, so whatever was changed, the first record that doesn't
follow from its predecessor marks the place. What it can't see is a tail cut off together with the stored head: only someone
who remembers a head can, so every check here takes an expected one. It may be an old one: the stream must pass through it.

The cause is named as well as the evidence allows:
- `missing`: positions jump;
- `reordered`: the record that belongs here is found, intact, elsewhere in the stream, or an older engine epoch follows a
  newer one;
- `truncated`: the stream ends before a head that is known;
- `edited`: anything else, one flipped bit included.
Whether the events make sense is another question, asked by the scheduler's laws.
"""

import struct
from collections.abc import Iterable, Iterator
from typing import Protocol, runtime_checkable

from refold.journal.errors import JournalCorrupt
from refold.journal.record import EMPTY_HEAD, Head, Record, has_whole_content, hash_after, head_after
from refold.journal.store import DEFAULT_STREAM, JournalReader


@runtime_checkable
class Inspected(Protocol):
    """A reader of a container that can be damaged where no record shows it."""

    def inspect(self) -> None:
        """Look at what no record covers.

        Raises:
            JournalCorrupt: it's damaged.
        """
        ...


def verified(records: Iterable[Record], start_head: Head = EMPTY_HEAD, expect: Head | None = None) -> Iterator[Record]:
    """The same records, each after it was checked to follow from the one before.

    Args:
        records: from position `start_head.position` on.
        start_head: what they continue: `EMPTY_HEAD`, or a head that is trusted.
        expect: a head that the stream must reach and pass through, or None. Its engine epoch doesn't matter.

    Raises:
        JournalCorrupt: names the first bad position and the kind.
    """
    head = start_head
    _check_expected(head, expect)
    rest = iter(records)
    for record in rest:
        if record.position != head.position or not _follows(head, record):
            raise _diagnose(head, record, rest)
        if record.engine_epoch < head.engine_epoch:
            raise _corrupt(
                record.position,
                "reordered",
                f"was written in engine epoch {record.engine_epoch}, after one of epoch {head.engine_epoch}",
            )
        if not has_whole_content(record):
            raise _corrupt(record.position, "edited", "has another content than the one that was written")
        head = head_after(record)
        _check_expected(head, expect)
        yield record
    _check_reached(head, expect)


def read_verified(
    reader: JournalReader, stream: str = DEFAULT_STREAM, *, expect: Head | None = None
) -> Iterator[Record]:
    """All records of a stream, verified against their chain, the stored head and an expected one.

    The journal may be live: what is appended meanwhile is read and verified too.

    Raises:
        JournalCorrupt: names the first bad position and the kind.
    """
    if isinstance(reader, Inspected):
        reader.inspect()
    stored = reader.head(stream)
    head = EMPTY_HEAD
    for record in verified(reader.read(stream), expect=stored):
        head = head_after(record)
        _check_expected(head, expect)
        yield record
    _check_reached(head, expect)
    if head.engine_epoch > stored.engine_epoch or head.position > stored.position:
        stored = reader.head(stream)
    if head.position > stored.position or head.engine_epoch > stored.engine_epoch:
        raise _corrupt(stored.position, "edited", f"lies beyond the stored head at {stored.position}")


def verify_stream(reader: JournalReader, stream: str = DEFAULT_STREAM, *, expect: Head | None = None) -> Head:
    """Verify a whole stream; returns the head after its last record.

    Raises:
        JournalCorrupt: names the first bad position and the kind.
    """
    head = EMPTY_HEAD
    for record in read_verified(reader, stream, expect=expect):
        head = head_after(record)
    return head


def _follows(head: Head, record: Record) -> bool:
    """Whether the record's hash is right for this place in the chain, whatever its own idea of its position."""
    try:
        return record.hash == hash_after(head, record)
    except (struct.error, TypeError, ValueError):  # a damaged field out of its range or of another type
        return False


def _check_expected(head: Head, expect: Head | None) -> None:
    if expect is not None and head.position == expect.position and head.hash != expect.hash:
        raise _corrupt(
            max(head.position - 1, 0), "edited", f"is not the one that the expected head at {head.position} names"
        )


def _check_reached(head: Head, expect: Head | None) -> None:
    if expect is not None and head.position < expect.position:
        raise JournalCorrupt(
            f"the stream ends at {head.position}, expected {expect.position}: its tail was cut off; restore a backup",
            position=head.position,
            kind="truncated",
        )


def _diagnose(head: Head, record: Record, rest: Iterator[Record]) -> JournalCorrupt:
    """Why `record` isn't the one at `head`. Looks through the rest of the stream: this happens once, at the end."""
    for other in rest:
        if _follows(head, other):
            return _corrupt(head.position, "reordered", f"lies at position {other.position}")
    if _follows(head, record):
        return _corrupt(head.position, "edited", f"says that its position is {record.position}")
    if record.position > head.position:
        return _corrupt(head.position, "missing", f"is not there; the next is {record.position}")
    if record.position < head.position:
        return _corrupt(head.position, "reordered", f"has {record.position} in its place")
    return _corrupt(head.position, "edited", "does not follow from the one before: its bytes were changed")


def _corrupt(position: int, kind: str, what: str) -> JournalCorrupt:
    return JournalCorrupt(f"record {position} {what} ({kind}); restore a backup", position=position, kind=kind)
