"""Models being loaded, and giving up on it: who closes an engine doesn't wait for weights that nobody will use."""

import threading
from typing import Protocol


class Killable(Protocol):
    """A process, as far as it matters here."""

    def kill(self) -> None:
        """End it at once."""
        ...


class Loading:
    """Whether anybody still wants what is being loaded. Thread-safe."""

    __slots__ = ("_is_unwanted", "_lock", "_process")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: Killable | None = None
        self._is_unwanted = False

    def begin(self, process: Killable) -> None:
        """A process loads a model from now on. It is killed at once if nobody wants it any more."""
        with self._lock:
            self._process = process
            if self._is_unwanted:
                process.kill()

    def end(self) -> None:
        """It has loaded it, or it has failed."""
        with self._lock:
            self._process = None

    def give_up(self) -> None:
        """Kill what loads now, and whatever begins to from now on; what has been loaded is left alone. Idempotent."""
        with self._lock:
            self._is_unwanted = True
            if self._process is not None:
                self._process.kill()
