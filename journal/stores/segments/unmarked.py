"""A stream that has lost its mark: what of it is whole, and what nobody can know any more.

The mark proves one thing: that the stream still reaches the place up to which it was acknowledged. All else proves itself, by
checksums and the chain. So without the mark whatever is whole can be read, and two things can't be known:

- whether acknowledged records are gone behind the last whole one: the log may have been cut at the border of a group, or an
  older copy put in its place;
- whether a last group that is there in part was torn by a crash, so that nobody was told of it, or was acknowledged and damaged.

A snapshot of more records than there are proves that some are gone. So readers read what is whole, `refold verify` finds
the stream at fault, and nobody writes to it: the next append would make its end look like one that was never in doubt. The way out is
a copy, made by somebody who says that he takes the end as it is.
"""

import contextlib
import shlex
from typing import NamedTuple

from refold.journal.ends import EndInDoubt
from refold.journal.errors import JournalCorrupt
from refold.journal.record import EMPTY_HEAD
from refold.journal.stores.segments.files import damaged
from refold.journal.stores.segments.folder import SegmentName
from refold.journal.stores.segments.marks import MARK_NAME, MarkLost
from refold.journal.stores.segments.scan import FileBytes
from refold.journal.stores.segments.snapshot_files import snapshot_position, unpack_snapshot
from refold.journal.stores.segments.stream_files import End, StreamFiles
from refold.journal.stores.segments.tail import Tail, check_torn, whole_groups


class Whole(NamedTuple):
    """How far a stream is whole, and what lies behind that; empty if nothing does."""

    end: End
    behind: str


def whole_of(view: StreamFiles) -> Whole:
    """The end of what is whole.

    Raises:
        JournalError: the stream can't be read, or its first segment has no header.
    """
    names = view.segments()
    if not names:
        raise damaged(view.folder, 0, "deleted", "and all after it are not there: the folder has no segment")
    whole = Whole(End(names[0].first, Tail(0, 0, EMPTY_HEAD, 0)), "")
    for name, following in zip(names, [*names[1:], None], strict=True):
        try:
            whole = _segment(view, name, whole.end)
        except JournalCorrupt as damage:
            if name is names[0]:
                raise
            return whole._replace(behind=str(damage))
        if whole.behind:
            return whole
        if following is not None and whole.end.head.position != following.first:
            gap = f"record {whole.end.head.position} is not there; the next segment has {following.first}"
            return whole._replace(behind=gap)
    return whole


def is_unborn(view: StreamFiles) -> bool:
    """Whether a stream has no mark because its beginning was interrupted: there's at most a first segment without groups."""
    if any(snapshot_position(name) is not None for name in view.names()):
        return False
    names = view.segments()
    if names != [SegmentName(0, sealed=False)]:
        return not names
    with view.opened(names[0]) as (_fd, header, size):
        return size == header.size


def lost_beginning(view: StreamFiles, lost: MarkLost, first: int) -> JournalCorrupt:
    """The error of a stream without a mark whose first segment begins at `first`, behind records that no archive has."""
    begin = view.border()
    gone = f"record {begin} is" if first == begin + 1 else f"records {begin} to {first - 1} are"
    error = JournalCorrupt(
        f"{view.folder / MARK_NAME} {lost}, and {gone} gone with the first segment (deleted): restore a backup, for neither an engine "
        f"nor a copy can begin at record {first}",
        position=begin,
        kind="deleted",
    )
    error.place = str(view.root)
    return error


def lost_end(view: StreamFiles, lost: MarkLost) -> JournalCorrupt:
    """The error of a stream without a mark: what is there, what can't be known, and the way out.

    It's an `EndInDoubt`, unless the stream has lost its beginning too, so that there's no way out.

    Raises:
        JournalError: not even that can be told.
    """
    names = view.segments()
    if names and names[0].first > view.border():
        return lost_beginning(view, lost, names[0].first)
    end, behind = whole_of(view)
    head, journal = end.head, shlex.quote(str(view.folder.parent))
    known = _known_by_snapshots(view, head.position)
    proved = (
        f"records {head.position} to {known - 1} were there when a snapshot was made, and are gone" if known else ""
    )
    unknown = f"whether {'even ' * bool(known)}later records were acknowledged and are gone can't be known; restore a backup, or take it as it is"
    there = f"the stream is whole up to record {head.position - 1}, head {head.position}:{head.hash.hex()}"
    told = [
        f"{view.folder / MARK_NAME} {lost}: it said how far stream {view.stream!r} was acknowledged",
        there if head.position else "no whole record is left of it",
        *filter(None, (behind, proved)),
        f"{unknown}: `refold copy --accept-end {journal} NEW` makes a new journal of what is whole",
    ]
    error = EndInDoubt("; ".join(told), position=head.position, num_known=known, told_by="snapshot" if known else None)
    error.place = str(view.folder.parent)
    return error


def _segment(view: StreamFiles, name: SegmentName, before: End) -> Whole:
    """As far as one segment is whole; `before` is where the one before it ends."""
    start = view.first_end(name, before)
    if name.sealed:
        return Whole(start._replace(tail=start.tail._replace(head=view.opened_index(name))), "")
    path = view.folder / name.file_name
    with view.opened(name) as (fd, _header, size):
        source = FileBytes(view.files, fd, size)
        tail, broken = whole_groups(source, start.tail)
        if not tail.torn_bytes:
            return Whole(End(name.first, tail), "")
        position = tail.head.position
        behind = f"of record {position}, or of a group that begins with it, only a part is there"
        try:
            check_torn(source, tail, broken, path)
        except JournalCorrupt as damage:
            behind = str(damage)
        return Whole(End(name.first, tail), behind)


def _known_by_snapshots(view: StreamFiles, position: int) -> int:
    """How many records a sound snapshot of more than there are proves; 0 if there's none."""
    known = 0
    for name in view.names():
        at = snapshot_position(name)
        if at is not None and at > max(position, known):
            with contextlib.suppress(UnicodeDecodeError):
                snapshot = unpack_snapshot(view.file(name))
                known = at if snapshot is not None and snapshot.position == at else known
    return known
