"""A read model that has lost a part of itself, or knows of records that the journal has lost: each command that is named works."""

import re
import shlex
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from refold.engine.audit.place import open_writer, place_of
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
