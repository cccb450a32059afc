"""Two journals side by side: where they part, and in what.

What was decided is compared, event by event; when a record was made is not, unless asked for: two runs never share a clock. Nor do
they share seeds and ids that nobody gave: those are told as notes (`refold.engine.history.identity`), unless exactness is asked for.
If the two are copies of one journal up to some place, their hash chains say so, and that place is found by halving. Then the
records before it are checked against their hashes, on both sides: one that was edited has kept the hash of what it was.

The left one is taken for the right one: a class says what is wrong with the other.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import Literal, NamedTuple

import msgspec

from refold.engine.history.causes import class_of
from refold.engine.history.differences import Difference, differences, event_differences
from refold.engine.history.identity import Identity
from refold.engine.history.replay import unheard
from refold.journal.codec import decode
from refold.journal.errors import JournalCorrupt, JournalError
from refold.journal.events import Event, RequestSubmitted, SessionTurnEnded
from refold.journal.record import Record
from refold.journal.store import DEFAULT_STREAM, JournalReader
from refold.journal.verify import Chain, attestation_of


class Parting(NamedTuple):
    """The first record that isn't the same in both. One that a journal doesn't have is None.

    Attributes:
        kind: what isn't the same; `bytes` if one side isn't what was written there, by its own hashes.
        cause: the class of it, see `refold.engine.history.causes`.
        damage: of `bytes`, which side it is and what is wrong with it.
    """

    position: int
    kind: Literal["events", "length", "header", "bytes"]
    left: Record | None
    right: Record | None
    differences: list[Difference]
    cause: str = ""
    damage: str = ""

    @property
    def words(self) -> str:
        """One line."""
        if self.kind == "bytes":
            return self.damage
        if self.kind == "length":
            shorter = "left" if self.left is None else "right"
            return f"the {shorter} journal ends at {self.position}, the other goes on"
        first = self.differences[0].words("left", "right") if self.differences else "in nothing told"
        return f"they part at record {self.position}: {first}"


class Compared(NamedTuple):
    """`num_alike` records from the start are the same; `num_copied` of them are known by their hashes. `parting` None: all are.

    `notes` say in what they differ by nature: seeds and ids that were drawn.
    """

    num_alike: int
    num_copied: int
    parting: Parting | None
    notes: tuple[str, ...] = ()


def compare(
    left: JournalReader,
    right: JournalReader,
    streams: tuple[str, str] = (DEFAULT_STREAM, DEFAULT_STREAM),
    *,
    with_times: bool = False,
    exact: bool = False,
    on_record: Callable[[], object] = unheard,
) -> Compared:
    """Find where two journals part. `exact`: what differs by nature counts too.

    Raises:
        JournalError: one of them can't be read.
    """
    lengths = left.head(streams[0]).position, right.head(streams[1]).position
    copied = _num_copied(left, right, streams, min(lengths))
    sides = [
        _Side(name, reader, stream, length)
        for name, reader, stream, length in zip(("left", "right"), (left, right), streams, lengths, strict=True)
    ]
    identity = None if exact else Identity()
    for position, (one, other) in enumerate(zip_longest(*(side.records() for side in sides))):
        damaged = next((side for side in sides if side.damage is not None), None)
        if damaged is not None:
            found = _damage(damaged, sides, position)
            return Compared(position, min(copied, position), found, _notes(identity))
        parting = None if position < copied else _parting(position, one, other, identity, with_times=with_times)
        if parting is not None:
            return Compared(position, copied, _explained(parting, sides), _notes(identity))
        on_record()
    return Compared(min(lengths), copied, None, _notes(identity))


def _notes(identity: Identity | None) -> tuple[str, ...]:
    return () if identity is None else tuple(identity.notes)


class _Side:
    """One of the two journals. `damage` is what its records came to an end with, if that wasn't its end."""

    def __init__(self, name: str, reader: JournalReader, stream: str, length: int) -> None:
        self.name = name
        self.damage: JournalCorrupt | None = None
        self._reader, self._stream, self._length = reader, stream, length

    def records(self) -> Iterator[Record | None]:
        """Each record, checked against its hash; None in the place of the first that isn't what was written."""
        try:
            chain = Chain()
            chain.contents = attestation_of(self._reader, self._stream, looks_ahead=False)
            yield from chain.follow(self._reader.read(self._stream, 0, self._length))
        except JournalCorrupt as error:
            self.damage = error
            yield None

    def at(self, position: int) -> tuple[Record | None, list[Event]]:
        """A record as it is there, and its events; none, if it can't be read."""
        try:
            found = next(self._reader.read(self._stream, position, position + 1), None)
            return found, [] if found is None else decode(found)
        except JournalError:
            return None, []


def _damage(damaged: _Side, sides: Sequence[_Side], position: int) -> Parting:
    """The place where a side isn't what was written, beside what the other side has there."""
    error = damaged.damage
    assert error is not None, damaged.name
    (one, left), (other, right) = (side.at(position) for side in sides)
    found = event_differences(left, right) if left and right else []
    return Parting(position, "bytes", one, other, found, error.kind, f"of the {damaged.name} journal, {error}")


def _explained(parting: Parting, sides: Sequence[_Side]) -> Parting:
    """The parting, its class told by what comes next, if that says more than the records themselves."""
    if parting.kind != "events":
        return parting
    if parting.differences and parting.differences[0].path.startswith("EngineOpened.config"):
        return parting._replace(cause="config-drift")
    _, next_left = sides[0].at(parting.position + 1)
    _, right = sides[1].at(parting.position)
    if next_left and _timeless(next_left) == _timeless(right):
        return parting._replace(cause="lost-event")
    return parting


def _num_copied(left: JournalReader, right: JournalReader, streams: tuple[str, str], shortest: int) -> int:
    """How many records from the start have the same hash on both sides, so that all before them are the same too."""

    def differ(position: int) -> bool:
        pair = [_hash_at(reader, stream, position) for reader, stream in zip((left, right), streams, strict=True)]
        return pair[0] is None or pair[0] != pair[1]

    return bisect_left(range(shortest), True, key=differ)


def _hash_at(reader: JournalReader, stream: str, position: int) -> bytes | None:
    return next((record.hash for record in reader.read(stream, position, position + 1)), None)


def _parting(
    position: int, one: Record | None, other: Record | None, identity: Identity | None, *, with_times: bool
) -> Parting | None:
    if one is None or other is None:
        return Parting(position, "length", one, other, [], "truncated" if other is None else "")
    if one.body == other.body and one.content == other.content:
        return _header_parting(position, one, other) if with_times else None
    sides = list[list[Event]]()
    for name, record in (("left", one), ("right", other)):
        try:
            sides.append(decode(record))
        except JournalCorrupt as error:
            return Parting(position, "bytes", one, other, [], error.kind, f"of the {name} journal, {error}")
    left, right = sides
    if not with_times:
        left, right = _timeless(left), _timeless(right)
    if identity is not None:
        left, right = identity.evened(left, right)
    if left == right:
        return _header_parting(position, one, other) if with_times else None
    return Parting(position, "events", one, other, event_differences(left, right), class_of(right, left))


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
