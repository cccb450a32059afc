"""Damage to a SQLite file where no record's hash covers it: it's an error that says so, never an empty journal."""

import contextlib
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from refold import migrations
from refold.journal.copying import copy_stream
from refold.journal.ends import EndInDoubt
from refold.journal.errors import JournalCorrupt, JournalError
from refold.journal.record import Head
from refold.journal.stores import doubt_of_end, open_reader, open_store
from refold.journal.stores.sql import SqlStore
from refold.journal.stores.sqlite_engine import PAGE_BYTES
from refold.journal.stores.sqlite_file import look_at
from refold.journal.stores.sqlite_marks import Marks, doubt_of, mark_file
from refold.journal.testing import make_records
from refold.journal.verify import verify_stream
from tests.cli.command import refold
from tests.kit.sqlite_pages import UNUSED, end_of_wal, uses_of_bytes


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "journal.db"
    migrations.ensure(str(path))
    store = open_store(str(path))
    store.append("main", make_records(store.open_stream(), 5, cause="x" * 3000))
    store.close()
    return path


def replace_in(path: Path, use: str, old: bytes, new: bytes) -> None:
    """Put `new` in the place of `old` where the file's bytes are used for `use`."""
    raw, uses = path.read_bytes(), uses_of_bytes(path)
    at = next(i for i in range(len(raw)) if uses[i] == use and raw.startswith(old, i))
    path.write_bytes(raw[:at] + new + raw[at + len(old) :])


@pytest.mark.parametrize("where", ["journal_streams: cells", "sqlite_autoindex_journal_streams_1: cells"])
def test_a_stream_that_lost_its_name_is_damage_and_not_an_empty_journal(path: Path, where: str) -> None:
    replace_in(path, where, b"main", b"maim")
    with pytest.raises(JournalCorrupt, match=r"journal_streams.*restore it from a backup"):
        open_reader(str(path))


@pytest.mark.parametrize("lost", ["no record", "the records"])
@pytest.mark.parametrize("has_mark", [True, False])
def test_an_emptied_table_of_streams_is_damage_while_records_or_a_mark_are_there(
    path: Path, lost: str, has_mark: bool
) -> None:
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("DELETE FROM journal_streams")
        if lost == "the records":
            connection.execute("DELETE FROM journal_records")
    if not has_mark:
        mark_file(path).unlink()
    if lost == "the records" and not has_mark:
        assert open_reader(str(path)).head().position == 0
        return
    with pytest.raises(JournalCorrupt, match=r"up to 5 were acknowledged|its table of streams is empty"):
        open_reader(str(path))


@pytest.mark.parametrize("opening", [SqlStore.open_stream, SqlStore.open_replica])
def test_nobody_begins_a_stream_anew_over_records_whose_table_of_streams_was_emptied(path: Path, opening) -> None:
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("DELETE FROM journal_streams")
    mark_file(path).unlink()
    store = SqlStore(f"sqlite:///{path}")
    with pytest.raises(JournalCorrupt, match="its table of streams is empty"):
        opening(store)
    store.close()
    with contextlib.closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT count(*) FROM journal_streams").fetchone() == (0,)


@pytest.mark.parametrize(
    ("where", "num_records"), [("journal_streams: cells", 0), ("sqlite_autoindex_journal_streams_1: cells", 5)]
)
def test_reindexing_a_copy_tells_a_damaged_index_from_a_damaged_table(path: Path, where: str, num_records: int) -> None:
    """As docs/reliability.md has it: only where the index was damaged are the records there afterwards."""
    replace_in(path, where, b"main", b"maim")
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("REINDEX")
    assert verify_stream(open_reader(str(path))).position == num_records


def test_a_damaged_definition_whose_error_is_no_text_is_still_an_error_of_ours(path: Path) -> None:
    replace_in(path, "sqlite_schema: cells", b"INTEGER", b"INT\xc5GER")
    with pytest.raises(JournalCorrupt, match="damaged"):
        open_reader(str(path))


def test_a_constraint_whose_damaged_name_is_no_text_is_an_error_of_ours_when_writing(path: Path) -> None:
    replace_in(path, "sqlite_schema: cells", b"fk_journal_records_stream_id", b"fk_journal_records_strea\xec_id")
    store = open_store(str(path))
    with contextlib.closing(store), contextlib.suppress(JournalError):  # nothing else may come out of it
        store.append("main", make_records(store.open_stream(), 1))


def test_a_page_that_no_record_is_on_is_looked_at_by_verify(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE gone (x)")
    connection.execute("INSERT INTO gone VALUES (zeroblob(30000))")
    connection.commit()
    connection.execute("DROP TABLE gone")
    connection.commit()
    connection.close()
    reader = open_reader(str(path))
    verify_stream(reader)
    reader.close()
    raw = bytearray(path.read_bytes())
    first_of_list = int.from_bytes(raw[32:36], "big") - 1  # page numbers start at 1
    assert uses_of_bytes(path)[first_of_list * PAGE_BYTES] == "free list"
    raw[first_of_list * PAGE_BYTES + 7] ^= 1
    path.write_bytes(raw)
    reader = open_reader(str(path))
    with pytest.raises(JournalCorrupt, match=r"(?i)freelist"):
        verify_stream(reader)
    reader.close()


def test_every_byte_of_a_journal_has_a_use_and_most_hold_something(path: Path) -> None:
    uses = uses_of_bytes(path)
    assert len(uses) == path.stat().st_size
    assert {"journal_records: cells", "journal_records: page header", "journal_streams: cells"} <= set(uses)
    assert sum(use not in UNUSED for use in uses) > 15_000


def test_engines_in_threads_may_migrate_at_once(tmp_path: Path) -> None:
    failed: list[BaseException] = []

    def migrate(number: int) -> None:
        try:
            migrations.ensure(str(tmp_path / f"{number}.db"))
        except BaseException as error:  # noqa: BLE001
            failed.append(error)

    threads = [threading.Thread(target=migrate, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


class TestAnEndThatIsGone:
    """A journal whose engine was killed: all that it wrote is in the WAL, and SQLite stops at the first frame that's wrong."""

    NUM_APPENDS = 4

    @pytest.fixture
    def left_behind(self, tmp_path: Path) -> Path:
        """The files as a killed writer leaves them, but for the zeros behind the WAL's last frame."""
        source, target = tmp_path / "alive.db", tmp_path / "left.db"
        migrations.ensure(str(source))
        store = open_store(str(source))
        head = store.open_stream()
        for _ in range(self.NUM_APPENDS):
            head = store.append("main", make_records(head, 1, cause="x" * 2500))
        for suffix in ("", "-wal", ".mark"):
            target.with_name(target.name + suffix).write_bytes(source.with_name(source.name + suffix).read_bytes())
        store.close()
        log = target.with_name(target.name + "-wal")
        log.write_bytes(log.read_bytes()[: end_of_wal(log.read_bytes())])
        return target

    @pytest.fixture
    def wal(self, left_behind: Path) -> Path:
        return left_behind.with_name(left_behind.name + "-wal")

    @pytest.fixture
    def mark(self, left_behind: Path) -> Path:
        return left_behind.with_name(left_behind.name + ".mark")

    @pytest.fixture
    def mark_of_path(self, path: Path) -> Path:
        return path.with_name(path.name + ".mark")

    def position(self, path: Path) -> int:
        reader = open_reader(str(path))
        try:
            return verify_stream(reader).position
        finally:
            reader.close()

    def is_missed(self, path: Path) -> None:
        """Whoever verifies or goes on is told that records are gone."""
        with pytest.raises(JournalCorrupt, match=f"records up to {self.NUM_APPENDS} were acknowledged") as caught:
            self.position(path)
        assert caught.value.kind == "truncated"
        store = open_store(str(path))
        with contextlib.closing(store), pytest.raises(JournalCorrupt, match="were acknowledged"):
            store.open_stream()

    @pytest.mark.parametrize("reads_before", [False, True])
    def test_whoever_is_refused_leaves_the_file_and_its_wal_as_they_were(
        self, left_behind: Path, wal: Path, reads_before: bool
    ) -> None:
        content = bytearray(wal.read_bytes())
        content[len(content) // 2] ^= 4
        wal.write_bytes(content)
        before = left_behind.read_bytes(), wal.read_bytes()
        for opening in (SqlStore.open_stream, SqlStore.open_replica):
            store = SqlStore(str(left_behind))
            if reads_before:  # on a connection that could write
                assert store.head().position < self.NUM_APPENDS
            with pytest.raises(JournalCorrupt, match="were acknowledged"):
                opening(store)
            store.close()
            assert (left_behind.read_bytes(), wal.read_bytes()) == before

    @pytest.mark.parametrize(
        "verb",
        [("run", "--model", "simulated", "hello", "--journal"), ("compact",), ("archive", "--until", "1", "--to", "x")],
    )
    def test_a_command_that_is_refused_leaves_them_too(
        self, left_behind: Path, wal: Path, verb: tuple[str, ...]
    ) -> None:
        content = bytearray(wal.read_bytes())
        content[len(content) // 2] ^= 4
        wal.write_bytes(content)
        before = left_behind.read_bytes(), wal.read_bytes()
        result = refold(*verb, left_behind)
        assert result.exit_code == 3
        assert "were acknowledged" in result.stderr
        assert (left_behind.read_bytes(), wal.read_bytes()) == before

    def test_a_read_model_is_not_written_into_them_and_what_is_there_is_asked_all_the_same(
        self, left_behind: Path, wal: Path
    ) -> None:
        content = bytearray(wal.read_bytes())
        content[len(content) // 2] ^= 4
        wal.write_bytes(content)
        before = left_behind.read_bytes(), wal.read_bytes()
        asked = refold("sql", "--csv", left_behind, "SELECT num_records < 4 FROM integrity")
        assert asked.stdout.splitlines()[-1] == "1", asked.stderr
        assert "must not be: projecting it into a temporary file" in asked.stderr
        rebuilt = refold("audit", "rebuild", left_behind)
        assert (rebuilt.exit_code, rebuilt.stdout) == (3, "")
        assert "were acknowledged" in rebuilt.stderr
        assert (left_behind.read_bytes(), wal.read_bytes()) == before

    def test_a_head_without_its_record_is_refused_without_a_trace_too(self, path: Path) -> None:
        with contextlib.closing(sqlite3.connect(path)) as plain:
            plain.execute("DELETE FROM journal_records WHERE position = 4")
            plain.commit()
        before = path.read_bytes()
        again = SqlStore(str(path))
        with pytest.raises(JournalCorrupt, match="ends at 4, its head says 5"):
            again.open_stream()
        again.close()
        assert path.read_bytes() == before

    def test_an_undamaged_one_is_read_to_its_end(self, left_behind: Path) -> None:
        assert self.position(left_behind) == self.NUM_APPENDS

    @pytest.mark.parametrize("at", [0, 9, 17, 31, 40, 60, 700, -1, -500, -1030], ids=str)
    def test_one_flipped_bit_in_the_wal_is_missed_wherever_it_is(self, left_behind: Path, wal: Path, at: int) -> None:
        content = bytearray(wal.read_bytes())
        content[at] ^= 4
        wal.write_bytes(content)
        self.is_missed(left_behind)

    @pytest.mark.parametrize("num_missing", [1, 100, 2000])
    def test_a_shorter_wal_is_missed(self, left_behind: Path, wal: Path, num_missing: int) -> None:
        wal.write_bytes(wal.read_bytes()[:-num_missing])
        self.is_missed(left_behind)

    def test_a_wal_that_is_gone_is_missed(self, left_behind: Path, wal: Path) -> None:
        wal.unlink()
        self.is_missed(left_behind)

    def test_whoever_copies_is_refused_and_may_accept_what_is_there(
        self, left_behind: Path, wal: Path, tmp_path: Path
    ) -> None:
        wal.write_bytes(wal.read_bytes()[:-2000])
        reader, target = open_reader(str(left_behind)), tmp_path / "copy.db"
        migrations.ensure(str(target))
        copy = SqlStore(str(target))
        with pytest.raises(EndInDoubt, match=r"up to 4 were acknowledged.*--accept-end") as caught:
            copy_stream(reader, copy, "main")
        assert (caught.value.kind, caught.value.num_known, copy.head().position) == ("truncated", self.NUM_APPENDS, 0)
        there = copy_stream(reader, copy, "main", accepts_end=True).head.position
        assert 0 < there == reader.head().position < self.NUM_APPENDS
        reader.close()
        copy.close()

    def test_whoever_reads_is_told_on_stderr_and_reads(self, left_behind: Path, wal: Path) -> None:
        assert "were acknowledged" not in refold("log", left_behind).stderr
        wal.write_bytes(wal.read_bytes()[:-2000])
        for verb, status in {"log": 0, "stat": 0, "head": 3}.items():  # a head is what others are measured by
            result = refold(verb, left_behind)
            assert result.exit_code == status, result.stderr
            assert f"records up to {self.NUM_APPENDS} were acknowledged" in result.stderr, verb

    def test_a_last_transaction_that_nobody_was_told_of_is_not(self, left_behind: Path, wal: Path, mark: Path) -> None:
        """The crash came before the mark moved: that's how a torn tail looks."""
        wal.write_bytes(wal.read_bytes()[:-1])
        reader = open_reader(str(left_behind))
        before = reader.head()
        reader.close()
        mark.unlink()
        Marks(left_behind).move(1, before)
        assert self.position(left_behind) == self.NUM_APPENDS - 1

    def test_another_history_of_the_same_length_is_missed(self, left_behind: Path, mark: Path) -> None:
        mark.unlink()
        Marks(left_behind).move(1, Head(self.NUM_APPENDS, b"x" * 32, 1))
        self.is_missed(left_behind)

    @pytest.mark.parametrize("at", range(64, 124), ids=str)
    def test_a_damaged_mark_is_no_mark(self, left_behind: Path, mark: Path, at: int) -> None:
        content = bytearray(mark.read_bytes())
        assert len(content) >= 120
        content[at % len(content)] ^= 1 << at % 8
        mark.write_bytes(content)
        assert self.position(left_behind) == self.NUM_APPENDS

    def test_who_removes_the_mark_goes_on_from_what_is_there(self, left_behind: Path, wal: Path, mark: Path) -> None:
        wal.write_bytes(wal.read_bytes()[:-1])
        mark.unlink()
        store = open_store(str(left_behind))
        with contextlib.closing(store):
            head = store.open_stream()
            assert store.append("main", make_records(head, 1)).position == self.NUM_APPENDS
        assert self.position(left_behind) == self.NUM_APPENDS

    def test_a_journal_that_was_removed_without_its_mark_is_not_begun_anew(
        self, path: Path, mark_of_path: Path
    ) -> None:
        path.unlink()
        told = f"{path} is gone, but records up to .* were acknowledged here: put it back, or remove {mark_of_path} too"
        with pytest.raises(JournalCorrupt, match=told) as caught:
            migrations.ensure(str(path))
        assert caught.value.kind == "truncated"
        assert not path.exists()

    def test_a_new_journal_in_the_place_of_one_that_was_removed_with_its_mark_starts_at_0(
        self, path: Path, mark_of_path: Path
    ) -> None:
        path.unlink()
        mark_of_path.unlink()
        migrations.ensure(str(path))
        store = open_store(str(path))
        with contextlib.closing(store):
            assert store.open_stream().position == 0

    def test_a_damaged_mark_of_a_journal_that_is_gone_is_forgotten(self, path: Path, mark_of_path: Path) -> None:
        path.unlink()
        mark_of_path.write_bytes(bytes(200))
        migrations.ensure(str(path))
        assert not mark_of_path.exists()

    def test_a_sound_mark_or_none_at_all_raises_no_doubt(self, path: Path, mark_of_path: Path) -> None:
        assert doubt_of(path) == ""
        mark_of_path.write_bytes(b"")  # killed between making it and writing to it
        assert doubt_of(path) == ""
        mark_of_path.unlink()
        assert doubt_of(path) == ""

    @pytest.mark.parametrize(
        ("damage", "told"),
        [
            (lambda raw: raw[:70] + bytes([raw[70] ^ 1]) + raw[71:], "is damaged (1 of its 1 marks)"),
            (lambda raw: raw[:-1], "is damaged (1 of its 1 marks)"),
            (lambda raw: raw + b"x" * 20, "is damaged (1 of its 2 marks)"),
            (lambda raw: bytes(len(raw)), "holds no mark in its 120 bytes"),
        ],
    )
    def test_a_mark_that_is_damaged_is_told_with_what_that_means(
        self, path: Path, mark_of_path: Path, damage: Callable[[bytes], bytes], told: str
    ) -> None:
        mark_of_path.write_bytes(damage(mark_of_path.read_bytes()))
        doubt = doubt_of_end(str(path))
        assert doubt.startswith(f"{mark_of_path} {told}")
        assert "an older copy in the journal's place, can't be noticed now" in doubt
        assert "\n" not in doubt

    def test_a_mark_that_can_not_be_read_is_told_too(self, path: Path, mark_of_path: Path) -> None:
        mark_of_path.unlink()
        mark_of_path.mkdir()
        assert doubt_of(path).startswith(f"{mark_of_path} is a folder, where a file should be")

    def test_a_file_that_lost_even_its_tables_is_not_made_anew(self, path: Path) -> None:
        path.write_bytes(b"")
        with pytest.raises(JournalCorrupt, match="were acknowledged"):
            migrations.ensure(str(path))

    @pytest.mark.parametrize(("lost", "told"), [("mark", "its -wal beside it is not"), ("wal", ""), ("", "")])
    def test_an_emptied_file_with_a_wal_or_a_mark_beside_it_is_damage_and_nothing_is_touched(
        self, left_behind: Path, wal: Path, mark: Path, lost: str, told: str
    ) -> None:
        left_behind.write_bytes(b"")
        if lost:
            {"mark": mark, "wal": wal}[lost].unlink()
        before = {file.name: file.read_bytes() for file in left_behind.parent.glob("left.db*")}
        for verb in ("log", "verify", "stat", "head", "compact", "migrate", "run --model simulated hi --journal"):
            result = refold(*verb.split(), left_behind)
            assert result.exit_code == 3, verb
            assert f"is empty, and {told or 'records up to 4 were acknowledged'}: restore it" in result.stderr, verb
            assert {file.name: file.read_bytes() for file in left_behind.parent.glob("left.db*")} == before, verb

    def test_an_empty_file_with_nothing_beside_it_is_one_that_an_engine_may_fill(self, tmp_path: Path) -> None:
        (tmp_path / "new.db").touch()
        assert look_at(tmp_path / "new.db").kind == "empty"
        assert migrations.ensure(str(tmp_path / "new.db"))


def test_a_schema_that_is_no_text_any_more_is_damage_to_a_writer_too(tmp_path: Path) -> None:
    """SQLite quotes it in its message, which the driver then can't read."""
    path = tmp_path / "journal.db"
    migrations.ensure(str(path))
    store = open_store(str(path))
    store.open_stream()
    store.close()
    raw = bytearray(path.read_bytes())
    raw[raw.index(b"CREATE TABLE audit_requests") + 7] ^= 0x80
    path.write_bytes(raw)
    with pytest.raises(JournalCorrupt, match="malformed"):
        open_store(str(path)).open_stream()


def test_looking_at_the_wal_leaves_sqlites_own_locks_alone(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    migrations.ensure(str(path))
    store = open_store(str(path))
    store.open_stream()
    assert not can_lock_first_connection_byte(path), "the writer has it open"
    for _ in range(3):
        look_at(path)
        open_reader(str(path)).close()
    assert not can_lock_first_connection_byte(path), "another process would cut off the -shm file under the writer"
    store.close()


def can_lock_first_connection_byte(path: Path) -> bool:
    """Whether another process would take itself for the first one: SQLite's `DMS` byte of the `-shm` file is 128."""
    code = f"import fcntl; fcntl.lockf(open({str(path)!r} + '-shm', 'r+b'), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 128)"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("column", ["head_hash", "head_position", "engine_epoch"])
@pytest.mark.parametrize("value", ["NULL", "'x'", "x'00'"])
def test_a_row_of_a_stream_whose_values_are_of_other_types_is_an_error_of_ours(
    path: Path, column: str, value: str
) -> None:
    """A strict table takes none: one that isn't strict, with the same rows, is what flipped bits can make of it."""
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("ALTER TABLE journal_streams RENAME TO gone")
        connection.execute("CREATE TABLE journal_streams AS SELECT * FROM gone")
        connection.execute(f"UPDATE journal_streams SET {column} = {value}")
    for attempt in (lambda: verify_stream(open_reader(str(path))), lambda: open_store(str(path)).open_stream()):
        with pytest.raises(JournalError):
            attempt()
