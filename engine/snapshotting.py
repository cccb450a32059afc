"""Keeping snapshots while an engine runs: now and then, beside the turn loop, from what is on disk.

A thread of its own reads the durable records from the store, as a restart would, folds them into its own copy of the state, and
saves that. So a snapshot is made of the journal, never of the engine's memory. It works in slices of a quarter of a
millisecond and rests for nine times as long after each, so that a first token seldom waits for it to let go of the interpreter; a
snapshot may well take seconds. After a snapshot it rests for a hundred times what saving it took, so that large ones come less often.

The last one is made when the engine closes in good order, if the one before is far enough behind (an eighth of the usual distance),
of the engine's own state, which nobody changes any more then.
What goes wrong here is a warning, and the end of snapshots for this life of the engine: nothing depends on them.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from refold.engine.folding import Base, fold_version, nearest, warn
from refold.engine.opening import fold_record
from refold.journal.archives import border_of
from refold.journal.errors import RefoldError
from refold.journal.naming import place_of_reader
from refold.journal.record import head_after
from refold.journal.snapshots import SnapshotStore, kept, make_snapshot
from refold.journal.store import JournalReader
from refold.journal.verify import verified_part
from refold.scheduler.snapshot import pack
from refold.scheduler.state import digest

SLICE_S = 0.00025
RESTS = 9
RESTS_AFTER_SAVING = 100
T = TypeVar("T")


class SnapshotKeeper:
    """Keeps the snapshots of one stream. `became_durable` is for the writer's thread, the rest for the engine's owner.

    Attributes:
        newest: the position of the newest snapshot that this keeper knows of; 0 if there is none.
    """

    def __init__(self, store: JournalReader, stream: str, newest: int, every_records: int) -> None:
        """Start nothing yet.

        Args:
            store: with the stream open. One that keeps no snapshots is no error: then nothing happens.
            stream: its name.
            newest: position of the newest snapshot that is there.
            every_records: a snapshot is due when there are so many records after the last one; 0 for never.
        """
        self._store = store if isinstance(store, SnapshotStore) and every_records and fold_version() else None
        self._reader, self._stream = store, stream
        self._every_records = every_records
        self.newest = newest
        self._due_s = time.monotonic()
        self._base: Base | None = None
        self._durable = 0
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def opened(self, base: Base) -> None:
        """The journal was folded: keep that, if it took much folding."""
        if self._store is not None and base.head.position - self.newest >= self._every_records:
            self._guarded(lambda store: self._save(store, base, rests=False), self._store)

    def became_durable(self, position: int) -> None:
        """Every record before this position is on disk. Returns at once."""
        self._durable = position
        if self._store is None or position - self.newest < self._every_records or time.monotonic() < self._due_s:
            return
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(
                target=self._guarded, args=(self._catch_up, self._store), name="refold-snapshots", daemon=True
            )
            self._thread.start()

    def close(self, last: Callable[[], Base] | None) -> None:
        """End the thread. `last` gives the state that the engine ended with; None if it can't be vouched for."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
        if self._store is not None and last is not None:
            self._guarded(lambda store: self._save_last(store, last()), self._store)

    def _save_last(self, store: SnapshotStore, last: Base) -> None:
        if last.head.position - self.newest >= max(1, self._every_records // 8):
            self._save(store, last, rests=False)

    def _guarded(self, work: Callable[[SnapshotStore], None], store: SnapshotStore) -> None:
        try:
            work(store)
        except Exception as error:  # noqa: BLE001 - whatever it is, the engine goes on without snapshots
            self._store = None
            reason = str(error) if isinstance(error, RefoldError) else repr(error)
            warn("snapshots_off", journal=place_of_reader(store), stream=self._stream, reason=reason[:200])

    def _catch_up(self, store: SnapshotStore) -> None:
        """Fold what has become durable since the last time, and keep it."""
        folded, head = self._base or nearest(self._reader, self._stream, self._durable)
        goal = self._durable
        records = verified_part(self._reader, self._stream, head, goal)
        for record in at_ease(records, self._closing):
            fold_record(folded, record)
            head = head_after(record)
            if self._closing.is_set():
                return
        self._base = Base(folded, head)
        started_s = time.monotonic()
        self._save(store, self._base, rests=True)
        saved_s = time.monotonic()
        self._due_s = saved_s + RESTS_AFTER_SAVING * (saved_s - started_s)

    def _save(self, store: SnapshotStore, base: Base, *, rests: bool) -> None:
        """Save a snapshot, and let go of those that are too many."""
        folded, head = base
        pieces = at_ease(pack(folded), self._closing) if rests else pack(folded)
        store.save_snapshot(self._stream, make_snapshot(head, fold_version(), digest(folded.state), pieces))
        self.newest = head.position
        thin_out(store, self._stream)


def at_ease(work: Iterable[T], closing: threading.Event) -> Iterator[T]:
    """The same, with rests between, until it's `closing`."""
    started_s = time.perf_counter()
    for part in work:
        yield part
        spent_s = time.perf_counter() - started_s
        if spent_s >= SLICE_S and not closing.is_set():
            closing.wait(RESTS * spent_s)
            started_s = time.perf_counter()


def thin_out(store: SnapshotStore, stream: str) -> None:
    """Drop the snapshots that are too many. The one at the border of what is archived stays: it stands for the archive."""
    positions = [entry.position for entry in store.snapshots(stream)]
    spared = {*kept(positions), border_of(store, stream).position}
    if spare := [position for position in positions if position not in spared]:
        store.drop_snapshots(stream, spare)
