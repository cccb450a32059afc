"""A small part of every row of the fault matrix: `make fault-matrix` runs the whole of each.

Each row runs in a process of its own, as the campaign does: it forks, and some rows need the disk that fails on demand.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.disk import compiled, preloaded
from tests.reliability.judge import Tally
from tests.reliability.matrix import ROWS
from tests.reliability.page import write_page

ROOT = Path(__file__).resolve().parents[2]
SCALES = {
    "kill": 0.004,
    "torn": 0.006,
    "flip": 0.0015,
    "disk": 0.01,
    "lock": 0.1,
    "postgres": 0.03,
    "clock": 0.01,
    "race": 0.01,
}
MUST_SEE = {
    "kill": ["killed in append", "killed in open", "records written"],
    "torn": ["torn writes", "power cuts", "cut after a call"],
    "flip": ["noticed", "changed nothing"],
    "disk": ["told", "engines told"],
    "clock": ["records earlier than the one before"],
    "race": ["appends acknowledged"],
}


def matrix(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "tests.reliability.matrix", *arguments, "--json"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)


def test_the_failing_disk_is_built() -> None:
    assert compiled().is_file(), "without a C compiler half of the matrix proves nothing"


def test_every_row_has_its_share() -> None:
    assert set(SCALES) == set(ROWS)


@pytest.mark.parametrize("row", ROWS)
def test_a_part_of_the_row_is_clean(row: str) -> None:
    done = matrix(row, "--scale", str(SCALES[row]), "--seed", "7")
    assert done.returncode == 0, done.stderr
    tallies = json.loads(done.stdout)
    for tally in tallies:
        assert tally["cycles"] > 0, tally
        assert all(tally["seen"].get(what, 0) > 0 for what in MUST_SEE.get(row, [])), tally


def test_a_store_that_does_not_sync_loses_records_and_the_matrix_says_so() -> None:
    """The row can fail: the same trace without its syncs is a disk's cache that a power cut empties."""
    program = """
import random, sys, tempfile
from pathlib import Path
from tests.reliability import torn
from tests.reliability.drivers import DRIVERS
from tests.reliability.judge import Tally
tally = Tally("torn", "sqlite")
with tempfile.TemporaryDirectory() as name:
    files, calls = torn.traced(DRIVERS["sqlite"], Path(name, "traced"))
    unsynced = [call for call in calls if call.op != "sync"]
    for state in torn.states(files, unsynced, random.Random(1), 0.01):
        torn.judged(tally, torn.put(DRIVERS["sqlite"], Path(name, "found"), state.files), state)
print(tally.lost)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True, env=preloaded(os.environ)
    )
    assert int(done.stdout) > 3


def test_figures_replace_those_of_the_same_row_and_leave_the_others(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- figures: written by make fault-matrix -->\n<!-- end of figures -->\nafter\n")
    write_page(page, [Tally("kill", "sqlite", cycles=3), Tally("kill", "segments", cycles=4)])
    write_page(page, [Tally("kill", "sqlite", cycles=5000)])
    text = page.read_text()
    assert "| `kill` | sqlite | 5,000 | 0 | 0 | 0 |" in text
    assert "| `kill` | segments | 4 |" in text
    assert "| 3 |" not in text
    assert text.startswith("before\n")
    assert text.endswith("after\n")
