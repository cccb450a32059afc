"""A SQLite journal that a hand has changed where no record is: verify tells, an engine refuses, records are read, and the way out works."""

import re
import shlex
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from refold.journal.stores import open_store
from refold.journal.stores.sqlite_marks import mark_file
from refold.journal.testing import make_records
from tests.cli.command import assert_one_line_and_a_hint, refold, rows

RUN = ("run", "--model", "simulated", "hello", "--journal")
LAST = 2**63 - 1
# What a hand did, and what verb and engine say of it, and the kind.
ROWS = {
    "head_hash = zeroblob(32)": (
        "says that it ends at {end} with hash 0000000000000000, and it ends at {end} with hash ",
        "unindexed",
    ),
    "head_position = head_position - 2": ("says that it ends at {before}", "unindexed"),
    "head_position = -2": ("says that it ends at -2", "unindexed"),
    "engine_epoch = 0": ("engine epoch 0, and its last record was written in 1", "unindexed"),
    "engine_epoch = -4": ("engine epoch -4, and its last record was written in 1", "unindexed"),
    f"engine_epoch = {LAST}": (f"engine epoch {LAST}, which no engine has reached", "unindexed"),
}
COLUMNS = "engine_epoch, schema_version, time_ns, body, hash, content, content_hash"
STRANGERS = {
    "before the first": ("1, -5", "stream 'main' has rows before position 0, the first at -5", -5),
    "of a stream that isn't": (
        "7, 12",
        "rows of stream number 7, at positions 12 to 12, are there, and no stream has that number",
        12,
    ),
    "at its beginning": (
        "7, 0",
        "rows of stream number 7, at positions 0 to 0, are there, and no stream has that number",
        0,
    ),
}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("beside") / "refold.db"
    assert refold(*RUN, path).exit_code == 0
    return path


@pytest.fixture
def journal(original: Path, tmp_path: Path) -> Path:
    shutil.copy(mark_file(original), tmp_path / mark_file(original).name)
    return Path(shutil.copy(original, tmp_path / original.name))


def change(journal: Path, statement: str) -> None:
    with closing(sqlite3.connect(journal)) as connection, connection:
        connection.execute(statement)


def num_records(journal: Path) -> int:
    with closing(sqlite3.connect(journal)) as connection:
        (found,) = connection.execute(
            "SELECT count(*) FROM journal_records WHERE stream_id = 1 AND position >= 0"
        ).fetchone()
        return int(found)


def assert_told_alike(journal: Path, words: str, kind: str) -> str:
    """`verify` and an engine refuse, each with these words; readers read, and say it too. The way out, as it is printed."""
    verified = refold("verify", journal)
    assert (verified.exit_code, verified.stdout) == (3, ""), verified.stderr
    assert verified.stderr.startswith(f"refold: {kind} at record ")
    before = journal.read_bytes()
    for result in (verified, refold(*RUN, journal)):
        assert result.exit_code == 3, result.stderr
        assert words in result.stderr
        assert_one_line_and_a_hint(result.stderr)
    assert journal.read_bytes() == before, "whoever is refused changes nothing"
    for verb in (("log", "-n", "1"), ("request", "run1-1")):
        read = refold(*verb, journal)
        assert read.exit_code == 0, read.stderr
        assert words in read.stderr
    (way,) = re.findall(r"hint: .*`(refold copy [^`]*)`", verified.stderr)
    return way


def copied(way: str, journal: Path) -> Path:
    """Where the way out that was printed leads, pasted: to a journal that is whole, and that an engine opens."""
    new = journal.with_name("new.db")
    _, *words = (str(new) if word == "NEW" else word for word in shlex.split(way))
    done = refold(*words)
    assert done.exit_code == 0, done.stderr
    assert refold("verify", new).exit_code == 0
    assert refold(*RUN, new).exit_code == 0
    return new


@pytest.mark.parametrize("changed", ROWS)
def test_a_row_of_a_stream_that_was_changed_is_told_and_its_records_are_copied(journal: Path, changed: str) -> None:
    words, kind = ROWS[changed]
    end = num_records(journal)
    change(journal, f"UPDATE journal_streams SET {changed}")
    way = assert_told_alike(journal, words.format(end=end, before=end - 2), kind)
    assert f"copied {end} records" in refold("copy", journal, journal.with_name("again.db")).stdout
    copied(way, journal)


def test_without_a_mark_a_record_that_the_row_does_not_name_is_not_copied(journal: Path) -> None:
    mark_file(journal).unlink()
    end = num_records(journal)
    change(journal, "UPDATE journal_streams SET head_hash = zeroblob(32)")
    for verb in (("verify",), RUN):
        result = refold(*verb, journal)
        assert result.exit_code == 3
        assert "0000000000000000" in result.stderr, "the hash that the row names"
        assert "acknowledged" not in result.stderr
    accepted = refold("copy", "--accept-end", "--json", journal, journal.with_name("new.db"))
    (report,) = rows(accepted.stdout)
    assert (accepted.exit_code, report["num_records"], report["num_lost"], report["lost_told_by"]) == (
        0,
        end - 1,
        1,
        "head",
    )
    assert refold("verify", journal.with_name("new.db")).exit_code == 0


def test_without_a_mark_records_behind_the_end_that_the_row_names_are_not_left_out_in_silence(journal: Path) -> None:
    mark_file(journal).unlink()
    end = num_records(journal)
    change(
        journal,
        f"UPDATE journal_streams SET head_position = {end - 2}, head_hash = "
        f"(SELECT hash FROM journal_records WHERE position = {end - 3})",
    )
    words = f"says that it ends at {end - 2} with hash "
    refused = refold("copy", journal, journal.with_name("refused.db"))
    assert refused.exit_code == 3
    assert f"and records up to {end - 1} are there" in refused.stderr
    assert not journal.with_name("refused.db").exists()
    way = assert_told_alike(journal, words, "edited")
    assert "--accept-end" in way
    copied(way, journal)


@pytest.mark.parametrize("where", STRANGERS)
def test_rows_that_are_of_no_stream_were_put_in_and_are_left_out_of_a_copy(journal: Path, where: str) -> None:
    place, words, position = STRANGERS[where]
    change(
        journal,
        f"INSERT INTO journal_records (stream_id, position, {COLUMNS}) SELECT {place}, {COLUMNS} FROM journal_records WHERE position = 3",
    )
    way = assert_told_alike(journal, words, "inserted")
    (told,) = rows(refold("verify", "--json", journal).stdout)
    assert (told["kind"], told["position"]) == ("inserted", position)
    copied(way, journal)


def test_a_stream_whose_row_is_gone_is_named_by_its_number_and_its_records(journal: Path) -> None:
    end = num_records(journal)
    change(journal, "DELETE FROM journal_streams")
    for verb in (("verify",), ("log",), ("copy", journal), RUN):
        result = refold(*verb, journal.with_name("new.db") if verb[0] == "copy" else journal)
        assert result.exit_code == 3, result.stderr
        assert f"records 0 to {end - 1} of stream number 1 are there (deleted)" in result.stderr


@pytest.mark.parametrize("has_mark", [True, False])
def test_the_other_streams_of_a_journal_that_has_lost_one_are_copied_by_name_alone(
    journal: Path, has_mark: bool
) -> None:
    with closing(open_store(str(journal))) as store:
        store.append("other", make_records(store.open_stream("other"), 3))
    change(journal, "DELETE FROM journal_streams WHERE name = 'other'")
    if not has_mark:
        mark_file(journal).unlink()
    words = "rows of stream number 2, at positions 0 to 2, are there, and the row that names the stream is gone from journal_streams (deleted)"
    for verb in (("verify", journal), (*RUN, journal), ("copy", journal, journal.with_name("all.db"))):
        result = refold(*verb)
        assert result.exit_code == 3, result.stderr
        assert words in result.stderr
    log = refold("log", "-n", "1", journal)
    assert (log.exit_code, words in log.stderr) == (0, True)
    one = refold("copy", "--stream", "main", journal, journal.with_name("one.db"))
    assert one.exit_code == 0, one.stderr
    assert words in one.stderr


def test_a_row_that_is_gone_is_made_anew_as_the_docs_say(journal: Path) -> None:
    docs = (Path(__file__).parents[2] / "docs" / "reliability.md").read_text()
    (statement,) = re.findall(r"^INSERT INTO journal_streams .*?;$", docs, re.MULTILINE | re.DOTALL)
    change(journal, "DELETE FROM journal_streams")
    change(journal, statement)
    assert refold("verify", journal).exit_code == 0
    assert refold(*RUN, journal).exit_code == 0


@pytest.mark.parametrize("table", ["journal_snapshots", "journal_archives"])
def test_records_are_read_and_copied_without_a_table_that_has_none(journal: Path, table: str) -> None:
    change(journal, f"DROP TABLE {table}")
    copied(assert_told_alike(journal, f"its table {table} is gone", "unindexed"), journal)


def test_without_the_list_of_archives_records_that_do_not_begin_at_0_are_a_loss(journal: Path) -> None:
    change(journal, "DELETE FROM journal_records WHERE position < 9")
    change(journal, "DROP TABLE journal_archives")
    for verb in (("verify", journal), ("copy", journal, journal.with_name("new.db"))):
        result = refold(*verb)
        assert result.exit_code == 3
        assert "record 0 is not there; the next is 9" in result.stderr
