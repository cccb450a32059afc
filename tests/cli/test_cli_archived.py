"""`refold archive` beside redactions and damage, and `refold verify` of several streams: what is erased stays so, what is damaged is said."""

import shutil
from pathlib import Path

import pytest

from refold.journal.stores import open_reader, open_store
from refold.journal.testing import make_records
from tests.cli.command import assert_one_line_and_a_hint, refold, rows
from tests.history.journals import change, eventful_lives, write_journal


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    path = tmp_path / "journal.db"
    write_journal(path, eventful_lives()[0])
    return path


def twin_of(journal: Path) -> Path:
    twin = journal.with_name("twin.db")
    shutil.copy(journal, twin)
    return twin


@pytest.mark.parametrize("form", ["zstd", "parquet"])
@pytest.mark.parametrize("is_ours_redacted", [True, False], ids=["the file says more", "the file says less"])
def test_a_file_with_what_was_redacted_since_is_not_taken_for_ours(
    journal: Path, tmp_path: Path, form: str, is_ours_redacted: bool
) -> None:
    twin = twin_of(journal)
    assert refold("redact", journal if is_ours_redacted else twin, "req-1").exit_code == 0
    archive = ("archive", "--until", 50, "--format", form, "--to", tmp_path / "archive")
    assert refold(*archive, twin).exit_code == 0
    records = list(open_reader(str(journal)).read())
    done = refold(*archive, journal)
    assert done.exit_code == 2
    assert_one_line_and_a_hint(done.stderr)
    assert "another content than the journal" in done.stderr
    assert list(open_reader(str(journal)).read()) == records
    assert refold("verify", journal).exit_code == 0
    next((tmp_path / "archive").iterdir()).unlink()
    assert refold(*archive, journal).exit_code == 0
    assert list(open_reader(str(journal)).read()) == records


def test_a_file_of_an_attempt_that_was_killed_is_still_used(journal: Path, tmp_path: Path) -> None:
    archive = ("archive", "--until", 50, "--to", tmp_path / "archive")
    assert refold(*archive, twin_of(journal)).exit_code == 0
    (file,) = (tmp_path / "archive").iterdir()
    written_ns = file.stat().st_mtime_ns
    assert refold(*archive, journal).exit_code == 0
    assert file.stat().st_mtime_ns == written_ns
    assert refold("verify", journal).exit_code == 0


def test_archives_that_say_what_was_redacted_since_are_not_adopted(journal: Path, tmp_path: Path) -> None:
    twin = twin_of(journal)
    assert refold("archive", "--until", 50, "--to", tmp_path / "older", twin).exit_code == 0
    assert refold("redact", journal, "req-1").exit_code == 0
    assert refold("archive", "--until", 50, "--to", tmp_path / "archive", journal).exit_code == 0
    change(journal, "DELETE FROM journal_archives")
    done = refold("archive", "--adopt", tmp_path / "older", journal)
    assert done.exit_code == 2
    assert_one_line_and_a_hint(done.stderr)
    assert "redact" in done.stderr
    assert refold("archive", "--adopt", tmp_path / "archive", journal).exit_code == 0
    assert refold("verify", journal).exit_code == 0


@pytest.mark.parametrize("kind", ["journal.db", "segments/"])
def test_a_damaged_journal_is_neither_archived_nor_changed(journal: Path, tmp_path: Path, kind: str) -> None:
    place = tmp_path / kind
    if kind == "segments/":
        assert refold("copy", journal, f"{place}/").exit_code == 0
        (segment,) = place.glob("main/*.seg")
        content = bytearray(segment.read_bytes())
        content[len(content) // 2] ^= 1
        segment.write_bytes(content)
    else:
        change(journal, "UPDATE journal_records SET time_ns = time_ns + 1 WHERE position = 60")
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and "owner" not in path.name}
    done = refold("archive", "--until", 20, "--to", tmp_path / "archive", f"{place}/" if kind == "segments/" else place)
    assert done.exit_code == 3
    assert_one_line_and_a_hint(done.stderr)
    assert {path: path.read_bytes() for path in files} == files
    assert not (tmp_path / "archive").exists()


def test_verify_tells_of_every_stream(tmp_path: Path) -> None:
    journal = tmp_path / "two.db"
    assert refold("run", "--model", "simulated", "--journal", journal, "hello").exit_code == 0
    store = open_store(str(journal))
    store.append("other", make_records(store.open_stream("other"), 7))
    store.close()
    done = refold("verify", journal)
    assert done.exit_code == 0
    assert "other: 7 records, chain whole" in done.stdout
    (told,) = rows(refold("verify", "--json", journal).stdout)
    assert told["other_streams"] == {"other": 7}
    other = "(SELECT stream_id FROM journal_streams WHERE name = 'other')"
    change(journal, f"UPDATE journal_records SET time_ns = 1 WHERE position = 3 AND stream_id = {other}")
    done = refold("verify", journal)
    assert done.exit_code == 3
    assert_one_line_and_a_hint(done.stderr)
    assert "edited at record 3 of stream 'other'" in done.stderr
    (told,) = rows(refold("verify", "--json", journal).stdout)
    assert (told["ok"], told["stream"], told["position"], told["kind"]) == (False, "other", 3, "edited")
