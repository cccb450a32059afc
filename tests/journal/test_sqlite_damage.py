"""Damage to a SQLite file where no record's hash covers it: it's an error that says so, never an empty journal."""

import sqlite3
import threading
from pathlib import Path

import pytest

from refold import migrations
from refold.journal.errors import JournalCorrupt
from refold.journal.stores import open_reader, open_store
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
