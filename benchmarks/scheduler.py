"""What a step of the scheduler costs: decide, append, fold, for a step and for its output.

    python benchmarks/scheduler.py [--requests 16 64 256 1024] [--steps 200] [--journal off memory sqlite]

CPU time of the engine's thread in µs per step (schedule and completion together), p50 and p99, for a steady decode, under
KV pressure (a pool of 60 % of demand, requests replaced as they finish), with a shared prefix of 2,048 tokens, with
speculation (k = 3, 70 % of the drafts accepted), and with requests finishing and being replaced all the time. The worker's
answer is made outside the measured time.
"""

import argparse
import contextlib
import gc
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from typing import NamedTuple

from refold.engine.turns import is_awaited
from refold.journal.events import EngineConfig, Event, Sampling, StepScheduled
from refold.journal.stores import open_store
from refold.journal.writer import JournalWriter
from refold.migrations import upgrade
from refold.scheduler.commands import Command, CompleteStep, OpenEngine, ScheduleStep, StartWorker, SubmitRequest
from refold.scheduler.decide import decide
from refold.scheduler.fold import fold
from refold.scheduler.state import State

Append = Callable[[Sequence[Event], int], int]


class Scenario(NamedTuple):
    """A load: prompt and output lengths, and what the engine is given for it."""

    prompt_tokens: int
    output_tokens: int
    pool_share: float = 1.2
    shared_prefix_tokens: int = 0
    num_speculative_tokens: int = 0


SCENARIOS = {
    "steady": Scenario(120, 100_000),
    "speculation": Scenario(120, 100_000, num_speculative_tokens=3),
    "pressure": Scenario(120, 200, pool_share=0.6),
    "prefix": Scenario(2148, 60, shared_prefix_tokens=2048),
    "churn": Scenario(120, 40),
}


class Loop:
    """The engine's turn without its shell."""

    def __init__(self, scenario: Scenario, num_requests: int, append: Append | None) -> None:
        self.scenario, self.num_requests, self.append = scenario, num_requests, append
        self.state = State()
        self.in_flight: list[StepScheduled] = []
        self.random = random.Random(1)
        self.num_submitted = 0
        self.num_preemptions = 0
        self.turn(OpenEngine(engine_epoch=1, refold_version="0", root_seed=0, config=self._config()))
        self.turn(StartWorker(kind="simulated", environment={}))

    def _config(self) -> EngineConfig:
        s, longest = self.scenario, min(self.scenario.prompt_tokens + self.scenario.output_tokens, 2400)
        demand = self.num_requests * (longest - s.shared_prefix_tokens) // 16 + s.shared_prefix_tokens // 16
        return EngineConfig(
            model="simulated",
            model_fingerprint="simulated",
            vocab_size=50_000,
            eos_token_ids=(2,),
            max_model_len=1 << 20,
            block_size=16,
            num_blocks=1 << 22 if s.output_tokens > 10_000 else max(int(demand * s.pool_share), 200),
            max_num_seqs=self.num_requests,
            max_num_batched_tokens=max(8192, 4 * self.num_requests),
            speculation="worker" if s.num_speculative_tokens else "off",
            num_speculative_tokens=s.num_speculative_tokens,
        )

    def turn(self, command: Command) -> list[Event]:
        events = decide(self.state, command)
        if events and self.append is not None:
            self.append(events, 0)
        for event in events:
            fold(self.state, event)
        return events

    def schedule(self) -> None:
        events = self.turn(ScheduleStep())
        if events and type(events[-1]) is StepScheduled:
            self.in_flight.append(events[-1])
        self.num_preemptions += len(events) - 1 if events else 0

    def refill(self) -> None:
        """Keep the number of live requests up."""
        s = self.scenario
        prefix = [3 + i % 5000 for i in range(s.shared_prefix_tokens)]
        while len(self.state.queues.running) + len(self.state.queues.waiting) < self.num_requests:
            i = self.num_submitted
            self.num_submitted += 1
            length = s.prompt_tokens - s.shared_prefix_tokens + i % 16
            spread = self.random.randrange(s.output_tokens // 2) if s.output_tokens < 10_000 else 0
            sampling = Sampling(seed=i, max_tokens=s.output_tokens - spread)
            prompt = prefix + [3 + (i * 7 + j * 31) % 40_000 for j in range(length)]
            self.turn(SubmitRequest(request_id=f"r{i}", prompt_token_ids=prompt, sampling=sampling, arrival_ns=i))

    def answer(self) -> CompleteStep:
        """What a worker would say to the oldest step."""
        step = self.in_flight.pop(0)
        chunks, by_handle = set(step.chunk_entries), self.state.requests.by_handle
        drafts = step.num_drafts or [0] * len(step.handles)
        counts, positions, tokens = [], [], []
        for entry, handle in enumerate(step.handles):
            accepted = 0
            while accepted < drafts[entry] and self.random.random() < 0.7:
                accepted += 1
            counts.append(0 if entry in chunks else 1 + accepted)
            request = by_handle.get(handle)
            positions.append(-1 if entry in chunks or request is None else len(request.tokens))
            tokens += [1000 + (handle * 31 + step.step + i) % 40_000 for i in range(counts[-1])]
        return CompleteStep(step=step.step, generation=1, counts=counts, token_ids=tokens, positions=positions)


def steps(scenario: Scenario, num_requests: int, append: Append | None) -> Iterator[tuple[float, int]]:
    """µs of CPU time of each step after the warm-up, and the preemptions seen so far; without end."""
    loop = Loop(scenario, num_requests, append)
    loop.refill()
    warm = 30 if scenario.output_tokens > 10_000 else 3 * scenario.output_tokens // 2
    gc.collect()
    gc.freeze()
    for i in count():
        loop.refill()
        start = time.thread_time_ns()
        loop.schedule()
        middle = time.thread_time_ns()
        if len(loop.in_flight) < 2 and i == 0:
            loop.schedule()
        answer = loop.answer()
        resumed = time.thread_time_ns()
        loop.turn(answer)
        if i >= warm:
            yield (middle - start + time.thread_time_ns() - resumed) / 1000, loop.num_preemptions


def measure(scenario: Scenario, num_requests: int, num_steps: int, append: Append | None) -> tuple[list[float], int]:
    """µs of CPU time per step, and the preemptions seen."""
    found = list(islice(steps(scenario, num_requests, append), num_steps))
    return [spent for spent, _ in found], found[-1][1]


@contextlib.contextmanager
def journal(kind: str) -> Iterator[Append | None]:
    """The append of a journal of this kind."""
    if kind == "off":
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        url = "memory:" if kind == "memory" else f"sqlite:///{Path(folder) / 'scheduler.db'}"
        if kind == "sqlite":
            upgrade(url)
        store = open_store(url)
        writer = JournalWriter(store, "main", store.open_stream("main"))

        def append(events: Sequence[Event], time_ns: int) -> int:
            """As an engine's turn does."""
            return writer.append(events, time_ns, is_awaited=any(map(is_awaited, events)))

        try:
            yield append
        finally:
            writer.close()
            store.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=[16, 64, 256, 1024])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--journal", nargs="+", default=["off", "memory", "sqlite"], choices=["off", "memory", "sqlite"]
    )
    parser.add_argument("--scenario", nargs="+", default=list(SCENARIOS), choices=list(SCENARIOS))
    options = parser.parse_args()
    print("µs of CPU time per step in the engine's thread")
    print(
        f"{'scenario':12s} {'requests':>8s} {'journal':>8s} {'p50':>8s} {'p99':>8s} {'p99/p50':>8s} {'preempted':>10s}"
    )
    for name in options.scenario:
        for num_requests in options.requests:
            for kind in options.journal:
                with journal(kind) as append:
                    spent, preempted = measure(SCENARIOS[name], num_requests, options.steps, append)
                p50, p99 = statistics.median(spent), sorted(spent)[int(len(spent) * 0.99)]
                print(f"{name:12s} {num_requests:8d} {kind:>8s} {p50:8.0f} {p99:8.0f} {p99 / p50:8.1f} {preempted:10d}")


if __name__ == "__main__":
    main()
