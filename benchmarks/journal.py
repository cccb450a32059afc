"""The journal's speed, through the public API of its stores, beside raw writes of the same events and the same bytes.

    python -m benchmarks.journal [--rounds 25] [--stores sqlite,postgresql,segments] [--page docs/performance.md]

A step is one record of 512 request-events (`StepScheduled` and `OutputDelivered` of 512 decoding requests, in turn), encoded,
chained and on disk when the call returns. Contestants take turns, a few steps each, so that a noisy disk is equally noisy to
all, and in another order each round: the first step of a turn takes twice as long as the others, less so where the contestant
before has used the same database. Figures are medians over the rounds. `group commit` is what an engine gets: the journal's
writer at full speed.
"""

import argparse
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.engine import first_tokens
from benchmarks.journal_baselines import (
    EVENTS_PER_STEP,
    Contestant,
    Step,
    event_columns,
    event_rows,
    file_contestants,
    postgres_contestants,
    raw_sqlite,
)
from benchmarks.step import Loop, _warm, measure
from refold.engine.opening import fold_journal
from refold.journal.archive_file import write_archive
from refold.journal.codec import encode
from refold.journal.events import Event
from refold.journal.record import seal
from refold.journal.stores import open_reader, open_store
from refold.journal.verify import verify_stream
from refold.journal.writer import JournalWriter
from refold.migrations import ensure
from refold.scheduler.commands import ScheduleStep

_STEPS_PER_TURN = 8
_SALT = "0123456789abcdef"
_BULK_RECORDS = 2000
_FIRST_TOKEN_TURNS = 30


def recorded(num_records: int) -> tuple[list[list[Event]], list[list[Event]]]:
    """The records that bring 512 requests to a steady decode, and `num_records` of the decode itself."""
    opening: list[list[Event]] = []
    loop = Loop(lambda events, _: opening.append(list(events)) or len(opening))
    _warm(loop, EVENTS_PER_STEP, max_tokens=num_records)
    num_before = len(opening)
    while len(opening) < num_before + num_records:
        while len(loop.in_flight) < 2:
            scheduled = loop.turn(ScheduleStep())
            loop.in_flight.append(scheduled[-1])  # type: ignore[arg-type]
        loop.turn(loop.answer())
    return opening[:num_before], opening[num_before : num_before + num_records]


def our_store(url: str, records: Iterator[list[Event]]) -> Contestant:
    """One append per record, with what the journal's writer does around it."""
    ensure(url)
    store: Any = open_store(url)
    head = store.open_stream()
    maintain = getattr(store, "maintain", lambda: None)

    def write(_: Step) -> None:
        nonlocal head
        head = store.append("main", [seal(head, time.time_ns(), *encode(next(records), _SALT))])
        maintain()

    return write


def endless(records: list[list[Event]]) -> Iterator[list[Event]]:
    while True:
        yield from records


class Spent(NamedTuple):
    """Seconds per step: on the wall clock, and of this process's CPU."""

    wall_s: float
    cpu_s: float


def in_turns(contestants: dict[str, Contestant], records: list[list[Event]], rounds: int) -> dict[str, Spent]:
    """What a step takes each contestant: medians of its turns."""
    times: dict[str, list[Spent]] = {name: [] for name in contestants}
    encoded = [encode(events, _SALT) for events in records[: 2 * _STEPS_PER_TURN]]
    for number in range(rounds):
        rows = event_rows(number)
        blob = f"[{','.join(rows)}]".encode()
        steps = [Step(rows, blob, event_columns(number), body + content) for body, content in encoded[:_STEPS_PER_TURN]]
        for name, write in random.Random(number).sample(list(contestants.items()), len(contestants)):
            wall_s, cpu_s = time.perf_counter(), time.process_time()
            for step in steps:
                write(step)
            spent = Spent(time.perf_counter() - wall_s, time.process_time() - cpu_s)
            times[name].append(Spent(spent.wall_s / len(steps), spent.cpu_s / len(steps)))
    return {
        name: Spent(statistics.median(s.wall_s for s in spent), statistics.median(s.cpu_s for s in spent))
        for name, spent in times.items()
    }


def group_commit(url: str, opening: list[list[Event]], records: list[list[Event]]) -> Spent:
    """What a record takes through the journal's writer at full speed, until all of them are durable."""
    ensure(url)
    store = open_store(url)
    writer = JournalWriter(store, "main", store.open_stream())
    for events in opening:
        writer.append(events, time.time_ns())
    writer.flush()
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    for events in records:
        while not writer.has_room:
            time.sleep(0.001)
        writer.append(events, time.time_ns())
    writer.flush()
    spent = Spent(time.perf_counter() - wall_s, time.process_time() - cpu_s)
    writer.close()
    store.close()
    return Spent(spent.wall_s / len(records), spent.cpu_s / len(records))


def reading(url: str) -> tuple[Spent, Spent]:
    """Seconds per request-event from disk: verified, and folded with every inline projection."""
    reader = open_reader(url)
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    head = verify_stream(reader)
    verified = Spent(time.perf_counter() - wall_s, time.process_time() - cpu_s)
    reader.close()
    store = open_store(url)
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    fold_journal(store, "main", head)
    folded = Spent(time.perf_counter() - wall_s, time.process_time() - cpu_s)
    store.close()
    num_events = head.position * EVENTS_PER_STEP
    return tuple(Spent(s.wall_s / num_events, s.cpu_s / num_events) for s in (verified, folded))  # type: ignore[return-value]


class EngineCost(NamedTuple):
    """What the journal costs an engine: µs per step of its loop, bytes per generated token, ms to the first token."""

    off_us: float
    on_us: float
    live_bytes: float
    archived_bytes: float
    first_without: list[float]
    first_with: list[float]
    first_buffered: list[float]
    raw_commit: list[float]


def engine_cost(folder: Path, num_requests: int = 256, num_steps: int = 400) -> EngineCost:
    """In turns, without a journal and with SQLite; first tokens and lone commits by turns as well."""
    off: list[float] = []
    on: list[float] = []
    for number in range(5):
        off += measure(None, num_requests, num_steps)
        path = folder / f"cost{number}.db"
        on += _measure_with(path, num_requests, num_steps)
    raw: list[float] = []
    journals = {"": ("memory:", "synced")} | {how: (str(folder / f"{how}.db"), how) for how in ("synced", "buffered")}

    def alone() -> None:
        raw.extend(lone_commits(folder / f"raw{len(raw)}.db", 100))

    first = first_tokens(journals, _FIRST_TOKEN_TURNS, 100, after_turn=alone)
    tokens = num_requests * num_steps
    reader = open_reader(str(path))
    archive = write_archive(folder / "archive", "main", reader.read())
    reader.close()
    live, archived = path.stat().st_size / tokens, archive.num_bytes / tokens
    return EngineCost(statistics.median(off), statistics.median(on), live, archived, *first.values(), raw)


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


def machine() -> str:
    """What these figures were measured on."""
    import platform
    import sqlite3

    return (
        f"{os.cpu_count()} cores, Linux {platform.release()}, Python {platform.python_version()}, "
        f"SQLite {sqlite3.sqlite_version}"
    )


def _urls(stores: list[str], folder: Path, stack: ExitStack) -> dict[str, str]:
    """An empty journal of each kind."""
    urls = {"sqlite": f"sqlite:///{folder / 'ours.db'}", "segments": f"segments:///{folder / 'ours'}"}
    if "postgresql" in stores:
        from tests.kit.postgres import Server

        server = stack.enter_context(closing(Server()))
        server.run("ALTER SYSTEM RESET fsync")
        server.run("SELECT pg_reload_conf()")
        urls["postgresql"] = server.empty()
    return {store: urls[store] for store in stores}


def writes(urls: dict[str, str], folder: Path, records: list[list[Event]], rounds: int) -> dict[str, Spent]:
    """Seconds per step of all contestants, ours named by their store."""
    contestants = file_contestants(folder)
    if "postgresql" in urls:
        contestants |= postgres_contestants(urls["postgresql"])
    contestants |= {store: our_store(url, endless(records)) for store, url in urls.items()}
    return in_turns(contestants, records, rounds)


RAW = {
    "sqlite": "sqlite3, our bytes",
    "segments": "file, checksum and fdatasync, our bytes",
    "postgresql": "PostgreSQL, our bytes",
}
GOALS = {"sqlite": 1.0e6, "segments": 1.5e6, "postgresql": 0.6e6}


def write_table(spent: dict[str, Spent], groups: dict[str, Spent]) -> list[str]:
    """The table of writes."""
    lines = [
        "| what | request-events/s | of the raw write of the same bytes | x `eventsourcing` | CPU µs a step |",
        "|---|---:|---:|---:|---:|",
    ]
    slowest = spent["eventsourcing, SQLite"].wall_s
    ours = [(f"**refold, {name}**, one append a step", name, spent[name]) for name in groups]
    ours += [
        (f"**refold, {name}**, group commit (goal {GOALS[name]:,.0f})", name, each) for name, each in groups.items()
    ]
    others = [(name, "", each) for name, each in spent.items() if name not in groups]
    for shown, name, (wall_s, cpu_s) in [*others, *ours]:
        raw = f"{spent[RAW[name]].wall_s / wall_s:.0%}" if name else ""
        rate = f"{EVENTS_PER_STEP / wall_s:,.0f}"
        lines.append(f"| {shown} | {rate} | {raw} | {slowest / wall_s:.1f} | {cpu_s * 1e6:.0f} |")
    return lines


def read_table(urls: dict[str, str]) -> list[str]:
    """The table of reads."""
    lines = [
        "| request-events/s, from disk | verified | per CPU second | folded, with all inline projections | per CPU second |",
        "|---|---:|---:|---:|---:|",
    ]
    for store, url in urls.items():
        rates = (f"{1 / seconds:,.0f}" for spent in reading(url) for seconds in spent)
        lines.append(f"| {store} | {' | '.join(rates)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--stores", default="sqlite,segments,postgresql")
    parser.add_argument("--page", type=Path, help="write the tables into this page")
    options = parser.parse_args()
    stores = options.stores.split(",")
    lines = [f"Measured on: {machine()}. `python -m benchmarks.journal --page docs/performance.md` writes this.", ""]
    opening, records = recorded(_BULK_RECORDS)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        urls = _urls(stores, folder, stack)
        spent = writes(urls, folder, records, options.rounds)
        bulk_folder = folder / "bulk"
        bulk_folder.mkdir()
        bulk = _urls(stores, bulk_folder, stack)
        groups = {store: group_commit(url, opening, records) for store, url in bulk.items()}
        lines += [*write_table(spent, groups), ""]
        lines += read_table(bulk)
        lines += ["", *engine_table(engine_cost(folder))]
    print("\n".join(lines))
    if options.page is not None:
        put_between_marks(options.page, lines)


def engine_table(cost: EngineCost) -> list[str]:
    """What the journal costs an engine."""
    base = (statistics.median(cost.first_without), p99(cost.first_without))
    rows = [
        ("loop's step at 256 requests, no journal", f"{cost.off_us:.0f} µs", ""),
        ("loop's step at 256 requests, SQLite", f"{cost.on_us:.0f} µs: x {cost.on_us / cost.off_us:.2f}", "x 1.5"),
        ("first token p50 and p99, memory", f"{base[0]:.2f} and {base[1]:.2f} ms", ""),
        ("first token, SQLite, `buffered`: seen before it's on disk", _added(cost.first_buffered, base), "+ 1 ms"),
        ("first token, SQLite, `synced`: on disk before it's seen", _added(cost.first_with, base), "+ 1 ms"),
        ("of these, a lone commit by SQLite alone", _added(cost.raw_commit, (0.0, 0.0)), ""),
        ("bytes per generated token, SQLite, live, 256 requests", f"{cost.live_bytes:.1f}", "40"),
        ("bytes per generated token, archived, 256 requests", f"{cost.archived_bytes:.1f}", "12"),
    ]
    return ["| cost to the engine | | goal |", "|---|---:|---:|", *(f"| {' | '.join(row)} |" for row in rows)]


def _added(times: list[float], base: tuple[float, float]) -> str:
    """p50 and p99, and what they add to those of `base`."""
    found = (statistics.median(times), p99(times))
    added = f": {found[0] - base[0]:+.2f} and {found[1] - base[1]:+.2f} ms" if base[1] else ""
    return f"{found[0]:.2f} and {found[1]:.2f} ms{added}"


BEGIN, END = "<!-- figures: written by benchmarks.journal -->", "<!-- end of figures of benchmarks.journal -->"


def put_between_marks(page: Path, lines: list[str]) -> None:
    """Replace what the last run wrote."""
    before, rest = page.read_text(encoding="utf-8").split(BEGIN)
    _, after = rest.split(END)
    page.write_text(before + "\n".join([BEGIN, *lines, END]) + after, encoding="utf-8")


if __name__ == "__main__":
    main()
