"""The stores under test: one table. A campaign takes a driver and knows nothing else about the store.

A new store is a row here. `fresh` makes an empty journal (in `folder`, if it's made of files) and says where it is.
"""

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
        lockers: by name, a program for a Python of its own that holds a lock on the journal at argv[1] for argv[2] seconds and
            prints a line when it has it.
    """

    name: str
    fresh: Callable[[Path], Place]
    moved: Callable[[Path], Place] | None
    synced_by: str
    lockers: dict[str, str]


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

DRIVERS: dict[str, Driver] = {
    "sqlite": Driver("sqlite", _fresh_sqlite, _in_sqlite, "fdatasync of the WAL (synchronous=FULL)", _SQLITE_LOCKERS),
}


def copied(driver: Driver, source: Path, target: Path) -> Place:
    """The journal in `source`, as files, copied to `target`, which is emptied first."""
    assert driver.moved is not None, f"{driver.name} isn't made of files"
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    return driver.moved(target)
