"""What the journal costs an engine: its loop's step, a first token, bytes per generated token. Part of `benchmarks.journal`.

First tokens: `benchmarks.first_token`. How much later one is seen where it's on disk first is the disk's say, most of it: so beside
the difference stands what it would be if nothing came on top but the commit, which is the engine in memory with a lone commit by
SQLite itself behind each of its tokens (times drawn at random from those of the same run).
"""

import random
import statistics
import time
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from benchmarks.first_token import first_tokens
from benchmarks.journal_baselines import raw_sqlite
from benchmarks.step import measure
from refold.journal.archive_file import write_archive
from refold.journal.stores import open_reader, open_store
from refold.journal.writer import JournalWriter
from refold.migrations import ensure

_TURNS, _PER_TURN = 20, 100
_STEPS_S = (0.005, 0.0)
_DRAWN = 100_000


class FirstTokens(NamedTuple):
    """Times to first tokens, ms, where a step takes `step_s`, and of SQLite's own lone commits meanwhile."""

    step_s: float
    memory: list[float]
    buffered: list[float]
    synced: list[float]
    raw_commit: list[float]


class EngineCost(NamedTuple):
    """What the journal costs an engine: µs per step of its loop, bytes per generated token, ms to the first token."""

    off_us: float
    on_us: float
    live_bytes: float
    archived_bytes: float
    first: list[FirstTokens]


def engine_cost(folder: Path, num_requests: int = 256, num_steps: int = 400) -> EngineCost:
    """In turns, without a journal and with SQLite; first tokens and lone commits by turns as well."""
    off: list[float] = []
    on: list[float] = []
    for number in range(5):
        off += measure(None, num_requests, num_steps)
        path = folder / f"cost{number}.db"
        on += _measure_with(path, num_requests, num_steps)
    tokens = num_requests * num_steps
    reader = open_reader(str(path))
    archive = write_archive(folder / "archive", "main", reader.read())
    reader.close()
    live, archived = path.stat().st_size / tokens, archive.num_bytes / tokens
    return EngineCost(
        statistics.median(off), statistics.median(on), live, archived, [_first(folder, step_s) for step_s in _STEPS_S]
    )


def _first(folder: Path, step_s: float) -> FirstTokens:
    raw: list[float] = []
    place = folder / f"first{step_s}"
    place.mkdir()

    def alone() -> None:
        raw.extend(lone_commits(place / f"raw{len(raw)}.db", _PER_TURN))

    journals = {"memory": ("memory:", "synced")} | {
        how: (str(place / f"{how}.db"), how) for how in ("buffered", "synced")
    }
    times = first_tokens(journals, _TURNS, _PER_TURN, step_s, after_turn=alone)
    return FirstTokens(step_s, *times.values(), raw)


def lone_commits(path: Path, repeats: int) -> list[float]:
    """What SQLite alone takes to commit a kilobyte, ms, with pauses between: no first token can be on disk sooner."""
    times = []
    with closing(raw_sqlite(path)) as connection:
        for _ in range(repeats):
            time.sleep(0.003)
            started_s = time.perf_counter()
            connection.execute("INSERT INTO events (body) VALUES (?)", (b"x" * 1000,))
            times.append((time.perf_counter() - started_s) * 1e3)
    return times


def _measure_with(path: Path, num_requests: int, num_steps: int) -> list[float]:
    ensure(str(path))
    store = open_store(str(path))
    writer = JournalWriter(store, "main", store.open_stream())
    spent = measure(writer.append, num_requests, num_steps)
    writer.close()
    store.close()
    return spent


def p99(values: list[float]) -> float:
    return sorted(values)[int(len(values) * 0.99)]


def engine_table(cost: EngineCost) -> list[str]:
    """What the journal costs an engine."""
    rows = [
        ("loop's step at 256 requests, no journal", f"{cost.off_us:.0f} µs", ""),
        ("loop's step at 256 requests, SQLite", f"{cost.on_us:.0f} µs: x {cost.on_us / cost.off_us:.2f}", "x 1.5"),
        *(row for first in cost.first for row in _first_rows(first)),
        ("bytes per generated token, SQLite, live, 256 requests", f"{cost.live_bytes:.1f}", "40"),
        ("bytes per generated token, archived, 256 requests", f"{cost.archived_bytes:.1f}", "12"),
    ]
    return ["| cost to the engine | | goal |", "|---|---:|---:|", *(f"| {' | '.join(row)} |" for row in rows)]


def _first_rows(first: FirstTokens) -> list[tuple[str, str, str]]:
    base = (statistics.median(first.memory), p99(first.memory))
    draw = random.Random(0).choice
    least = [draw(first.memory) + draw(first.raw_commit) for _ in range(_DRAWN)]
    return [
        (
            f"first token p50 and p99, a step of {first.step_s * 1e3:.0f} ms, memory",
            _added(first.memory, (0.0, 0.0)),
            "",
        ),
        ("SQLite, `buffered`: seen before it's on disk", _added(first.buffered, base), "+ 1 ms"),
        ("SQLite, `synced`: on disk before it's seen", _added(first.synced, base), "+ 1 ms"),
        ("memory, and a lone commit by SQLite itself behind each", _added(least, base), ""),
        ("of that, the commit", _added(first.raw_commit, (0.0, 0.0)), ""),
    ]


def _added(times: list[float], base: tuple[float, float]) -> str:
    """p50 and p99, and what they add to those of `base`."""
    found = (statistics.median(times), p99(times))
    added = f": {found[0] - base[0]:+.2f} and {found[1] - base[1]:+.2f} ms" if base[1] else ""
    return f"{found[0]:.2f} and {found[1]:.2f} ms{added}"
