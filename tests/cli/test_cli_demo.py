"""`refold demo`: an engine is really killed, and every number is really counted."""

import shlex
import sys

import pytest

from refold.engine.cli.demo_prompts import CONVERSATIONS
from refold.engine.cli.demo_serving import read_receipts
from refold.engine.cli.demo_summary import summarize
from refold.engine.history.receipts import Receipt
from refold.journal.events import RequestPreempted, StaleOutputConsumed
from tests.cli.command import assert_one_line_and_a_hint, finished, refold, rows


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """One demo of the simulated model, as a process of its own."""
    folder = tmp_path_factory.mktemp("demo")
    status, stdout, stderr = finished("demo", "--model", "simulated", cwd=folder)
    assert status == 0, stderr
    return folder, stdout, stderr


@pytest.fixture(scope="module")
def summary(demo):
    folder = demo[0] / "demo-output"
    before, after = read_receipts(folder / "seen-before.jsonl"), read_receipts(folder / "seen-after.jsonl")
    return summarize(str(folder / "demo.db"), before, after)


def test_the_demo_says_what_happened_in_a_few_lines(demo):
    _, stdout, stderr = demo
    assert "Nothing was lost, nothing came twice." in stdout
    rows_shown = {line.split("  ")[0]: line for line in stdout.splitlines() if line and not line.startswith(" ")}
    expected = ["requests", "tokens", "preemptions", "killed", "recovered", "lost", "duplicated", "verified", "journal"]
    assert set(expected) | {"stale tokens", "try next"} <= set(rows_shown)
    assert rows_shown["lost"].split()[1] == rows_shown["duplicated"].split()[1] == "0"
    assert len(stdout.splitlines()) < 30
    assert "\x1b" not in stdout
    assert "SIGKILL" in stderr


def test_the_commands_that_it_names_work_as_printed(demo):
    folder, stdout, _ = demo
    commands = [line.split("  # ")[0].strip() for line in stdout.splitlines() if "  # " in line]
    assert len(commands) == 3
    for command in commands:
        words = shlex.split(command)
        assert words[:3] == [sys.executable, "-m", "refold"]
        status, output, stderr = finished(*words[3:], cwd=folder)
        assert status == 0, stderr
        assert output


def test_the_engine_was_killed_at_work_and_the_rest_was_recovered(demo, summary):
    assert summary.requests == summary.finished_requests == len(CONVERSATIONS) >= 16
    assert summary.steps_in_flight_at_kill >= 1
    assert 0.3 < summary.tokens_before_kill / summary.tokens < 0.8
    assert 1 <= summary.recovered_requests < summary.requests
    assert (summary.lost_tokens, summary.duplicated_tokens, summary.wrong_tokens) == (0, 0, 0)


def test_the_pool_is_tight_enough_to_preempt_with_output_in_flight(demo, summary):
    events = rows(refold("log", "--json", demo[0] / "demo-output" / "demo.db").stdout)
    kinds = [row["event"]["type"] for row in events]
    assert summary.preemptions == kinds.count(RequestPreempted.__name__) >= 1
    assert summary.stale_tokens_delivered + summary.stale_tokens_dropped >= 1
    assert StaleOutputConsumed.__name__ in kinds


def test_the_journal_of_a_demo_verifies(demo, summary):
    path = demo[0] / "demo-output" / "demo.db"
    (verdict,) = rows(refold("verify", "--json", "--head", summary.head, path).stdout)
    assert verdict["ok"]
    assert verdict["num_engines"] == 2
    assert verdict["totals"]["tokens"] == summary.tokens
    assert verdict["num_events"] == summary.events
    assert path.stat().st_size == summary.journal_bytes


@pytest.mark.parametrize("fault", ["lose", "repeat", "change"])
def test_a_demo_that_went_wrong_would_say_so(demo, fault):
    folder = demo[0] / "demo-output"
    before, after = read_receipts(folder / "seen-before.jsonl"), read_receipts(folder / "seen-after.jsonl")
    place = next(i for i, receipt in enumerate(after) if receipt.token_ids)
    if fault == "lose":
        del after[place]
    elif fault == "repeat":
        after.insert(place, after[place])
    else:
        after[place] = Receipt(after[place].request_id, after[place].index, [t + 1 for t in after[place].token_ids])
    summary = summarize(str(folder / "demo.db"), before, after)
    assert not summary.is_clean
    assert bool(summary.lost_tokens) == (fault == "lose")
    assert bool(summary.duplicated_tokens) == (fault == "repeat")
    assert bool(summary.wrong_tokens) == (fault == "change")


def test_a_demo_again_replaces_the_last_one_and_nothing_else(demo, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo-output").mkdir()
    (tmp_path / "demo-output" / "mine.txt").write_text("keep me")
    (tmp_path / "demo-output" / "demo.db").write_text("an old demo")
    result = refold("demo", "--model", "simulated", "--json")
    assert result.exit_code == 0, result.stderr
    (row,) = rows(result.stdout)
    assert row["schema"] == "refold.demo/1"
    assert row["lost_tokens"] == row["duplicated_tokens"] == 0
    assert (tmp_path / "demo-output" / "mine.txt").read_text() == "keep me"


def test_a_folder_that_holds_a_journal_is_not_overwritten(tmp_path):
    (tmp_path / "demo.db").write_text("precious")
    result = refold("demo", "--model", "simulated", "--keep", tmp_path)
    assert result.exit_code == 2
    assert_one_line_and_a_hint(result.stderr)
    assert (tmp_path / "demo.db").read_text() == "precious"


@pytest.mark.parametrize(("arguments", "status"), [(("--keep", "/proc/none"), 3), (("--model", "nonesuch"), 2)])
def test_a_demo_that_cannot_start_says_why(arguments, status, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = () if "--model" in arguments else ("--model", "simulated")
    result = refold("demo", *model, *arguments)
    assert result.exit_code == status, result.stderr
    assert_one_line_and_a_hint(result.stderr)


def test_a_child_that_fails_is_reported_with_its_last_word(tmp_path, monkeypatch):
    import refold.engine.cli.demo as demo_module

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo_module, "WINDOW", 99)
    result = refold("demo", "--model", "simulated")
    assert result.exit_code == 70
    assert "max_in_flight_steps" in result.stderr
