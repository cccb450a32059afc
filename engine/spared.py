"""The records that a snapshot spares the engine: are they still what was written?

An engine that opens by a snapshot reads what lies behind it, and would go on appending to a journal whose older records were
changed. The chain tells, without any folding. A journal of a few records is checked before anything is appended to it; a long one
beside the engine, at ease, and what is found stops the engine as a failed disk does. An engine that lives shorter than that takes
leaves the rest unchecked: the next one begins again, and `refold verify` reads everything.
"""

import threading
from collections.abc import Callable

from refold.engine.folding import warn
from refold.engine.snapshotting import at_ease
from refold.journal.archives import border_of
from refold.journal.errors import JournalCorrupt, JournalError
from refold.journal.record import Head
from refold.journal.store import JournalReader
from refold.journal.verify import verified

FEW_RECORDS = 20_000
"""So many are checked before the engine opens: 0.2 s, at 10 us each."""


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
        return self._head.position - self._border.position <= FEW_RECORDS

    def check_few(self) -> None:
        """Check them now, if they are few.

        Raises:
            JournalCorrupt: one isn't what was written.
            JournalError: they can't be read.
        """
        if self._is_any and self._are_few:
            records = self._reader.read(self._stream, self._border.position, self._head.position)
            for _ in verified(records, self._border, self._head):
                pass

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
        """The engine may redact meanwhile, so whether a content is attested isn't asked."""
        try:
            records = self._reader.read(self._stream, self._border.position, self._head.position)
            for _ in at_ease(verified(records, self._border, self._head, is_whole=False), self._closing):
                if self._closing.is_set():
                    return
        except JournalCorrupt as error:
            on_damage(error)
        except JournalError as error:
            warn("spared_records_unchecked", stream=self._stream, reason=str(error)[:200])
