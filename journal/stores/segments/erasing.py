"""Erasing content from segments: those that hold it are written anew without it, and take their place when that is recorded.

The new segments are made first, each under a name that says which record decides about them: the one that records the
redaction, by its position and the beginning of its hash. Then that record is appended, like any other: with it all is done,
without it nothing. Afterwards every snapshot is removed, the new segments take the old ones' names, and the old ones are gone. A
crash before the record leaves drafts that the next owner removes; a crash after it leaves work that the next owner finishes.
"""

import contextlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from refold.journal.record import Record
from refold.journal.stores.segments.files import READ, FileLayer, close_read, damaged
from refold.journal.stores.segments.folder import SegmentName
from refold.journal.stores.segments.frames import (
    GROUP_HEADER_BYTES,
    Group,
    SegmentHeader,
    is_whole,
    pack_group,
    unpack_group,
    unpack_records,
)
from refold.journal.stores.segments.scan import FileBytes, Place, walk
from refold.journal.stores.segments.sealed import Groups, SealedSegment, Sealing, read_header
from refold.journal.stores.segments.snapshot_files import snapshot_position
from refold.journal.stores.segments.stream_files import End
from refold.journal.stores.segments.view import StreamView

_NEW_NAME = re.compile(r"(\d{20})\.sealed\.at-(\d{20})-([0-9a-f]{16})")


def write_anew(
    files: FileLayer, folder: Path, names: list[SegmentName], by: Record, contents: Mapping[int, bytes | None]
) -> list[int]:
    """Write those of the closed segments `names` anew that hold any of `contents`; the first positions of these.

    Raises:
        OSError: they can't be read or written.
        JournalCorrupt: one is damaged.
    """
    done: list[int] = []
    ends = [name.first for name in names[1:]]
    for name, end in zip(names, [*ends, by.position], strict=True):
        if any(name.first <= position < end for position in contents):
            with opened_closed(files, folder, name) as (header, groups):
                new = folder / f"{name.first:020d}.sealed.at-{by.position:020d}-{by.hash.hex()[:16]}"
                write_segment(files, new, header, _without(groups, contents, folder / name.file_name))
            done.append(name.first)
    files.fsync_dir(folder)
    return done


def is_unfinished(view: StreamView, end: End) -> bool:
    """Whether segments that were written anew wait to take their place, by a record that is in. Raises as `finish`."""
    found = filter(None, map(_NEW_NAME.fullmatch, view.names()))
    return any(_is_in(view, end, int(match[2]), match[3]) for match in found)


def finish(files: FileLayer, view: StreamView, end: End) -> bool:
    """Let what was written anew take its place, if the record that decides about it is in; else remove it. Whether any was.

    Raises:
        OSError: a file can't be renamed or removed.
        JournalError: the record can't be read.
    """
    found = [match for match in map(_NEW_NAME.fullmatch, view.names()) if match is not None]
    if not found:
        return False
    decided = [match for match in found if _is_in(view, end, int(match[2]), match[3])]
    for match in found:
        if match not in decided:
            files.unlink(view.folder / match[0])
    if decided:  # first, for while a new segment hasn't its name yet, there's no forgetting the rest
        _remove(files, view, [name for name in view.names() if snapshot_position(name) is not None])
    for match in decided:
        files.rename(view.folder / match[0], view.folder / SegmentName(int(match[1]), sealed=True).file_name)
    files.fsync_dir(view.folder)
    old = {SegmentName(int(match[1]), sealed=False).file_name for match in decided}
    _remove(files, view, [name for name in view.names() if name in old])
    return bool(decided)


def _remove(files: FileLayer, view: StreamView, names: list[str]) -> None:
    for name in names:
        files.unlink(view.folder / name)
    if names:
        files.fsync_dir(view.folder)


def _is_in(view: StreamView, end: End, position: int, beginning: str) -> bool:
    if position >= end.head.position:
        return False
    with contextlib.closing(view.records(position, end)) as records:
        return next(records).hash.hex().startswith(beginning)


@contextlib.contextmanager
def opened_closed(files: FileLayer, folder: Path, name: SegmentName) -> Iterator[tuple[SegmentHeader, Groups]]:
    """A closed segment: its header and its groups."""
    path = folder / name.file_name
    if name.sealed:
        sealed = SealedSegment(files, path, name.first)
        try:
            yield sealed.header, sealed.groups(name.first)
        finally:
            sealed.close()
        return
    fd = files.open(path, READ)
    try:
        header = read_header(files, fd, path, name.first)
        yield header, walk(FileBytes(files, fd, files.size(fd)), Place(header.size, name.first), path, name.first)
    finally:
        close_read(files, fd)


def _without(groups: Groups, contents: Mapping[int, bytes | None], path: Path) -> Iterator[tuple[Group, bytes]]:
    """The groups, with `contents` in place of what was there."""
    for group, body in groups:
        if not any(position in contents for position in range(group.position, group.stop)):
            yield group, body
            continue
        if not is_whole(group, body):
            raise damaged(path, group.position, "edited", "has another checksum than when it was written")
        records = [
            record._replace(content=contents.get(record.position, record.content))
            for record in unpack_records(group, body)
        ]
        frame = pack_group(group.position, group.engine_epoch, records)
        new = unpack_group(frame, 0, 0)
        assert new is not None, "a group that was packed a moment ago is whole"
        yield new, frame[GROUP_HEADER_BYTES:]


def write_segment(files: FileLayer, path: Path, header: SegmentHeader, groups: Groups) -> None:
    """Write a sealed segment of these groups; on disk when this returns."""
    sealing = Sealing(files, groups, header, path)
    try:
        while sealing.step():
            pass
        sealing.finish()
    finally:
        sealing.close()
