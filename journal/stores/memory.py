"""The store in memory: the reference for what the port means, and the fastest store for tests and benchmarks.

A `MemoryJournal` is the storage, a `MemoryStore` is one engine's handle on it. Several handles may share one journal,
which is how fencing is tested: opening a stream through a second handle fences the first. It never says `JournalOwned`,
because a handle in memory cannot tell whether another one is still in use.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence

from refold.journal.errors import JournalError
from refold.journal.record import EMPTY_HEAD, Head, Record
from refold.journal.snapshots import Snapshot, SnapshotEntry
from refold.journal.store import DEFAULT_STREAM, Erased
from refold.journal.stores.guards import (
    check_continues,
    check_replicates,
    check_stream_name,
    not_open,
    refuse,
    taken_over,
)


class MemoryJournal:
    """Streams of records, shared by handles and threads."""

    __slots__ = ("heads", "lock", "records", "snapshots")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.records: dict[str, list[Record]] = {}
        self.heads: dict[str, Head] = {}
        self.snapshots: dict[str, dict[int, Snapshot]] = {}


class MemoryStore:
    """One handle on a `MemoryJournal`; a new journal of its own unless one is given."""

    __slots__ = ("_closed", "_journal", "_opened", "_redacted", "_replicas")

    def __init__(self, journal: MemoryJournal | None = None) -> None:
        self._journal = journal if journal is not None else MemoryJournal()
        self._opened: dict[str, Head] = {}
        self._replicas: set[str] = set()
        self._redacted: dict[str, int] = {}
        self._closed = False

    def open_stream(self, stream: str = DEFAULT_STREAM) -> Head:
        """Take the stream over; the handle that had it is fenced from now on."""
        head = self._open(stream, new_epochs=1)
        self._replicas.discard(stream)
        return head

    def open_replica(self, stream: str = DEFAULT_STREAM) -> Head:
        """Take the stream over for records made elsewhere; see `refold.journal.replicas`."""
        head = self._open(stream, new_epochs=0)
        self._replicas.add(stream)
        return head

    def _open(self, stream: str, *, new_epochs: int) -> Head:
        check_stream_name(stream)
        self._check_usable()
        with self._journal.lock:
            head = self._journal.heads.get(stream, EMPTY_HEAD)
            head = head._replace(engine_epoch=head.engine_epoch + new_epochs)
            self._journal.records.setdefault(stream, [])
            self._journal.heads[stream] = head
        self._opened[stream] = head
        return head

    def append(self, stream: str, records: Sequence[Record]) -> Head:
        """Add records at the head, all or none."""
        self._check_usable()
        ours = self._opened.get(stream)
        if ours is None:
            raise not_open(stream)
        after = (check_replicates if stream in self._replicas else check_continues)(ours, records)
        with self._journal.lock:
            theirs = self._journal.heads[stream]
            if theirs != ours:
                raise refuse(stream, ours, theirs)
            self._journal.records[stream].extend(records)
            self._journal.heads[stream] = after
        self._opened[stream] = after
        return after

    def erase_content(self, stream: str, records: Sequence[Record], contents: Mapping[int, bytes | None]) -> Erased:
        """Add records at the head and replace contents before it, all or nothing."""
        ours = self._opened.get(stream)
        head = self.append(stream, records)
        assert ours is not None
        with self._journal.lock:
            kept = self._journal.records[stream]
            for position, content in contents.items():
                assert position < ours.position, position
                kept[position] = kept[position]._replace(content=content)
            self._kept(stream).clear()
        self._redacted[stream] = head.position
        return Erased(head)

    def read(self, stream: str = DEFAULT_STREAM, start: int = 0, stop: int | None = None) -> Iterator[Record]:
        """Records at positions start <= p < stop; what is appended meanwhile is seen."""
        assert start >= 0, f"positions start at 0, not {start}"
        records = self._journal.records.get(stream, [])
        position = start
        while position < len(records) and (stop is None or position < stop):
            yield records[position]
            position += 1

    def head(self, stream: str = DEFAULT_STREAM) -> Head:
        """The end of the stream."""
        with self._journal.lock:
            return self._journal.heads.get(stream, EMPTY_HEAD)

    def heads(self) -> dict[str, Head]:
        """The end of every stream, by its name."""
        with self._journal.lock:
            return dict(sorted(self._journal.heads.items()))

    def streams(self) -> list[str]:
        """The names of all streams."""
        return list(self.heads())

    def snapshots(self, stream: str = DEFAULT_STREAM) -> list[SnapshotEntry]:
        """What snapshots there are, by position."""
        with self._journal.lock:
            return [SnapshotEntry(s.position, len(s.body)) for _, s in sorted(self._kept(stream).items())]

    def load_snapshot(self, stream: str, position: int) -> Snapshot | None:
        """The snapshot at a position, unchecked."""
        return self._kept(stream).get(position)

    def save_snapshot(self, stream: str, snapshot: Snapshot) -> None:
        """Keep a snapshot, in the place of one at the same position; not one from before a redaction, which may know too much."""
        with self._journal.lock:
            self._check_owner(stream)
            if snapshot.position >= self._redacted.get(stream, 0):
                self._kept(stream)[snapshot.position] = snapshot

    def drop_snapshots(self, stream: str, positions: Sequence[int]) -> None:
        """Forget snapshots."""
        with self._journal.lock:
            self._check_owner(stream)
            for position in positions:
                self._kept(stream).pop(position, None)

    def _kept(self, stream: str) -> dict[int, Snapshot]:
        return self._journal.snapshots.setdefault(stream, {})

    def _check_owner(self, stream: str) -> None:
        self._check_usable()
        ours = self._opened.get(stream)
        if ours is None:
            raise not_open(stream)
        if self._journal.heads[stream].engine_epoch != ours.engine_epoch:
            raise taken_over(stream, ours.engine_epoch)

    def close(self) -> None:
        """Give the handle back; the journal stays with whoever shares it."""
        self._closed = True

    def _check_usable(self) -> None:
        if self._closed:
            raise JournalError("this journal handle is closed: open the journal again")
