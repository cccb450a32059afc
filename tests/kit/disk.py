"""A disk that fails on demand: `disk_faults.c`, compiled with the system's C compiler and preloaded into a process.

os.execve(sys.executable, arguments, preloaded(os.environ))      # a process in which ...
disk = Disk()                                                    # ... this works
disk.watch(folder); disk.fail(7, errno.ENOSPC, FROM_THEN_ON)     # the 7th change or sync below `folder`, and all after it
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ONCE, FROM_THEN_ON, HALF_THEN_ON = range(3)

_SOURCE = Path(__file__).with_name("disk_faults.c")


class NoCompiler(Exception):
    """There's no C compiler to build the failing disk with."""


def compiled() -> Path:
    """The shared library, built once per source text.

    Raises:
        NoCompiler: install one (Debian: gcc), or name it in CC.
    """
    text = _SOURCE.read_bytes()
    library = Path(
        tempfile.gettempdir(), f"refold-disk-faults-{os.getuid()}-{hashlib.sha256(text).hexdigest()[:16]}.so"
    )
    if not library.exists():
        compiler = next((c for c in (os.environ.get("CC"), "cc", "gcc", "clang") if c and shutil.which(c)), None)
        if compiler is None:
            raise NoCompiler("the disk's faults need a C compiler and there is none: install gcc or clang, or set CC")
        unfinished = library.with_suffix(f".{os.getpid()}")
        subprocess.run(
            [compiler, "-shared", "-fPIC", "-O2", "-o", str(unfinished), str(_SOURCE), "-ldl", "-lpthread"], check=True
        )
        unfinished.replace(library)
    return library


def preloaded(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process in which `Disk` works."""
    others = [name for name in environment.get("LD_PRELOAD", "").split(":") if name]
    return {**environment, "LD_PRELOAD": ":".join([str(compiled()), *others])}


def is_preloaded() -> bool:
    """Whether `Disk` works here."""
    return hasattr(ctypes.CDLL(None), "disk_watch")


class Disk:
    """The controls of the failing disk in this process."""

    def __init__(self) -> None:
        assert is_preloaded(), "start this process with the environment that `preloaded` gives"
        self._library = ctypes.CDLL(None)
        self._library.disk_calls.restype = ctypes.c_long
        self._library.disk_failed_call.restype = ctypes.c_char_p
        self._library.disk_fail.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_int]
        self._library.disk_mark.argtypes = [ctypes.c_uint64]
        self._library.disk_clock.argtypes = [ctypes.c_longlong]

    def watch(self, folder: Path) -> None:
        """Count from 0 the calls that change or sync something below `folder`; nothing fails yet."""
        self._library.disk_watch(str(folder.resolve()).encode() + b"/")
        self.mend()

    def fail(self, nth: int, error: int, mode: int) -> None:
        """Let the n-th call fail with errno `error`: `ONCE`, `FROM_THEN_ON`, or after half its bytes `HALF_THEN_ON`."""
        self._library.disk_fail(nth, error, mode)

    def mend(self) -> None:
        """Nothing fails any more."""
        self._library.disk_mend()

    @property
    def calls(self) -> int:
        """How many calls there were."""
        return int(self._library.disk_calls())

    @property
    def failed_call(self) -> str:
        """Which call failed first, and on which file."""
        return str(self._library.disk_failed_call().decode())

    def trace(self, fd: int) -> None:
        """Write every call to `fd`, with its data; -1 ends that."""
        self._library.disk_trace(fd)

    def mark(self, value: int) -> None:
        """Put a mark into the trace."""
        self._library.disk_mark(value)

    def shift_clock(self, shift_ns: int) -> None:
        """Put the wall clock of this process back or forth from the true time."""
        self._library.disk_clock(shift_ns)


class Call(NamedTuple):
    """One traced call: `op` is write, sync, truncate, create, unlink, rename or mark; `offset` is the size or mark there."""

    op: str
    path: str
    offset: int
    data: bytes


_OPS = {
    "w": "write",
    "s": "sync",
    "t": "truncate",
    "c": "create",
    "u": "unlink",
    "r": "rename",
    "m": "mark",
}


def calls_in(trace: bytes, folder: Path) -> Iterator[Call]:
    """The calls of a trace, with paths relative to `folder`."""
    prefix, at = f"{folder.resolve()}/", 0
    while at < len(trace):
        op, path_length, offset, size = (int.from_bytes(trace[at + i : at + i + 8], "little") for i in (0, 8, 16, 24))
        at += 32
        path = trace[at : at + path_length].decode().removeprefix(prefix)
        at += path_length
        name = _OPS[chr(op)]
        data = trace[at : at + size] if name in {"write", "rename"} else b""
        if name == "rename":
            data = data.decode().removeprefix(prefix).encode()
        at += len(trace[at : at + size]) if name in {"write", "rename"} else 0
        yield Call(name, path, offset, data)
