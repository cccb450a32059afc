"""What runs in a worker's process: take a hello, build the worker, answer orders one by one. See `refold.gpu.process`."""

import contextlib
import faulthandler
import gc
import os
import signal
import socket
import sys
import threading
import traceback

from refold.gpu.batch import Worker, WorkOrder
from refold.gpu.factory import create_worker
from refold.gpu.frames import PROTOCOL_VERSION, Alive, Channel, Failed, Frame, Hello, Ready
from refold.journal.errors import Rejected

ALIVE_EVERY_S = 1.0


class _EngineGone(Exception):
    """The other end of the socket is closed: there is nobody left to work for."""


class _Pulse:
    """Sends signs of life from a thread of its own while the worker is busy."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._lock = threading.Lock()
        self._busy = threading.Event()
        threading.Thread(target=self._run, name="refold-pulse", daemon=True).start()

    def send(self, frame: Frame) -> None:
        """Send the worker's own frame: it isn't busy any more."""
        self._busy.clear()
        with self._lock:
            try:
                self._channel.send(frame)
            except OSError as error:
                raise _EngineGone from error

    def start(self) -> None:
        """The worker is busy from now on."""
        self._busy.set()

    def _run(self) -> None:
        idle = threading.Event()
        with contextlib.suppress(OSError):
            while self._busy.wait():
                with self._lock:
                    if self._busy.is_set():
                        self._channel.send(Alive())
                idle.wait(ALIVE_EVERY_S)


def main() -> int:
    """Serve the engine at the other end of the socket whose number is the last argument."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the engine's alone: it finishes what is in flight, and ends us
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable()
    # To load torch makes a million objects and no garbage; Python would look for it after every 700 of them.
    gc.set_threshold(50_000)
    channel = Channel(socket.socket(fileno=int(sys.argv[-1])))
    try:
        return _serve(channel, _Pulse(channel))
    except _EngineGone:
        return 0


def _serve(channel: Channel, pulse: _Pulse) -> int:
    hello = channel.receive()
    if not isinstance(hello, Hello) or hello.version != PROTOCOL_VERSION:
        return 2
    pulse.start()
    try:
        worker = create_worker(hello.config, threads=hello.threads, dtype=hello.dtype)
        pulse.send(Ready(kind=worker.kind, environment=worker.environment()))
        _obey(channel, pulse, worker)
    except _EngineGone:
        raise
    except Exception as error:  # noqa: BLE001 - whatever it is, the engine hears of it
        pulse.send(_last_words(error))
        return 1
    return 0


def _obey(channel: Channel, pulse: _Pulse, worker: Worker) -> None:
    while isinstance(order := channel.receive(), WorkOrder):
        if channel.is_orphaned:  # and this order nobody's any more
            raise _EngineGone
        pulse.start()
        pulse.send(worker.execute(order))
    worker.close()


def _last_words(error: Exception) -> Failed:
    told = str(error) if isinstance(error, Rejected) else f"{type(error).__name__}: {error}"
    trace = "".join(traceback.format_exception(error))
    return Failed(rejected=isinstance(error, Rejected), message=told, traceback=trace)


if __name__ == "__main__":
    status = main()
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    os._exit(status)  # a device's libraries may hang in their own clean-up; there is nothing left to save
