"""Journals with a read model, for tests: real decisions of the core, in a real database."""

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from refold import migrations
from refold.engine.audit.place import catch_up, place_of
from refold.journal.codec import encode
from refold.journal.events import EngineOpened, Event
from refold.journal.record import EMPTY_HEAD, Record, head_after, seal
from refold.journal.stores import open_reader, open_store
from refold.journal.stores.location import locate
from refold.projections.audit.postgres_writer import PostgresAuditWriter
from refold.projections.audit.sqlite_writer import SqliteAuditWriter
from refold.projections.audit.trailing import TrailingProjection
from refold.projections.audit.writer import AuditWriter
from tests.kit.simulation import Simulation

START_NS = 1_790_000_000_000_000_000


def simulated(seed: int) -> list[list[Event]]:
    """The records of a simulated life: preemptions, aborts, sessions, drafts, crashes, lost workers."""
    simulation = Simulation(seed)
    simulation.play()
    return simulation.drive.records


def sealed(records: Sequence[Sequence[Event]], tick_ns: int = 7_000_000) -> list[Record]:
    """These events, chained; each record in the engine epoch of the engine that was open then."""
    head, out, epoch = EMPTY_HEAD, [], 1
    for number, events in enumerate(records):
        epoch = max([epoch, *(e.engine_epoch for e in events if isinstance(e, EngineOpened))])
        record = seal(head._replace(engine_epoch=epoch), START_NS + number * tick_ns, *encode(events, "salt"))
        out.append(record)
        head = head_after(record)
    return out


def write(url: str, records: Sequence[Record], stream: str = "main") -> str:
    """A journal of these records."""
    migrations.ensure(url)
    store = open_store(url)
    store.open_replica(stream)  # type: ignore[attr-defined]
    if records:
        store.append(stream, records)
    store.close()
    return url


def audited(url: str, records: Sequence[Record]) -> str:
    """A journal of these records, and its read model."""
    catch_up(place_of(write(url, records)))
    return url


def writer_of(url: str) -> AuditWriter:
    """A writer of the read model in this journal's database."""
    location = locate(url)
    return SqliteAuditWriter(location.path) if location.path else PostgresAuditWriter(url)


def project(url: str, max_rows: int = 60, stop: int | None = None, **options: Any) -> None:
    """Catch up in small batches."""
    reader, writer = open_reader(url), writer_of(url)
    try:
        for _ in TrailingProjection(reader, writer, "main", max_rows=max_rows, **options).catch_up(stop):
            pass
    finally:
        reader.close()
        writer.close()


@contextmanager
def asking(url: str) -> Iterator[Any]:
    """`ask(sql)` gives rows, on a plain connection as any other program has it."""
    path = locate(url).path
    if path is not None:
        connection: Any = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    else:
        import psycopg

        connection = psycopg.connect(url)
    try:
        yield lambda sql: [tuple(row) for row in connection.execute(sql).fetchall()]
    finally:
        connection.close()


def contents(url: str, tables: Sequence[str]) -> dict[str, list[tuple[Any, ...]]]:
    """The rows of tables or views, sorted."""
    with asking(url) as ask:
        return {name: sorted(ask(f"SELECT * FROM {name}"), key=repr) for name in tables}


def path_url(tmp_path: Path, name: str = "journal.db") -> str:
    """The URL of a SQLite journal."""
    return str(tmp_path / name)
