"""Pauses: what is held back, what goes on, and that nobody who has run is left behind."""

import pytest

from refold.journal.errors import Rejected
from refold.journal.events import EnginePaused, EngineResumed, PauseMode, RequestPreempted
from tests.kit.drive import Drive
from tests.kit.features import close, extend, judged, lose_worker, pause, resume, settle
from tests.kit.sentences import (
    all_due,
    all_of,
    drain,
    fill,
    is_live,
    named,
    names,
    nothing_changes,
    opened,
    outputs,
    reset,
    story,
    the,
    under_pressure,
    victims,
    work,
)

MODES: tuple[PauseMode, ...] = ("new", "all", "drain")
HELD_BACK: tuple[PauseMode, ...] = ("new", "drain")


def running(**changes: object) -> Drive:
    """`a` runs with two steps in flight; `b` has never run."""
    drive = opened(**({"num_blocks": 16, "max_in_flight_steps": 3, "max_num_batched_tokens": 16} | changes))
    drive.submit("a", 5, 8)
    drive.schedule()
    drive.schedule()
    drive.submit("b", 5, 8)
    return drive


# -- all --------------------------------------------------------------------------------------------------------------


def test_paused_whole_it_plans_no_step_and_steps_in_flight_still_come_back() -> None:
    drive = running()
    assert story(pause(drive, "all")) == ["EnginePaused"]
    assert drive.schedule() == []
    assert [story(drive.complete()) for _ in range(2)] == [["OutputDelivered"]] * 2
    assert drive.schedule() == [], "with nothing in flight either"
    assert len(outputs(drive)["a"]) == 2


def test_paused_whole_it_takes_requests_and_serves_them_when_it_goes_on() -> None:
    drive = running()
    pause(drive, "all")
    drive.submit("c", 3, 2)
    assert drive.schedule() == []
    assert story(resume(drive)) == ["EngineResumed"]
    drive.run()
    assert outputs(drive) == all_due(drive)


@pytest.mark.parametrize("mode", MODES)
def test_an_end_that_is_in_flight_is_still_an_end(mode: PauseMode) -> None:
    drive = opened()
    drive.submit("a", 5, 1)
    drive.schedule()
    pause(drive, mode)
    assert "RequestFinished" in story(drive.complete())
    assert drive.state.is_quiescent


@pytest.mark.parametrize("mode", MODES)
def test_a_paused_engine_still_obeys(mode: PauseMode) -> None:
    drive = running()
    drive.submit("s", 3, 1, resumable=True)
    pause(drive, mode)
    assert story(drive.abort("b")) == ["RequestAborted", "RequestFinished"]
    assert story(reset(drive)) == ["RequestPreempted", "CacheReset"]
    assert story(extend(drive, "s", [1])) == ["SessionExtended"]
    assert story(close(drive, "s")) == ["SessionClosed"]
    assert story(lose_worker(drive)) == ["WorkerLost", "WorkerStarted"]
    assert drive.state.paused == mode
    resume(drive)
    settle(drive)
    assert outputs(drive)["a"] == all_due(drive)["a"]


# -- new, drain -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", HELD_BACK)
def test_who_runs_goes_on_and_who_never_ran_does_not_come_in(mode: PauseMode) -> None:
    drive = running()
    pause(drive, mode)
    assert work(drive, drive.schedule()) == {"a": 1}
    settle(drive)
    assert not is_live(drive, "a")
    assert names(drive.state.queues.waiting) == ["b"]
    assert drive.schedule() == []
    resume(drive)
    drive.run()
    assert outputs(drive) == all_due(drive)


@pytest.mark.parametrize("mode", HELD_BACK)
def test_a_prompt_that_has_begun_is_computed_to_its_end(mode: PauseMode) -> None:
    drive = opened(max_num_batched_tokens=4)
    drive.submit("a", 11, 2)
    drive.schedule()
    pause(drive, mode)
    settle(drive)
    assert outputs(drive) == all_due(drive)


@pytest.mark.parametrize("mode", HELD_BACK)
def test_a_request_that_was_preempted_meanwhile_comes_back(mode: PauseMode) -> None:
    drive = under_pressure()
    drive.submit("c", 3, 2)
    pause(drive, mode)
    assert victims(drive, drive.schedule()) == ["b"]
    settle(drive)
    assert outputs(drive) == all_due(drive) | {"c": []}, "a and b have all of theirs, c never ran"
    assert names(drive.state.queues.waiting) == ["c"]


@pytest.mark.parametrize("mode", HELD_BACK)
@pytest.mark.parametrize("bump", [reset, lose_worker])
def test_so_do_those_whose_cache_or_worker_went(mode: PauseMode, bump: object) -> None:
    drive = running()
    pause(drive, mode)
    assert callable(bump)
    bump(drive)
    assert list(work(drive, drive.schedule())) == ["a"]
    settle(drive)
    assert outputs(drive) == all_due(drive) | {"b": []}


@pytest.mark.parametrize("mode", HELD_BACK)
def test_a_preempted_request_comes_back_before_a_new_one_that_is_more_urgent(mode: PauseMode) -> None:
    drive = opened(num_blocks=4, max_in_flight_steps=1, policy="priority")
    drive.submit("a", 7, 8, priority=1)
    drive.submit("b", 7, 8, priority=2)
    while not all_of(RequestPreempted, drive.records):
        drive.schedule()
        drain(drive)
    pause(drive, mode)
    if mode == "new":
        drive.submit("urgent", 3, 1, priority=0)
    settle(drive)
    assert [name for name in "ab" if is_live(drive, name)] == []
    assert is_live(drive, "urgent") == (mode == "new")


@pytest.mark.parametrize("mode", HELD_BACK)
def test_the_next_turn_of_a_session_is_not_new_and_its_first_is(mode: PauseMode) -> None:
    drive = opened(num_blocks=16)
    drive.submit("s", 5, 2, resumable=True)
    settle(drive)
    drive.submit("t", 5, 2, resumable=True)
    pause(drive, mode)
    extend(drive, "s", [1, 2], max_tokens=2)
    assert list(work(drive, drive.schedule())) == ["s"]
    settle(drive)
    reset(drive)
    extend(drive, "s", [3], max_tokens=2)
    assert list(work(drive, drive.schedule())) == ["s"], "even without its blocks"
    settle(drive)
    assert named(drive, "t").num_output_tokens == 0
    resume(drive)
    settle(drive)
    close(drive, "s")
    close(drive, "t")
    assert not judged(drive).unfinished


def test_paused_for_new_ones_it_takes_them_all_the_same() -> None:
    drive = running()
    pause(drive, "new")
    assert story(drive.submit("c", 3, 2)) == ["RequestSubmitted"]


def test_draining_it_refuses_them_until_it_goes_on() -> None:
    drive = running()
    pause(drive, "drain")
    with (
        nothing_changes(drive),
        pytest.raises(Rejected, match="'c': the engine is draining; send it to another, or wait"),
    ):
        drive.submit("c", 3, 2)
    resume(drive)
    assert story(drive.submit("c", 3, 2)) == ["RequestSubmitted"]
    drive.run()
    assert outputs(drive) == all_due(drive)


# -- pausing again, going on ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_to_pause_what_is_paused_alike_is_to_do_nothing(mode: PauseMode) -> None:
    drive = running()
    assert the(EnginePaused, pause(drive, mode)).mode == mode
    with nothing_changes(drive):
        assert pause(drive, mode) == []
    assert the(EngineResumed, resume(drive))
    with nothing_changes(drive):
        assert resume(drive) == []


def test_one_pause_may_follow_another() -> None:
    drive = running()
    pause(drive, "all")
    assert drive.schedule() == []
    pause(drive, "new")
    assert work(drive, drive.schedule()) == {"a": 1}
    pause(drive, "drain")
    with pytest.raises(Rejected, match="draining"):
        drive.submit("c", 3, 2)
    pause(drive, "all")
    drain(drive)
    assert fill(drive) == []


@pytest.mark.parametrize("mode", MODES)
def test_an_engine_that_opens_again_is_not_paused(mode: PauseMode) -> None:
    drive = running()
    pause(drive, mode)
    drive.open()
    assert drive.state.paused is None
    drive.run()
    assert outputs(drive) == all_due(drive)
