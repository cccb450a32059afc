"""A sealed segment whose index is damaged: its blocks are found by unpacking them one after another.

The index says where blocks begin, so that a reader finds his without the others. It holds no record. Blocks lie without gaps behind
the header, each knows its own end, and in each are whole groups with checksums of their own, whose positions follow from each
other: so the index can be made again from them, and what is read by it is checked as ever. That takes unpacking the whole segment.

What ends the blocks may be the damaged index, or a damaged block with others behind it. The index is as long as the number of
blocks makes it: if more is left over, there are more blocks, and the record that would come next is named as damaged.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from refold.journal.errors import JournalCorrupt
from refold.journal.record import Head
from refold.journal.stores.segments import compression
from refold.journal.stores.segments.files import FileLayer
from refold.journal.stores.segments.frames import SegmentHeader, is_whole
from refold.journal.stores.segments.scan import HeldBytes, Place, walk
from refold.journal.stores.segments.tail import head_behind

_PIECE_BYTES = 1 << 18


class Found(NamedTuple):
    """A block that was found: its first position, where it lies, what lies there, and what that unpacks to."""

    position: int
    offset: int
    packed: bytes
    unpacked: bytes


class Blocks:
    """The blocks of a segment, as far as they are whole. After a walk over them, `stop` is the head behind them, `end` their end.

    `codec` is the number of the one that they are packed with; 0 before the first.
    """

    __slots__ = ("_fd", "_files", "_path", "codec", "end", "stop")

    def __init__(self, files: FileLayer, fd: int, path: Path, header: SegmentHeader) -> None:
        """Begin behind the header."""
        self._files, self._fd, self._path = files, fd, path
        self.end, self.stop, self.codec = header.size, header.head, 0

    def __iter__(self) -> Iterator[Found]:
        codec = compression.codec_of(self._files.pread(self._fd, compression.MAGIC_BYTES, self.end))
        if codec is None:
            return
        self.codec = codec.number
        while (block := self._block(codec)) is not None:
            stop = self._head_behind(block[1])
            if stop is None:
                return
            found = Found(self.stop.position, self.end, *block)
            self.end, self.stop = self.end + len(block[0]), stop
            yield found

    def _block(self, codec: compression.Codec) -> tuple[bytes, bytes] | None:
        """The block at `end`, packed and unpacked; None if there is none, or a damaged one."""
        unpacking, packed, unpacked = codec.unpacking(), bytearray(), bytearray()
        while not unpacking.eof:
            piece = self._files.pread(self._fd, _PIECE_BYTES, self.end + len(packed))
            if not piece:
                return None
            packed += piece
            try:
                unpacked += unpacking.decompress(piece)
            except codec.errors:
                return None
        return bytes(packed[: len(packed) - len(unpacking.unused_data)]), bytes(unpacked)

    def _head_behind(self, unpacked: bytes) -> Head | None:
        """The head behind the groups of a block; None if they aren't whole, or don't follow from those before."""
        head = self.stop
        try:
            for group, body in walk(HeldBytes(unpacked), Place(0, head.position), self._path, head.position):
                if not is_whole(group, body):
                    return None
                head = head_behind(group, body, head)
        except JournalCorrupt:
            return None
        return head
