"""The trailing projection of one stream: from wherever its checkpoint is to the journal's head, batch by batch.

It may be stopped, killed or overtaken at any instant. Its memory is saved now and then with a checkpoint; in between, whoever goes
on folds the records since then once more, without their rows.

A read model whose journal isn't the one that it was made of (the last record projected is another, or gone), or that an older
version of this code made, is built again beside the one that is shown, and then shown.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec

from refold.journal.codec import decode
from refold.journal.ends import EndInDoubt, check_end
from refold.journal.errors import JournalCorrupt
from refold.journal.record import EMPTY_HEAD, GENESIS_HASH, Head, Record, head_after
from refold.journal.store import JournalReader
from refold.journal.verify import verified_part
from refold.projections.audit.project import project
from refold.projections.audit.rows import Rows
from refold.projections.audit.schema import PROJECTION_VERSION
from refold.projections.audit.story import Story, mark_written, pack, unpack
from refold.projections.audit.writer import AuditWriter, Checkpoint

_SAVE_EVERY_RECORDS = 2_048
_MAX_RECORDS = 4_096


class Batch(NamedTuple):
    """A batch that got in: where it ended, how many records and rows it had."""

    checkpoint: Checkpoint
    num_records: int
    num_rows: int


class TrailingProjection:
    """Follows one stream into one database. One thread at a time."""

    def __init__(
        self, reader: JournalReader, writer: AuditWriter, stream: str, *, max_rows: int = 20_000, rebuilds: bool = False
    ) -> None:
        """Start nothing yet.

        Args:
            reader: of the journal.
            writer: of the database for the rows.
            stream: which stream.
            max_rows: about how many rows a batch may have; the last record of a batch goes in whole.
            rebuilds: build anew, whatever is there.
        """
        self._reader, self._writer, self._stream = reader, writer, stream
        self._max_rows = max_rows
        self._rebuilds = rebuilds
        self._checkpoint: Checkpoint | None = None
        self._story: Story | None = None
        self._end = EMPTY_HEAD

    def catch_up(self, stop: int | None = None, on_record: Callable[[], None] | None = None) -> Iterator[Batch]:
        """Project what there is up to position `stop`, or to the head; a batch is in when it is yielded.

        Raises:
            JournalError: the database failed, or the journal can't be read. A damaged record is no error: the checkpoint tells.
        """
        self._end = self._reader.head(self._stream)
        head = self._end.position if stop is None else min(self._end.position, stop)
        while True:
            self._checkpoint = before = self._checkpoint or self._find()
            if before.position >= head and before.is_live:
                return
            try:
                done = self._batch(before, head, on_record) if before.position < head else Batch(before, 0, 0)
            except BaseException:  # the story may have run ahead of the rows: begin from what is in the database
                self._checkpoint = self._story = None
                raise
            if done is None:  # somebody else was there
                self._checkpoint = self._story = None
                continue
            self._checkpoint = done.checkpoint
            yield done
            if done.checkpoint.position >= head or done.checkpoint.damage is not None:
                if done.checkpoint.is_live:
                    return
                self._show(done.checkpoint)
                if done.checkpoint.damage is not None:  # nothing more can be had, however often it is looked for
                    return

    # -- where to go on -----------------------------------------------------------------------------------------------

    def _find(self) -> Checkpoint:
        """The projection to go on with."""
        self._story = None
        for old in self._writer.retired(self._stream):
            self._clear(old.projection_id)
        live = self._writer.live(self._stream)
        if live is not None and not self._rebuilds and self._is_sound(live):
            return live
        for projection_id in self._writer.unlisted():
            self._clear(projection_id)
        if live is None:
            return self._writer.begin(self._stream, is_live=True)
        return self._shadow()

    def _shadow(self) -> Checkpoint:
        """One beside the live one: begun before, if that was sound."""
        shadow = self._writer.shadow(self._stream)
        if shadow is not None and not (self._is_sound(shadow) and shadow.damage is None):
            self._clear(shadow.projection_id)
            shadow = None
        return shadow or self._writer.begin(self._stream, is_live=False)

    def _is_sound(self, checkpoint: Checkpoint) -> bool:
        """Whether this code made it, of this journal."""
        if checkpoint.version != PROJECTION_VERSION:
            return False
        if not checkpoint.position:
            return True
        try:
            last = next(iter(self._reader.read(self._stream, checkpoint.position - 1, checkpoint.position)), None)
        except JournalCorrupt:
            return False
        return last is not None and last.hash.hex() == checkpoint.head_hash

    def _remember(self, checkpoint: Checkpoint) -> Story:
        """The story at the checkpoint: as it was saved, and the records since then."""
        start, story = 0, Story()
        body = self._writer.saved_story(checkpoint)
        if body is not None:
            try:
                start, story = checkpoint.state_position, unpack(body)
            except msgspec.DecodeError:
                start, story = 0, Story()
        for record in self._reader.read(self._stream, start, checkpoint.position):
            project(story, Rows(checkpoint.projection_id), record, decode(record))
        return mark_written(story)

    def _show(self, shadow: Checkpoint) -> None:
        """Show what was built, and let the old one go."""
        self._writer.promote(shadow)
        self._rebuilds = False
        self._checkpoint = self._story = None

    def _clear(self, projection_id: int) -> None:
        for _ in self._writer.discard(projection_id):
            pass

    # -- one batch ----------------------------------------------------------------------------------------------------

    def _batch(self, before: Checkpoint, stop: int, on_record: Callable[[], None] | None) -> Batch | None:
        """Project one batch; None if the checkpoint was moved by somebody else.

        What happened before is remembered if there's a record to go on with: behind damage there's none, however often it is looked for.
        """
        rows, damage = Rows(before.projection_id), None
        head = Head(before.position, bytes.fromhex(before.head_hash) or GENESIS_HASH, before.engine_epoch)
        if self._story is None and self._has_next(head):
            self._story = self._remember(before)
        story = self._story
        last: Record | None = None
        try:
            for record in self._records(head, stop):
                if story is None:  # it was mended this moment: the next batch begins with it
                    break
                project(story, rows, record, decode(record))
                last, head = record, head_after(record)
                if on_record is not None:
                    on_record()
                if rows.size >= self._max_rows or head.position - before.position >= _MAX_RECORDS:
                    break
        except JournalCorrupt as error:
            damage = error
        after = before._replace(
            position=head.position,
            head_hash=head.hash.hex(),
            engine_epoch=head.engine_epoch,
            time_ns=before.time_ns if last is None else last.time_ns,
            num_events=before.num_events if story is None else story.num_events,
            num_request_events=before.num_request_events if story is None else story.num_request_events,
            journal_head=max(stop, head.position),
            damage=None if damage is None else " ".join(str(damage).split()),
            damage_position=None if damage is None else damage.position,
        )
        saved = None
        if story is not None and after.position - before.state_position >= _SAVE_EVERY_RECORDS:
            after, saved = after._replace(state_position=after.position), pack(story)
        changes = [] if story is None else rows.changes(story)
        if not self._writer.commit(before, after, changes, rows.redacted, saved):
            return None
        return Batch(after, after.position - before.position, sum(len(change.rows) for change in changes))

    def _has_next(self, head: Head) -> bool:
        try:
            return any(True for _ in verified_part(self._reader, self._stream, head, head.position + 1))
        except JournalCorrupt:
            return False

    def _records(self, head: Head, stop: int) -> Iterator[Record]:
        """All of them, checked.

        Raises:
            JournalCorrupt: one isn't what was written, or the stream ends before `stop`.
        """
        is_whole = stop == self._end.position
        yield from verified_part(self._reader, self._stream, head, stop, self._end if is_whole else None)
        if is_whole:
            self._check_end()

    def _check_end(self) -> None:
        """See to it that nothing proves a loss behind the stream's end. One that nobody vouches for proves none.

        Raises:
            EndInDoubt: something does.
        """
        try:
            check_end(self._reader, self._stream)
        except EndInDoubt as error:
            if error.kind != "unmarked":
                raise
