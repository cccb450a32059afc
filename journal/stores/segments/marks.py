"""The mark: how far a stream was acknowledged, kept beside its segments.

After a group is on disk and before its append returns, the mark moves behind it. It isn't synced on the hot path: a group
that has a successor is known to have been acknowledged without it, since the next one is written only then. So the mark
decides about the last group alone: below it, damage is damage; above it, a group that was torn by a crash may be cut off.

It's written in two places by turns, each with a number and a checksum: one that was torn leaves the other.
"""

import struct
import zlib
from typing import NamedTuple

from refold.journal.errors import JournalCorrupt
from refold.journal.record import Head
from refold.journal.stores.segments.files import FileLayer, write_all

MARK_NAME = "mark"
_MAGIC = b"\xf5RMK"
_MARK = struct.Struct(">4sQQQQQQ32s")
_CRC = struct.Struct(">I")
_SLOT_BYTES = 512
MARK_FILE_BYTES = 2 * _SLOT_BYTES
_ATTEMPTS = 20


class Mark(NamedTuple):
    """The acknowledged end of a stream.

    Attributes:
        number: raised with each mark.
        segment: the first position of the segment that it lies in.
        group: where in that segment the last acknowledged group begins; the segment's header if there is none.
        end: where it ends.
        head: the head behind it.
    """

    number: int
    segment: int
    group: int
    end: int
    head: Head


class MarkLost(JournalCorrupt):
    """The mark is damaged or gone; the text continues its name. `unmarked.lost_end` makes of it what people are told."""

    def __init__(self, how: str) -> None:
        super().__init__(how, position=0, kind="unmarked")


def pack_mark(mark: Mark) -> bytes:
    """The bytes of a slot."""
    position, digest, engine_epoch = mark.head
    packed = _MARK.pack(_MAGIC, mark.number, mark.segment, mark.group, mark.end, position, engine_epoch, digest)
    return packed + _CRC.pack(zlib.crc32(packed))


def new_mark_file(mark: Mark) -> bytes:
    """The content of the file when a stream begins."""
    assert mark.number == 0, "a file begins with mark 0"
    return pack_mark(mark).ljust(MARK_FILE_BYTES, b"\0")


def write_mark(files: FileLayer, fd: int, mark: Mark) -> None:
    """Overwrite the older of the two slots."""
    write_all(files, fd, pack_mark(mark), _SLOT_BYTES * (mark.number % 2))


def read_mark(files: FileLayer, fd: int) -> Mark:
    """The newer of the two marks. Tries again where a writer was caught half way.

    Raises:
        MarkLost: both are damaged.
    """
    for _ in range(_ATTEMPTS):
        data = files.pread(fd, MARK_FILE_BYTES, 0)
        marks = [mark for slot in (0, _SLOT_BYTES) if (mark := _unpack(data[slot : slot + _SLOT_BYTES])) is not None]
        if marks:
            return max(marks)
    raise MarkLost(f"is damaged, both of its slots ({len(data)} bytes)")


def _unpack(slot: bytes) -> Mark | None:
    if len(slot) < _MARK.size + _CRC.size or _CRC.unpack_from(slot, _MARK.size)[0] != zlib.crc32(slot[: _MARK.size]):
        return None
    magic, number, segment, group, end, position, engine_epoch, digest = _MARK.unpack_from(slot)
    return Mark(number, segment, group, end, Head(position, digest, engine_epoch)) if magic == _MAGIC else None
