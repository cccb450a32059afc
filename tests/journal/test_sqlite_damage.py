"""Damage to a SQLite file where no record's hash covers it: it's an error that says so, never an empty journal."""

import contextlib
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from refold import migrations
from refold.journal.errors import JournalCorrupt, JournalError
from refold.journal.stores import open_reader, open_store
from refold.journal.stores.sqlite_file import look_at
from refold.journal.testing import make_records
from refold.journal.verify import verify_stream
from tests.kit.sqlite_pages import UNUSED, uses_of_bytes


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
    raw[uses_of_bytes(path).index("free list") + 7] ^= 1
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


class TestWal:
    """A journal whose engine was killed: all that it wrote is in the WAL, and SQLite stops at the first frame that's wrong."""

    NUM_APPENDS = 4

    @pytest.fixture
    def left_behind(self, tmp_path: Path) -> Path:
        """The files as a killed writer leaves them."""
        source, target = tmp_path / "alive.db", tmp_path / "left.db"
        migrations.ensure(str(source))
        store = open_store(str(source))
        head = store.open_stream()
        for _ in range(self.NUM_APPENDS):
            head = store.append("main", make_records(head, 1, cause="x" * 2500))
        for suffix in ("", "-wal"):
            target.with_name(target.name + suffix).write_bytes(source.with_name(source.name + suffix).read_bytes())
        store.close()
        return target

    @pytest.fixture
    def wal(self, left_behind: Path) -> Path:
        return left_behind.with_name(left_behind.name + "-wal")

    def frame_bytes(self, path: Path) -> int:
        return 24 + int.from_bytes(path.read_bytes()[16:18], "big")

    def position(self, path: Path) -> int:
        reader = open_reader(str(path))
        try:
            return verify_stream(reader).position
        finally:
            reader.close()

    def test_an_undamaged_one_is_read_to_its_end(self, left_behind: Path) -> None:
        assert self.position(left_behind) == self.NUM_APPENDS

    @pytest.mark.parametrize("frame", ["first", "last"])
    @pytest.mark.parametrize("at", [0, 4, 9, 17, 23, 24, 500, 1047], ids=str)
    def test_one_flipped_bit_is_damage_in_the_last_frame_too(
        self, left_behind: Path, wal: Path, frame: str, at: int
    ) -> None:
        size = self.frame_bytes(left_behind)
        content = bytearray(wal.read_bytes())
        content[(32 if frame == "first" else len(content) - size) + at] ^= 4
        wal.write_bytes(content)
        for open_it in (open_reader, open_store):
            with pytest.raises(JournalCorrupt, match=r"one bit of its frame \d+ is flipped") as caught:
                open_it(str(left_behind))
            assert caught.value.kind == "truncated"

    @pytest.mark.parametrize("at", range(32))
    def test_one_flipped_bit_of_the_header_is_damage(self, left_behind: Path, wal: Path, at: int) -> None:
        content = bytearray(wal.read_bytes())
        content[at] ^= 1 << at % 8
        wal.write_bytes(content)
        with pytest.raises(JournalCorrupt, match="one bit of its header is flipped"):
            open_reader(str(left_behind))

    def test_a_frame_of_which_much_is_wrong_is_damage_if_commits_follow(self, left_behind: Path, wal: Path) -> None:
        content = bytearray(wal.read_bytes())
        at = 32 + 2 * self.frame_bytes(left_behind) + 100
        content[at : at + 64] = bytes(range(100, 164))
        wal.write_bytes(content)
        with pytest.raises(JournalCorrupt, match="its frame 3 is damaged, though committed ones follow"):
            open_reader(str(left_behind))

    def test_a_last_transaction_that_was_cut_short_is_what_a_crash_leaves(self, left_behind: Path, wal: Path) -> None:
        content = wal.read_bytes()
        for num_missing in (1, 100, self.frame_bytes(left_behind) + 1):
            wal.write_bytes(content[:-num_missing])
            assert self.position(left_behind) == self.NUM_APPENDS - 1

    def test_a_last_frame_that_reached_the_disk_in_part_is_what_a_crash_leaves(
        self, left_behind: Path, wal: Path
    ) -> None:
        content = bytearray(wal.read_bytes())
        content[-600:] = bytes(600)
        wal.write_bytes(content)
        assert self.position(left_behind) == self.NUM_APPENDS - 1

    def test_what_is_given_up_is_given_up_on_purpose(self, left_behind: Path, wal: Path) -> None:
        content = bytearray(wal.read_bytes())
        content[-100] ^= 1
        wal.write_bytes(content)
        with pytest.raises(JournalCorrupt, match="wal_checkpoint"):
            open_reader(str(left_behind))
        connection = sqlite3.connect(left_behind)
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        connection.close()
        assert self.position(left_behind) == self.NUM_APPENDS - 1


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
