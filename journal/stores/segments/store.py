"""The store of segment files: one write and one sync for each append, and nothing else on its way.

An append writes its records as one group, at the end of the newest segment, in space that was laid out before: overwriting
laid-out space costs a sync half of what growing a file does. Then it syncs, and moves the mark. A group is whole or not there.

Who writes is settled twice. The owner lock refuses a second engine at the door. Behind it, whoever takes a stream over writes
a group without records, which raises the engine epoch; and each append looks, under a lock that both hold for as long as it
takes, whether the place where it would write is still empty. If it isn't, it has lost the stream.

After an error the handle is given up, what the append may have written is cut off, and the cut is synced through a new
handle: then the records are not in. If that fails too, nobody knows, and the message says so; opening the stream settles it.
"""

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from refold.journal.archives import Archive, check_files
from refold.journal.errors import JournalError
from refold.journal.record import Head, Record
from refold.journal.snapshots import Snapshot
from refold.journal.store import DEFAULT_STREAM, Erased
from refold.journal.stores.guards import check_continues, check_replicates, check_stream_name, not_open, refuse
from refold.journal.stores.ownership import OwnerLock
from refold.journal.stores.room import writing
from refold.journal.stores.segments import borders
from refold.journal.stores.segments.files import OS_FILES, FileLayer, explain, write_file
from refold.journal.stores.segments.frames import MAX_PAYLOAD_BYTES, pack_group
from refold.journal.stores.segments.log import StreamLog
from refold.journal.stores.segments.reader import SegmentReader
from refold.journal.stores.segments.recovery import can_be_read_first
from refold.journal.stores.segments.snapshot_files import pack_snapshot, snapshot_name

SEGMENT_BYTES = 64 << 20
_MAX_UNSEALED = 4


class SegmentStore(SegmentReader):
    """A journal in a folder of segment files."""

    def __init__(
        self, path: Path, *, exclusive: bool = True, segment_bytes: int = SEGMENT_BYTES, files: FileLayer = OS_FILES
    ) -> None:
        """Open the journal; its folder must be one.

        Args:
            path: the folder.
            exclusive: hold the owner lock while a stream is open, so that a second engine is refused at once. Without
                it, the engine epoch is the only fence and a second opener takes the stream away from the first.
            segment_bytes: a segment this long is closed, and sealed by and by.
            files: the file system.

        Raises:
            NotFound: there is no journal.
            JournalError: it can't be opened or isn't ours.
        """
        super().__init__(path, files)
        self._exclusive, self._segment_bytes = exclusive, segment_bytes
        self._lock = threading.RLock()
        self._logs: dict[str, StreamLog] = {}
        self._owner: OwnerLock | None = None

    def claim_stream(self, stream: str = DEFAULT_STREAM) -> bool:
        """Keep other engines out of a stream and look at its end, without a change to it; see `ClaimingStore`."""
        check_stream_name(stream)
        with self._opening():
            return can_be_read_first(self._files, self._path, stream)

    def open_stream(self, stream: str = DEFAULT_STREAM) -> Head:
        """Take the stream over in a new engine epoch. A torn tail is cut off; damage is refused."""
        return self._open(stream, is_replica=False)

    def open_replica(self, stream: str = DEFAULT_STREAM) -> Head:
        """Take the stream over for records made elsewhere; see `refold.journal.replicas`."""
        return self._open(stream, is_replica=True)

    def _open(self, stream: str, *, is_replica: bool) -> Head:
        check_stream_name(stream)
        with self._opening():
            self._forget(stream)
            log = self._logs[stream] = StreamLog(self._files, self._path, stream, is_replica=is_replica)
            return log.head

    @contextlib.contextmanager
    def _opening(self) -> Iterator[None]:
        """Own the journal, if engines shut each other out; if it fails, only as long as another stream is open."""
        with self._lock:
            self._check_usable()
            if self._exclusive and self._owner is None:
                self._owner = OwnerLock(self._path)
            try:
                yield
            except BaseException:
                if not self._logs:
                    self._disown()
                raise

    def append(self, stream: str, records: Sequence[Record]) -> Head:
        """Add records at the head, all or none; on disk when this returns."""
        with self._lock:
            log = self._opened(stream)
            after = (check_replicates if log.is_replica else check_continues)(log.head, records)
            frame = pack_group(records[0].position, after.engine_epoch, records)
            if len(frame) > MAX_PAYLOAD_BYTES:
                raise JournalError(f"{len(frame)} bytes are too many for one append: use at most {MAX_PAYLOAD_BYTES}")
            self._append_frame(stream, log, frame, after)
            if len(log.closed) > _MAX_UNSEALED:
                self.maintain()
            return after

    def erase_content(self, stream: str, records: Sequence[Record], contents: Mapping[int, bytes | None]) -> Erased:
        """Add records at the head, replace contents before it, and forget every snapshot: all or nothing."""
        with self._lock:
            log = self._opened(stream)
            after = (check_replicates if log.is_replica else check_continues)(log.head, records)
            assert all(0 <= position < log.head.position for position in contents), "only what is there can be erased"
            frame = pack_group(records[0].position, after.engine_epoch, records)
            with log.fence():
                self._check_ours(stream, log)
                try:
                    log.write_anew(records[0], contents)
                    log.write(frame, after)
                except OSError as error:
                    self._settle(stream, log, after, error)
                try:
                    log.finish_erasure()
                except (OSError, JournalError) as error:
                    self._give_up(stream)
                    cause = explain(error, log.folder, "rename in") if isinstance(error, OSError) else error
                    return Erased(after, f"{cause}; opening the journal finishes it")
            return Erased(after)

    def save_snapshot(self, stream: str, snapshot: Snapshot) -> None:
        """Keep a snapshot, in the place of one at the same position; not one from before a redaction, which may know too much."""
        with self._owning(stream) as log:
            if snapshot.position >= log.redacted_at:
                write_file(self._files, log.folder / snapshot_name(snapshot.position), pack_snapshot(snapshot))

    def drop_snapshots(self, stream: str, positions: Sequence[int]) -> None:
        """Forget snapshots."""
        with self._owning(stream) as log:
            for name in map(snapshot_name, positions):
                with contextlib.suppress(FileNotFoundError):
                    self._files.unlink(log.folder / name)

    def add_archive(self, stream: str, archive: Archive) -> None:
        """Move the border."""
        with self._owning(stream) as log:
            borders.save_archives(self._files, log.folder, [*self.archives(stream), archive])

    def drop_archived(self, stream: str, limit: int) -> int:
        """Delete the oldest records before the border, by segments, until `limit` or more have gone; how many have."""
        with self._owning(stream) as log:
            archives = self.archives(stream)
            if not archives:
                return 0
            segments = self._view(stream).segments()
            if segments and segments[0].first < archives[-1].stop:
                check_files(archives, self._path.parent, segments[0].first)
            try:
                return log.drop_archived(archives[-1].head, limit)
            except OSError:
                self._give_up(stream)  # it may have failed half way to the next segment
                raise

    def maintain(self, *, idle: bool = False) -> None:
        """Seal closed segments, a block at a call; with `idle`, all there is, and sync the marks.

        Never needed for durability: errors here cost disk space only and are left to the next append to find.
        """
        with self._lock:
            for log in list(self._logs.values()):
                with contextlib.suppress(OSError, JournalError):
                    while log.seal_some() and idle:
                        pass
                    if idle:
                        log.sync_mark()

    def compact(self, stream: str = DEFAULT_STREAM) -> None:
        """Close the segment that is written and seal all of them; write those anew whose index is damaged.

        Raises:
            JournalError: the stream isn't open here, the storage failed, or a segment is damaged.
        """
        with self._lock:
            log = self._opened(stream)
            try:
                log.rotate()
                while log.seal_some():
                    pass
                log.mend_indexes()
                log.sync_mark()
            except OSError as error:
                self._forget(stream)
                raise explain(error, self._path, "compact") from error

    def close(self) -> None:
        """Give back laid-out space, close every file, let the next engine in. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for log in self._logs.values():
                log.close()
            self._logs.clear()
            self._disown()

    def _append_frame(self, stream: str, log: StreamLog, frame: bytes, after: Head) -> None:
        with log.fence():
            self._check_ours(stream, log)
            try:
                if log.end >= self._segment_bytes and log.has_records:
                    log.rotate()
                log.write(frame, after)
            except OSError as error:
                self._settle(stream, log, after, error)

    @contextlib.contextmanager
    def _owning(self, stream: str) -> Iterator[StreamLog]:
        """Work on what lies beside the segments, which only their owner may."""
        with self._lock:
            log = self._opened(stream)
            with log.fence():
                self._check_ours(stream, log)
                try:
                    yield log
                except OSError as error:
                    raise explain(error, log.folder, "write") from error

    def _check_ours(self, stream: str, log: StreamLog) -> None:
        try:
            ours = log.is_ours()
        except OSError as error:
            self._give_up(stream)
            raise explain(error, log.path, "read") from error
        if not ours:
            raise refuse(stream, log.head, self.head(stream))

    def _settle(self, stream: str, log: StreamLog, after: Head, error: OSError) -> NoReturn:
        """After an error in an append: raise, and say whether the records are in. The stream must be opened again."""
        first, last = log.head.position, after.position - 1
        cause = explain(error, log.path, writing(first, last))
        doubt = f"records {first} to {last} are on disk, but not acknowledged" if log.is_on_disk else None
        if doubt is None:
            try:
                log.cut_back()
            except OSError as second:
                doubt = f"what was written can't be cut off ({second.strerror}): records {first} to {last} may be in"
        self._give_up(stream)
        if doubt is not None:
            raise JournalError(f"{cause}; {doubt}; open the journal again to find out") from error
        raise cause from error

    def _opened(self, stream: str) -> StreamLog:
        self._check_usable()
        log = self._logs.get(stream)
        if log is None:
            raise not_open(stream)
        return log

    def _give_up(self, stream: str) -> None:
        """Stop owning: from here on `head` says what the next owner will find."""
        self._forget(stream)
        if not self._logs:
            self._disown()

    def _forget(self, stream: str) -> None:
        log = self._logs.pop(stream, None)
        if log is not None:
            log.release()

    def _disown(self) -> None:
        if self._owner is not None:
            self._owner.release()
            self._owner = None
