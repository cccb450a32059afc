"""The files of one stream, by what they are: its segments and their ends, the list of its archives, whatever lies beside them.

They may be live. Nothing here knows how far the stream counts: `view.py` does, and `unmarked.py` where that is lost.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from refold.journal.archives import Archive
from refold.journal.errors import JournalCorrupt
from refold.journal.record import Head
from refold.journal.stores.no_file import NoFile
from refold.journal.stores.segments.archive_list import unpack_archives
from refold.journal.stores.segments.files import READ, FileLayer, close_read, explain, without_segment
from refold.journal.stores.segments.folder import ARCHIVES_NAME, SegmentName, segments_of, stream_folder
from refold.journal.stores.segments.frames import SegmentHeader
from refold.journal.stores.segments.sealed import SealedSegment, read_header
from refold.journal.stores.segments.tail import Tail


class End(NamedTuple):
    """How far a stream counts: up to `tail.end` in the segment that begins with `segment`.

    `damage` is what was found where it was looked how far the stream goes on; it may begin before the end.
    """

    segment: int
    tail: Tail
    damage: JournalCorrupt | None = None

    @property
    def head(self) -> Head:
        """The head there."""
        return self.tail.head


class StreamFiles:
    """The files of a stream of the journal at `root`."""

    __slots__ = ("files", "folder", "root", "stream")

    def __init__(self, files: FileLayer, root: Path, stream: str) -> None:
        self.files, self.root, self.stream = files, root, stream
        self.folder = stream_folder(root, stream)

    def segments(self) -> list[SegmentName]:
        """The segments, in order; without those that are the archives'."""
        names = segments_of(self.names())
        if len(names) > 1 and (archives := self.archives()):
            border = archives[-1].stop
            return [
                name for name, after in zip(names, [*names[1:], None], strict=True) if not after or after.first > border
            ]
        return names

    def has(self, first: int) -> bool:
        """Whether the segment is there that begins with this position."""
        return any(name.first == first for name in self.segments())

    def archives(self) -> list[Archive]:
        """Where the oldest records are, in order.

        Raises:
            JournalError: the list can't be read, or is damaged.
        """
        data = self.file(ARCHIVES_NAME)
        return unpack_archives(data, self.folder / ARCHIVES_NAME) if data else []

    def border(self) -> int:
        """The position of the first record that isn't archived."""
        archives = self.archives()
        return archives[-1].stop if archives else 0

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

    def first_end(self, name: SegmentName, end: End) -> End:
        """Where a segment's groups begin, as an end."""
        with self.opened(name) as (_fd, header, _size):
            head = header.head._replace(engine_epoch=max(header.head.engine_epoch, end.head.engine_epoch))
            return End(name.first, Tail(header.size, header.size, head, 0))

    def head_before(self, name: SegmentName) -> Head:
        """The head that a segment, sealed or not, continues."""
        with self.opened(name) as (_fd, header, _size):
            return header.head

    def opened_index(self, name: SegmentName) -> Head:
        """The head behind a sealed segment."""
        with self._reading(name):
            sealed = SealedSegment(self.files, self.folder / name.file_name, name.first)
            sealed.close()
            return sealed.stop

    def has_index(self, name: SegmentName) -> bool:
        """Whether a sealed segment has the index that was written.

        Raises:
            JournalError: it can't be read, or is damaged.
        """
        with self._reading(name):
            sealed = SealedSegment(self.files, self.folder / name.file_name, name.first)
            sealed.close()
            return sealed.has_index

    def size(self, name: SegmentName) -> int:
        """A segment's length in bytes, whatever it holds."""
        with self._reading(name):
            fd = self.files.open(self.folder / name.file_name, READ)
            try:
                return self.files.size(fd)
            finally:
                close_read(self.files, fd)

    @contextlib.contextmanager
    def opened(self, name: SegmentName) -> Iterator[tuple[int, SegmentHeader, int]]:
        """A segment, open for reading: its descriptor, header and length."""
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
        except NoFile as error:
            raise without_segment(self.folder / name.file_name, name.first, error) from error
        except OSError as error:
            raise explain(error, self.folder / name.file_name, "read") from error
