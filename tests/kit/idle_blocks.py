"""Conduct of evictions: who goes first when a block with known content is taken."""

from refold.journal.events import Event, RequestPreempted, StepScheduled
from refold.scheduler.state import State
from tests.kit.misconduct import must


class IdleBlocks:
    """Since when each block with known content lies idle, so that the longest idle goes first, the tail of a table first.

    A step that also takes blocks from somebody is not judged: what he gives back comes when others are gone already.
    """

    def __init__(self) -> None:
        self.now = 0
        self.given_back = False
        self.since: dict[int, int] = {}
        self.place: dict[int, tuple[int, int]] = {}
        self.shared: set[int] = set()

    def observe(self, state: State, event: Event) -> None:
        """Look at what became idle and what was taken, after an event."""
        if type(event) is StepScheduled:
            if event.evicted_block_ids and not self.given_back:
                self._judge(state, event)
            self._settle(state, event)
        self.given_back = type(event) is RequestPreempted
        cached = state.pool.free_cached
        if cached.keys() != self.since.keys():
            self.now += 1
            self.since = {block: self.since.get(block, self.now) for block in cached}

    def _settle(self, state: State, event: StepScheduled) -> None:
        """Remember whose each block is, and where in the table. One that is shared goes when its last owner does."""
        for allocation in event.allocations:
            handle, block_ids = event.handles[allocation.entry], allocation.block_ids
            first = len(state.requests.by_handle[handle].block_ids) - len(block_ids)
            for index, block in enumerate(block_ids, first):
                self.place[block] = (handle, index)
            self.shared.difference_update(block_ids)
        for admission in event.admissions:
            self.shared.update(admission.hit_block_ids)

    def _judge(self, state: State, event: StepScheduled) -> None:
        pool, evicted = state.pool, event.evicted_block_ids
        must(not pool.free_blank, "eviction", "of", evicted, "with blank blocks free")
        left: dict[int, list[int]] = {}
        for block in pool.free_cached:
            if block in self.since:
                left.setdefault(self.since[block], []).append(block)
        oldest = min(left, default=self.now)
        for block in evicted:
            since = self.since.get(block)
            if since is None:
                continue
            must(since <= oldest, "eviction", block, "goes and", left.get(oldest), "were idle for longer")
            handle, index = self.place.get(block, (0, 0))
            for other in left.get(since, ()) if block not in self.shared else ():
                if other not in self.shared and self.place.get(other, (0, 0))[0] == handle:
                    must(self.place[other][1] < index, "eviction", block, "goes before", other, "nearer to the tail")
