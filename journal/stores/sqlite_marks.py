"""The mark: how far each stream was acknowledged, in a small file beside a SQLite journal.

SQLite reads a WAL up to the first frame whose checksum is wrong and ignores the rest, without a word. That's right for a
transaction that a crash cut short, and loses committed ones if it's damage; the journal's own head goes with them, so from
inside nothing is missing. The mark is outside: before an append returns, it moves behind the records. If the journal ends
before it, records that somebody was told of are gone.

It's written without a sync, so it survives the death of the process and may lag after a power cut, but it never runs ahead:
it moves after the commit. A slot that was torn has a wrong checksum and counts as not there; `doubt_of` says that there is one,
so that whoever opens the journal is told what nobody looks after. Nothing depends on the file: to remove it is to say that what
is in the journal is all that counts, after an older copy was put in its place for example.
"""

import contextlib
import os
import shlex
import struct
import zlib
from collections.abc import Collection, Mapping
from pathlib import Path

from refold.journal.ends import EndInDoubt
from refold.journal.errors import JournalCorrupt
from refold.journal.record import Head, short
from refold.journal.stores.no_file import NoFile, open_file, read_bytes

_MAGIC = b"RMK1"
_SLOT = struct.Struct(">4sQQ32s")
_CRC = struct.Struct(">I")
_SLOT_BYTES = 64
_MAX_STREAMS = 1 << 16
_ATTEMPTS = 20


def mark_file(journal: Path) -> Path:
    """Where the marks of `journal` are."""
    real = Path(os.path.realpath(journal))
    return real.with_name(real.name + ".mark")


class Marks:
    """The writer's hand on the marks of one journal."""

    __slots__ = ("_fd", "_path")

    def __init__(self, journal: Path) -> None:
        self._path = mark_file(journal)
        self._fd = -1

    def move(self, stream_id: int, head: Head) -> None:
        """All of the stream before `head` is acknowledged. A full disk keeps the mark where it was."""
        if not 0 <= stream_id < _MAX_STREAMS:
            return
        slot = _SLOT.pack(_MAGIC, stream_id, head.position, head.hash)
        with contextlib.suppress(OSError):
            if self._fd < 0:
                self._fd = open_file(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
            os.pwrite(self._fd, slot + _CRC.pack(zlib.crc32(slot)), stream_id * _SLOT_BYTES)

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def marks_of(journal: Path) -> dict[int, tuple[int, bytes]]:
    """The acknowledged position, and the hash before it, of each stream id that has a mark."""
    try:
        content = read_bytes(mark_file(journal))
    except OSError:
        return {}
    return _slots_of(content)[0]


def doubt_of(journal: Path) -> str:
    """Why the file of marks, which is there, can't vouch for the journal's end; empty if it can, or if there is none.

    A writer that was caught half way is looked at again.
    """
    for _ in range(_ATTEMPTS):
        if not (damage := _damage_of(mark_file(journal))):
            return ""
    return (
        f"{mark_file(journal)} {damage}: it says how far the journal was acknowledged, so a cut-off end, or an older copy in the "
        "journal's place, can't be noticed now; compare the journal with a head that you kept (`refold verify --head`), and "
        "remove this file, while no engine runs, to take the journal as it is"
    )


def _damage_of(path: Path) -> str:
    try:
        content = read_bytes(path)
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except NoFile as error:
        return f"{error.what}, where a file should be"
    except OSError as error:
        return f"can't be read ({error.strerror})"
    marks, num_broken = _slots_of(content)
    if num_broken:
        return f"is damaged ({num_broken} of its {len(marks) + num_broken} marks)"
    if (
        marks or not content
    ):  # one that was killed between making the file and writing to it has acknowledged nothing yet
        return ""
    return f"holds no mark in its {len(content)} bytes (a power cut can do that)"


def _slots_of(content: bytes) -> tuple[dict[int, tuple[int, bytes]], int]:
    """The sound marks, by stream id, and how many are broken. A slot of zeros belongs to a stream that never had one."""
    marks, num_broken = dict[int, tuple[int, bytes]](), 0
    for at in range(0, len(content), _SLOT_BYTES):
        slot, checksum = content[at : at + _SLOT.size], content[at + _SLOT.size : at + _SLOT.size + _CRC.size]
        if checksum == _CRC.pack(zlib.crc32(slot)) and len(slot) == _SLOT.size:
            magic, stream_id, position, digest = _SLOT.unpack(slot)
            if magic == _MAGIC and at == stream_id * _SLOT_BYTES:
                marks[stream_id] = (position, digest)
                continue
        num_broken += any(content[at : at + _SLOT_BYTES])
    return marks, num_broken


def check_marks(journal: Path, marks: Mapping[int, tuple[int, bytes]], heads: Mapping[int, tuple[int, bytes]]) -> None:
    """No stream ends before its mark. `heads`, by stream id, were read after `marks`.

    Raises:
        JournalCorrupt: one does; kind `truncated`.
    """
    for stream_id, (acknowledged, digest) in marks.items():
        position, found = heads.get(stream_id, (0, b""))
        if position < acknowledged or (position == acknowledged and found != digest):
            other = f" with hash {short(found)}, not {short(digest)}" if position == acknowledged else ""
            raise JournalCorrupt(
                f"{journal} ends at {position}{other}, but records up to {acknowledged} were acknowledged here: its end was lost "
                f"or an older copy took its place; restore a newer one, or remove {mark_file(journal)} to go on from there",
                position=position,
                kind="truncated",
            )


def check_accepted(journal: Path, stream_id: int, mark: tuple[int, bytes], head: tuple[int, bytes]) -> None:
    """As `check_marks`, of one stream, for whoever reads it all the same.

    Raises:
        EndInDoubt: it ends before its mark; kind `truncated`.
    """
    try:
        check_marks(journal, {stream_id: mark}, {stream_id: head})
    except JournalCorrupt as error:
        what = f"{error}; what is here is copied by `refold copy --accept-end {shlex.quote(str(journal))} NEW`"
        raise EndInDoubt(what, position=head[0], num_known=mark[0], told_by="mark", kind="truncated") from error


def check_known(journal: Path, marks: Mapping[int, tuple[int, bytes]], stream_ids: Collection[int]) -> None:
    """No stream that has a mark is gone as a whole. `stream_ids` were read after `marks`.

    Raises:
        JournalCorrupt: one is; kind `truncated`.
    """
    check_marks(journal, {key: mark for key, mark in marks.items() if key not in stream_ids}, {})


def check_gone(journal: Path, marks: Mapping[int, tuple[int, bytes]]) -> None:
    """Nothing was acknowledged in a file that isn't there.

    Raises:
        JournalCorrupt: something was; kind `truncated`.
    """
    acknowledged = max((position for position, _ in marks.values()), default=0)
    if acknowledged:
        raise JournalCorrupt(
            f"{journal} is gone, but records up to {acknowledged} were acknowledged here: put it back, or remove "
            f"{mark_file(journal)} too to begin a new journal",
            position=0,
            kind="truncated",
        )


def forget_marks(journal: Path) -> None:
    """There's no journal any more, and its marks say nothing."""
    with contextlib.suppress(OSError):
        mark_file(journal).unlink()
