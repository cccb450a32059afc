"""The stores under test: one table. A campaign takes a driver and knows nothing else about the store.

A new store is a row here. `fresh` makes an empty journal (in `folder`, if it's made of files) and says where it is.
"""

import atexit
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

from refold import migrations


class Place(NamedTuple):
    """Where a journal is."""

    url: str
    stream: str = "main"


class Driver(NamedTuple):
    """A store under test.

    Attributes:
        name: in the figures.
        fresh: makes an empty journal in an empty folder.
        moved: the place of the same journal after its folder was copied to another; None if it's not made of files.
        synced_by: how an append becomes durable, for the page.
        patience_s: how long a call may wait for somebody else's lock.
        lockers: by name, a program for a Python of its own that holds a lock on the journal at argv[1] for argv[2] seconds and
            prints a line when it has it.
    """

    name: str
    fresh: Callable[[Path], Place]
    moved: Callable[[Path], Place] | None
    synced_by: str
    lockers: dict[str, str]
    patience_s: float = 5.0


def _in_sqlite(folder: Path) -> Place:
    return Place(f"sqlite:///{folder / 'journal.db'}")


@cache
def _empty_sqlite() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "journal.db")
        migrations.ensure(f"sqlite:///{path}")
        assert not path.with_name("journal.db-wal").exists()
        return path.read_bytes()


def _fresh_sqlite(folder: Path) -> Place:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "journal.db").write_bytes(_empty_sqlite())
    return _in_sqlite(folder)


_SQLITE_LOCKER = """
import sqlite3, sys, time
connection = sqlite3.connect(sys.argv[1].removeprefix("sqlite:///"), isolation_level=None, timeout=10)
connection.execute({begin!r})
connection.execute("SELECT count(*) FROM journal_records").fetchall()
print("has it", flush=True)
time.sleep(float(sys.argv[2]))
"""
_SQLITE_LOCKERS = {
    "another writer's transaction": _SQLITE_LOCKER.format(begin="BEGIN IMMEDIATE"),
    "another reader's transaction": _SQLITE_LOCKER.format(begin="BEGIN"),
}


def _in_segments(folder: Path) -> Place:
    return Place(f"segments:///{folder}")


def _fresh_segments(folder: Path) -> Place:
    folder.mkdir(parents=True, exist_ok=True)
    migrations.ensure(_in_segments(folder).url)
    return _in_segments(folder)


_FILE_LOCKER = """
import fcntl, glob, sys, time
folder = "/" + sys.argv[1].removeprefix("segments:///").strip("/")
marks = [open(path, "r+") for path in glob.glob(folder + "/**/mark", recursive=True)]
assert marks, "a stream has a mark"
for file in marks:
    fcntl.flock(file, fcntl.LOCK_EX)
print("has it", flush=True)
time.sleep(float(sys.argv[2]))
"""


@cache
def server():
    """This process's PostgreSQL, started on use and stopped at its end; commits reach the disk."""
    from tests.kit.postgres import Server

    started = Server()
    started.run("ALTER SYSTEM RESET fsync")
    started.run("SELECT pg_reload_conf()")
    atexit.register(started.close)
    return started


def _fresh_postgres(_folder: Path) -> Place:
    return Place(server().journal())


_POSTGRES_LOCKER = """
import psycopg, sys, time
connection = psycopg.connect(sys.argv[1])
connection.execute({statement!r})
print("has it", flush=True)
time.sleep(float(sys.argv[2]))
"""
_POSTGRES_LOCKERS = {
    "another writer's row lock": _POSTGRES_LOCKER.format(statement="SELECT 1 FROM journal_streams FOR UPDATE"),
    "a lock on the table": _POSTGRES_LOCKER.format(statement="LOCK TABLE journal_records IN ACCESS EXCLUSIVE MODE"),
    "an idle transaction": _POSTGRES_LOCKER.format(statement="SELECT count(*) FROM journal_records"),
}

DRIVERS: dict[str, Driver] = {
    "sqlite": Driver("sqlite", _fresh_sqlite, _in_sqlite, "fdatasync of the WAL (synchronous=FULL)", _SQLITE_LOCKERS),
    "segments": Driver(
        "segments", _fresh_segments, _in_segments, "fdatasync", {"a lock on the stream's mark": _FILE_LOCKER}
    ),
    "postgresql": Driver("postgresql", _fresh_postgres, None, "the server's WAL", _POSTGRES_LOCKERS, 30.0),
}


def copied(driver: Driver, source: Path, target: Path) -> Place:
    """The journal in `source`, as files, copied to `target`, which is emptied first."""
    assert driver.moved is not None, f"{driver.name} isn't made of files"
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    return driver.moved(target)
