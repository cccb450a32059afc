"""The stall report: who waits, for what, how much of it is there, and who has the rest."""

from typing import get_args

import pytest

from refold.scheduler.commands import LoseWorker
from refold.scheduler.stall import StallReport, Waiter, WaitReason, stall_report
from tests.kit.drive import Drive
from tests.kit.features import drafting, extend, pause, picture, ready, resume, settle
from tests.kit.sentences import fill, opened, reset, token_at, under_pressure, victims


def reasons(drive: Drive) -> dict[str, str]:
    """Request -> what it waits for."""
    return {waiter.request_id: waiter.reason for waiter in stall_report(drive.state).waiters}


def waiter(drive: Drive, name: str) -> Waiter:
    """One line of the report."""
    return next(each for each in stall_report(drive.state).waiters if each.request_id == name)


# -- waiting for somebody outside -------------------------------------------------------------------------------------


def test_without_a_worker_everybody_waits_for_one() -> None:
    drive = opened(num_blocks=16, max_num_seqs=1)
    drive.submit("a", 3)
    drive.submit("b", 3)
    drive.schedule()
    drive.do(LoseWorker(reason="test"))
    assert drive.schedule() == []
    assert reasons(drive) == {"a": "worker", "b": "worker"}
    assert not stall_report(drive.state).is_wedged


def test_in_a_paused_engine_everybody_waits_for_it_to_go_on() -> None:
    drive = opened(num_blocks=16, max_in_flight_steps=1)
    drive.submit("a", 3)
    drive.schedule()
    drive.complete()
    drive.submit("b", 3)
    pause(drive, "all")
    assert drive.schedule() == []
    assert reasons(drive) == {"a": "pause", "b": "pause"}
    assert not stall_report(drive.state).is_wedged


@pytest.mark.parametrize("mode", ["new", "drain"])
def test_paused_for_new_ones_only_they_wait_for_it(mode: str) -> None:
    drive = opened(num_blocks=16)
    drive.submit("a", 3, 2)
    drive.submit("s", 3, 2, resumable=True)
    settle(drive)
    drive.submit("b", 3)
    pause(drive, mode)  # type: ignore[arg-type]
    assert drive.schedule() == []
    assert reasons(drive) == {"b": "pause", "s": "input"}
    assert not stall_report(drive.state).is_wedged


def test_a_constrained_request_waits_for_its_grammar() -> None:
    drive = opened(num_blocks=16)
    drive.submit("g", 3, grammar="json")
    assert drive.schedule() == []
    assert reasons(drive) == {"g": "grammar"}
    assert not stall_report(drive.state).is_wedged


def test_an_idle_session_waits_for_input() -> None:
    drive = opened(num_blocks=16)
    drive.submit("s", 6, 2, resumable=True)
    settle(drive)
    assert drive.schedule() == []
    assert waiter(drive, "s") == Waiter("s", "idle", "input", 0, 2)
    assert not stall_report(drive.state).is_wedged


# -- waiting for what is in flight ------------------------------------------------------------------------------------


def test_behind_a_full_window_everybody_waits_for_a_step() -> None:
    drive = opened(num_blocks=16)
    drive.submit("a", 3)
    fill(drive)
    drive.submit("b", 3)
    assert drive.schedule() == []
    assert reasons(drive) == {"a": "window", "b": "window"}


@pytest.mark.parametrize("case", ["its end is in flight", "its end may be in flight", "its last token is not known"])
def test_whoever_must_hear_first_waits_for_its_output(case: str) -> None:
    if case == "its end is in flight":
        drive = opened(max_in_flight_steps=4)
        drive.submit("a", 3, 2)
    elif case == "its end may be in flight":
        drive, _ = drafting(3, 0, max_in_flight_steps=4)
        drive.submit("a", 3, 5)
    else:
        drive = opened(max_in_flight_steps=4)
        drive.submit("a", 3, grammar="json")
        ready(drive, "a")
    fill(drive)
    assert len(drive.orders) < 4
    assert reasons(drive) == {"a": "output"}


def test_whoever_keeps_its_distance_waits_for_its_last_sample() -> None:
    drive = opened(max_in_flight_steps=4, decode_stagger=3)
    drive.submit("a", 3)
    drive.schedule()
    assert drive.schedule() == []
    assert reasons(drive) == {"a": "cadence"}


def test_a_victim_waits_for_its_stale_output_and_its_better_for_the_fence() -> None:
    drive = under_pressure(depth=4)
    assert victims(drive, drive.schedule()) == ["b"]
    assert drive.schedule() == []

    report = stall_report(drive.state)

    assert reasons(drive) == {"a": "fence", "b": "stale_output"}
    assert waiter(drive, "a") == Waiter("a", "running", "fence", 1, 2)
    assert waiter(drive, "b") == Waiter("b", "preempted", "stale_output", 2, 0)
    assert (report.num_blocks, report.num_free, report.num_fenced, report.holders) == (4, 0, 2, [("a", 2)])
    assert str(report) == (
        "0 of 4 blocks free, 2 fenced; 'a' waits for blocks behind a step in flight (1 needed); "
        "'b' waits for its stale output to drain; held: 'a' 2"
    )


def test_a_newcomer_may_wait_for_a_fence_as_well() -> None:
    drive = opened(num_blocks=4, max_in_flight_steps=4)
    drive.submit("a", 7, stop_token_ids=(token_at(drive, "a", 7, prompt=7),))
    fill(drive)
    drive.complete()
    drive.submit("b", 13, 1)
    assert drive.schedule() == []
    assert waiter(drive, "b") == Waiter("b", "waiting", "fence", 4, 0)


# -- waiting for room -------------------------------------------------------------------------------------------------


def test_with_every_seat_taken_the_first_waits_for_a_seat_and_the_others_for_their_turn() -> None:
    drive = opened(num_blocks=16, max_num_seqs=1, max_in_flight_steps=4)
    for name in "abc":
        drive.submit(name, 3, 2)
    fill(drive)
    assert reasons(drive) == {"a": "output", "b": "seat", "c": "seat"}


def test_the_first_who_does_not_fit_waits_for_blocks_and_those_behind_it_for_their_turn() -> None:
    drive = opened(num_blocks=5, max_in_flight_steps=4, max_num_batched_tokens=8)
    drive.submit("a", 8, 2)
    drive.submit("b", 12, 2)
    drive.submit("c", 3, 2)
    fill(drive)
    assert reasons(drive) == {"a": "output", "b": "blocks", "c": "turn"}
    assert waiter(drive, "b") == Waiter("b", "waiting", "blocks", 3, 0)
    assert str(stall_report(drive.state)) == (
        "2 of 5 blocks free, 0 fenced; 'a' waits for its own output in flight; 'b' waits for blocks (3 needed); "
        "'c' waits for its turn; held: 'a' 3"
    )


def test_whoever_lacks_nothing_but_its_picture_waits_for_the_encoder() -> None:
    drive = opened(num_blocks=32, encoder_budget_tokens=8, encoder_cache_tokens=8, max_in_flight_steps=4)
    drive.submit("a", 9, 1, media=[picture("cat", 0, 8)])
    drive.submit("b", 9, 1, media=[picture("dog", 0, 8)])
    fill(drive)
    assert reasons(drive) == {"a": "output", "b": "encoder"}
    assert "'b' waits for the encoder's output for its media" in str(stall_report(drive.state))


def test_a_session_that_waits_is_named_with_what_it_holds() -> None:
    drive = opened(num_blocks=16, max_num_seqs=1, max_in_flight_steps=1)
    drive.submit("s", 7, 2, resumable=True)
    settle(drive)
    drive.submit("a", 3, 9)
    drive.schedule()
    drive.complete()
    extend(drive, "s", [1, 2, 3])
    drive.schedule()
    assert waiter(drive, "s") == Waiter("s", "waiting", "window", 1, 2)


# -- the report as such -----------------------------------------------------------------------------------------------

OUTSIDE = ("worker", "pause", "grammar", "input")


@pytest.mark.parametrize("reason", get_args(WaitReason))
def test_who_waits_for_somebody_outside_is_not_stuck_and_everybody_else_is(reason: WaitReason) -> None:
    report = StallReport(4, 4, 0, [Waiter("a", "waiting", reason, 1, 0)], [])
    assert report.is_wedged == (reason not in OUTSIDE)


def test_one_who_is_stuck_among_those_who_wait_for_somebody_is_enough() -> None:
    waits = [Waiter("a", "idle", "input", 0, 2), Waiter("b", "waiting", "blocks", 3, 0)]
    assert StallReport(4, 2, 0, waits, [("a", 2)]).is_wedged
    assert not StallReport(4, 2, 0, waits[:1], [("a", 2)]).is_wedged


def test_an_engine_with_nothing_to_do_is_not_stuck() -> None:
    drive = opened()
    report = stall_report(drive.state)
    assert not report.is_wedged
    assert str(report) == "8 of 8 blocks free, 0 fenced; nobody waits; held: none"


def test_the_line_stays_a_line_however_many_wait() -> None:
    drive = opened(num_blocks=64)
    for i in range(20):
        drive.submit(f"r{i:02}", 3)
    pause(drive, "all")
    text = str(stall_report(drive.state))
    assert "\n" not in text
    assert text.count("waits for") == 8
    assert text.endswith(" and 12 more; held: none")


def test_those_who_hold_most_are_named_first() -> None:
    drive = opened(num_blocks=32, max_num_batched_tokens=64)
    for name, prompt in (("a", 3), ("b", 13), ("c", 7), ("d", 8)):
        drive.submit(name, prompt)
    drive.schedule()
    assert stall_report(drive.state).holders == [("b", 4), ("c", 2), ("d", 2), ("a", 1)]


@pytest.mark.parametrize("depth", [1, 2, 4, 8])
def test_whenever_nothing_is_in_flight_and_nothing_can_be_done_nobody_is_stuck(depth: int) -> None:
    drive = opened(
        num_blocks=8,
        max_in_flight_steps=depth,
        encoder_budget_tokens=4,
        encoder_cache_tokens=4,
        decode_stagger=min(depth, 2),
    )
    for i in range(3):
        drive.submit(f"p{i}", 5 + i, 9)
        drive.submit(f"g{i}", 5, 9, grammar="json")
        drive.submit(f"s{i}", 6, 5, resumable=True)
        drive.submit(f"m{i}", 6, 5, media=[picture(f"m{i}", 1, 4)])
    asked = 0
    for turn in range(12):
        settle(drive)
        assert not stall_report(drive.state).is_wedged, str(stall_report(drive.state))
        asked += len(stall_report(drive.state).waiters)
        for name in (f"s{turn % 3}", f"s{(turn + 1) % 3}"):
            extend(drive, name, [], max_tokens=1, seed=turn)
        if turn % 4 == 1:
            pause(drive, "new")
        if turn % 4 == 3:
            resume(drive)
            reset(drive)
    assert asked > 30
    assert {r.request_id[0] for r in drive.state.requests.live()} == {"g", "s"}, "all others have ended"
