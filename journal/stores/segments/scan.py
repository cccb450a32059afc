"""Walking through groups that must be whole: whatever isn't, is damage, and is named by its position."""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from refold.journal.record import Head, Record, follows, head_after
from refold.journal.stores.segments.files import FileLayer, damaged, misplaced
from refold.journal.stores.segments.frames import (
    GROUP_HEADER_BYTES,
    GROUP_MAGIC,
    Group,
    is_whole,
    unpack_group,
    unpack_records,
)

PIECE_BYTES = 1 << 18


class Bytes(Protocol):
    """Where groups are read from."""

    limit: int

    def get(self, offset: int, size: int) -> bytes:
        """The bytes at `offset`; fewer than `size` at the limit."""
        ...


class FileBytes:
    """A file's bytes up to a limit, read in large pieces. What lies beyond the limit is never looked at."""

    __slots__ = ("_fd", "_files", "_piece", "_start", "limit")

    def __init__(self, files: FileLayer, fd: int, limit: int) -> None:
        self._files, self._fd, self.limit = files, fd, limit
        self._start, self._piece = 0, b""

    def get(self, offset: int, size: int) -> bytes:
        """The bytes at `offset`; fewer than `size` at the limit or the end of the file."""
        size = max(min(size, self.limit - offset), 0)
        begin = offset - self._start
        if begin < 0 or begin + size > len(self._piece):
            self._piece = self._read(offset, min(max(size, PIECE_BYTES), self.limit - offset))
            self._start, begin = offset, 0
        return self._piece[begin : begin + size]

    def _read(self, offset: int, size: int) -> bytes:
        piece = self._files.pread(self._fd, size, offset)
        while len(piece) < size and (more := self._files.pread(self._fd, size - len(piece), offset + len(piece))):
            piece += more
        return piece


class HeldBytes:
    """Bytes in memory: an unpacked block."""

    __slots__ = ("_data", "limit")

    def __init__(self, data: bytes) -> None:
        self._data, self.limit = data, len(data)

    def get(self, offset: int, size: int) -> bytes:
        """The bytes at `offset`."""
        return self._data[offset : offset + size]


class Place(NamedTuple):
    """Where a walk has got to: the next group's offset and the position of its first record."""

    offset: int
    position: int


def walk(source: Bytes, place: Place, path: Path, start: int) -> Iterator[tuple[Group, bytes]]:
    """The groups from `place` up to the source's limit, each with all that follows its header.

    Those whose records are all before position `start` are stepped over.

    Raises:
        JournalCorrupt: there's a group missing, or something else in its place.
    """
    offset, position = place
    while offset < source.limit:
        group = unpack_group(source.get(offset, GROUP_HEADER_BYTES), 0, offset)
        if group is None:
            raise _no_group(source, offset, position, path)
        if group.position != position:
            raise misplaced(path, position, group.position)
        if group.end > source.limit:
            raise damaged(path, position, "truncated", f"ends at byte {group.end}, its file at {source.limit}")
        if group.stop > start or group.position >= start:
            yield group, source.get(group.payload_start, group.end - group.payload_start)
        offset, position = group.end, group.stop


def _no_group(source: Bytes, offset: int, position: int, path: Path) -> Exception:
    rest = source.get(offset, source.limit - offset)
    if len(rest) < GROUP_HEADER_BYTES or not rest.strip(b"\0"):
        return damaged(path, position, "truncated", f"should begin at byte {offset}, but the file ends before it")
    return damaged(path, position, "edited", f"should begin at byte {offset}, but no checksum agrees there")


def whole_among(source: Bytes, offset: int) -> Iterator[tuple[Group, bytes]]:
    """The whole groups from `offset` on as they lie there, whatever is between them. For damaged files: all of one is read at once."""
    rest = source.get(offset, source.limit - offset)
    begin = 0
    while (begin := rest.find(GROUP_MAGIC, begin)) >= 0:
        group = unpack_group(rest, begin, begin)
        body = b"" if group is None else rest[group.payload_start : group.end]
        if group is not None and is_whole(group, body):
            yield group, body
            begin = group.end
        else:
            begin += 1


def checked_epoch(group: Group, of_last: int, before: int, path: Path) -> int:
    """The engine epoch that a whole group says, behind one that says `before`; its last record, if it has any, says `of_last`.

    Raises:
        JournalCorrupt: they disagree, though the records and all checksums are sound.
    """
    epoch = group.engine_epoch
    if group.num_records and of_last != epoch:
        what = f"is of engine epoch {of_last}, and its group says {epoch}: the group's header was changed"
        raise damaged(path, group.stop - 1, "edited", what)
    if epoch < before:
        what = f"lies in a group of engine epoch {epoch}, behind one that says {before}: a group's header was changed"
        raise damaged(path, group.position, "edited", what)
    return epoch


def records_before_damage(group: Group, body: bytes, previous: Head | None, path: Path) -> Iterator[Record]:
    """Of a group that isn't whole, the records before the damage, if `previous` is known and they follow from it.

    Raises:
        JournalCorrupt: always, behind them; names the first bad record.
    """
    position = group.position
    try:
        for record in unpack_records(group, body):
            if previous is None or record.position == group.stop - 1 or not follows(previous, record):
                break
            yield record
            previous, position = head_after(record), record.position + 1
    except struct.error:
        pass
    raise damaged(path, position, "edited", "has another checksum than when it was written: its bytes were changed")
