"""What two runs never have in common, however alike they decide: the seeds that their engines drew, ids that nobody gave, digests.

Two runs of one program are compared for their decisions. An engine that is given no seed draws a root seed, and from it the seeds of
requests that bring none; a request without an id gets a random one. Such a difference by nature is told as a note, and evened
out, so that the first difference of another kind comes to light. A recorded digest of the state covers ids, seeds and arrival
times: it can't be compared where one of these differs.
"""

import re
from collections.abc import Iterator
from typing import Any

import msgspec

from refold.engine.history.plain import safe
from refold.journal.events import EngineOpened, Event, RequestSubmitted, SessionExtended, StateDigest

_RANDOM_ID = re.compile(r"[0-9a-f]{32}(?:#[0-9]+)?", re.ASCII)
ROOT_SEED, SEED, ID, DIGEST = "root seed", "seed", "id", "digest"


class Identity:
    """Evens two journals out, record by record in their order, and remembers what it had to.

    `notes` are sentences, each told once.
    """

    def __init__(self) -> None:
        self._root_seeds = (0, 0)
        self._drawn: dict[int, tuple[int, int]] = {}
        self._told: dict[str, str] = {}

    @property
    def notes(self) -> list[str]:
        """What differed by nature."""
        return list(self._told.values())

    def evened(self, left: list[Event], right: list[Event]) -> tuple[list[Event], list[Event]]:
        """Both sides of a record, the right one with the left one's identity wherever they differ by nature."""
        if len(left) != len(right):
            return left, right
        return left, [self._evened(one, other) for one, other in zip(left, right, strict=True)]

    def _evened(self, one: Event, other: Event) -> Event:
        if type(one) is not type(other):
            return other
        changes = dict(self._changes(one, other))
        return msgspec.structs.replace(other, **changes) if changes else other

    def _changes(self, one: Any, other: Any) -> Iterator[tuple[str, Any]]:
        """Fields of the other event that differ by nature, each with the one's value."""
        if isinstance(one, EngineOpened):
            self._root_seeds = one.root_seed, other.root_seed
            if one.root_seed != other.root_seed:
                self._tell(ROOT_SEED, f"the engines had different seeds: {one.root_seed} and {other.root_seed}")
                yield "root_seed", one.root_seed
        elif isinstance(one, RequestSubmitted):
            yield from self._of_request(one, other)
        elif isinstance(one, SessionExtended):
            yield from self._of_sampling(one, other)
        elif isinstance(one, StateDigest) and self._told and one.digest != other.digest:
            self._tell(DIGEST, "digests of the state cover seeds and ids, and were not compared")
            yield "digest", one.digest

    def _of_request(self, one: RequestSubmitted, other: RequestSubmitted) -> Iterator[tuple[str, Any]]:
        from refold.engine.submissions import drawn_seed  # noqa: PLC0415 - who compares few journals needs few modules

        if one.handle == other.handle:
            left, right = (drawn_seed(root, one.handle) for root in self._root_seeds)
            self._drawn[one.handle] = left, right
            yield from self._of_sampling(one, other)
        ids = one.request_id, other.request_id
        if ids[0] != ids[1] and all(map(_RANDOM_ID.fullmatch, ids)):
            self._tell(ID, f"requests without an id got random ones, such as {safe(ids[0])} and {safe(ids[1])}")
            yield "request_id", one.request_id

    def _of_sampling(self, one: Any, other: Any) -> Iterator[tuple[str, Any]]:
        seeds = one.sampling.seed, other.sampling.seed
        if seeds[0] != seeds[1] and seeds == self._drawn.get(one.handle):
            self._tell(SEED, "requests without a seed got drawn ones, which differ as the engines' do")
            yield "sampling", msgspec.structs.replace(other.sampling, seed=seeds[0])

    def _tell(self, what: str, sentence: str) -> None:
        self._told.setdefault(what, sentence)
