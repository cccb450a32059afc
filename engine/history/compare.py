"""Two journals side by side: where they part, and in what.

What was decided is compared, event by event; when a record was made is not, unless asked for: two runs never share a clock.
If the two are copies of one journal up to some place, their hash chains say so, and that place is found without reading what
is before it.
"""

from bisect import bisect_left
from collections.abc import Callable
from itertools import zip_longest
from typing import Literal, NamedTuple

import msgspec

from refold.engine.history.causes import class_of
from refold.engine.history.differences import Difference, differences, event_differences
from refold.engine.history.replay import unheard
from refold.journal.codec import decode
from refold.journal.events import Event, RequestSubmitted, SessionTurnEnded
from refold.journal.record import Record
from refold.journal.store import DEFAULT_STREAM, JournalReader


class Parting(NamedTuple):
    """The first record that isn't the same in both. One that a journal doesn't have is None."""

    position: int
    kind: Literal["events", "length", "header"]
    left: Record | None
    right: Record | None
    differences: list[Difference]
    cause: str = ""

    @property
    def words(self) -> str:
        """One line."""
        if self.kind == "length":
            shorter = "left" if self.left is None else "right"
            return f"the {shorter} journal ends at {self.position}, the other goes on"
        first = self.differences[0].words("left", "right") if self.differences else "in nothing told"
        return f"they part at record {self.position}: {first}"


class Compared(NamedTuple):
    """`num_alike` records from the start are the same; `num_copied` of them are known by their hashes. `parting` None: all are."""

    num_alike: int
    num_copied: int
    parting: Parting | None


def compare(
    left: JournalReader,
    right: JournalReader,
    streams: tuple[str, str] = (DEFAULT_STREAM, DEFAULT_STREAM),
    *,
    with_times: bool = False,
    on_record: Callable[[], object] = unheard,
) -> Compared:
    """Find where two journals part.

    Raises:
        JournalError: one of them can't be read.
        JournalCorrupt: one holds no events where they part.
    """
    lengths = left.head(streams[0]).position, right.head(streams[1]).position
    copied = _num_copied(left, right, streams, min(lengths))
    pairs = zip_longest(left.read(streams[0], copied, lengths[0]), right.read(streams[1], copied, lengths[1]))
    position = copied
    for position, (one, other) in enumerate(pairs, copied):
        parting = _parting(position, one, other, with_times=with_times)
        if parting is not None:
            return Compared(position, copied, parting)
        on_record()
    return Compared(min(lengths), copied, None)


def _num_copied(left: JournalReader, right: JournalReader, streams: tuple[str, str], shortest: int) -> int:
    """How many records from the start have the same hash on both sides, so that all before them are the same too."""

    def differ(position: int) -> bool:
        pair = [_hash_at(reader, stream, position) for reader, stream in zip((left, right), streams, strict=True)]
        return pair[0] is None or pair[0] != pair[1]

    return bisect_left(range(shortest), True, key=differ)


def _hash_at(reader: JournalReader, stream: str, position: int) -> bytes | None:
    return next((record.hash for record in reader.read(stream, position, position + 1)), None)


def _parting(position: int, one: Record | None, other: Record | None, *, with_times: bool) -> Parting | None:
    if one is None or other is None:
        return Parting(position, "length", one, other, [])
    if one.body == other.body and one.content == other.content:
        return _header_parting(position, one, other) if with_times else None
    left, right = decode(one), decode(other)
    if not with_times:
        left, right = _timeless(left), _timeless(right)
    if left == right:
        return _header_parting(position, one, other) if with_times else None
    return Parting(position, "events", one, other, event_differences(left, right), class_of(left, right))


def _header_parting(position: int, one: Record, other: Record) -> Parting | None:
    names = ("engine_epoch", "schema_version", "time_ns")
    found = differences({n: getattr(one, n) for n in names}, {n: getattr(other, n) for n in names})
    return Parting(position, "header", one, other, found) if found else None


def _timeless(events: list[Event]) -> list[Event]:
    """The same facts, whenever they were."""
    return [
        msgspec.structs.replace(event, **{field: 0}) if (field := _TIMES.get(type(event))) else event
        for event in events
    ]


_TIMES: dict[type[Event], str] = {RequestSubmitted: "arrival_ns", SessionTurnEnded: "time_ns"}
