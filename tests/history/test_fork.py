"""Forks: played again unchanged, a modelled history is the same; changed, it is what the change makes of it."""

import pytest

from refold.engine.history.fork import changed_config, fork
from refold.engine.history.recording import Step, fitted
from refold.engine.history.rerun import LinearTiming
from refold.journal.errors import NotFound, Rejected
from tests.history.journals import eventful_lives
from tests.history.journals import sealed as sealed_lives
from tests.history.planted_journals import sealed
from tests.history.readers import ListReader
from tests.kit.drive import config
from tests.kit.long_history import long_history
from tests.kit.simulation import Simulation


@pytest.fixture(scope="module")
def reader():
    return ListReader(sealed(list(long_history(30_000, 16))))


def test_unchanged_the_same_history_comes_out_and_the_timing_is_found(reader):
    found = fork(reader, 0, {})
    assert found.recorded == found.same == found.fork
    assert found.timing == LinearTiming(15_000_000, 10_000)
    assert found.fork.num_finished == found.fork.num_requests > 100


def test_a_larger_pool_preempts_nobody(reader):
    found = fork(reader, 0, {"num_blocks": "4096"})
    assert found.same.num_preemptions > 0
    assert found.fork.num_preemptions == 0
    assert found.fork.num_finished == found.same.num_finished
    assert 0 <= found.fork.num_tokens - found.same.num_tokens < 100, "who is aborted had a little more"


def test_fewer_seats_make_the_queue_longer(reader):
    found = fork(reader, 0, {"max_num_seqs": 4})
    assert found.fork.queued.p50_ns > found.same.queued.p50_ns
    assert found.fork.tokens_per_s < found.same.tokens_per_s


def test_a_slower_worker_is_slower(reader):
    slow = fork(reader, 0, {}, LinearTiming(30_000_000, 10_000))
    assert not slow.is_recorded_timing
    assert slow.fork.total.p50_ns > slow.recorded.total.p50_ns


def test_a_fork_in_the_middle_counts_what_comes_behind_it(reader):
    whole, half = fork(reader, 0, {}), fork(reader, len(reader.records) // 2, {"policy": "priority"})
    assert 0 < half.fork.num_finished < whole.fork.num_finished
    assert half.changed.policy == "priority"
    assert half.fork.num_tokens > 0


def test_a_history_with_a_crash_and_sessions_can_be_forked():
    lives, _ = eventful_lives()
    found = fork(ListReader(sealed_lives(lives)), 0, {"num_blocks": 64})
    assert found.fork.num_finished == 7
    assert found.num_unfinished == 0


@pytest.mark.parametrize("seed", range(6))
def test_any_life_can_be_forked(seed):
    simulation = Simulation(seed)
    simulation.play()
    records = sealed_lives([simulation.drive.records])
    found = fork(ListReader(records), 0, {"policy": "fcfs"}, LinearTiming(1000, 10))
    assert found.fork.num_requests >= 1


def test_a_place_that_is_not_there(reader):
    with pytest.raises(NotFound):
        fork(reader, 10**9, {})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"polycy": "fcfs"}, "can't be set"),
        ({"model": "x"}, "can't be set"),
        ({"policy": "best"}, "policy can't be"),
        ({"num_blocks": "many"}, "num_blocks can't be"),
        ({"num_blocks": 0}, "num_blocks is 0"),
        ({"num_blocks": 10**12}, "num_blocks is"),
        ({"block_size": -1}, "block_size is -1"),
        ({"watermark_blocks": 8}, "watermark_blocks is 8"),
        ({"tenant_weights": '{"b": 1, "a": 0}'}, r"tenant_weights\['a'\] is 0: give a weight of 1 to"),
        ({"max_in_flight_steps": "9"}, "max_in_flight_steps is 9"),
    ],
)
def test_a_change_that_makes_no_engine_is_refused(changes, message):
    with pytest.raises(Rejected, match=message):
        changed_config(config(), changes)


def test_values_may_be_text_as_on_a_command_line():
    made = changed_config(
        config(), {"enable_prefix_caching": "false", "speculation_by_batch": "[[8, 4]]", "policy": "priority"}
    )
    assert (made.enable_prefix_caching, made.speculation_by_batch, made.policy) == (False, ((8, 4),), "priority")


def test_the_fit_goes_through_the_steps():
    assert fitted([Step(i, n, 5000 + 7 * n) for i, n in enumerate(range(1, 60))]) == LinearTiming(5000, 7)
    assert fitted([Step(0, 10, 1000)]) == LinearTiming(1000, 0)
    with pytest.raises(Rejected, match="no step came back"):
        fitted([])
