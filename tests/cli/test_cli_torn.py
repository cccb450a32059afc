"""Reading journals that are damaged, or have lost their end: what is shown, what is said, and the exit status."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tests.cli.command import assert_one_line_and_a_hint, refold, rows
from tests.history.journals import eventful_lives, write_journal


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    path = tmp_path / "journal.db"
    write_journal(path, eventful_lives()[0])
    return path


def change(path: Path, statement: str) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(statement)


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
