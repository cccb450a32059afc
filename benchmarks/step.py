"""What a decode step costs without a model: decide, append, fold, and the same for its output.

    python benchmarks/step.py [--requests 256] [--steps 300]

Prints µs of wall time per step at a steady decode, with the journal off, in memory and in a SQLite file (group commit, one
writer thread), and how fast the journal folds again from disk. `loop` is what the engine's loop spends; `drained` includes
waiting until the last record is on disk, so the writer's share too.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from refold.journal.codec import decode
from refold.journal.events import EngineConfig, Event, Sampling, StepScheduled
from refold.journal.stores import open_reader, open_store
from refold.journal.verify import verified
from refold.journal.writer import JournalWriter
from refold.migrations import upgrade
from refold.scheduler.commands import Command, CompleteStep, OpenEngine, ScheduleStep, StartWorker, SubmitRequest
from refold.scheduler.decide import decide
from refold.scheduler.fold import fold
from refold.scheduler.state import State, digest

Append = Callable[[Sequence[Event], int], int]


def _engine_config(num_requests: int) -> EngineConfig:
    return EngineConfig(
        model="simulated",
        model_fingerprint="simulated",
        vocab_size=50_000,
        eos_token_ids=(2,),
        max_model_len=8192,
        block_size=16,
        num_blocks=num_requests * 80,
        max_num_seqs=num_requests,
        max_num_batched_tokens=max(8192, num_requests),
    )


def _token(handle: int, step: int) -> int:
    """A token that no compression can guess from the others, as text's are not worse than this."""
    mixed = (handle * 0x9E3779B1 ^ step * 0x85EBCA77) & 0xFFFFFFFF
    mixed = (mixed ^ mixed >> 15) * 0xC2B2AE3D & 0xFFFFFFFF
    return 1000 + (mixed >> 9) % 40_000


class Loop:
    """The engine's turn without its shell: decide, append, fold."""

    def __init__(self, append: Append | None) -> None:
        self.state = State()
        self.append = append
        self.in_flight: list[StepScheduled] = []

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

    def answer(self) -> CompleteStep:
        """What a worker would say to the oldest step."""
        step = self.in_flight.pop(0)
        chunks, by_handle = set(step.chunk_entries), self.state.requests.by_handle
        counts = [int(entry not in chunks) for entry in range(len(step.handles))]
        positions = [len(by_handle[h].tokens) if c else -1 for h, c in zip(step.handles, counts, strict=True)]
        tokens = [_token(h, step.step) for h, c in zip(step.handles, counts, strict=True) if c]
        return CompleteStep(step=step.step, generation=1, counts=counts, token_ids=tokens, positions=positions)


def _warm(loop: Loop, num_requests: int, max_tokens: int) -> None:
    loop.turn(OpenEngine(engine_epoch=1, refold_version="0", root_seed=0, config=_engine_config(num_requests)))
    loop.turn(StartWorker(kind="simulated", environment={}))
    for i in range(num_requests):
        sampling = Sampling(seed=i, max_tokens=max_tokens)
        prompt = [3 + (i * 7 + j) % 1000 for j in range(100 + i % 60)]
        loop.turn(SubmitRequest(request_id=f"r{i}", prompt_token_ids=prompt, sampling=sampling, arrival_ns=i))
    while any(r.num_computed_tokens < r.num_prompt_tokens for r in loop.state.requests.live()):
        loop.schedule()
        loop.turn(loop.answer())
    loop.schedule()


def measure(append: Append | None, num_requests: int, num_steps: int) -> list[float]:
    """µs of each steady step, window 2."""
    loop = Loop(append)
    _warm(loop, num_requests, max_tokens=num_steps + 1000)
    spent = []
    for _ in range(num_steps):
        if len(loop.in_flight) < 2:
            start = time.perf_counter()
            loop.schedule()
            spent.append(time.perf_counter() - start)
        answer = loop.answer()
        start = time.perf_counter()
        loop.turn(answer)
        spent[-1] += time.perf_counter() - start
    return [s * 1e6 for s in spent]


def _with_store(url: str, num_requests: int, num_steps: int) -> tuple[list[float], float]:
    store = open_store(url)
    writer = JournalWriter(store, "main", store.open_stream("main"))
    start = time.perf_counter()
    spent = measure(writer.append, num_requests, num_steps)
    writer.flush()
    drained = (time.perf_counter() - start) / num_steps * 1e6
    writer.close()
    store.close()
    return spent, drained


def _fold_again(url: str) -> tuple[int, int, float, str]:
    state, events, entries = State(), 0, 0
    start = time.perf_counter()
    for record in verified(open_reader(url).read("main")):
        for event in decode(record):
            fold(state, event)
            events += 1
            entries += len(getattr(event, "handles", ())) or 1
    return events, entries, time.perf_counter() - start, digest(state)


def _line(name: str, spent: list[float], drained: float | None = None) -> str:
    p50, p99 = statistics.median(spent), sorted(spent)[int(len(spent) * 0.99)]
    tail = "" if drained is None else f"  drained {drained:7.0f}"
    return f"{name:10s} loop p50 {p50:7.0f}  p99 {p99:7.0f}{tail}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    print(f"{options.requests} requests decoding, {options.steps} steps, window 2; µs per step")
    off = measure(None, options.requests, options.steps)
    print(_line("off", off))
    print(_line("memory", *_with_store("memory:", options.requests, options.steps)))
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{Path(folder) / 'step.db'}"
        upgrade(url)
        spent, drained = _with_store(url, options.requests, options.steps)
        print(_line("sqlite", spent, drained))
        size = Path(folder, "step.db").stat().st_size
        tokens = options.requests * options.steps
        events, entries, seconds, _ = _fold_again(url)
    ratio = statistics.median(spent) / statistics.median(off)
    print(f"journal costs the loop x {ratio:.2f}; {size / tokens:.1f} bytes on disk per generated token")
    print(f"folds again, chain verified: {events / seconds:,.0f} events/s, {entries / seconds:,.0f} request-events/s")


if __name__ == "__main__":
    main()
