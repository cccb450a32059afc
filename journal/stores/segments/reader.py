"""The reading half of the port over a folder of segments, live or not. Takes no lock and writes nothing."""

import contextlib
import shlex
from collections.abc import Iterator
from pathlib import Path

from refold.journal.archives import Archive, read_across
from refold.journal.errors import JournalCorrupt, JournalError
from refold.journal.record import EMPTY_HEAD, Head, Record
from refold.journal.snapshots import Snapshot, SnapshotEntry
from refold.journal.store import DEFAULT_STREAM
from refold.journal.stores.segments import folder
from refold.journal.stores.segments.files import OS_FILES, FileLayer, damaged, explain
from refold.journal.stores.segments.gaps import check_gaps
from refold.journal.stores.segments.marked import check_marked
from refold.journal.stores.segments.marks import Mark, MarkLost
from refold.journal.stores.segments.mending import check_indexes
from refold.journal.stores.segments.shortage import shortage
from refold.journal.stores.segments.snapshot_files import (
    FIXED_BYTES,
    body_bytes,
    snapshot_name,
    snapshot_position,
    unpack_snapshot,
)
from refold.journal.stores.segments.stream_files import End
from refold.journal.stores.segments.tail import Tail
from refold.journal.stores.segments.unmarked import lost_end
from refold.journal.stores.segments.view import StreamView


class SegmentReader:
    """A journal of segments, read-only."""

    def __init__(self, path: Path, files: FileLayer = OS_FILES) -> None:
        """Look at the folder.

        Raises:
            NotFound: there is no journal at `path`.
            JournalError: it can't be read or isn't ours.
        """
        folder.require(path, files)
        self._path, self._files, self._closed = path, files, False
        self._no_gaps: dict[str, tuple[int, list[folder.SegmentName]]] = {}

    @property
    def place(self) -> str:
        """Where the journal is, as messages call it."""
        return str(self._path)

    def read(self, stream: str = DEFAULT_STREAM, start: int = 0, stop: int | None = None) -> Iterator[Record]:
        """Records at positions start <= p < stop, in order."""
        assert start >= 0, f"positions start at 0, not {start}"
        view = self._view(stream)
        yield from read_across(view.archives(), self._path.parent, view.read, start, stop)

    def head(self, stream: str = DEFAULT_STREAM) -> Head:
        """The end of the stream."""
        end = self._view(stream).end()
        return EMPTY_HEAD if end is None else end.head

    def streams(self) -> list[str]:
        """The names of all streams."""
        self._check_usable()
        return stream_names(self._files, self._path)

    def heads(self) -> dict[str, Head]:
        """The end of every stream, by its name."""
        return {stream: self.head(stream) for stream in self.streams()}

    def archives(self, stream: str = DEFAULT_STREAM) -> list[Archive]:
        """Where the oldest records are, in order."""
        return self._view(stream).archives()

    def snapshots(self, stream: str = DEFAULT_STREAM) -> list[SnapshotEntry]:
        """What snapshots there are, by position; a damaged one too, of 0 bytes if it can't even tell that."""
        view, found = self._view(stream), []
        for name in view.names():
            position = snapshot_position(name)
            if position is not None:
                found.append(SnapshotEntry(position, body_bytes(_told_by(view, name, FIXED_BYTES)) or 0))
        return sorted(found)

    def load_snapshot(self, stream: str, position: int) -> Snapshot | None:
        """The snapshot at a position; None if there is none, or a damaged one."""
        return unpack_snapshot(_told_by(self._view(stream), snapshot_name(position)))

    def check_end(self, stream: str = DEFAULT_STREAM) -> None:
        """See to it that the stream's end can be vouched for. Where it can't, all methods read what is whole.

        Raises:
            JournalCorrupt: its mark is damaged or gone (kind `unmarked`); says what is whole, and the way out. Or all that was
                acknowledged is whole, and what lies behind it is damage.
        """
        view = self._view(stream)
        try:
            mark = view.mark()
        except MarkLost as lost:
            raise lost_end(view, lost) from lost
        end = view.end()
        if end is not None and end.damage is not None:
            first = view.first_damage(end.damage)
            if first.position >= end.head.position:  # else whoever reads comes upon it
                raise first
        elif mark is not None:
            _check_marked(view, mark)

    def check_parts(self, stream: str, stop: int) -> None:
        """See to it that of the segments with records before `stop` none is missing. A listing that was looked at isn't again.

        Raises:
            JournalCorrupt: one is; kind `deleted`.
        """
        view = self._view(stream)
        known, names = self._no_gaps.get(stream, (0, [])), view.segments()
        if stop > known[0] or names != known[1]:
            self._no_gaps[stream] = (stop, check_gaps(view, stop))
            end = view.end()
            if end is not None and (lost := shortage(view, end)) is not None and stop > lost.position:
                raise lost

    def check_indexes(self, stream: str) -> None:
        """See to it that every sealed segment has its index.

        Raises:
            JournalCorrupt: one hasn't; kind `unindexed`.
        """
        check_indexes(self._view(stream), f"refold compact {shlex.quote(str(self._path))}")

    def close(self) -> None:
        """Nothing stays open between calls; a closed reader refuses them all the same."""
        self._closed = True

    def _view(self, stream: str) -> StreamView:
        self._check_usable()
        return StreamView(self._files, self._path, stream)

    def _check_usable(self) -> None:
        if self._closed:
            raise JournalError(f"the journal {self._path} is closed: open it again")


def _check_marked(view: StreamView, mark: Mark) -> None:
    """See to it that the mark tells what its group does. What is damaged besides, whoever reads comes upon.

    An engine may be at work: if the mark has moved meanwhile, there's no telling, and no need to.
    """
    marked = End(mark.segment, Tail(mark.group, mark.end, mark.head, 0))
    try:
        if shortage(view, marked) is None:
            check_marked(view, marked)
    except JournalError as found:
        with contextlib.suppress(MarkLost):
            if view.mark() != mark:
                return
        if not isinstance(found, JournalCorrupt) or view.first_damage(found) is found:
            raise


def stream_names(files: FileLayer, path: Path) -> list[str]:
    """The names of the streams in the journal at `path`.

    Raises:
        JournalError: it can't be read, or is damaged.
    """
    try:
        names = [name for name in files.listdir(path) if (path / name).is_dir()]
    except OSError as error:
        raise explain(error, path, "read") from error
    return sorted(found for name in names if (found := _stream_in(files, path, name)) is not None)


def _stream_in(files: FileLayer, path: Path, name: str) -> str | None:
    view = StreamView(files, path, name)
    view.folder = path / name
    with contextlib.suppress(MarkLost):
        if view.mark() is None:
            return None
    segments = view.segments()
    if not segments:  # all are gone: whoever reads the stream is told
        return _named_by_folder(view, name)
    for segment in reversed(segments):  # each says it; one that was cut may not
        with contextlib.suppress(JournalCorrupt), view.opened(segment) as (_fd, header, _size):
            if folder.stream_folder(path, header.stream) == view.folder:
                return header.stream
            break  # the folder was renamed, or is a copy: it's read by its own name, and told to be of another
    return _named_by_folder(view, name)


def _named_by_folder(view: StreamView, name: str) -> str:
    if view.folder == folder.stream_folder(view.root, name):
        return name
    raise damaged(
        view.folder, view.border(), "deleted", "and all after it are not there: of the segments none is there"
    )


def _told_by(view: StreamView, snapshot: str, size: int | None = None) -> bytes:
    """What a snapshot's file says. One that can't be read is a damaged one: it must not keep anybody from the records."""
    try:
        return view.file(snapshot, size)
    except JournalError:
        return b""
