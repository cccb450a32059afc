"""A run that is refused leaves the journal as it found it: whoever restores a part of it has the rest as it was."""

import contextlib
import shutil
import sqlite3
from pathlib import Path

import psycopg
import pytest

from refold.engine.engine import Engine
from tests.cli.command import refold

MARKS_OF_LIFE = {"owner.lock", "J.lock", "J-shm"}
DAMAGE = {
    "edited": "UPDATE journal_records SET time_ns = time_ns + 1 WHERE position = 4",
    "deleted": "DELETE FROM journal_records WHERE position = 4",
    "edited twice": "UPDATE journal_records SET body = body || ' ' WHERE position IN (2, 4)",
}


def content(journal: Path) -> dict[str, bytes]:
    """Every file of a journal; a lock holds nothing but a process id, and `-shm` is SQLite's own index of the WAL."""
    paths = journal.rglob("*") if journal.is_dir() else journal.parent.glob("J*")
    return {path.name: path.read_bytes() for path in paths if path.is_file() and path.name not in MARKS_OF_LIFE}


def run(journal: object):
    return refold("run", "--model", "simulated", "hello", "--journal", journal)


def assert_refused_as_it_was(journal: Path, *, times: int = 2) -> None:
    before = content(journal)
    for _ in range(times):
        result = run(journal)
        assert result.exit_code == 3, result.stderr
        after = content(journal)
        assert {name for name in before | after if before.get(name) != after.get(name)} == set()


@pytest.fixture(scope="module")
def whole_segments(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("segments") / "J"
    for number in range(3):
        with Engine("simulated", f"segments:///{root}", snapshot_every_records=0).open() as engine:
            engine.run([f"prompt {number}"])
        if number < 2:
            assert refold("compact", root).exit_code == 0
    return root


@pytest.fixture
def segments(whole_segments: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole_segments, tmp_path / "J")


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_damaged_journal_of_segments_is_refused_without_a_change(segments: Path, which: int) -> None:
    path = sorted(path for path in (segments / "main").iterdir() if path.suffix in {".seg", ".sealed"})[which]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert_refused_as_it_was(segments)


def test_a_backup_of_the_one_damaged_segment_mends_a_journal_that_was_refused(segments: Path) -> None:
    newest = max((segments / "main").glob("*.seg"))
    good = newest.read_bytes()
    newest.write_bytes(good[:300] + bytes([good[300] ^ 1]) + good[301:])
    assert run(segments).exit_code == 3
    newest.write_bytes(good)
    assert refold("verify", segments).exit_code == 0
    assert run(segments).exit_code == 0


@pytest.fixture
def sqlite(tmp_path: Path) -> Path:
    """A file with a WAL, as a killed engine leaves them."""
    journal = tmp_path / "live" / "J"
    journal.parent.mkdir()
    with Engine("simulated", journal, snapshot_every_records=0).open() as engine:
        engine.run(["one", "two"])
        return Path(shutil.copytree(journal.parent, tmp_path / "killed")) / "J"


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_sqlite_journal_is_refused_with_its_wal_where_it_was(sqlite: Path, damage: str) -> None:
    with contextlib.closing(sqlite3.connect(sqlite, isolation_level=None)) as connection:
        connection.execute("PRAGMA wal_autocheckpoint=0")
        connection.execute(DAMAGE[damage])
        for path in sqlite.parent.glob("J*"):  # while it's open: closing would fold the WAL into the file
            shutil.copy(path, sqlite.parent.parent / path.name)
    damaged = sqlite.parent.parent / "J"
    assert Path(f"{damaged}-wal").stat().st_size
    assert_refused_as_it_was(damaged)
    link = damaged.with_name("link")
    link.symlink_to(damaged)
    before = content(damaged)
    assert run(link).exit_code == 3
    assert content(damaged) == before, "a link to it changes nothing either"


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_sqlite_journal_that_was_closed_gets_no_wal(tmp_path: Path, damage: str) -> None:
    journal = tmp_path / "J"
    with Engine("simulated", journal, snapshot_every_records=0).open() as engine:
        engine.run(["one", "two"])
    with contextlib.closing(sqlite3.connect(journal, isolation_level=None)) as connection:
        connection.execute(DAMAGE[damage])
    assert not Path(f"{journal}-wal").exists()
    assert_refused_as_it_was(journal)
    assert not Path(f"{journal}-shm").exists()


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_journal_in_a_database_is_never_said_to_be_current(
    sqlite: Path, postgres_url: str, damage: str
) -> None:
    assert refold("migrate", sqlite).exit_code == 0
    assert run(postgres_url).exit_code == 0
    with contextlib.closing(sqlite3.connect(sqlite, isolation_level=None)) as connection:
        connection.execute(DAMAGE[damage])
    with psycopg.connect(postgres_url, autocommit=True) as server:
        server.execute(DAMAGE[damage])
    for journal in (sqlite, postgres_url):
        for options in ((), ("--check",)):
            result = refold("migrate", *options, journal)
            assert (result.exit_code, result.stdout) == (3, ""), result.stderr


def test_an_intact_journal_of_a_killed_engine_is_taken_over_as_ever(sqlite: Path, segments: Path) -> None:
    for journal in (sqlite, segments):
        assert run(journal).exit_code == 0
        assert refold("verify", journal).exit_code == 0


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_journal_in_postgresql_is_refused_in_the_epoch_that_it_has(
    postgres_server, postgres_url: str, damage: str
) -> None:
    assert run(postgres_url).exit_code == 0
    with psycopg.connect(postgres_url) as connection:
        connection.execute(DAMAGE[damage])
        before = connection.execute("SELECT * FROM journal_streams").fetchall()
        connection.commit()
        assert run(postgres_url).exit_code == 3
        assert connection.execute("SELECT * FROM journal_streams").fetchall() == before
