"""A TCP proxy in front of a server's Unix socket that cuts a connection at a chosen byte.

`arm(SENT, 100)` lets 100 more bytes of what the client sends through, and then cuts that connection in both directions;
`arm(ANSWERED, 7)` lets the server's whole request through and 7 bytes of its answer. A cut happens once: the next connection
is whole again. `count()` measures, so that every place of a conversation can be cut in turn.
"""

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Literal

Direction = Literal["sent", "answered"]
SENT: Direction = "sent"
ANSWERED: Direction = "answered"


class CuttingProxy:
    """Listens on a port of 127.0.0.1 until it's closed."""

    def __init__(self, server_socket: str) -> None:
        self._server_socket = server_socket
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._lock = threading.Lock()
        self._direction: Direction | None = None
        self._left = 0
        self._counted: dict[Direction, bytearray] = {SENT: bytearray(), ANSWERED: bytearray()}
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self.num_cuts = 0
        self.refusing = False
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def port(self) -> int:
        """Where it listens."""
        port: int = self._listener.getsockname()[1]
        return port

    def arm(self, direction: Direction, num_bytes: int) -> None:
        """Cut a connection once `num_bytes` more have passed in a direction; 0 cuts at the first that wants to pass."""
        with self._lock:
            self._direction, self._left = direction, num_bytes

    def cut_clients(self) -> None:
        """Cut every client off now; the server isn't told, as when a cable is cut, and works on."""
        for client, _ in self._pairs:
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)

    @contextlib.contextmanager
    def counting(self) -> Iterator[dict[Direction, bytearray]]:
        """What passes meanwhile, by direction."""
        with self._lock:
            self._counted = {SENT: bytearray(), ANSWERED: bytearray()}
        yield self._counted

    def close(self) -> None:
        """Accept no more connections."""
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if self.refusing:
                    client.close()
                    continue
                server = socket.socket(socket.AF_UNIX)
                try:
                    server.connect(self._server_socket)
                except OSError:
                    client.close()
                    continue
                self._pairs.append((client, server))
                for direction, source, target in ((SENT, client, server), (ANSWERED, server, client)):
                    threading.Thread(target=self._pump, args=(direction, source, target), daemon=True).start()

    def _pump(self, direction: Direction, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                passes, is_cut = self._pass(direction, data)
                target.sendall(passes)
                if is_cut:
                    break
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _pass(self, direction: Direction, data: bytes) -> tuple[bytes, bool]:
        with self._lock:
            self._counted[direction] += data
            if self._direction != direction:
                return data, False
            if len(data) <= self._left and self._left > 0:
                self._left -= len(data)
                return data, False
            self._direction = None
            self.num_cuts += 1
            return data[: self._left], True


def message_ends(conversation: bytes) -> list[int]:
    """Where the messages of PostgreSQL's protocol end, in what one side said after the start-up."""
    ends, place = [], 0
    while place + 5 <= len(conversation):
        place += 1 + int.from_bytes(conversation[place + 1 : place + 5], "big")
        ends.append(place)
    return ends
