"""The scratch: what a plan may use up, in locals.

A plan looks at the state and changes nothing. What it takes (token budget, blocks, places in the batch) is kept here until
the plan is whole; then it becomes events, and the appliers do to the state what the scratch did to its copies. Nothing
half-planned is ever visible.
"""

from collections.abc import Iterable, Iterator

from refold.journal.events import (
    Admission,
    BlockAllocation,
    Event,
    PreemptReason,
    RequestPreempted,
    StalePolicy,
    StepScheduled,
)
from refold.projections.blocks import BlockPool
from refold.projections.requests import Request
from refold.scheduler.state import State


class FreeBlocks:
    """The free blocks as this plan will leave them.

    `num_fenced` counts blocks that become free when a step in flight comes back: as good as free, one step later.
    """

    __slots__ = ("_blank", "_cached", "_pool", "_released", "_shared", "_yielded", "evicted", "num_fenced", "num_free")

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._blank: Iterator[int] = reversed(pool.free_blank)
        self._cached: Iterator[int] = iter(pool.free_cached)
        self._released: dict[int, int] = {}
        self._yielded: list[int] = []
        self._shared: set[int] = set()
        self.evicted: list[int] = []
        self.num_free = pool.num_free
        self.num_fenced = pool.num_fenced

    def take(self, count: int) -> list[int]:
        """The next `count` free blocks: blank ones first, then the cached ones in order of disuse."""
        assert 0 < count <= self.num_free, (count, self.num_free)
        self.num_free -= count
        return [self._next() for _ in range(count)]

    def num_idle(self, hit: Iterable[int]) -> int:
        """How many of these cached blocks are free now: sharing them uses up free blocks."""
        return sum(1 for block in hit if self._pool.ref_counts[block] == 0 and block not in self._shared)

    def share(self, hit: list[int]) -> None:
        """Own cached blocks."""
        self.num_free -= self.num_idle(hit)
        self._shared.update(hit)

    def release(self, block_ids: list[int], *, fenced: bool) -> None:
        """Count what a victim gives back: to the free blocks, or to the fence while a step may still write them."""
        for block in reversed(block_ids):
            released = self._released[block] = self._released.get(block, 0) + 1
            if released < self._pool.ref_counts[block]:
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
            self.evicted.append(block)
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


class Plan:
    """A step being planned: its columns so far, and what is left of each budget."""

    __slots__ = (
        "admissions",
        "allocations",
        "chunk_entries",
        "first_positions",
        "free",
        "handles",
        "hashes",
        "num_running",
        "num_tokens",
        "preemptions",
        "starved",
        "state",
        "token_budget",
    )

    def __init__(self, state: State) -> None:
        self.state = state
        self.token_budget = state.config.max_num_batched_tokens
        self.num_running = len(state.queues.running)
        self.free = FreeBlocks(state.pool)
        self.starved = False
        self.preemptions: list[RequestPreempted] = []
        self.handles: list[int] = []
        self.num_tokens: list[int] = []
        self.first_positions: list[int] = []
        self.chunk_entries: list[int] = []
        self.admissions: list[Admission] = []
        self.allocations: list[BlockAllocation] = []
        self.hashes: dict[bytes, int] = {}

    def add(self, handle: int, first: int, n: int, samples: bool) -> None:
        """Add an entry to the step."""
        assert 1 <= n <= self.token_budget, (handle, n, self.token_budget)
        if not samples:
            self.chunk_entries.append(len(self.handles))
        self.handles.append(handle)
        self.num_tokens.append(n)
        self.first_positions.append(first)
        self.token_budget -= n

    def allocate(self, block_ids: list[int]) -> None:
        """Give blocks to the entry that is added next."""
        self.allocations.append(BlockAllocation(entry=len(self.handles), block_ids=block_ids))

    def preempt(
        self, victim: Request, needy: Request | None, needed: int, reason: PreemptReason, policy: StalePolicy
    ) -> None:
        """Take a request's blocks and place."""
        event = preemption(victim, reason, policy, needy, needed, self.free.num_free)
        self.preemptions.append(event)
        self.free.release(victim.block_ids, fenced=victim.num_in_flight_tokens > 0)
        self.num_running -= 1

    def events(self) -> list[Event]:
        """The plan as facts: the preemptions, then the step if it has an entry."""
        events: list[Event] = list(self.preemptions)
        if self.handles:
            events.append(
                StepScheduled(
                    step=self.state.window.next_step,
                    handles=self.handles,
                    num_tokens=self.num_tokens,
                    first_positions=self.first_positions,
                    chunk_entries=self.chunk_entries,
                    admissions=self.admissions,
                    allocations=self.allocations,
                    evicted_block_ids=self.free.evicted,
                )
            )
        return events


def preemption(
    victim: Request, reason: PreemptReason, policy: StalePolicy, needy: Request | None, needed: int, free: int
) -> RequestPreempted:
    """The fact that `victim` was preempted, as the state is now."""
    return RequestPreempted(
        handle=victim.handle,
        reason=reason,
        stale_policy=policy,
        released_block_ids=victim.block_ids,
        num_computed_tokens=victim.num_computed_tokens,
        num_stale_output_tokens=victim.num_in_flight_tokens,
        for_handle=None if needy is None else needy.handle,
        needed_blocks=needed,
        free_blocks=free,
    )
