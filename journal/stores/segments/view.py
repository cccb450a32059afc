"""One stream as a reader sees it: the segments in its folder, and how far they count.

While an engine owns the journal they count up to the mark, so that nothing is shown which the engine hasn't acknowledged and
a power cut could take back. When nobody owns it, whole groups above the mark count too: the next owner will keep them.
"""

import contextlib
from collections.abc import Generator, Iterator

from refold.journal.ends import EndInDoubt
from refold.journal.errors import JournalCorrupt, JournalError
from refold.journal.naming import name as name_it
from refold.journal.record import EMPTY_HEAD, Record
from refold.journal.stores.no_file import NoFile
from refold.journal.stores.ownership import owner_of
from refold.journal.stores.segments.files import READ, Misplaced, close_read, damaged, explain, without_segment
from refold.journal.stores.segments.folder import SegmentName
from refold.journal.stores.segments.frames import Group, is_whole, unpack_records
from refold.journal.stores.segments.gaps import not_there
from refold.journal.stores.segments.marks import MARK_NAME, Mark, MarkLost, read_mark
from refold.journal.stores.segments.misplaced import what_became
from refold.journal.stores.segments.scan import FileBytes, Place, checked_epoch, records_before_damage, walk
from refold.journal.stores.segments.sealed import SealedSegment, read_header
from refold.journal.stores.segments.shortage import cut_off, lost
from refold.journal.stores.segments.stream_files import End, StreamFiles
from refold.journal.stores.segments.tail import Tail, find_tail, head_behind
from refold.journal.stores.segments.unmarked import is_unborn, lost_beginning, whole_of
from refold.journal.verify import verified

_ATTEMPTS = 20


class StreamView(StreamFiles):
    """A stream of the journal at `root`, which may be live."""

    __slots__ = ()

    def read(self, start: int, stop: int | None) -> Iterator[Record]:
        """Records at positions start <= p < stop; what is appended meanwhile is seen.

        Raises:
            JournalError: they can't be read, or are damaged.
        """
        position = start
        while (end := self.end()) is not None:
            before, target = position, end.head.position if stop is None else min(stop, end.head.position)
            if position >= target:
                if end.damage is not None and (stop is None or stop > end.head.position):
                    raise end.damage
                return
            with contextlib.closing(self.records(position, end)) as records:
                for record in records:
                    yield record
                    position = record.position + 1
                    if position == stop:  # what lies behind may be damaged, and wasn't asked for
                        return
            if position == before:
                raise damaged(self.folder, position, "deleted", f"is not there; the stream ends at {end.head.position}")

    def end(self) -> End | None:
        """How far the stream counts now; None if it never began. Without its mark: as far as it's whole.

        One that is damaged counts as far as it was acknowledged: what is before the damage can be read, and whoever reads on is told.

        Raises:
            JournalError: it can't be read, or has no segment.
        """
        for attempt in range(_ATTEMPTS):
            try:
                mark = self.mark()
            except MarkLost:
                return whole_of(self).end
            if mark is None:
                return None
            marked = End(mark.segment, Tail(mark.group, mark.end, mark.head, 0))
            if owner_of(self.root) is not None:
                return marked
            try:
                return self.beyond(marked)
            except JournalCorrupt as damage:
                # An engine that opened it a moment ago may be at work on this very tail.
                if attempt == _ATTEMPTS - 1 or (owner_of(self.root) is None and self.mark() == mark):
                    if not self.segments() and not isinstance(damage, EndInDoubt):
                        raise
                    return marked._replace(damage=damage)
        raise AssertionError("the last attempt returns or raises")

    def mark(self) -> Mark | None:
        """The mark; None if the stream never began.

        Raises:
            MarkLost: it's damaged or gone, or no file.
            JournalError: it can't be read.
        """
        path = self.folder / MARK_NAME
        for _ in range(_ATTEMPTS):
            try:
                fd = self.files.open(path, READ)
            except FileNotFoundError:
                if is_unborn(self):
                    return None
                continue  # it was born since, or the mark is gone
            except NoFile as error:
                raise MarkLost(error.what) from error
            except OSError as error:
                raise explain(error, path, "read") from error
            try:
                return read_mark(self.files, fd)
            except OSError as error:
                raise explain(error, path, "read") from error
            finally:
                close_read(self.files, fd)
        raise MarkLost("is gone")

    def beyond(self, marked: End) -> End:
        """Go on from an acknowledged end to the last whole group.

        Raises:
            JournalError: it can't be read, or what follows is damage.
        """
        segments = [name for name in self.segments() if name.first >= marked.segment]
        if not segments or segments[0].first != marked.segment:
            raise lost(self, marked)
        end = marked
        for number, name in enumerate(segments):
            if number:
                end = self.first_end(name, end)
            if not name.sealed:
                end = self._tail_of(name, end)
            if number + 1 < len(segments):
                end = self._closed_end(name, end, segments[number + 1])
        return end

    def _tail_of(self, name: SegmentName, end: End) -> End:
        path = self.folder / name.file_name
        with self.opened(name) as (fd, _header, size):
            if end.tail.end > size:
                raise cut_off(self, name, end)
            try:
                return End(name.first, find_tail(FileBytes(self.files, fd, size), end.tail, path))
            except Misplaced as found:
                raise what_became(self, name, found, end.head.position) from None

    def _closed_end(self, name: SegmentName, end: End, following: SegmentName) -> End:
        """The end of a segment that isn't the last: it must be whole, and lead to the following one."""
        if name.sealed:
            return end._replace(tail=end.tail._replace(head=self.opened_index(name)))
        if end.tail.torn_bytes or end.head.position != following.first:
            path = self.folder / name.file_name
            raise damaged(path, end.head.position, "deleted", f"is not there; the next segment has {following.first}")
        return end

    def records(self, start: int, end: End) -> Generator[Record, None, None]:
        """The records from `start` up to `end`.

        Raises:
            JournalError: they can't be read, or are damaged.
        """
        segments = [name for name in self.segments() if name.first <= end.segment]
        if not segments:
            raise lost(self, end)
        if start < segments[0].first:
            raise self._not_there(start, segments[0].first)
        position, is_cut, epoch, of_last = start, segments[-1].first != end.segment, 0, 0
        try:
            for number, name in enumerate(segments):
                following = segments[number + 1] if number + 1 < len(segments) else None
                if following is not None and following.first <= start:
                    continue
                with contextlib.closing(self._groups(name, start, end)) as groups:
                    for group, body in groups:
                        whole = is_whole(group, body)
                        for record in unpack_records(group, body) if whole else self._partly(name, group, body, end):
                            position, of_last = record.position + 1, record.engine_epoch
                            if record.position >= start:
                                yield record
                        epoch = checked_epoch(group, of_last, epoch, self.folder / name.file_name)
                if following is not None and position != following.first:
                    raise self._next_is(following.first, position)
        except Misplaced as found:
            raise what_became(self, name, found, end.head.position) from None
        if is_cut:
            raise lost(self, end)

    def _partly(self, name: SegmentName, group: Group, body: bytes, end: End) -> Iterator[Record]:
        """The records of a damaged group before the damage; then that is raised. What they continue, the groups before it tell."""
        head = self.head_before(name)
        with contextlib.closing(self._groups(name, name.first, end)) as groups:
            for each, its_body in groups:
                if each.position >= group.position and each.num_records:
                    break
                head = head_behind(each, its_body, head)
        yield from records_before_damage(group, body, head, self.folder / name.file_name)

    def _next_is(self, first: int, position: int) -> Misplaced:
        what = f"is not there; the next segment has {first}"
        return Misplaced(str(damaged(self.folder, position, "deleted", what)), position=position, kind="deleted")

    def first_damage(self, found: JournalCorrupt) -> JournalCorrupt:
        """Where the damage begins that was found somewhere in the stream: what whoever reads all of it is told, for he is told so first."""
        archives = self.archives()
        start = archives[-1].head if archives else EMPTY_HEAD
        try:
            end = self.end()
            for _ in verified(self.read(start.position, None), start, end and end.head, is_whole=False):
                pass
        except JournalCorrupt as first:
            return name_it(first, str(self.root))
        except JournalError:  # what was found is the least that is wrong
            pass
        return found

    def _not_there(self, start: int, first: int) -> JournalCorrupt:
        try:
            self.mark()
        except MarkLost as lost:
            return lost_beginning(self, lost, first)
        return not_there(self, start, first)

    def _groups(self, name: SegmentName, start: int, end: End) -> Generator[tuple[Group, bytes], None, None]:
        """The groups of a segment, from the one that holds `start` on, up to `end`."""
        try:
            if name.sealed:
                yield from self._sealed_groups(name, start)
            else:
                yield from self._unsealed_groups(name, start, end)
        except FileNotFoundError as error:
            if name.sealed or not (self.folder / name._replace(sealed=True).file_name).exists():
                raise explain(error, self.folder / name.file_name, "read") from error
            yield from self._groups(name._replace(sealed=True), start, end)  # it was sealed meanwhile
        except NoFile as error:
            raise without_segment(self.folder / name.file_name, name.first, error) from error
        except OSError as error:
            raise explain(error, self.folder / name.file_name, "read") from error

    def _sealed_groups(self, name: SegmentName, start: int) -> Iterator[tuple[Group, bytes]]:
        sealed = SealedSegment(self.files, self.folder / name.file_name, name.first)
        try:
            yield from sealed.groups(start)
        finally:
            sealed.close()

    def _unsealed_groups(self, name: SegmentName, start: int, end: End) -> Iterator[tuple[Group, bytes]]:
        path = self.folder / name.file_name
        fd = self.files.open(path, READ)
        try:
            size = self.files.size(fd)
            limit = end.tail.end if name.first == end.segment else size
            source = FileBytes(self.files, fd, min(limit, size))
            header = read_header(self.files, fd, path, name.first)
            yield from walk(source, Place(header.size, name.first), path, start)
            if limit > size:
                raise cut_off(self, name, end)
        except JournalCorrupt as damage:
            if damage.kind != "truncated" or name.first != end.segment or isinstance(damage, EndInDoubt):
                raise
            raise cut_off(self, name, end) from damage
        finally:
            close_read(self.files, fd)
