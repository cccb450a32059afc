"""The simulator: many lives, every law checked after every event.

    python -m tests.kit.simulator --seeds 1000                       a failure prints the line that reproduces it
    python -m tests.kit.simulator --first 17 --seeds 1 --shrink --pytest test_17.py
    python -m tests.kit.simulator --seeds 1000 --twice               each life twice, and byte for byte the same
    python -m tests.kit.simulator --seeds 20 --every-border          each life dies at each border between two records

The last line is a SHA-256 over the journals of all seeds in order: the same on any machine and under any PYTHONHASHSEED.
What a seed is, is told in `tests.kit.simulation`.
"""

import argparse
import gc
import hashlib
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from pathlib import Path

import msgspec

from refold.journal.events import EngineConfig, EngineOpened, Event, OutputDelivered, StaleOutputConsumed
from refold.scheduler.commands import Command
from tests.kit.player import Order, Player, Reopen
from tests.kit.shrink import Failure, as_pytest, attempt, shrink, source
from tests.kit.simulation import TURNS, Simulation

__all__ = ["Simulation"]

MAX_FAILURES = 5
SEEDS_PER_TASK = 25


class Options(msgspec.Struct, frozen=True):
    """What each process needs to know."""

    turns: int = TURNS
    twice: bool = False
    every_border: bool = False

    def again(self, seed: int) -> str:
        """The command line that plays a seed again."""
        turns = f" --turns {self.turns}" if self.turns != TURNS else ""
        modes = " --twice" * self.twice + " --every-border" * self.every_border
        return f"python -m tests.kit.simulator --first {seed} --seeds 1{turns}{modes}"


class Tally(msgspec.Struct):
    """What came of some seeds."""

    failures: list[tuple[int, str]] = []
    digests: list[str] = []
    num_steps: list[int] = []
    seen: Counter[str] = msgspec.field(default_factory=Counter)
    cpu_s: float = 0.0

    def add(self, other: "Tally") -> None:
        """Count another's too."""
        self.failures += other.failures
        self.digests += other.digests
        self.num_steps += other.num_steps
        self.seen += other.seen
        self.cpu_s += other.cpu_s


# -- one seed ---------------------------------------------------------------------------------------------------------


def life_of(seed: int, options: Options, tally: Tally) -> list[Order | Command] | None:
    """Play a seed; the failure goes to the tally. Returns the orders that reproduce it, None if all is well."""
    simulation = Simulation(seed, options.turns)
    first_config = simulation.drive.config
    try:
        digest = simulation.play()
        if options.twice:
            again = Simulation(seed, options.turns).play()
            assert again == digest, f"the same seed gave two journals: {digest[:16]} and {again[:16]}"
    except Exception as error:  # noqa: BLE001 - whatever it is, it is this seed's failure
        tally.failures.append((seed, str(Failure.of(error))))
        return simulation.drive.orders_given
    tally.digests.append(digest)
    tally.num_steps.append(simulation.num_steps)
    tally.seen += seen_in(simulation.drive.records)
    if options.every_border:
        return _die_at_every_border(simulation.drive, first_config, seed, tally)
    return None


def _die_at_every_border(life: Player, config: EngineConfig, seed: int, tally: Tally) -> list[Order | Command] | None:
    """The engine's process dies after each of its records; the next one opens what is left and brings it to its end."""
    for border in range(len(life.records) + 1):
        if border and type(opened := life.records[border - 1][0]) is EngineOpened:
            config = opened.config
        try:
            after = Player.left_with(config, life.records[:border], life.commands[:border])
            after.settle()
            after.judge()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is this border's failure
            tally.failures.append((seed, f"dead after {border} of {len(life.records)} records: {Failure.of(error)}"))
            return [*life.orders_given, Reopen(lost=len(life.records) - border)]
        tally.seen["borders"] += 1
    return None


def seen_in(records: Sequence[Sequence[Event]]) -> Counter[str]:
    """What a life had in it: events by name, and the tokens that they tell of."""
    seen: Counter[str] = Counter()
    for events in records:
        for event in events:
            kind = type(event)
            seen[kind.__name__] += 1
            if kind not in (StaleOutputConsumed, OutputDelivered):
                continue
            if isinstance(event, StaleOutputConsumed):
                kept = sum(count for count, delivered in zip(event.counts, event.delivered, strict=True) if delivered)
                seen["stale tokens delivered"] += kept
                seen["stale tokens dropped"] += len(event.token_ids) - kept
            elif isinstance(event, OutputDelivered):
                seen["tokens"] += len(event.token_ids)
                seen["drafts accepted"] += sum(event.accepted_drafts)
    return seen


# -- many seeds -------------------------------------------------------------------------------------------------------


def play_some(first: int, count: int, options: Options) -> Tally:
    """Play some seeds in this process."""
    tally, start = Tally(), time.process_time()
    gc.freeze()  # what there is by now stays: to look at it takes longer than at what the lives leave
    gc.disable()
    for seed in range(first, first + count):
        life_of(seed, options, tally)
    gc.enable()
    gc.collect()
    tally.cpu_s = time.process_time() - start
    return tally


def play_many(first: int, count: int, jobs: int, options: Options) -> Iterator[Tally]:
    """Play seeds on `jobs` processes; tallies come in the order of the seeds."""
    per_task = 1 if options.every_border else SEEDS_PER_TASK
    starts = range(first, first + count, per_task)
    sizes = [min(per_task, first + count - start) for start in starts]
    if jobs == 1 or count <= per_task:
        yield from map(play_some, starts, sizes, [options] * len(starts))
        return
    with ProcessPoolExecutor(jobs) as pool:
        tasks = zip(starts, sizes, strict=True)
        running = [pool.submit(play_some, *task, options) for task in islice(tasks, 4 * jobs)]
        while running:
            yield running.pop(0).result()
            running += [pool.submit(play_some, *task, options) for task in islice(tasks, 1)]


class Progress:
    """A line on stderr, now and then."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.start = self.last = time.monotonic()
        self.every_s = 1.0 if sys.stderr.isatty() else 30.0

    def show(self, done: int, failed: int) -> None:
        """Say how far it is, if it is time to."""
        now = time.monotonic()
        if now - self.last < self.every_s:
            return
        self.last = now
        line = f"{done:,} of {self.total:,} seeds, {failed} failed, {done / (now - self.start) * 60:,.0f} a minute"
        print(f"\r{line}" if sys.stderr.isatty() else line, end="" if sys.stderr.isatty() else "\n", file=sys.stderr)

    def end(self) -> None:
        """Leave the line."""
        if sys.stderr.isatty():
            print(file=sys.stderr)


def run(first: int, count: int, jobs: int, options: Options) -> Tally:
    """Play seeds, tell of failures as they come, give up after a few."""
    tally, whole, progress, done = Tally(), hashlib.sha256(), Progress(count), 0
    start = time.monotonic()
    for part in play_many(first, count, jobs, options):
        for seed, failure in part.failures:
            print(f"seed {seed}: {failure[:300]} | again: {options.again(seed)}", flush=True)
        tally.add(part)
        done = min(done + (1 if options.every_border else SEEDS_PER_TASK), count)
        progress.show(done, len(tally.failures))
        if len(tally.failures) >= MAX_FAILURES:
            break
    progress.end()
    for digest in tally.digests:
        whole.update(bytes.fromhex(digest))
    _summarize(tally, done, time.monotonic() - start)
    print(f"sha256 of all journals from seed {first} on: {whole.hexdigest()}")
    return tally


def _summarize(tally: Tally, count: int, seconds: float) -> None:
    steps = sorted(tally.num_steps) or [0]
    per_seed_ms = tally.cpu_s / count * 1e3
    print(
        f"{count:,} seeds, {len(tally.failures)} failed; {steps[0]} steps at least, {statistics.median(steps):.0f} in the "
        f"median, {sum(steps):,} in all; {per_seed_ms:.1f} ms of CPU per seed: {120_000 / per_seed_ms:,.0f} a minute on two "
        f"cores; {count / seconds * 60:,.0f} a minute by the clock"
    )
    print("seen: " + ", ".join(f"{number:,} {name}" for name, number in sorted(tally.seen.items())))


def shrink_seed(seed: int, options: Options, target: Path | None) -> int:
    """Shrink the failure of a seed, print the orders that are left, and write them as a test."""
    tally, config = Tally(), Simulation(seed, options.turns).drive.config
    orders = life_of(seed, options, tally)
    if orders is None:
        print(f"seed {seed} doesn't fail: {options.again(seed)}")
        return 0
    if attempt(config, orders)[0] is None:
        print(f"seed {seed}: {tally.failures[0][1]}\nits orders alone don't fail: nothing to shrink")
        return 1
    shrunk = shrink(config, orders)
    print(f"seed {seed}: {shrunk.failure}")
    print(f"{len(shrunk.orders)} of {shrunk.num_before} orders are enough ({shrunk.num_plays} plays):")
    for order in shrunk.orders:
        print(f"    {source(order, {})}")
    if target is not None:
        target.write_text(
            as_pytest(shrunk, f"Seed {seed}, shrunk from {shrunk.num_before} orders to {len(shrunk.orders)}.")
        )
        print(f"written to {target}")
    return 1


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. 1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--turns", type=int, default=TURNS, help="random turns of a life at least")
    parser.add_argument("--twice", action="store_true", help="play each seed twice and compare the bytes")
    parser.add_argument("--every-border", action="store_true", help="let each life die at each border of its records")
    parser.add_argument("--shrink", action="store_true", help="shrink the failure of the seed --first")
    parser.add_argument("--pytest", type=Path, metavar="FILE", help="with --shrink: write it as a test")
    given = parser.parse_args(argv)
    options = Options(turns=given.turns, twice=given.twice, every_border=given.every_border)
    if given.shrink or given.pytest:
        return shrink_seed(given.first, options, given.pytest)
    return 1 if run(given.first, given.seeds, given.jobs, options).failures else 0


if __name__ == "__main__":
    sys.exit(main())
