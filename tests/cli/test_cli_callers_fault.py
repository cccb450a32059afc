"""What only the caller can have got wrong is refused with 2, and the line has what he wrote; a hint is of use where it is printed."""

import shutil
from pathlib import Path

import pytest

from refold.journal.stores import open_store
from refold.journal.testing import make_records
from refold.migrations import ensure
from tests.cli.command import assert_one_line_and_a_hint, refold
from tests.history.journals import long_life, write_journal

RUN = ("run", "--model", "simulated", "hello", "--journal")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("fault") / "refold.db"
    write_journal(place, long_life(3))
    return place


@pytest.fixture
def journal(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(original, tmp_path / "refold.db"))


@pytest.fixture
def of_another_stream(tmp_path: Path) -> Path:
    place = tmp_path / "other.db"
    ensure(str(place))
    store = open_store(str(place))
    store.append("other", make_records(store.open_stream("other"), 3))
    store.close()
    return place


@pytest.mark.parametrize(
    "arguments",
    [
        ("verify", ""),
        ("log", " "),
        ("migrate", ""),
        ("compact", ""),
        ("audit", "requests", ""),
        (*RUN, ""),
        ("copy", "", "new.db"),
        ("copy", "a.db", ""),
        ("diff", "", "b.db"),
        ("diff", "a.db", ""),
    ],
    ids=str,
)
def test_a_journal_without_a_name_is_the_callers_fault(arguments: tuple[str, ...]) -> None:
    result = refold(*arguments)
    assert result.exit_code == 2, result.stderr
    assert_one_line_and_a_hint(result.stderr)


def test_of_a_journal_in_memory_nobody_is_told_to_make_one_elsewhere() -> None:
    result = refold("verify", "memory:")
    assert result.exit_code == 3
    assert "`refold run --journal FILE` keeps one" in result.stderr
    assert "$REFOLD_JOURNAL" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("log", "--kind", ""), "no kind of event is named ''"),
        (("log", "--kind", "WorkerLost,"), "no kind of event is named ''"),
        (("shrink", "--seconds", "nan"), "nan is no number of seconds"),
        (("verify", "--head", "/"), "--head '/' is a folder"),
    ],
    ids=str,
)
def test_an_option_that_says_nothing_is_refused(journal: Path, arguments: tuple[str, ...], says: str) -> None:
    result = refold(*arguments, journal)
    assert (result.exit_code, says in result.stderr) == (2, True), result.stderr
    assert_one_line_and_a_hint(result.stderr)


@pytest.mark.parametrize("number", ["1e99", "nan", "-1"])
def test_a_length_of_time_that_is_none_is_told_with_its_bounds(journal: Path, number: str) -> None:
    result = refold(*RUN, journal, "--start-timeout-s", number)
    assert (result.exit_code, "give more than 0 seconds, at most 10^9" in result.stderr) == (2, True), result.stderr


@pytest.mark.parametrize("kind", ["", "step:"])
def test_a_place_that_is_not_there_is_named_as_it_was_given(journal: Path, kind: str) -> None:
    number = "9" * 25
    result = refold("show", "--at", kind + number, journal)
    assert (result.exit_code, f" {number}:" in result.stderr) == (1, True), result.stderr


@pytest.mark.parametrize("verb", ["log", "show", "stat", "head", "verify"])
def test_the_usual_stream_is_unknown_where_only_others_are(of_another_stream: Path, verb: str) -> None:
    result = refold(verb, "--stream", "main", of_another_stream)
    assert (result.exit_code, "no stream 'main' in that journal" in result.stderr) == (2, True), result.stderr
    assert "it has other" in result.stderr


def test_without_a_stream_all_that_are_there_are_verified_and_copied(of_another_stream: Path, tmp_path: Path) -> None:
    assert "other: 3 records" in refold("verify", of_another_stream).stdout
    for verb in (("migrate", of_another_stream), ("copy", of_another_stream, tmp_path / "new.db")):
        assert refold(*verb).exit_code == 0, verb


def test_two_streams_of_different_names_are_compared(journal: Path, tmp_path: Path) -> None:
    write_journal(tmp_path / "other.db", long_life(3), stream="other")
    alike = refold("diff", journal, tmp_path / "other.db", "--with-stream", "other")
    assert (alike.exit_code, alike.stdout.startswith("alike: ")) == (0, True), alike.stderr
    other_way = refold("diff", tmp_path / "other.db", journal, "--stream", "other", "--with-stream", "main")
    assert other_way.exit_code == 0, other_way.stderr
    assert refold("diff", journal, "--redecide", "--with-stream", "other").exit_code == 2
    unknown = refold("diff", journal, tmp_path / "other.db", "--with-stream", "x")
    assert (unknown.exit_code, "no stream 'x'" in unknown.stderr) == (2, True)
