"""Pythons that have started already: each program runs in a process of its own, forked from one that has imported refold.

To start Python and import an engine takes most of the time of a short example. `Started` keeps a process that has done so; its
`folder` has a `python` and a `refold` that pass their arguments, folder, environment and standard streams to a fork of
it, and end as that ends, with its status or by its signal. They are for programs of which only that counts: who starts them
can't signal them.
"""

import atexit
import contextlib
import gc
import marshal
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

IMPORTED = (
    "engine.engine",
    "engine.models",
    "engine.cli.app",
    "engine.cli.run",
    "engine.cli.prompts_in",
    "migrations.files",
)
# What a program's start costs is what this saves: no site-packages here, and two modules.
_PROGRAM = """#!{python} -IS
import marshal, os, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect({path!r})
    order = marshal.dumps(({name!r}, sys.argv[1:], os.getcwd(), dict(os.environ)))
    socket.send_fds(server, [len(order).to_bytes(4, "little")], [0, 1, 2])
    server.sendall(order)
    status = int(server.recv(16))
if status < 0:
    os.kill(os.getpid(), -status)
sys.exit(status)
"""


class Started:
    """The process, from which others are forked until `close`."""

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="started-")
        path = str(Path(self.folder.name, "socket"))
        for name in ("python", "refold"):
            program = Path(self.folder.name, name)
            program.write_text(_PROGRAM.format(python=sys.executable, path=path, name=name), encoding="utf-8")
            program.chmod(0o755)
        self._server = subprocess.Popen(
            [sys.executable, __file__, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._server.stdout is not None
        assert self._server.stdout.readline() == "ready\n"

    def close(self) -> None:
        """End it. What it has started goes on."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.close()
        self._server.stdout.close()
        self._server.wait()
        self.folder.cleanup()


@cache
def shared() -> Started:
    """One for all tests that run in this process."""
    started = Started()
    atexit.register(started.close)
    return started


def serve(path: str) -> tuple[str, list[str]]:
    """Wait for orders until stdin closes. Returns in a fork for each: what it is to run, everything else set as ordered."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    gc.freeze()
    print("ready", flush=True)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while listener in select.select([listener, 0], [], [])[0]:
        asked, _ = listener.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            return _run_one(asked)
        asked.close()
    os._exit(0)


def _run_one(asked: socket.socket) -> tuple[str, list[str]]:
    """Returns in the process that is to run; this one waits for it and tells its status."""
    head, streams, *_ = socket.recv_fds(asked, 4, 3)
    with asked.makefile("rb") as file:
        name, arguments, folder, environment = marshal.loads(file.read(int.from_bytes(head, "little")))
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        with contextlib.suppress(OSError):
            asked.sendall(str(os.waitstatus_to_exitcode(status)).encode())
        os._exit(0)
    asked.close()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    return name, arguments


def run(name: str, arguments: list[str]) -> None:
    """As `python -c CODE` or `refold ARGUMENTS` would; a `python` of other arguments is one that starts now."""
    sys.path[0] = ""
    if name == "python" and arguments[:1] != ["-c"]:
        os.execv(sys.executable, [sys.executable, *arguments])
    if name == "python":
        sys.argv = arguments[:1] + arguments[2:]
        exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = [name, *arguments]
        runpy.run_module("refold", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    from importlib import import_module

    for module in IMPORTED:
        import_module(f"refold.{module}")
    run(*serve(sys.argv[1]))
