"""Frames: what passes through the socket between an engine and a worker in a process of its own.

A frame is a length (4 bytes, big-endian), a kind (1 byte) and a MessagePack body of that kind's type. Decoding is strict: a body
of another shape is a `FrameError`, and so are an unknown kind and a length beyond the bound. Neither side trusts the other:
what a worker says is data, never code.

    engine                                   worker
      ── Hello(config, threads, dtype) ──▶     loads the model
      ◀─ Alive* ─────────────────────────     a sign of life, again and again while it is busy
      ◀─ Ready(kind, environment) ───────     or Failed
      ── WorkOrder+ ──▶                        one step; the next order may be there already
      ◀─ Alive*, StepOutput ─────────────     or Failed, and it ends
      ── end of file ──▶                       it ends
"""

import select
import socket
import struct
import time
from typing import Any

import msgspec

from refold.gpu.batch import StepOutput, WorkOrder
from refold.journal.events import EngineConfig

PROTOCOL_VERSION = 1
MAX_FRAME_BYTES = 1 << 30
_HEADER = struct.Struct(">IB")
_CLOSED = select.POLLHUP | getattr(select, "POLLRDHUP", 0)


class FrameError(Exception):
    """What came is no frame of this protocol."""


class Hello(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The first frame to a worker: what it shall be. `version` is that of the protocol."""

    version: int
    config: EngineConfig
    threads: int | None
    dtype: str


class Ready(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The worker has loaded its model and takes orders."""

    kind: str
    environment: dict[str, str]


class Alive(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A sign of life from a worker that is busy."""


class Failed(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The worker's last words. `rejected`: the model or the options are to blame, another worker would fail alike."""

    rejected: bool
    message: str
    traceback: str


Frame = Hello | Ready | Alive | Failed | WorkOrder | StepOutput
KINDS: tuple[type[Any], ...] = (Hello, Ready, Alive, Failed, WorkOrder, StepOutput)
"""A frame's kind is its place here."""

_DECODERS = [msgspec.msgpack.Decoder(kind) for kind in KINDS]
_KIND_OF = {kind: number for number, kind in enumerate(KINDS)}
_ENCODER = msgspec.msgpack.Encoder()


def pack(frame: Frame) -> bytes:
    """A frame as bytes."""
    body = _ENCODER.encode(frame)
    assert len(body) <= MAX_FRAME_BYTES, f"a frame of {len(body)} bytes"
    return _HEADER.pack(len(body), _KIND_OF[type(frame)]) + body


def unpack(kind: int, body: bytes) -> Frame:
    """The frame of a kind with this body.

    Raises:
        FrameError: there is no such kind, or the body is of another shape.
    """
    if kind >= len(KINDS):
        raise FrameError(f"a frame of kind {kind}, which there is not")
    try:
        frame: Frame = _DECODERS[kind].decode(body)
    except msgspec.DecodeError as error:
        raise FrameError(f"a {KINDS[kind].__name__} that can't be read: {error}") from error
    return frame


class Channel:
    """One end of the socket. `receive` may be called from one thread; `send`, `offer` and `flush` from another, one at a time."""

    __slots__ = ("_aside", "_buffer", "_rest", "_socket")

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._buffer = bytearray()
        self._aside: socket.socket | None = None  # the same end, which never waits
        self._rest = b""  # of the last frame that was offered

    def send(self, frame: Frame, timeout_s: float | None = None) -> None:
        """Raises OSError (TimeoutError among them) if the other end is gone, or takes nothing for so long."""
        self._socket.settimeout(timeout_s)
        rest, self._rest = self._rest, b""
        self._socket.sendall(rest + pack(frame))

    def offer(self, frame: Frame) -> bool:
        """Send a frame if that takes no waiting; False if it wasn't sent. What doesn't fit of it is left to `flush` or `send`."""
        if self._rest:
            return False
        packed = pack(frame)
        try:
            if self._aside is None:
                self._aside = self._socket.dup()
            self._aside.setblocking(False)
            sent = self._aside.send(packed)
        except OSError:  # no room, or nobody there: who waits for an answer hears of that
            return False
        self._rest = packed[sent:]
        return True

    def flush(self, timeout_s: float | None = None) -> None:
        """Send what is left of the last frame that was offered; raises as `send`."""
        rest, self._rest = self._rest, b""
        if rest:
            self._socket.settimeout(timeout_s)
            self._socket.sendall(rest)

    @property
    def is_orphaned(self) -> bool:
        """Whether the other end is closed, whatever it left to be read."""
        poll = select.poll()
        poll.register(self._socket, _CLOSED)
        return bool(poll.poll(0))

    def receive(self, timeout_s: float | None = None) -> Frame | None:
        """The next frame; None at the end of the stream.

        Raises:
            TimeoutError: it didn't come whole within `timeout_s`.
            FrameError: what came is no frame, or the stream ends within one.
            OSError: the connection broke.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._socket.settimeout(timeout_s)
        header = self._read(_HEADER.size, deadline)
        if header is None:
            return None
        length, kind = _HEADER.unpack(header)
        if length > MAX_FRAME_BYTES:
            raise FrameError(f"a frame of {length} bytes; the most is {MAX_FRAME_BYTES}")
        body = self._read(length, deadline)
        if body is None:
            raise FrameError(f"the stream ends before the {length} bytes of a frame")
        return unpack(kind, body)

    def close(self) -> None:
        """Idempotent."""
        self._socket.close()
        if self._aside is not None:
            self._aside.close()

    def _read(self, count: int, deadline: float | None) -> bytes | None:
        while len(self._buffer) < count:
            if deadline is not None:
                self._socket.settimeout(max(deadline - time.monotonic(), 1e-3))
            piece = self._socket.recv(max(count - len(self._buffer), 1 << 16))
            if not piece:
                if self._buffer:
                    raise FrameError(f"the stream ends after {len(self._buffer)} of {count} bytes")
                return None
            self._buffer += piece
        taken = bytes(self._buffer[:count])
        del self._buffer[:count]
        return taken
