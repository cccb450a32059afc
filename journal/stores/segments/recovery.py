"""Opening a stream for writing: what its last owner left is settled before anything is added to it."""

from pathlib import Path

from refold.journal.stores.segments.files import UPDATE, FileLayer, damaged, write_all
from refold.journal.stores.segments.folder import SegmentName, leftovers
from refold.journal.stores.segments.frames import GROUP_HEADER_BYTES, is_whole, unpack_group
from refold.journal.stores.segments.marks import Mark
from refold.journal.stores.segments.scan import FileBytes
from refold.journal.stores.segments.shortage import shortage
from refold.journal.stores.segments.stream_files import End
from refold.journal.stores.segments.tail import Tail, head_behind
from refold.journal.stores.segments.view import StreamView

_PIECE_BYTES = 1 << 20


def settle(files: FileLayer, view: StreamView, mark: Mark) -> End:
    """The end of the stream, with everything up to it on disk. What lies behind it, if it's a torn tail, may be cut off.

    Raises:
        OSError: it can't be read or written.
        JournalCorrupt: it's damaged.
    """
    marked = End(mark.segment, Tail(mark.group, mark.end, mark.head, 0))
    if (short := shortage(view, marked)) is not None:
        raise short
    for leftover in leftovers(files.listdir(view.folder)):
        files.unlink(view.folder / leftover)
    _check_marked(files, view, marked)
    end = view.beyond(marked)
    for name in view.segments():
        if name.first >= mark.segment and not name.sealed:
            _write_again(files, view.folder / name.file_name, name.first, marked, end)
    return end


def _check_marked(files: FileLayer, view: StreamView, marked: End) -> None:
    """The mark and the last acknowledged group tell the same story."""
    name = SegmentName(marked.segment, sealed=False)
    if name not in view.segments():
        return
    with view.opened(name) as (fd, header, size):
        bare = marked.tail.group == marked.tail.end == header.size and marked.head.position == header.head.position
        agrees = size >= header.size if bare else _agrees(FileBytes(files, fd, min(size, marked.tail.end)), marked.tail)
    if agrees:
        return
    for _ in view.records(marked.segment, marked, None):  # names the first bad record, if one is
        pass
    raise damaged(
        view.folder, max(marked.head.position - 1, 0), "edited", "is not the one that the acknowledged end names"
    )


def _agrees(source: FileBytes, marked: Tail) -> bool:
    group = unpack_group(source.get(marked.group, GROUP_HEADER_BYTES), 0, marked.group)
    if group is None or group.end != marked.end:
        return False
    body = source.get(group.payload_start, group.end - group.payload_start)
    if not is_whole(group, body):
        return False
    head = head_behind(group, body, marked.head)
    return head == marked.head


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
