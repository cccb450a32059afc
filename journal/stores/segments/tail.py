"""The end of a segment that was being written: what of it counts, and what of it may be cut off.

Above the mark there is at most one group that nobody can have been told of: the last one, for a group is written only when
the one before it is on disk. A crash leaves of it what had reached the disk: the beginning, or some of its blocks, with zeros
(space is laid out in advance, as zeros) or nothing in place of the others. That is a torn tail, and it is cut.

Anything else is damage, and is never cut:
- a group that isn't whole, though another one follows it;
- a group that has all its bytes, none of them missing, and whose checksum disagrees;
- a whole group that doesn't belong there, by its position or its engine epoch.
"""

from pathlib import Path
from typing import NamedTuple

from refold.journal.diagnosis import of_an_older_epoch
from refold.journal.record import Head
from refold.journal.stores.segments.files import damaged, misplaced
from refold.journal.stores.segments.frames import (
    GROUP_END,
    GROUP_FRAME_BYTES,
    GROUP_HEADER_BYTES,
    GROUP_MAGIC,
    Group,
    is_whole,
    unpack_group,
    unpack_records,
)
from refold.journal.stores.segments.scan import Bytes

_SECTOR_BYTES = 512


class Tail(NamedTuple):
    """The end of what counts.

    Attributes:
        group: where the last whole group begins.
        end: where it ends.
        head: the head behind it.
        torn_bytes: how many bytes of a torn group lie behind it.
    """

    group: int
    end: int
    head: Head
    torn_bytes: int


def find_tail(source: Bytes, start: Tail, path: Path) -> Tail:
    """Go on from `start` to the last whole group.

    Raises:
        JournalCorrupt: what follows it isn't a torn tail but damage.
    """
    tail, broken = whole_groups(source, start)
    if tail.torn_bytes:
        check_torn(source, tail, broken, path)
    return tail


def whole_groups(source: Bytes, start: Tail) -> tuple[Tail, Group | None]:
    """Go on from `start` as far as groups are whole; also the group that isn't, if at least its header can be made out."""
    group_start, offset, head, _ = start
    while (group := unpack_group(source.get(offset, GROUP_HEADER_BYTES), 0, offset)) is not None:
        body = source.get(group.payload_start, group.end - group.payload_start)
        if group.position != head.position or group.engine_epoch < head.engine_epoch or not is_whole(group, body):
            break
        head = head_behind(group, body, head)
        group_start, offset = group.start, group.end
    rest = source.get(offset, source.limit - offset)
    return Tail(group_start, offset, head, len(rest.rstrip(b"\0"))), group


def head_behind(group: Group, body: bytes, head: Head) -> Head:
    """The head after a whole group."""
    digest = head.hash
    for record in unpack_records(group, body):
        digest = record.hash
    return Head(group.stop, digest, group.engine_epoch)


def check_torn(source: Bytes, tail: Tail, group: Group | None, path: Path) -> None:
    """Refuse to take what lies behind `tail`, which is no whole group, for a torn one if it can't be.

    Raises:
        JournalCorrupt: it can't be.
    """
    offset, position = tail.end, tail.head.position
    if group is not None and is_whole(group, source.get(group.payload_start, group.end - group.payload_start)):
        if group.position != position:
            raise misplaced(path, position, group.position)
        raise damaged(path, *of_an_older_epoch(tail.head, group.engine_epoch))
    rest = source.get(offset, source.limit - offset)
    follower = _find_group(rest, GROUP_HEADER_BYTES if group is None else group.end - offset)
    if follower is not None:
        raise damaged(
            path, position, "edited", f"is not whole, but record {follower.position} follows it: its bytes were changed"
        )
    written = rest.rstrip(b"\0")
    whole_bytes = group.end - offset if group is not None else len(written)
    if group is None and (len(written) < GROUP_FRAME_BYTES or not written.endswith(GROUP_END)):
        return
    if len(rest) < whole_bytes or rest[whole_bytes - 1] == 0 or _has_hole(rest[:whole_bytes], offset):
        return
    raise damaged(
        path, position, "edited", "has all its bytes and another checksum: it was changed, not torn by a crash"
    )


def _find_group(rest: bytes, begin: int) -> Group | None:
    while (begin := rest.find(GROUP_MAGIC, begin)) >= 0:
        if (group := unpack_group(rest, begin, begin)) is not None:
            return group
        begin += 1
    return None


def _has_hole(data: bytes, offset: int) -> bool:
    """Whether a whole sector of the file, or the part of one at either end, is nothing but zeros."""
    begin = 0
    while begin < len(data):
        end = min(begin + _SECTOR_BYTES - (offset + begin) % _SECTOR_BYTES, len(data))
        if not any(data[begin:end]):
            return True
        begin = end
    return False
