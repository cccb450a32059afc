"""Is the end of the WAL where the writer left it? SQLite asks no such question: it stops at the first frame that doesn't check.

A frame's checksum covers it and all frames before it. Whatever is behind the first one that's wrong is as good as not written,
without a word: right for a transaction that a crash cut short, and a silent loss of committed ones if it was damage. Two
signs tell damage from a torn tail:

- a frame, or the header, that one flipped bit explains: checksums are linear enough to compute which bit it would have to be.
  A torn write explained by one bit is a coincidence of one in 2^40;
- behind the wrong frame, a whole transaction and more frames that follow from each other. A commit is synced before the next
  one is written, so the wrong frame was on disk once.

What can't be told apart is a last transaction of which several bytes are wrong; the head that someone remembers tells.
Only what lies behind the end that SQLite has found is read. https://www.sqlite.org/walformat.html is the source.
"""

import os
import struct
import threading
from pathlib import Path
from typing import BinaryIO, NamedTuple

_HEADER_BYTES, _FRAME_HEADER_BYTES, _INDEX_BYTES = 32, 24, 48
_MAGIC = 0x377F0682  # and one more where checksums are of big-endian words
_MASK = 0xFFFFFFFF
_Pair = tuple[int, int]


class _Wal(NamedTuple):
    """What the header says, and the file."""

    file: BinaryIO
    page_bytes: int
    order: str
    salts: bytes


class _Frame(NamedTuple):
    """A frame: `is_commit` if it ends a transaction; `summed` is what its checksum covers."""

    is_commit: bool
    salts: bytes
    checksum: _Pair
    summed: bytes


def damage_in(wal: Path, index: Path) -> str | None:
    """What is wrong with a WAL; None if it ends as a writer, or the crash of one, leaves it.

    Args:
        wal: the `-wal` file; it need not exist.
        index: the `-shm` file, which a connection that is open has brought up to date.
    """
    try:
        with wal.open("rb") as file:
            before = _found_end(index)
            damage = None if before is None else _look(file, *before)
            return damage if damage is None or before == _found_end(index) else None  # someone is writing: not the end
    except FileNotFoundError:
        return None


def _found_end(index: Path) -> tuple[int, _Pair] | None:
    """How many frames SQLite has found to be good, and the checksum up to there; None while that changes."""
    both = os.pread(_descriptor(index), 2 * _INDEX_BYTES, 0)
    first, second = both[:_INDEX_BYTES], both[_INDEX_BYTES:]
    if first != second or len(first) < _INDEX_BYTES:
        return None
    num_frames, _, *checksum = struct.unpack_from("=IIII", first, 16)
    return num_frames, (checksum[0], checksum[1])


_kept: dict[tuple[int, int], int] = {}
_keeping = threading.Lock()


def _descriptor(index: Path) -> int:
    """A descriptor of the `-shm` file, kept for as long as the file has a name.

    To close any descriptor of a file drops all POSIX locks that this process has on it, SQLite's own ones too. Without them the
    next process to open the journal takes itself for the first, cuts the file off, and whoever has it mapped dies of SIGBUS.
    """
    with _keeping:
        for place, descriptor in list(_kept.items()):
            if not os.fstat(descriptor).st_nlink:
                os.close(_kept.pop(place))
        found = index.stat()
        if (found.st_dev, found.st_ino) not in _kept:
            descriptor = os.open(index, os.O_RDONLY | os.O_CLOEXEC)
            found = os.fstat(descriptor)
            _kept[found.st_dev, found.st_ino] = descriptor
        return _kept[found.st_dev, found.st_ino]


def _look(file: BinaryIO, num_frames: int, checksum: _Pair) -> str | None:
    header = file.read(_HEADER_BYTES)
    if len(header) < _HEADER_BYTES:
        return None
    if not _is_good(header):
        flipped = (_flip(header, bit) for bit in range(8 * _HEADER_BYTES))
        return "one bit of its header is flipped" if any(map(_is_good, flipped)) else None
    magic, _, page_bytes = struct.unpack_from(">III", header)
    wal = _Wal(file, page_bytes, ">" if magic & 1 else "<", header[16:24])
    file.seek(num_frames * (_FRAME_HEADER_BYTES + page_bytes), 1)
    return _look_behind(wal, num_frames, checksum if num_frames else _last_pair(header))


def _look_behind(wal: _Wal, num_frames: int, checksum: _Pair) -> str | None:
    """Frames behind the end: good ones of a transaction that didn't get to its end, then the first wrong one."""
    while (frame := _next_frame(wal)) is not None:
        num_frames += 1
        summed = _checksum(wal.order, frame.summed, checksum)
        if frame.salts == wal.salts and summed == frame.checksum:
            if frame.is_commit:
                return None  # written since SQLite looked
            checksum = summed
            continue
        if _one_bit_explains(wal, frame, summed):
            return f"one bit of its frame {num_frames} is flipped, and SQLite ignores the rest"
        if _transactions_follow(wal, frame.checksum):
            return f"its frame {num_frames} is damaged, though committed ones follow, and SQLite ignores them"
        return None
    return None


def _transactions_follow(wal: _Wal, checksum: _Pair) -> bool:
    """Whether a whole transaction and one more frame follow from each other, wherever their chain begins."""
    num_commits = 0
    while (frame := _next_frame(wal)) is not None and frame.salts == wal.salts:
        follows = _checksum(wal.order, frame.summed, checksum) == frame.checksum
        if follows and num_commits:
            return True
        num_commits += follows and frame.is_commit
        checksum = frame.checksum
    return False


def _one_bit_explains(wal: _Wal, frame: _Frame, summed: _Pair) -> bool:
    num_salt_bits = _bits(int.from_bytes(frame.salts, "big") ^ int.from_bytes(wal.salts, "big"))
    num_sum_bits = sum(_bits(ours ^ theirs) for ours, theirs in zip(summed, frame.checksum, strict=True))
    if num_salt_bits + num_sum_bits <= 1:
        return True
    return num_salt_bits == 0 and _one_bit_makes(summed, frame.checksum, len(frame.summed) // 8)


def _one_bit_makes(found: _Pair, wanted: _Pair, num_pairs: int) -> bool:
    """Whether one flipped bit among `num_pairs` pairs of words makes `wanted` of what sums to `found`.

    A word that is larger by d adds d times a coefficient to each sum, which depends only on how many words follow it.
    """
    first, second = (wanted[0] - found[0]) & _MASK, (wanted[1] - found[1]) & _MASK
    powers = [1 << bit for bit in range(32)]
    deltas = [*powers, *(_MASK + 1 - power for power in powers)]
    even, odd = (1, 1), (0, 1)
    for _ in range(num_pairs):
        for a, b in (even, odd):
            if any(a * d & _MASK == first and b * d & _MASK == second for d in deltas):
                return True
        even, odd = (_stepped(even), _stepped(odd))
    return False


def _stepped(sums: _Pair) -> _Pair:
    """What a difference of the two sums has become one pair of words later."""
    first = (sums[0] + sums[1]) & _MASK
    return first, (sums[1] + first) & _MASK


def _next_frame(wal: _Wal) -> _Frame | None:
    raw = wal.file.read(_FRAME_HEADER_BYTES + wal.page_bytes)
    if len(raw) < _FRAME_HEADER_BYTES + wal.page_bytes:
        return None
    is_commit = raw[4:8] != bytes(4)
    return _Frame(is_commit, raw[8:16], _last_pair(raw[:_FRAME_HEADER_BYTES]), raw[:8] + raw[_FRAME_HEADER_BYTES:])


def _is_good(header: bytes) -> bool:
    magic = int.from_bytes(header[:4], "big")
    if magic & ~1 != _MAGIC:
        return False
    return _checksum(">" if magic & 1 else "<", header[:24], (0, 0)) == _last_pair(header)


def _checksum(order: str, data: bytes, sums: _Pair) -> _Pair:
    first, second = sums
    words = iter(struct.unpack(f"{order}{len(data) // 4}I", data))
    for even, odd in zip(words, words, strict=True):
        first = (first + even + second) & _MASK
        second = (second + odd + first) & _MASK
    return first, second


def _last_pair(header: bytes) -> _Pair:
    first, second = struct.unpack(">II", header[-8:])
    return first, second


def _flip(data: bytes, bit: int) -> bytes:
    flipped = bytearray(data)
    flipped[bit // 8] ^= 1 << bit % 8
    return bytes(flipped)


def _bits(number: int) -> int:
    return number.bit_count()
