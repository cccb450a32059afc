"""Opening a stream for writing: what its last owner left is settled before anything is added to it."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from refold.journal.errors import JournalCorrupt, JournalError
from refold.journal.stores.no_file import NoFile, check_is_file
from refold.journal.stores.segments import erasing
from refold.journal.stores.segments.files import UPDATE, FileLayer, explain, write_all
from refold.journal.stores.segments.folder import leftovers
from refold.journal.stores.segments.gaps import check_gaps
from refold.journal.stores.segments.marked import check_marked
from refold.journal.stores.segments.marks import Mark, MarkLost
from refold.journal.stores.segments.shortage import shortage
from refold.journal.stores.segments.stream_files import End
from refold.journal.stores.segments.tail import Tail
from refold.journal.stores.segments.unmarked import lost_end
from refold.journal.stores.segments.view import StreamView

_PIECE_BYTES = 1 << 20


def can_be_read_first(files: FileLayer, root: Path, stream: str) -> bool:
    """Whether a stream reads now as its next owner will leave it; not where a killed erasure is to be finished. Writes nothing.

    Raises:
        JournalCorrupt: it's damaged, as far as whoever takes it over would see.
        JournalError: it can't be read.
    """
    view = StreamView(files, root, stream)
    try:
        mark = mark_of(view)
        if mark is None:
            return True
        with _telling_the_first(view):
            end = view.beyond(_checked(view, mark))
            check_gaps(view, end.segment)
        return not erasing.is_unfinished(view, end)
    except OSError as error:
        raise explain(error, view.folder, "open") from error


def mark_of(view: StreamView) -> Mark | None:
    """The stream's mark; None if it never began.

    Raises:
        JournalCorrupt: it's damaged or gone; says what is whole, and the way out.
    """
    try:
        return view.mark()
    except MarkLost as lost:
        raise lost_end(view, lost) from lost


def settle(files: FileLayer, view: StreamView, mark: Mark) -> End:
    """The end of the stream, with everything up to it on disk. What lies behind it, if it's a torn tail, may be cut off.

    Raises:
        OSError: it can't be read or written.
        JournalCorrupt: it's damaged, or a segment is missing.
    """
    with _telling_the_first(view):
        marked = _checked(view, mark)
        end = view.beyond(marked)
        check_gaps(view, end.segment)
    _remove_leftovers(files, view.folder)
    for name in view.segments():
        if name.first >= mark.segment and not name.sealed:
            _write_again(files, view.folder / name.file_name, name.first, marked, end)
    return end


@contextlib.contextmanager
def _telling_the_first(view: StreamView) -> Iterator[None]:
    """Damage that shows at the end may begin before it: whoever opens the stream is told the same as whoever reads it."""
    try:
        yield
    except JournalCorrupt as found:
        raise view.first_damage(found) from None


def _remove_leftovers(files: FileLayer, folder: Path) -> None:
    """What a crash left is removed; a folder of such a name is somebody else's.

    Raises:
        OSError: it can't be.
        JournalError: there is such a folder.
    """
    for leftover in leftovers(files.listdir(folder)):
        try:
            check_is_file(folder / leftover)
        except NoFile as error:
            raise JournalError(error.line) from error
        files.unlink(folder / leftover)


def _checked(view: StreamView, mark: Mark) -> End:
    """Where the mark is, if the files reach it and agree with it."""
    marked = End(mark.segment, Tail(mark.group, mark.end, mark.head, 0))
    if (short := shortage(view, marked)) is not None:
        raise short
    check_marked(view, marked)
    return marked


def _write_again(files: FileLayer, path: Path, first: int, marked: End, end: End) -> None:
    """Write what lies above the mark once more, and sync it, before it counts.

    After a failed sync the kernel shows content that isn't on the disk and calls it clean: a sync alone proves nothing.
    """
    fd = files.open(path, UPDATE)
    try:
        offset = marked.tail.end if first == marked.segment else 0
        stop = end.tail.end if first == end.segment else files.size(fd)
        if offset >= stop:
            return
        while offset < stop and (piece := files.pread(fd, min(_PIECE_BYTES, stop - offset), offset)):
            write_all(files, fd, piece, offset)
            offset += len(piece)
        files.fdatasync(fd)
    finally:
        files.close(fd)
