"""A whole group that isn't where it belongs: what became of the records that belong there?

Groups have positions, so a reader sees at once that one is out of place, and not whether it was put in, or moved, or others are gone. That
is settled as for every store, by the hash chain: the records of the segment are looked at as they lie in the files, and those behind
it too. A record before the place may turn out to be the first that is bad, if a group was made up so that its position fits.

Nobody pays for this but whoever has met damage.
"""

import contextlib
from collections.abc import Iterator

from refold.journal.diagnosis import first_finding
from refold.journal.errors import JournalCorrupt, JournalError
from refold.journal.record import Record
from refold.journal.stores.segments.files import Misplaced, damaged
from refold.journal.stores.segments.folder import SegmentName
from refold.journal.stores.segments.frames import unpack_records
from refold.journal.stores.segments.scan import Bytes, FileBytes, HeldBytes, whole_among
from refold.journal.stores.segments.sealed import SealedSegment
from refold.journal.stores.segments.stream_files import StreamFiles


def what_became(stream: StreamFiles, name: SegmentName, found: Misplaced, end: int) -> JournalCorrupt:
    """The damage behind what was found in a segment; `end` is where the stream is known to end. If it can't be told: what was found."""
    try:
        finding = first_finding(stream.head_before(name), _as_they_lie(stream, name), end)
    except JournalError:
        return found
    if finding is None or finding.position > found.position or finding[:2] == (found.position, found.kind):
        return found
    return damaged(stream.folder / name.file_name, *finding)


def _as_they_lie(stream: StreamFiles, first: SegmentName) -> Iterator[Record]:
    """The records in whole groups from a segment on, in the order of the files. A segment that can't be read has none."""
    for name in stream.segments():
        if name.first >= first.first:
            with contextlib.suppress(JournalError, OSError):
                yield from _records_in(stream, name)


def _records_in(stream: StreamFiles, name: SegmentName) -> Iterator[Record]:
    if not name.sealed:
        with stream.opened(name) as (fd, header, size):
            yield from _records_among(FileBytes(stream.files, fd, size), header.size)
        return
    sealed = SealedSegment(stream.files, stream.folder / name.file_name, name.first)
    try:
        for data in sealed.unpacked():
            yield from _records_among(HeldBytes(data), 0)
    finally:
        sealed.close()


def _records_among(source: Bytes, offset: int) -> Iterator[Record]:
    for group, body in whole_among(source, offset):
        yield from unpack_records(group, body)
