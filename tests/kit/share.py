"""How much of a law with thousands of points a test tries: a share of them, or all where REFOLD_EXHAUSTIVE is set (`make exhaustive`).

A share takes every place, but of all that may happen there one thing only: at the next place it is another.
"""

import os
from collections.abc import Sequence
from typing import TypeVar

EXHAUSTIVE = bool(os.environ.get("REFOLD_EXHAUSTIVE"))
BITS = tuple(1 << bit for bit in range(8))
T = TypeVar("T")


def one_of(choices: Sequence[T], place: int) -> Sequence[T]:
    """What is tried at `place`: one of the choices; all of them if exhaustive."""
    return choices if EXHAUSTIVE else [choices[place % len(choices)]]


def bits_at(place: int) -> Sequence[int]:
    """Masks that flip a bit of the byte at `place`."""
    return one_of(BITS, place)
