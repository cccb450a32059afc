"""The port that every store implements, and what a store promises.

A store holds streams; one engine writes one stream. `append` is atomic: all records or none, at exactly the expected
head, by the owner of the stream's highest engine epoch. When `append` returns, the records are durable.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from refold.journal.record import Head, Record

DEFAULT_STREAM = "main"


@runtime_checkable
class JournalReader(Protocol):
    """The half that only reads. It works on a journal that is being written."""

    def read(self, stream: str = DEFAULT_STREAM, start: int = 0, stop: int | None = None) -> Iterator[Record]:
        """Records at positions start <= p < stop, in order. Nothing beyond the head is an empty iterator.

        Raises:
            JournalError: the storage failed.
        """
        ...

    def head(self, stream: str = DEFAULT_STREAM) -> Head:
        """The end of the stream; `EMPTY_HEAD` of one that was never opened."""
        ...

    def close(self) -> None:
        """Free files and connections. Idempotent."""
        ...


@runtime_checkable
class JournalStore(JournalReader, Protocol):
    """A reader that also writes."""

    def open_stream(self, stream: str = DEFAULT_STREAM) -> Head:
        """Take the stream over: raise its engine epoch by one and return the head, in that epoch.

        Raises:
            JournalOwned: a live engine holds the stream.
        """
        ...

    def append(self, stream: str, records: Sequence[Record]) -> Head:
        """Add records that continue the head, all or none; durable on return.

        Raises:
            Fenced: the stream was opened by someone else since.
            PositionConflict: the first record does not continue the head.
            JournalError: the storage failed; `head` tells whether the records are in.
        """
        ...


@runtime_checkable
class ClaimingStore(JournalStore, Protocol):
    """A store that can keep others out of a stream before it's taken over, so that a journal that is refused stays what it was.

    It's optional: other stores are taken over first, and read then.
    """

    def claim_stream(self, stream: str = DEFAULT_STREAM) -> bool:
        """Keep other engines out of a stream and look at its end, without a change to it. `open_stream` comes next, or `close`.

        Returns whether its records can be read now as `open_stream` will leave them; it may find more of them behind the head. False:
        an erasure that was killed half way is to be finished first.

        Raises:
            JournalOwned: a live engine holds the stream.
            JournalCorrupt: its end isn't what was acknowledged.
            JournalError: it can't be read.
        """
        ...


class Erased(NamedTuple):
    """What an erasure has come to: the head after it, and whether the erased bytes are gone from the store's own files.

    If they aren't, `left` says where they may still be and what to do about it.
    """

    head: Head
    left: str = ""

    @property
    def is_gone(self) -> bool:
        """Whether nothing of it is left in the store."""
        return not self.left


@runtime_checkable
class ErasingStore(JournalStore, Protocol):
    """A store that can erase content. It's optional: without it, nothing that was said can be redacted."""

    def erase_content(self, stream: str, records: Sequence[Record], contents: Mapping[int, bytes | None]) -> Erased:
        """Append `records`, which say that content was redacted, and put `contents` in its place: all or nothing.

        Args:
            stream: open for writing here.
            records: continue the head, as for `append`.
            contents: what is left, by the position of records before the head; None where nothing is. Their `content_hash`
                stays.

        Raises:
            As `append`. The store's journal is then as it was, or `head` tells that all is done.
        """
        ...
