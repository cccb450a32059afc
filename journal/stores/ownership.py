"""One live writer per journal of files: an operating-system lock that dies with its process.

The lock is a `flock` on `<journal>.lock`, or on `owner.lock` in a journal that is a folder, which holds the owner's process id for the message. The kernel drops it when the
process ends, by SIGKILL too, so there's never a stale lock to clean up and the file itself is never deleted (deleting it
would let two owners lock two different files). The engine epoch in the database stays the real fence: this lock only
turns "two engines fight" into an error at open.
"""

import contextlib
import fcntl
import os
import weakref
from pathlib import Path

from refold.journal.errors import JournalError, JournalOwned
from refold.journal.stores.no_file import NoFile, open_file
from refold.journal.stores.patience import Patience

_PATIENCE_S = 0.25  # a probe by `owner_of` holds the lock for microseconds; an owner for as long as it lives
_FOLDER_LOCK = "owner.lock"


class OwnerLock:
    """The right to write one journal file, held until `release` or the end of the process."""

    __slots__ = ("__weakref__", "_fd", "path")

    def __init__(self, journal: Path) -> None:
        """Take the lock.

        Raises:
            JournalOwned: a live process has it.
            JournalError: the lock file can't be written.
        """
        self._fd = -1
        self.path = _lock_path(journal)
        try:
            fd = open_file(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        except NoFile as error:
            raise JournalError(f"{error.line}, and the owner's lock is made anew") from error
        except OSError as error:
            raise JournalError(
                f"cannot write {self.path}: {error.strerror}; give this user the right to write the journal's folder"
            ) from error
        if not _lock_patiently(fd):
            pid = _read_pid(fd)
            os.close(fd)
            raise JournalOwned(f"{journal} is written by {_say(pid)}: stop that engine, or use another journal file")
        self._fd = fd
        with contextlib.suppress(OSError):  # a full disk: the lock holds all the same, only its message knows less
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        _held.add(self)

    def __del__(self) -> None:
        self.forget()

    def release(self) -> None:
        """Let the next writer in. Idempotent."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, 0)
            self.forget()

    def forget(self) -> None:
        """Close our view of the lock, without a trace. In a forked child this leaves the parent's lock alone."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


_held: "weakref.WeakSet[OwnerLock]" = weakref.WeakSet()


def _forget_in_child() -> None:
    for lock in list(_held):
        lock.forget()


# A forked worker must not keep the journal owned after its engine was killed.
os.register_at_fork(after_in_child=_forget_in_child)


def owner_of(journal: Path) -> int | None:
    """The process id of the live engine that writes `journal`, 0 if it hides its id, None if there's no owner."""
    try:
        fd = open_file(_lock_path(journal), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return _read_pid(fd) or 0
    finally:
        os.close(fd)
    return None


def _lock_path(journal: Path) -> Path:
    # Links among its folders are followed by whoever opens the lock. One in the file's place leads to another folder.
    real = Path(os.path.realpath(journal)) if journal.is_symlink() else journal
    return real / _FOLDER_LOCK if real.is_dir() else real.with_name(real.name + ".lock")


def _lock_patiently(fd: int) -> bool:
    patience = Patience(_PATIENCE_S)
    while True:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        if not patience.wait():
            return False


def _say(pid: int | None) -> str:
    if pid is None:
        return "another process"
    return f"this process ({pid})" if pid == os.getpid() else f"process {pid}"


def _read_pid(fd: int) -> int | None:
    text = os.pread(fd, 32, 0).strip()
    return int(text) if text.isdigit() else None
