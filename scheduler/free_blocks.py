"""The free blocks as a plan will leave them.

Blocks that become free when a step in flight comes back are behind a fence: as good as free, one step later.
"""

from collections.abc import Iterator
from itertools import islice

from refold.projections.blocks import BlockPool
from refold.projections.runs import Run


class FreeBlocks:
    """The free blocks as this plan will leave them.

    `num_fenced` counts blocks that become free when a step in flight comes back: as good as free, one step later.
    """

    __slots__ = (
        "_blank",
        "_cached",
        "_holders",
        "_pool",
        "_shared",
        "_yielded",
        "evicted",
        "num_fenced",
        "num_free",
        "released",
    )

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._blank: Iterator[int] = reversed(pool.free_blank)
        self._cached: Iterator[int] = iter(pool.free_cached)
        self.released: dict[int, int] = {}
        self._holders: dict[Run, int] = {}
        self._yielded: list[int] = []
        self._shared: set[int] = set()
        self.evicted: dict[int, None] = {}
        self.num_free = pool.num_free
        self.num_fenced = pool.num_fenced

    def take(self, count: int) -> list[int]:
        """The next `count` free blocks: blank ones first, then the cached ones in order of disuse."""
        assert 0 < count <= self.num_free, (count, self.num_free)
        self.num_free -= count
        if self._yielded:
            return [self._next() for _ in range(count)]
        if count == 1 and (block := next(self._blank, None)) is not None:
            return [block]
        if count == 1 and (block := next(self._cached, None)) is not None and block not in self._shared:
            self.evicted[block] = None
            return [block]
        taken = list(islice(self._blank, count))
        while len(taken) < count:
            cached = list(islice(self._cached, count - len(taken)))
            assert cached, (len(taken), count)
            if not self._shared.isdisjoint(cached):
                cached = [block for block in cached if block not in self._shared]
            self.evicted.update(dict.fromkeys(cached))
            taken += cached
        return taken

    def idle(self, block_ids: list[int]) -> list[int]:
        """Which of these cached blocks nobody owns now: sharing them uses up free blocks."""
        counts = self._pool.counts
        return [block for block in block_ids if counts[block] == 0 and block not in self._shared]

    def share(self, idle: list[int]) -> None:
        """Own cached blocks that nobody owned."""
        self.num_free -= len(idle)
        self._shared.update(idle)

    def own(self, block: int) -> None:
        """A block that this plan has taken already: whoever shares it uses up nothing."""
        self._shared.add(block)

    def release(self, block_ids: list[int], run: Run | None, *, fenced: bool) -> None:
        """Count what a victim gives back: to the free blocks, or to the fence while a step may still write them.

        The blocks of its `run` stay owned as long as somebody else holds that.
        """
        num_held = 0
        if run is not None:
            left = self._holders[run] = self._holders.get(run, run.num_holders) - 1
            num_held = len(run.block_ids) if left else 0
        for index in range(len(block_ids) - 1, -1, -1):
            block = block_ids[index]
            released = self.released[block] = self.released.get(block, 0) + (index >= num_held)
            if index < num_held or released < self._pool.counts[block]:
                continue
            if fenced:
                self.num_fenced += 1
            else:
                self.num_free += 1
                self._yielded.append(block)

    def _next(self) -> int:
        block = self._next_blank()
        if block is None:
            block = next(b for b in self._cached_then_yielded() if b not in self._shared)
            self.evicted[block] = None
        return block

    def _next_blank(self) -> int | None:
        for i in range(len(self._yielded) - 1, -1, -1):
            if self._pool.hashes[self._yielded[i]] is None:
                return self._yielded.pop(i)
        return next(self._blank, None)

    def _cached_then_yielded(self) -> Iterator[int]:
        yield from self._cached
        while self._yielded:
            yield self._yielded.pop(0)
