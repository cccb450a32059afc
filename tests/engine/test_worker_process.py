"""An engine whose worker is a process: whatever is done to the process, clients see a pause and every token is right."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Self

import pytest

from refold import Engine, Rejected, SamplingParams
from refold.gpu.process import ProcessWorker
from refold.journal.events import EngineConfig, WorkerLost, WorkerStarted
from refold.journal.stores import open_reader
from tests.kit.engines import eventually, lawful_events, must_produce

MODEL = "simulated?vocab=1000&eos=-1&step_ms=3"
PROMPTS = [[number, 7] for number in range(8)]
SAMPLINGS = [SamplingParams(seed=number, max_tokens=150) for number in range(8)]


class Assailant:
    """Makes process workers, and does something to the newest one, again and again, `most` times."""

    def __init__(
        self, signals: list[signal.Signals], pause_s: tuple[float, float], most: int = 3, seed: int = 1
    ) -> None:
        self.made: list[ProcessWorker] = []
        self.done: list[signal.Signals] = []
        self._signals, self._pause_s, self._most, self._random = signals, pause_s, most, random.Random(seed)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def make(self, config: EngineConfig) -> ProcessWorker:
        worker = ProcessWorker(config, silence_s=1.6)
        self.made.append(worker)
        return worker

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        attacked = 0
        while not self._over.wait(self._random.uniform(*self._pause_s)) and len(self.done) < self._most:
            if len(self.made) > attacked:
                attacked = len(self.made)
                how = self._random.choice(self._signals)
                with contextlib.suppress(ProcessLookupError):  # the engine has just closed it
                    os.kill(self.made[-1].pid, how)
                    self.done.append(how)


@pytest.fixture
def journal(tmp_path: Path) -> str:
    return str(tmp_path / "refold.db")


def lives_of(journal: str) -> tuple[list[WorkerLost], list[WorkerStarted]]:
    with contextlib.closing(open_reader(journal)) as reader:
        events = lawful_events(reader)
    return [e for e in events if isinstance(e, WorkerLost)], [e for e in events if isinstance(e, WorkerStarted)]


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize(
    ("signals", "reason"),
    [([signal.SIGKILL, signal.SIGSEGV], "ended by SIG"), ([signal.SIGSTOP], "no sign of life for 1.6 s")],
    ids=["killed", "stopped"],
)
def test_whatever_becomes_of_its_process_the_tokens_are_the_same(
    journal: str, depth: int, signals: list[signal.Signals], reason: str
) -> None:
    options = {"max_in_flight_steps": depth, "num_blocks": 64}
    with (
        Assailant(signals, (0.1, 0.4)) as assailant,
        Engine(MODEL, journal, make_worker=assailant.make, **options) as engine,
    ):
        done = engine.run(PROMPTS, SAMPLINGS)
    due = [must_produce(prompt, sampling, MODEL) for prompt, sampling in zip(PROMPTS, SAMPLINGS, strict=True)]
    assert [each.token_ids for each in done] == due
    lost, started = lives_of(journal)
    assert len(lost) >= 1, "it was attacked while it worked"
    assert all(reason in loss.reason for loss in lost), [loss.reason for loss in lost]
    assert len(started) == len(lost) + 1


def test_the_option_runs_any_model_in_a_process(journal: str) -> None:
    with Engine(MODEL, journal, worker="process") as engine:
        done = engine.run(PROMPTS[:2], [SamplingParams(seed=1, max_tokens=400)] * 2)
    assert done[0].token_ids == must_produce(PROMPTS[0], SamplingParams(seed=1, max_tokens=400), MODEL)


def test_closing_the_engine_leaves_no_process(journal: str) -> None:
    assailant = Assailant([], (1, 1))
    with Engine(MODEL, journal, make_worker=assailant.make) as engine:
        engine.run(PROMPTS[:1], SAMPLINGS[:1])
    (worker,) = assailant.made
    eventually(lambda: not Path(f"/proc/{worker.pid}").exists())


def test_an_engine_that_is_killed_leaves_no_process(tmp_path: Path) -> None:
    program = (
        "from refold import Engine, SamplingParams\n"
        f"engine = Engine({MODEL!r}, {str(tmp_path / 'refold.db')!r}, worker='process').open()\n"
        "print(engine.config.model, flush=True)\n"
        "engine.run([[1]], [SamplingParams(seed=1, max_tokens=4000)])\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None
        assert engine.stdout.readline()
        threads = list(Path(f"/proc/{engine.pid}/task").iterdir())
        pids = [int(pid) for thread in threads for pid in (thread / "children").read_text().split()]
        assert pids, "its worker is a process"
        engine.kill()
    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


@pytest.mark.crash
def test_a_campaign_of_attacks_on_workers_loses_nothing() -> None:
    from tests.engine.worker_campaign import campaign

    seen = campaign(int(os.environ.get("REFOLD_KILLS", "200")), 7, "simulated")
    assert seen["lost"] >= 3
    assert not seen["verdicts"]


@pytest.mark.parametrize("name", ["step_timeout_s", "start_timeout_s"])
def test_a_limit_that_a_worker_in_this_process_cant_be_held_to_is_refused(name: str) -> None:
    with pytest.raises(Rejected, match=f"{name} is 5.0 with worker 'thread', which can't be given up: leave one"):
        Engine("simulated", worker="thread", **{name: 5.0})  # type: ignore[arg-type]
    with pytest.raises(Rejected, match=f"{name} is given with make_worker"):
        Engine("simulated", make_worker=ProcessWorker, **{name: 5.0})  # type: ignore[arg-type]
    with pytest.raises(
        Rejected, match=f"{name} is 5.0 with a simulated model, .* leave it out, or give worker 'process'"
    ):
        Engine("simulated?step_ms=1", **{name: 5.0})  # type: ignore[arg-type]
    Engine("smollm2", **{name: 5.0})  # type: ignore[arg-type]
    Engine("simulated", worker="process", **{name: 5.0})  # type: ignore[arg-type]


def test_a_worker_of_ones_own_is_not_said_to_be_in_a_process() -> None:
    with pytest.raises(Rejected, match="worker is 'process' and make_worker is given"):
        Engine(MODEL, make_worker=ProcessWorker, worker="process")
