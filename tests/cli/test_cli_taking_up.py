"""The same `refold run` again: what an interrupted run left is taken up, what was done in good order is asked anew."""

import json
from pathlib import Path

import pytest

from refold import Engine, SamplingParams
from refold.engine.engine import would_submit
from refold.journal.codec import decode
from refold.journal.events import RequestSubmitted
from refold.journal.stores import open_reader
from tests.cli.command import process, refold, rows
from tests.kit.engines import eventually, older_rules_for_ids

FAST, SLOW = ("--model", "simulated?eos=-1"), ("--model", "simulated?eos=-1&step_ms=5")
SAMPLING = ("--max-tokens", "30", "--temperature", "0.5")


def run(journal, *arguments, **options):
    return refold("run", *FAST, "--journal", journal, *arguments, **options)


def submitted(journal) -> list[str]:
    """The ids of all requests that the journal has, in order."""
    reader = open_reader(str(journal))
    try:
        events = [event for record in reader.read() for event in decode(record)]
    finally:
        reader.close()
    return [event.request_id for event in events if isinstance(event, RequestSubmitted)]


def kill_when(journal: Path, text: str, times: int, *arguments: str) -> None:
    """Run it one request after the other, and kill it once the log has `text` so often."""
    child = process("run", *SLOW, "--max-num-seqs", "1", "--journal", str(journal), *arguments)
    eventually(lambda: journal.exists() and refold("log", journal).stdout.count(text) >= times, timeout_s=60)
    child.kill()
    child.communicate()


def outputs(journal) -> dict[str, list[int]]:
    return {
        name: rows(refold("request", name, "--json", journal).stdout)[0]["output_token_ids"]
        for name in submitted(journal)
    }


def test_the_same_command_after_a_kill_prints_what_was_finished_and_finishes_the_rest(tmp_path):
    journal = tmp_path / "x.db"
    prompts = [f"prompt {number}" for number in range(4)]
    kill_when(journal, "finished: length", 2, *SAMPLING, *prompts)
    again = run(journal, *SAMPLING, "--json", *prompts)
    assert again.exit_code == 0, again.stderr
    assert "taken up: 4 of 4 prompts in the journal already" in again.stderr
    assert submitted(journal) == [f"run1-{number}" for number in range(1, 5)], "nothing was submitted twice"
    assert {row["request_id"]: row["token_ids"] for row in rows(again.stdout)} == outputs(journal)
    assert refold("verify", journal).exit_code == 0


def test_what_a_run_had_not_submitted_when_it_was_killed_goes_under_the_same_run(tmp_path):
    journal, prompts = tmp_path / "x.db", [f"prompt {number}" for number in range(3)]
    kill_when(journal, "came back", 2, *SAMPLING, *prompts[:2])
    result = run(journal, *SAMPLING, *prompts)
    titles = [line for line in result.stdout.splitlines() if line.startswith("== ")]
    assert titles == [f"== run1-{number + 1} (30 tokens, length): prompt {number}" for number in range(3)]


def test_the_same_command_after_a_run_in_good_order_asks_anew(tmp_path):
    for _ in range(2):
        assert run(tmp_path / "x.db", "--max-tokens", 2, "Why is the sky blue?").exit_code == 0
    assert submitted(tmp_path / "x.db") == ["run1-1", "run2-1"]


def test_a_run_that_was_carried_on_to_its_end_is_done(tmp_path):
    journal = tmp_path / "x.db"
    kill_when(journal, "came back", 2, *SAMPLING, "hello")
    for _ in range(2):
        assert run(journal, *SAMPLING, "hello").exit_code == 0
    assert submitted(journal) == ["run1-1", "run3-1"]


def test_a_run_that_finished_but_ended_without_a_word_is_printed_again_and_not_computed(tmp_path):
    journal = tmp_path / "x.db"
    kill_when(journal, "finished: length", 1, *SAMPLING, "short", "long")
    without_prompts = run(journal, "--json")
    assert [row["request_id"] for row in rows(without_prompts.stdout)] == ["run1-2"]
    assert submitted(journal) == ["run1-1", "run1-2"]
    other = tmp_path / "killed at the end.db"
    child = process("run", *SLOW, "--journal", str(other), *SAMPLING, "only", "--json")
    eventually(lambda: other.exists() and "finished: length" in refold("log", other).stdout, timeout_s=60)
    child.kill()
    child.communicate()
    if "closed: closed" not in refold("log", other).stdout:
        assert run(other, *SAMPLING, "only").exit_code == 0
        assert submitted(other) == ["run1-1"]


@pytest.mark.parametrize(
    "change", [("other",), ("hello", "--max-tokens", 4), ("hello", "--seed", 1), ("hello", "--no-chat")]
)
def test_another_command_after_a_kill_takes_nothing_up(tmp_path, change):
    journal = tmp_path / "x.db"
    kill_when(journal, "came back", 2, *SAMPLING, "hello")
    result = run(journal, *SAMPLING, *change, "--json")
    assert result.exit_code == 0, result.stderr
    assert submitted(journal) == ["run1-1", "run2-1"]
    assert {row["request_id"] for row in rows(result.stdout)} == {"run1-1", "run2-1"}


LINES = "".join(json.dumps({"prompt": f"prompt {name}", "request_id": name}) + "\n" for name in "abc")


def test_prompts_with_ids_are_taken_up_whether_or_not_they_were_interrupted(tmp_path):
    journal, file = tmp_path / "x.db", tmp_path / "prompts.jsonl"
    file.write_text(LINES)
    kill_when(journal, "finished: length", 1, *SAMPLING, "--file", str(file))
    first, second = (run(journal, *SAMPLING, "--json", "--file", file) for _ in range(2))
    assert (first.exit_code, second.exit_code) == (0, 0), first.stderr + second.stderr
    assert sorted(rows(first.stdout), key=str) == sorted(rows(second.stdout), key=str)
    assert submitted(journal) == ["a", "b", "c"]


def test_an_id_that_asked_for_something_else_is_refused_as_taken(tmp_path):
    journal = tmp_path / "x.db"
    asked = {"prompt": "one", "request_id": "a", "sampling": {"max_tokens": 2, "seed": 5}}
    assert run(journal, "-", stdin=json.dumps(asked)).exit_code == 0
    assert run(journal, "-", stdin=json.dumps(asked)).exit_code == 0
    for other in (
        {"prompt": "two"},
        {"sampling": {"max_tokens": 3, "seed": 5}},
        {"sampling": {"max_tokens": 2, "seed": 6}},
    ):
        result = run(journal, "-", stdin=json.dumps(asked | other))
        assert result.exit_code == 2
        assert "request id 'a' is taken" in result.stderr


TWICE = f"{json.dumps({'prompt': 'one', 'request_id': 'a'})}\n" * 2 + "two\n"


def test_a_line_that_is_given_twice_with_one_id_is_one_request_and_printed_once(tmp_path):
    journal = tmp_path / "x.db"
    for _ in range(2):
        result = run(journal, "--max-tokens", 4, "--json", "-", stdin=TWICE)
        assert result.exit_code == 0, result.stderr
        assert [row["request_id"] for row in rows(result.stdout)].count("a") == 1
        assert len(rows(result.stdout)) == 2
        assert "given before, with the same id: stdin line 2; what has one id is one request" in result.stderr
    assert submitted(journal) == ["a", "run1-3", "run2-3"]
    assert "taken up: 2 of 3 prompts" in result.stderr


def test_a_line_with_the_id_of_one_before_it_that_asks_for_something_else_is_refused_as_taken(tmp_path):
    asked = {"prompt": "one", "request_id": "a", "sampling": {"max_tokens": 2, "n": 2}}
    for number, other in enumerate(({"prompt": "two"}, {"priority": 1}, {"sampling": asked["sampling"] | {"seed": 6}})):
        lines = f"{json.dumps(asked)}\n{json.dumps(asked | other)}\n"
        result = run(tmp_path / f"{number}.db", "-", stdin=lines)
        assert (result.exit_code, result.stderr.count("is taken")) == (2, 1), other
        assert "given before" not in result.stderr


def test_a_line_is_refused_as_often_as_it_is_given(tmp_path):
    journal = tmp_path / "x.db"
    assert run(journal, "-", stdin=json.dumps({"prompt": "another", "request_id": "a"})).exit_code == 0
    result = run(journal, "--max-tokens", 4, "-", stdin=TWICE)
    assert result.exit_code == 2
    assert result.stderr.count("'a' is taken") == 2


def test_completions_that_were_not_submitted_yet_are_submitted_with_their_own_seeds(tmp_path, monkeypatch):
    asked = {"prompt": "one", "request_id": "a", "sampling": {"max_tokens": 4, "seed": 5, "n": 3, "temperature": 1}}
    whole = run(tmp_path / "whole.db", "--json", "-", stdin=json.dumps(asked))
    with older_rules_for_ids(monkeypatch), Engine("simulated?eos=-1", tmp_path / "part.db") as engine:
        first = would_submit(engine, [1], SamplingParams(seed=5, n=3))[0].sampling.seed
        chat = [{"role": "user", "content": "one"}]
        engine.run([chat], SamplingParams(max_tokens=4, seed=first), request_ids=["a#0"])
    part = run(tmp_path / "part.db", "--json", "-", stdin=json.dumps(asked))
    assert part.exit_code == 0, part.stderr
    assert {row["request_id"]: row["token_ids"] for row in rows(part.stdout)} == outputs(tmp_path / "whole.db")
    assert len(rows(whole.stdout)) == 3
    assert submitted(tmp_path / "part.db") == ["a#0", "a#1", "a#2"]


ALIKE = '{"prompt": "a", "request_id": "a"}\n{"prompt": "x", "request_id": "a#0"}\n'


def test_an_id_that_looks_like_a_completion_is_refused_and_the_others_are_served(tmp_path):
    result = run(tmp_path / "x.db", "--max-tokens", 4, "--json", "-", stdin=ALIKE)
    assert result.exit_code == 2
    assert [row["request_id"] for row in rows(result.stdout) if "request_id" in row] == ["a"]
    assert "stdin line 2: request_id is 'a#0': # and a number at the end tell the completions" in result.stderr
    assert submitted(tmp_path / "x.db") == ["a"]


def test_such_ids_of_an_earlier_engine_are_found_by_the_lines_that_gave_them(tmp_path, monkeypatch):
    journal = tmp_path / "x.db"
    with older_rules_for_ids(monkeypatch):
        run(journal, "--max-tokens", 4, "-", stdin=ALIKE)
    assert submitted(journal) == ["a", "a#0"]
    for line, names in ((ALIKE, ["a", "a#0"]), (ALIKE.splitlines()[0], ["a"]), (ALIKE.splitlines()[1], ["a#0"])):
        result = run(journal, "--max-tokens", 4, "--json", "-", stdin=line)
        assert (result.exit_code, [row["request_id"] for row in rows(result.stdout)]) == (0, names), result.stderr
    assert "== a (4 tokens" in run(journal, "--max-tokens", 4, "-", stdin=ALIKE).stdout
    assert submitted(journal) == ["a", "a#0"]
    other = run(journal, "--max-tokens", 4, "-", stdin='{"prompt": "another", "request_id": "a#0"}')
    assert (other.exit_code, "request_id is 'a#0'" in other.stderr) == (2, True)


def test_such_ids_of_an_earlier_engine_that_was_killed_are_finished(tmp_path, monkeypatch):
    journal = tmp_path / "x.db"
    with older_rules_for_ids(monkeypatch), Engine("simulated?eos=-1&step_ms=5", journal) as engine:
        for name in ("a", "a#0"):
            engine.enqueue([1], SamplingParams(max_tokens=200), request_id=name)
    result = run(journal, "--json")
    assert [(row["request_id"], len(row["token_ids"])) for row in rows(result.stdout)] == [("a", 200), ("a#0", 200)]
    assert refold("verify", journal).exit_code == 0


def test_a_line_whose_id_several_completions_have_is_refused_and_nothing_of_it_is_started(tmp_path):
    line = {"prompt": "same", "request_id": "x"}
    lines = "".join(json.dumps(line | {"sampling": {"n": n}}) + "\n" for n in (2, 3, 1))
    result = run(tmp_path / "x.db", "--max-tokens", 3, "--temperature", 1, "--json", "-", stdin=lines)
    assert (result.exit_code, result.stderr.count("request id 'x' is taken: the journal has 'x#0'")) == (2, 2)
    assert [row["request_id"] for row in rows(result.stdout) if "request_id" in row] == ["x#0", "x#1"]
    assert submitted(tmp_path / "x.db") == ["x#0", "x#1"]


def test_a_prompt_without_an_id_never_goes_under_a_name_that_completions_have(tmp_path):
    journal = tmp_path / "x.db"
    file = tmp_path / "prompts.txt"
    file.write_text('{"prompt": "one", "sampling": {"n": 2}}\ntwo\n')
    kill_when(journal, "came back", 2, *SAMPLING, "--file", str(file))
    file.write_text("one\ntwo\n")
    result = run(journal, *SAMPLING, "--file", file)
    assert result.exit_code == 0, result.stderr
    assert submitted(journal) == ["run1-1#0", "run1-1#1", "run1-2", "run2-1"]


def test_a_long_journal_is_not_read_for_a_new_run(tmp_path, monkeypatch):
    import refold.engine.cli.earlier as earlier

    assert run(tmp_path / "x.db", "--max-tokens", 2, "hello").exit_code == 0
    monkeypatch.setattr(earlier, "_events", lambda *_: pytest.fail("the journal was read"))
    named = json.dumps({"prompt": "named", "request_id": "new"})
    assert run(tmp_path / "x.db", "--max-tokens", 2, "hello", "-", stdin=named).exit_code == 0


def test_lines_that_are_no_prompts_keep_their_place_for_the_next_run(tmp_path):
    journal, file = tmp_path / "x.db", tmp_path / "prompts.txt"
    file.write_text("first\n{bad\nthird\n")
    kill_when(journal, "came back", 2, *SAMPLING, "--file", str(file))
    file.write_text("first\nsecond\nthird\n")
    assert run(journal, *SAMPLING, "--file", file).exit_code == 0
    assert submitted(journal) == ["run1-1", "run1-3", "run1-2"]
