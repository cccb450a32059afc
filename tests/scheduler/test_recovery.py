"""Recovery: whatever is lost, and wherever, no client misses a token or gets one twice."""

from functools import cache

import pytest

from refold.journal.errors import Rejected
from refold.journal.events import (
    EngineClosed,
    EngineOpened,
    Event,
    OutputDelivered,
    RequestFinished,
    RequestPreempted,
    RequestSubmitted,
    StaleOutputConsumed,
    StepScheduled,
    WorkerLost,
    WorkerStarted,
)
from refold.projections.requests import PREEMPTED, WAITING
from refold.scheduler.commands import CloseEngine, LoseWorker, OpenEngine, RecordDigest, StartWorker
from refold.scheduler.state import digest
from tests.kit.drive import Drive, config
from tests.kit.sentences import (
    all_due,
    all_of,
    counters,
    crashed,
    drain,
    ends,
    fill,
    named,
    names,
    nothing_changes,
    opened,
    outputs,
    reset,
    story,
    the,
    under_pressure,
    work,
)


def lose(drive: Drive) -> list[Event]:
    """The worker dies, and another one starts."""
    lost = drive.do(LoseWorker(reason="killed"))
    drive.do(StartWorker(kind="simulated", environment={}))
    return lost


def crowded() -> Drive:
    """Ten requests in a pool too small for them, three steps deep."""
    drive = opened(num_blocks=10, max_num_seqs=5, max_num_batched_tokens=12, max_in_flight_steps=3)
    for i in range(10):
        drive.submit(f"r{i}", 4 + 3 * (i % 4), max_tokens=3 + 2 * (i % 5))
    return drive


def turn(drive: Drive, number: int) -> None:
    """One turn of a life with pressure, a late arrival and two resets."""
    if number in (9, 25):
        reset(drive)
    if number == 20:
        drive.submit("late", 9, max_tokens=5)
    if not drive.schedule() and drive.orders:
        drive.complete()


# -- the worker -------------------------------------------------------------------------------------------------------


def test_with_the_worker_go_its_steps_and_every_block() -> None:
    drive = under_pressure()
    drive.submit("waits", 4)

    lost = the(WorkerLost, drive.do(LoseWorker(reason="killed")))

    assert (lost.generation, lost.reason, lost.steps) == (1, "killed", [0, 1])
    assert lost.handles == [named(drive, "a").handle, named(drive, "b").handle], "who waits has lost nothing"
    assert not drive.state.window.in_flight
    assert (drive.state.pool.num_free, drive.state.pool.num_fenced) == (4, 0)
    assert names(drive.state.queues.waiting) == ["a", "b", "waits"]
    assert (named(drive, "a").status, named(drive, "waits").status) == (PREEMPTED, WAITING)
    nothing = {"computed": 0, "placeholders": 0, "in_flight": 0, "stale": 0, "deliverable": 0}
    assert counters(drive, "a") == counters(drive, "b") == nothing
    assert (named(drive, "a").epoch, named(drive, "waits").epoch) == (1, 0)


def test_known_tokens_stay_and_are_computed_again() -> None:
    drive = opened()
    drive.submit("a", 6)
    drive.schedule()
    drive.complete()
    drive.schedule()
    lose(drive)
    assert work(drive, drive.schedule()) == {"a": 7}
    drive.run()
    assert outputs(drive) == all_due(drive)


def test_a_worker_lost_while_stale_output_drains_takes_it_along() -> None:
    drive = under_pressure()
    drive.schedule()
    drive.complete()
    assert counters(drive, "b")["deliverable"] == 1

    lose(drive)

    assert counters(drive, "b")["deliverable"] == 0
    assert named(drive, "b").epoch == 2
    drive.run()
    assert outputs(drive) == all_due(drive)


def test_a_finished_request_with_work_in_flight_is_forgotten_with_it() -> None:
    drive = under_pressure()
    drive.abort("b")
    lost = the(WorkerLost, lose(drive))
    assert lost.handles == [named(drive, "a").handle]
    assert list(drive.state.requests.by_handle) == [named(drive, "a").handle]


def test_nothing_is_planned_without_a_worker() -> None:
    drive = opened()
    drive.submit("a", 6)
    drive.do(LoseWorker(reason="killed"))
    assert drive.schedule() == []
    assert drive.do(LoseWorker(reason="again")) == [], "there is none to lose"


def test_workers_are_counted() -> None:
    drive = opened()
    for _ in range(3):
        lose(drive)
    assert [e.generation for e in all_of(WorkerStarted, drive.records)] == [1, 2, 3, 4]
    with nothing_changes(drive), pytest.raises(Rejected, match="has none"):
        drive.do(StartWorker(kind="simulated", environment={}))


@pytest.mark.parametrize("first", range(4))
def test_a_worker_may_die_at_any_point(first: int) -> None:
    deaths = 0
    for border in range(first, 400, 4):
        drive = crowded()
        for number in range(border):
            turn(drive, number)
        if drive.state.is_quiescent:
            break
        lose(drive)
        deaths += 1
        drive.run()
        assert outputs(drive) == all_due(drive)
    assert deaths > 10


def test_workers_may_die_again_and_again_as_long_as_some_steps_come_back() -> None:
    drive = crowded()
    for number in range(1000):
        turn(drive, number)
        if number % 9 == 8:
            lose(drive)
        if drive.state.is_quiescent:
            break
    assert drive.state.is_quiescent
    assert len(all_of(WorkerLost, drive.records)) > 10
    assert outputs(drive) == all_due(drive)


# -- the process ------------------------------------------------------------------------------------------------------


@cache
def long_journal() -> tuple[list[list[Event]], list[str], dict[str, list[int]]]:
    """A whole life: its records, the digest before each and after the last, and what everybody got."""
    drive = crowded()
    digests: list[str] = []
    seen = 0
    for number in range(1000):
        turn(drive, number)
        while len(digests) <= len(drive.records):
            digests.append("")
        digests[len(drive.records)] = digest(drive.state)
        seen = number
        if drive.state.is_quiescent:
            break
    assert seen < 999
    kinds = {type(event) for events in drive.records for event in events}
    assert {RequestPreempted, StaleOutputConsumed, OutputDelivered, StepScheduled, RequestFinished} <= kinds
    assert len(drive.records) > 100
    return drive.records, digests, outputs(drive)


@pytest.mark.parametrize("first", range(4))
def test_a_process_may_die_behind_any_record(first: int) -> None:
    records, digests, uninterrupted = long_journal()
    for border in range(first, len(records) + 1, 4):
        drive = crashed(records[:border], config(**_SIZE))
        assert digests[border] in ("", digest(drive.state)), "the bytes tell what the engine was"
        drive.open()
        drive.run()
        submitted = {e.request_id for e in all_of(RequestSubmitted, records[:border])}
        assert outputs(drive) == {name: uninterrupted[name] for name in submitted}
        assert drive.state.is_quiescent


_SIZE = {"num_blocks": 10, "max_num_seqs": 5, "max_num_batched_tokens": 12, "max_in_flight_steps": 3}


def test_a_process_may_die_again_while_it_recovers() -> None:
    records, _, uninterrupted = long_journal()
    drive = crashed(records[: len(records) // 2], config(**_SIZE))
    for _ in range(5):
        drive.open()
        drive = crashed(drive.records, drive.config)
        drive.do(LoseWorker(reason="engine restarted"))
        drive = crashed(drive.records, drive.config)
    drive.open()
    drive.run()
    submitted = {e.request_id for e in all_of(RequestSubmitted, drive.records)}
    assert outputs(drive) == {name: uninterrupted[name] for name in submitted}


def test_recovery_says_what_was_lost_then_opens_then_starts_a_worker() -> None:
    drive = crashed(under_pressure().records, config(num_blocks=4))
    events = drive.open()
    assert story(events) == ["WorkerLost", "EngineOpened", "WorkerStarted"]
    assert the(WorkerLost, events).steps == [0, 1]
    assert (the(EngineOpened, events).engine_epoch, the(WorkerStarted, events).generation) == (2, 2)


def test_after_a_good_end_nothing_is_lost_but_the_cache() -> None:
    drive = opened()
    drive.submit("a", 6, 3)
    drive.run()
    assert the(EngineClosed, drive.do(CloseEngine(reason="done"))).engine_epoch == 1
    assert drive.do(CloseEngine(reason="again")) == []
    drive = crashed(drive.records, drive.config)
    assert the(WorkerLost, drive.open()).handles == []
    drive.do(RecordDigest())
    assert drive.state.pool.block_by_hash == {}


# -- another configuration --------------------------------------------------------------------------------------------


def test_a_smaller_pool_ends_what_it_can_not_hold_and_serves_the_rest() -> None:
    drive = opened(num_blocks=8)
    drive.submit("large", 9, max_tokens=12)  # five blocks
    drive.submit("small", 5, max_tokens=4)  # two
    fill(drive)
    drive.complete()
    known = named(drive, "large").num_output_tokens

    drive = crashed(drive.records, config(num_blocks=4))
    events = drive.open()

    end = the(RequestFinished, events)
    assert (end.reason, end.num_output_tokens) == ("capacity", known)
    assert f"{9 + known} tokens known; the reopened engine has 4 blocks of 4 and a model length of 256" in end.message
    drive.run()
    assert outputs(drive)["small"] == all_due(drive)["small"]
    assert ends(drive.records, drive)["large"] == ("capacity", known)


@pytest.mark.parametrize(("num_blocks", "fits"), [(5, True), (4, False)])
def test_the_pool_that_just_holds_it_does(num_blocks: int, fits: bool) -> None:
    drive = opened(num_blocks=8)
    drive.submit("r", 9, max_tokens=12)
    drive = crashed(drive.records, config(num_blocks=num_blocks))
    drive.open()
    drive.run()
    assert ends(drive.records, drive)["r"] == (("length", 12) if fits else ("capacity", 0))


def test_a_shorter_model_ends_what_is_too_long_for_it() -> None:
    drive = opened(max_model_len=64)
    drive.submit("long", 20, max_tokens=4)
    drive.submit("short", 10, max_tokens=20)
    drive = crashed(drive.records, config(max_model_len=20))
    assert the(RequestFinished, drive.open()).reason == "capacity"
    drive.run()
    assert ends(drive.records, drive) == {"long": ("capacity", 0), "short": ("length", 10)}


@pytest.mark.parametrize(
    "changes",
    [
        {"block_size": 1, "num_blocks": 40},
        {"block_size": 16, "num_blocks": 6},
        {"policy": "priority"},
        {"max_in_flight_steps": 1},
        {"max_in_flight_steps": 8},
        {"enable_prefix_caching": False},
        {"max_num_batched_tokens": 3, "max_num_seqs": 2},
    ],
)
def test_another_configuration_goes_on_with_the_same_tokens(changes: dict[str, object]) -> None:
    records, _, uninterrupted = long_journal()
    half = records[: len(records) // 2]
    drive = crashed(half, config(**(_SIZE | changes)))
    drive.open()
    drive.run()
    assert outputs(drive) == {e.request_id: uninterrupted[e.request_id] for e in all_of(RequestSubmitted, half)}


def test_another_model_is_refused_while_requests_of_this_one_live() -> None:
    drive = opened()
    drive.submit("a", 6)
    drive.schedule()
    drive = crashed(drive.records, config(model="other", model_fingerprint="f" * 64))
    drive.do(LoseWorker(reason="engine restarted"))
    with (
        nothing_changes(drive),
        pytest.raises(
            Rejected, match=r"1 unfinished requests of model 'simulated' \(simulated\), this is 'other' \(ffff"
        ),
    ):
        drive.open()
    drive.open(config())
    drive.run()
    assert outputs(drive) == all_due(drive)


def test_another_model_is_welcome_when_everybody_has_ended() -> None:
    drive = opened()
    drive.submit("a", 6)
    drive.run()
    drive = crashed(drive.records, config(model="other", model_fingerprint="f" * 64))
    assert the(EngineOpened, drive.open()).config.model == "other"


def test_an_engine_does_not_open_beside_its_living_worker() -> None:
    drive = opened()
    command = OpenEngine(engine_epoch=2, refold_version="test", root_seed=0, config=drive.config)
    with nothing_changes(drive), pytest.raises(Rejected, match="lose the old worker first"):
        drive.do(command)


def test_a_finished_id_stays_taken_after_a_restart() -> None:
    drive = opened()
    drive.submit("a", 6, 2)
    drive.run()
    drive = crashed(drive.records, drive.config)
    drive.open()
    with pytest.raises(Rejected, match="taken"):
        drive.submit("a", 6, 2)


def test_priorities_and_order_survive() -> None:
    drive = opened(policy="priority", max_num_seqs=1)
    for name, priority in {"a": 2, "b": 0, "c": 1}.items():
        drive.submit(name, 4, 2, priority=priority)
    drive = crashed(drive.records, drive.config)
    drive.open()
    drive.run()
    drain(drive)
    assert list(ends(drive.records, drive)) == ["b", "c", "a"]
