"""Preemption: whose blocks are taken, what becomes of the work in flight, and when the victim comes back."""

import pytest

from refold.journal.events import (
    OutputDelivered,
    RequestFinished,
    RequestPreempted,
    SessionTurnEnded,
    StaleOutputConsumed,
    StepScheduled,
)
from refold.projections.requests import IDLE, PREEMPTED
from refold.scheduler.commands import CloseSession
from tests.kit.drive import Drive
from tests.kit.sentences import (
    all_due,
    all_of,
    counters,
    drain,
    ends,
    fill,
    is_live,
    name_of,
    named,
    names,
    opened,
    outputs,
    reset,
    story,
    the,
    token_at,
    under_pressure,
    victims,
    work,
)

# -- what a preemption does -------------------------------------------------------------------------------------------


def test_the_victim_gives_up_its_place_its_blocks_and_all_that_it_computed() -> None:
    drive = under_pressure()
    blocks = list(named(drive, "b").block_ids)

    events = drive.schedule()

    preempted = the(RequestPreempted, events)
    assert (preempted.reason, preempted.stale_policy) == ("kv_pressure", "deliver")
    assert name_of(drive, preempted.handle) == "b"
    assert name_of(drive, preempted.for_handle or 0) == "a"
    assert preempted.released_block_ids == blocks
    assert (preempted.num_computed_tokens, preempted.num_stale_output_tokens) == (8, 8)
    assert (preempted.needed_blocks, preempted.free_blocks) == (1, 0)
    victim = named(drive, "b")
    assert (victim.status, victim.block_ids, victim.num_preemptions, victim.epoch) == (PREEMPTED, [], 1, 1)
    assert names(drive.state.queues.waiting) == ["b"]
    assert names(drive.state.queues.running) == ["a"]


def test_its_counters_start_anew_and_what_is_in_flight_stays_in_flight() -> None:
    drive = under_pressure()
    assert counters(drive, "b") == {"computed": 8, "placeholders": 2, "in_flight": 8, "stale": 0, "deliverable": 0}

    drive.schedule()

    assert counters(drive, "b") == {"computed": 0, "placeholders": 0, "in_flight": 8, "stale": 8, "deliverable": 8}


def test_stale_output_drains_by_what_was_scheduled_and_touches_no_scheduling_counter() -> None:
    drive = under_pressure()
    drive.schedule()

    events = drive.complete()

    stale = the(StaleOutputConsumed, events)
    assert (stale.num_tokens, stale.counts, stale.delivered, stale.first_output_indices) == ([7], [1], [True], [0])
    assert counters(drive, "b") == {"computed": 0, "placeholders": 0, "in_flight": 1, "stale": 1, "deliverable": 1}
    assert named(drive, "b").num_output_tokens == 1


def test_a_second_bump_assigns_what_is_stale_and_does_not_add_to_it() -> None:
    drive = opened(num_blocks=16, max_in_flight_steps=4)
    drive.submit("a", 7)
    drive.schedule()
    reset(drive)
    drive.schedule()
    assert (counters(drive, "a")["in_flight"], counters(drive, "a")["stale"]) == (14, 7)

    reset(drive)

    assert (counters(drive, "a")["in_flight"], counters(drive, "a")["stale"]) == (14, 14)
    drive.run()
    assert outputs(drive) == all_due(drive)


def test_a_prefill_chunk_in_flight_is_stale_by_its_tokens_though_it_returns_none() -> None:
    drive = opened(num_blocks=16, max_in_flight_steps=3, max_num_batched_tokens=4)
    drive.submit("a", 9)
    drive.schedule()
    preempted = the(RequestPreempted, reset(drive))
    assert preempted.num_stale_output_tokens == 4

    stale = the(StaleOutputConsumed, drive.complete())

    assert (stale.num_tokens, stale.counts, stale.token_ids) == ([4], [0], [])
    drive.run()
    assert outputs(drive) == all_due(drive)


def test_a_victim_whose_prefill_chunk_is_in_flight_gets_nothing_for_it_and_comes_back() -> None:
    drive = opened(num_blocks=4, max_in_flight_steps=3, max_num_batched_tokens=8, admit_full_sequence=False)
    drive.submit("a", 7, max_tokens=9)
    drive.submit("b", 13, max_tokens=2)
    fill(drive)
    assert victims(drive, all_of(RequestPreempted, drive.records)) == ["b"]
    drive.run()
    consumed = all_of(StaleOutputConsumed, drive.records)
    assert consumed
    assert all(event.delivered == [False] and event.counts == [0] for event in consumed)
    assert outputs(drive) == all_due(drive)


# -- coming back ------------------------------------------------------------------------------------------------------


def with_room_for_the_victim() -> Drive:
    """`b` was preempted for `z` with a sample still in flight; `a` has ended since and left room enough for both."""
    drive = opened(num_blocks=7, max_in_flight_steps=3, max_num_batched_tokens=32, enable_prefix_caching=False)
    drive.submit("z", 7)
    drive.submit("a", 12, max_tokens=1)
    drive.submit("b", 7)
    drive.schedule()
    drive.schedule()
    assert victims(drive, drive.schedule()) == ["b"]
    assert "RequestFinished" in story(drive.complete())
    assert drive.state.pool.num_free == 3
    assert counters(drive, "b")["deliverable"] == 1
    return drive


def test_a_victim_with_deliverable_output_in_flight_does_not_come_back_though_there_is_room() -> None:
    drive = with_room_for_the_victim()

    assert work(drive, drive.schedule()) == {"z": 1}

    drive.complete()
    assert counters(drive, "b")["stale"] == 0
    events = drive.schedule()
    assert work(drive, events) == {"z": 1, "b": 9}, "it computes prompt and outputs again, the late ones included"
    assert [a.epoch for a in the(StepScheduled, events).admissions] == [1]


def test_others_may_overtake_it_meanwhile() -> None:
    drive = with_room_for_the_victim()
    drive.submit("c", 3)
    assert names(drive.state.queues.waiting) == ["b", "c"]

    assert work(drive, drive.schedule()) == {"z": 1, "c": 3}

    drive.run()
    assert outputs(drive) == all_due(drive)


def test_after_a_drop_it_comes_back_at_once() -> None:
    drive = opened(num_blocks=16, max_in_flight_steps=3)
    drive.submit("a", 7)
    drive.schedule()
    reset(drive)
    assert counters(drive, "a")["stale"] == 7
    assert counters(drive, "a")["deliverable"] == 0

    assert work(drive, drive.schedule()) == {"a": 7}

    stale = the(StaleOutputConsumed, drive.complete())
    assert (stale.delivered, stale.counts, stale.first_output_indices) == ([False], [1], [-1])
    assert named(drive, "a").num_output_tokens == 0
    current = the(OutputDelivered, drive.complete())
    assert current.first_output_indices == [0]


def test_fresh_and_stale_work_of_one_request_share_the_window() -> None:
    drive = opened(num_blocks=16, max_in_flight_steps=4)
    drive.submit("a", 7)
    drive.schedule()
    reset(drive)
    drive.schedule()
    assert counters(drive, "a") == {"computed": 7, "placeholders": 1, "in_flight": 14, "stale": 7, "deliverable": 0}
    drive.complete()
    assert counters(drive, "a") == {"computed": 7, "placeholders": 1, "in_flight": 7, "stale": 0, "deliverable": 0}


# -- deliver and drop in one window -----------------------------------------------------------------------------------


def dropped_and_delivered() -> Drive:
    """`b`'s first epoch ended by a reset, its second by pressure; both are in flight, for `a`, which comes first."""
    drive = opened(
        num_blocks=4, max_in_flight_steps=4, max_num_batched_tokens=8, policy="priority", admit_full_sequence=False
    )
    drive.submit("b", 3, priority=5)
    drive.schedule()
    reset(drive)
    assert work(drive, drive.schedule()) == {"b": 3}
    drive.submit("a", 16, max_tokens=1, priority=0)
    assert work(drive, drive.schedule()) == {"b": 1, "a": 7}
    preempted = the(RequestPreempted, drive.schedule())
    assert name_of(drive, preempted.handle) == "b"
    assert preempted.stale_policy == "deliver"
    return drive


def test_what_was_to_be_dropped_stays_so_when_a_later_epoch_is_to_be_delivered() -> None:
    drive = dropped_and_delivered()

    marks = [list(step.stale.values()) for step in drive.state.window.in_flight]
    assert marks == [["drop"], ["deliver"], ["deliver"]]
    assert counters(drive, "b") == {"computed": 0, "placeholders": 0, "in_flight": 7, "stale": 7, "deliverable": 4}

    fates = [the(StaleOutputConsumed, drive.complete()).delivered for _ in range(3)]
    assert fates == [[False], [True], [True]]
    assert named(drive, "b").num_output_tokens == 2
    drive.run()
    assert outputs(drive) == all_due(drive)


def test_once_the_dropped_work_has_drained_the_next_epoch_is_delivered_again() -> None:
    drive = under_pressure()
    reset(drive)
    drain(drive)
    drive.run()
    policies = [e.stale_policy for e in all_of(RequestPreempted, drive.records)]
    assert policies[:2] == ["drop", "drop"]
    assert "deliver" in policies[2:]
    assert outputs(drive) == all_due(drive)


def test_a_reset_leaves_alone_what_a_preempted_request_is_still_to_be_given() -> None:
    drive = under_pressure()
    drive.schedule()

    events = reset(drive)

    assert victims(drive, events) == ["a"]
    assert [step.stale for step in drive.state.window.in_flight] == [{0: "drop", 1: "deliver"}] * 2
    stale = the(StaleOutputConsumed, drive.complete())
    assert stale.delivered == [False, True]
    drive.run()
    assert outputs(drive) == all_due(drive)


def test_preempted_then_drained_then_reset_before_it_came_back() -> None:
    drive = under_pressure()
    drive.schedule()
    drain(drive)
    assert named(drive, "b").status == PREEMPTED

    reset(drive)

    assert named(drive, "b").epoch == 1, "it has nothing in flight and no blocks: there is nothing to end"
    assert named(drive, "a").epoch == 1
    drive.run()
    assert outputs(drive) == all_due(drive)


def test_a_reset_puts_everybody_back_in_the_same_order() -> None:
    drive = opened(num_blocks=32, max_num_batched_tokens=32)
    for name in "abcd":
        drive.submit(name, 5)
    drive.schedule()

    assert victims(drive, reset(drive)) == ["d", "c", "b", "a"]

    assert names(drive.state.queues.waiting) == ["a", "b", "c", "d"]
    assert list(work(drive, drive.schedule())) == ["a", "b", "c", "d"]


# -- ending while preempted -------------------------------------------------------------------------------------------


def test_a_stale_token_finishes_a_preempted_request_and_no_queue_keeps_it() -> None:
    drive = opened(num_blocks=4, max_in_flight_steps=3)
    drive.submit("a", 7)
    drive.submit("b", 7, max_tokens=2)
    drive.schedule()
    drive.schedule()
    assert victims(drive, drive.schedule()) == ["b"]
    drive.complete()

    events = drive.complete()

    assert story(events) == ["OutputDelivered", "StaleOutputConsumed", "RequestFinished"]
    assert (the(RequestFinished, events).reason, the(RequestFinished, events).num_output_tokens) == ("length", 2)
    assert drive.state.queues.waiting == []
    assert list(drive.state.requests.by_handle) == [named(drive, "a").handle]
    drive.run()
    assert outputs(drive) == all_due(drive)


def test_a_stale_stop_token_makes_what_is_still_in_flight_worthless() -> None:
    drive = opened(num_blocks=4, max_in_flight_steps=3)
    drive.submit("a", 7)
    stop = token_at(drive, "b", 7, prompt=7)
    drive.submit("b", 7, stop_token_ids=(stop,))
    drive.schedule()
    drive.schedule()
    drive.schedule()

    events = drive.complete()

    finished = the(RequestFinished, events)
    assert (finished.reason, finished.stop_token_id, finished.num_output_tokens) == ("stop", stop, 1)
    late = the(StaleOutputConsumed, drive.complete())
    assert (late.delivered, late.counts) == ([False], [1])
    drive.run()
    assert outputs(drive)["b"] == [stop]


def test_an_abort_while_stale_output_drains_delivers_nothing_more() -> None:
    drive = under_pressure()
    drive.schedule()
    drive.complete()

    events = drive.abort("b")

    assert story(events) == ["RequestAborted", "RequestFinished"]
    assert the(RequestFinished, events).num_output_tokens == 1
    assert drive.state.queues.waiting == []
    late = the(StaleOutputConsumed, drive.complete())
    assert late.delivered == [False]
    assert len(drive.state.requests.by_handle) == 1, "it is forgotten when its last entry has come back"
    drive.run()
    assert outputs(drive)["b"] == all_due(drive)["b"][:1]
    assert ends(drive.records, drive)["b"] == ("abort", 1)


def test_a_session_whose_turn_is_ended_by_a_stale_token_is_idle_and_nowhere_else() -> None:
    drive = opened(num_blocks=4, max_in_flight_steps=3)
    drive.submit("a", 7)
    drive.submit("b", 7, max_tokens=2, resumable=True)
    drive.schedule()
    drive.schedule()
    assert victims(drive, drive.schedule()) == ["b"]

    drive.complete()
    events = drive.complete()

    assert "SessionTurnEnded" in story(events)
    assert the(SessionTurnEnded, events).num_output_tokens == 2
    queues = drive.state.queues
    assert (names(queues.running), names(queues.waiting), names(queues.idle)) == (["a"], [], ["b"])
    assert named(drive, "b").status == IDLE
    drive.do(CloseSession(request_id="b"))
    drive.run()
    assert outputs(drive) == all_due(drive)


# -- who gives way ----------------------------------------------------------------------------------------------------


def test_a_request_may_be_preempted_for_itself() -> None:
    drive = opened(num_blocks=4, max_in_flight_steps=3)
    drive.submit("a", 5)
    drive.submit("b", 7)
    drive.schedule()
    drive.schedule()

    events = drive.schedule()

    preempted = the(RequestPreempted, events)
    assert preempted.handle == preempted.for_handle
    assert name_of(drive, preempted.handle) == "b"
    assert work(drive, events) == {"a": 1}, "the others go on"
    drive.run()
    assert outputs(drive) == all_due(drive)


def growing(policy: str, priorities: dict[str, int]) -> Drive:
    """Everybody holds two full blocks, the pool is used up, and the next step wants a third block for each."""
    drive = opened(num_blocks=2 * len(priorities), max_num_batched_tokens=64, policy=policy, max_in_flight_steps=1)
    for name, priority in priorities.items():
        drive.submit(name, 8, max_tokens=2, priority=priority)
    drive.schedule()
    drive.complete()
    return drive


def test_first_come_first_served_preempts_the_last_to_arrive() -> None:
    drive = growing("fcfs", {"a": 3, "b": 2, "c": 1, "d": 0})
    assert victims(drive, drive.schedule()) == ["d", "c"], "d for a and b, c for itself"


def test_by_priority_the_least_urgent_goes_and_the_urgent_run() -> None:
    drive = growing("priority", {"a": 1, "b": 9, "c": 0, "d": 5})

    events = drive.schedule()

    assert victims(drive, events) == ["b", "d"]
    assert list(work(drive, events)) == ["c", "a"]


def test_of_equal_priority_the_last_to_arrive_goes() -> None:
    drive = growing("priority", {"a": 5, "b": 5, "c": 5, "d": 5})
    assert victims(drive, drive.schedule()) == ["d", "c"]


def test_nobody_is_preempted_while_there_is_room() -> None:
    drive = opened(num_blocks=8, policy="priority", max_num_batched_tokens=64)
    drive.submit("low", 8, priority=9, max_tokens=4)
    drive.submit("high", 8, priority=0, max_tokens=4)
    drive.run()
    assert all_of(RequestPreempted, drive.records) == []


def test_nobody_is_preempted_to_let_somebody_in() -> None:
    drive = opened(num_blocks=4, policy="priority")
    drive.submit("low", 12, priority=9, max_tokens=4)
    drive.schedule()
    drive.submit("high", 8, priority=0, max_tokens=2)

    assert work(drive, drive.schedule()) == {"low": 1}
    assert names(drive.state.queues.waiting) == ["high"]
    drive.run()
    assert all_of(RequestPreempted, drive.records) == []
    assert outputs(drive) == all_due(drive)


def test_out_of_memory_the_low_one_goes_and_the_high_one_finishes_first() -> None:
    """The low one comes back with its prompt and the outputs that it has: 30 and 2."""
    drive = opened(
        num_blocks=5,
        block_size=16,
        policy="priority",
        max_num_batched_tokens=200,
        max_in_flight_steps=1,
        enable_prefix_caching=False,
    )
    drive.submit("low", 30, priority=1, max_tokens=10)
    drive.schedule()
    drive.submit("high", 31, priority=0, max_tokens=30)
    drive.complete()
    while not victims(drive, events := drive.schedule()):
        drive.complete()
    assert victims(drive, events) == ["low"]
    known = named(drive, "low").num_output_tokens
    while is_live(drive, "high"):
        if not drive.schedule():
            drive.complete()
    drain(drive)

    assert work(drive, drive.schedule()) == {"low": 30 + known}
    drive.run()
    assert [name for name, _ in ends(drive.records, drive).items()] == ["high", "low"]


def test_nobody_is_let_in_by_a_step_that_preempts() -> None:
    drive = growing("fcfs", {"a": 0, "b": 0, "c": 0, "d": 0})
    drive.submit("tiny", 1, max_tokens=1)

    events = drive.schedule()

    assert victims(drive, events)
    assert the(StepScheduled, events).admissions == []


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("depth", [1, 2, 4, 8])
def test_the_first_in_order_is_never_preempted_for_another(policy: str, depth: int) -> None:
    drive = opened(num_blocks=6, max_in_flight_steps=depth, policy=policy, max_num_seqs=6, max_num_batched_tokens=24)
    for i in range(10):
        drive.submit(f"r{i}", 3 + i % 5, max_tokens=9, priority=i * 7 % 3)
    preemptions = 0
    for _ in range(10_000):
        running = list(drive.state.queues.running)
        events = drive.schedule()
        for event in events:
            if isinstance(event, RequestPreempted):
                preemptions += 1
                order = [r.handle for r in running]
                assert event.for_handle is not None
                assert order.index(event.handle) >= order.index(event.for_handle)
                assert event.handle != order[0]
        if not events:
            if not drive.orders:
                break
            drive.complete()
    assert preemptions
    assert drive.state.is_quiescent
    assert outputs(drive) == all_due(drive)
