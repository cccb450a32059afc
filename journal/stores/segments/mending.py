"""Indexes of sealed segments that are damaged: finding them, and writing their segments anew. No record is in an index."""

from collections.abc import Iterator

from refold.journal.errors import JournalCorrupt, JournalError
from refold.journal.stores.segments.erasing import write_segment
from refold.journal.stores.segments.files import FileLayer
from refold.journal.stores.segments.folder import DRAFT_SUFFIX, SegmentName
from refold.journal.stores.segments.sealed import SealedSegment
from refold.journal.stores.segments.stream_files import StreamFiles


def check_indexes(stream: StreamFiles, remedy: str) -> None:
    """See to it that every sealed segment has its index; `remedy` is the command that makes it anew.

    Raises:
        JournalCorrupt: one hasn't; kind `unindexed`. Or its records can't be read either.
        JournalError: a segment can't be read.
    """
    for name in _without_index(stream):
        path = stream.folder / name.file_name
        raise JournalCorrupt(
            f"the index at the end of {path} is damaged, and no record is in it: all are whole, and are read without it, more slowly "
            f"(unindexed); `{remedy}` writes it anew; test this disk",
            position=name.first,
            kind="unindexed",
        )


def mend_indexes(files: FileLayer, stream: StreamFiles) -> None:
    """Write those sealed segments anew whose index is damaged. Each takes the place of the old one when it's on disk.

    Raises:
        OSError: a file can't be written.
        JournalCorrupt: a record is damaged too.
    """
    for name in _without_index(stream):
        path = stream.folder / name.file_name
        draft = path.with_name(path.name + DRAFT_SUFFIX)
        sealed = SealedSegment(files, path, name.first)
        try:
            write_segment(files, draft, sealed.header, sealed.groups(name.first))
        finally:
            sealed.close()
        files.rename(draft, path)
        files.fsync_dir(stream.folder)


def _without_index(stream: StreamFiles) -> Iterator[SegmentName]:
    for name in stream.segments():
        try:
            if name.sealed and not stream.has_index(name):
                yield name
        except JournalError:
            if name in stream.segments():  # else its records were archived meanwhile
                raise
