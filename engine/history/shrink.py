"""Shrinking: from a history that fails to the shortest list of orders that still fails in the same way.

Chunks of orders are left out, large ones first, down to single ones, as long as the list still fails in the same way (delta
debugging: Zeller and Hildebrandt, 2002). Then what is left is made plainer: shorter prompts, fewer tokens, defaults. The
result can be written as a pytest file that needs nothing but refold.

What an order is and how a list of them is played is for the caller to say (`Attempt`), so the simulator of the tests shrinks
with the same code.
"""

import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from refold.engine.history.orders import Order, OrderPlayer, Said
from refold.journal.errors import InvariantViolation, Rejected
from refold.journal.events import EngineConfig, Sampling
from refold.scheduler.commands import ExtendSession, OpenEngine, SubmitRequest

MAX_PLAYS = 4000
NEAR = 9
T = TypeVar("T", bound=msgspec.Struct)


class Failure(NamedTuple):
    """How a history failed. Two failures are the same if their kind and place are: the law, the rule, or the function."""

    kind: str
    place: str
    message: str

    @classmethod
    def of(cls, error: BaseException) -> "Failure":
        """The failure that an exception is."""
        message = " ".join(str(error).split())
        if isinstance(error, InvariantViolation):
            place = message.split(" ", 1)[0]
        else:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{Path(frame.filename).stem}.{frame.name}"
        return cls(type(error).__name__, place, message)

    def is_like(self, other: "Failure | None") -> bool:
        """Whether both are the same failure."""
        return other is not None and (self.kind, self.place) == (other.kind, other.place)

    def __str__(self) -> str:
        """One line."""
        return f"{self.kind} at {self.place}: {self.message}"


class Attempt(NamedTuple):
    """How a list of orders failed, if it did, and how many of them were begun."""

    failure: Failure | None
    num_begun: int


class Search(Generic[T]):
    """A list that fails, and what is left of the plays and the time to make it shorter.

    Raises:
        Rejected: it doesn't fail.
    """

    def __init__(
        self,
        orders: Sequence[T],
        attempt: Callable[[Sequence[T]], Attempt],
        plainer: Callable[[T], Iterator[T]],
        seconds: float | None = None,
    ) -> None:
        self.attempt, self.plainer = attempt, plainer
        self._until_s = None if seconds is None else time.monotonic() + seconds
        failure, begun = attempt(orders)
        if failure is None:
            raise Rejected("these orders don't fail with this refold: there is nothing to shrink")
        self.failure = failure
        self.orders = list(orders[:begun])
        self.num_plays = 1

    @property
    def is_spent(self) -> bool:
        """Whether there are no plays left, or no time."""
        return self.num_plays >= MAX_PLAYS or (self._until_s is not None and time.monotonic() > self._until_s)

    def try_out(self, orders: Sequence[T]) -> bool:
        """Take a candidate over if it fails in the same way."""
        if self.is_spent:
            return False
        self.num_plays += 1
        failure, begun = self.attempt(orders)
        if not self.failure.is_like(failure):
            return False
        self.orders = list(orders[:begun])
        return True

    def leave_out(self) -> None:
        """Leave out chunks, from the end, until no single order can go."""
        size = max(len(self.orders) // 2, 1)
        while not self.is_spent:
            before = len(self.orders)
            at = before - size
            while at > -size:
                start = max(at, 0)
                self.try_out(self.orders[:start] + self.orders[at + size :])
                at = min(at, len(self.orders)) - size
            if size == 1 and len(self.orders) == before:
                return
            size = max(size // 2, 1)

    def leave_out_groups(self, group_of: Callable[[T], str | None]) -> None:
        """Leave out all orders of a group at once: everything about one request, say."""
        names = list(dict.fromkeys(name for order in self.orders if (name := group_of(order)) is not None))
        size = len(names)
        while names and size:
            for start in range(0, len(names), size):
                gone = set(names[start : start + size])
                self.try_out([order for order in self.orders if group_of(order) not in gone])
            left = {group_of(order) for order in self.orders}
            names = [name for name in names if name in left]
            size //= 2

    def leave_out_pairs(self) -> None:
        """Leave out two orders that are near each other: a step and its answer, say, of which neither can go alone."""
        first = 0
        while first < len(self.orders) and not self.is_spent:
            rest = range(first + 1, min(first + NEAR, len(self.orders)))
            pairs = ([*self.orders[:first], *self.orders[first + 1 : i], *self.orders[i + 1 :]] for i in rest)
            if not any(self.try_out(pair) for pair in pairs):
                first += 1

    def make_plainer(self) -> None:
        """Replace single orders by plainer ones, until none can be."""
        progress = True
        while progress and not self.is_spent:
            progress = False
            for at in range(len(self.orders)):
                while at < len(self.orders) and any(
                    self.try_out([*self.orders[:at], plainer, *self.orders[at + 1 :]])
                    for plainer in self.plainer(self.orders[at])
                ):
                    progress = True


class Shrunk(NamedTuple):
    """The shortest list found, out of how many orders, in how many plays; events count what is recorded while it is played."""

    orders: list[Order]
    said: dict[tuple[str, int], list[int]]
    failure: Failure
    num_before: int
    num_plays: int
    num_events: int


def shrink_orders(orders: Sequence[Order], said: Said, seconds: float | None = None) -> Shrunk:
    """The shortest list of orders found that fails like this one.

    Raises:
        Rejected: it doesn't fail.
    """
    search: Search[Any] = Search(orders, lambda candidate: attempt(candidate, said)[0], plainer, seconds)
    search.leave_out_groups(lambda order: getattr(order, "request_id", None))
    search.leave_out()
    search.leave_out_pairs()
    search.make_plainer()
    search.leave_out_pairs()
    search.leave_out()
    used = _needed(search, said)
    (failure, _), num_events = attempt(search.orders, used)
    assert failure is not None, "what was shrunk doesn't fail any more"
    return Shrunk(search.orders, used, failure, len(orders), search.num_plays, num_events)


def attempt(orders: Sequence[Order], said: Said) -> tuple[Attempt, int]:
    """Play the orders: how that failed, if it did, and how many events were recorded."""
    player = OrderPlayer(said)
    try:
        for order in orders:
            player.obey(order)
        player.settle()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what we are looking for
        return Attempt(Failure.of(error), player.num_begun), player.num_events
    return Attempt(None, player.num_begun), player.num_events


def _needed(search: "Search[Any]", said: Said) -> dict[tuple[str, int], list[int]]:
    """What of all that was said the shortest list needs: nothing, if it fails in silence too."""
    if search.failure.is_like(attempt(search.orders, {})[0].failure):
        return {}
    ids = {getattr(order, "request_id", None) for order in search.orders}
    return {place: list(tokens) for place, tokens in said.items() if place[0] in ids}


def plainer(order: Order) -> Iterator[Any]:
    """Orders that say less, the boldest first."""
    replace = msgspec.structs.replace
    for field in msgspec.structs.fields(order):
        value = getattr(order, field.name)
        if not field.required and value != default(field):
            yield replace(order, **{field.name: default(field)})
    if isinstance(order, OpenEngine):
        for config in _plainer_config(order.config):
            yield replace(order, config=config)
    if isinstance(order, SubmitRequest):
        prompt = order.prompt_token_ids
        for shorter in (prompt[:1], prompt[: len(prompt) // 2], prompt[:-1], [0] * len(prompt)):
            if shorter and shorter != prompt:
                yield replace(order, prompt_token_ids=shorter)
    if isinstance(order, SubmitRequest | ExtendSession):
        for sampling in _plainer_sampling(order.sampling):
            yield replace(order, sampling=sampling)


def _plainer_config(config: EngineConfig) -> Iterator[EngineConfig]:
    for field in msgspec.structs.fields(config):
        if not field.required and getattr(config, field.name) != default(field):
            yield msgspec.structs.replace(config, **{field.name: default(field)})


def _plainer_sampling(sampling: Sampling) -> Iterator[Sampling]:
    replace = msgspec.structs.replace
    for changes in (
        {"stop_token_ids": ()},
        {"min_tokens": 0},
        {"max_tokens": max(sampling.max_tokens // 2, 1)},
        {"max_tokens": sampling.max_tokens - 1},
        {"seed": 0},
    ):
        candidate = replace(sampling, **changes)
        if candidate != sampling and 1 <= candidate.max_tokens >= candidate.min_tokens:
            yield candidate


def default(field: msgspec.structs.FieldInfo) -> object:
    """What a field holds if nobody says otherwise."""
    return field.default if field.default is not msgspec.NODEFAULT else field.default_factory()


# -- as a test --------------------------------------------------------------------------------------------------------


def as_pytest(shrunk: Shrunk, title: str) -> str:
    """The source of a test that plays these orders: red as long as they fail. It needs refold and pytest only."""
    names: dict[str, set[str]] = {"refold.engine.history.orders": {"play"}}
    lines = [f"    {source(order, names)}," for order in shrunk.orders]
    imports = [f"from {module} import {', '.join(sorted(used))}" for module, used in sorted(names.items())]
    return "\n".join(
        [
            docstring(f"{title}\n\n{shrunk.failure}"),
            "",
            *imports,
            "",
            "ORDERS = [",
            *lines,
            "]",
            f"SAID: dict[tuple[str, int], list[int]] = {shrunk.said!r}",
            "",
            "",
            "def test_these_orders_are_obeyed_lawfully():",
            "    play(ORDERS, SAID)",
            "",
        ]
    )


def docstring(text: str) -> str:
    """A text as a module's docstring, whatever is in it."""
    return f"{text!r}" if '"""' in text or "\\" in text or text.endswith('"') else f'"""{text}\n"""'


def source(value: object, names: dict[str, set[str]]) -> str:
    """Python source for an order, defaults left out; `names` collects what it needs, by module."""
    if isinstance(value, msgspec.Struct):
        kind = type(value)
        names.setdefault(kind.__module__, set()).add(kind.__name__)
        given = [
            f"{field.name}={source(getattr(value, field.name), names)}"
            for field in msgspec.structs.fields(value)
            if field.required or getattr(value, field.name) != default(field)
        ]
        return f"{kind.__name__}({', '.join(given)})"
    if isinstance(value, list):
        return f"[{', '.join(source(each, names) for each in value)}]"
    return repr(value)
