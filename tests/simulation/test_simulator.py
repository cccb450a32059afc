"""The simulator itself: a short run of it, the same bytes every time, and a failure that tells how to see it again."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.faults import planted
from tests.kit.player import Player
from tests.kit.shrink import attempt
from tests.kit.simulation import MIN_STEPS, Simulation
from tests.kit.simulator import Options, main, play_some

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("first", range(0, 100, 25))
def test_random_lives_break_no_law(first: int) -> None:
    tally = play_some(first, 25, Options())
    assert not tally.failures, "\n".join(f"seed {seed}: {failure}" for seed, failure in tally.failures)
    assert min(tally.num_steps) >= MIN_STEPS
    for hazard in ("RequestPreempted", "CacheReset", "WorkerLost", "SessionTurnEnded", "GrammarReady", "EnginePaused"):
        assert tally.seen[hazard], f"no {hazard} in 25 lives: they prove little"


def test_a_life_can_end_at_every_border_of_its_records() -> None:
    tally = play_some(3, 1, Options(every_border=True))
    assert not tally.failures, tally.failures
    assert tally.seen["borders"] > MIN_STEPS


def run_simulator(*arguments: str, hash_seed: str = "0") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.kit.simulator", "--jobs", "1", *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_a_seed_gives_the_same_bytes_twice_and_under_another_hash_seed() -> None:
    runs = [
        run_simulator("--first", "30", "--seeds", "25", *twice, hash_seed=hash_seed)
        for hash_seed, twice in (("0", ["--twice"]), ("1", []), ("4294967295", []))
    ]
    assert [run.returncode for run in runs] == [0, 0, 0], runs[0].stdout + runs[0].stderr
    last_lines = {run.stdout.splitlines()[-1] for run in runs}
    assert len(last_lines) == 1
    assert "sha256 of all journals" in last_lines.pop()


def test_a_failure_prints_one_line_that_reproduces_it(capsys: pytest.CaptureFixture[str]) -> None:
    with planted("stale_settles_placeholders"):
        assert main(["--seeds", "8", "--jobs", "1"]) == 1
        lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("seed ")]
        assert lines
        for line in lines:
            assert "InvariantViolation" in line
            command = line.split(" | again: ")[1]
            arguments = command.removeprefix("python -m tests.kit.simulator ").split()
            assert main([*arguments, "--jobs", "1"]) == 1
            assert line in capsys.readouterr().out
    assert main([*arguments, "--jobs", "1"]) == 0


@pytest.mark.parametrize("seed", range(4))
def test_any_part_of_a_life_is_a_life(seed: int) -> None:
    """Orders that have nothing to act on do nothing: shrinking may leave out what it likes."""
    simulation, rng = Simulation(seed), random.Random(seed)
    config = simulation.drive.config
    simulation.play()
    orders = simulation.drive.orders_given
    for _ in range(6):
        part = [order for order in orders if rng.random() < 0.6]
        failure, begun = attempt(config, part)
        assert failure is None, failure
        assert begun == len(part)


def test_the_orders_of_a_life_give_its_journal() -> None:
    simulation = Simulation(11)
    config = simulation.drive.config
    digest = simulation.play()
    again = Player(config)
    again.open()
    for order in simulation.drive.orders_given:
        again.obey(order)
    assert again.judge() == digest
