"""From `generate` to the first delta of a lone request, for journals and durabilities by turns, each engine in a process of its own.

    python -m benchmarks.first_token [--turns 10] [--requests 100] [--step-s 0.005]

A request is lone: the one before it has ended, and 3 ms have passed. The engines stay open between their turns, as one that serves
does; apart, so that none waits for the interpreter of another, or for its garbage. The worker is simulated: its steps take
`--step-s`, in which an engine encodes and commits what came before; in no time, that is all in the token's way.
"""

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

from refold.engine.engine import Engine
from refold.engine.sampling_params import SamplingParams
from refold.gpu.simulated import SimulatedWorker
from refold.journal.events import EngineConfig

_PAUSE_S = 0.003
_WARM_UP = 30


def first_tokens(
    journals: dict[str, tuple[str, str]],
    turns: int,
    repeats: int,
    step_s: float,
    *,
    after_turn: Callable[[], None] = lambda: None,
) -> dict[str, list[float]]:
    """Times to first tokens, ms, by name; each engine's turn is `repeats` requests, each step of its worker takes `step_s`."""
    times: dict[str, list[float]] = {name: [] for name in journals}
    with contextlib.ExitStack() as opened:
        engines = {name: opened.enter_context(_engine(*where, step_s)) for name, where in journals.items()}
        for _ in range(turns):
            for name, ask in engines.items():
                times[name] += ask(repeats)
            after_turn()
    return times


@contextlib.contextmanager
def _engine(journal: str, durability: str, step_s: float) -> Iterator[Callable[[int], list[float]]]:
    """An engine in a process of its own, as a function from how many requests to their times."""
    order = [sys.executable, "-m", "benchmarks.first_token", "--serve", journal, durability, "--step-s", str(step_s)]
    with subprocess.Popen(order, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        orders, answers = process.stdin, process.stdout
        assert orders is not None
        assert answers is not None

        def ask(repeats: int) -> list[float]:
            orders.write(f"{repeats}\n")
            orders.flush()
            times: list[float] = json.loads(answers.readline())
            return times

        ask(_WARM_UP)
        yield ask
        orders.close()


async def _serve(journal: str, durability: Any, step_s: float) -> None:
    """Answer each line of the input, a number of requests, with a line of their times."""

    def make_worker(config: EngineConfig) -> SimulatedWorker:
        return SimulatedWorker(config, step_seconds=step_s)

    async with Engine("simulated?eos=-1", journal, durability=durability, make_worker=make_worker) as engine:
        for line in sys.stdin:
            print(json.dumps([await _lone(engine) for _ in range(int(line))]), flush=True)


async def _lone(engine: Engine) -> float:
    """One request to its end, and a pause; what its first token took, ms."""
    first_s, started_s = 0.0, time.perf_counter()
    async for _delta in engine.generate([1] * 16, SamplingParams(max_tokens=4)):
        first_s = first_s or time.perf_counter()
    await asyncio.sleep(_PAUSE_S)
    return (first_s - started_s) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description="From `generate` to the first delta, for each durability.")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--serve", nargs=2, metavar=("JOURNAL", "DURABILITY"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(_serve(*options.serve, options.step_s))
        return
    with tempfile.TemporaryDirectory() as folder:
        journals = {
            f"{kind}, {how}": (f"{folder}/{how}{end}", how)
            for kind, end in (("sqlite", ".db"), ("segments", "/"))
            for how in ("buffered", "synced")
        }
        wanted = {"memory": ("memory:", "synced"), **journals}
        for name, times in first_tokens(wanted, options.turns, options.requests, options.step_s).items():
            worst = statistics.quantiles(times, n=100)[-1]
            print(f"first token, {name}: median {statistics.median(times):.2f} ms, p99 {worst:.2f} ms")


if __name__ == "__main__":
    main()
