"""Group commit: one thread between an engine that must not wait for a disk and a store that must.

`append` gives the record its position and returns; it never touches the disk. The thread takes whatever has piled up, encodes
what isn't yet, chains it, and commits it in one transaction: the slower the disk, the larger the groups. After each commit it
reports the durable position, the count of records that can no longer be lost.

Not every record is waited for: that a step was scheduled concerns nobody until its output is there. Such a record waits a
little for the next one that is, and goes to disk with it; so an answer finds the disk free, and there are half as many commits.

What may not be encodable is encoded in `append`, the records of steps in the thread: `refold.journal.queued` says why.

When the store fails, the first cause is kept, nothing after it is ever reported durable, and every further `append` and
`flush` raises it. The writer doesn't retry: the store has already settled whether the failed group is in, and reopening the
journal reads the head again. The port alone decides what is durable; how long to wait for it is the engine's choice.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from refold.journal.errors import JournalError
from refold.journal.events import Event
from refold.journal.queued import Queued
from refold.journal.record import Head, Record, head_after, seal
from refold.journal.store import ErasingStore, JournalStore

MAX_GROUP_RECORDS = 1024
MAX_GROUP_BYTES = 8 << 20
MAX_UNENCODED_RECORDS = 64
"""With so many pending, the next record is encoded before it is queued."""
MAX_PATIENCE_S = 0.002
"""How long a record that nobody waits for may wait for one that somebody does."""

_IDLE_S = 1.0
_QUIET_S = 0.01


def _ignore(_news: object) -> None:
    """A callback of someone who asks instead."""


@runtime_checkable
class Maintained(Protocol):
    """A store that has housekeeping to do between appends."""

    def maintain(self, *, idle: bool = False) -> None:
        """Do what is due; with `idle`, whatever there is."""
        ...


@runtime_checkable
class Roomy(Protocol):
    """A store that appends more quickly where room was made before."""

    def add_room(self) -> bool:
        """Take at most some milliseconds for it; whether there is more to do."""
        ...


class JournalWriter:
    """Appends records to one stream from its own thread. `erasure_left` is what the last erasure said of what may be left.

    Every method may be called from any thread, except `flush` and `close` from the callbacks.
    """

    def __init__(
        self,
        store: JournalStore,
        stream: str,
        head: Head,
        *,
        on_durable: Callable[[int], None] = _ignore,
        on_failed: Callable[[JournalError], None] = _ignore,
        max_pending_records: int = 4096,
        max_pending_bytes: int = 64 << 20,
    ) -> None:
        """Start the thread.

        Args:
            store: where to append; stays open when the writer is closed.
            stream: the stream's name.
            head: what `store.open_stream(stream)` returned.
            on_durable: called in the writer's thread with the durable position: every record before it is on disk.
            on_failed: called once in the writer's thread with the first failure.
            max_pending_records: `has_room` is false from here on. `append` itself never refuses.
            max_pending_bytes: as well from here on: a few records may be large.
        """
        self._store = store
        # Asked once: to ask a protocol takes as long as a commit's Python.
        self._roomy = store if isinstance(store, Roomy) else None
        self._maintained = store if isinstance(store, Maintained) else None
        self._stream = stream
        self._on_durable = on_durable
        self._on_failed = on_failed
        self._max_pending_records = max_pending_records
        self._max_pending_bytes = max_pending_bytes
        self._pending_bytes = 0  # of records that aren't durable yet
        self._num_unencoded = 0  # of the pending ones
        self.erasure_left = ""
        self._changed = threading.Condition()
        self._pending: deque[Queued] = deque()
        self._wanted = head.position  # somebody waits for the records before this position
        self._patient_until_s = 0.0  # the others may wait until then
        self._taken = head.position  # the position of the first pending record
        self._durable = head.position
        self._durable_head = head
        self._failure: JournalError | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, args=(head,), name="refold-journal", daemon=True)
        self._thread.start()

    def append(
        self,
        events: Sequence[Event],
        time_ns: int,
        contents: Mapping[int, bytes | None] | None = None,
        *,
        is_awaited: bool = True,
    ) -> int:
        """Queue the events of one command as one record; returns its position.

        One that isn't `is_awaited` may stay queued for `MAX_PATIENCE_S`, if no other is.

        With `contents`, which the store must be able to erase, these take the place of what was written, in the record's own
        transaction: see `ErasingStore`.

        Raises:
            JournalError: the writer has failed (the first cause) or is closed.
            UnicodeEncodeError, TypeError: the events can't be encoded; nothing has happened.
        """
        assert events, "a record holds at least one event"
        assert -(1 << 63) <= time_ns < 1 << 63, f"time_ns {time_ns} doesn't fit into 64 bits"
        queued = Queued(events, time_ns, contents, may_wait=self._num_unencoded < MAX_UNENCODED_RECORDS)
        with self._changed:
            if self._failure is not None:
                raise self._failure
            if self._closing:
                raise JournalError("the journal writer is closed: open the journal again")
            self._pending.append(queued)
            self._pending_bytes += queued.num_bytes
            self._num_unencoded += not queued.is_encoded
            position = self._taken + len(self._pending) - 1
            is_first, was_wanted = position == self._taken, self._wanted > self._taken
            if is_awaited:
                self._wanted = position + 1
            elif is_first:
                self._patient_until_s = time.monotonic() + MAX_PATIENCE_S
            if is_first or (is_awaited and not was_wanted):
                self._changed.notify_all()
        return position

    @property
    def next_position(self) -> int:
        """The position that the next record will take."""
        with self._changed:
            return self._taken + len(self._pending)

    @property
    def durable_position(self) -> int:
        """Every record before this position is on disk."""
        return self._durable

    @property
    def durable_head(self) -> Head:
        """The head that the records on disk have; never behind `durable_position`."""
        return self._durable_head

    @property
    def pending(self) -> int:
        """How many records aren't durable yet."""
        return self.next_position - self._durable

    @property
    def has_room(self) -> bool:
        """Whether an engine that minds its memory should go on appending."""
        return self.pending < self._max_pending_records and self._pending_bytes < self._max_pending_bytes

    @property
    def failure(self) -> JournalError | None:
        """The first failure, if there was one."""
        return self._failure

    def flush(self, timeout_s: float | None = None) -> int:
        """Wait until all that was appended before is durable; returns the durable position.

        Raises:
            JournalError: the writer failed first, or `timeout_s` passed.
        """
        assert threading.current_thread() is not self._thread, "flush would wait for itself"
        with self._changed:
            goal = self._wanted = self._taken + len(self._pending)
            self._changed.notify_all()
            done = self._changed.wait_for(lambda: self._durable >= goal or self._failure is not None, timeout_s)
            if self._durable >= goal:
                return self._durable
            if self._failure is not None:
                raise self._failure
            assert not done
            raise JournalError(
                f"{goal - self._durable} records are not on disk after {timeout_s} s: check the disk, then try again"
            )

    def close(self) -> int:
        """Wait for everything pending, or for the failure, and end the thread; returns the durable position.

        Idempotent. A failure isn't raised again here: `on_failed` has said it, and `failure` holds it.
        """
        assert threading.current_thread() is not self._thread, "close would wait for itself"
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        return self._durable

    def _run(self, head: Head) -> None:
        try:
            self._add_room_until_wanted(0)
            while group := self._next_group():
                head = self._commit(head, group)
        except JournalError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001 - whatever it is, nobody may wait for a thread that is gone
            failure = JournalError(f"the journal writer stopped: {error!r}; open the journal again")
            failure.__cause__ = error
            self._fail(failure)

    def _next_group(self) -> list[Queued]:
        """Wait for records and take a bounded number of them; empty when the writer is closed and all is done.

        One that erases is a group of its own.
        """
        if self._add_room_until_wanted(_QUIET_S):
            with self._changed:
                in_time = self._changed.wait_for(self._has_work, _IDLE_S)
            if not in_time:
                self._maintain(idle=True)
        with self._changed:
            self._changed.wait_for(self._has_work)
            while not self._is_due() and (patience_s := self._patient_until_s - time.monotonic()) > 0:
                self._changed.wait_for(self._is_due, patience_s)
            group: list[Queued] = []
            num_bytes = 0
            while self._pending and len(group) < MAX_GROUP_RECORDS and num_bytes < MAX_GROUP_BYTES:
                if group and self._pending[0].contents is not None:
                    break
                group.append(self._pending.popleft())
                num_bytes += group[-1].num_bytes
                if group[-1].contents is not None:
                    break
            self._taken += len(group)
            self._num_unencoded -= sum(not queued.is_encoded for queued in group)
            return group

    def _add_room_until_wanted(self, quiet_s: float) -> bool:
        """Use a quiet time, if this is one, until somebody wants something; whether nobody does so far."""
        with self._changed:
            is_quiet = not self._changed.wait_for(self._has_work, quiet_s)
        while is_quiet and self._roomy is not None and self._roomy.add_room():
            is_quiet = not self._has_work()
        return is_quiet

    def _has_work(self) -> bool:
        return bool(self._pending) or self._closing

    def _is_due(self) -> bool:
        return self._wanted > self._taken or self._closing or len(self._pending) >= MAX_GROUP_RECORDS

    def _commit(self, head: Head, group: list[Queued]) -> Head:
        records: list[Record] = []
        after = head
        for queued in group:
            records.append(seal(after, queued.time_ns, *queued.encoded()))
            after = head_after(records[-1])
        stored = self._store_group(records, group[-1].contents)
        assert stored == after, f"the store's head {stored.position} is not the writer's {after.position}"
        self._durable_head = after
        with self._changed:
            self._durable = after.position
            self._pending_bytes -= sum(queued.num_bytes for queued in group)
            self._changed.notify_all()
        self._on_durable(after.position)
        self._maintain(idle=False)
        return after

    def _store_group(self, records: list[Record], contents: Mapping[int, bytes | None] | None) -> Head:
        if contents is None:
            return self._store.append(self._stream, records)
        assert isinstance(self._store, ErasingStore), f"{type(self._store).__name__} can't erase"
        erased = self._store.erase_content(self._stream, records, contents)
        self.erasure_left = erased.left
        return erased.head

    def _maintain(self, *, idle: bool) -> None:
        if self._maintained is not None:
            self._maintained.maintain(idle=idle)

    def _fail(self, error: JournalError) -> None:
        with self._changed:
            self._failure = error
            self._changed.notify_all()
        self._on_failed(error)
