"""Opening what should be a file: where a pipe, a socket, a device or a folder has its name, that is said at once.

Whoever opens a pipe waits until somebody writes to it, and whoever reads `/dev/zero` never comes to an end.
"""

import os
import stat
from pathlib import Path

_KINDS = {
    stat.S_IFIFO: "FIFO",
    stat.S_IFSOCK: "socket",
    stat.S_IFDIR: "folder",
    stat.S_IFCHR: "device",
    stat.S_IFBLK: "device",
}


class NoFile(OSError):
    """What has a file's name is none. `what` continues its path: `is a FIFO`."""

    def __init__(self, path: Path, mode: int) -> None:
        self.what = f"is a {_KINDS.get(stat.S_IFMT(mode), 'something')}"
        self.line = f"{path} {self.what}, where a file should be: move it away"
        super().__init__(f"{self.what}, where a file should be")


def open_file(path: Path, flags: int) -> int:
    """A descriptor, as `os.open`. Waits for nobody.

    Raises:
        NoFile: there is something else.
        OSError: it can't be opened.
    """
    try:
        fd = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY, 0o644)
    except OSError:
        check_is_file(path)
        raise
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        raise NoFile(path, mode)
    return fd


def check_is_file(path: Path) -> None:
    """What is there is a file, if anything is.

    Raises:
        NoFile: it isn't.
    """
    try:
        mode = path.stat().st_mode
    except OSError:
        return
    if not stat.S_ISREG(mode):
        raise NoFile(path, mode)


def read_bytes(path: Path) -> bytes:
    """All that is in a file. Raises as `open_file`."""
    with open(open_file(path, os.O_RDONLY | os.O_CLOEXEC), "rb") as file:
        return file.read()
