"""Two production traces through the core, whole: every request of Azure's conversation service, and Mooncake's chats.

    python -m benchmarks.traces [azure] [mooncake] [--pools 30 60 100] [--check-every 5000]

Each trace is played in virtual time, lengths unscaled: a step takes 15 ms and 10 µs per token. It runs once with a pool that
is never short, which tells the peak demand (blocks owned at once), and then with pools of 30 %, 60 % and 100 % of that. The
worker is the simulated one; it reads a request's whole context back before the request's last token. The law book follows
every event; the laws of state, whose price grows with the pool, are checked every `--check-every` events.

The traces carry lengths, not text. Azure's prompts are drawn at random. Mooncake's carry ids of 512-token blocks: the same
id gives the same tokens, so prefixes are shared as they were; a block of the engine holds 16 tokens.
"""

import argparse
import csv
import gc
import json
import random
import resource
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from refold.gpu.batch import WorkOrder
from refold.gpu.simulated import SimulatedWorker, _Slot
from refold.journal.events import (
    EngineConfig,
    Event,
    RequestFinished,
    RequestPreempted,
    Sampling,
    StaleOutputConsumed,
    StepScheduled,
    WorkerStarted,
)
from refold.scheduler.commands import Command, SubmitRequest
from refold.scheduler.decide import decide
from refold.scheduler.fold import fold
from tests.kit.drive import Drive

DATA = Path(__file__).resolve().parent.parent.parent / "shared" / "data"
BLOCK_SIZE = 16
VOCABULARY = 32_000
STEP_S, TOKEN_S = 0.015, 10e-6
ENOUGH_BLOCKS = 400_000


class Arrival(NamedTuple):
    """One request of a trace. `num_seen_tokens` of its prompt start an earlier prompt: an endless cache would hit them."""

    at_s: float
    prompt: Callable[[], list[int]]
    num_prompt_tokens: int
    max_tokens: int
    num_seen_tokens: int = 0


@cache
def circle_of_tokens() -> list[int]:
    """What all prompts are cut from. Made when the first is asked for: who only collects the tests waits for none."""
    return random.Random(1).choices(range(VOCABULARY), k=1 << 20)


def some_tokens(seed: int, count: int) -> list[int]:
    """`count` tokens that only this seed gives."""
    circle = circle_of_tokens()
    start = random.Random(seed).randrange(len(circle))
    tokens = circle[start : start + count]
    while len(tokens) < count:
        tokens += circle[: count - len(tokens)]
    return tokens


def azure() -> list[Arrival]:
    """19,366 requests of an hour of conversation."""
    arrivals, first = [], None
    with (DATA / "azure_llm_conv_2023.csv").open() as file:
        for number, row in enumerate(csv.DictReader(file)):
            at = datetime.fromisoformat(row["TIMESTAMP"][:26])
            first = first or at
            length, outputs = int(row["ContextTokens"]), max(int(row["GeneratedTokens"]), 1)
            prompt = lambda number=number, length=length: some_tokens(number, length)  # noqa: E731
            arrivals.append(Arrival((at - first).total_seconds(), prompt, length, outputs))
    return arrivals


def mooncake() -> list[Arrival]:
    """The first 4,000 requests of a chat service with long, shared prompts."""
    arrivals, seen = [], set[int]()
    with (DATA / "mooncake_conversation_first4000.jsonl").open() as file:
        for line in file:
            row = json.loads(line)
            ids, length = row["hash_ids"], row["input_length"]

            def prompt(ids: list[int] = ids, length: int = length) -> list[int]:
                return [token for each in ids for token in some_tokens(each, 512)][:length]

            known = min(512 * sum(1 for _ in takewhile(seen.__contains__, ids)), length - 1)
            seen.update(ids)
            arrivals.append(Arrival(row["timestamp"] / 1000, prompt, length, max(row["output_length"], 1), known))
    return arrivals


class ReadsOnce(SimulatedWorker):
    """Reads a request's context back before the request's last token only."""

    def _read_back(self, slot: _Slot) -> None:
        if len(slot.tokens) - slot.num_prompt_tokens == slot.sampling.max_tokens - 1:
            super()._read_back(slot)


class Play(Drive):
    """A trace on its way through the core. Nothing is kept but numbers."""

    def __init__(self, config: EngineConfig, check_every: int) -> None:
        super().__init__(config)
        self.check_every = check_every
        self.num_events = self.num_steps = self.scheduled_tokens = 0
        self.hit_tokens = self.first_hit_tokens = 0
        self.preemptions = self.stale_tokens = self.stale_delivered = self.stale_dropped = 0
        self.peak_blocks = self.peak_running = self.finished = 0

    def do(self, command: Command) -> list[Event]:
        events = decide(self.state, command)
        assert self.book is not None
        for event in events:
            fold(self.state, event)
            self.book.follow(self.state, event)
            self.num_events += 1
            if self.num_events % self.check_every == 0:
                self.book.check(self.state)
            self._serve(event)
            self._count(event)
        return events

    def _serve(self, event: Event) -> None:
        super()._serve(event)
        if isinstance(event, WorkerStarted):
            self.worker = ReadsOnce(self.config)

    def _count(self, event: Event) -> None:
        if isinstance(event, StepScheduled):
            self.num_steps += 1
            self.scheduled_tokens += sum(event.num_tokens)
            for admission in event.admissions:
                hit = len(admission.hit_block_ids) * BLOCK_SIZE
                self.hit_tokens += hit
                self.first_hit_tokens += hit * (admission.epoch == 0)
            pool = self.state.pool
            self.peak_blocks = max(self.peak_blocks, pool.num_blocks - pool.num_free - pool.num_fenced)
            self.peak_running = max(self.peak_running, len(self.state.queues.running))
        elif isinstance(event, RequestPreempted):
            self.preemptions += 1
        elif isinstance(event, StaleOutputConsumed):
            self.stale_tokens += sum(event.num_tokens)
            kept = sum(count for count, delivered in zip(event.counts, event.delivered, strict=True) if delivered)
            self.stale_delivered += kept
            self.stale_dropped += len(event.token_ids) - kept
        elif isinstance(event, RequestFinished):
            self.finished += event.reason == "length"


class Clock:
    """Virtual time: the worker is busy with one step after the other."""

    def __init__(self) -> None:
        self.now_s = self.worker_free_s = 0.0
        self.issued_s: dict[int, float] = {}

    def issue(self, order: WorkOrder) -> None:
        """A step was planned now."""
        self.issued_s[order.scheduled.step] = self.now_s

    def complete(self, order: WorkOrder) -> None:
        """The step's work takes its time."""
        start = max(self.worker_free_s, self.issued_s.pop(order.scheduled.step))
        self.now_s = self.worker_free_s = start + STEP_S + TOKEN_S * sum(order.scheduled.num_tokens)


def play(arrivals: list[Arrival], config: EngineConfig, check_every: int) -> tuple[Play, float]:
    """Play a trace to its end. Returns the play and the virtual seconds that it took."""
    run, clock, coming, number = Play(config, check_every), Clock(), iter(arrivals), 0
    run.open()
    next_arrival = next(coming, None)
    while True:
        while next_arrival is not None and next_arrival.at_s <= clock.now_s:
            _submit(run, next_arrival, number)
            next_arrival, number = next(coming, None), number + 1
        while any(isinstance(event, StepScheduled) for event in run.schedule()):
            clock.issue(run.orders[-1])
        if run.orders:
            clock.complete(run.orders[0])
            run.complete()
        elif next_arrival is not None:
            clock.now_s = next_arrival.at_s
        else:
            break
    assert run.book is not None
    run.book.check(run.state)
    assert run.state.is_quiescent, f"{len(run.state.requests.by_handle)} requests never finished"
    assert run.finished == number == len(arrivals), (run.finished, number)
    return run, clock.now_s


def _submit(run: Play, arrival: Arrival, number: int) -> None:
    run.do(
        SubmitRequest(
            request_id=str(number),
            prompt_token_ids=arrival.prompt(),
            sampling=Sampling(seed=number, max_tokens=arrival.max_tokens, ignore_eos=True),
            arrival_ns=int(arrival.at_s * 1e9),
        )
    )


def engine_config(num_blocks: int, longest: int) -> EngineConfig:
    return EngineConfig(
        model="simulated",
        model_fingerprint="simulated",
        vocab_size=VOCABULARY,
        eos_token_ids=(),
        max_model_len=longest + 1,
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        max_num_seqs=1024,
        max_num_batched_tokens=8192,
        max_in_flight_steps=2,
    )


def report(name: str, arrivals: list[Arrival], percent: int, run: Play, virtual_s: float, wall_s: float) -> None:
    prompt_tokens = sum(a.num_prompt_tokens for a in arrivals)
    needed = prompt_tokens + sum(a.max_tokens for a in arrivals) - len(arrivals)
    recomputed = run.scheduled_tokens - (needed - run.first_hit_tokens)
    assert run.book is not None
    print(
        f"{name} {f'{percent} %' if percent else 'no limit':>8}: {run.config.num_blocks:,} blocks, peak {run.peak_blocks:,}; "
        f"{run.finished:,} finished in {virtual_s:,.0f} virtual s; {run.num_steps:,} steps, {run.peak_running} running at most; "
        f"hits {run.first_hit_tokens / prompt_tokens:.1%} of prompt tokens; {run.preemptions:,} preemptions, "
        f"{recomputed:,} tokens recomputed ({run.hit_tokens - run.first_hit_tokens:,} more found again); "
        f"{run.stale_tokens:,} stale, of them sampled {run.stale_delivered:,} delivered, {run.stale_dropped:,} dropped; "
        f"{run.num_events:,} events, laws of state checked {run.book.num_checks:,} times; "
        f"{wall_s:.0f} s wall, {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.1f} GiB at most",
        flush=True,
    )


def pools(percents: list[int]) -> Iterator[int]:
    yield 0
    yield from sorted(percents, reverse=True)


def play_trace(name: str, arrivals: list[Arrival], options: argparse.Namespace) -> None:
    longest = max(a.num_prompt_tokens + a.max_tokens for a in arrivals)
    alone = -(-longest // BLOCK_SIZE)
    blocks, peak = ENOUGH_BLOCKS, 0
    for percent in pools(options.pools):
        if percent:
            blocks = max(peak * percent // 100, alone)
            if blocks == alone:
                print(f"{name}: {percent} % of the peak can't hold the longest request alone: {alone:,} blocks it is")
        start = time.perf_counter()
        run, virtual_s = play(arrivals, engine_config(blocks, longest), options.check_every)
        report(name, arrivals, percent, run, virtual_s, time.perf_counter() - start)
        peak = peak or run.peak_blocks
        gc.collect()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", default=["azure", "mooncake"], help="azure, mooncake")
    parser.add_argument("--pools", nargs="*", type=int, default=[30, 60, 100], help="percent of the peak demand")
    parser.add_argument("--requests", type=int, help="the first so many only")
    parser.add_argument("--check-every", type=int, default=5000, help="events between two checks of the laws of state")
    options = parser.parse_args()
    gc.disable()
    for name in options.traces:
        try:
            arrivals = {"azure": azure, "mooncake": mooncake}[name]()
        except FileNotFoundError as missing:
            print(f"{name}: left out, {missing.filename} is not there")
            continue
        arrivals = arrivals[: options.requests]
        tokens, seen = sum(a.num_prompt_tokens for a in arrivals), sum(a.num_seen_tokens for a in arrivals)
        print(
            f"{name}: {len(arrivals):,} requests over {arrivals[-1].at_s:,.0f} s, {tokens:,} prompt tokens and "
            f"{sum(a.max_tokens for a in arrivals):,} to generate; an endless cache would hit {seen / tokens:.1%}",
            flush=True,
        )
        play_trace(name, arrivals, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
