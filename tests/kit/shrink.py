"""Shrinking the lives of the simulator: `refold.engine.history.shrink`, with the kit's orders and the kit's judges.

The result can be written as a pytest file that stands alone but for the kit.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from refold.engine.history.shrink import Attempt, Search, docstring, source
from refold.engine.history.shrink import Failure as _Failure
from refold.engine.history.shrink import plainer as _plainer
from refold.journal.events import EngineConfig
from refold.scheduler.commands import Command
from tests.kit import drive
from tests.kit.misconduct import Misconduct
from tests.kit.player import Order, Player, Reopen
from tests.kit.transcript import WrongOutput

Orders = Sequence[Order | Command]

__all__ = ["Failure", "Shrunk", "as_pytest", "attempt", "shrink", "source"]


class Failure(_Failure):
    """How a life failed. Misconduct and wrong output have their place in the message."""

    __slots__ = ()

    @classmethod
    def of(cls, error: BaseException) -> "Failure":
        """The failure that an exception is."""
        found = _Failure.of(error)
        if isinstance(error, Misconduct | WrongOutput):
            found = found._replace(place=found.message.split(":", 1)[0])
        return cls(*found)


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


class _LifeSearch(Search[Any]):
    """A search that may change the configuration, too."""

    def __init__(self, config: EngineConfig, orders: Orders) -> None:
        self.config = config
        super().__init__(orders, lambda candidate: Attempt(*attempt(self.config, candidate)), plainer)

    def make_config_plainer(self) -> None:
        """Let the kit's usual configuration do, field by field; a first change of it comes from the start."""
        first = self.orders[0] if self.orders else None
        if isinstance(first, Reopen):
            self._try_config(msgspec.structs.replace(self.config, **first.changes), self.orders[1:])
        for name, value in _config_changes(self.config).items():
            usual = getattr(drive.config(), name)
            assert value != usual, name
            self._try_config(msgspec.structs.replace(self.config, **{name: usual}), self.orders)

    def _try_config(self, config: EngineConfig, orders: Orders) -> None:
        before, self.config = self.config, config
        if not self.try_out(orders):
            self.config = before


def shrink(config: EngineConfig, orders: Orders) -> Shrunk:
    """The shortest list of orders found that fails like this one."""
    search = _LifeSearch(config, orders)
    search.leave_out()
    search.leave_out_pairs()
    search.make_plainer()
    search.make_config_plainer()
    search.leave_out_pairs()
    search.leave_out()
    failure, _ = attempt(search.config, search.orders)
    assert failure is not None, "what was shrunk doesn't fail any more"
    return Shrunk(search.config, search.orders, failure, len(orders), search.num_plays)


def plainer(order: Any) -> Iterator[Any]:
    """Orders that say less, the boldest first."""
    yield from _plainer(order)
    if isinstance(order, Reopen):
        for name in order.changes:
            changes = {n: value for n, value in order.changes.items() if n != name}
            yield msgspec.structs.replace(order, changes=changes)


def as_pytest(shrunk: Shrunk, title: str) -> str:
    """The source of a test that plays these orders: red as long as they fail."""
    changes = _config_changes(shrunk.config)
    names: dict[str, set[str]] = {"tests.kit.drive": {"config"}, "tests.kit.player": {"play"}}
    lines = [f"    {source(order, names)}," for order in shrunk.orders]
    settings = ", ".join(f"{name}={source(value, names)}" for name, value in changes.items())
    imports = [f"from {module} import {', '.join(sorted(used))}" for module, used in sorted(names.items())]
    return "\n".join(
        [
            docstring(f"{title}\n\n{shrunk.failure}"),
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
