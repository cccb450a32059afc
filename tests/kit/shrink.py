"""Shrinking: from the life that failed to the shortest list of orders that still fails in the same way.

Chunks of orders are left out, large ones first, down to single ones, as long as the list still fails in the same way (delta
debugging: Zeller and Hildebrandt, 2002). Then what is left is made plainer: shorter prompts, fewer tokens, defaults. The
result can be written as a pytest file that stands alone but for the kit.
"""

import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from refold.journal.errors import InvariantViolation
from refold.journal.events import EngineConfig, Sampling
from refold.scheduler.commands import Command, ExtendSession, SubmitRequest
from tests.kit import drive
from tests.kit.misconduct import Misconduct
from tests.kit.player import Order, Player, Reopen
from tests.kit.transcript import WrongOutput

MAX_PLAYS = 4000
NEAR = 9

Orders = Sequence[Order | Command]


class Failure(NamedTuple):
    """How a life failed. Two failures are the same if their kind and place are: the law, the rule, or the function."""

    kind: str
    place: str
    message: str

    @classmethod
    def of(cls, error: BaseException) -> "Failure":
        """The failure that an exception is."""
        message = " ".join(str(error).split())
        if isinstance(error, InvariantViolation):
            place = message.split(" ", 1)[0]
        elif isinstance(error, Misconduct | WrongOutput):
            place = message.split(":", 1)[0]
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


def attempt(config: EngineConfig, orders: Orders) -> tuple[Failure | None, int]:
    """Play the orders: how that failed, if it did, and how many of them were begun."""
    player = Player(config)
    try:
        player.open()
        for order in orders:
            player.obey(order)
        player.settle()
        player.judge()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what we are looking for
        return Failure.of(error), len(player.orders_given)
    return None, len(player.orders_given)


class Shrunk(NamedTuple):
    """The shortest list found, out of how many orders, in how many plays."""

    config: EngineConfig
    orders: list[Order | Command]
    failure: Failure
    num_before: int
    num_plays: int

    @property
    def removed(self) -> float:
        """The share of the orders that were not needed."""
        return 1 - len(self.orders) / self.num_before if self.num_before else 0.0


class _Search:
    """A list that fails, and the plays that are left to make it shorter."""

    def __init__(self, config: EngineConfig, orders: Orders) -> None:
        self.config = config
        failure, begun = attempt(config, orders)
        assert failure is not None, "these orders don't fail"
        self.failure = failure
        self.orders = list(orders[:begun])
        self.num_plays = 1

    def try_out(self, orders: list[Order | Command]) -> bool:
        """Take a candidate over if it fails in the same way."""
        if self.num_plays >= MAX_PLAYS:
            return False
        self.num_plays += 1
        failure, begun = attempt(self.config, orders)
        if not self.failure.is_like(failure):
            return False
        self.orders = orders[:begun]
        return True

    def leave_out(self) -> None:
        """Leave out chunks, from the end, until no single order can go."""
        size = max(len(self.orders) // 2, 1)
        while True:
            before = len(self.orders)
            at = before - size
            while at > -size:
                start = max(at, 0)
                self.try_out(self.orders[:start] + self.orders[at + size :])
                at = min(at, len(self.orders)) - size
            if size == 1 and len(self.orders) == before:
                return
            size = max(size // 2, 1)

    def leave_out_pairs(self) -> None:
        """Leave out two orders that are near each other: a step and its answer, say, of which neither can go alone."""
        first = 0
        while first < len(self.orders):
            rest = range(first + 1, min(first + NEAR, len(self.orders)))
            pairs = ([*self.orders[:first], *self.orders[first + 1 : i], *self.orders[i + 1 :]] for i in rest)
            if not any(self.try_out(pair) for pair in pairs):
                first += 1

    def make_plainer(self) -> None:
        """Replace single orders by plainer ones, until none can be."""
        progress = True
        while progress:
            progress = False
            for at in range(len(self.orders)):
                while at < len(self.orders) and any(
                    self.try_out([*self.orders[:at], plainer, *self.orders[at + 1 :]])
                    for plainer in _plainer(self.orders[at])
                ):
                    progress = True

    def make_config_plainer(self) -> None:
        """Let the kit's usual configuration do, field by field; a first change of it comes from the start."""
        first = self.orders[0] if self.orders else None
        if isinstance(first, Reopen):
            self._try_config(msgspec.structs.replace(self.config, **first.changes), self.orders[1:])
        for name, value in _config_changes(self.config).items():
            usual = getattr(drive.config(), name)
            assert value != usual, name
            self._try_config(msgspec.structs.replace(self.config, **{name: usual}), self.orders)

    def _try_config(self, config: EngineConfig, orders: list[Order | Command]) -> None:
        before, self.config = self.config, config
        if not self.try_out(orders):
            self.config = before


def shrink(config: EngineConfig, orders: Orders) -> Shrunk:
    """The shortest list of orders found that fails like this one."""
    search = _Search(config, orders)
    search.leave_out()
    search.leave_out_pairs()
    search.make_plainer()
    search.make_config_plainer()
    search.leave_out_pairs()
    search.leave_out()
    failure, _ = attempt(search.config, search.orders)
    assert failure is not None, "what was shrunk doesn't fail any more"
    return Shrunk(search.config, search.orders, failure, len(orders), search.num_plays)


def _plainer(order: Order | Command) -> Iterator[Order | Command]:
    """Orders that say less, the boldest first."""
    replace = msgspec.structs.replace
    for field in msgspec.structs.fields(order):
        value = getattr(order, field.name)
        if not field.required and value != _default(field):
            yield replace(order, **{field.name: _default(field)})
    if isinstance(order, Reopen):
        for name in order.changes:
            yield replace(order, changes={n: value for n, value in order.changes.items() if n != name})
    if isinstance(order, SubmitRequest):
        prompt = order.prompt_token_ids
        for shorter in (prompt[:1], prompt[: len(prompt) // 2], prompt[:-1], [0] * len(prompt)):
            if shorter and shorter != prompt:
                yield replace(order, prompt_token_ids=shorter)
    if isinstance(order, SubmitRequest | ExtendSession):
        for sampling in _plainer_sampling(order.sampling):
            yield replace(order, sampling=sampling)


def _plainer_sampling(sampling: Sampling) -> Iterator[Sampling]:
    replace = msgspec.structs.replace
    for changes in (
        {"stop_token_ids": ()},
        {"min_tokens": 0},
        {"max_tokens": max(sampling.max_tokens // 2, 1)},
        {"max_tokens": sampling.max_tokens - 1},
        {"seed": 0},
    ):
        plainer = replace(sampling, **changes)
        if plainer != sampling and 1 <= plainer.max_tokens >= plainer.min_tokens:
            yield plainer


def _default(field: msgspec.structs.FieldInfo) -> object:
    return field.default if field.default is not msgspec.NODEFAULT else field.default_factory()


# -- as a test --------------------------------------------------------------------------------------------------------


def as_pytest(shrunk: Shrunk, title: str) -> str:
    """The source of a test that plays these orders: red as long as they fail."""
    changes = _config_changes(shrunk.config)
    names: dict[str, set[str]] = {"tests.kit.drive": {"config"}, "tests.kit.player": {"play"}}
    lines = [f"    {source(order, names)}," for order in shrunk.orders]
    settings = ", ".join(f"{name}={source(value, names)}" for name, value in changes.items())
    imports = [f"from {module} import {', '.join(sorted(used))}" for module, used in sorted(names.items())]
    about = f"{title}\n\n{shrunk.failure}"
    return "\n".join(
        [
            f"{about!r}" if '"""' in about or "\\" in about else f'"""{about}\n"""',
            "",
            *imports,
            "",
            f"CONFIG = config({settings})",
            "ORDERS = [",
            *lines,
            "]",
            "",
            "",
            "def test_these_orders_are_obeyed_lawfully():",
            "    play(CONFIG, ORDERS)",
            "",
        ]
    )


def _config_changes(config: EngineConfig) -> dict[str, object]:
    usual = drive.config()
    return {
        name: getattr(config, name)
        for name in config.__struct_fields__
        if getattr(config, name) != getattr(usual, name)
    }


def source(value: object, names: dict[str, set[str]]) -> str:
    """Python source for an order, defaults left out; `names` collects what it needs, by module."""
    if isinstance(value, msgspec.Struct):
        kind = type(value)
        names.setdefault(kind.__module__, set()).add(kind.__name__)
        given = [
            f"{field.name}={source(getattr(value, field.name), names)}"
            for field in msgspec.structs.fields(value)
            if field.required or getattr(value, field.name) != _default(field)
        ]
        return f"{kind.__name__}({', '.join(given)})"
    if isinstance(value, list):
        return f"[{', '.join(source(each, names) for each in value)}]"
    return repr(value)
