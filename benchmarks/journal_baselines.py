"""What the journal is measured against: the same events, or the same bytes, written by other means.

Every contestant is made in a folder and then called once per step: it must have the step on disk when it returns. `rows` are
512 events of about 120 bytes as JSON objects; `same` is the very bytes that our record of the same step has.
"""

import json
import os
import sqlite3
import zlib
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

EVENTS_PER_STEP = 512


class Step(NamedTuple):
    """One step, as each contestant likes it."""

    rows: list[str]
    blob: bytes
    columns: bytes
    same: bytes


Contestant = Callable[[Step], None]


def event_rows(step: int) -> list[str]:
    """The step's events as JSON objects of about 120 bytes, one for each request."""
    return [
        json.dumps(
            {
                "type": "TokenDelivered",
                "step": step,
                "request": f"request-{n:06d}",
                "position": 100 + step,
                "token": (n * 31 + step) % 50_000,
                "block": n * 16 + step // 16,
            }
        )
        for n in range(EVENTS_PER_STEP)
    ]


def event_columns(step: int) -> bytes:
    """The same events as columns."""
    numbers = range(EVENTS_PER_STEP)
    return json.dumps(
        {
            "type": "TokensDelivered",
            "step": step,
            "requests": [f"request-{n:06d}" for n in numbers],
            "positions": [100 + step for _ in numbers],
            "tokens": [(n * 31 + step) % 50_000 for n in numbers],
            "blocks": [n * 16 + step // 16 for n in numbers],
        }
    ).encode()


def raw_sqlite(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("CREATE TABLE events (id INTEGER PRIMARY KEY, body NOT NULL)")
    return connection


def sqlite_rows(folder: Path) -> Contestant:
    connection = raw_sqlite(folder / "rows.db")

    def write(step: Step) -> None:
        connection.execute("BEGIN IMMEDIATE")
        connection.executemany("INSERT INTO events (body) VALUES (?)", [(row,) for row in step.rows])
        connection.execute("COMMIT")

    return write


def _sqlite_blob(folder: Path, name: str, of: Callable[[Step], bytes]) -> Contestant:
    connection = raw_sqlite(folder / f"{name}.db")

    def write(step: Step) -> None:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("INSERT INTO events (body) VALUES (?)", (of(step),))
        connection.execute("COMMIT")

    return write


def sqlalchemy_rows(folder: Path) -> Contestant:
    import sqlalchemy as sa

    engine = sa.create_engine(f"sqlite:///{folder / 'core.db'}")
    table = sa.Table("events", sa.MetaData(), sa.Column("id", sa.Integer, primary_key=True), sa.Column("body", sa.Text))
    with engine.begin() as connection:
        connection.exec_driver_sql("PRAGMA journal_mode=WAL")
        connection.exec_driver_sql("PRAGMA synchronous=FULL")
        table.create(connection)
    connection = engine.connect()

    def write(step: Step) -> None:
        with connection.begin():
            connection.execute(sa.insert(table), [{"body": row} for row in step.rows])

    return write


def _file(folder: Path, name: str, of: Callable[[Step], bytes]) -> Contestant:
    fd = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(step: Step) -> None:
        body = of(step)
        os.write(fd, len(body).to_bytes(4, "little") + zlib.crc32(body).to_bytes(4, "little") + body)
        os.fdatasync(fd)

    return write


def eventsourcing_sqlite(folder: Path) -> Contestant:
    """The `eventsourcing` package as its tutorial uses it: an aggregate that triggers an event per request, saved per step."""
    from eventsourcing.application import Application
    from eventsourcing.domain import Aggregate, event

    class Delivered(Aggregate):
        @event("TokenDelivered")
        def deliver(self, step: int, request: str, position: int, token: int, block: int) -> None:
            self.last = (step, request, position, token, block)

    environment = {"PERSISTENCE_MODULE": "eventsourcing.sqlite", "SQLITE_DBNAME": str(folder / "eventsourcing.db")}
    application: Any = Application(env=environment)
    aggregate, steps = Delivered(), count()

    def write(_: Step) -> None:
        step = next(steps)
        for n in range(EVENTS_PER_STEP):
            aggregate.deliver(step, f"request-{n:06d}", 100 + step, (n * 31 + step) % 50_000, n * 16)
        application.save(aggregate)

    return write


def _postgres(url: str, table: str, kind: str) -> Any:
    import psycopg

    connection = psycopg.connect(url, autocommit=True)
    connection.execute(f"CREATE TABLE {table} (id bigserial PRIMARY KEY, body {kind} NOT NULL)")
    connection.execute(f"ALTER TABLE {table} ALTER COLUMN body SET STORAGE EXTERNAL")
    return connection


def postgres_copy(url: str) -> Contestant:
    connection = _postgres(url, "by_copy", "text")

    def write(step: Step) -> None:
        with connection.cursor().copy("COPY by_copy (body) FROM STDIN") as copy:
            for row in step.rows:
                copy.write_row((row,))

    return write


def _postgres_blob(url: str, table: str, of: Callable[[Step], bytes]) -> Contestant:
    connection = _postgres(url, table, "bytea")

    def write(step: Step) -> None:
        connection.execute(f"INSERT INTO {table} (body) VALUES (%b)", (of(step),))

    return write


def file_contestants(folder: Path) -> dict[str, Contestant]:
    """The baselines that need a folder only, by name."""
    return {
        "sqlite3, a row per event": sqlite_rows(folder),
        "sqlite3, one JSON blob per step": _sqlite_blob(folder, "blob", lambda step: step.blob),
        "sqlite3, one columnar blob per step": _sqlite_blob(folder, "columns", lambda step: step.columns),
        "sqlite3, our bytes": _sqlite_blob(folder, "same", lambda step: step.same),
        "SQLAlchemy Core, a row per event": sqlalchemy_rows(folder),
        "file, checksum and fdatasync, JSON blob": _file(folder, "blob.log", lambda step: step.blob),
        "file, checksum and fdatasync, our bytes": _file(folder, "same.log", lambda step: step.same),
        "eventsourcing, SQLite": eventsourcing_sqlite(folder),
    }


def postgres_contestants(url: str) -> dict[str, Contestant]:
    """The baselines that need a PostgreSQL, by name."""
    return {
        "PostgreSQL, COPY, a row per event": postgres_copy(url),
        "PostgreSQL, one JSON blob per step": _postgres_blob(url, "json_blob", lambda step: step.blob),
        "PostgreSQL, our bytes": _postgres_blob(url, "same_bytes", lambda step: step.same),
    }
