"""The prefix cache: what was computed once is not computed again, and what was not computed is never taken for it."""

import pytest

from refold.journal.errors import Rejected
from refold.journal.events import CacheReset, RequestPreempted, StepScheduled
from refold.scheduler.commands import LoseWorker, ResetCache, StartWorker
from tests.kit.drive import Drive
from tests.kit.sentences import (
    all_due,
    all_of,
    drain,
    fill,
    named,
    nothing_changes,
    opened,
    outputs,
    reset,
    scheduled_tokens,
    the,
    victims,
    work,
)


def hits(drive: Drive, name: str) -> int:
    """How many blocks the request shared as it came in. Schedules the step that lets it in."""
    step = the(StepScheduled, drive.schedule())
    entry = step.handles.index(named(drive, name).handle)
    return next(len(a.hit_block_ids) for a in step.admissions if a.entry == entry)


def after(*prompts: list[int], max_tokens: int = 1, **changes: object) -> Drive:
    """An engine that has served these prompts one after the other, and is idle."""
    drive = opened(**({"num_blocks": 32, "max_num_batched_tokens": 128} | changes))
    for i, prompt in enumerate(prompts):
        drive.submit(f"earlier-{i}", prompt, max_tokens)
        drive.run()
    return drive


# -- hits -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "computed"), [(3, 3), (4, 4), (5, 1), (8, 4), (9, 1), (11, 3), (12, 4), (13, 1)])
def test_a_known_prompt_costs_its_tail_and_at_least_one_token(length: int, computed: int) -> None:
    prompt = list(range(length))
    drive = after(prompt)
    drive.submit("again", prompt)
    assert work(drive, drive.schedule()) == {"again": computed}
    drive.run()
    assert outputs(drive) == all_due(drive)


def test_only_the_common_beginning_is_shared() -> None:
    drive = after(list(range(12)))
    drive.submit("fork", [*range(8), 900, 901, 902, 903])
    assert hits(drive, "fork") == 2


def test_a_different_first_token_shares_nothing_though_the_rest_is_equal() -> None:
    drive = after(list(range(12)))
    drive.submit("other", [99, *range(1, 12)])
    assert hits(drive, "other") == 0


def test_the_same_prompt_twice_in_one_step_is_computed_once() -> None:
    drive = opened(num_blocks=64, block_size=16, max_num_batched_tokens=512, max_model_len=512)
    prompt = list(range(100))
    for name in ("first", "second", "third"):
        drive.submit(name, prompt)

    assert work(drive, drive.schedule()) == {"first": 100, "second": 4, "third": 4}

    assert [drive.state.pool.ref_counts[b] for b in named(drive, "first").block_ids] == [3] * 6 + [1]
    drive.submit("late", prompt)
    assert work(drive, drive.schedule())["late"] == 4, "later arrivals too, while the first is still in flight"
    drive.run()
    assert outputs(drive) == all_due(drive)


def test_sharing_what_the_same_step_writes_uses_up_no_free_block() -> None:
    drive = opened(num_blocks=5, max_num_batched_tokens=32)
    prompt = list(range(14))
    drive.submit("first", prompt, max_tokens=1)
    drive.submit("second", prompt, max_tokens=1)
    assert work(drive, drive.schedule()) == {"first": 14, "second": 2}
    assert drive.state.pool.num_free == 0


def test_a_chunk_is_shared_by_those_who_come_in_behind_it() -> None:
    drive = opened(num_blocks=32, max_num_batched_tokens=8, max_in_flight_steps=2)
    prompt = list(range(12))
    drive.submit("a", prompt)
    assert work(drive, drive.schedule()) == {"a": 8}
    drive.submit("b", prompt)
    assert work(drive, drive.schedule()) == {"a": 4, "b": 4}
    assert named(drive, "b").block_ids[:2] == named(drive, "a").block_ids[:2]
    drive.run()
    assert outputs(drive) == all_due(drive)


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("outputs_wanted", [1, 2, 3, 4, 5, 6, 7, 13])
def test_the_next_turn_computes_only_what_lies_beyond_the_last_full_block(depth: int, outputs_wanted: int) -> None:
    drive = after(list(range(10)), max_tokens=outputs_wanted, max_in_flight_steps=depth)
    turn = [*range(10), *outputs(drive)["earlier-0"]]
    assert len(turn) == 10 + outputs_wanted
    kept = (len(turn) - 1) // 4 * 4  # the last token was never computed

    drive.submit("next", turn)

    assert work(drive, drive.schedule()) == {"next": len(turn) - kept}
    drive.run()
    assert outputs(drive) == all_due(drive)


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_a_turn_that_was_preempted_half_way_is_found_as_well(depth: int) -> None:
    drive = opened(num_blocks=7, max_num_batched_tokens=64, max_in_flight_steps=depth)
    drive.submit("a", list(range(7)), max_tokens=12)
    drive.submit("b", list(range(100, 107)), max_tokens=12)
    drive.run()
    assert set(victims(drive, all_of(RequestPreempted, drive.records))) == {"b"}
    turn = [*range(100, 107), *outputs(drive)["b"]]
    drive.submit("b-next", turn, max_tokens=1)
    assert work(drive, drive.schedule()) == {"b-next": len(turn) - 16}
    drive.run()
    assert outputs(drive) == all_due(drive)


@pytest.mark.parametrize("apart", [{"cache_salt": "tenant-b"}, {"adapter": "lora-1"}])
def test_a_salt_or_an_adapter_keeps_contents_apart(apart: dict[str, str]) -> None:
    prompt = list(range(12))
    drive = after(prompt)
    drive.submit("apart", prompt, **apart)
    assert hits(drive, "apart") == 0
    drive.run()
    drive.submit("same", prompt, **apart)
    assert hits(drive, "same") == 2


def test_without_a_cache_nothing_is_found_and_nothing_is_kept() -> None:
    prompt = list(range(12))
    drive = after(prompt, enable_prefix_caching=False)
    drive.submit("again", prompt)
    assert work(drive, drive.schedule()) == {"again": 12}
    assert drive.state.pool.block_by_hash == {}
    drive.run()
    assert outputs(drive) == all_due(drive)


# -- publication ------------------------------------------------------------------------------------------------------


def test_what_a_step_will_fill_is_provisional_until_it_comes_back() -> None:
    drive = opened(num_blocks=8)
    drive.submit("a", list(range(9)))
    drive.schedule()
    pool, table = drive.state.pool, named(drive, "a").block_ids
    assert pool.provisional == {0: set(table[:2])}
    assert [pool.hashes[block] is not None for block in table] == [True, True, False]

    drive.complete()

    assert pool.provisional == {}
    assert sorted(pool.block_by_hash.values()) == sorted(table[:2])


def test_a_block_of_outputs_still_unknown_is_published_when_they_are_known() -> None:
    drive = opened(num_blocks=8, max_in_flight_steps=4)
    drive.submit("a", list(range(6)), max_tokens=8)
    fill(drive)  # prefill, then positions 6, 7 and 8
    pool, table = drive.state.pool, named(drive, "a").block_ids
    assert pool.hashes[table[1]] is None, "its tokens are not known yet"
    drive.complete()
    drive.complete()
    assert pool.hashes[table[1]] is None, "known, but the step that computes position 7 is still in flight"
    drive.complete()
    assert pool.hashes[table[1]] == named(drive, "a").block_hashes[1]


def test_in_step_with_the_worker_it_is_published_as_it_is_scheduled() -> None:
    drive = opened(num_blocks=8, max_in_flight_steps=1)
    drive.submit("a", list(range(7)), max_tokens=8)
    drive.schedule()
    drive.complete()
    drive.schedule()
    assert drive.state.pool.provisional == {1: {named(drive, "a").block_ids[1]}}


def test_the_same_content_is_published_once_and_the_second_block_stays_blank() -> None:
    prompt = list(range(8))
    drive = after(prompt)
    pool = drive.state.pool
    first = dict(pool.block_by_hash)
    assert len(first) == 2

    drive.submit("again", prompt, max_tokens=1)
    assert work(drive, drive.schedule()) == {"again": 4}, "a full hit still computes its last block"
    mine = named(drive, "again").block_ids[1]
    drive.run()

    assert pool.block_by_hash == first
    assert pool.hashes[mine] is None
    assert mine in pool.free_blank


def test_nothing_is_published_that_no_step_wrote() -> None:
    """The worker dies with the step: what it was to write is not there for anybody."""
    prompt = list(range(9))
    drive = opened(num_blocks=8)
    drive.submit("a", prompt)
    drive.schedule()
    drive.do(LoseWorker(reason="test"))
    assert drive.state.pool.block_by_hash == {}
    drive.do(StartWorker(kind="simulated", environment={}))
    assert work(drive, drive.schedule()) == {"a": 9}
    drive.run()
    assert outputs(drive) == all_due(drive)


# -- which block is taken ---------------------------------------------------------------------------------------------


def taken(drive: Drive, count: int) -> list[int]:
    """The blocks that a new request of `count` blocks is given."""
    drive.submit("taker", [900 + i for i in range(4 * count)], max_tokens=1)
    return the(StepScheduled, drive.schedule()).allocations[0].block_ids


def test_blocks_without_content_go_first_the_last_freed_before_the_others() -> None:
    drive = after(list(range(10)), num_blocks=6)
    pool = drive.state.pool
    blank, cached = list(pool.free_blank), dict(pool.block_by_hash)
    assert (len(blank), len(cached)) == (4, 2)
    assert taken(drive, 4) == blank[::-1]
    assert cached.items() <= pool.block_by_hash.items(), "nothing cached was lost"


def test_of_the_cached_the_longest_unused_goes_first() -> None:
    old, young = list(range(8)), list(range(50, 58))
    drive = after(old, young, num_blocks=4)
    drive.submit("old-again", [*old, 1], max_tokens=1)  # 3 blocks: 2 hits, and one evicted
    events = drive.schedule()
    evicted = the(StepScheduled, events).evicted_block_ids
    drive.run()
    drive.submit("old-once-more", [*old, 1], max_tokens=1)
    assert hits(drive, "old-once-more") == 2
    drive.run()
    drive.submit("young-again", [*young, 1], max_tokens=1)
    assert len(evicted) == 1
    assert hits(drive, "young-again") == 1, "its tail was taken before its head"


def test_the_tail_of_a_prefix_is_taken_before_its_head() -> None:
    prompt = list(range(16))
    drive = after(prompt, num_blocks=4)
    pool = drive.state.pool
    order = list(pool.free_cached)
    table = [pool.block_by_hash[h] for h in _chain(drive, prompt)]
    assert order == table[::-1]

    assert taken(drive, 2) == table[:1:-1]

    drive.run()
    drive.submit("again", prompt, max_tokens=1)
    assert hits(drive, "again") == 2


def _chain(drive: Drive, prompt: list[int]) -> list[bytes]:
    drive.submit("probe", prompt, max_tokens=1)
    hashes = list(named(drive, "probe").block_hashes)
    drive.abort("probe")
    return hashes


def test_a_cached_block_in_use_is_not_up_for_taking() -> None:
    prompt = list(range(9))
    drive = after(prompt, num_blocks=6)
    drive.submit("holder", prompt, max_tokens=8)
    shared = the(StepScheduled, drive.schedule()).admissions[0].hit_block_ids
    assert len(shared) == 2
    assert not set(shared) & set(drive.state.pool.free_cached)
    drive.submit("taker", [900 + i for i in range(12)], max_tokens=1)
    allocated = [b for a in the(StepScheduled, drive.schedule()).allocations for b in a.block_ids]
    assert not set(allocated) & set(shared)


def test_shared_blocks_that_were_free_count_against_the_room() -> None:
    """Four free blocks, two of them the hit: with two new ones that is all there is."""
    prompt = list(range(8))
    drive = after(prompt, num_blocks=6)
    drive.submit("holder", [700, 701, 702, 703, 704, 705], max_tokens=2)  # two blocks
    assert work(drive, drive.schedule()) == {"holder": 6}
    drive.submit("fits-not", [*prompt, *range(300, 309)], max_tokens=1)  # 17 tokens: five blocks, two of them hits
    assert drive.state.pool.num_free == 4
    assert "fits-not" not in work(drive, drive.schedule())
    drive.submit("fits", prompt, max_tokens=1)
    drive.run()
    assert outputs(drive) == all_due(drive)


# -- reset ------------------------------------------------------------------------------------------------------------


def test_a_reset_forgets_every_content() -> None:
    prompt = list(range(12))
    drive = after(prompt)
    drive.do(ResetCache())
    assert drive.state.pool.block_by_hash == {}
    assert len(drive.state.pool.free_blank) == 32
    drive.submit("again", prompt)
    assert work(drive, drive.schedule()) == {"again": 12}
    drive.run()
    assert outputs(drive) == all_due(drive)


def test_a_reset_is_refused_while_somebody_runs() -> None:
    drive = after(list(range(12)))
    drive.submit("a", 5)
    drive.schedule()
    with nothing_changes(drive), pytest.raises(Rejected, match=r"1 requests run"):
        drive.do(ResetCache())


def test_a_reset_of_the_running_ones_too_lets_them_compute_again() -> None:
    drive = opened(num_blocks=32, max_in_flight_steps=3)
    drive.submit("a", list(range(9)))
    fill(drive)

    events = reset(drive)

    assert the(CacheReset, events).reset_running
    assert drive.state.pool.block_by_hash == {}
    assert named(drive, "a").block_hashes, "its tokens are as they were"
    drain(drive)
    assert drive.state.pool.block_by_hash == {}, "what was in flight publishes nothing any more"
    assert work(drive, drive.schedule()) == {"a": 9}
    drive.run()
    assert outputs(drive) == all_due(drive)


def test_a_cache_saves_what_it_says() -> None:
    """Ten requests of one prompt: the first pays for it, the others for their tails."""
    prompt = list(range(40))
    drive = opened(num_blocks=64, max_num_batched_tokens=64, max_in_flight_steps=2)
    for i in range(10):
        drive.submit(f"r{i}", prompt, max_tokens=1)
    drive.run()
    assert scheduled_tokens(drive) == 40 + 9 * 4
