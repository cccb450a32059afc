"""Migrations: the tables that the code describes, entirely or not at all, by one process at a time."""

import contextlib
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from alembic import command

from refold import migrations
from refold.journal.errors import JournalCorrupt, JournalError, JournalOwned
from refold.journal.stores import open_reader
from refold.journal.stores.sql import SqlStore
from refold.journal.stores.sqlite_engine import PAGE_BYTES
from refold.journal.stores.sqlite_file import APPLICATION_ID, TABLE_VERSION, look_at
from refold.journal.testing import make_records
from refold.journal.verify import verify_stream
from refold.migrations import at_once, files, run
from refold.projections.audit.schema import TABLES

SCRIPT = Path(__file__).parents[1] / "journal" / "writing_process.py"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "journal.db"


def tables(path):
    connection = sqlite3.connect(path)
    names = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    connection.close()
    return names


def dump(path):
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return list(connection.iterdump())


def migrate_to(revision, path):
    """Alembic's way, up to some revision."""
    with files.writing(path) as connection:
        command.upgrade(run.config_of(connection), revision)
        connection.exec_driver_sql(f"PRAGMA application_id={APPLICATION_ID}")
        connection.exec_driver_sql("PRAGMA user_version=3")


def refold(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "refold.migrations", *map(str, arguments)], capture_output=True, text=True, check=False
    )


def test_models_and_migrations_agree():
    assert migrations.check() == []


def test_the_check_can_fail(monkeypatch):
    import sqlalchemy as sa

    from refold.journal.stores.tables import metadata

    other = sa.MetaData(naming_convention=metadata.naming_convention)
    for table in metadata.tables.values():
        copy = table.to_metadata(other)
        copy.append_column(sa.Column("extra", sa.Text)) if table.name == "journal_streams" else None
    monkeypatch.setattr(run, "metadata", other)
    assert any("extra" in difference for difference in migrations.check())


@pytest.mark.parametrize("change", [lambda made: made[:-1], lambda made: (*made, "CREATE TABLE more (x INTEGER)")])
def test_what_is_written_down_is_checked_too(monkeypatch, change):
    other = change(at_once.statements())
    monkeypatch.setattr(at_once, "statements", lambda: other)
    differences = migrations.check()
    assert len(differences) == 2
    assert differences[1] == "write it again: python -m refold.migrations write"


def test_a_new_file_is_what_the_migrations_make(path, tmp_path):
    migrations.upgrade(str(path))
    step_by_step = tmp_path / "step by step.db"
    migrate_to("head", step_by_step)
    assert sorted(dump(path)) == sorted(dump(step_by_step))


def test_the_table_version_is_the_newest_revision():
    assert int(run.head_revision()) == TABLE_VERSION


def test_a_new_file_gets_its_tables_and_the_second_time_nothing(path):
    assert not migrations.is_current(str(path))
    assert migrations.current(str(path)) is None
    assert migrations.upgrade(str(path))
    assert tables(path) == {
        "journal_streams",
        "journal_records",
        "journal_snapshots",
        "journal_archives",
        "refold_schema",
        "sqlite_stat1",
        *(table.name for table in TABLES),
    }
    assert look_at(path) == ("journal", TABLE_VERSION)
    assert migrations.is_current(str(path))
    assert migrations.current(str(path)) == run.head_revision()
    before = path.read_bytes()
    assert not migrations.upgrade(str(path))
    assert not migrations.ensure(str(path))
    assert path.read_bytes() == before


def test_a_new_file_has_small_pages(path):
    migrations.ensure(str(path))
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA page_size").fetchone() == (PAGE_BYTES,)
    connection.close()


def test_a_memory_journal_needs_none():
    assert migrations.is_current("memory:")
    assert not migrations.ensure("memory:")
    assert not migrations.upgrade("memory:")
    assert migrations.current("memory:") is None


def test_a_migration_that_fails_half_way_leaves_no_trace(path, monkeypatch):
    migrated = files._upgrade

    def fails_late(connection, path):
        migrated(connection, path)
        connection.exec_driver_sql("INSERT INTO journal_records (stream_id) VALUES (1)")

    monkeypatch.setattr(files, "_upgrade", fails_late)
    with pytest.raises(JournalError, match="cannot migrate"):
        migrations.upgrade(str(path))
    assert tables(path) == set()
    assert look_at(path) == ("empty", 0)
    monkeypatch.undo()
    assert migrations.upgrade(str(path))


def test_a_file_that_is_taken_away_meanwhile_is_an_error_and_the_next_try_makes_it(path, monkeypatch):
    make = at_once.make

    def make_and_lose(connection):
        make(connection)
        path.unlink()

    monkeypatch.setattr(at_once, "make", make_and_lose)
    with pytest.raises(JournalError, match="try again"):
        migrations.ensure(str(path))
    monkeypatch.undo()
    assert migrations.ensure(str(path))


def test_a_foreign_file_is_refused_before_it_is_touched(path):
    foreign = sqlite3.connect(path)
    foreign.execute("CREATE TABLE refold_schema (version_num)")
    foreign.close()
    before = path.read_bytes()
    with pytest.raises(JournalCorrupt, match="another program"):
        migrations.upgrade(str(path))
    with pytest.raises(JournalCorrupt, match="another program"):
        migrations.current(str(path))
    assert path.read_bytes() == before


def test_a_revision_that_nobody_knows_is_an_error_with_a_remedy(path):
    migrations.upgrade(str(path))
    connection = sqlite3.connect(path)
    connection.execute("UPDATE refold_schema SET version_num = 'abcd'")
    connection.execute("PRAGMA user_version=0")
    connection.commit()
    connection.close()
    with pytest.raises(JournalError, match=r"abcd.*use the refold that made it"):
        migrations.upgrade(str(path))


def test_a_live_engines_journal_is_not_migrated_under_it(path):
    migrations.upgrade(str(path))
    store = SqlStore(str(path))
    store.open_stream()
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version=0")
    connection.close()
    with pytest.raises(JournalOwned, match=f"process {os.getpid()} and needs a migration"):
        migrations.upgrade(str(path))
    store.close()
    assert migrations.upgrade(str(path))


@pytest.mark.parametrize(
    ("version", "revision"), [(0, run.head_revision()), (5, "0005")]
)  # of 5 the tables are today's
def test_records_survive_an_upgrade(path, version, revision):
    migrations.upgrade(str(path))
    store = SqlStore(str(path))
    head = store.append("main", make_records(store.open_stream(), 3))
    store.close()
    connection = sqlite3.connect(path)
    with connection:
        connection.execute("UPDATE refold_schema SET version_num = ?", (revision,))
        connection.execute(f"PRAGMA user_version={version}")
    connection.close()
    assert migrations.ensure(str(path))
    assert migrations.current(str(path)) == run.head_revision()
    assert verify_stream(open_reader(str(path))) == head


def test_four_processes_that_migrate_at_once_all_succeed(path):
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "refold.migrations", "upgrade", str(path)], stdout=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    answers = sorted(process.communicate(timeout=60)[0] for process in started)
    assert [process.returncode for process in started] == [0] * 4
    assert "upgraded\n" in answers
    assert set(answers) <= {"upgraded\n", "already current\n"}
    assert migrations.is_current(str(path))
    assert migrations.current(str(path)) == run.head_revision()


@pytest.mark.parametrize("before", [("absent", 0), ("journal", 3)], ids=["new", "old"])
def test_a_migration_killed_at_any_instant_leaves_nothing_or_all(tmp_path, before):
    instants, kinds, within_s = random.Random(7), [], 0.1
    with subprocess.Popen(
        [sys.executable, str(SCRIPT), "migrate", "unused"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as nursery:
        assert nursery.stdout.readline() == "ready\n"
        for life in range(16):
            path = tmp_path / f"{life}.db"
            if before != ("absent", 0):
                migrate_to("0003", path)
            nursery.stdin.write(f"{path}\n")
            nursery.stdin.flush()
            word, value = nursery.stdout.readline().split()
            assert word == "pid"
            time.sleep(instants.uniform(0.0, within_s))
            os.kill(int(value), signal.SIGKILL)
            assert nursery.stdout.readline() == "dead\n"
            kinds.append(look_at(path))
            within_s *= 0.7 if kinds[-1].version == TABLE_VERSION else 1.4  # how long it takes is the machine's affair
            migrations.ensure(str(path))
            store = SqlStore(str(path))
            assert store.append("main", make_records(store.open_stream(), 1)).position == 1
            store.close()
        nursery.stdin.close()
    assert set(kinds) <= {before, ("journal", TABLE_VERSION)} | ({("empty", 0)} if before == ("absent", 0) else set())
    assert len(set(kinds)) > 1, f"every kill hit the same moment: {kinds}"


def test_the_commands_answer_with_text_and_status(path):
    done = refold("upgrade", path)
    assert (done.returncode, done.stdout) == (0, "upgraded\n")
    done = refold("current", path)
    assert (done.returncode, done.stdout) == (0, run.head_revision() + "\n")
    done = refold("check")
    assert (done.returncode, done.stdout) == (0, "tables and migrations agree\n")
    done = refold("upgrade", "/proc/journal.db")
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.count("\n") == 1
    assert refold("nonsense").returncode == 2


def test_alembic_can_not_be_run_on_another_connection():
    with pytest.raises(RuntimeError, match=r"python -m refold\.migrations"):
        command.upgrade(run.config_of(None), "head")
