"""The feed: all streams of a store as one sequence, for a reader that follows several engines at once.

Its cursor is a vector: for each stream, the position of the next record to read. A poll asks for the heads, and yields what
lies between the cursor and them. From this follows:

- **No gaps.** Positions are dense within a stream, so a record between the cursor and a head exists and is committed. A
  sequence over all streams would be given out before its commit, and its reader could step over a number that appears
  later: it would have to wait for every transaction that might still hold one, a forgotten one included.
- **No stalls.** What is committed is seen by the next poll. Whoever else has a transaction open, for an hour perhaps, holds
  neither a position nor a head.
- **The order** is that of positions within a stream, always. Between streams there is none to keep: engines on different
  streams share nothing. What one poll finds is merged by the writers' clocks (a stream's never runs backwards here), and by
  the stream's name where they agree; two readers that poll at different moments may see streams interleaved differently.
- **Resuming** from a cursor gives each later record, once. A cursor is a plain dict of ints, to be kept wherever the reader
  keeps what it made of the records.

An append pays nothing for it. New streams are found by themselves.
"""

import heapq
from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol, runtime_checkable

from refold.journal.record import Head, Record
from refold.journal.store import JournalReader


@runtime_checkable
class StreamsReader(JournalReader, Protocol):
    """A reader that knows its streams; all of refold's do."""

    def streams(self) -> list[str]:
        """The names of all streams."""
        ...


@runtime_checkable
class HeadsReader(StreamsReader, Protocol):
    """One that knows all heads at once."""

    def heads(self) -> dict[str, Head]:
        """The end of every stream, by its name."""
        ...


class FeedItem(NamedTuple):
    """A record, and the stream that it belongs to."""

    stream: str
    record: Record


class Feed:
    """Follows all streams of a store from a cursor on."""

    __slots__ = ("_cursor", "_reader")

    def __init__(self, reader: StreamsReader, cursor: Mapping[str, int] | None = None) -> None:
        """Start behind what `cursor` has seen: at the beginning of every stream that it doesn't name."""
        self._reader = reader
        self._cursor = dict(cursor or {})

    @property
    def cursor(self) -> dict[str, int]:
        """The next position of each stream, what was yielded last included: keep it to resume behind it."""
        return dict(self._cursor)

    def poll(self) -> Iterator[FeedItem]:
        """What was committed since, and then the end: ask again for more.

        Raises:
            JournalError: the storage failed. The cursor holds what was yielded before.
        """
        news = [
            self._news(stream, start, head.position)
            for stream, head in heads_of(self._reader).items()
            if (start := self._cursor.get(stream, 0)) < head.position
        ]
        for _, _, item in heapq.merge(*news, key=lambda each: each[:2]):
            self._cursor[item.stream] = item.record.position + 1
            yield item

    def _news(self, stream: str, start: int, stop: int) -> Iterator[tuple[int, str, FeedItem]]:
        """A stream's records with the key that they are merged by; it never falls along the stream."""
        latest_ns = 0
        for position, record in enumerate(self._reader.read(stream, start, stop), start):
            assert record.position == position, f"stream {stream!r} has {record.position} in the place of {position}"
            latest_ns = max(latest_ns, record.time_ns)
            yield latest_ns, stream, FeedItem(stream, record)


def heads_of(reader: StreamsReader) -> dict[str, Head]:
    """The end of every stream, by its name."""
    if isinstance(reader, HeadsReader):
        return reader.heads()
    return {stream: reader.head(stream) for stream in reader.streams()}
