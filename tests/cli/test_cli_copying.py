"""`copy` of journals that aren't whole, and to targets that can't be opened: what it says, and what can be done next."""

import os
import re
import shlex
import shutil
import signal
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from refold.engine.cli.unfinished import UnderWay, telling_what_is_there
from refold.journal.stores import open_reader, open_store
from refold.journal.testing import make_records
from tests.cli.command import assert_one_line_and_a_hint, process, refold, rows
from tests.history.journals import change, eventful_lives, write_journal
from tests.kit.engines import eventually

COMMAND = re.compile(r"`(refold [^`]*)`")


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    path = tmp_path / "journal.db"
    write_journal(path, eventful_lives()[0])
    return path


def num_records(path: Path) -> int:
    return open_reader(str(path)).head().position


@pytest.fixture
def cut(journal: Path) -> Path:
    """A journal of the same records up to 50, whose table of streams knows of all."""
    path = journal.with_name("cut.db")
    assert refold("copy", journal, path).exit_code == 0
    change(path, "DELETE FROM journal_records WHERE position >= 50")
    path.with_name("cut.db.mark").unlink()
    return path


@pytest.mark.parametrize("target", ["new.db", "new/"])
def test_an_end_that_the_table_of_streams_has_lost_is_accepted_and_the_copy_says_what_is_lost(
    cut: Path, tmp_path: Path, target: str
) -> None:
    known, new = num_records(cut), f"{tmp_path}/{target}"
    done = refold("copy", "--accept-end", cut, new)
    assert done.exit_code == 0, done.stderr
    assert done.stdout.splitlines()[0] == "copied 50 records of stream main; verified"
    assert done.stdout.splitlines()[-1] == (
        f"  records 50 to {known - 1} are lost: the head that {cut} stores says that it had {known} records; "
        "whether it had acknowledged more can't be known"
    )
    assert refold("verify", new).exit_code == 0
    (report,) = rows(refold("copy", "--accept-end", "--json", cut, new).stdout)
    assert (report["ok"], report["num_copied"]) == (True, 0)
    assert (report["end_is_vouched"], report["num_lost"], report["lost_told_by"]) == (False, known - 50, "head")


def test_an_end_that_is_lost_in_postgresql_is_accepted_too(cut: Path, tmp_path: Path, postgres_url: str) -> None:
    import psycopg

    whole = cut.with_name("journal.db")
    assert refold("copy", whole, postgres_url).exit_code == 0
    with psycopg.connect(postgres_url.replace("+psycopg", "")) as connection:
        connection.execute("DELETE FROM journal_records WHERE position >= 50")
    assert refold("copy", postgres_url, tmp_path / "refused.db").exit_code == 3
    done = refold("copy", "--accept-end", postgres_url, tmp_path / "new.db")
    assert done.exit_code == 0, done.stderr
    assert num_records(tmp_path / "new.db") == 50


def test_an_end_that_nobody_accepted_is_refused_with_the_command_that_does(cut: Path, tmp_path: Path) -> None:
    refused = refold("copy", cut, tmp_path / "new.db")
    assert refused.exit_code == 3
    assert_one_line_and_a_hint(refused.stderr)
    commands = COMMAND.findall(refused.stderr)
    assert f"refold copy --accept-end {cut} {tmp_path}/new.db" in commands
    for command in commands:
        done = refold(*shlex.split(command)[1:])
        assert done.exit_code == 0, (command, done.stderr)
    assert num_records(tmp_path / "new.db") == 50


def test_a_journal_none_of_whose_records_is_left_is_not_accepted_and_leaves_no_target(
    cut: Path, tmp_path: Path
) -> None:
    change(cut, "DELETE FROM journal_records")
    for options in ((), ("--accept-end",)):
        done = refold("copy", *options, cut, tmp_path / "new.db")
        assert done.exit_code == 3, done.stdout
        assert f"{cut}: the stream ends at 0, expected " in done.stderr
        assert "--accept-end" not in done.stderr, "it would fail"
        assert not (tmp_path / "new.db").exists()


def test_a_target_that_has_what_its_source_has_lost_is_said_to_have_it(cut: Path, tmp_path: Path) -> None:
    better = tmp_path / "better.db"
    assert refold("copy", cut.with_name("journal.db"), better).exit_code == 0
    done = refold("copy", "--accept-end", cut, better)
    assert done.exit_code == 2
    assert f"record {num_records(cut) - 1} of stream 'main' is in the target, and the source has lost it" in done.stderr
    assert "no copy" not in done.stderr


def test_after_a_damaged_source_each_command_that_is_named_works(journal: Path, tmp_path: Path) -> None:
    backup, target = tmp_path / "backup.db", tmp_path / "new.db"
    assert refold("copy", journal, backup).exit_code == 0
    change(journal, "UPDATE journal_records SET time_ns = 1 WHERE position = 30")
    done = refold("copy", journal, target)
    assert done.exit_code == 3
    assert_one_line_and_a_hint(done.stderr)
    assert "the same command" not in done.stderr, "it would fail again"
    commands = COMMAND.findall(done.stderr)
    assert f"refold copy BACKUP {target}" in commands
    for command in commands:
        again = refold(*shlex.split(command.replace("BACKUP", str(backup)))[1:])
        assert again.exit_code == 0, (command, again.stderr)
    assert num_records(target) == num_records(backup)


def test_of_a_damaged_target_the_hint_names_the_target_and_another_copy(journal: Path, tmp_path: Path) -> None:
    target = tmp_path / "old.db"
    assert refold("copy", journal, target).exit_code == 0
    change(target, "UPDATE journal_records SET time_ns = 1 WHERE position = 7")
    done = refold("copy", journal, target)
    assert done.exit_code == 3
    assert_one_line_and_a_hint(done.stderr)
    assert f"{target}: record 7 " in done.stderr
    commands = COMMAND.findall(done.stderr)
    assert f"refold log --until 6 {target}" in commands
    for command in commands:
        again = refold(*shlex.split(command.replace("NEW", str(tmp_path / "new.db")))[1:])
        assert again.exit_code == 0, (command, again.stderr)
    assert num_records(tmp_path / "new.db") == num_records(journal)


@pytest.mark.parametrize("kind", ["sqlite", "segments"])
def test_of_a_target_that_has_lost_its_end_the_hint_names_the_target_and_another_copy(
    journal: Path, tmp_path: Path, kind: str
) -> None:
    target = tmp_path / ("old.db" if kind == "sqlite" else "old")
    place = str(target) if kind == "sqlite" else f"{target}/"
    assert refold("copy", journal, place).exit_code == 0
    if kind == "sqlite":
        older = tmp_path / "older.db"
        write_journal(older, [eventful_lives()[0][0]])
        shutil.copy(older, target)
    else:
        segment = next((target / "main").glob("*.seg"))
        os.truncate(segment, segment.stat().st_size * 2 // 3)
    done = refold("copy", journal, place)
    assert done.exit_code == 3
    assert_one_line_and_a_hint(done.stderr)
    commands = COMMAND.findall(done.stderr.splitlines()[1])
    left = [str(target)] if kind == "sqlite" else []  # nothing is whole of the segment that was cut
    assert [shlex.split(command)[-1] for command in commands] == [*left, "NEW"]
    for command in commands:
        again = refold(*shlex.split(command.replace("NEW", str(tmp_path / "new.db")))[1:])
        assert again.exit_code == 0, (command, again.stderr)
    assert num_records(tmp_path / "new.db") == num_records(journal)


@pytest.mark.parametrize("target", ["absent/new.db", "foreign.db", "memory:", "journal.db"])
def test_with_json_a_target_that_cannot_be_opened_is_reported_on_stdout(
    journal: Path, tmp_path: Path, target: str
) -> None:
    with closing(sqlite3.connect(tmp_path / "foreign.db")) as connection:
        connection.execute("CREATE TABLE theirs (x)")
    url = target if target == "memory:" else str(tmp_path / target)
    done = refold("copy", "--json", journal, url)
    assert done.exit_code in {2, 3}
    assert_one_line_and_a_hint(done.stderr)
    (report,) = rows(done.stdout)
    assert (report["schema"], report["from"], report["to"]) == ("refold.copy/1", str(journal), url)
    assert (report["ok"], report["stream"], report["num_records"]) == (False, None, None)
    assert report["message"] in done.stderr


@pytest.mark.parametrize("source", ["absent.db", "damaged.db"])
def test_with_json_a_source_that_cannot_be_read_is_reported_on_stdout(
    journal: Path, tmp_path: Path, source: str
) -> None:
    assert refold("copy", journal, tmp_path / "damaged.db").exit_code == 0
    change(tmp_path / "damaged.db", "UPDATE journal_records SET time_ns = 1 WHERE position = 0")
    done = refold("copy", "--json", tmp_path / source, tmp_path / "new.db")
    assert done.exit_code == 3
    (report,) = rows(done.stdout)
    assert (report["ok"], report["message"] in done.stderr) == (False, True)
    assert not (tmp_path / "new.db").exists()


def test_with_json_one_report_comes_for_each_stream_and_the_last_is_that_of_the_failure(
    journal: Path, tmp_path: Path
) -> None:
    store = open_store(str(journal))
    store.append("second", make_records(store.open_stream("second"), 9))
    store.close()
    stream_id = "(SELECT stream_id FROM journal_streams WHERE name = 'second')"
    change(journal, f"UPDATE journal_records SET time_ns = 1 WHERE position = 4 AND stream_id = {stream_id}")
    done = refold("copy", "--json", journal, tmp_path / "new.db")
    assert done.exit_code == 3
    first, second = rows(done.stdout)
    assert (first["stream"], first["ok"]) == ("main", True)
    assert (second["stream"], second["ok"], second["num_records"]) == ("second", False, 4)


def test_with_json_an_interrupted_copy_reports_how_far_it_came_and_the_same_command_goes_on(tmp_path: Path) -> None:
    source, target = str(tmp_path / "long.db"), str(tmp_path / "new.db")
    assert refold("migrate", source).exit_code == refold("migrate", target).exit_code == 0
    store = open_store(source)
    head = store.append("main", make_records(store.open_stream(), 20_000))
    store.close()
    child, reader = process("copy", "--json", source, target), open_reader(target)
    eventually(lambda: reader.head().position > 0, 30)
    child.send_signal(signal.SIGINT)
    stdout, stderr = child.communicate(timeout=30)
    assert child.returncode == 130, stderr
    (report,) = rows(stdout.decode())
    assert (report["ok"], report["stream"], report["message"]) == (False, "main", "interrupted")
    assert 0 < report["num_records"] == reader.head().position <= head.position
    assert b"the same command goes on from there" in stderr
    (report,) = rows(refold("copy", "--json", source, target).stdout)
    assert (report["ok"], report["num_records"]) == (True, head.position)


def test_with_json_a_copy_that_is_interrupted_before_it_has_begun_reports_that(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(KeyboardInterrupt), telling_what_is_there(UnderWay("a.db", "b.db"), as_json=True):
        raise KeyboardInterrupt
    (report,) = rows(capsys.readouterr().out)
    assert (report["ok"], report["stream"], report["num_records"], report["message"]) == (
        False,
        None,
        None,
        "interrupted",
    )


def test_a_target_with_more_records_than_its_source_may_have_what_that_has_lost(journal: Path, tmp_path: Path) -> None:
    older = tmp_path / "older.db"
    write_journal(older, eventful_lives()[0][:1])
    refused = refold("copy", older, journal)
    assert refused.exit_code == 2
    assert_one_line_and_a_hint(refused.stderr)
    assert f"the target has {num_records(journal)} records of stream 'main', the source {num_records(older)}" in (
        refused.stderr
    )
    assert "it is no copy of the source, or has what the source has lost" in refused.stderr
