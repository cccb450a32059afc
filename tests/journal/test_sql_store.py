"""The SQLite store meets the world: settings, other programs, foreign files, failing disks, unknown commits."""

import contextlib
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
import sqlalchemy as sa

from refold import migrations
from refold.journal.errors import Fenced, JournalCorrupt, JournalError, JournalOwned, NotFound, SchemaTooNew
from refold.journal.record import EMPTY_HEAD
from refold.journal.stores import engine_owner, open_reader, open_store, sqlite_engine
from refold.journal.stores.sql import SqlStore
from refold.journal.stores.sqlite_file import APPLICATION_ID, TABLE_VERSION, look_at
from refold.journal.testing import make_records
from refold.journal.verify import verify_stream


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "journal.db"
    migrations.ensure(str(path))
    return path


@pytest.fixture
def store(path):
    store = SqlStore(str(path))
    yield store
    store.close()


def grow(store, count: int = 1, size: int = 10):
    """Append `count` records one by one; the head after them."""
    head = store.head()
    for _ in range(count):
        head = store.append("main", make_records(head, 1, cause="x" * size))
    return head


@contextlib.contextmanager
def nobody_special():
    """Root may write anywhere; here nobody may."""
    was = os.geteuid()
    if was == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(was)


class TestSettings:
    def test_the_writer_is_durable_and_the_only_one_that_checkpoints(self, store):
        store.open_stream()
        raw = sqlite_engine.driver(store._database.writer)
        asked = ("journal_mode", "synchronous", "wal_autocheckpoint", "foreign_keys", "mmap_size", "busy_timeout")
        assert [raw.execute(f"PRAGMA {name}").fetchone()[0] for name in asked] == ["wal", 2, 0, 1, 0, 0]

    def test_a_reader_can_not_write_or_checkpoint(self, path):
        raw = open_reader(str(path))._connection
        assert [raw.execute(f"PRAGMA {n}").fetchone()[0] for n in ("query_only", "wal_autocheckpoint")] == [1, 0]
        with pytest.raises(sqlite3.OperationalError):
            raw.execute("DELETE FROM journal_records")

    def test_the_file_says_whose_it_is_and_is_read_with_plain_sql(self, store, path):
        store.open_stream()
        grow(store, 2)
        store.close()
        plain = sqlite3.connect(path)
        assert plain.execute("PRAGMA application_id").fetchone() == (APPLICATION_ID,)
        assert plain.execute("SELECT body ->> '$[0].handle', typeof(body) FROM journal_records").fetchall() == [
            (0, "text"),
            (1, "text"),
        ]
        with pytest.raises(sqlite3.IntegrityError, match="cannot store TEXT"):
            plain.execute("UPDATE journal_records SET position = 'abc'")
        plain.close()

    def test_closing_folds_the_wal_into_the_file(self, store, path):
        store.open_stream()
        head = grow(store, 3)
        store.close()
        alone = path.with_name("copy.db")
        shutil.copy(path, alone)
        assert verify_stream(open_reader(str(alone))) == head

    def test_the_wal_stays_bounded(self, store, path):
        store.open_stream()
        largest = 0
        for _ in range(60):
            grow(store, 5, size=100_000)
            store.maintain()
            largest = max(largest, path.with_name("journal.db-wal").stat().st_size)
        assert path.stat().st_size > 25_000_000
        assert largest < 12_000_000


class TestOwnership:
    def test_a_second_store_is_refused_and_told_why(self, store, path):
        store.open_stream()
        other = SqlStore(str(path))
        with pytest.raises(JournalOwned, match=rf"this process \({os.getpid()}\): stop that engine"):
            other.open_stream()
        assert engine_owner(str(path)) == os.getpid()
        assert grow(store).position == 1

    def test_a_second_name_of_the_file_is_no_way_around(self, store, path):
        store.open_stream()
        link = path.with_name("link.db")
        link.symlink_to(path)
        with pytest.raises(JournalOwned):
            SqlStore(str(link)).open_stream()

    def test_a_store_that_was_forgotten_lets_go(self, path):
        SqlStore(str(path)).open_stream()
        store = SqlStore(str(path))
        assert store.open_stream().engine_epoch == 2
        store.close()

    def test_the_epoch_fences_where_the_lock_is_bypassed(self, path):
        first, second = (SqlStore(str(path), exclusive=False) for _ in range(2))
        head = first.append("main", make_records(first.open_stream(), 1))
        second.open_stream()
        with pytest.raises(Fenced, match="engine epoch 2 now, this engine has 1"):
            first.append("main", make_records(head, 1))
        assert grow(second).position == 2


class TestAppends:
    @pytest.mark.parametrize("count", [1, 16, 17, 40])
    def test_at_a_head_that_has_moved_nothing_gets_in_and_no_transaction_stays(self, path, count):
        ours, theirs = (SqlStore(str(path), exclusive=False) for _ in range(2))
        before = ours.open_stream()
        raw = sqlite_engine.driver(ours._database.writing())
        moved = theirs.append("main", make_records(theirs.open_stream(), 3))
        with pytest.raises(Fenced):
            ours.append("main", make_records(before, count))
        assert not raw.in_transaction
        assert theirs.append("main", make_records(moved, 40)).position == 43

    @pytest.mark.parametrize(("count", "bad"), [(1, 0), (16, 15), (17, 0), (40, 16), (40, 39)])
    def test_of_records_that_fail_at_any_of_them_none_is_in(self, store, path, count, bad):
        head = store.open_stream()
        with contextlib.closing(sqlite3.connect(path)) as other:
            fails = f"WHEN NEW.position = {bad} BEGIN SELECT RAISE(ABORT, 'no'); END"
            other.execute(f"CREATE TRIGGER full BEFORE INSERT ON journal_records {fails}")
            with pytest.raises(JournalError, match="cannot write"):
                store.append("main", make_records(head, count))
            other.execute("DROP TRIGGER full")
        assert store.head() == head
        assert store.append("main", make_records(head, count)).position == count


class TestFilesThatAreNotJournals:
    def opened(self, path):
        """The errors of every way in; each must refuse, with the same kind of error."""
        errors = []
        for way in (open_reader, open_store, migrations.ensure):
            with pytest.raises(JournalError) as caught:
                way(str(path))
            errors.append(caught.value)
        return errors

    @pytest.mark.parametrize(
        "content", [b"hello world" * 100, b"GGUF" + bytes(5000), b"SQLite format 3\0" + b"\xff" * 5000]
    )
    def test_a_file_of_something_else(self, tmp_path, content):
        path = tmp_path / "model.gguf"
        path.write_bytes(content)
        for error in self.opened(path):
            assert isinstance(error, JournalCorrupt)
            assert str(path) in str(error)
        assert path.read_bytes() == content
        assert list(tmp_path.iterdir()) == [path]

    @pytest.mark.parametrize("mode", ["delete", "wal"])
    def test_another_programs_database(self, tmp_path, mode):
        path = tmp_path / "other.db"
        other = sqlite3.connect(path)
        other.execute(f"PRAGMA journal_mode={mode}")
        other.execute("CREATE TABLE bookmarks (url)")
        other.commit()
        other.close()
        before = path.read_bytes()
        for error in self.opened(path):
            assert isinstance(error, JournalCorrupt)
            assert error.kind == "foreign"
            assert "bookmarks" in str(error)
        assert path.read_bytes() == before
        assert list(tmp_path.iterdir()) == [path]

    def test_another_programs_empty_database(self, tmp_path):
        path = tmp_path / "other.db"
        other = sqlite3.connect(path)
        other.execute("PRAGMA application_id=252006674")
        other.close()
        assert {error.kind for error in self.opened(path)} == {"foreign"}

    def test_a_folder(self, tmp_path):
        for way in (open_reader, open_store):
            with pytest.raises(NotFound, match="no journal at"):
                way(str(tmp_path))
        (tmp_path / "letter.txt").write_text("Dear reader")
        assert {error.kind for error in self.opened(tmp_path)} == {"foreign"}

    def test_a_device(self):
        assert {error.kind for error in self.opened("/dev/null")} == {"foreign"}

    def test_a_folder_that_is_not_there(self, tmp_path):
        path = tmp_path / "nowhere" / "journal.db"
        for way in (open_reader, open_store):
            with pytest.raises(NotFound, match="no journal at"):
                way(str(path))
        with pytest.raises(JournalError, match="check that the folder exists"):
            migrations.ensure(str(path))

    def test_a_place_where_nobody_may_write(self):
        with pytest.raises(JournalError, match="folder"):
            migrations.ensure("/proc/journal.db")

    def test_a_name_that_is_too_long(self, tmp_path):
        for error in self.opened(tmp_path / ("x" * 300)):
            assert "too long" in str(error)

    def test_no_journal_yet(self, tmp_path):
        path = tmp_path / "new.db"
        for way in (open_reader, open_store):
            with pytest.raises(NotFound):
                way(str(path))
        path.touch()
        for way in (open_reader, open_store):
            with pytest.raises(NotFound):
                way(str(path))
        assert migrations.ensure(str(path))
        assert open_reader(str(path)).head() == EMPTY_HEAD

    def test_a_newer_refolds_journal(self, path):
        newer = sqlite3.connect(path)
        newer.execute("PRAGMA user_version=99")
        newer.close()
        for error in self.opened(path):
            assert isinstance(error, SchemaTooNew)
            assert "99" in str(error)

    def test_a_journal_restored_from_a_dump_needs_its_header_back(self, store, path):
        store.open_stream()
        head = grow(store, 2)
        store.close()
        source, target = sqlite3.connect(path), sqlite3.connect(path.with_name("restored.db"))
        target.executescript("\n".join(source.iterdump()))
        source.close()
        target.close()
        restored = str(path.with_name("restored.db"))
        with pytest.raises(JournalError, match="refold migrate"):
            open_reader(restored)
        assert migrations.ensure(restored)
        assert verify_stream(open_reader(restored)) == head


class TestOtherPrograms:
    def test_a_lock_that_lasts_is_an_error_with_a_remedy_and_then_over(self, path):
        store = SqlStore(str(path), busy_timeout_s=0.1)
        store.open_stream()
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(JournalError, match="locked; another program holds its lock"):
            grow(store)
        other.execute("ROLLBACK")
        assert grow(store).position == 1
        store.close()

    def test_a_short_lock_is_waited_for(self, path, store):
        store.open_stream()
        other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        other.execute("BEGIN IMMEDIATE")
        timer = threading.Timer(0.2, other.execute, ["ROLLBACK"])
        timer.start()
        assert grow(store).position == 1
        timer.join()

    def test_a_reader_that_stays_in_a_transaction_stops_nobody(self, path, store):
        store.open_stream()
        grow(store, 3)
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN")
        assert other.execute("SELECT count(*) FROM journal_records").fetchone() == (3,)
        grow(store, 3)
        store.maintain(idle=True)
        assert other.execute("SELECT count(*) FROM journal_records").fetchone() == (3,)
        store.close()
        other.close()
        assert verify_stream(open_reader(str(path))).position == 6

    def test_someone_elses_append_is_a_conflict_not_a_fork(self, path):
        store = SqlStore(str(path))
        head = store.open_stream()
        other = sqlite3.connect(path)
        other.execute("UPDATE journal_streams SET head_position = 5")
        other.commit()
        with pytest.raises(JournalError, match="head at 5, expected 0"):
            store.append("main", make_records(head, 1))
        store.close()

    def test_a_read_only_file_is_read_and_not_written(self):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "journal.db")
            migrations.ensure(str(path))
            store = SqlStore(str(path))
            store.open_stream()
            head = grow(store)
            store.close()
            path.with_name("journal.db.lock").unlink()
            path.chmod(0o444)
            path.parent.chmod(0o555)
            with nobody_special():
                assert verify_stream(open_reader(str(path))) == head
                with pytest.raises(JournalError, match="right to write"):
                    SqlStore(str(path)).open_stream()
                with pytest.raises(JournalError, match="write"):
                    SqlStore(str(path), exclusive=False).open_stream()
                assert engine_owner(str(path)) is None
            path.parent.chmod(0o755)

    def test_opening_notices_a_tail_that_was_cut_off(self, path, store):
        store.open_stream()
        grow(store, 4)
        store.close()
        other = sqlite3.connect(path)
        other.execute("DELETE FROM journal_records WHERE position = 3")
        other.commit()
        other.close()
        again = SqlStore(str(path))
        with pytest.raises(JournalCorrupt, match="ends at 3, its head says 4") as caught:
            again.open_stream()
        assert (caught.value.position, caught.value.kind) == (3, "truncated")
        assert engine_owner(str(path)) is None


class _CommitThatLies(sqlite3.Connection):
    """A driver whose appends report an error: after they have committed, or instead of it."""

    lie = None

    def execute(self, sql, *parameters):
        if self.lie is None or "INTO appends" not in sql:
            return super().execute(sql, *parameters)
        if self.lie == "after":
            super().execute(sql, *parameters)
        type(self).lie = None
        error = sqlite3.OperationalError("disk I/O error")
        error.sqlite_errorcode = sqlite3.SQLITE_IOERR
        raise error


class TestUnknownCommits:
    @pytest.fixture
    def store(self, path):
        store = SqlStore(str(path))
        sa.event.listen(
            store._database.engine,
            "do_connect",
            lambda dialect, record, args, options: options.update(factory=_CommitThatLies),
        )
        yield store
        _CommitThatLies.lie = None
        store.close()

    def test_a_commit_that_failed_after_it_committed_counts_as_done(self, store):
        head = store.open_stream()
        _CommitThatLies.lie = "after"
        head = store.append("main", make_records(head, 2))
        assert _CommitThatLies.lie is None, "the driver never lied"
        assert head.position == 2
        head = store.append("main", make_records(head, 2))
        assert verify_stream(store) == head

    def test_a_commit_that_failed_leaves_the_head_where_it_was(self, store):
        head = store.open_stream()
        _CommitThatLies.lie = "before"
        with pytest.raises(JournalError, match="disk I/O error"):
            store.append("main", make_records(head, 2))
        assert _CommitThatLies.lie is None, "the driver never lied"
        assert store.head() == head
        head = store.append("main", make_records(head, 2))
        assert verify_stream(store) == head

    def test_a_head_that_can_not_be_read_is_said_to_be_unknown(self, store, path, tmp_path):
        head = store.open_stream()
        store._database.engine.dispose()
        _CommitThatLies.lie = "before"
        sa.event.listen(store._database.engine, "do_connect", lambda *_: _refuse())
        with pytest.raises(JournalError, match="records 0 to 1 may or may not be in"):
            store.append("main", make_records(head, 2))


def _refuse():
    raise sqlite3.OperationalError("unable to open database file")


def test_a_full_file_refuses_and_recovers(store):
    store.open_stream()
    grow(store, 3)
    raw = sqlite_engine.driver(store._database.writer)
    raw.execute(f"PRAGMA max_page_count={raw.execute('PRAGMA page_count').fetchone()[0] + 2}")
    with pytest.raises(JournalError, match="free disk space"):
        grow(store, 50, size=3000)
    head = store.head()
    assert verify_stream(store) == head
    assert store.append("main", make_records(head, 1)).position == head.position + 1


def test_reading_needs_no_sqlalchemy(path):
    code = (
        "import sys; from refold.journal.stores import open_reader; from refold import migrations\n"
        "migrations.ensure(sys.argv[1]); open_reader(sys.argv[1]).head()\n"
        "print([m for m in ('sqlalchemy', 'alembic', 'torch', 'pydantic') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_both_readers_read_the_same(store, path):
    store.open_stream("a")
    store.open_stream()
    grow(store, 300)
    reader = open_reader(str(path))
    assert list(reader.read()) == list(store.read())
    assert list(reader.read(start=250, stop=299)) == list(store.read(start=250, stop=299))
    assert reader.head() == store.head()
    assert reader.head("nobody") == store.head("nobody") == EMPTY_HEAD
    assert reader.streams() == store.streams() == ["a", "main"]
    reader.close()
    reader.close()
    with pytest.raises(JournalError, match="closed"):
        reader.head()


def test_a_look_says_what_lies_there(path, tmp_path):
    assert look_at(path) == ("journal", TABLE_VERSION)
    assert look_at(tmp_path / "nothing") == ("absent", 0)
