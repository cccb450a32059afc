"""Room for SQLite's WAL: zeros on the disk where its next frames will be.

A commit that makes its file longer waits for the file system's own journal too, for a length is metadata. Measured on ext4, 9 KB
and their fdatasync take 470 µs at the end of a file and 265 within it. So the WAL is filled with zeros ahead of its end, by the
one who writes it, at a moment when nobody waits for a record; PostgreSQL does so for its own (`wal_init_zero`). Zeros take their time
as well, 2.5 ms a megabyte there, and where clients follow close on each other the next is soon there to wait for them. So while
nobody is, from the engine's start on, room is made piece by piece for all that comes between two checkpoints; from the first of
these on, the same room is used again and again.

SQLite reads a WAL up to the first frame that hasn't the salt of its header, and one whose header is no header is empty: zeros are
nothing to it, before the first commit and after the last. They're written while this connection has the write lock, under which
nobody else makes the file longer or shorter. A disk that is nearly full keeps its room for commits.
"""

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

FIRST_ROOM_BYTES = 64 << 10
WAL_BOUND_BYTES = 8 << 20
"""When the WAL has grown past it, it is moved into the journal's own file."""
_MOST_AT_ONCE_BYTES = 256 << 10
_PIECE_BYTES = 512 << 10
_ENOUGH_BYTES = WAL_BOUND_BYTES + _PIECE_BYTES
_WORTH_BYTES = 48 << 10
_SPARE_BYTES = 64 << 20


class Wal:
    """What the writing connection knows of its WAL.

    Attributes:
        used_bytes: at most so far its frames reach.
    """

    __slots__ = ("_num_commits", "_path", "_room_bytes", "_used_before_bytes", "used_bytes")

    def __init__(self, journal: Path) -> None:
        self._path = Path(os.path.realpath(journal) + "-wal")
        self.emptied()

    def emptied(self) -> None:
        """The file is empty, or nothing is known of it."""
        self._room_bytes = 0
        self.moved()

    def moved(self) -> None:
        """All is in the journal's own file; the next frame is the first again."""
        self.used_bytes = self._used_before_bytes = self._num_commits = 0

    def committed(self, num_bytes: int) -> None:
        """A commit has added so many bytes, pages and all."""
        self.used_bytes += num_bytes
        self._num_commits += 1

    def keep_room(self, driver: sqlite3.Connection) -> None:
        """Let half of the next zeros lie ahead, at least. Where there can't be any, as many bytes later is tried again.

        As many come next as there was room, so that a short journal stays small and a long one is seldom extended. A large
        commit is better off without: zeros are written too, and what they spare it is one wait.
        """
        step_bytes = min(max(FIRST_ROOM_BYTES, self._room_bytes), _MOST_AT_ONCE_BYTES)
        if self._room_bytes >= self.used_bytes + step_bytes // 2:
            return
        upto_bytes = max(self._room_bytes, self.used_bytes) + step_bytes
        is_worth_it = self.used_bytes - self._used_before_bytes <= _WORTH_BYTES * max(self._num_commits, 1)
        self._used_before_bytes, self._num_commits = self.used_bytes, 0
        length_bytes = make_room(driver, self._path, upto_bytes) if is_worth_it else 0
        self._room_bytes = max(upto_bytes, length_bytes)

    def add_room(self, driver: sqlite3.Connection) -> bool:
        """A piece of what there's time for while nobody waits; whether there is more. What can't be isn't tried again."""
        if self._room_bytes < _ENOUGH_BYTES:
            upto_bytes = max(self._room_bytes, self.used_bytes) + _PIECE_BYTES
            self._room_bytes = max(upto_bytes, make_room(driver, self._path, upto_bytes))
        return self._room_bytes < _ENOUGH_BYTES


def make_room(driver: sqlite3.Connection, wal: Path, upto_bytes: int) -> int:
    """Fill the WAL with zeros so that it's `upto_bytes` long; how long it is then, 0 where that isn't known.

    Nothing is raised: without room, a commit makes it. The connection waits for nobody (`busy_timeout` 0), nor does this.
    """
    with contextlib.suppress(OSError, sqlite3.Error), _opened(wal) as fd:
        driver.execute("BEGIN IMMEDIATE")
        try:
            length_bytes = _fill(fd, upto_bytes)
        finally:
            driver.execute("ROLLBACK")
        os.fdatasync(fd)
        return length_bytes
    return 0


@contextlib.contextmanager
def _opened(wal: Path) -> Iterator[int]:
    """The WAL's file. Closing it drops no lock of SQLite's, whose locks are on the journal and on the index beside it."""
    fd = os.open(wal, os.O_WRONLY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def _fill(fd: int, upto_bytes: int) -> int:
    length_bytes, room = os.fstat(fd).st_size, os.fstatvfs(fd)
    if room.f_bavail * room.f_frsize < _SPARE_BYTES:
        return length_bytes
    while length_bytes < upto_bytes:
        zeros = bytes(min(upto_bytes - length_bytes, _MOST_AT_ONCE_BYTES))
        length_bytes += os.pwrite(fd, zeros, length_bytes)
    return length_bytes
