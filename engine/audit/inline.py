"""The read model kept up to date by the engine itself, beside the turn loop and at low priority.

A thread of its own reads the durable records from the store and projects them, as `refold audit follow` would in a process of its own.
It works in slices of half a millisecond and rests for as long, so that the engine's threads hardly notice it; under load it falls behind
and catches up later. What goes wrong here is a warning, and the end of it for this life of the engine: whoever asks projects
what is missing first.
"""

import threading
import time

from refold.engine.audit.place import keep_what_is_lost, open_writer, place_of
from refold.engine.logs import get_logger
from refold.journal.errors import RefoldError
from refold.journal.store import JournalReader
from refold.projections.audit.trailing import TrailingProjection

SLICE_S = 0.0005
RESTS = 1
LAST_S = 2.0
_BATCH_ROWS = 1_000


class InlineAudit:
    """Projects one stream while its engine runs. `became_durable` is for the writer's thread, the rest for the engine's owner.

    Attributes:
        position: of the next record to project, as far as this life of the engine knows.
    """

    def __init__(self, store: JournalReader, stream: str, journal: str | None) -> None:
        """Start nothing yet; never, if `journal`, the URL, is None."""
        self._store, self._stream, self._journal = store, stream, journal
        self.position = 0
        self._durable = 0
        self._news, self._closing = threading.Event(), threading.Event()
        self._slice_began_s = 0.0
        self._deadline_s = float("inf")
        self._thread: threading.Thread | None = None

    def became_durable(self, position: int) -> None:
        """Every record before this position is on disk. Returns at once."""
        if self._journal is None:
            return
        self._durable = position
        self._news.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="refold-audit", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Project what is left, for `LAST_S` seconds at most, and end the thread. Before the store is closed."""
        self._deadline_s = time.monotonic() + LAST_S
        self._closing.set()
        self._news.set()
        if self._thread is not None:
            self._thread.join()

    def _work(self) -> None:
        assert self._journal is not None
        try:
            place = place_of(self._journal)
            writer = open_writer(place)
            try:
                keep_what_is_lost(place, self._store, writer, self._stream)
                trailing = TrailingProjection(self._store, writer, self._stream, max_rows=_BATCH_ROWS)
                while self._wait():
                    self._catch_up(trailing)
            finally:
                writer.close()
        except Exception as error:  # noqa: BLE001 - whatever it is, the engine goes on without
            reason = str(error) if isinstance(error, RefoldError) else repr(error)
            get_logger().warning("audit_off", stream=self._stream, reason=reason[:200])

    def _wait(self) -> bool:
        """Wait for news; False when it's over."""
        if self.position >= self._durable:
            if self._closing.is_set():
                return False
            self._news.wait()
        self._news.clear()
        return not self._is_late() and not (self._closing.is_set() and self.position >= self._durable)

    def _catch_up(self, trailing: TrailingProjection) -> None:
        self._slice_began_s = time.perf_counter()
        goal = self._durable
        for batch in trailing.catch_up(goal, self._rest):
            self.position = batch.checkpoint.position
            if self._is_late() or batch.checkpoint.damage is not None:
                break
        self.position = goal if not self._is_late() else self.position

    def _rest(self) -> None:
        """Called after each record, outside of any transaction."""
        spent_s = time.perf_counter() - self._slice_began_s
        if spent_s >= SLICE_S and not self._closing.is_set():
            time.sleep(RESTS * spent_s)
            self._slice_began_s = time.perf_counter()

    def _is_late(self) -> bool:
        return time.monotonic() > self._deadline_s
