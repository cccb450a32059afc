"""Differences: what of two things isn't the same, as a list of paths and values.

Works on plain data (dicts, lists, numbers, text): events and portraits as msgspec makes them. Two events of one kind are
compared field by field, a column entry by entry.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, zip_longest
from typing import Any, NamedTuple

import msgspec

from refold.engine.history.plain import safe
from refold.journal.events import Event

MAX_SHOWN = 80
MAX_DIFFERENCES = 200


class _Nothing:
    """What is not there."""

    def __repr__(self) -> str:
        return "nothing"


NOTHING = _Nothing()


class Difference(NamedTuple):
    """At `path`, one says `left` and the other `right`; `NOTHING` where one has nothing."""

    path: str
    left: Any
    right: Any

    def words(self, left: str = "was", right: str = "is") -> str:
        """One line."""
        return f"{self.path}: {left} {shown(self.left)}, {right} {shown(self.right)}"

    def plain(self) -> dict[str, Any]:
        """As data; what is not there is null."""
        sides = {"left": self.left, "right": self.right}
        return {"path": self.path} | {name: None if value is NOTHING else value for name, value in sides.items()}


def shown(value: object) -> str:
    """A value on one line, cut where it gets long."""
    text = safe(str(value) if isinstance(value, str | _Nothing) else repr(value))
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


def differences(left: Any, right: Any, path: str = "") -> list[Difference]:
    """At most the first `MAX_DIFFERENCES`, in the order of the left one."""
    return list(islice(_walk(left, right, path), MAX_DIFFERENCES))


def event_differences(left: Sequence[Event], right: Sequence[Event]) -> list[Difference]:
    """What two records don't say alike: kinds first, then the fields of the first event that differs."""
    for index, (one, other) in enumerate(zip_longest(left, right)):
        if one == other:
            continue
        if type(one) is not type(other):
            return [Difference(f"event {index}", _kind(one), _kind(other))]
        return differences(msgspec.to_builtins(one), msgspec.to_builtins(other), type(one).__name__)
    return []


def _kind(event: Event | None) -> Any:
    return NOTHING if event is None else type(event).__name__


def _walk(left: Any, right: Any, path: str) -> Iterator[Difference]:
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        for key in [*left, *(key for key in right if key not in left)]:
            below = f"{path}.{key}" if path else str(key)
            yield from _walk(left.get(key, NOTHING), right.get(key, NOTHING), below)
    elif isinstance(left, list) and isinstance(right, list):
        yield from _walk_lists(left, right, path)
    elif left != right or type(left) is not type(right):
        yield Difference(path, left, right)


def _walk_lists(left: list[Any], right: list[Any], path: str) -> Iterator[Difference]:
    """Things with a name are matched by it, others by their place."""
    names = [_named(left), _named(right)]
    if all(name is not None for name in names):
        yield from _walk(names[0], names[1], path)
        return
    for index, (one, other) in enumerate(zip_longest(left, right, fillvalue=NOTHING)):
        yield from _walk(one, other, f"{path}[{index}]")


def _named(items: list[Any]) -> dict[str, Any] | None:
    if not items or not all(isinstance(item, Mapping) and "request_id" in item for item in items):
        return {} if not items else None
    by_name = {str(item["request_id"]): item for item in items}
    return by_name if len(by_name) == len(items) else None
