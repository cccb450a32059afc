"""A journal in PostgreSQL, from a shell: every verb takes its URL, a killed engine loses nothing, no password is shown."""

import time

import pytest

from refold.journal.errors import JournalError, NotFound
from refold.journal.stores import engine_owner, open_reader
from tests.cli.command import assert_one_line_and_a_hint, process, refold, rows

MODEL = ("--model", "simulated?eos=-1")
SLOW = ("--model", "simulated?eos=-1&step_ms=25")


def wait_for_records(url, number, child):
    """Until a process has written so many; at first there aren't even tables."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        assert child.poll() is None, child.stderr.read().decode()
        try:
            reader = open_reader(url)
            position = reader.head().position
            reader.close()
        except (JournalError, NotFound):
            position = 0
        if position >= number:
            return
        time.sleep(0.05)
    raise AssertionError("the process writes nothing")


def test_an_engine_killed_half_way_is_carried_on_without_loss_or_repetition(postgres_server):
    url, prompts = postgres_server.empty(), [f"prompt {number}" for number in range(6)]
    sampling = ("--max-tokens", "200", "--seed", "11", "--json")
    whole = rows(refold("run", *MODEL, "--journal", "memory:", *sampling, *prompts).stdout)
    child = process("run", *SLOW, "--journal", url, *sampling, *prompts)
    wait_for_records(url, 80, child)
    assert engine_owner(url) == child.pid
    second = refold("run", *MODEL, "--journal", url, "one too many")
    assert second.exit_code == 5
    assert f"is written by process {child.pid}" in second.stderr
    assert refold("log", "-n", "1", url).exit_code == 0, "a journal is read while its engine runs"
    child.kill()
    child.communicate()
    assert refold("verify", url).exit_code == 0
    again = refold("run", *MODEL, "--journal", url, "--json")
    assert again.exit_code == 0, again.stderr
    assert "ended without a word" in again.stderr
    lives = {row["request_id"]: rows(refold("request", row["request_id"], "--json", url).stdout)[0] for row in whole}
    for row in whole:
        assert lives[row["request_id"]]["output_token_ids"] == row["token_ids"]
        assert lives[row["request_id"]]["status"] == "finished"
    verified = refold("verify", url)
    assert verified.exit_code == 0
    assert "2 engines" in verified.stdout


@pytest.mark.parametrize("arguments", [["log", "-n", "3"], ["show"], ["request", "run1-1"], ["verify"], ["migrate"]])
def test_every_verb_takes_the_url(postgres_url, arguments):
    assert refold("run", *MODEL, "--journal", postgres_url, "--max-tokens", 4, "hello").exit_code == 0
    for result in (refold(*arguments, postgres_url), refold(*arguments, REFOLD_JOURNAL=postgres_url)):
        assert result.exit_code == 0, result.stderr
        assert result.stdout.strip()


def test_migrate_makes_the_tables_and_says_so(postgres_server):
    url = postgres_server.empty()
    absent = refold("migrate", "--check", url)
    assert absent.exit_code == 3
    assert_one_line_and_a_hint(absent.stderr)
    assert "has today's tables now" in refold("migrate", url).stdout
    assert "is current" in refold("migrate", url).stdout
    with postgres_server.connect(url) as other:
        other.execute("UPDATE refold_schema SET version_num = '0001'")
    assert refold("migrate", "--check", url).exit_code == 1


@pytest.mark.parametrize("arguments", [["run", *MODEL, "hi", "--journal"], ["log"], ["verify"], ["migrate"]])
def test_no_server_is_one_line_and_a_hint_without_the_password(arguments):
    result = refold(*arguments, "postgresql://ann:s3cret@127.0.0.1:9/db")
    assert result.exit_code == 3
    assert_one_line_and_a_hint(result.stderr)
    assert "ann:***@127.0.0.1:9/db" in result.stderr
    assert "s3cret" not in result.stdout + result.stderr


def test_what_a_run_prints_has_no_password(postgres_url):
    url = postgres_url.replace("postgres@", "postgres:s3cret@")
    results = [refold("run", *MODEL, "--journal", url, "--max-tokens", 2, "hi"), refold("verify", url)]
    results += [refold("run", *MODEL, "--journal", url), refold("migrate", url)]
    assert [result.exit_code for result in results] == [0, 0, 2, 0]
    assert all("s3cret" not in result.stdout + result.stderr for result in results)


def test_a_lock_that_another_program_holds_is_said_to_be_one(postgres_url, postgres_server):
    with postgres_server.connect(postgres_url) as other:
        other.execute("BEGIN")
        other.execute("LOCK TABLE journal_streams IN ACCESS EXCLUSIVE MODE")
        result = refold("log", postgres_url + "%20-clock_timeout%3D100")
    assert result.exit_code == 5
    assert_one_line_and_a_hint(result.stderr)


def test_records_whose_stream_is_gone_are_damage_and_no_journal_is_begun_over_them(postgres_url, postgres_server):
    assert refold("run", *MODEL, "--journal", postgres_url, "hello").exit_code == 0
    with postgres_server.connect(postgres_url) as admin:
        admin.execute("DELETE FROM journal_snapshots")
        admin.execute("DELETE FROM journal_streams")
        for verb in (("verify",), ("log",), ("stat",), ("run", *MODEL, "hello", "--journal")):
            result = refold(*verb, postgres_url)
            assert result.exit_code == 3, verb
            assert "and the row that names the stream is gone from journal_streams" in result.stderr, verb
        assert admin.execute("SELECT count(*) FROM journal_streams").fetchone() == (0,)
