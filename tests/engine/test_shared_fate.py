"""A worker in the engine's process that kills it: nobody is convicted for the death of an engine, and the next one warns."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from refold import Engine, SamplingParams
from refold.gpu.simulated import SimulatedWorker
from refold.journal.events import RequestQuarantined, WorkerLost
from refold.journal.stores import open_reader
from tests.kit.engines import MODEL, lawful_events, must_produce

PROGRAM = """
import os, signal
from refold import Engine, SamplingParams
from refold.gpu.simulated import SimulatedWorker

class Poisoned(SimulatedWorker):
    def execute(self, order):
        if any(admitted.token_ids[0] == 666 for admitted in order.admitted):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().execute(order)

with Engine({model!r}, {journal!r}, make_worker=Poisoned) as engine:
    if engine.recovery.records == 0:
        engine.pause()
        for number in range(2):
            engine.enqueue([666, number], SamplingParams(seed=number, max_tokens=4), request_id=f"r{{number}}")
        engine.unpause()
    engine.wait()
"""


@pytest.fixture(scope="module")
def four_deaths(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a journal over which four engines died of a poison in their own process."""
    folder = tmp_path_factory.mktemp("deadly")
    journal = str(folder / "journal.db")
    code = PROGRAM.format(model=MODEL, journal=journal)
    for number in range(4):
        ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
        assert ran.returncode == -9, ran.stderr
        assert ("worker_shares_the_engines_fate" in ran.stderr) == (number > 0)
    return folder


@pytest.fixture
def deadly(four_deaths: Path, tmp_path: Path) -> str:
    """A copy of that journal."""
    shutil.copytree(four_deaths, tmp_path / "copy")
    return str(tmp_path / "copy" / "journal.db")


def test_engines_that_died_convict_nobody_and_the_next_one_names_who_was_there(
    deadly: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with Engine(MODEL, deadly, make_worker=SimulatedWorker) as engine:
        for number, done in enumerate(engine.wait(["r0", "r1"])):
            assert done.token_ids == must_produce([666, number], SamplingParams(seed=number, max_tokens=4))
    events = lawful_events(open_reader(deadly))
    assert not [event for event in events if isinstance(event, RequestQuarantined)]
    assert not any(event.suspects for event in events if isinstance(event, WorkerLost))
    told = capsys.readouterr().err
    assert told.count("worker_shares_the_engines_fate") == 1
    assert '"requests": ["r0"' in told
    assert "open the journal with worker='process'" in told


def test_an_engine_whose_worker_is_elsewhere_or_whose_forerunner_closed_does_not_warn(
    deadly: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with Engine(MODEL, deadly, worker="process") as engine:
        engine.wait(["r0"])
    with Engine(MODEL, deadly, worker="thread"):
        pass
    assert "worker_shares" not in capsys.readouterr().err
