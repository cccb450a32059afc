"""A read model that has lost a part of itself, or knows of records that the journal has lost: each command that is named works."""

import re
import shlex
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from refold.engine.audit.inline import InlineAudit
from refold.engine.audit.place import open_writer, place_of
from refold.journal.stores import open_reader
from tests.cli.command import assert_one_line_and_a_hint, refold, rows

RUN = ("run", "--model", "simulated", "--max-tokens", 4, "hello", "--journal")
KINDS = ["sqlite", "segments", "postgresql"]


@pytest.fixture(params=KINDS)
def journal(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A journal that has been audited."""
    make: dict[str, Callable[[], str]] = {
        "sqlite": lambda: str(tmp_path / "it's a.db"),
        "segments": lambda: f"{tmp_path}/segments/",
        "postgresql": lambda: request.getfixturevalue("postgres_server").empty(),
    }
    url = make[request.param]()
    assert refold(*RUN, url).exit_code == 0
    assert refold("audit", "requests", url).exit_code == 0
    return url


def change(journal: str, statement: str) -> None:
    """Execute a statement where the read model is."""
    with closing(open_writer(place_of(journal))) as writer, writer.transaction():
        writer.execute(statement)


def named_in(told: str, journal: str) -> list[str]:
    """The one command that a message names, without `refold`."""
    (command,) = re.findall(r"`refold (.*?)`", told)
    assert shlex.split(command)[-1] == journal
    return shlex.split(command)


def answers(journal: str) -> list[list[dict[str, object]]]:
    return [rows(refold("audit", view, "--json", journal).stdout) for view in ("requests", "tokens", "steps")]


DROPPED = {
    "VIEW requests": "CASCADE",
    "VIEW tokens": "CASCADE",
    "TABLE audit_tokens": "CASCADE",
    "TABLE audit_projections": "CASCADE",
    "TABLE audit_views": "",
}


@pytest.mark.parametrize("part", DROPPED)
def test_a_dropped_part_is_named_with_the_command_that_makes_it_anew(journal: str, part: str) -> None:
    before = answers(journal)
    change(journal, f"DROP {part} {DROPPED[part] if journal.startswith('postgres') else ''}")
    told = refold("audit", "tokens" if "VIEW" not in part else part.split()[1], journal)
    assert (told.exit_code, told.stdout) == (3, "")
    assert_one_line_and_a_hint(told.stderr)
    assert f"has lost {part.split()[1]}" in told.stderr
    rebuilt = refold(*named_in(told.stderr, journal))
    assert rebuilt.exit_code == 0, rebuilt.stderr
    assert answers(journal) == before
    assert refold("verify", journal).exit_code == 0


def test_a_rebuild_that_ends_before_it_has_begun_to_project_leaves_no_answer_from_a_part(journal: str) -> None:
    before, place = answers(journal), place_of(journal)
    change(journal, f"DROP TABLE audit_tokens {'CASCADE' if journal.startswith('postgres') else ''}")
    open_writer(place, mends=True).close()
    assert answers(journal) == before


def test_a_read_model_whose_list_was_emptied_is_made_anew_and_keeps_nothing_of_the_old_one(journal: str) -> None:
    before = answers(journal)
    change(journal, "DELETE FROM audit_projections")
    assert answers(journal) == before
    with closing(open_writer(place_of(journal))) as writer:
        assert writer.unlisted() == []
        assert len(writer.execute("SELECT DISTINCT projection_id FROM audit_tokens")) == 1


def test_a_redaction_reaches_the_tokens_of_a_read_model_whose_list_was_emptied(journal: str) -> None:
    refold("audit", "requests", journal)
    change(journal, "DELETE FROM audit_projections")
    assert refold("redact", journal, "run1-1").exit_code == 0
    with closing(open_writer(place_of(journal))) as writer:
        (handle,) = {row[0] for row in writer.execute("SELECT handle FROM audit_requests WHERE request_id = 'run1-1'")}
        said = writer.execute(f"SELECT COUNT(token_id) FROM audit_tokens WHERE handle = {handle}")
        assert [tuple(row) for row in said] == [(0,)]


def test_a_redaction_that_misses_a_table_of_the_read_model_names_the_command_that_makes_it(journal: str) -> None:
    if not place_of(journal).is_own_file:
        change(journal, f"DROP TABLE audit_tokens {'CASCADE' if journal.startswith('postgres') else ''}")
        told = refold("redact", journal, "run1-1")
        assert told.exit_code == 3
        assert refold(*named_in(told.stderr, journal)).exit_code == 0
    assert refold("redact", journal, "run1-1").exit_code == 0


def test_of_a_read_model_that_is_mended_in_sqlite_all_is_as_in_a_new_one(tmp_path: Path) -> None:
    journal, other = str(tmp_path / "mended.db"), str(tmp_path / "other.db")
    for each in (journal, other):
        assert refold(*RUN, each).exit_code == 0
    for part in ("VIEW tokens", "VIEW steps", "TABLE audit_events"):
        change(journal, f"DROP {part}")
    assert refold("audit", "rebuild", journal).exit_code == 0
    parts = "SELECT type, name, sql FROM sqlite_master ORDER BY type, name"
    told = "SELECT tbl, idx, stat FROM sqlite_stat1 ORDER BY 1, 2"
    listed = "SELECT name, question FROM audit_views ORDER BY name"
    last = "SELECT name FROM sqlite_master WHERE name <> 'sqlite_stat1' ORDER BY rowid DESC LIMIT 1"
    with closing(open_writer(place_of(journal))) as ours, closing(open_writer(place_of(other))) as theirs:
        for question in (parts, told, listed, last):
            assert ours.execute(question) == theirs.execute(question)


# -- records that the read model knows, and the journal has lost ------------------------------------------------------


def cut(journal: str, num_lost: int) -> None:
    """Cut off the last records of a journal in PostgreSQL, as they lie after a kill: the head that is stored lags behind."""
    change(
        journal,
        f"DELETE FROM journal_records WHERE position >= (SELECT MAX(position) + 1 - {num_lost} FROM journal_records)",
    )
    change(journal, "UPDATE journal_streams SET head_position = 0, head_hash = decode(repeat('00', 32), 'hex')")


@pytest.fixture
def cut_off(postgres_server) -> str:
    url = str(postgres_server.empty())
    assert refold(*RUN, url).exit_code == 0
    assert refold("audit", "requests", url).exit_code == 0
    cut(url, 3)
    return url


ASKING = ["audit requests", "audit integrity", "audit follow"]


@pytest.mark.parametrize("question", ASKING)
def test_a_journal_that_ends_before_its_read_model_has_lost_its_end(cut_off: str, question: str) -> None:
    (before,) = rows(refold("audit", "integrity", "--as-is", "--json", cut_off).stdout)
    told = refold(*question.split(), cut_off)
    assert (told.exit_code, told.stdout) == (3, "")
    assert_one_line_and_a_hint(told.stderr)
    known = before["num_records"]
    assert f"ends at {known - 3}, but its read model was made of records up to {known}: its end was lost" in told.stderr
    assert rows(refold("audit", "integrity", "--as-is", "--json", cut_off).stdout) == [before], "it's left as it is"


def test_who_goes_on_from_an_older_end_is_told_how_and_is_not_told_again(cut_off: str) -> None:
    told = refold("audit", "requests", cut_off)
    (command,) = re.findall(r"`(refold audit rebuild .*?)`", told.stderr)
    rebuilt = refold(*shlex.split(command)[1:])
    assert rebuilt.exit_code == 0, rebuilt.stderr
    again = refold("audit", "integrity", "--json", cut_off)
    assert again.exit_code == 0, again.stderr
    assert "is lost" not in again.stderr


def test_a_stream_that_is_gone_as_a_whole_is_missed_by_its_read_model(cut_off: str) -> None:
    for table in ("journal_snapshots", "journal_records", "journal_streams"):
        change(cut_off, f"DELETE FROM {table}")
    told = refold("audit", "requests", cut_off)
    assert told.exit_code == 3
    assert "ends at 0, but its read model was made of records up to " in told.stderr
    (command,) = re.findall(r"`(refold audit rebuild .*?)`", told.stderr)
    assert refold(*shlex.split(command)[1:]).exit_code == 0
    assert refold("audit", "requests", cut_off).exit_code == 0


def test_an_engine_whose_journal_ends_before_its_read_model_leaves_that_as_it_is(cut_off: str) -> None:
    before = rows(refold("audit", "integrity", "--as-is", "--json", cut_off).stdout)
    with closing(open_reader(cut_off)) as reader:
        inline = InlineAudit(reader, "main", cut_off)
        inline.became_durable(reader.head().position)
        inline.close()
    assert rows(refold("audit", "integrity", "--as-is", "--json", cut_off).stdout) == before


def test_an_older_copy_of_segments_with_its_mark_is_missed_by_the_read_model(tmp_path: Path) -> None:
    journal, older = tmp_path / "segments", tmp_path / "older"
    assert refold(*RUN, f"{journal}/").exit_code == 0
    shutil.copytree(journal, older)
    assert refold(*RUN, f"{journal}/").exit_code == 0
    assert refold("audit", "requests", journal).exit_code == 0
    shutil.rmtree(journal)
    older.rename(journal)
    told = refold("audit", "requests", journal)
    assert (told.exit_code, told.stdout) == (3, "")
    assert_one_line_and_a_hint(told.stderr)
    (command,) = re.findall(r"`(refold audit rebuild .*?)`", told.stderr)
    assert refold(*shlex.split(command)[1:]).exit_code == 0
    assert refold("audit", "requests", journal).exit_code == 0
