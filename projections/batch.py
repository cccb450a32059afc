"""Batches: the requests of a step, and what of them stays as it is while their epochs last.

Nearly every step is the one before it less those who have left and with those who come in, so its batch is made of the last
one's columns: all by copies of lists, none by going through the requests. A batch is never changed; steps with the same
requests share one.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from array import array

    from refold.projections.requests import Request

MAX_STOP_IDS = 256
"""A batch's stop tokens may be some too many, of requests that have left; from here on they are looked up anew."""

T = TypeVar("T")


class Batch:
    """Columns, one place per entry. `texts` are the requests' tokens, which grow.

    `stop_ids`: every token that may stop one of them, and maybe some that stopped one that has left.
    """

    __slots__ = ("epochs", "first_output_positions", "handles", "requests", "stop_ids", "texts")

    def __init__(self, requests: "Sequence[Request]" = ()) -> None:
        self.requests = list(requests)
        self.handles = [request.handle for request in requests]
        self.epochs = [request.epoch for request in requests]
        self.texts: list[array[int]] = [request.tokens for request in requests]
        self.first_output_positions = [request.first_output_position for request in requests]
        self.stop_ids = _stop_ids_of(requests)

    @property
    def is_as_new(self) -> bool:
        """Whether one made of its requests now would be the same: nobody has left since, and no stop token is one too many."""
        return [r.epoch for r in self.requests] == self.epochs and _stop_ids_of(self.requests) == self.stop_ids

    def without(self, entries: Collection[int]) -> "Batch":
        """This batch less some of its entries."""
        if not entries:
            return self
        less, from_the_end = Batch.__new__(Batch), sorted(entries, reverse=True)
        less.requests = without(self.requests, from_the_end)
        less.handles = without(self.handles, from_the_end)
        less.epochs = without(self.epochs, from_the_end)
        less.texts = without(self.texts, from_the_end)
        less.first_output_positions = without(self.first_output_positions, from_the_end)
        less.stop_ids = self.stop_ids
        return less

    def followed_by(self, newcomers: "Sequence[Request]") -> "Batch":
        """This batch, and those who come in behind it."""
        if not newcomers:
            return self
        new, more = Batch(newcomers), Batch.__new__(Batch)
        if not self.requests:
            return new
        more.requests = self.requests + new.requests
        more.handles = self.handles + new.handles
        more.epochs = self.epochs + new.epochs
        more.texts = self.texts + new.texts
        more.first_output_positions = self.first_output_positions + new.first_output_positions
        more.stop_ids = self.stop_ids if new.stop_ids <= self.stop_ids else self.stop_ids | new.stop_ids
        return more if len(more.stop_ids) <= MAX_STOP_IDS else Batch(more.requests)


def _stop_ids_of(requests: "Sequence[Request]") -> frozenset[int]:
    stops = {request.stop_ids for request in requests}
    return stops.pop() if len(stops) == 1 else frozenset().union(*stops)


def without(column: list[T], from_the_end: Collection[int]) -> list[T]:
    """A column less some of its entries, the last of them first."""
    if not from_the_end:
        return column
    kept = column[:]
    for entry in from_the_end:
        del kept[entry]
    return kept


def next_batch(
    last: Batch, left: Collection[int], handles: list[int], newcomers: list[int], by_handle: "Mapping[int, Request]"
) -> Batch:
    """The batch of `handles` and then `newcomers`: by preference of what is left of the last one."""
    batch = last.without(left)
    if batch.handles != handles:
        batch = Batch([by_handle[handle] for handle in handles])
    return batch.followed_by([by_handle[handle] for handle in newcomers])
