"""All that the segment store asks of a file system, in one small port, so that a test can make any call of it fail.

Two rules stand on it. A name is durable when its folder was synced after it was made, not before. And when a sync has failed,
nothing is known of what was written through that handle, for the kernel marks the pages clean and the next sync succeeds: so
a failed sync is never repeated, the handle is given up, and what lies beyond the last sync that did succeed is cut off.
"""

import contextlib
import errno
import os
from pathlib import Path
from typing import Protocol

from refold.journal.errors import JournalCorrupt, JournalError
from refold.journal.stores.no_file import NoFile, open_file
from refold.journal.stores.room import room_at

READ = os.O_RDONLY | os.O_CLOEXEC
UPDATE = os.O_RDWR | os.O_CLOEXEC
CREATE = UPDATE | os.O_CREAT | os.O_TRUNC

_NO_SPACE = "free disk space, then open the journal again"
_NO_RIGHT = "give this user the right to read and write the journal's folder"
_REMEDIES = {
    errno.ENOSPC: _NO_SPACE,
    errno.EDQUOT: _NO_SPACE,
    errno.EFBIG: _NO_SPACE,
    errno.EIO: "check the disk, then open the journal again",
    errno.EACCES: _NO_RIGHT,
    errno.EPERM: _NO_RIGHT,
    errno.EROFS: _NO_RIGHT,
    errno.EMFILE: "let this process open more files",
    errno.ENOTDIR: "name another journal folder",
}


class FileLayer(Protocol):
    """A file system: the calls of `os` by their names, on paths and descriptors. Each raises OSError when it fails."""

    def open(self, path: Path, flags: int) -> int:
        """A descriptor. What isn't a file is refused at once (`NoFile`)."""
        ...

    def close(self, fd: int) -> None:
        """Give the descriptor back."""
        ...

    def size(self, fd: int) -> int:
        """The file's length in bytes."""
        ...

    def pread(self, fd: int, size: int, offset: int) -> bytes:
        """At most `size` bytes; fewer at the end of the file."""
        ...

    def pwrite(self, fd: int, data: bytes | memoryview, offset: int) -> int:
        """How many bytes were written: perhaps not all."""
        ...

    def truncate(self, fd: int, size: int) -> None:
        """Set the file's length."""
        ...

    def fsync(self, fd: int) -> None:
        """Content and length reach the disk, and all else that the file system knows of the file."""
        ...

    def fdatasync(self, fd: int) -> None:
        """Content and length reach the disk."""
        ...

    def rename(self, source: Path, target: Path) -> None:
        """Give a file another name, taking it from whoever has it."""
        ...

    def unlink(self, path: Path) -> None:
        """Remove a name."""
        ...

    def mkdir(self, path: Path) -> None:
        """Make a folder."""
        ...

    def listdir(self, path: Path) -> list[str]:
        """The names in a folder."""
        ...

    def fsync_dir(self, path: Path) -> None:
        """The folder's names reach the disk."""
        ...


class OsFiles:
    """The operating system's files."""

    open = staticmethod(open_file)
    close = staticmethod(os.close)
    size = staticmethod(lambda fd: os.fstat(fd).st_size)
    pread = staticmethod(os.pread)
    pwrite = staticmethod(os.pwrite)
    truncate = staticmethod(os.ftruncate)
    fsync = staticmethod(os.fsync)
    fdatasync = staticmethod(getattr(os, "fdatasync", os.fsync))
    rename = staticmethod(os.rename)
    unlink = staticmethod(os.unlink)
    mkdir = staticmethod(os.mkdir)
    listdir = staticmethod(os.listdir)

    @staticmethod
    def fsync_dir(path: Path) -> None:
        """Sync a folder."""
        fd = os.open(path, READ | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


OS_FILES: FileLayer = OsFiles()


def close_read(files: FileLayer, fd: int) -> None:
    """Close a descriptor that was only read from: nothing can be lost by that, whatever it answers."""
    with contextlib.suppress(OSError):
        files.close(fd)


def write_all(files: FileLayer, fd: int, data: bytes, offset: int) -> None:
    """Write all of `data`, in as many calls as the system needs.

    Raises:
        OSError: a call failed, or wrote nothing; some of the data may be written.
    """
    written = files.pwrite(fd, data, offset)
    while written < len(data):
        rest = memoryview(data)[written:]
        count = files.pwrite(fd, rest, offset + written)
        if count <= 0:
            raise OSError(errno.EIO, f"wrote {written} of {len(data)} bytes, then nothing")
        written += count


def write_file(files: FileLayer, path: Path, data: bytes) -> None:
    """Make a file that is there whole, on disk and under its name, or not at all."""
    draft = path.with_name(path.name + ".new")
    fd = files.open(draft, CREATE)
    try:
        write_all(files, fd, data, 0)
        files.fsync(fd)
    finally:
        files.close(fd)
    files.rename(draft, path)
    files.fsync_dir(path.parent)


def read_file(files: FileLayer, path: Path) -> bytes:
    """All of a small file."""
    fd = files.open(path, READ)
    try:
        return files.pread(fd, files.size(fd), 0)
    finally:
        close_read(files, fd)


def explain(error: OSError, path: Path, doing: str) -> JournalError:
    """The journal's error for an error of the system at `path`, with the remedy."""
    if isinstance(error, NoFile):
        return JournalError(f"{error.line}, and restore the file from a backup")
    remedy = _REMEDIES.get(error.errno or 0, "see the cause")
    room = room_at(path) if remedy == _NO_SPACE else ""
    return JournalError(f"cannot {doing} {path}: {error.strerror or error}{room}; {remedy}")


def without_segment(path: Path, position: int, error: NoFile) -> JournalCorrupt:
    """The error of a segment whose name something else has."""
    return damaged(path, position, "deleted", f"is not there: {error.line}")


def damaged(path: Path, position: int, kind: str, what: str) -> JournalCorrupt:
    """The error of a damaged file: `record 12 of FILE WHAT (KIND)`."""
    return JournalCorrupt(
        f"record {position} in {path} {what} ({kind}); restore it from a backup", position=position, kind=kind
    )


class Misplaced(JournalCorrupt):
    """What lies at a place is whole, and isn't what belongs there. What became of that, the records behind it tell: see `misplaced.py`."""


def misplaced(path: Path, position: int, found: int) -> Misplaced:
    """The error of a file in which record `found` lies where `position` belongs."""
    kind = "deleted" if found > position else "reordered"
    error = damaged(path, position, kind, f"is not where it belongs: record {found} is")
    return Misplaced(str(error), position=position, kind=kind)
