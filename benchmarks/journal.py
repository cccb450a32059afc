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
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.journal_baselines import (
    EVENTS_PER_STEP,
    Contestant,
    Step,
    event_columns,
    event_rows,
    file_contestants,
    postgres_contestants,
)
from benchmarks.journal_cost import engine_cost, engine_table
from benchmarks.step import Loop, _warm
from refold.engine.opening import fold_journal
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
_READS = 5


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


def num_request_events(records: list[list[Event]]) -> int:
    """An entry of a step that was scheduled, or came back, is one; any other event is one."""
    return sum(len(getattr(event, "handles", ())) or 1 for events in records for event in events)


def reading(urls: dict[str, str], num_events: int) -> dict[str, tuple[Spent, Spent]]:
    """Seconds for each request-event from disk, by store: verified, and folded with every inline projection. Medians of turns."""
    reads: dict[str, list[tuple[Spent, Spent]]] = {store: [] for store in urls}
    os.sync()  # what was written before is on its way to the disk for seconds
    for _ in range(_READS):
        for store, url in urls.items():
            reads[store].append(_read(url))
    return {
        store: (_median((v for v, _ in each), num_events), _median((f for _, f in each), num_events))
        for store, each in reads.items()
    }


def _median(spent: Iterable[Spent], num_events: int) -> Spent:
    walls, cpus = zip(*spent, strict=True)
    return Spent(statistics.median(walls) / num_events, statistics.median(cpus) / num_events)


def _read(url: str) -> tuple[Spent, Spent]:
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
    return verified, folded


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


def read_table(urls: dict[str, str], num_events: int) -> list[str]:
    """The table of reads."""
    lines = [
        "| request-events/s, from disk | verified | per CPU second | folded, with all inline projections | per CPU second |",
        "|---|---:|---:|---:|---:|",
    ]
    for store, each in reading(urls, num_events).items():
        rates = (f"{1 / seconds:,.0f}" for spent in each for seconds in spent)
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
        lines += read_table(bulk, num_request_events(opening + records))
        lines += ["", *engine_table(engine_cost(folder))]
    print("\n".join(lines))
    if options.page is not None:
        put_between_marks(options.page, lines)


BEGIN, END = "<!-- figures: written by benchmarks.journal -->", "<!-- end of figures of benchmarks.journal -->"


def put_between_marks(page: Path, lines: list[str]) -> None:
    """Replace what the last run wrote."""
    before, rest = page.read_text(encoding="utf-8").split(BEGIN)
    _, after = rest.split(END)
    page.write_text(before + "\n".join([BEGIN, *lines, END]) + after, encoding="utf-8")


if __name__ == "__main__":
    main()
