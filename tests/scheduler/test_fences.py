"""Fences: a block that a step in flight may still write is neither taken nor shared, and nobody suffers for it twice."""

import pytest

from refold.journal.events import (
    Event,
    OutputDelivered,
    RequestFinished,
    RequestPreempted,
    StaleOutputConsumed,
    StepScheduled,
    WorkerLost,
)
from tests.kit.drive import Drive
from tests.kit.sentences import (
    all_due,
    all_of,
    fill,
    named,
    names,
    opened,
    outputs,
    random_life,
    the,
    token_at,
    under_pressure,
    victims,
    work,
)

# -- blocks behind a fence --------------------------------------------------------------------------------------------


def test_a_victims_blocks_are_fenced_until_its_last_step_comes_back() -> None:
    drive = under_pressure()
    pool, blocks = drive.state.pool, list(named(drive, "b").block_ids)

    drive.schedule()

    assert all(pool.is_fenced(block) for block in blocks)
    assert (pool.num_free, pool.num_fenced) == (0, 2)
    drive.complete()
    assert drive.schedule() == [], "one of its two steps is still in flight"
    drive.complete()
    assert (pool.num_free, pool.num_fenced) == (2, 0)
    allocated = the(StepScheduled, drive.schedule()).allocations[0].block_ids
    assert set(allocated) <= set(blocks)


def test_an_aborted_requests_blocks_are_fenced_too() -> None:
    drive = under_pressure()
    drive.abort("b")
    assert (drive.state.pool.num_free, drive.state.pool.num_fenced) == (0, 2)
    assert drive.schedule() == []
    drive.complete()
    drive.complete()
    assert drive.state.pool.num_free == 2


def test_a_stop_token_frees_nothing_that_a_later_step_still_writes() -> None:
    drive = opened(num_blocks=4, max_in_flight_steps=3)
    drive.submit("a", 7, stop_token_ids=(token_at(drive, "a", 7, prompt=7),))
    drive.schedule()
    drive.schedule()
    drive.complete()
    assert ends_of(drive) == ["a"]
    assert (drive.state.pool.num_free, drive.state.pool.num_fenced) == (2, 2)
    drive.complete()
    assert (drive.state.pool.num_free, drive.state.pool.num_fenced) == (4, 0)


def test_with_nothing_in_flight_blocks_are_free_at_once() -> None:
    drive = under_pressure(depth=1)
    assert victims(drive, drive.schedule()) == ["b"]
    assert drive.state.pool.num_fenced == 0
    drive.abort("b")
    drive.run()
    assert drive.state.pool.num_free == drive.state.pool.num_blocks


def test_a_natural_end_leaves_no_fence_because_nothing_was_scheduled_beyond_it() -> None:
    drive = opened(max_in_flight_steps=4)
    drive.submit("a", 7, max_tokens=3)
    fill(drive)
    while drive.orders:
        drive.complete()
        assert drive.state.pool.num_fenced == 0
    assert drive.state.is_quiescent


def test_a_block_that_somebody_else_owns_is_not_fenced() -> None:
    drive = opened(num_blocks=8, max_in_flight_steps=3)
    drive.submit("a", list(range(9)))
    drive.submit("b", list(range(9)))
    drive.schedule()
    shared = named(drive, "a").block_ids[:2]
    assert named(drive, "b").block_ids[:2] == shared

    drive.abort("b")

    assert drive.state.pool.num_fenced == 1, "only its own tail"
    assert [drive.state.pool.ref_counts[block] for block in shared] == [1, 1]


def test_what_is_behind_a_fence_is_not_shared_before_it_falls() -> None:
    drive = opened(num_blocks=16, max_in_flight_steps=3)
    prompt = list(range(9))
    drive.submit("a", prompt)
    drive.schedule()
    drive.abort("a")
    drive.submit("b", prompt)

    assert work(drive, drive.schedule()) == {"b": 9}, "no hit on blocks that step 0 is still writing for nobody"

    drive.complete()
    drive.submit("c", prompt)
    events = drive.schedule()
    assert work(drive, events)["c"] == 1


# -- nobody suffers twice ---------------------------------------------------------------------------------------------


def test_a_fenced_victim_is_no_reason_for_a_second_victim() -> None:
    drive = opened(num_blocks=6, max_num_batched_tokens=32, max_in_flight_steps=4)
    for name in "abc":
        drive.submit(name, 7)
    drive.schedule()
    drive.schedule()

    assert victims(drive, drive.schedule()) == ["c"]
    assert drive.schedule() == []
    drive.complete()
    assert drive.schedule() == [], "b is not preempted while c's blocks are on their way"
    assert names(drive.state.queues.running) == ["a", "b"]
    drive.complete()
    assert list(work(drive, drive.schedule())) == ["a", "b"]


def starved() -> tuple[Drive, list[Event]]:
    """`a` wants two blocks for its next chunk; one is free, and the one of its victim `d` is fenced. `b` wants one block."""
    drive = opened(num_blocks=10, max_num_batched_tokens=32, long_prefill_token_threshold=8, max_in_flight_steps=4)
    drive.submit("a", 32, max_tokens=1)
    drive.submit("b", 7)
    drive.submit("c", 5)
    drive.submit("d", 3)
    drive.schedule()
    drive.schedule()
    assert drive.state.pool.num_free == 1
    return drive, drive.schedule()


def test_whoever_waits_for_a_fence_is_not_robbed_by_those_who_come_later() -> None:
    drive, events = starved()
    preempted = the(RequestPreempted, events)
    assert (victims(drive, events), preempted.needed_blocks, preempted.free_blocks) == (["d"], 2, 1)
    assert work(drive, events) == {"c": 1}, "b may not take the free block, c needs none"
    assert drive.state.pool.num_free == 1


def test_meanwhile_nobody_comes_in() -> None:
    drive, _ = starved()
    drive.submit("tiny", 1, max_tokens=1)
    while drive.state.pool.num_fenced:
        assert "tiny" not in work(drive, drive.schedule())
        drive.complete()
    drive.run()
    assert outputs(drive) == all_due(drive)


def test_when_the_fence_falls_it_gets_what_it_waited_for() -> None:
    drive, _ = starved()
    while drive.state.pool.num_fenced:
        drive.complete()
    assert work(drive, drive.schedule())["a"] == 8
    drive.run()
    assert outputs(drive) == all_due(drive)


# -- by the journal alone ---------------------------------------------------------------------------------------------


class FenceWatch:
    """Follows a journal: who owned which block when which of its steps was in flight. Knows nothing of the pool."""

    def __init__(self) -> None:
        self.tables: dict[int, list[int]] = {}
        self.in_flight: dict[int, list[int]] = {}
        self.fences: dict[int, int] = {}
        self.num_fenced = 0

    def observe(self, event: Event) -> None:
        match event:
            case StepScheduled():
                self._scheduled(event)
            case OutputDelivered() | StaleOutputConsumed():
                self._came_back(event.step, event.handles)
            case RequestPreempted() | RequestFinished():
                self._released(event.handle)
            case WorkerLost():
                self.tables, self.in_flight, self.fences = {}, {}, {}

    def _scheduled(self, event: StepScheduled) -> None:
        owned = {block for table in self.tables.values() for block in table}
        taken = [(event.handles[a.entry], b) for a in event.allocations for b in a.block_ids]
        hit = [(event.handles[a.entry], b) for a in event.admissions for b in a.hit_block_ids]
        for _, block in taken:
            assert block not in owned, f"step {event.step} takes block {block}, which is owned"
        for handle, block in (*hit, *taken):
            assert block not in self.fences, f"step {event.step} uses block {block}, which {self.fences} may write"
            self.tables.setdefault(handle, []).append(block)
        self.in_flight[event.step] = list(event.handles)

    def _came_back(self, step: int, handles: list[int]) -> None:
        for handle in handles:
            self.in_flight[step].remove(handle)
        if not self.in_flight[step]:
            del self.in_flight[step]
            self.fences = {block: fence for block, fence in self.fences.items() if fence > step}

    def _released(self, handle: int) -> None:
        last = max((step for step, handles in self.in_flight.items() if handle in handles), default=None)
        table = self.tables.pop(handle, [])
        owned = {block for other in self.tables.values() for block in other}
        if last is not None:
            idle = [block for block in table if block not in owned]
            self.num_fenced += len(idle)
            self.fences.update(dict.fromkeys(idle, last))


@pytest.mark.parametrize("seed", range(24))
def test_no_history_reuses_a_block_that_a_step_in_flight_may_write(seed: int) -> None:
    drive = random_life(seed, max_in_flight_steps=2 + seed % 4)
    watch = FenceWatch()
    for events in drive.records:
        for event in events:
            watch.observe(event)
    assert watch.num_fenced > 0


def ends_of(drive: Drive) -> list[str]:
    """Who has finished."""
    by_handle = {handle: name for name, handle in drive.state.requests.handle_by_id.items()}
    return [by_handle[event.handle] for event in all_of(RequestFinished, drive.records)]
