"""Sealed segments: closed, compressed in blocks, with an index at the end.

A block is a run of whole groups, packed as they were, so that a sealed segment read from its beginning is the segment that
was written. The index names each block's first position: reading from a position unpacks one block and those after it.
Each byte is under a checksum: the header's, a block's, the index's or that of the last line, which finds the index.
"""

import bisect
import contextlib
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from refold.journal.errors import JournalCorrupt
from refold.journal.record import Head
from refold.journal.stores.segments import compression
from refold.journal.stores.segments.files import CREATE, READ, FileLayer, close_read, damaged, misplaced, write_all
from refold.journal.stores.segments.frames import (
    MAX_SEGMENT_HEADER_BYTES,
    Group,
    SegmentHeader,
    is_cut_header,
    is_whole,
    pack_group_header,
    pack_segment_header,
    unpack_segment_header,
)
from refold.journal.stores.segments.scan import HeldBytes, Place, walk
from refold.journal.stores.segments.tail import head_behind
from refold.journal.stores.segments.unindexed import Blocks

BLOCK_BYTES = 1 << 19
_END_MAGIC = b"\xf5END"
_BLOCK = struct.Struct(">QQIII")
_STOP = struct.Struct(">QQ32s")
_END = struct.Struct(">QIIB")
_CRC = struct.Struct(">I")
_END_BYTES = _END.size + _CRC.size + len(_END_MAGIC)


Groups = Iterator[tuple[Group, bytes]]
"""Groups of a segment, each with all that follows its header."""


class Block(NamedTuple):
    """A block: its first position, where it lies, its lengths packed and unpacked, and the checksum of what lies there."""

    position: int
    offset: int
    packed_bytes: int
    unpacked_bytes: int
    crc: int


class Index(NamedTuple):
    """The end of a sealed segment: its blocks, the head behind them, and how they are packed."""

    blocks: list[Block]
    stop: Head
    codec: int


class SealedSegment:
    """An open sealed segment.

    Attributes:
        index: as it was written, or, where it's damaged, as the blocks make it again.
        has_index: whether it was written so.
    """

    __slots__ = ("_codec", "_fd", "_files", "_is_cut", "_path", "has_index", "header", "index")

    def __init__(self, files: FileLayer, path: Path, first: int) -> None:
        """Open it and check header and index. With a damaged index, all of it is unpacked.

        Raises:
            OSError: it can't be read.
            JournalCorrupt: it's damaged.
        """
        self._files, self._path = files, path
        self._codec: compression.Codec | None = None
        self._fd = files.open(path, READ)
        try:
            self.header = read_header(files, self._fd, path, first)
            index, self._is_cut = _read_index(files, self._fd, self.header), False
            self.has_index = index is not None
            if index is None:
                index, self._is_cut = _index_of_blocks(files, self._fd, path, self.header)
            self.index = index
        except BaseException:
            close_read(files, self._fd)
            raise

    @property
    def stop(self) -> Head:
        """The head behind the last record.

        Raises:
            JournalCorrupt: index and a block are damaged, so nobody knows it.
        """
        if self._is_cut:
            raise self._cut()
        return self.index.stop

    def groups(self, start: int) -> Iterator[tuple[Group, bytes]]:
        """The groups from the one that holds position `start` on.

        Raises:
            OSError: they can't be read.
            JournalCorrupt: they're damaged.
            JournalError: they're packed in a way that this Python can't read.
        """
        blocks, self._codec = (
            self.index.blocks,
            compression.codec(self.index.codec),
        )  # not before: it takes a millisecond
        begin = max(bisect.bisect_right(blocks, start, key=lambda block: block.position) - 1, 0)
        for number in range(begin, len(blocks)):
            stop = blocks[number + 1].position if number + 1 < len(blocks) else self.index.stop.position
            position = blocks[number].position
            for group, body in walk(HeldBytes(self._unpack(blocks[number])), Place(0, position), self._path, start):
                yield group, body
                position = group.stop
            if position != stop and stop > start:
                raise misplaced(self._path, position, stop)
        if self._is_cut:
            raise self._cut()

    def unpacked(self) -> Iterator[bytes]:
        """What the blocks hold, without those that are damaged. Raises OSError, and JournalError if this Python can't unpack them."""
        self._codec = compression.codec(self.index.codec)
        for block in self.index.blocks:
            with contextlib.suppress(JournalCorrupt):
                yield self._unpack(block)

    def _cut(self) -> JournalCorrupt:
        return damaged(
            self._path,
            self.index.stop.position,
            "edited",
            "or one of the next is in a damaged block, and the index of the segment is damaged too",
        )

    def close(self) -> None:
        """Close the file."""
        close_read(self._files, self._fd)

    def _unpack(self, block: Block) -> bytes:
        assert self._codec is not None, "whoever asks for groups has chosen it"
        packed = self._files.pread(self._fd, block.packed_bytes, block.offset)
        if zlib.crc32(packed) == block.crc:
            try:
                data = self._codec.unpack(packed, block.unpacked_bytes)
            except compression.BadBlock:
                data = b""
            if len(data) == block.unpacked_bytes:
                return data
        raise damaged(self._path, block.position, "edited", "or one of the next is in a damaged block")


def read_header(files: FileLayer, fd: int, path: Path, first: int) -> SegmentHeader:
    """A segment's header.

    Raises:
        JournalCorrupt: it's damaged, or another segment's.
    """
    data = files.pread(fd, MAX_SEGMENT_HEADER_BYTES, 0)
    header = unpack_segment_header(data)
    if header is None and is_cut_header(data):
        what = f"and those after it are gone: of its segment only {len(data)} bytes are there"
        raise damaged(path, first, "truncated", what)
    if header is None:
        raise damaged(path, first, "edited", "and those after it are in a segment without its header")
    if header.head.position != first:
        raise damaged(
            path, first, "reordered", f"is not in its segment: that begins with record {header.head.position}"
        )
    return header


def _read_index(files: FileLayer, fd: int, header: SegmentHeader) -> Index | None:
    size = files.size(fd)
    last = files.pread(fd, _END_BYTES, max(size - _END_BYTES, 0))
    return _unpack_index(files, fd, size, last, header)


def _index_of_blocks(files: FileLayer, fd: int, path: Path, header: SegmentHeader) -> tuple[Index, bool]:
    """The index as the blocks make it again, and whether there are more of them behind a damaged one."""
    found = Blocks(files, fd, path, header)
    blocks = [Block(b.position, b.offset, len(b.packed), len(b.unpacked), zlib.crc32(b.packed)) for b in found]
    left_over = files.size(fd) - found.end
    is_cut = left_over > len(blocks) * _BLOCK.size + _STOP.size + _END_BYTES
    if not blocks:
        raise damaged(path, header.head.position, "edited", "and those after it are in a segment with a damaged index")
    return Index(blocks, found.stop, found.codec), is_cut


def _unpack_index(files: FileLayer, fd: int, size: int, last: bytes, header: SegmentHeader) -> Index | None:
    if len(last) != _END_BYTES or not last.endswith(_END_MAGIC):
        return None
    if _CRC.unpack_from(last, _END.size)[0] != zlib.crc32(last[: _END.size]):
        return None
    offset, num_blocks, index_crc, codec = _END.unpack_from(last)
    index_bytes = num_blocks * _BLOCK.size + _STOP.size
    data = files.pread(fd, index_bytes, offset)
    if offset + index_bytes + _END_BYTES != size or len(data) != index_bytes or zlib.crc32(data) != index_crc:
        return None
    blocks = [Block._make(_BLOCK.unpack_from(data, number * _BLOCK.size)) for number in range(num_blocks)]
    place = header.size
    for block in blocks:
        if block.offset != place:
            return None
        place += block.packed_bytes
    position, engine_epoch, digest = _STOP.unpack_from(data, num_blocks * _BLOCK.size)
    return Index(blocks, Head(position, digest, engine_epoch), codec) if place == offset else None


class Sealing:
    """A closed segment on its way to being sealed, a block at a time."""

    __slots__ = ("_blocks", "_codec", "_fd", "_files", "_groups", "_head", "_next", "_offset", "_path", "draft")

    def __init__(self, files: FileLayer, groups: Groups, header: SegmentHeader, draft: Path) -> None:
        """Begin the file `draft`.

        Args:
            files: the file system.
            groups: the closed segment's, all of them.
            header: its header.
            draft: the file to write; `finish` leaves it synced, under this name.
        """
        self._files, self._path, self.draft = files, draft, draft
        self._codec = compression.best_codec()
        self._head = header.head
        self._groups = groups
        self._next: tuple[Group, bytes] | None = None
        self._blocks: list[Block] = []
        self._fd = files.open(draft, CREATE)
        self._offset = 0
        self._write(pack_segment_header(header.stream, header.head))

    def step(self) -> bool:
        """Pack the next block. Whether there are more.

        Raises:
            OSError: it can't be read or written.
            JournalCorrupt: the segment is damaged; sealing it would hide that.
        """
        parts: list[bytes] = []
        num_bytes, position, head = 0, self._head.position, self._head
        while (following := self._next or next(self._groups, None)) is not None and num_bytes < BLOCK_BYTES:
            self._next = None
            group, body = following
            if not is_whole(group, body):
                raise damaged(self._path, group.position, "edited", "has another checksum than when it was written")
            head = head_behind(group, body, head)
            parts += (pack_group_header(group), body)
            num_bytes += group.end - group.start
        self._next = following
        if parts:
            self._pack(position, b"".join(parts))
        self._head = head
        return following is not None

    def finish(self) -> Head:
        """Write the index and sync; the head behind the last record."""
        position, digest, engine_epoch = self._head
        index = b"".join(_BLOCK.pack(*block) for block in self._blocks) + _STOP.pack(position, engine_epoch, digest)
        end = _END.pack(self._offset, len(self._blocks), zlib.crc32(index), self._codec.number)
        self._write(index + end + _CRC.pack(zlib.crc32(end)) + _END_MAGIC)
        self._files.fsync(self._fd)
        return self._head

    def close(self) -> None:
        """Close the draft; one that wasn't finished is left for the next owner to remove."""
        self._files.close(self._fd)

    def _pack(self, position: int, data: bytes) -> None:
        packed = self._codec.pack(data)
        if self._codec.unpack(packed, len(data)) != data:
            raise JournalCorrupt(
                "compression changed the data: test this machine's memory", position=position, kind="edited"
            )
        self._blocks.append(Block(position, self._offset, len(packed), len(data), zlib.crc32(packed)))
        self._write(packed)

    def _write(self, data: bytes) -> None:
        write_all(self._files, self._fd, data, self._offset)
        self._offset += len(data)
