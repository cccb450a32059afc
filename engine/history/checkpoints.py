"""Checkpoints in memory: folded states at some positions, so that no seek has to fold far.

A checkpoint is the state's image, in bytes, and the head behind it. They are for one process and one reader, so nothing about
them needs proof. There is a bound on what they take together: beyond it every second one goes, and from then on they are
made half as often.
"""

from bisect import bisect_right

from refold.engine.folding import Base, beginning
from refold.journal.record import Head
from refold.projections.outbox import Outbox
from refold.projections.totals import Totals
from refold.scheduler.snapshot import Folded, pack, unpack
from refold.scheduler.state import State

EVERY_REQUEST_EVENTS = 12_000
MAX_BYTES = 256 << 20


class Checkpoints:
    """What is kept of one journal. `every` is how many request-events lie between two of them."""

    __slots__ = ("_bytes", "_heads", "_images", "every")

    def __init__(self, every: int = EVERY_REQUEST_EVENTS) -> None:
        self.every = every
        self._bytes = 0
        self._heads: list[Head] = []
        self._images: list[bytes] = []

    def __len__(self) -> int:
        return len(self._heads)

    @property
    def num_bytes(self) -> int:
        """What they take together."""
        return self._bytes

    @property
    def positions(self) -> list[int]:
        """How many records are in each, ascending."""
        return [head.position for head in self._heads]

    def keep(self, state: State, head: Head) -> None:
        """Keep the state behind `head`; one that is there already stays."""
        at = bisect_right(self.positions, head.position)
        if at and self._heads[at - 1].position == head.position:
            return
        image = image_of(state)
        self._heads.insert(at, head)
        self._images.insert(at, image)
        self._bytes += len(image)
        if self._bytes > MAX_BYTES:
            self._thin_out()

    def nearest(self, position: int) -> Base:
        """The fold that is nearest to `position`, not beyond it: one of these, or the beginning."""
        at = bisect_right(self.positions, position)
        return (
            Base(Folded(state_of(self._images[at - 1]), Outbox(0), Totals()), self._heads[at - 1])
            if at
            else beginning()
        )

    def nearest_position(self, position: int) -> int:
        """How many records are in it."""
        at = bisect_right(self.positions, position)
        return self._heads[at - 1].position if at else 0

    def _thin_out(self) -> None:
        self.every *= 2
        self._heads, self._images = self._heads[1::2], self._images[1::2]
        self._bytes = sum(map(len, self._images))


def image_of(state: State) -> bytes:
    """A state as bytes."""
    return b"".join(pack(Folded(state, Outbox(0), Totals())))


def state_of(image: bytes) -> State:
    """A state of its own, from its bytes."""
    return unpack(image).state
