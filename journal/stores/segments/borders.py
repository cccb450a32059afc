"""Where a stream's archives are, and letting go of what they hold.

The file `archives` in a stream's folder lists them; it is replaced as a whole, so the border moves at once. A segment whose
successor begins at the border or before it is the archives', and no reader looks at it, whether or not it has been removed.
The one that the border cuts through is written anew from there on, and is the archives' as soon as the new one has its name.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path

from refold.journal.archives import Archive
from refold.journal.record import Head
from refold.journal.stores.segments.archive_list import pack_archives
from refold.journal.stores.segments.erasing import opened_closed, write_segment
from refold.journal.stores.segments.files import FileLayer, damaged, write_file
from refold.journal.stores.segments.folder import ARCHIVES_NAME, DRAFT_SUFFIX, SegmentName
from refold.journal.stores.segments.frames import (
    GROUP_HEADER_BYTES,
    Group,
    is_whole,
    pack_group,
    unpack_group,
    unpack_records,
)
from refold.journal.stores.segments.sealed import Groups


def save_archives(files: FileLayer, folder: Path, archives: list[Archive]) -> None:
    """Replace the list; on disk when this returns."""
    write_file(files, folder / ARCHIVES_NAME, pack_archives(archives))


def remove_archived(files: FileLayer, folder: Path, names: list[SegmentName], border: int, limit: int) -> int:
    """Remove segments that are the archives', until `limit` records have gone; how many have."""
    count = 0
    for name, following in itertools.pairwise(names):
        if following.first > border or count >= limit:
            break
        for sealed in (False, True):
            file = name._replace(sealed=sealed).file_name
            if (folder / file).exists():
                files.unlink(folder / file)
        count += following.first - name.first
    if count:
        files.fsync_dir(folder)
    return count


def begin_at(files: FileLayer, folder: Path, name: SegmentName, border: Head) -> None:
    """Write the closed segment `name` anew, from the border on."""
    new = SegmentName(border.position, sealed=True).file_name
    with opened_closed(files, folder, name) as (header, groups):
        trimmed = _from(groups, border.position, folder / name.file_name)
        write_segment(files, folder / (new + DRAFT_SUFFIX), header._replace(head=border), trimmed)
    files.rename(folder / (new + DRAFT_SUFFIX), folder / new)
    files.fsync_dir(folder)


def _from(groups: Groups, border: int, path: Path) -> Iterator[tuple[Group, bytes]]:
    for group, body in groups:
        if group.stop <= border and group.position < border:
            continue
        if group.position >= border:
            yield group, body
            continue
        if not is_whole(group, body):
            raise damaged(path, group.position, "edited", "has another checksum than when it was written")
        records = [record for record in unpack_records(group, body) if record.position >= border]
        frame = pack_group(border, group.engine_epoch, records)
        new = unpack_group(frame, 0, 0)
        assert new is not None, "a group that was packed a moment ago is whole"
        yield new, frame[GROUP_HEADER_BYTES:]
