"""One stream as a reader sees it: the segments in its folder, and how far they count.

While an engine owns the journal they count up to the mark, so that nothing is shown which the engine hasn't acknowledged and
a power cut could take back. When nobody owns it, whole groups above the mark count too: the next owner will keep them.
"""

import contextlib
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import NamedTuple

from refold.journal.archives import Archive
from refold.journal.errors import JournalCorrupt
from refold.journal.record import EMPTY_HEAD, Head, Record, head_after
from refold.journal.stores.ownership import owner_of
from refold.journal.stores.segments.files import READ, FileLayer, close_read, damaged, explain
from refold.journal.stores.segments.folder import ARCHIVES_NAME, SegmentName, segments_of, stream_folder
from refold.journal.stores.segments.frames import Group, SegmentHeader
from refold.journal.stores.segments.marks import MARK_NAME, Mark, MarkLost, read_mark
from refold.journal.stores.segments.scan import FileBytes, Place, records_of, walk
from refold.journal.stores.segments.sealed import SealedSegment, read_header
from refold.journal.stores.segments.tail import Tail, find_tail

_ATTEMPTS = 20


class End(NamedTuple):
    """How far a stream counts: up to `tail.end` in the segment that begins with `segment`."""

    segment: int
    tail: Tail

    @property
    def head(self) -> Head:
        """The head there."""
        return self.tail.head


class StreamView:
    """A stream of the journal at `root`, which may be live."""

    __slots__ = ("_root", "files", "folder", "stream")

    def __init__(self, files: FileLayer, root: Path, stream: str) -> None:
        self.files, self._root, self.stream = files, root, stream
        self.folder = stream_folder(root, stream)

    def read(self, start: int, stop: int | None) -> Iterator[Record]:
        """Records at positions start <= p < stop; what is appended meanwhile is seen.

        Raises:
            JournalError: they can't be read, or are damaged.
        """
        position, previous = start, EMPTY_HEAD if start == 0 else None
        while (end := self.end()) is not None:
            before, target = position, end.head.position if stop is None else min(stop, end.head.position)
            if position >= target:
                return
            for record in self.records(position, end, previous):
                if record.position >= target:
                    break
                yield record
                position, previous = record.position + 1, head_after(record)
            assert position > before, (
                f"the stream {self.stream!r} ends at {end.head.position}, yet nothing is at {before}"
            )

    def end(self) -> End | None:
        """How far the stream counts now; None if it never began. Without its mark: as far as it's whole.

        Raises:
            JournalError: it can't be read, or is damaged.
        """
        for attempt in range(_ATTEMPTS):
            try:
                mark = self.mark()
            except MarkLost:
                from refold.journal.stores.segments.unmarked import whole_of  # noqa: PLC0415 - it stands on this module

                return whole_of(self).end
            if mark is None:
                return None
            marked = End(mark.segment, Tail(mark.group, mark.end, mark.head, 0))
            if owner_of(self._root) is not None:
                return marked
            try:
                return self.beyond(marked)
            except JournalCorrupt:
                # An engine that opened it a moment ago may be at work on this very tail.
                if attempt == _ATTEMPTS - 1 or (owner_of(self._root) is None and self.mark() == mark):
                    raise
        raise AssertionError("the last attempt returns or raises")

    def mark(self) -> Mark | None:
        """The mark; None if the stream never began.

        Raises:
            MarkLost: it's damaged, or gone.
            JournalError: it can't be read.
        """
        path = self.folder / MARK_NAME
        for _ in range(_ATTEMPTS):
            try:
                fd = self.files.open(path, READ)
            except FileNotFoundError:
                from refold.journal.stores.segments.unmarked import is_unborn  # noqa: PLC0415 - it stands on this module

                if is_unborn(self):
                    return None
                continue  # it was born since, or the mark is gone
            except OSError as error:
                raise explain(error, path, "read") from error
            try:
                return read_mark(self.files, fd)
            except OSError as error:
                raise explain(error, path, "read") from error
            finally:
                close_read(self.files, fd)
        raise MarkLost("is gone")

    def segments(self) -> list[SegmentName]:
        """The segments, in order; without those that are the archives'."""
        names = segments_of(self.names())
        if len(names) > 1 and (archives := self.archives()):
            border = archives[-1].stop
            return [
                name for name, after in zip(names, [*names[1:], None], strict=True) if not after or after.first > border
            ]
        return names

    def archives(self) -> list[Archive]:
        """Where the oldest records are, in order.

        Raises:
            JournalError: the list can't be read, or is damaged.
        """
        from refold.journal.stores.segments.borders import unpack_archives  # noqa: PLC0415 - most streams have none

        data = self.file(ARCHIVES_NAME)
        return unpack_archives(data, self.folder / ARCHIVES_NAME) if data else []

    def file(self, name: str, size: int | None = None) -> bytes:
        """The first `size` bytes, or all, of a file beside the segments; empty if there is none."""
        try:
            fd = self.files.open(self.folder / name, READ)
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise explain(error, self.folder / name, "read") from error
        try:
            return self.files.pread(fd, self.files.size(fd) if size is None else size, 0)
        except OSError as error:
            raise explain(error, self.folder / name, "read") from error
        finally:
            close_read(self.files, fd)

    def names(self) -> list[str]:
        """The names in the stream's folder; none if it never began."""
        try:
            return self.files.listdir(self.folder)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise explain(error, self.folder, "read") from error

    def beyond(self, marked: End) -> End:
        """Go on from an acknowledged end to the last whole group.

        Raises:
            JournalError: it can't be read, or what follows is damage.
        """
        segments = [name for name in self.segments() if name.first >= marked.segment]
        if not segments or segments[0].first != marked.segment:
            raise damaged(self.folder, marked.segment, "deleted", "begins a segment that is not there")
        end = marked
        for number, name in enumerate(segments):
            if number:
                end = self.first_end(name, end)
            if not name.sealed:
                end = self._tail_of(name, end)
            if number + 1 < len(segments):
                end = self._closed_end(name, end, segments[number + 1])
        return end

    def first_end(self, name: SegmentName, end: End) -> End:
        """Where a segment's groups begin, as an end."""
        with self.opened(name) as (_fd, header, _size):
            head = header.head._replace(engine_epoch=max(header.head.engine_epoch, end.head.engine_epoch))
            return End(name.first, Tail(header.size, header.size, head, 0))

    def _tail_of(self, name: SegmentName, end: End) -> End:
        path = self.folder / name.file_name
        with self.opened(name) as (fd, _header, size):
            if end.tail.end > size:
                raise self._cut_off(path, end.head.position)
            return End(name.first, find_tail(FileBytes(self.files, fd, size), end.tail, path))

    def _closed_end(self, name: SegmentName, end: End, following: SegmentName) -> End:
        """The end of a segment that isn't the last: it must be whole, and lead to the following one."""
        if name.sealed:
            return end._replace(tail=end.tail._replace(head=self.opened_index(name)))
        if end.tail.torn_bytes or end.head.position != following.first:
            path = self.folder / name.file_name
            raise damaged(path, end.head.position, "deleted", f"is not there; the next segment has {following.first}")
        return end

    def opened_index(self, name: SegmentName) -> Head:
        """The head behind a sealed segment."""
        with self._reading(name):
            sealed = SealedSegment(self.files, self.folder / name.file_name, name.first)
            sealed.close()
            return sealed.index.stop

    @contextlib.contextmanager
    def opened(self, name: SegmentName) -> Iterator[tuple[int, SegmentHeader, int]]:
        """An unsealed segment, open for reading: its descriptor, header and length."""
        path = self.folder / name.file_name
        with self._reading(name):
            fd = self.files.open(path, READ)
            try:
                yield fd, read_header(self.files, fd, path, name.first), self.files.size(fd)
            finally:
                close_read(self.files, fd)

    @contextlib.contextmanager
    def _reading(self, name: SegmentName) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise explain(error, self.folder / name.file_name, "read") from error

    def records(self, start: int, end: End, previous: Head | None) -> Generator[Record, None, None]:
        """The records from `start` up to `end`; `previous` is the head that they continue, if it's known.

        Raises:
            JournalError: they can't be read, or are damaged.
        """
        segments = [name for name in self.segments() if name.first <= end.segment]
        if not segments or segments[-1].first != end.segment:
            raise damaged(self.folder, end.segment, "truncated", "begins a segment that is not there")
        if start < segments[0].first:
            raise self._not_there(start, segments[0].first)
        position = start
        for number, name in enumerate(segments):
            following = segments[number + 1].first if number + 1 < len(segments) else None
            if following is not None and following <= start:
                continue
            for group, body in self._groups(name, start, end):
                for record in records_of(group, body, previous, self.folder / name.file_name):
                    position = record.position + 1
                    if record.position >= start:
                        yield record
                    previous = head_after(record)
            if following is not None and position != following:
                raise damaged(self.folder, position, "deleted", f"is not there; the next segment has {following}")

    def _groups(self, name: SegmentName, start: int, end: End) -> Iterator[tuple[Group, bytes]]:
        """The groups of a segment, from the one that holds `start` on, up to `end`."""
        try:
            if name.sealed:
                yield from self._sealed_groups(name, start)
            else:
                yield from self._unsealed_groups(name, start, end)
        except FileNotFoundError as error:
            if name.sealed or not (self.folder / name._replace(sealed=True).file_name).exists():
                raise explain(error, self.folder / name.file_name, "read") from error
            yield from self._groups(name._replace(sealed=True), start, end)  # it was sealed meanwhile
        except OSError as error:
            raise explain(error, self.folder / name.file_name, "read") from error

    def _sealed_groups(self, name: SegmentName, start: int) -> Iterator[tuple[Group, bytes]]:
        sealed = SealedSegment(self.files, self.folder / name.file_name, name.first)
        try:
            yield from sealed.groups(start)
        finally:
            sealed.close()

    def _unsealed_groups(self, name: SegmentName, start: int, end: End) -> Iterator[tuple[Group, bytes]]:
        path = self.folder / name.file_name
        fd = self.files.open(path, READ)
        try:
            header, size = read_header(self.files, fd, path, name.first), self.files.size(fd)
            limit = end.tail.end if name.first == end.segment else size
            for group, body in walk(
                FileBytes(self.files, fd, min(limit, size)), Place(header.size, name.first), path, start
            ):
                yield group, body
                start = max(start, group.stop)
            if limit > size:
                raise self._cut_off(path, max(start, name.first))
        finally:
            close_read(self.files, fd)

    def _not_there(self, start: int, first: int) -> JournalCorrupt:
        lost = "" if self.archives() else ", and no list of archives is there: see `refold archive --adopt`"
        return damaged(self.folder, start, "deleted", f"is not there; the first segment has {first}{lost}")

    def _cut_off(self, path: Path, position: int) -> JournalCorrupt:
        return damaged(path, position, "truncated", "was acknowledged, but the file ends before it")
