"""The reading verbs: what they say, in words and as data."""

import re
import shutil
import sqlite3
import time

import msgspec
import pytest

from refold.engine.history.replay import state_at
from refold.engine.history.verify import format_head
from refold.journal.events import EVENT_TYPES, AnyEvent, OutputDelivered, StateDigest
from refold.journal.stores import open_reader
from refold.scheduler.state import digest
from tests.cli.command import assert_one_line_and_a_hint, process, refold, rows
from tests.history.journals import eventful_lives, write_journal


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    path = tmp_path_factory.mktemp("reading") / "refold.db"
    lives, drive = eventful_lives()
    head = write_journal(path, lives)
    return path, head, [record for life in lives for record in life], drive


@pytest.fixture
def journal(original, tmp_path):
    return shutil.copy(original[0], tmp_path / "refold.db")


@pytest.fixture(scope="module")
def records(original):
    return original[2]


# -- log --------------------------------------------------------------------------------------------------------------


def test_log_has_one_line_per_event(journal, records):
    result = refold("log", journal)
    assert result.exit_code == 0
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    assert len(lines) == sum(map(len, records))
    for line in lines:
        assert re.match(r" *\d+  \d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z  e[12]  \S", line)
    assert "\x1b" not in result.stdout


def test_log_json_gives_the_events_as_they_were_recorded(journal, records):
    found = rows(refold("log", "--json", journal).stdout)
    assert {row["schema"] for row in found} == {"refold.log/1"}
    events = [msgspec.convert(row["event"], AnyEvent) for row in found]
    assert events == [event for record in records for event in record]
    assert [row["position"] for row in found] == [p for p, record in enumerate(records) for _ in record]
    assert [row["index"] for row in found] == [i for record in records for i in range(len(record))]


def test_log_filters_by_request_step_and_kind(journal, records):
    of_request = rows(refold("log", "--json", "--request", "req-3", journal).stdout)
    assert of_request[0]["event"]["request_id"] == "req-3"
    assert of_request[-1]["event"]["type"] == "RequestFinished"
    of_step = rows(refold("log", "--json", "--step", 3, journal).stdout)
    assert {row["event"]["type"] for row in of_step} >= {"StepScheduled", "OutputDelivered"}
    assert all(row["event"].get("step", 3) == 3 for row in of_step)
    of_kind = rows(refold("log", "--json", "--kind", "requestpreempted, WorkerLost", journal).stdout)
    assert {row["event"]["type"] for row in of_kind} == {"RequestPreempted", "WorkerLost"}


def test_log_knows_names_from_before_the_range(journal):
    since = refold("log", "--since", 30, "--until", 34, journal).stdout
    positions = [int(line.split()[0]) for line in since.splitlines()]
    assert positions == sorted(positions)
    assert (min(positions), max(positions)) == (30, 34)
    assert "#" not in since
    assert "req-" in since


def test_log_limit_gives_the_last_and_reverse_turns_the_order(journal):
    everything = refold("log", journal).stdout.splitlines()
    assert refold("log", "-n", 5, journal).stdout.splitlines() == everything[-5:]
    assert refold("log", "-n", 0, journal).stdout == ""
    assert refold("log", "-n", 5, "--reverse", journal).stdout.splitlines() == everything[-5:][::-1]
    assert refold("log", "--reverse", journal).stdout.splitlines() == everything[::-1]


def test_log_of_a_kind_that_is_none_names_the_kinds(journal):
    result = refold("log", "--kind", "Foo", journal)
    assert result.exit_code == 2
    assert_one_line_and_a_hint(result.stderr)
    assert all(kind.__name__ in result.stderr for kind in EVENT_TYPES)


def test_log_follow_shows_what_is_appended_and_ends_on_interrupt(tmp_path):
    import signal

    lives, _ = eventful_lives()
    write_journal(tmp_path / "j.db", [lives[0]])
    child = process("log", "--follow", "-n", "1", "--json", str(tmp_path / "j.db"))
    first = child.stdout.readline()
    write_later_life(tmp_path / "j.db", lives)
    second = child.stdout.readline()
    assert msgspec.json.decode(first)["position"] == len(lives[0]) - 1
    assert msgspec.json.decode(second)["position"] == len(lives[0])
    child.send_signal(signal.SIGINT)
    rest, stderr = child.communicate(timeout=20)
    assert child.returncode == 130
    assert b"Traceback" not in stderr
    last = msgspec.json.decode(rest.splitlines()[-1]) if rest else msgspec.json.decode(second)
    assert last["position"] >= len(lives[0])


def write_later_life(path, lives):
    from refold.journal.stores import open_store
    from tests.history.journals import sealed

    store = open_store(str(path))
    head = store.open_stream()
    store.append("main", sealed(lives)[head.position :])
    store.close()


# -- show -------------------------------------------------------------------------------------------------------------


def test_show_folds_up_to_and_including_the_position(journal, records):
    for position in (0, 12, 37, 38, len(records) - 1):
        result = refold("show", "--at", position, "--json", journal)
        assert result.exit_code == 0, result.stderr
        (seen,) = rows(result.stdout)
        expected = state_at(open_reader(str(journal)), position).state
        assert seen["position"] == position
        assert seen["digest"] == digest(expected)
        assert [r["request_id"] for r in seen["requests"]] == [
            r.request_id for r in expected.requests.by_handle.values()
        ]


def test_show_in_words_has_every_live_request_and_its_counters(journal):
    position = 38
    state = state_at(open_reader(str(journal)), position).state
    text = refold("show", "--at", position, journal).stdout
    assert digest(state) in text
    assert "3 of 3 steps in flight" in text
    header = next(line for line in text.splitlines() if line.startswith("request"))
    for title in ("computed", "in flight", "stale", "to deliver", "placeholders", "epoch", "preempted"):
        assert title in header
    for request in state.requests.by_handle.values():
        line = next(line for line in text.splitlines() if line.startswith(request.request_id + " "))
        numbers = [int(word) for word in line.split()[2:] if word.isdigit()]
        assert numbers[:6] == [
            request.epoch,
            request.num_prompt_tokens,
            request.num_output_tokens,
            request.num_computed_tokens,
            request.num_in_flight_tokens,
            request.num_stale_output_tokens,
        ]


def test_show_without_a_position_is_the_head(journal, records):
    (seen,) = rows(refold("show", "--json", journal).stdout)
    assert seen["position"] == len(records) - 1


@pytest.mark.parametrize(("at", "status"), [(10**6, 1), (10**30, 1), (-1, 2), ("x", 2)])
def test_show_at_a_position_that_is_not_there(journal, at, status):
    result = refold("show", "--at", at, journal)
    assert result.exit_code == status
    assert result.stdout == ""
    assert_one_line_and_a_hint(result.stderr)


# -- request ----------------------------------------------------------------------------------------------------------


def test_request_tells_the_life_in_words(journal):
    result = refold("request", "req-3", journal)
    assert result.exit_code == 0, result.stderr
    text = result.stdout
    assert text.startswith("req-3: finished (length)")
    for words in (
        "submitted with 6 prompt tokens",
        "preempted for",
        "0 free",
        "policy deliver",
        "came back stale",
        "queued",
        "total",
    ):
        assert words in text
    assert re.search(r"outputs? \d", text)


def test_request_json_has_the_tokens_that_the_client_got(journal, original):
    for request_id, tokens in original[3].outputs.items():
        (row,) = rows(refold("request", request_id, "--json", journal).stdout)
        assert row["output_token_ids"] == tokens
    (row,) = rows(refold("request", "req-2", "--json", journal).stdout)
    assert row["schema"] == "refold.request/1"
    assert row["num_workers_lost"] == 1
    assert row["finish_reason"] == "length"
    assert row["time_to_first_token_ns"] > 0


def test_an_unknown_request_is_not_found_and_names_similar_ones(journal):
    for arguments in (("request", "req-33", journal), ("log", "--request", "req-33", journal)):
        result = refold(*arguments)
        assert result.exit_code == 1
        assert result.stdout == ""
        assert_one_line_and_a_hint(result.stderr)
        assert "'req-3'" in result.stderr


def test_a_life_is_told_up_to_where_the_journal_is_damaged(journal):
    with sqlite3.connect(journal) as connection:
        connection.execute("UPDATE journal_records SET time_ns = time_ns + 1 WHERE position = 30")
    connection.close()
    result = refold("request", "req-0", journal)
    assert result.exit_code == 3
    assert "submitted" in result.stdout
    assert "edited" in result.stderr


# -- verify -----------------------------------------------------------------------------------------------------------


def test_verify_counts_and_prints_the_head_to_remember(journal, original):
    result = refold("verify", journal)
    assert result.exit_code == 0, result.stderr
    head = format_head(original[1])
    assert head in result.stdout
    assert "7 submitted, 7 finished" in result.stdout
    (row,) = rows(refold("verify", "--json", journal).stdout)
    assert row["ok"] is True
    assert row["head"] == head
    assert row["num_records"] == original[1].position
    again = refold("verify", "--head", head, journal)
    assert again.exit_code == 0


@pytest.mark.parametrize(
    ("statement", "kind"),
    [
        ("UPDATE journal_records SET body = replace(body, 'req-4', 'req-5') WHERE position = 6", "edited"),
        ("DELETE FROM journal_records WHERE position = 6", "deleted"),
        ("DELETE FROM journal_records WHERE position > 50", "truncated"),
    ],
)
def test_verify_says_where_and_what_a_damage_is(journal, statement, kind):
    with sqlite3.connect(journal) as connection:
        connection.execute(statement)
    connection.close()
    result = refold("verify", journal)
    assert result.exit_code == 3
    assert result.stdout == ""
    assert_one_line_and_a_hint(result.stderr)
    assert kind in result.stderr
    assert "at record " + ("51" if kind == "truncated" else "6") in result.stderr
    (row,) = rows(refold("verify", "--json", journal).stdout)
    assert (row["ok"], row["kind"]) == (False, kind)


def test_verify_finds_swapped_rows(journal):
    with sqlite3.connect(journal) as connection:
        for change in (
            "position = 1000 WHERE position = 7",
            "position = 7 WHERE position = 8",
            "position = 8 WHERE position = 1000",
        ):
            connection.execute(f"UPDATE journal_records SET {change}")
    connection.close()
    result = refold("verify", journal)
    assert result.exit_code == 3
    assert "reordered at record 7" in result.stderr


def test_verify_finds_a_tail_cut_off_together_with_its_head(tmp_path, original):
    lives, _ = eventful_lives()
    write_journal(tmp_path / "cut.db", [lives[0], lives[1][:-5]])
    assert refold("verify", tmp_path / "cut.db").exit_code == 0
    result = refold("verify", "--head", format_head(original[1]), tmp_path / "cut.db")
    assert result.exit_code == 3
    assert "truncated" in result.stderr
    other = f"{original[1].position - 20}:{'0' * 64}"
    assert refold("verify", "--head", other, original[0]).exit_code == 3


def test_verify_says_which_law_is_violated_where(tmp_path):
    lives, _ = eventful_lives()
    lives[1][-2] = [StateDigest(digest="f" * 64)]
    write_journal(tmp_path / "j.db", lives)
    result = refold("verify", tmp_path / "j.db")
    assert result.exit_code == 1
    assert_one_line_and_a_hint(result.stderr)
    assert f"violated at record {len(lives[0]) + len(lives[1]) - 2}" in result.stderr
    assert "L11" in result.stderr
    (row,) = rows(refold("verify", "--json", tmp_path / "j.db").stdout)
    assert (row["ok"], row["law"]) == (False, "L11")


def test_show_of_a_journal_that_contradicts_itself_is_unreadable_not_a_bug(tmp_path):
    lives, _ = eventful_lives()
    record = next(r for r in lives[0] if type(r[0]) is OutputDelivered)
    record.append(record[0])
    write_journal(tmp_path / "j.db", lives)
    result = refold("show", tmp_path / "j.db")
    assert result.exit_code == 3
    assert_one_line_and_a_hint(result.stderr)


@pytest.mark.parametrize("head", ["", "x", "12", "12:abc", "-1:" + "0" * 64, "1:" + "g" * 64])
def test_a_head_that_is_none_is_refused(journal, head):
    result = refold("verify", "--head", head, journal)
    assert result.exit_code == 2
    assert_one_line_and_a_hint(result.stderr)


# -- migrate ----------------------------------------------------------------------------------------------------------


def test_migrate_creates_a_journal_and_leaves_a_current_one(tmp_path):
    path = tmp_path / "new.db"
    assert refold("migrate", path).stdout.strip().endswith("has today's tables now")
    assert refold("migrate", path).stdout.strip().endswith("is current")
    assert refold("migrate", "--check", path).exit_code == 0
    (row,) = rows(refold("migrate", "--json", path).stdout)
    assert row["outcome"] == "current"
    assert row["revision"]


def test_migrate_check_tells_without_touching(tmp_path):
    path = tmp_path / "old.db"
    path.touch()
    result = refold("migrate", "--check", path)
    assert result.exit_code == 1
    assert_one_line_and_a_hint(result.stderr)
    assert path.stat().st_size == 0


# -- which journal, and how it is shown -------------------------------------------------------------------------------


def test_the_journal_is_an_argument_or_the_variable_or_the_default(journal, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    by_argument = refold("log", journal).stdout
    assert refold("log").stdout == by_argument
    assert refold("log", REFOLD_JOURNAL=str(journal)).stdout == by_argument
    assert refold("log", f"sqlite:///{journal}").stdout == by_argument
    monkeypatch.chdir(tmp_path.parent)
    assert refold("log").exit_code == 3


def test_an_empty_journal_reads_as_empty(tmp_path):
    path = tmp_path / "empty.db"
    refold("migrate", path)
    assert (refold("log", path).exit_code, refold("log", path).stdout) == (0, "")
    assert "empty" in refold("show", path).stdout
    assert rows(refold("show", "--json", path).stdout) == [{"schema": "refold.show/1", "position": None}]
    verified = refold("verify", path)
    assert (verified.exit_code, verified.stdout.startswith(f"empty: no record is in {path}")) == (0, True)
    (report,) = rows(refold("verify", "--json", path).stdout)
    assert (report["ok"], report["is_empty"], report["num_records"]) == (True, True, 0)
    assert refold("show", "--at", 0, path).exit_code == 1
    assert refold("request", "r", path).exit_code == 1


def test_a_folder_of_segments_that_was_emptied_is_verified_as_empty_and_not_as_whole(tmp_path):
    folder = tmp_path / "plain"
    assert refold("run", "--model", "simulated", "hello", "--journal", f"{folder}/").exit_code == 0
    assert rows(refold("verify", "--json", folder).stdout)[0]["is_empty"] is False
    shutil.rmtree(folder / "main")
    verified = refold("verify", folder)
    assert verified.exit_code == 0
    assert "empty: no record is in" in verified.stdout
    assert "whole" not in verified.stdout


def test_colours_are_for_those_who_want_them(journal):
    assert "\x1b[" in refold("log", "-n", 3, journal, FORCE_COLOR="1").stdout
    assert "\x1b[" not in refold("log", "-n", 3, journal, NO_COLOR="1").stdout
    assert "\x1b[" not in refold("show", journal).stdout


def test_reading_writes_nothing(journal):
    before = journal.stat().st_mtime_ns, journal.read_bytes()
    time.sleep(0.01)
    for arguments in (("log",), ("show",), ("verify",), ("request", "req-1")):
        assert refold(*arguments, journal).exit_code == 0
    assert (journal.stat().st_mtime_ns, journal.read_bytes()) == before
