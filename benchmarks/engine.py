"""What the engine's shell costs around a step: threads, inbox, journal, delivery to clients.

    python benchmarks/engine.py [--requests 64] [--tokens 300]

`step` is wall time per step of a steady decode with the simulated worker, whose own time is told apart (both share one
interpreter lock, so the sum is what counts), and `cpu` what the whole process spends, clients and journal included, which
is steadier on a busy machine. First tokens: `benchmarks.first_token`.
"""

import argparse
import asyncio
import tempfile
import time
from pathlib import Path

from refold.engine.engine import Engine
from refold.engine.sampling_params import SamplingParams
from refold.gpu.batch import StepOutput, WorkOrder
from refold.gpu.simulated import SimulatedWorker
from refold.journal.events import EngineConfig


class Timed(SimulatedWorker):
    """A simulated worker that keeps the time it takes."""

    busy_s = 0.0

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config, check_context=False)

    def execute(self, order: WorkOrder) -> StepOutput:
        started_s = time.perf_counter()
        try:
            return super().execute(order)
        finally:
            Timed.busy_s += time.perf_counter() - started_s


def decode(journal: str, num_requests: int, num_tokens: int, *, with_clients: bool) -> tuple[float, float, float]:
    """Wall time, the worker's time and the process's CPU time per step, µs."""

    async def clients(engine: Engine) -> None:
        async def one() -> None:
            async for _ in engine.generate([1] * 16, SamplingParams(max_tokens=num_tokens)):
                pass

        await asyncio.gather(*(one() for _ in range(num_requests)))

    Timed.busy_s = 0.0
    options = {"max_num_seqs": num_requests, "num_blocks": 1 << 14, "max_num_batched_tokens": 4096}
    with Engine("simulated?eos=-1", journal, make_worker=Timed, **options) as engine:  # type: ignore[arg-type]
        started_s, started_cpu_s = time.perf_counter(), time.process_time()
        if with_clients:
            asyncio.run(clients(engine))
        else:
            engine.run([[1] * 16] * num_requests, SamplingParams(max_tokens=num_tokens))
        wall_s, cpu_s = time.perf_counter() - started_s, time.process_time() - started_cpu_s
        steps = engine.stats().steps
    return wall_s / steps * 1e6, Timed.busy_s / steps * 1e6, cpu_s / steps * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description="What the engine's shell costs around a step.")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=300)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for name, journal in (("memory", "memory:"), ("sqlite", str(Path(folder, "step.db")))):
            for with_clients in (False, True):
                wall, worker, cpu = decode(journal, arguments.requests, arguments.tokens, with_clients=with_clients)
                how = "async streams" if with_clients else "run()"
                print(
                    f"step, {arguments.requests} requests, {name}, {how}: {wall:.0f} us, worker {worker:.0f}, "
                    f"rest {wall - worker:.0f}; cpu {cpu:.0f}"
                )


if __name__ == "__main__":
    main()
