"""Runs: a prefix that several requests share, owned as one.

A long system prompt is hundreds of blocks, and every request that comes or goes would count each of them up or down. The first
who shares a prefix makes a run of it: the run owns each of its blocks once, and whoever shares just these blocks holds the run.
So coming and going costs one count. A block's owners are the requests that own it themselves and the holders of its runs;
`exact_counts` says how many. Nobody owns a block if and only if its own count is 0, with runs or without.

A run is no fact: it follows from the order of sharing, and a state without runs (one that comes from a snapshot) means the same.
"""

from collections.abc import Iterable


class Run:
    """The blocks, in the order of the prefix, and how many requests hold them as one."""

    __slots__ = ("block_ids", "num_holders")

    def __init__(self, block_ids: list[int]) -> None:
        self.block_ids = block_ids
        self.num_holders = 1


def exact_counts(counts: list[int], runs: Iterable[Run]) -> list[int]:
    """How many requests own each block, of `counts` in which a run is one owner."""
    exact = list(counts)
    for run in runs:
        if run.num_holders > 1:
            for block in run.block_ids:
                exact[block] += run.num_holders - 1
    return exact
