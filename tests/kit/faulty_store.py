"""A real store behind a door that sticks: it fails after some appends, or opens only when told.

What a disk does to an engine, without breaking a disk: an append that raises (full, broken, fenced), one that takes its
time, and one that stands still.
"""

import threading
import time
from collections.abc import Iterator, Sequence

from refold.journal.errors import JournalError
from refold.journal.record import Head, Record
from refold.journal.store import DEFAULT_STREAM, JournalStore


class FaultyStore:
    """Delegates to `store`; the fault is in `append` only."""

    def __init__(
        self, store: JournalStore, *, fail_from_position: int | None = None, error: JournalError | None = None
    ) -> None:
        self.store = store
        self.fail_from_position = fail_from_position
        self.error = error or JournalError("the disk is full (injected): free some space")
        self.delay_s = 0.0
        self.gate = threading.Event()
        self.gate.set()

    def append(self, stream: str, records: Sequence[Record]) -> Head:
        self.gate.wait()
        time.sleep(self.delay_s)
        if self.fail_from_position is not None and records[-1].position >= self.fail_from_position:
            raise self.error
        return self.store.append(stream, records)

    def open_stream(self, stream: str = DEFAULT_STREAM) -> Head:
        return self.store.open_stream(stream)

    def read(self, stream: str = DEFAULT_STREAM, start: int = 0, stop: int | None = None) -> Iterator[Record]:
        return self.store.read(stream, start, stop)

    def head(self, stream: str = DEFAULT_STREAM) -> Head:
        return self.store.head(stream)

    def close(self) -> None:
        self.gate.set()
        self.store.close()
