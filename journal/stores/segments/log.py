"""One stream, open for writing: its newest segment, its mark, and the segments that wait to be sealed."""

import contextlib
import fcntl
import os
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path

from refold.journal.errors import JournalError, JournalOwned
from refold.journal.record import EMPTY_HEAD, Head, Record
from refold.journal.stores.patience import Patience
from refold.journal.stores.segments import borders, erasing, mending
from refold.journal.stores.segments.files import READ, UPDATE, FileLayer, explain, write_all, write_file
from refold.journal.stores.segments.folder import DRAFT_SUFFIX, MARKER, SegmentName, segments_of, stream_folder
from refold.journal.stores.segments.frames import pack_group, pack_segment_header
from refold.journal.stores.segments.marks import MARK_NAME, Mark, new_mark_file, write_mark
from refold.journal.stores.segments.recovery import mark_of, settle
from refold.journal.stores.segments.scan import FileBytes, Place, walk
from refold.journal.stores.segments.sealed import Sealing, read_header
from refold.journal.stores.segments.stream_files import End
from refold.journal.stores.segments.tail import Tail
from refold.journal.stores.segments.view import StreamView

_PATIENCE_S = 5.0
_MIN_LAID_OUT_BYTES = 1 << 16
_MAX_LAID_OUT_BYTES = 1 << 20
_PAGE_BYTES = 4096
_PROBE_BYTES = 64


class StreamLog:
    """The end of a stream, where its owner writes. Calls that fail with OSError leave it unusable but for `release`.

    `is_on_disk` is true only while the group that is being added is on disk and isn't marked yet.
    """

    __slots__ = (
        "__weakref__",
        "_fd",
        "_files",
        "_laid_out",
        "_mark",
        "_mark_fd",
        "_root",
        "_sealing",
        "_sealing_fd",
        "closed",
        "end",
        "folder",
        "head",
        "is_on_disk",
        "is_replica",
        "redacted_at",
        "segment",
        "stream",
    )

    def __init__(self, files: FileLayer, root: Path, stream: str, *, is_replica: bool = False) -> None:
        """Take the stream over: begin it if it's new, settle its tail, raise its engine epoch unless it's a replica.

        Raises:
            JournalOwned: another program is at work on it and doesn't let go.
            JournalCorrupt: it's damaged.
            JournalError: it can't be read or written.
        """
        self._files, self._root, self.stream = files, root, stream
        self.folder, self.is_replica = stream_folder(root, stream), is_replica
        self._fd = self._mark_fd = self._sealing_fd = -1
        self._mark = Mark(0, 0, 0, 0, EMPTY_HEAD)
        self.segment = self.end = self._laid_out = 0
        self.head = EMPTY_HEAD
        self.closed: list[int] = []
        self.redacted_at = 0
        self._sealing: Sealing | None = None
        self.is_on_disk = False
        try:
            with _opening(files, root):
                self._take_over()
        except OSError as error:
            self.release()
            raise explain(error, self.folder, "open") from error
        except BaseException:
            self.release()
            raise
        _open_logs.add(self)

    @property
    def path(self) -> Path:
        """The segment that is written."""
        return self.folder / SegmentName(self.segment, sealed=False).file_name

    @property
    def has_records(self) -> bool:
        """Whether the segment that is written holds any."""
        return self.head.position > self.segment

    @contextlib.contextmanager
    def fence(self) -> Iterator[None]:
        """Keep others from writing this stream, for as long as one append takes.

        Raises:
            JournalOwned: another program holds it and doesn't let go.
        """
        _lock(self._mark_fd, self.folder)
        try:
            yield
        finally:
            if self._mark_fd >= 0:  # else it was closed meanwhile, and the lock went with it
                with contextlib.suppress(OSError):
                    fcntl.flock(self._mark_fd, fcntl.LOCK_UN)

    def is_ours(self) -> bool:
        """Whether nobody has written where we would write next."""
        return not any(self._files.pread(self._fd, _PROBE_BYTES, self.end))

    def write(self, frame: bytes, after: Head) -> None:
        """Add a group; on disk and marked when this returns. `is_on_disk` tells how far it got if it fails."""
        end = self.end + len(frame)
        if end > self._laid_out:
            self._lay_out(end)
        write_all(self._files, self._fd, frame, self.end)
        self._files.fdatasync(self._fd)
        self.is_on_disk = True
        self._move_mark(self.end, end, after)
        self.end, self.head, self.is_on_disk = end, after, False

    def cut_back(self) -> None:
        """Take back what a failed `write` has left, through a new handle: the old one's state is unknown."""
        self._close_fd()
        self._fd = self._files.open(self.path, UPDATE)
        self._files.truncate(self._fd, self.end)
        self._files.fdatasync(self._fd)

    def rotate(self) -> None:
        """Close the segment that is written and begin the next one."""
        if not self.has_records:
            return
        self._files.truncate(self._fd, self.end)
        self._files.fdatasync(self._fd)
        self._laid_out = self.end
        closed = self.segment
        self._begin_segment()
        self.closed.append(closed)

    def seal_some(self) -> bool:
        """Pack one block of a closed segment, and with the last one give it its name. Whether there's more to do.

        Raises:
            OSError, JournalCorrupt: it can't be sealed, and is left to the next owner.
        """
        if self._sealing is None and not self.closed:
            return False
        try:
            if self._sealing is None:
                self._sealing = self._start_sealing(self.closed[0])
            if self._sealing.step():
                return True
            self._finish_sealing(self._sealing, self.closed[0])
        except BaseException:
            self.closed.pop(0)
            self._stop_sealing()
            raise
        self.closed.pop(0)
        self._stop_sealing()
        return bool(self.closed)

    def mend_indexes(self) -> None:
        """Write sealed segments anew whose index is damaged. Raises OSError and JournalCorrupt."""
        self._stop_sealing()
        mending.mend_indexes(self._files, StreamView(self._files, self._root, self.stream))

    def write_anew(self, by: Record, contents: Mapping[int, bytes | None]) -> None:
        """Prepare an erasure that the record `by` will decide about."""
        self._stop_sealing()
        if any(position >= self.segment for position in contents):
            self.rotate()
        names = [name for name in segments_of(self._files.listdir(self.folder)) if name.first < self.segment]
        erasing.write_anew(self._files, self.folder, names, by, contents)

    def drop_archived(self, border: Head, limit: int) -> int:
        """Remove what lies before the border, some at a time; how many records have gone."""
        self._stop_sealing()
        if self.segment < border.position:
            self.rotate()
        names = segments_of(self._files.listdir(self.folder))
        count = borders.remove_archived(self._files, self.folder, names, border.position, limit)
        if not count and names[0].first < border.position:
            borders.begin_at(self._files, self.folder, names[0], border)
            names = segments_of(self._files.listdir(self.folder))
            count = borders.remove_archived(self._files, self.folder, names, border.position, limit)
        self.closed = [
            name.first for name in StreamView(self._files, self._root, self.stream).segments()[:-1] if not name.sealed
        ]
        return count

    def finish_erasure(self) -> None:
        """Let what was written anew take its place, or remove it: whichever the stream says."""
        view = StreamView(self._files, self._root, self.stream)
        tail = Tail(self.end, self.end, self.head, 0)
        if erasing.finish(self._files, view, End(self.segment, tail)):
            self.redacted_at = self.head.position
        self.closed = [name.first for name in view.segments()[:-1] if not name.sealed]

    def sync_mark(self) -> None:
        """Let the mark reach the disk."""
        self._files.fsync(self._mark_fd)

    def close(self) -> None:
        """Give back laid-out space, sync the mark, close. Nothing here is needed: errors are passed over."""
        if self._fd >= 0:
            with contextlib.suppress(OSError, JournalError), self.fence():
                if self.is_ours():
                    self._files.truncate(self._fd, self.end)
                    self._files.fdatasync(self._fd)
                self.sync_mark()
        self.release()

    def release(self) -> None:
        """Close every file as it is."""
        self._stop_sealing()
        self._close_fd()
        if self._mark_fd >= 0:
            with contextlib.suppress(OSError):
                self._files.close(self._mark_fd)
            self._mark_fd = -1

    def forget_in_child(self) -> None:
        """In a forked child: close our view of the fence, or the child would hold it for a parent that was killed."""
        if self._mark_fd >= 0:
            os.close(self._mark_fd)
            self._mark_fd = -1

    # Taking over

    def _take_over(self) -> None:
        view = StreamView(self._files, self._root, self.stream)
        if mark_of(view) is None:
            self._begin_stream()
        self._mark_fd = self._files.open(self.folder / MARK_NAME, UPDATE)
        with self.fence():
            mark = mark_of(view)
            assert mark is not None, "a stream that has begun has a mark"
            end = settle(self._files, view, mark)
            erasing.finish(self._files, view, end)
            self._mark, self.segment, self.end, self.head = mark, end.segment, end.tail.end, end.head
            names = view.segments()
            self.closed = [name.first for name in names[:-1] if not name.sealed]
            self._continue(names[-1])
            self._begin_tenure(new_epochs=0 if self.is_replica else 1)

    def _begin_stream(self) -> None:
        with contextlib.suppress(FileExistsError):
            self._files.mkdir(self.folder)
        header = pack_segment_header(self.stream, EMPTY_HEAD)
        write_file(self._files, self.folder / SegmentName(0, sealed=False).file_name, header)
        mark = Mark(0, 0, len(header), len(header), EMPTY_HEAD)
        write_file(self._files, self.folder / MARK_NAME, new_mark_file(mark))
        self._files.fsync_dir(self._root)

    def _continue(self, name: SegmentName) -> None:
        """Go on writing the newest segment, without what lies behind its end; a sealed one gets a successor."""
        if name.sealed:
            self._begin_segment()
            return
        self._fd = self._files.open(self.path, UPDATE)
        if self._files.size(self._fd) > self.end:
            self._files.truncate(self._fd, self.end)
            self._files.fdatasync(self._fd)
        self._laid_out = self.end

    def _begin_tenure(self, new_epochs: int) -> None:
        """Write a group without records: it fences whoever wrote before, and the mark moves over all that was found."""
        head = self.head._replace(engine_epoch=self.head.engine_epoch + new_epochs)
        self.write(pack_group(head.position, head.engine_epoch, ()), head)
        self.sync_mark()

    # Writing

    def _lay_out(self, end: int) -> None:
        """Make the file longer than `end`, with zeros: overwriting them later needs no new metadata."""
        room = min(max(end, _MIN_LAID_OUT_BYTES), _MAX_LAID_OUT_BYTES)
        goal = -(-(end + room) // _PAGE_BYTES) * _PAGE_BYTES
        write_all(self._files, self._fd, bytes(goal - end), end)
        self._laid_out = goal

    def _begin_segment(self) -> None:
        """Make a segment at the head; it's on disk, under its name, before anything points to it."""
        header = pack_segment_header(self.stream, self.head)
        path = self.folder / SegmentName(self.head.position, sealed=False).file_name
        write_file(self._files, path, header)
        fd = self._files.open(path, UPDATE)
        self._close_fd()
        self._fd, self.segment = fd, self.head.position
        self.end = self._laid_out = len(header)
        self._move_mark(self.end, self.end, self.head)
        self.sync_mark()

    def _move_mark(self, group: int, end: int, head: Head) -> None:
        mark = Mark(self._mark.number + 1, self.segment, group, end, head)
        write_mark(self._files, self._mark_fd, mark)
        self._mark = mark

    # Sealing

    def _start_sealing(self, first: int) -> Sealing:
        path = self.folder / SegmentName(first, sealed=False).file_name
        self._sealing_fd = self._files.open(path, READ)
        source = FileBytes(self._files, self._sealing_fd, self._files.size(self._sealing_fd))
        header = read_header(self._files, self._sealing_fd, path, first)
        draft = self.folder / (SegmentName(first, sealed=True).file_name + DRAFT_SUFFIX)
        return Sealing(self._files, walk(source, Place(header.size, first), path, first), header, draft)

    def _finish_sealing(self, sealing: Sealing, first: int) -> None:
        """Give the sealed segment its name; only then does the one that it was made from lose its own."""
        sealing.finish()
        self._files.rename(sealing.draft, self.folder / SegmentName(first, sealed=True).file_name)
        self._files.fsync_dir(self.folder)
        self._files.unlink(self.folder / SegmentName(first, sealed=False).file_name)

    def _stop_sealing(self) -> None:
        if self._sealing is not None:
            with contextlib.suppress(OSError):
                self._sealing.close()
            self._sealing = None
        if self._sealing_fd >= 0:
            with contextlib.suppress(OSError):
                self._files.close(self._sealing_fd)
            self._sealing_fd = -1

    def _close_fd(self) -> None:
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                self._files.close(self._fd)
            self._fd = -1


_open_logs: "weakref.WeakSet[StreamLog]" = weakref.WeakSet()


def _forget_in_child() -> None:
    for log in list(_open_logs):
        log.forget_in_child()


os.register_at_fork(after_in_child=_forget_in_child)


@contextlib.contextmanager
def _opening(files: FileLayer, root: Path) -> Iterator[None]:
    """One at a time opens a stream."""
    fd = files.open(root / MARKER, READ)
    try:
        _lock(fd, root)
        yield
    finally:
        files.close(fd)


def _lock(fd: int, path: Path) -> None:
    patience = Patience(_PATIENCE_S)
    while True:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        if not patience.wait():
            raise JournalOwned(
                f"another program has been writing in {path} for {_PATIENCE_S:.0f} s: stop it, or use another journal"
            )
