"""The mark and the last acknowledged group tell the same story: two places of one stream, so that a forger of one is found by the other."""

from refold.journal.stores.segments.files import damaged
from refold.journal.stores.segments.folder import SegmentName
from refold.journal.stores.segments.frames import GROUP_HEADER_BYTES, is_whole, unpack_group
from refold.journal.stores.segments.scan import FileBytes
from refold.journal.stores.segments.stream_files import End, StreamFiles
from refold.journal.stores.segments.tail import Tail, head_behind


def check_marked(stream: StreamFiles, marked: End) -> None:
    """See to it that the group that ends at the mark, if it isn't sealed, ends as the mark says.

    Raises:
        JournalCorrupt: it doesn't.
        JournalError: it can't be read.
    """
    name = SegmentName(marked.segment, sealed=False)
    if name not in stream.segments():
        return
    with stream.opened(name) as (fd, header, size):
        bare = marked.tail.group == marked.tail.end == header.size and marked.head.position == header.head.position
        source = FileBytes(stream.files, fd, min(size, marked.tail.end))
        agrees = size >= header.size if bare else _agrees(source, marked.tail)
    if not agrees:
        last = max(marked.head.position - 1, 0)
        raise damaged(stream.folder, last, "edited", "is not the one that the acknowledged end names")


def _agrees(source: FileBytes, marked: Tail) -> bool:
    group = unpack_group(source.get(marked.group, GROUP_HEADER_BYTES), 0, marked.group)
    if group is None or group.end != marked.end:
        return False
    body = source.get(group.payload_start, group.end - group.payload_start)
    return is_whole(group, body) and head_behind(group, body, marked.head) == marked.head
