"""A stream that ends before its mark: its newest segment is gone, or was cut. What is lost, and what can still be read.

Everything before that is as good as it was: readers go on up to there, and then say what is missing. Nobody writes to such a
stream. The way out is a backup, or a copy of what is whole.
"""

import contextlib
import shlex
from pathlib import Path

from refold.journal.ends import EndInDoubt
from refold.journal.errors import JournalCorrupt, JournalError
from refold.journal.stores.segments.files import Misplaced, damaged
from refold.journal.stores.segments.folder import SegmentName
from refold.journal.stores.segments.gaps import end_of
from refold.journal.stores.segments.scan import FileBytes, Place, walk
from refold.journal.stores.segments.stream_files import End, StreamFiles


def shortage(stream: StreamFiles, marked: End) -> JournalCorrupt | None:
    """Why a stream ends before `marked`, where it was acknowledged to; None if its files reach that.

    It's an `EndInDoubt` if it's the stream's end that is missing, so that what is before can be read.

    Raises:
        JournalError: its files can't be read.
    """
    if not stream.has(marked.segment):
        return lost(stream, marked)
    name = SegmentName(marked.segment, sealed=False)
    try:
        is_cut = name in stream.segments() and stream.size(name) < marked.tail.end
    except JournalError:
        if name in stream.segments():  # else it was sealed meanwhile
            raise
        return None
    return cut_off(stream, name, marked) if is_cut else None


def lost(stream: StreamFiles, marked: End) -> JournalCorrupt:
    """The error of a stream whose marked segment is not there."""
    names, last = stream.segments(), marked.head.position - 1
    if not names and (border := stream.border()):
        return _short(stream, stream.folder, border, marked, "of its segments none is there")
    if not names:
        return _all_lost(stream, last)
    first, which = marked.segment, "the segment that it was acknowledged in is gone"
    if names[-1].first > marked.segment:
        return damaged(stream.folder, first, "deleted", f"{_and_those_up_to(first, last)}: {which}")
    with contextlib.suppress(JournalCorrupt):
        first = end_of(stream, names[-1])
    return _short(stream, stream.folder, first, marked, which)


def cut_off(stream: StreamFiles, name: SegmentName, marked: End) -> JournalCorrupt:
    """The error of a stream whose marked segment, which is there, has no end of a group at the mark. Names the first record that isn't in it."""
    path, position = stream.folder / name.file_name, name.first
    try:
        with stream.opened(name) as (fd, header, size):
            for group, _ in walk(FileBytes(stream.files, fd, size), Place(header.size, position), path, position):
                if group.end > marked.tail.end:
                    return _across(path, group.position, marked)
                position = group.stop
    except JournalCorrupt as damage:
        if damage.kind != "truncated":
            return damage
    size = stream.size(name)
    where = f"the file has {size} bytes, and was acknowledged up to byte {marked.tail.end}"
    if name != stream.segments()[-1]:
        gone = _and_those_up_to(position, marked.head.position - 1)
        return damaged(path, position, "truncated", f"{gone}: {where}")
    return _short(stream, path, position, marked, where)


def _across(path: Path, position: int, marked: End) -> Misplaced:
    what = f"lies across byte {marked.tail.end}, where what was acknowledged ends: other bytes took the place of those before it"
    return Misplaced(str(damaged(path, position, "edited", what)), position=position, kind="edited")


def _all_lost(stream: StreamFiles, last: int) -> JournalCorrupt:
    mended = f"restore a backup, or, to begin a new journal, move this one away: `mv {shlex.quote(str(stream.root))} ELSEWHERE`"
    return JournalCorrupt(
        f"record 0 in {stream.folder} {_and_those_up_to(0, last)}: of its segments none is there (deleted); {mended}",
        position=0,
        kind="deleted",
    )


def _and_those_up_to(first: int, last: int) -> str:
    return f"and those up to {last} are lost" if last > first else "is lost" if last == first else "can't be added"


def _short(stream: StreamFiles, where: object, position: int, marked: End, why: str) -> EndInDoubt:
    gone = _and_those_up_to(position, marked.head.position - 1)
    journal = shlex.quote(str(stream.root))
    way_out = f", or take what is before it: `refold copy --accept-end {journal} NEW` makes a new journal of that"
    return EndInDoubt(
        f"record {position} in {where} {gone}: {why} (truncated); restore it from a backup{way_out if position else ''}",
        position=position,
        num_known=marked.head.position,
        told_by="mark",
        kind="truncated",
    )
