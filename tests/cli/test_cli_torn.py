"""Reading journals that are damaged, or have lost their end: what is shown, what is said, and the exit status."""

import re
import shlex
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from refold.journal.stores import open_reader
from tests.cli.command import assert_one_line_and_a_hint, refold, rows
from tests.history.journals import change, eventful_lives, write_journal


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    path = tmp_path / "journal.db"
    write_journal(path, eventful_lives()[0])
    return path


def torn(path: Path) -> None:
    change(path, "UPDATE journal_records SET time_ns = 1 WHERE position = 30")


# -- log -n -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [(), ("--json",), ("--reverse",)], ids=" ".join)
def test_the_last_lines_of_a_torn_journal_are_those_before_the_damage(journal: Path, options: tuple[str, ...]) -> None:
    kept = refold("log", "--until", 29, "-n", 5, *options, journal).stdout
    torn(journal)
    told = refold("log", "-n", 5, *options, journal)
    assert told.exit_code == 3
    assert told.stdout == kept
    assert len(kept.splitlines()) == 5
    assert_one_line_and_a_hint(told.stderr)
    assert "record 30 " in told.stderr


def test_the_last_lines_of_a_torn_journal_begin_no_earlier_than_was_asked(journal: Path) -> None:
    torn(journal)
    told = refold("log", "--since", 28, "-n", 50, "--json", journal)
    assert {row["position"] for row in rows(told.stdout)} == {28, 29}
    beyond = refold("log", "--since", 40, "-n", 5, journal)
    assert (beyond.exit_code, beyond.stdout) == (3, "")


@pytest.mark.parametrize("limit", [68, 69, 70])
def test_no_line_of_a_torn_journal_comes_twice(journal: Path, limit: int) -> None:
    torn(journal)
    told = refold("log", "--since", 28, "-n", limit, journal).stdout.splitlines()
    assert told == refold("log", "--since", 28, journal).stdout.splitlines()


def test_following_a_torn_journal_shows_the_last_lines_before_the_damage(journal: Path) -> None:
    torn(journal)
    told = refold("log", "-n", 2, "--follow", journal)
    assert told.exit_code == 3
    assert len(told.stdout.splitlines()) == 2


def test_the_last_lines_name_requests_as_all_lines_do(journal: Path) -> None:
    torn(journal)
    all_lines = refold("log", journal).stdout.splitlines()
    assert refold("log", "-n", 7, journal).stdout.splitlines() == all_lines[-7:]


# -- damage where no record is ----------------------------------------------------------------------------------------


def root_page(path: Path, name: str) -> tuple[bytearray, int]:
    """The journal's bytes, and where the first page of a table or an index is in them."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
        (root,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (name,)).fetchone()
        (page_bytes,) = connection.execute("PRAGMA page_size").fetchone()
    return bytearray(path.read_bytes()), (root - 1) * page_bytes


def damage_index(path: Path) -> None:
    """An index of the read model forgets a row of its table."""
    raw, start = root_page(path, "ix_audit_requests_tenant")
    raw[start + 4] -= 1  # the number of its cells
    path.write_bytes(raw)


@pytest.fixture
def unindexed(journal: Path) -> Path:
    assert refold("audit", "requests", journal).exit_code == 0
    damage_index(journal)
    return journal


def test_the_head_of_a_journal_is_exported_though_an_index_beside_its_records_is_damaged(
    unindexed: Path, tmp_path: Path
) -> None:
    told = refold("head", unindexed, "--out", tmp_path / "run.head")
    assert told.exit_code == 0
    assert told.stderr.startswith(f"refold: {unindexed} is damaged where no record is (")
    assert told.stderr.endswith("; the head is that of the records, which are whole\n")
    assert len(told.stderr.splitlines()) == 1
    assert refold("copy", unindexed, tmp_path / "copy.db").exit_code == 0
    assert refold("verify", tmp_path / "copy.db", "--head", tmp_path / "run.head").exit_code == 0


def test_verify_says_that_such_damage_is_on_no_record_and_what_mends_it(unindexed: Path) -> None:
    told = refold("verify", "--json", unindexed)
    assert told.exit_code == 3
    (report,) = rows(told.stdout)
    assert (report["ok"], report["kind"]) == (False, "unindexed")
    line, hint = told.stderr.splitlines()
    assert "nothing in it can be trusted" not in told.stderr
    assert "where no record is" in line
    assert hint == f"  hint: nothing is lost: `refold copy {unindexed} NEW` makes a whole journal of it"


def test_a_damaged_record_comes_before_a_damaged_index(unindexed: Path, tmp_path: Path) -> None:
    torn(unindexed)
    for verb in ("verify", "head"):
        told = refold(verb, unindexed)
        assert told.exit_code == 3
        assert "record 30 " in told.stderr, verb


def test_a_journal_with_a_damaged_index_is_not_compacted(unindexed: Path) -> None:
    before = unindexed.read_bytes()
    told = refold("compact", unindexed)
    assert told.exit_code == 3
    assert_one_line_and_a_hint(told.stderr)
    assert unindexed.read_bytes() == before


# -- an end that is lost, and the read model --------------------------------------------------------------------------


@pytest.fixture
def ended_early(journal: Path) -> Path:
    """A journal in whose place an older copy of it was put: its mark tells of more records. So does a lost WAL."""
    older = [eventful_lives()[0][0]]
    marks = journal.with_name("journal.db.mark")
    mark = marks.read_bytes()
    journal.unlink()
    marks.unlink()
    write_journal(journal, older)
    marks.write_bytes(mark)
    return journal


ASKING = [
    "audit requests {}",
    "audit integrity {}",
    "audit export {}.views {}",
    "sql {} 'SELECT count(*) FROM requests'",
]


@pytest.mark.parametrize("question", ASKING)
def test_whoever_asks_a_journal_in_sqlite_that_has_lost_its_end_has_an_answer_and_exit_status_3(
    ended_early: Path, question: str
) -> None:
    before = ended_early.read_bytes()
    told = refold(*shlex.split(question.format(ended_early, ended_early)))
    assert told.exit_code == 3, told.stderr
    assert told.stdout
    assert told.stderr.count("records up to ") == 1, "it is said once"
    assert "what follows is about the records before the damage" in told.stderr
    assert ended_early.read_bytes() == before


@pytest.mark.parametrize(
    "verb", ["redact {} new", "quarantine --lift new {}", "request new {}", "why new {}", "log --request new {}"]
)
def test_of_a_journal_that_has_lost_its_end_no_request_is_said_not_to_be_in_it(ended_early: Path, verb: str) -> None:
    told = refold(*shlex.split(verb.format(ended_early)))
    assert (told.exit_code, told.stdout) == (3, "")
    assert_one_line_and_a_hint(told.stderr)
    assert "were acknowledged here: its end was lost" in told.stderr


def test_migrate_tells_of_a_lost_end_once(ended_early: Path) -> None:
    told = refold("migrate", ended_early)
    assert told.exit_code == 3
    assert_one_line_and_a_hint(told.stderr)


def test_a_question_about_a_request_that_may_be_behind_damage_has_no_answer(journal: Path, ended_early: Path) -> None:
    told = refold("audit", "requests", "--request", "new", ended_early)
    assert (told.exit_code, told.stdout) == (3, "")
    assert "no request" not in told.stderr
    ended_early.with_name("journal.db.mark").unlink()
    change(
        journal, "UPDATE journal_records SET time_ns = 1 WHERE position = (SELECT MAX(position) FROM journal_records)"
    )
    told = refold("audit", "requests", "--request", "new", journal)
    assert (told.exit_code, told.stdout) == (3, "")
    assert "no request 'new' in this journal before the damage" in told.stderr


def test_the_view_of_integrity_says_of_a_lost_end_that_the_chain_is_damaged(ended_early: Path) -> None:
    told = refold("sql", ended_early, "SELECT chain, damage_position FROM integrity", "--json")
    (row,) = rows(told.stdout)
    assert row == {"chain": "damaged", "damage_position": open_reader(str(ended_early)).head().position}


# -- asking what is there ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("journal_there", ["none.db", "none/"])
def test_as_it_is_a_journal_that_is_not_there_is_told_as_by_other_verbs(tmp_path: Path, journal_there: str) -> None:
    path = f"{tmp_path}/{journal_there}"
    told = refold("sql", "--as-is", path, "SELECT 1")
    assert told.exit_code == 3
    assert told.stderr == refold("log", path).stderr
    assert not list(tmp_path.iterdir())


def test_as_it_is_segments_that_nobody_has_asked_have_no_read_model_and_a_question_makes_it(
    journal: Path, tmp_path: Path
) -> None:
    assert refold("copy", journal, f"{tmp_path}/plain/").exit_code == 0
    told = refold("audit", "requests", "--as-is", tmp_path / "plain")
    assert (told.exit_code, told.stdout) == (3, "")
    line, hint = told.stderr.splitlines()
    assert line == f"refold: {tmp_path}/plain has no read model yet"
    (command,) = re.findall(r"`(.*?)`", hint)
    assert refold(*shlex.split(command)[1:]).exit_code == 0
    assert refold("audit", "requests", "--as-is", tmp_path / "plain").stdout


def test_as_it_is_a_journal_that_nobody_has_asked_is_told_not_to_be_projected(journal: Path) -> None:
    told = refold("sql", "--as-is", journal, "SELECT count(*) FROM requests", "--csv")
    assert (told.exit_code, told.stdout.split()) == (0, ["count(*)", "0"])
    assert told.stderr == f"refold: nothing of {journal} is projected yet: without --as-is it is\n"
    assert refold("audit", "requests", journal).exit_code == 0
    assert refold("sql", "--as-is", journal, "SELECT count(*) FROM requests").stderr == ""


def damage_table(path: Path) -> None:
    """A page of the read model's table of requests is no page any more."""
    raw, start = root_page(path, "audit_requests")
    raw[start] = 0xFF
    path.write_bytes(raw)


@pytest.mark.parametrize("verb", ["audit requests {}", "sql {} 'SELECT * FROM requests'", "audit rebuild {}"])
def test_a_damaged_read_model_is_no_fault_of_the_question_and_a_copy_can_be_asked(
    journal: Path, tmp_path: Path, verb: str
) -> None:
    assert refold("audit", "requests", journal).exit_code == 0
    damage_table(journal)
    told = refold(*shlex.split(verb.format(journal)))
    assert (told.exit_code, told.stdout) == (3, "")
    assert_one_line_and_a_hint(told.stderr)
    assert "nothing in it can be trusted" not in told.stderr
    command = re.findall(r"`(refold copy .*?)`", told.stderr)[-1]
    copied = refold(*shlex.split(command.replace("NEW", f"{tmp_path}/new.db"))[1:])
    assert copied.exit_code == 0, copied.stderr
    assert refold("audit", "requests", tmp_path / "new.db").exit_code == 0
