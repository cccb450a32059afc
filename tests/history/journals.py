"""Journals for tests: real decisions of the core, written through the real store."""

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from refold import migrations
from refold.journal.codec import encode
from refold.journal.events import Event
from refold.journal.record import EMPTY_HEAD, Head, Record, head_after, seal
from refold.journal.stores import open_store
from refold.scheduler.commands import CloseEngine, RecordDigest
from tests.kit.drive import Drive, config

START_NS = 1_790_000_000_000_000_000
TICK_NS = 1_000_000

Life = list[list[Event]]


def sealed(lives: Sequence[Life], tick_ns: int = TICK_NS) -> list[Record]:
    """The records of these lives, chained; life i is written in engine epoch i + 1, a record every tick."""
    head, records, time_ns = EMPTY_HEAD, [], START_NS
    for epoch, life in enumerate(lives, start=1):
        head = head._replace(engine_epoch=epoch)
        for events in life:
            records.append(seal(head, time_ns, *encode(events)))
            head, time_ns = head_after(records[-1]), time_ns + tick_ns
    return records


def write_journal(path: Path | str, lives: Sequence[Life], tick_ns: int = TICK_NS, stream: str = "main") -> Head:
    """Write the lives through a store, as their engines would have. The file is whole and nobody owns it."""
    migrations.ensure(str(path))
    head = EMPTY_HEAD
    records = sealed(lives, tick_ns)
    for epoch, life in enumerate(lives, start=1):
        store = open_store(str(path))
        head = store.open_stream(stream)
        assert head.engine_epoch == epoch
        if life:
            head = store.append(stream, records[head.position : head.position + len(life)])
        store.close()
    return head


def eventful_lives() -> tuple[list[Life], Drive]:
    """Two lives: preemptions with stale output in flight, a crash with work in flight, a recovery, an abort, a digest."""
    drive = Drive(config(num_blocks=10, max_num_seqs=4, max_num_batched_tokens=12, max_in_flight_steps=3))
    drive.open()
    for i in range(6):
        drive.submit(f"req-{i}", 6 + 3 * (i % 3), max_tokens=10 + i, temperature=0.7 if i % 2 else 0.0)
    for _ in range(14):
        while drive.schedule():
            pass
        drive.complete()
    while drive.schedule():
        pass
    assert drive.orders, "the crash must find work in flight"
    crash = len(drive.records)
    drive.open()
    drive.submit("late", 5, max_tokens=4)
    drive.abort("req-5")
    drive.run()
    drive.do(RecordDigest())
    drive.do(CloseEngine(reason="test over"))
    return [drive.records[:crash], drive.records[crash:]], drive


def long_life(num_requests: int, width: int = 8) -> list[Life]:
    """One life that serves `num_requests`, `width` at a time."""
    drive = Drive(config(num_blocks=48, max_num_seqs=width, max_num_batched_tokens=64), laws=False)
    drive.open()
    for i in range(num_requests):
        drive.submit(f"req-{i}", 10 + i % 7, max_tokens=12 + i % 9)
        if i % width == width - 1:
            drive.run(100_000)
    drive.run(100_000)
    drive.do(RecordDigest())
    return [drive.records]


def change(path: Path, statement: str) -> None:
    """Do something to a SQLite journal that no refold would."""
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(statement)
