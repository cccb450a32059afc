"""The engine's inbox: many write, one thread reads, and nothing put in is left unread."""

import queue
import threading
import time
from collections.abc import Iterator
from typing import Any


class Inbox:
    """A queue that can be closed. `put` may be called from any thread, the rest from the engine's only."""

    __slots__ = ("_is_closed", "_lock", "_queue")

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_closed = False

    def put(self, message: object) -> bool:
        """Put a message in; False if nobody will read it, because the engine has ended."""
        with self._lock:
            if not self._is_closed:
                self._queue.put(message)
            return not self._is_closed

    def wait(self, until_s: float | None) -> Iterator[Any]:
        """Wait for a message, and yield it and whatever is there by then; nothing if the time is over.

        A message leaves the inbox when it is yielded: those after one that ended the engine are still in it.

        Args:
            until_s: on the clock of `time.monotonic`; None for as long as it takes.
        """
        try:
            yield self._queue.get(timeout=None if until_s is None else max(0.0, until_s - time.monotonic()))
        except queue.Empty:
            return
        for _ in range(self._queue.qsize()):
            yield self._queue.get_nowait()

    def close(self) -> list[Any]:
        """Take no more; returns what is left."""
        with self._lock:
            self._is_closed = True
            return [self._queue.get_nowait() for _ in range(self._queue.qsize())]
