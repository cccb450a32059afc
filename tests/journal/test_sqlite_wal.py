"""Zeros ahead of the WAL's end: a commit finds its room there, and nobody takes them for anything."""

import contextlib
import shutil
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from refold import migrations
from refold.journal.events import RequestAborted
from refold.journal.record import Head
from refold.journal.stores import open_reader, open_store, sqlite_wal
from refold.journal.stores.sql import SqlStore
from refold.journal.stores.sqlite_file import has_wal
from refold.journal.stores.sqlite_wal import FIRST_ROOM_BYTES, WAL_BOUND_BYTES, make_room
from refold.journal.testing import make_records
from refold.journal.verify import verify_stream
from refold.journal.writer import JournalWriter
from tests.kit.engines import eventually
from tests.kit.sqlite_pages import end_of_wal


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "journal.db"
    migrations.ensure(str(path))
    return path


@pytest.fixture
def wal(path: Path) -> Path:
    return path.with_name(path.name + "-wal")


@pytest.fixture
def store(path: Path) -> Iterator[SqlStore]:
    store = SqlStore(str(path))
    yield store
    store.close()


@pytest.fixture
def plain(path: Path) -> Iterator[sqlite3.Connection]:
    """Another program's connection, which waits for nobody."""
    with contextlib.closing(sqlite3.connect(path, timeout=0, isolation_level=None)) as connection:
        yield connection


def appended(store: SqlStore, head: Head, num_bytes: int) -> Head:
    return store.append("main", make_records(head, 1, cause="x" * num_bytes))


def verified(path: Path, tmp_path: Path) -> int:
    """The position of a copy of the files as they are now, the index apart, for SQLite to find the WAL's end by itself."""
    copy = tmp_path / "found.db"
    for suffix in ("", "-wal"):
        shutil.copy(f"{path}{suffix}", f"{copy}{suffix}")
    with contextlib.closing(open_reader(str(copy))) as reader:
        return verify_stream(reader).position


def test_an_append_makes_the_wal_no_longer(store: SqlStore, wal: Path) -> None:
    head, num_longer = store.open_stream(), 0
    for _ in range(200):
        before = wal.stat().st_size
        head = appended(store, head, 6_000)
        num_longer += wal.stat().st_size > before
        store.maintain()
    assert end_of_wal(wal.read_bytes()) > 1_500_000, "it was written to"
    assert num_longer == 0


def test_large_records_make_their_own_room_and_small_ones_find_it(
    store: SqlStore, path: Path, wal: Path, tmp_path: Path
) -> None:
    head = store.open_stream()
    head = appended(store, head, 5 * FIRST_ROOM_BYTES)
    store.maintain()
    assert wal.stat().st_size == end_of_wal(wal.read_bytes()), "zeros for another one would take as long as they spare"
    for _ in range(20):
        head = appended(store, head, 3_000)
        store.maintain()
    assert wal.stat().st_size > end_of_wal(wal.read_bytes()) > 5 * FIRST_ROOM_BYTES
    assert verified(path, tmp_path) == head.position


def test_zeros_where_the_first_commit_will_be_are_no_journal(
    store: SqlStore, path: Path, wal: Path, tmp_path: Path
) -> None:
    store.open_stream()  # a commit of its own: the engine epoch
    content = bytearray(wal.read_bytes())
    assert len(content) >= FIRST_ROOM_BYTES
    wal.write_bytes(bytes(len(content)))
    assert verified(path, tmp_path) == 0


def test_what_a_killed_engine_leaves_is_read_and_gone_on_with(
    store: SqlStore, path: Path, wal: Path, tmp_path: Path
) -> None:
    head = store.open_stream()
    for _ in range(5):
        head = appended(store, head, 3_000)
    left = tmp_path / "left.db"
    for suffix in ("", "-wal", ".mark"):
        shutil.copy(f"{path}{suffix}", f"{left}{suffix}")
    assert Path(f"{left}-wal").read_bytes()[end_of_wal(wal.read_bytes()) :].strip(b"\0") == b""
    with contextlib.closing(open_store(str(left))) as successor:
        after = successor.open_stream()
        assert after.position == 5
        assert successor.append("main", make_records(after, 1)).position == 6
    with contextlib.closing(open_reader(str(left))) as reader:
        assert verify_stream(reader).position == 6


def test_no_zeros_are_written_while_somebody_else_may_be_writing(
    store: SqlStore, plain: sqlite3.Connection, path: Path, wal: Path
) -> None:
    store.open_stream()
    before = wal.read_bytes()
    plain.execute("BEGIN IMMEDIATE")
    with contextlib.closing(sqlite3.connect(path, timeout=0, isolation_level=None)) as driver:
        assert make_room(driver, wal, 10 * FIRST_ROOM_BYTES) == 0
        assert wal.read_bytes() == before
        plain.execute("ROLLBACK")
        assert make_room(driver, wal, 10 * FIRST_ROOM_BYTES) == 10 * FIRST_ROOM_BYTES


def test_what_another_program_wrote_meanwhile_is_kept(
    store: SqlStore, plain: sqlite3.Connection, path: Path, tmp_path: Path
) -> None:
    head = store.open_stream()
    for number in range(40):
        head = appended(store, head, 8_000)
        plain.execute(f"CREATE VIEW mine_{number} AS SELECT {number}, '{'x' * 4_000}'")
        store.maintain()
    assert verified(path, tmp_path) == 40
    assert plain.execute("SELECT count(*) FROM sqlite_master WHERE name LIKE 'mine_%'").fetchone() == (40,)
    assert plain.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_a_disk_that_is_nearly_full_keeps_its_room(
    store: SqlStore, path: Path, wal: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_wal, "_SPARE_BYTES", 1 << 60)
    head = store.open_stream()
    for _ in range(5):
        head = appended(store, head, 3_000)
        store.maintain()
    assert wal.stat().st_size == end_of_wal(wal.read_bytes()), "nothing but frames"
    assert verified(path, tmp_path) == 5


def test_an_emptied_wal_gets_room_again(store: SqlStore, wal: Path) -> None:
    head = store.open_stream()
    head = appended(store, head, 3_000)
    store.compact()
    assert wal.stat().st_size == 0
    store.maintain()
    assert wal.stat().st_size >= FIRST_ROOM_BYTES
    appended(store, head, 3_000)
    assert wal.stat().st_size >= FIRST_ROOM_BYTES


def test_a_writer_makes_all_the_room_there_will_be_need_of_while_nobody_waits(
    store: SqlStore, path: Path, wal: Path, tmp_path: Path
) -> None:
    head = store.open_stream()
    writer = JournalWriter(store, "main", head)
    eventually(lambda: wal.stat().st_size > WAL_BOUND_BYTES)
    assert not store.add_room(), "waits for the piece under way, the last one"
    length = wal.stat().st_size
    for _ in range(300):
        writer.append([RequestAborted(handle=1, cause="x" * 6_000)], 1)
        writer.flush()
    assert wal.stat().st_size == length
    writer.close()
    assert verified(path, tmp_path) == 300


def test_room_that_cannot_be_made_is_asked_for_a_bounded_number_of_times(
    store: SqlStore, plain: sqlite3.Connection, wal: Path
) -> None:
    store.open_stream()
    length = wal.stat().st_size
    plain.execute("BEGIN IMMEDIATE")
    asked = 1
    while store.add_room():
        asked += 1
    assert wal.stat().st_size == length
    assert asked < 40


def test_a_wal_that_goes_while_somebody_asks_for_it_is_none(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    wal, is_over = tmp_path / "run.db-wal", threading.Event()

    def come_and_go() -> None:
        while not is_over.is_set():
            wal.write_bytes(b"frames")
            wal.unlink()

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        seen = {has_wal(path) for _ in range(4_000)}
    finally:
        is_over.set()
        thread.join()
    assert seen == {True, False}
    assert not has_wal(path)
