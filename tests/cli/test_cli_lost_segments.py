"""Segments that are gone, and whole streams: every verb says that records are lost, and what it hints at works."""

import os
import re
import shlex
import shutil
from pathlib import Path

import pytest

from refold.engine.engine import Engine
from refold.journal.errors import JournalCorrupt
from tests.cli.command import assert_one_line_and_a_hint, finished, refold, rows

VERBS = {
    "verify": (),
    "stat": (),
    "show": (),
    "log": (),
    "head": (),
    "compact": (),
    "migrate": (),
    "audit requests": (),
    "audit rebuild": (),
    "audit follow": (),
    "run": ("--model", "simulated", "hello", "--journal"),
}
PROMPTS = ["one", "two", "three"]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three lives, a segment each, a snapshot in each, and a read model."""
    root = tmp_path_factory.mktemp("lost") / "J"
    for prompt in PROMPTS:
        with Engine("simulated", f"segments:///{root}", snapshot_every_records=8).open() as engine:
            engine.run([prompt])
        if prompt != PROMPTS[-1]:
            assert refold("compact", root).exit_code == 0
    assert refold("audit", "requests", root).exit_code == 0
    return root


@pytest.fixture
def journal(original: Path, tmp_path: Path) -> Path:
    shutil.copy(f"{original}.audit.db", tmp_path / "J.audit.db")
    return shutil.copytree(original, tmp_path / "J")


def segments(journal: Path) -> list[Path]:
    return sorted(path for path in (journal / "main").iterdir() if path.suffix in {".seg", ".sealed"})


def ask(verb: str, journal: Path):
    return refold(*verb.split(), *VERBS[verb], journal)


@pytest.mark.parametrize("verb", VERBS)
def test_segments_that_are_all_gone_are_told_by_every_verb(journal: Path, verb: str) -> None:
    for path in segments(journal):
        path.unlink()
    result = ask(verb, journal)
    assert result.exit_code == 3, result.stdout
    assert re.search(r"record 0 in .* and those up to \d+ are lost", result.stderr)
    hinted = re.search(r"  hint: `(refold audit requests --as-is .*?)`", result.stderr)
    assert hinted is not None, result.stderr
    assert len(rows(refold(*shlex.split(hinted[1])[1:], "--json").stdout)) == len(PROMPTS)


def test_segments_that_are_all_gone_without_a_read_model_leave_a_backup_or_a_new_beginning(journal: Path) -> None:
    for path in [*segments(journal), *journal.parent.glob("J.audit.db*")]:
        path.unlink()
    said = refold("log", journal).stderr
    assert "--as-is" not in said
    command = re.search(r"restore a backup, or, to begin a new journal, move this one away: `mv (.*) ELSEWHERE`", said)
    assert command is not None, said
    Path(*shlex.split(command[1])).rename(journal.with_name("elsewhere"))
    assert refold("run", "--model", "simulated", "hello", "--journal", f"{journal}/").exit_code == 0


def test_segments_that_are_all_gone_leave_what_was_archived(journal: Path) -> None:
    archived = refold("archive", "--until", 300, "--to", journal.parent / "old", journal)
    assert archived.exit_code == 0, archived.stderr
    for path in segments(journal):
        path.unlink()
    result = refold("verify", journal)
    assert result.exit_code == 3
    hinted = re.search(r"`(refold log --until .*?)`", result.stderr)
    assert hinted is not None, result.stderr
    done = refold(*shlex.split(hinted[1])[1:], "--json")
    assert (done.exit_code, rows(done.stdout)[-1]["position"]) == (0, 299), done.stderr


@pytest.mark.parametrize("verb", VERBS)
def test_a_stream_that_is_gone_is_no_new_one_as_long_as_a_read_model_knows_it(journal: Path, verb: str) -> None:
    num_records = rows(refold("stat", "--json", journal).stdout)[0]["num_records"]
    shutil.rmtree(journal / "main")
    result = ask(verb, journal)
    assert result.exit_code == 3, result.stdout
    assert f"its read model {journal}.audit.db was made of {num_records}" in result.stderr
    assert not (journal / "main").exists()
    kept = rows(refold("sql", "--as-is", "--json", journal, "SELECT count(*) AS num FROM requests").stdout)
    assert kept == [{"num": len(PROMPTS)}], "what the read model knows is still there"


def test_a_journal_that_is_gone_as_a_whole_is_not_begun_anew_either(journal: Path) -> None:
    shutil.rmtree(journal)
    with pytest.raises(JournalCorrupt, match="are lost"):
        Engine("simulated", f"segments:///{journal}").open()
    assert not journal.exists()
    result = refold("audit", "requests", f"{journal}/")
    assert result.exit_code == 3
    command = re.search(r"`mv (.*) ELSEWHERE`", result.stderr)
    assert command is not None
    Path(*shlex.split(command[1])).rename(journal.with_name("elsewhere"))
    assert refold("run", "--model", "simulated", "hello", "--journal", f"{journal}/").exit_code == 0


def test_a_read_model_that_is_damaged_or_behind_keeps_nobody_from_a_journal(journal: Path) -> None:
    model = journal.with_name("J.audit.db")
    model.write_bytes(b"no database")
    assert refold("log", journal).exit_code == 0
    shutil.rmtree(journal / "main")
    assert refold("run", "--model", "simulated", "hello", "--journal", journal).exit_code == 0


@pytest.mark.parametrize("verb", ["verify", "stat", "show", "log", "compact", "migrate", "audit follow", "run"])
@pytest.mark.parametrize("which", [1, -1], ids=["in the middle", "the newest"])
def test_a_segment_that_is_gone_is_told_with_a_hint_that_works(journal: Path, verb: str, which: int) -> None:
    gone = segments(journal)[which]
    gone.unlink()
    result = ask(verb, journal)
    assert result.exit_code == 3, result.stdout
    lines = result.stderr.splitlines()
    assert any(f"record {int(gone.stem)} in " in line for line in lines), lines
    if verb == "audit follow":
        return
    command = re.search(r"`(refold log --until .*?)`", lines[-1])
    assert command is not None, lines
    hinted = refold(*shlex.split(command[1])[1:], "--json")
    assert hinted.exit_code == 0, hinted.stderr
    assert rows(hinted.stdout)[-1]["position"] == int(gone.stem) - 1


@pytest.mark.parametrize("verb", ["verify", "stat", "show", "log", "compact", "migrate", "run"])
def test_a_newest_segment_that_was_emptied_is_told_with_hints_that_work(
    journal: Path, tmp_path: Path, verb: str
) -> None:
    newest = segments(journal)[-1]
    os.truncate(newest, 0)
    result = ask(verb, journal)
    assert result.exit_code == 3, result.stdout
    assert f"record {int(newest.stem)} in {newest} and those up to" in result.stderr
    assert "(truncated)" in result.stderr
    hinted = re.findall(r"`(refold (?:log|copy) .*?)`", result.stderr)
    assert len(hinted) == 2
    for command in hinted:
        done = refold(*shlex.split(command.replace(" NEW", f" {tmp_path}/new.db"))[1:], "--json")
        assert done.exit_code == 0, done.stderr
        last = rows(done.stdout)[-1]
        assert last.get("position", last.get("num_records", 0) - 1) == int(newest.stem) - 1


@pytest.mark.parametrize("damage", ["the first segment is gone", "a block is flipped", "the newest was cut"])
def test_integrity_reads_again_what_was_projected_before_and_calls_no_damaged_journal_whole(
    journal: Path, damage: str
) -> None:
    oldest, newest = segments(journal)[0], segments(journal)[-1]
    (before,) = rows(refold("audit", "integrity", "--json", journal).stdout)
    assert before["chain"] == "whole"
    if damage == "the first segment is gone":
        oldest.unlink()
    elif damage == "the newest was cut":
        os.truncate(newest, newest.stat().st_size - 10)
    else:
        content = bytearray(oldest.read_bytes())
        content[len(content) // 2] ^= 0x10
        oldest.write_bytes(content)
    asked = refold("audit", "integrity", "--json", journal)
    assert asked.exit_code == 3
    assert '"whole"' not in asked.stdout
    if damage != "the newest was cut":  # then the read model is left as it is, and nothing is asked of it
        (row,) = rows(asked.stdout)
        assert (row["chain"], row["damage_position"], row["num_records"]) == ("damaged", 0, before["num_records"])
        assert "record 0 in " in row["damage"]
        assert row["damage"] in asked.stderr
    unread = refold("audit", "integrity", "--as-is", journal)
    assert unread.exit_code == 0
    assert unread.stderr.startswith("refold: the records were not read again: with --as-is, ")


def test_integrity_says_what_it_does_not_read(journal: Path) -> None:
    assert refold("archive", "--until", 300, "--to", journal.parent / "old", journal).exit_code == 0
    shutil.rmtree(journal.parent / "old")
    asked = refold("audit", "integrity", "--json", journal)
    assert asked.exit_code == 0, asked.stderr
    assert asked.stderr == "refold: the first 300 records of stream main are archived, and were not read again\n"


@pytest.mark.parametrize("verb", ["compact", "migrate", "migrate --check"])
@pytest.mark.parametrize("damage", ["gone", "flipped"])
def test_whoever_would_say_that_all_is_well_reads_the_records_first(journal: Path, verb: str, damage: str) -> None:
    oldest = segments(journal)[0]
    if damage == "gone":
        oldest.unlink()
    else:
        content = bytearray(oldest.read_bytes())
        content[len(content) // 2] ^= 0x10
        oldest.write_bytes(content)
    before = {path: path.read_bytes() for path in (journal / "main").iterdir()}
    result = refold(*verb.split(), journal)
    assert (result.exit_code, result.stdout) == (3, "")
    assert f"record 0 in {oldest.parent}" in result.stderr
    assert {path: path.read_bytes() for path in (journal / "main").iterdir()} == before


@pytest.mark.parametrize("verb", ["verify", "log", "stat", "copy", "run", "compact"])
def test_a_first_segment_that_is_gone_with_the_mark_is_told_once_without_a_way_out_that_fails(
    journal: Path, tmp_path: Path, verb: str
) -> None:
    gone = segments(journal)[0]
    gone.unlink()
    (journal / "main" / "mark").unlink()
    following, new = int(segments(journal)[0].stem), tmp_path / "new.db"
    result = refold("copy", "--accept-end", journal, new) if verb == "copy" else ask(verb, journal)
    assert result.exit_code == 3, result.stdout
    assert not new.exists()
    line, hint = result.stderr.splitlines()
    assert hint.startswith(f"  hint: `refold audit requests --as-is {journal}`")
    assert (
        f"mark is gone, and records 0 to {following - 1} are gone with the first segment (deleted): restore a backup"
        in line
    )


def test_a_copy_that_meets_damage_in_the_middle_says_how_many_records_it_has(journal: Path, tmp_path: Path) -> None:
    gone, target = segments(journal)[1], tmp_path / "new.db"
    backup = gone.read_bytes()
    gone.unlink()
    first = int(gone.stem)
    copied = refold("copy", "--json", journal, target)
    assert copied.exit_code == 3
    assert_one_line_and_a_hint(copied.stderr)
    assert copied.stderr.endswith(
        f"; {target} has {first} records of stream main, which are whole: `refold copy BACKUP {target}` goes on from there\n"
    )
    (report,) = rows(copied.stdout)
    assert (report["ok"], report["num_records"]) == (False, first)
    assert f"record {first} in " in report["message"]
    gone.write_bytes(backup)
    (report,) = rows(refold("copy", "--json", journal, target).stdout)
    assert (report["ok"], report["num_records"] - report["num_copied"]) == (True, first)


def test_a_copy_of_what_is_left_says_that_the_mark_told_of_the_rest(journal: Path, tmp_path: Path) -> None:
    gone = segments(journal)[-1]
    num_records = rows(refold("stat", "--json", journal).stdout)[0]["num_records"]
    gone.unlink()
    copied = refold("copy", "--accept-end", journal, tmp_path / "new.db").stdout.splitlines()
    first = int(gone.stem)
    assert copied[-1].startswith(
        f"  records {first} to {num_records - 1} are lost: the mark beside the records of {journal} says"
    )
    (report,) = rows(refold("copy", "--accept-end", "--json", journal, tmp_path / "new.db").stdout)
    assert (report["end_is_vouched"], report["num_lost"], report["lost_told_by"]) == (
        False,
        num_records - first,
        "mark",
    )
    (sound,) = rows(refold("copy", "--json", tmp_path / "new.db", tmp_path / "again.db").stdout)
    assert (sound["num_lost"], sound["lost_told_by"]) == (0, None)


@pytest.mark.parametrize("which", [1, -1], ids=["in the middle", "the newest"])
def test_a_read_model_keeps_what_it_knows_of_records_that_are_lost_and_one_that_is_made_then_knows_those_before(
    journal: Path, which: int
) -> None:
    num_before = segments(journal).index(segments(journal)[which])
    segments(journal)[which].unlink()
    asked = ("sql", "--json", journal, "SELECT count(*) AS num FROM requests")
    result = refold(*asked)
    assert (result.exit_code, result.stdout) == (3, "")
    assert "--as-is asks it" in result.stderr
    assert rows(refold(*asked, "--as-is").stdout) == [{"num": 3}]
    journal.with_name("J.audit.db").unlink()
    result = refold(*asked)
    assert result.exit_code == 3
    assert rows(result.stdout)[0]["num"] == num_before


def test_the_state_before_a_hole_is_shown_and_none_behind_it(journal: Path) -> None:
    gone = segments(journal)[1]
    first = int(gone.stem)
    gone.unlink()
    assert refold("show", "--at", first - 1, journal).exit_code == 0
    result = refold("show", "--at", first + 20, journal)
    assert result.exit_code == 3
    said = [
        line for line in result.stderr.splitlines() if '"snapshot_ignored"' not in line
    ]  # there may be one in the hole
    assert_one_line_and_a_hint("\n".join(said))
    whole = refold("show", "--json", journal)
    assert rows(whole.stdout)[0]["position"] == first - 1
    assert whole.exit_code == 3


@pytest.mark.parametrize("is_projected_before", [True, False])
def test_a_damaged_segment_is_projected_as_far_as_it_is_whole_and_asked_again_as_often_as_one_likes(
    journal: Path, is_projected_before: bool
) -> None:
    if not is_projected_before:
        for path in journal.parent.glob("J.audit.db*"):
            path.unlink()
    newest = segments(journal)[-1]
    content = bytearray(newest.read_bytes())
    content[len(content.rstrip(b"\0")) // 2] ^= 0x55
    newest.write_bytes(content)
    for verb in ("rebuild", "requests", "requests", "integrity"):
        status, stdout, stderr = finished("audit", verb, str(journal), timeout=60)
        if verb == "rebuild" or not is_projected_before:
            assert status == 3, (verb, stdout, stderr)
        assert "before the damage" in stderr, (verb, stderr)


def test_what_the_read_model_has_of_an_end_that_is_gone_with_its_mark_is_left_to_it(journal: Path) -> None:
    before = refold("sql", "--as-is", journal, "SELECT count(*) FROM requests", "--csv").stdout
    (journal / "main" / "mark").unlink()
    segments(journal)[-1].unlink()
    for verb in (("audit", "integrity"), ("audit", "requests"), ("audit", "rebuild")):
        result = refold(*verb, journal)
        assert result.exit_code == 3, verb
        assert "the read model has" in result.stderr, verb
    assert refold("sql", "--as-is", journal, "SELECT count(*) FROM requests", "--csv").stdout == before
