"""The block pool against a model of plain lists: whatever is done, in whatever order, both say the same."""

from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from refold.projections import blocks
from refold.projections.blocks import BlockPool
from refold.projections.runs import Run
from refold.scheduler.free_blocks import FreeBlocks

NUM_BLOCKS, BLOCK_SIZE = 7, 4


class Holder:
    """A request's block table, and the last step in flight that may write into it."""

    def __init__(self, table: list[int], last_step: int, run: Run | None = None) -> None:
        self.table = table
        self.last_step = last_step
        self.run = run


class PoolBesideAModel(RuleBasedStateMachine):
    """The model: who owns what, a stack of blank blocks, a queue of cached ones, and fences by step."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
        self.blank = list(range(NUM_BLOCKS - 1, -1, -1))
        self.cached: list[int] = []
        self.hash_of: dict[int, bytes] = {}
        self.provisional: dict[int, int] = {}
        self.fenced: list[tuple[int, int]] = []
        self.holders: list[Holder] = []
        self.next_step, self.next_back, self.next_hash = 0, 0, 0

    # -- steps --------------------------------------------------------------------------------------------------------

    def _step(self) -> int:
        """A step enters the window: what is done now is done by it."""
        step, self.next_step = self.next_step, self.next_step + 1
        return step

    @precondition(lambda self: self.next_back < self.next_step)
    @rule()
    def the_oldest_step_comes_back(self) -> None:
        step, self.next_back = self.next_back, self.next_back + 1
        blocks.step_came_back(self.pool, step)
        self.provisional = {block: s for block, s in self.provisional.items() if s != step}
        fallen = [block for fence, block in self.fenced if fence <= step]
        self.fenced = [(fence, block) for fence, block in self.fenced if fence > step]
        self._free(fallen)

    def _free(self, idle: list[int]) -> None:
        for block in idle:
            (self.cached if block in self.hash_of else self.blank).append(block)

    # -- orders -------------------------------------------------------------------------------------------------------

    @rule(count=st.integers(1, NUM_BLOCKS))
    def somebody_takes_blocks(self, count: int) -> None:
        step = self._step()
        if count > len(self.blank) + len(self.cached):
            return
        expected = [*self.blank[::-1], *self.cached][:count]
        taken = FreeBlocks(self.pool).take(count)
        assert taken == expected, "blank ones first, the last freed before the others; then the longest unused"
        evicted = blocks.take(self.pool, taken)
        assert evicted == [block for block in taken if block in self.cached]
        self.blank = [block for block in self.blank if block not in taken]
        self.cached = [block for block in self.cached if block not in taken]
        for block in evicted:
            del self.hash_of[block]
        self.holders.append(Holder(taken, step))

    def _held_alone(self) -> list[tuple[Holder, int]]:
        held = Counter(block for holder in self.holders for block in holder.table)
        return [(holder, block) for holder in self.holders for block in holder.table if held[block] == 1]

    @precondition(lambda self: self._held_alone())
    @rule(data=st.data(), known=st.booleans())
    def somebody_fills_a_block(self, data: st.DataObject, known: bool) -> None:
        """Nobody writes into what others hold, too: who lets go last wouldn't fence it."""
        holder, block = data.draw(st.sampled_from(self._held_alone()))
        step = holder.last_step = self._step()
        content = self.next_hash.to_bytes(16, "little") if known else bytes(16)
        self.next_hash += 1
        blocks.publish(self.pool, [block], [content], step)
        if block not in self.hash_of and content not in self.hash_of.values():
            self.hash_of[block] = content
            self.provisional[block] = step

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def somebody_learns_what_was_filled(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(data.draw(st.sampled_from(self.holders)).table))
        content = self.next_hash.to_bytes(16, "little")
        self.next_hash += 1
        blocks.publish(self.pool, [block], [content], None)
        self.hash_of.setdefault(block, content)

    @rule(data=st.data())
    def somebody_shares_a_prefix(self, data: st.DataObject) -> None:
        findable = [block for block in self.hash_of if block not in {b for _, b in self.fenced}]
        if not findable:
            return
        hit = data.draw(st.lists(st.sampled_from(findable), unique=True, min_size=1))
        assert [self.pool.block_by_hash[self.hash_of[block]] for block in hit] == hit
        assert not any(self.pool.is_fenced(block) for block in hit)
        self._share(hit)

    @precondition(lambda self: any(holder.run for holder in self.holders))
    @rule(data=st.data(), shorter=st.booleans())
    def somebody_shares_the_same(self, data: st.DataObject, shorter: bool) -> None:
        run = data.draw(st.sampled_from([holder.run for holder in self.holders if holder.run is not None]))
        hit = run.block_ids[: len(run.block_ids) - shorter]
        if hit and all(block in self.hash_of for block in hit):
            self._share(hit)

    def _share(self, hit: list[int]) -> None:
        run = blocks.share(self.pool, hit)
        assert run is None or run.block_ids == hit
        self.cached = [block for block in self.cached if block not in hit]
        self.holders.append(Holder(list(hit), self._step(), run))

    @precondition(lambda self: any(holder.run for holder in self.holders))
    @rule(data=st.data())
    def somebody_owns_what_it_held_with_others(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from([holder for holder in self.holders if holder.run is not None]))
        blocks.split(self.pool, holder.run)
        holder.run = None

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def somebody_lets_go(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        self.holders.remove(holder)
        owned = [block for other in self.holders for block in other.table]
        idle = [block for block in reversed(holder.table) if block not in owned]
        in_flight = holder.last_step >= self.next_back
        plan = FreeBlocks(self.pool)
        plan.release(holder.table, holder.run, fenced=in_flight)
        assert (plan.num_free, plan.num_fenced) == (
            self.pool.num_free + len(idle) * (not in_flight),
            self.pool.num_fenced + len(idle) * in_flight,
        ), "a plan knows beforehand what it will free"
        blocks.release(self.pool, holder.table, holder.last_step if in_flight else None, holder.run)
        if in_flight:
            self.fenced += [(holder.last_step, block) for block in idle]
        else:
            self._free(idle)

    @rule()
    def everything_is_forgotten(self) -> None:
        blocks.forget_content(self.pool)
        self.blank += self.cached
        self.cached = []
        self.hash_of, self.provisional = {}, {}

    # -- both say the same --------------------------------------------------------------------------------------------

    @initialize()
    def all_are_blank(self) -> None:
        assert self.pool.num_free == NUM_BLOCKS

    @invariant()
    def every_block_is_in_one_place(self) -> None:
        pool = self.pool
        owned = [block for holder in self.holders for block in holder.table]
        assert {last: run.num_holders for last, run in pool.runs.items()} == Counter(
            holder.run.block_ids[-1] for holder in self.holders if holder.run is not None
        )
        assert pool.ref_counts == [owned.count(block) for block in range(NUM_BLOCKS)]
        assert list(pool.free_blank) == self.blank
        assert list(pool.free_cached) == self.cached
        assert sorted((fence, block) for fence, idle in pool.fences for block in idle) == sorted(self.fenced)
        assert pool.num_fenced == len(self.fenced)
        everywhere = sorted({*owned, *self.blank, *self.cached, *(block for _, block in self.fenced)})
        assert everywhere == list(range(NUM_BLOCKS))
        assert len(set(owned)) + pool.num_free + pool.num_fenced == NUM_BLOCKS

    @invariant()
    def a_hash_finds_the_one_block_that_carries_it(self) -> None:
        assert {b: h for b, h in enumerate(self.pool.hashes) if h is not None} == self.hash_of
        assert self.pool.block_by_hash == {h: b for b, h in self.hash_of.items()}
        written = {block: step for step, published in self.pool.provisional.items() for block in published}
        assert written == self.provisional
        assert sum(map(len, self.pool.provisional.values())) == len(written)


TestPoolBesideAModel = PoolBesideAModel.TestCase
TestPoolBesideAModel.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)


# -- what must not be done --------------------------------------------------------------------------------------------


def pool_with(table: list[int]) -> BlockPool:
    pool = BlockPool(4, BLOCK_SIZE)
    blocks.take(pool, table)
    return pool


def test_an_owned_block_is_not_taken() -> None:
    with pytest.raises(AssertionError):
        blocks.take(pool_with([1]), [1])


def test_a_fenced_block_is_neither_taken_nor_shared() -> None:
    pool = pool_with([1])
    blocks.publish(pool, [1], [b"x"], 0)
    blocks.release(pool, [1], 0)
    assert pool.is_fenced(1)
    with pytest.raises((AssertionError, KeyError)):
        blocks.take(pool, [1])
    pool = pool_with([1])
    blocks.publish(pool, [1], [b"x"], 0)
    blocks.release(pool, [1], 0)
    with pytest.raises(KeyError):
        blocks.share(pool, [1])


def test_a_block_is_not_let_go_twice() -> None:
    pool = pool_with([1])
    blocks.release(pool, [1], None)
    with pytest.raises(AssertionError):
        blocks.release(pool, [1], None)


def test_a_block_without_content_is_not_shared() -> None:
    with pytest.raises(AssertionError):
        blocks.share(pool_with([1]), [1])


def test_a_block_that_nobody_owns_is_not_published() -> None:
    with pytest.raises(AssertionError):
        blocks.publish(pool_with([1]), [2], [b"x"], 0)


def test_a_block_that_is_still_provisional_is_not_taken() -> None:
    """Its step is in flight: without the fence, this catches it."""
    pool = pool_with([0, 1, 2, 3])
    blocks.publish(pool, [1], [b"x"], 0)
    blocks.release(pool, [1], None)
    with pytest.raises(AssertionError):
        blocks.take(pool, [1])


def test_a_pool_of_nothing_has_nothing() -> None:
    pool = BlockPool(0, 1)
    assert pool.num_free == 0
    blocks.forget_content(pool)
    blocks.step_came_back(pool, 0)
    assert pool.num_free == 0
