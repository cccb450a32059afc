"""Two loads measured by turns, a few steps of each at a time, each in a process of its own.

On a machine that others use too, the same code takes twice as long for some seconds and then doesn't. Between two neighbouring
turns of a few milliseconds it rarely changes, so the ratio of neighbours is steady where the figures are not. Who begins
changes from turn to turn. Each side has its own process: neither pays for the other's garbage, nor for its imports.
"""

import multiprocessing
import statistics
from collections.abc import Callable, Iterator
from itertools import islice
from typing import NamedTuple

STEPS_PER_TURN = 10

Steps = Callable[..., Iterator[tuple[float, int]]]
"""Gives what each step took in µs, warmed up, and the preemptions so far; called with the side's arguments."""


class Side(NamedTuple):
    """What is measured: a function of a module, and what it is called with."""

    steps: Steps
    arguments: tuple[object, ...]


class Paired(NamedTuple):
    """µs per step of both sides, turn by turn, and the preemptions seen."""

    mine: list[list[float]]
    peers: list[list[float]]
    num_preemptions: tuple[int, int]

    def ratios(self) -> list[float]:
        """Of each pair of neighbouring turns: the median of mine over the median of the peer's."""
        pairs = zip(self.mine, self.peers, strict=True)
        return [statistics.median(mine) / statistics.median(peers) for mine, peers in pairs]


def in_turn(mine: Side, peer: Side, num_steps: int) -> Paired:
    """Measure `num_steps` steps of each."""
    with multiprocessing.get_context("spawn").Pool(1) as ours, multiprocessing.get_context("spawn").Pool(1) as theirs:
        sides = [(ours, mine), (theirs, peer)]
        for pool, side in sides:
            pool.apply(_begin, side)
        turns: tuple[list[list[float]], list[list[float]]] = ([], [])
        preemptions = [0, 0]
        for turn in range(num_steps // STEPS_PER_TURN):
            for which in (0, 1) if turn % 2 == 0 else (1, 0):
                spent, preemptions[which] = sides[which][0].apply(_go_on)
                turns[which].append(spent)
    return Paired(*turns, (preemptions[0], preemptions[1]))


_running: list[Iterator[tuple[float, int]]] = []


def _begin(steps: Steps, arguments: tuple[object, ...]) -> None:
    _running.append(steps(*arguments))
    next(_running[0])


def _go_on() -> tuple[list[float], int]:
    """The next turn of this process's side."""
    found = list(islice(_running[0], STEPS_PER_TURN))
    return [spent for spent, _ in found], found[-1][1]
