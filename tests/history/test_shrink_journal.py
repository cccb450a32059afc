"""Twenty journals of engines with a fault are shrunk to short tests, and each still fails in the same way."""

import statistics
import time

import pytest

from refold.engine.history.orders import Answer, orders_of, play
from refold.engine.history.shrink import as_pytest, attempt, shrink_orders
from refold.journal.errors import Rejected
from refold.scheduler.commands import ScheduleStep
from tests.history.journals import sealed
from tests.history.readers import ListReader
from tests.kit.faults import planted, run_pytest
from tests.kit.simulation import Simulation

LIVES = (
    ("share_uncounted", 3, 0.98),
    ("epoch_not_raised", 7, 0.98),
    ("in_flight_forgotten", 7, 0.98),
    ("stale_accumulated", 3, 0.85),
    ("placeholders_kept", 43, 0.9),
    ("salt_ignored", 2, 0.96),
    ("reset_keeps_hashes", 11, 0.96),
    ("parent_ignored", 19, 0.96),
    ("adapter_ignored", 8, 0.97),
    ("stale_settles_placeholders", 7, 0.97),
    ("accepted_counted", 7, 0.97),
    ("newcomer_at_the_end", 66, 0.95),
    ("window_overfull", 0, 0.98),
    ("stale_applies_rejections", 0, 0.95),
    ("finished_not_drained", 21, 0.93),
    ("share_uncounted", 103, 0.97),
    ("epoch_not_raised", 110, 0.96),
    ("in_flight_forgotten", 110, 0.96),
    ("stale_accumulated", 101, 0.5),
    ("placeholders_kept", 165, 0.9),
)
"""Planted faults, seeds whose lives they end after many events, and the share of the events that shrinking removes at least.
When the code changes, another seed may be needed."""

MIN_EVENTS = 150
MAX_S = 60.0


def a_failing_journal(seed):
    """The journal of a life that the planted fault ends, as orders."""
    return orders_of(ListReader(sealed([a_failing_journal_of(seed)])))


def a_failing_journal_of(seed):
    """The records of such a life."""
    simulation = Simulation(seed, turns=500)
    with pytest.raises(Exception):  # noqa: B017, PT011 - whatever it is, it is the fault's work
        simulation.play()
    records = simulation.drive.records
    assert sum(map(len, records)) >= MIN_EVENTS, "another seed has a longer life"
    return records


@pytest.mark.parametrize(("fault", "seed", "removed"), LIVES)
def test_a_failing_journal_shrinks_and_fails_the_same_way(fault, seed, removed):
    with planted(fault):
        heard = a_failing_journal(seed)
        before = attempt(heard.orders, heard.said)[0].failure
        began_s = time.process_time()
        shrunk = shrink_orders(heard.orders, heard.said, MAX_S)
        assert time.process_time() - began_s < MAX_S
        assert before.is_like(shrunk.failure)
        assert before.is_like(attempt(shrunk.orders, shrunk.said)[0].failure)
    assert 1 - shrunk.num_events / heard.num_events >= removed
    assert attempt(shrunk.orders, shrunk.said)[0].failure is None, "without the fault, the orders are obeyed"
    compile(as_pytest(shrunk, fault), "test", "exec")


def test_the_median_journal_loses_19_events_of_20():
    assert len(LIVES) >= 20
    assert statistics.median(removed for _, _, removed in LIVES) >= 0.95


def test_the_written_test_needs_nothing_but_refold(tmp_path):
    file = tmp_path / "test_shrunk.py"
    with planted("share_uncounted"):
        heard = a_failing_journal(3)
        shrunk = shrink_orders(heard.orders, heard.said)
    text = as_pytest(shrunk, "Shrunk.")
    assert "from tests" not in text
    file.write_text(text)
    for fault, status in (("share_uncounted", 1), ("", 0)):
        done = run_pytest(file, fault)
        assert done.returncode == status, done.stdout + done.stderr


def test_what_does_not_fail_is_not_shrunk():
    simulation = Simulation(1)
    simulation.play()
    heard = orders_of(ListReader(sealed([simulation.drive.records])))
    with pytest.raises(Rejected, match="don't fail"):
        shrink_orders(heard.orders, heard.said)


@pytest.mark.parametrize("seed", range(8))
def test_the_orders_of_a_journal_lead_to_its_outputs_again(seed):
    simulation = Simulation(seed)
    simulation.play()
    heard = orders_of(ListReader(sealed([simulation.drive.records])))
    player = play(heard.orders, heard.said)
    assert player.state.is_quiescent
    assert any(isinstance(order, Answer) for order in heard.orders)
    assert any(isinstance(order, ScheduleStep) for order in heard.orders)
