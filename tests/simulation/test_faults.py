"""The laws would catch a bug: each planted fault can still be planted, the page tells of all of them, and some are caught."""

import re
from pathlib import Path

import pytest

from tests.kit.fault_list import FAULTS
from tests.kit.faults import hunt, noticed_by, planted
from tests.kit.form import interpreted_only
from tests.kit.simulation import Simulation

pytestmark = interpreted_only

PAGE = Path(__file__).resolve().parents[2] / "docs" / "planted-faults.md"
ROW = re.compile(r"^\| `(\w+)` \| (.*) \| ([\d,]+) \| (.*) \|$", re.MULTILINE)

FAST = {
    "stale_settles_placeholders": "law L7",
    "placeholders_kept": "law L2",
    "finish_keeps_blocks": "law L3",
    "reset_keeps_hashes": "law L4",
    "salt_ignored": "law L4",
    "newcomer_at_the_end": "law L6",
    "window_overfull": "law L8",
    "encoder_evicted_while_used": "law L13",
    "early_stop_late": "law L15",
    "due_too_late": "law L16",
    "stale_never_finishes": "conduct: early stop",
    "priority_ignored": "conduct: policy",
    "cadence_ignored": "conduct: cadence",
    "decided_by_address": "L12: decided again",
}


@pytest.mark.parametrize("name", [fault.name for fault in FAULTS])
def test_every_fault_can_be_planted(name: str) -> None:
    """A LookupError here means that the code has moved: plant the fault anew in tests/kit/fault_list.py."""
    with planted(name):
        pass


def test_a_fault_is_gone_when_it_is_taken_out() -> None:
    digest = Simulation(0).play()
    with planted("stale_settles_placeholders"), planted("trim_forgotten"):
        pass
    assert Simulation(0).play() == digest


@pytest.mark.parametrize("name", FAST)
def test_fast_faults_are_noticed_by_whom_they_should(name: str) -> None:
    kill = hunt(name, max_seeds=60)
    assert kill.failure is not None, f"{name} survives 60 lives"
    assert noticed_by(kill.failure) == FAST[name], kill.failure


def test_the_page_tells_of_every_fault_and_none_survives() -> None:
    rows = ROW.findall(PAGE.read_text())
    assert [(name, sentence) for name, sentence, _, _ in rows] == [(f.name, f.sentence) for f in FAULTS], "make faults"
    assert len(rows) >= 40
    survivors = [name for name, _, _, who in rows if "nobody" in who]
    assert not survivors
