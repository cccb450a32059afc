"""Whether two folds are the same through and through: every slot, every type, every order, and who is whose object."""

from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Any

from refold.projections.batch import Batch
from refold.projections.outbox import Outbox
from refold.projections.steps import Window


def differences(ours: object, theirs: object) -> list[str]:
    """Where two things differ, as paths. What is one object in the one must be one object in the other."""
    return list(_Comparison().compare("", ours, theirs))


def slots_of(kind: type) -> list[str]:
    """The slots of a class, those of its bases included; of a class of the compiled core, its attributes."""
    found = [name for base in reversed(kind.__mro__) for name in vars(base).get("__slots__", ())]
    return found or list(vars(kind).get("__mypyc_attrs__", ()))


VALUES = (Batch,)
"""Classes whose objects are never changed: whether two are one object says nothing."""

REMEMBERED = {(Window, "last_batch")}
"""Slots that spare work and decide nothing: a fold that began at a snapshot may not have seen what another remembers."""

UNSET = "a slot that nobody has filled"


class _Comparison:
    def __init__(self) -> None:
        self.twins: dict[int, object] = {}
        self.kept: list[object] = []

    def compare(self, path: str, ours: Any, theirs: Any) -> Iterator[str]:
        for outbox in (ours, theirs):
            assert (
                not isinstance(outbox, Outbox) or outbox.by_handle is not None
            )  # a look, after which nothing is kept by columns
        if type(ours) is not type(theirs):
            yield f"{path}: {type(ours).__name__} and {type(theirs).__name__}"
        elif isinstance(ours, OrderedDict | list | tuple | deque):
            yield from self._in_order(path, list(ours.items() if isinstance(ours, dict) else ours), theirs)
        elif isinstance(ours, dict):
            yield from self._keyed(path, ours, theirs)
        elif slots_of(type(ours)) and not hasattr(type(ours), "__struct_fields__"):
            yield from self._slots(path, ours, theirs)
        elif ours != theirs:
            yield f"{path}: {ours!r} and {theirs!r}"

    def _in_order(self, path: str, ours: list[Any], other: Any) -> Iterator[str]:
        theirs = list(other.items() if isinstance(other, dict) else other)
        if len(ours) != len(theirs):
            yield f"{path}: {len(ours)} and {len(theirs)} long"
            return
        for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            yield from self.compare(f"{path}[{index}]", a, b)

    def _keyed(self, path: str, ours: dict[Any, Any], theirs: dict[Any, Any]) -> Iterator[str]:
        if ours.keys() != theirs.keys():
            yield f"{path}: keys {sorted(ours.keys() ^ theirs.keys(), key=repr)[:5]} in one only"
            return
        for key, value in ours.items():
            yield from self.compare(f"{path}[{key!r}]", value, theirs[key])

    def _slots(self, path: str, ours: Any, theirs: Any) -> Iterator[str]:
        if id(ours) in self.twins and not isinstance(ours, VALUES):
            if self.twins[id(ours)] is not theirs:
                yield f"{path}: one object here, two there"
            return
        self.twins[id(ours)] = theirs
        self.kept.append(ours)
        for name in slots_of(type(ours)):
            if (type(ours), name) in REMEMBERED:
                continue
            yield from self.compare(f"{path}.{name}", getattr(ours, name, UNSET), getattr(theirs, name, UNSET))
