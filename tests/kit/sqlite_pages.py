"""What each byte of a SQLite file is for: a reader of the file format, independent of SQLite, for files that are whole.

Every byte gets the name of its use. What a flipped bit may do depends on that alone: a byte of a record, of a page's header or
of a pointer is read; free space is not. https://www.sqlite.org/fileformat2.html is the source.
"""

import sqlite3
import struct
from pathlib import Path
from typing import NamedTuple

_DATABASE_HEADER_BYTES = 100
_INTERIOR_INDEX, _INTERIOR_TABLE, _LEAF_INDEX, _LEAF_TABLE = 2, 5, 10, 13

# Fields of the database header of which SQLite takes other values for the usual one, or none at all: versions of the format,
# counters for caches, three bytes of the schema's format, sizes and hints for vacuum, the encoding, reserve, the library.
UNREAD_HEADER = "file header: counters, hints, reserve, and fields whose other values mean the same"
_UNREAD_FIELDS = ((18, 20), (24, 28), (40, 47), (48, 60), (64, 68), (72, 100))
FREE_SPACE = "free space inside a page"
FREE_PAGE = "a free page"
OVERFLOW_TAIL = "the unused end of an overflow page"
UNUSED = {UNREAD_HEADER, FREE_SPACE, FREE_PAGE, OVERFLOW_TAIL}


class _Tree(NamedTuple):
    name: str
    root: int


def uses_of_bytes(path: Path) -> list[str]:
    """For each byte of the file: what it is for.

    Args:
        path: a whole SQLite file without a WAL.
    """
    file = _File(path.read_bytes())
    with sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True) as connection:
        trees = [_Tree("sqlite_schema", 1), *(_Tree(*row) for row in connection.execute(_ROOTS))]
    connection.close()
    for tree in trees:
        file.mark_tree(tree.name, tree.root)
    file.mark_free_pages()
    assert "" not in file.uses, f"byte {file.uses.index('')} has no use"
    return file.uses


def end_of_wal(log: bytes) -> int:
    """How many bytes of a WAL its frames take, that have its header's salts; behind them lies room, or what is overwritten next."""
    frame_bytes, salts = 24 + int.from_bytes(log[8:12], "big"), log[16:24]
    end = 32
    while log[end + 8 : end + 16] == salts:
        end += frame_bytes
    return end


_ROOTS = "SELECT name, rootpage FROM sqlite_master WHERE rootpage > 0"


class _File:
    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self.page_bytes = struct.unpack_from(">H", raw, 16)[0]
        self.usable = self.page_bytes - raw[20]
        self.uses = [""] * len(raw)
        self._mark(0, _DATABASE_HEADER_BYTES, "file header")
        for start, end in _UNREAD_FIELDS:
            self._mark(start, end, UNREAD_HEADER)

    def mark_tree(self, name: str, page: int) -> None:
        """Name the bytes of a b-tree: its pages' headers, pointers, cells, free space and overflow chains."""
        start = (page - 1) * self.page_bytes
        header = start + (_DATABASE_HEADER_BYTES if page == 1 else 0)
        kind = self.raw[header]
        assert kind in {_INTERIOR_INDEX, _INTERIOR_TABLE, _LEAF_INDEX, _LEAF_TABLE}, f"page {page} is no b-tree page"
        is_interior = kind in {_INTERIOR_INDEX, _INTERIOR_TABLE}
        size = 12 if is_interior else 8
        (count,) = struct.unpack_from(">H", self.raw, header + 3)
        pointers = header + size
        self._mark(pointers + 2 * count, start + self.usable, FREE_SPACE)
        self._mark(header, pointers, f"{name}: page header")
        self._mark(pointers, pointers + 2 * count, f"{name}: cell pointers")
        for i in range(count):
            (offset,) = struct.unpack_from(">H", self.raw, pointers + 2 * i)
            self._mark_cell(name, start + offset, kind)
        if is_interior:
            self.mark_tree(name, struct.unpack_from(">I", self.raw, header + 8)[0])
        self._mark_free_blocks(name, start, header)

    def mark_free_pages(self) -> None:
        """Name the pages on the free list, and those that no tree has."""
        (trunk,) = struct.unpack_from(">I", self.raw, 32)
        while trunk:
            start = (trunk - 1) * self.page_bytes
            following, count = struct.unpack_from(">II", self.raw, start)
            leaves = struct.unpack_from(f">{count}I", self.raw, start + 8)
            self._mark(start, start + self.page_bytes, FREE_PAGE)
            self._mark(start, start + 8 + 4 * count, "free list")
            for leaf in leaves:
                self._mark((leaf - 1) * self.page_bytes, leaf * self.page_bytes, FREE_PAGE)
            trunk = following

    def _mark_cell(self, name: str, at: int, kind: int) -> None:
        start = at
        if kind in {_INTERIOR_INDEX, _INTERIOR_TABLE}:
            (child,) = struct.unpack_from(">I", self.raw, at)
            self.mark_tree(name, child)
            at += 4
        if kind == _INTERIOR_TABLE:
            _, at = self._varint(at)
            self._mark(start, at, f"{name}: cells")
            return
        payload, at = self._varint(at)
        if kind == _LEAF_TABLE:
            _, at = self._varint(at)
        local = self._local_bytes(payload, kind)
        self._mark(start, at + local, f"{name}: cells")
        if local < payload:
            self._mark(at + local, at + local + 4, f"{name}: overflow pointers")
            self._mark_overflow(name, struct.unpack_from(">I", self.raw, at + local)[0], payload - local)
        elif at + local - start < 4:  # a cell takes at least 4 bytes
            self._mark(at + local, start + 4, FREE_SPACE)

    def _mark_overflow(self, name: str, page: int, left: int) -> None:
        while page:
            start = (page - 1) * self.page_bytes
            (following,) = struct.unpack_from(">I", self.raw, start)
            here = min(left, self.usable - 4)
            self._mark(start, start + 4, f"{name}: overflow pointers")
            self._mark(start + 4, start + 4 + here, f"{name}: overflow")
            self._mark(start + 4 + here, start + self.page_bytes, OVERFLOW_TAIL)
            left, page = left - here, following
        assert left == 0, "an overflow chain holds all of its payload"

    def _mark_free_blocks(self, name: str, start: int, header: int) -> None:
        (block,) = struct.unpack_from(">H", self.raw, header + 1)
        while block:
            following, _ = struct.unpack_from(">HH", self.raw, start + block)
            self._mark(start + block, start + block + 4, f"{name}: free block headers")
            block = following

    def _local_bytes(self, payload: int, kind: int) -> int:
        """How much of a payload is on its own page."""
        most = self.usable - 35 if kind == _LEAF_TABLE else (self.usable - 12) * 64 // 255 - 23
        least = (self.usable - 12) * 32 // 255 - 23
        if payload <= most:
            return payload
        kept = least + (payload - least) % (self.usable - 4)
        return kept if kept <= most else least

    def _varint(self, at: int) -> tuple[int, int]:
        value = 0
        for i in range(9):
            byte = self.raw[at + i]
            if i == 8:
                return (value << 8) | byte, at + 9
            value = (value << 7) | (byte & 0x7F)
            if byte < 0x80:
                return value, at + i + 1
        raise AssertionError("a varint has at most nine bytes")

    def _mark(self, start: int, end: int, use: str) -> None:
        self.uses[start:end] = [use] * (end - start)
