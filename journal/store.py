"""The port that every store implements, and what a store promises.

A store holds streams; one engine writes one stream. `append` is atomic: all records or none, at exactly the expected
head, by the owner of the stream's highest engine epoch. When `append` returns, the records are durable.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

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
