"""A file system that fails where it's told to, and a disk that keeps only what was synced.

`FaultyFiles` stands where the store expects `OsFiles`. It works on a real folder, which shows what a process sees: the page
cache. Beside it, it keeps account of what the disk holds: a file's content as of its last sync, a folder's names as of its
last sync. `lose_power` writes that down in the folder, and whoever opens it next finds what a power cut would have left.

    files = FaultyFiles(root)
    files.plan(12, Fault("error", errno.ENOSPC))     # the call number 12 fails; calls are counted from 0
    ...                                              # the store's work; Crash comes up where a process would have ended
    files.lose_power("some", random.Random(1))       # of what wasn't synced, some sectors and some names survive

After a failed sync the file keeps its new content in the cache, clean, and no later sync writes it: as Linux does.
"""

import contextlib
import errno
import itertools
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

from refold.journal.stores.segments.files import CREATE, OsFiles

SECTOR_BYTES = 512
Survival = Literal["none", "some", "all"]


class UnsyncedFiles(OsFiles):
    """Real files, without the syncs: for tests that open a journal a thousand times and never cut the power."""

    fsync = fdatasync = staticmethod(lambda fd: None)
    fsync_dir = staticmethod(lambda path: None)


class Crash(BaseException):
    """The process has ended here: no `except Exception` sees it, and each further call ends it again."""


class Call(NamedTuple):
    """A call of the file layer."""

    number: int
    name: str
    path: Path


class Fault(NamedTuple):
    """What becomes of a call.

    Attributes:
        kind: `error`: it fails without effect; `late error`: it fails, though it had its effect; `short`: a write stops after
            `keep` bytes and says so; `torn`: it stops there and fails; `crash`: the process ends before it; `late crash`:
            after it; `torn crash`: after `keep` bytes of a write.
        error: the errno of an error.
        keep: bytes of a write.
        lasts: every later call fails in the same way, as on a disk that stays full or has gone.
    """

    kind: str
    error: int = errno.EIO
    keep: int = 0
    lasts: bool = False


class _Node:
    """A file, whatever its names: what the disk holds, and what was written since."""

    def __init__(self, durable: bytes = b"") -> None:
        self.durable = durable
        self.pending: list[tuple[int, bytes | None]] = []  # a write at an offset, or (None) the length

    def synced(self, content: bytes) -> None:
        self.durable, self.pending = content, []

    def after_power_cut(self, survival: Survival, choose: random.Random) -> bytes:
        content = bytearray(self.durable)
        if survival == "none":
            return bytes(content)
        for offset, data in self.pending:
            if data is None:
                if survival == "all" or choose.random() < 0.5:
                    _resize(content, offset)
                continue
            for begin, end in _sectors(offset, len(data)):
                if survival == "all" or choose.random() < 0.5:
                    _resize(content, max(len(content), offset + end))
                    content[offset + begin : offset + end] = data[begin:end]
        return bytes(content)


class FaultyFiles:
    """The file layer of one process, on the folder `root`."""

    def __init__(self, root: Path, *, lies: bool = False) -> None:
        """Take what lies in `root` for durable. With `lies`, a sync says that it's done and does nothing."""
        self.root, self.lies = root, lies
        self.calls: list[Call] = []
        self.rule: Callable[[Call], Fault | None] = lambda call: self._planned.get(call.number)
        self._planned: dict[int, Fault] = {}
        self._lasting: Fault | None = None
        self._crashed = False
        self._fds: dict[int, tuple[Path, _Node]] = {}
        self._names: dict[Path, _Node | None] = {}  # what processes see; None is a folder
        self._durable_names: dict[Path, _Node | None] = {}
        self._pending_names: list[tuple[Path, dict[Path, _Node | None], list[Path]]] = []
        for path in sorted(root.rglob("*")):
            self._names[path] = None if path.is_dir() else _Node(path.read_bytes())
        self._durable_names.update(self._names)

    def plan(self, number: int, fault: Fault) -> None:
        """Let the call with this number fail."""
        self._planned[number] = fault

    def lose_power(self, survival: Survival = "none", choose: random.Random | None = None) -> None:
        """End the process, and leave in the folder what the disk holds. Of what wasn't synced, `survival` survives."""
        choose = choose or random.Random(0)
        self.end_process()
        names = dict(self._durable_names)
        count = {"none": 0, "all": len(self._pending_names)}.get(survival, -1)
        for _, added, removed in self._pending_names[
            : count if count >= 0 else choose.randint(0, len(self._pending_names))
        ]:
            _apply(names, added, removed)
        contents = {path: node and node.after_power_cut(survival, choose) for path, node in names.items()}
        for path in self.root.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        for path, content in sorted(contents.items()):
            if content is None:
                path.mkdir(exist_ok=True)
            elif path.parent.is_dir():  # else its folder's name was lost, and the file with it
                path.write_bytes(content)

    def end_process(self) -> None:
        """SIGKILL: every descriptor is closed, and no call works any more. The page cache stays."""
        self._crashed = True
        for fd in list(self._fds):
            os.close(fd)
        self._fds.clear()

    def restart(self) -> None:
        """A new process on the same machine: no descriptors, no faults, and the page cache as it was."""
        self.end_process()
        self._crashed, self._lasting, self._planned = False, None, {}

    # The port

    def open(self, path: Path, flags: int) -> int:
        def effect() -> int:
            is_new = not path.exists()
            fd = OsFiles.open(path, flags)
            if is_new:
                self._link(path, _Node())
            if flags == CREATE:
                self._node(path).pending.append((0, None))
            self._fds[fd] = (path, self._node(path))
            return fd

        return self._do("open", path, effect)

    def close(self, fd: int) -> None:
        if self._crashed:
            raise Crash
        path, _ = self._fds[fd]
        self._do("close", path, lambda: (self._fds.pop(fd), os.close(fd)))

    def size(self, fd: int) -> int:
        return self._do("size", self._fd_path(fd), lambda: OsFiles.size(fd))

    def pread(self, fd: int, size: int, offset: int) -> bytes:
        return self._do("pread", self._fd_path(fd), lambda: os.pread(fd, size, offset))

    def pwrite(self, fd: int, data: bytes | memoryview, offset: int) -> int:
        def effect(keep: int = len(data)) -> int:
            written = bytes(data[:keep])
            self._fds[fd][1].pending.append((offset, written))
            return os.pwrite(fd, written, offset)

        return self._do("pwrite", self._fd_path(fd), effect)

    def truncate(self, fd: int, size: int) -> None:
        def effect() -> None:
            os.ftruncate(fd, size)
            self._fds[fd][1].pending.append((size, None))

        self._do("truncate", self._fd_path(fd), effect)

    def fsync(self, fd: int) -> None:
        self._sync("fsync", fd)

    def fdatasync(self, fd: int) -> None:
        self._sync("fdatasync", fd)

    def rename(self, source: Path, target: Path) -> None:
        def effect() -> None:
            OsFiles.rename(source, target)
            node = self._names[source]
            self._change(target.parent, {target: node}, [source])

        self._do("rename", target, effect)

    def unlink(self, path: Path) -> None:
        def effect() -> None:
            OsFiles.unlink(path)
            self._change(path.parent, {}, [path])

        self._do("unlink", path, effect)

    def mkdir(self, path: Path) -> None:
        def effect() -> None:
            OsFiles.mkdir(path)
            self._link(path, None)

        self._do("mkdir", path, effect)

    def listdir(self, path: Path) -> list[str]:
        return self._do("listdir", path, lambda: OsFiles.listdir(path))

    def fsync_dir(self, path: Path) -> None:
        def effect() -> None:
            if self.lies:
                return
            for change in [change for change in self._pending_names if change[0] == path]:
                _apply(self._durable_names, *change[1:])
                self._pending_names.remove(change)

        self._do("fsync_dir", path, effect)

    # Behind it

    def _sync(self, name: str, fd: int) -> None:
        path, node = self._fds.get(fd, (self.root, _Node()))

        def effect() -> None:
            if not self.lies:
                node.synced(_content_after(node))

        try:
            self._do(name, path, effect)
        except OSError:
            node.pending.clear()  # the cache keeps it, clean; the disk never gets it
            raise

    def _do(self, name: str, path: Path, effect: Callable[..., object]):
        if self._crashed:
            raise Crash
        call = Call(len(self.calls), name, path)
        self.calls.append(call)
        fault = self._lasting or self.rule(call)
        if fault is None:
            return effect()
        if fault.lasts:
            self._lasting = fault
        return self._fail(call, fault, effect)

    def _fail(self, call: Call, fault: Fault, effect: Callable[..., object]):
        if fault.kind in {"short", "torn", "torn crash"} and call.name == "pwrite":
            written = effect(fault.keep)
            if fault.kind == "short":
                return written
        elif fault.kind.startswith("late") and not (
            call.name.startswith(("fsync", "fdatasync")) and "error" in fault.kind
        ):
            with contextlib.suppress(OSError):
                effect()
        if fault.kind.endswith("crash"):
            self.end_process()
            raise Crash
        if fault.kind == "short":
            return effect()
        raise OSError(fault.error, os.strerror(fault.error), str(call.path))

    def _fd_path(self, fd: int) -> Path:
        if self._crashed:
            raise Crash
        return self._fds[fd][0]

    def _node(self, path: Path) -> _Node:
        node = self._names.setdefault(path, _Node())
        assert node is not None, f"{path} is a folder"
        return node

    def _link(self, path: Path, node: _Node | None) -> None:
        self._change(path.parent, {path: node}, [])

    def _change(self, folder: Path, added: dict[Path, _Node | None], removed: list[Path]) -> None:
        _apply(self._names, added, removed)
        self._pending_names.append((folder, added, removed))


def _apply(names: dict[Path, _Node | None], added: dict[Path, _Node | None], removed: list[Path]) -> None:
    for path in removed:
        names.pop(path, None)
    names.update(added)


def _content_after(node: _Node) -> bytes:
    return node.after_power_cut("all", random.Random(0))


def _resize(content: bytearray, size: int) -> None:
    del content[size:]
    content.extend(bytes(size - len(content)))


def _sectors(offset: int, size: int) -> list[tuple[int, int]]:
    """The parts of a write that lie in one sector each, as offsets within it."""
    cuts = [0, *range(SECTOR_BYTES - offset % SECTOR_BYTES, size, SECTOR_BYTES), size]
    return list(itertools.pairwise(cuts))
