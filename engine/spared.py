"""The records that a snapshot spares the engine: are they still what was written?

An engine that opens by a snapshot reads what lies behind it, and would go on appending to a journal whose older records were
changed. The chain tells, without any folding. A journal of a few records is checked before anything is appended to it; a long one
beside the engine, at ease, and what is found stops the engine as a failed disk does.

An engine that lives shorter than that takes leaves the rest unchecked. If each began at the first record, many short runs would
look at the same ones for ever. So a long journal is checked by parts, and each engine begins with the part whose turn it is by its
epoch, before it opens. The turns go round by the power of two above the number of parts, which stays what it is while the journal
grows: within so many openings somebody has looked at every record. `refold verify` reads everything at once.
"""

import threading
from collections.abc import Callable, Iterator
from itertools import islice

from refold.engine.folding import head_before, warn
from refold.engine.snapshotting import at_ease
from refold.journal.archives import border_of
from refold.journal.errors import JournalCorrupt, JournalError
from refold.journal.naming import place_of_reader
from refold.journal.record import Head, Record
from refold.journal.store import JournalReader
from refold.journal.verify import verified_part

FEW_RECORDS = 20_000
"""So many are checked before the engine opens: 0.2 s, at 10 us each. Of more, a twentieth of that: 10 ms."""

_PARTS_IN_FEW = 20


def _part_records() -> int:
    return max(1, FEW_RECORDS // _PARTS_IN_FEW)


class SparedRecords:
    """All records of one stream as it was opened, from the border of what is archived on. Nothing to do if none was spared."""

    __slots__ = ("_border", "_closing", "_head", "_is_any", "_reader", "_stream", "_thread")

    def __init__(self, reader: JournalReader, stream: str, head: Head, from_snapshot: int) -> None:
        """`head`: where the stream ended when it was opened; `from_snapshot`: how many records weren't read."""
        self._reader, self._stream, self._head = reader, stream, head
        self._border = border_of(reader, stream)
        self._is_any = from_snapshot > self._border.position
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def _are_few(self) -> bool:
        return self._num <= FEW_RECORDS

    @property
    def _num(self) -> int:
        return self._head.position - self._border.position

    @property
    def _first(self) -> int:
        """Where the part begins whose turn it is."""
        num_parts = -(-self._num // _part_records())
        period = 1 << (num_parts - 1).bit_length()
        part = self._head.engine_epoch % period
        return self._border.position + _part_records() * (part if part < num_parts else part - period // 2)

    def check_before_opening(self) -> None:
        """Check them now, if they are few; if they are many, some of them.

        Raises:
            JournalCorrupt: one isn't what was written.
            JournalError: they can't be read.
        """
        if not self._is_any:
            return
        if self._are_few:
            reader, stream, head = self._reader, self._stream, self._head
            found = verified_part(reader, stream, self._border, head.position, head, is_whole=True)
        else:
            found = islice(self._round(), _part_records())
        for _ in found:
            pass

    def _round(self) -> Iterator[Record]:
        """All of them, from `_first` on to the end, and from the border up to there.

        The engine may redact meanwhile, so whether a content is attested isn't asked.
        """
        middle = head_before(self._reader, self._stream, self._first)
        for start, end in ((middle, self._head), (self._border, middle)):
            yield from verified_part(self._reader, self._stream, start, end.position, end)

    def check_many(self, on_damage: Callable[[JournalCorrupt], None]) -> None:
        """If they are many, check them in a thread of its own, which calls `on_damage` if one isn't what was written."""
        if self._is_any and not self._are_few:
            self._thread = threading.Thread(target=self._run, args=(on_damage,), name="refold-spared", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self, on_damage: Callable[[JournalCorrupt], None]) -> None:
        try:
            for _ in at_ease(self._round(), self._closing):
                if self._closing.is_set():
                    return
        except JournalCorrupt as error:
            on_damage(error)
        except JournalError as error:
            warn(
                "spared_records_unchecked",
                journal=place_of_reader(self._reader),
                stream=self._stream,
                reason=str(error)[:200],
            )
