"""Segments that are missing between others, found without reading any record.

A segment's name is its first position, and a sealed one's index says where it ends: so a listing and a few bytes of each show
whether every segment begins where the one before it ends. Whoever reads all records finds a hole when he comes there; this is
for whoever begins at a snapshot, and would go on behind a hole without seeing it.

What is missing before the first segment is no hole here: it may be archived, and the list of archives be lost, which is made anew
(`refold archive --adopt`) in a stream that is open for it. Whoever needs those records is told.
"""

from itertools import pairwise

from refold.journal.errors import JournalCorrupt, JournalError
from refold.journal.stores.segments.files import damaged
from refold.journal.stores.segments.folder import SegmentName
from refold.journal.stores.segments.scan import FileBytes, Place, walk
from refold.journal.stores.segments.stream_files import StreamFiles

_ATTEMPTS = 20


def end_of(stream: StreamFiles, name: SegmentName) -> int:
    """The position behind the last group of a segment that isn't written any more.

    Raises:
        JournalError: it can't be read, or its header, a group's or its index is damaged.
    """
    if name.sealed:
        return stream.opened_index(name).position
    end = name.first
    with stream.opened(name) as (fd, header, size):
        place = Place(header.size, name.first)
        for group, _ in walk(FileBytes(stream.files, fd, size), place, stream.folder / name.file_name, end):
            end = group.stop
    return end


def check_gaps(stream: StreamFiles, stop: int) -> list[SegmentName]:
    """See to it that of the segments with records before `stop` none is missing between others; the listing that shows it.

    Raises:
        JournalCorrupt: one is (kind `deleted`), or a segment's header or index is damaged.
        JournalError: they can't be read.
    """
    for _ in range(_ATTEMPTS):
        names = stream.segments()
        try:
            _check(stream, names, stop)
        except JournalError:
            if stream.segments() == names:  # else somebody sealed, archived or redacted meanwhile
                raise
        else:
            return names
    return []


def _check(stream: StreamFiles, names: list[SegmentName], stop: int) -> None:
    for name, following in pairwise(names):
        if name.first >= stop:
            return
        end = end_of(stream, name)
        if end > following.first:
            what = f"is at the end of {name.file_name}, and once more at the beginning of the next segment"
            raise damaged(stream.folder, following.first, "inserted", what)
        if end < min(following.first, stop):
            raise damaged(stream.folder, end, "deleted", f"is not there; the next segment has {following.first}")


def not_there(stream: StreamFiles, start: int, first: int) -> JournalCorrupt:
    """The error of records before a stream's first segment that no archive has."""
    lost = "" if stream.archives() else ", and no list of archives is there: see `refold archive --adopt FOLDER`"
    return damaged(stream.folder, start, "deleted", f"is not there; the first segment has {first}{lost}")
