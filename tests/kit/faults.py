"""Planting faults, and finding out whether the simulator notices.

    python -m tests.kit.faults                      plants each fault in turn and plays seeds until one fails
    python -m tests.kit.faults --only drop_not_sticky
    python -m tests.kit.faults --write docs/planted-faults.md

A fault is planted by giving a function the code of its edited source, in place, so that everybody who holds the function
gets the fault. As a pytest plugin (`-p tests.kit.faults`), it plants the one named by REFOLD_PLANTED_FAULT for the whole
run.
"""

import argparse
import importlib
import inspect
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import CodeType, FunctionType
from typing import NamedTuple

import pytest

from tests.kit.fault_list import FAULTS, Edit, Fault
from tests.kit.form import IS_COMPILED, WHY
from tests.kit.shrink import Failure
from tests.kit.simulation import Simulation

MAX_SEEDS = 3000
PATIENCE_S = 30
PLUGIN_VARIABLE = "REFOLD_PLANTED_FAULT"

_ROOT = Path(__file__).resolve().parents[2]

_FOR_GOOD = ExitStack()

BY_NAME = {fault.name: fault for fault in FAULTS}


class Kill(NamedTuple):
    """How a fault was noticed: after how many seeds, and by what. `failure` None: it survived them all."""

    fault: Fault
    num_seeds: int
    failure: Failure | None


# -- planting ---------------------------------------------------------------------------------------------------------


@contextmanager
def planted(name: str) -> Iterator[Fault]:
    """The scheduler with a fault. Tests of a compiled core are skipped."""
    if IS_COMPILED:
        pytest.skip(WHY)
    fault = BY_NAME[name]
    before = [(function, function.__code__) for function in {_function(edit.target): None for edit in fault.edits}]
    try:
        for function, _ in before:
            function.__code__ = edited(function, [edit for edit in fault.edits if _function(edit.target) is function])
        yield fault
    finally:
        for function, code in before:
            function.__code__ = code


def _function(target: str) -> FunctionType:
    module, _, path = target.partition(":")
    found: object = importlib.import_module(f"refold.{module}")
    for name in path.split("."):
        found = getattr(found, name)
    assert isinstance(found, FunctionType), target
    return found


def edited(function: FunctionType, edits: Sequence[Edit]) -> CodeType:
    """The function's code after the edits.

    Raises:
        LookupError: a text to be replaced doesn't occur exactly once.
    """
    source = textwrap.dedent(inspect.getsource(function))
    for edit in edits:
        found = source.count(edit.old)
        if found != 1:
            raise LookupError(f"{edit.target} has {found} times, not once: {edit.old!r}")
        source = source.replace(edit.old, edit.new)
    blank_lines = "\n" * (function.__code__.co_firstlineno - 1)
    namespace: dict[str, object] = {}
    exec(compile(blank_lines + source, function.__code__.co_filename, "exec"), function.__globals__, namespace)
    made = namespace[function.__name__]
    assert isinstance(made, FunctionType), function
    return made.__code__


# -- noticing ---------------------------------------------------------------------------------------------------------


def hunt(name: str, max_seeds: int = MAX_SEEDS) -> Kill:
    """Play seeds with the fault planted until one fails."""
    with planted(name) as fault, _alarm():
        for seed in range(max_seeds):
            signal.alarm(PATIENCE_S)
            try:
                Simulation(seed).play()
            except Exception as error:  # noqa: BLE001 - whatever it is, the fault was noticed
                return Kill(fault, seed + 1, Failure.of(error))
        return Kill(fault, max_seeds, None)


@contextmanager
def _alarm() -> Iterator[None]:
    """A life that doesn't end is noticed too."""

    def ring(signal_number: int, frame: object) -> None:
        raise TimeoutError(f"no end after {PATIENCE_S} s")

    before = signal.signal(signal.SIGALRM, ring)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


# -- the page ---------------------------------------------------------------------------------------------------------

HEAD = """<!-- Written by `make faults` from tests/kit/fault_list.py and what the simulator found: edit that. -->

# Planted faults

How do we know that the laws would catch a bug? By planting bugs. Each fault below is one or two wrong lines in the
scheduler; with it planted, the simulator plays lives from seed 0 on until something objects. A fault that survives
{max_seeds:,} lives is a hole in the laws and fails the build.

What objects is a law (`L1` to `L16`, in `scheduler/laws.py`), a rule of conduct (`tests/kit/conduct.py`: what breaks no law
and is wrong all the same), the transcript (each client must be given exactly the tokens of its seed), the simulated worker
(it reads its whole context back before it samples), or an assertion where the fault is used.

One classic is missing: the cursor that isn't shifted after a priority victim. It can't be planted, because there is no
cursor to shift. Both queues are in the policy's order and victims come from the end of it, behind whoever is being planned.

{count} faults, {killed} noticed: half of them within {median} lives, the hardest within {most:,}.

| fault | what is wrong | lives until noticed | noticed by |
|---|---|---|---|
"""


def noticed_by(failure: Failure) -> str:
    """Who objected, in a word or two."""
    if failure.kind == "InvariantViolation":
        return f"law {failure.place}"
    if failure.kind == "Misconduct":
        return f"conduct: {failure.place}"
    if failure.kind == "WrongOutput":
        return f"transcript: {failure.place}"
    if failure.place.startswith("simulated."):
        return "the worker's reading"
    if failure.place in _NOTICED_AT:
        return _NOTICED_AT[failure.place]
    return f"{'assertion' if failure.kind == 'AssertionError' else failure.kind} in `{failure.place}`"


_NOTICED_AT = {
    "player.decided_again": "L12: decided again",
    "player._reopen": "digest of the fold",
    "player._deliver_wrong": "a wrong answer was accepted",
    "player._answer_again": "an answer was accepted twice",
    "completion._check_position": "the position check",
    "completion._check_shape": "the check of an answer's shape",
    "completion._expected_step": "the check of the steps' order",
    "faults.ring": "no end",
}


def page(kills: Sequence[Kill]) -> str:
    """The page of the documentation."""
    numbers = sorted(kill.num_seeds for kill in kills if kill.failure is not None) or [0]
    head = HEAD.format(
        max_seeds=MAX_SEEDS, count=len(kills), killed=len(numbers), median=numbers[len(numbers) // 2], most=numbers[-1]
    )
    rows = [
        f"| `{kill.fault.name}` | {kill.fault.sentence} | {kill.num_seeds:,} | "
        f"{noticed_by(kill.failure) if kill.failure else '**nobody**'} |"
        for kill in kills
    ]
    return head + "\n".join(rows) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. 1 if a fault survives."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", default=[fault.name for fault in FAULTS])
    parser.add_argument("--seeds", type=int, default=MAX_SEEDS)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the page of the documentation")
    options = parser.parse_args(argv)
    kills: list[Kill] = []
    with ProcessPoolExecutor(options.jobs) as pool:
        for hunted in as_completed([pool.submit(hunt, name, options.seeds) for name in options.only]):
            kill = hunted.result()
            kills.append(kill)
            what = str(kill.failure)[:150] if kill.failure else "SURVIVES"
            print(f"{kill.fault.name:34} {kill.num_seeds:6,}  {what}", flush=True)
    kills.sort(key=lambda kill: options.only.index(kill.fault.name))
    if options.write:
        options.write.write_text(page(kills))
    survivors = [kill.fault.name for kill in kills if kill.failure is None]
    print(f"{len(kills)} faults, {len(survivors)} survive{': ' + ', '.join(survivors) if survivors else ''}")
    return 1 if survivors else 0


def run_pytest(file: Path, fault: str) -> subprocess.CompletedProcess[str]:
    """Run a test file in a process of its own, with a fault planted; with none if it is empty."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "tests.kit.faults", "-p", "no:cacheprovider", str(file)],
        cwd=_ROOT,
        env=os.environ | {PLUGIN_VARIABLE: fault, "PYTHONPATH": f"{_ROOT}{os.pathsep}{_ROOT / 'src'}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def pytest_configure() -> None:
    """As a plugin: plant a fault and leave it."""
    if name := os.environ.get(PLUGIN_VARIABLE):
        _FOR_GOOD.enter_context(planted(name))


if __name__ == "__main__":
    sys.exit(main())
