"""`refold run`: what it prints, what it keeps, and how it goes on after a kill."""

import asyncio
import json
import os
import signal
import subprocess
import time

import pytest

from refold import Engine, SamplingParams
from tests.cli.command import finished, process, refold, rows
from tests.kit.engines import eventually

MODEL = ("--model", "simulated?eos=-1")


@pytest.fixture
def journal(tmp_path):
    return tmp_path / "x.db"


def run(journal, *arguments, model=MODEL, **options):
    return refold("run", *model, "--journal", journal, *arguments, **options)


def test_a_single_completion_is_all_there_is_on_stdout(journal):
    result = run(journal, "--max-tokens", 5, "hello")
    assert result.exit_code == 0, result.stderr
    assert len(result.stdout.splitlines()) == 1
    assert len(result.stdout.split()) == 5
    assert str(journal) in result.stderr
    assert "refold request run1-1" in result.stderr


def test_several_completions_come_in_the_order_of_the_prompts(journal):
    result = run(journal, "--max-tokens", 3, "first prompt", "second", "third")
    titles = [line for line in result.stdout.splitlines() if line.startswith("== ")]
    assert titles == [
        "== run1-1 (3 tokens, length): first prompt",
        "== run1-2 (3 tokens, length): second",
        "== run1-3 (3 tokens, length): third",
    ]


def test_json_is_one_object_per_completion_and_equals_the_journal(journal):
    result = run(journal, "--max-tokens", 4, "--json", "a", "b")
    found = {row["request_id"]: row for row in rows(result.stdout)}
    assert set(found) == {"run1-1", "run1-2"}
    for request_id, row in found.items():
        assert row["schema"] == "refold.run/1"
        assert row["finish_reason"] == "length"
        (life,) = rows(refold("request", request_id, "--json", journal).stdout)
        assert life["output_token_ids"] == row["token_ids"]
        assert life["text"] == row["text"]


def test_prompts_come_from_arguments_a_file_and_stdin(journal, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("\ufefffrom the file\r\n\n   \nsecond line\n", encoding="utf-8")
    result = run(journal, "--max-tokens", 1, "argument", "-", "--file", file, stdin="from stdin\n")
    titles = [line.split(": ")[1] for line in result.stdout.splitlines() if line.startswith("== ")]
    assert titles == ["argument", "from stdin", "from the file", "second line"]
    assert len(run(journal, "--max-tokens", 1, "--json", "--file", "-", stdin="x\ny").stdout.splitlines()) == 2


def test_json_lines_say_more_than_text(journal):
    lines = (
        '{"prompt": "a", "sampling": {"max_tokens": 2, "temperature": 0.5, "seed": 7}, "request_id": "mine", "priority": 3}\n'
        '{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}\n'
        '{"prompt": [5, 6, 7], "sampling": {"max_tokens": 1}}\n'
    )
    result = run(journal, "--max-tokens", 4, "--json", "--policy", "priority", "-", stdin=lines)
    assert result.exit_code == 0, result.stderr
    assert {len(row["token_ids"]) for row in rows(result.stdout)} == {2, 4, 1}
    submitted = {
        row["event"]["request_id"]: row["event"]
        for row in rows(refold("log", "--json", "--kind", "RequestSubmitted", journal).stdout)
    }
    assert submitted["mine"]["sampling"].items() >= {"seed": 7, "max_tokens": 2, "temperature": 0.5}.items()
    assert submitted["mine"]["priority"] == 3
    assert submitted["run1-3"]["prompt_token_ids"] == [5, 6, 7]
    assert bytes(submitted["run1-2"]["prompt_token_ids"]).decode().count("s") >= 1


def test_what_is_wrong_with_a_text_is_said_of_the_prompt_and_of_a_message_only_where_one_was_given(journal):
    lines = 'a\0b\n{"prompt": "a\\u0000b"}\n{"messages": [{"role": "user", "content": "a\\u0000b"}]}\n'
    for option in ("--chat", "--no-chat"):
        told = run(journal, option, "-", stdin=lines).stderr.splitlines()[::2]
        whose = [line.partition(": ")[2].partition(": ")[2].partition(" has ")[0] for line in told]
        assert whose == ["the prompt", "the prompt", "content of message 0"]


def test_the_chat_template_can_be_left_out(journal):
    run(journal, "--max-tokens", 1, "--no-chat", "hi")
    run(journal, "--max-tokens", 1, "--chat", "hi")
    run(journal, "--max-tokens", 1, "hi")
    events = rows(refold("log", "--json", "--kind", "RequestSubmitted", journal).stdout)
    plain, chat, default = (row["event"]["prompt_token_ids"] for row in events)
    assert len(plain) < len(chat)
    assert chat == default


def test_options_reach_the_engine(journal):
    options = (
        "--num-blocks",
        20,
        "--block-size",
        8,
        "--max-num-seqs",
        3,
        "--max-num-batched-tokens",
        32,
        "--window",
        3,
    )
    assert run(journal, *options, "--max-tokens", 1, "hi").exit_code == 0
    (row,) = rows(refold("log", "--json", "--kind", "EngineOpened", journal).stdout)
    config = row["event"]["config"]
    expected = {
        "num_blocks": 20,
        "block_size": 8,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 32,
        "max_in_flight_steps": 3,
    }
    assert {name: config[name] for name in expected} == expected


def test_a_title_is_one_line_and_harmless(journal):
    result = run(journal, "--max-tokens", 1, "line one\nline two \x1b[31m" + "x" * 100, "other")
    title = result.stdout.splitlines()[0]
    assert title.isprintable()
    assert len(title) < 120


def test_after_a_kill_the_same_journal_is_finished_without_loss_or_repetition(tmp_path):
    prompts = [f"prompt {i}" for i in range(6)]
    sampling = ("--max-tokens", "80", "--seed", "11")
    whole = {row["request_id"]: row for row in rows(run(tmp_path / "whole.db", *sampling, "--json", *prompts).stdout)}
    path = tmp_path / "killed.db"
    slow = ("--model", "simulated?eos=-1&step_ms=5")
    child = process("run", *slow, "--journal", str(path), *sampling, *prompts)
    wait_for_tokens(path, 100)
    child.kill()
    child.communicate()
    assert refold("verify", path).exit_code == 0
    again = run(path, "--json")
    assert again.exit_code == 0, again.stderr
    assert "6 unfinished requests" in again.stderr
    assert "ended without a word" in again.stderr
    rest = {row["request_id"]: row for row in rows(again.stdout)}
    assert {i: row["token_ids"] for i, row in rest.items()} == {i: row["token_ids"] for i, row in whole.items()}
    assert refold("verify", path).exit_code == 0
    assert run(path).exit_code == 2, "nothing is left"


def test_after_ctrl_c_the_same_command_submits_nothing_twice_though_all_that_was_submitted_had_finished(tmp_path):
    path, file = tmp_path / "x.db", tmp_path / "prompts.txt"
    file.write_text("".join(f"prompt {i}\n" for i in range(400)))
    arguments = ("--model", "simulated", "--journal", str(path), "--max-tokens", "1", "--file", str(file), "--json")
    child = process("run", *arguments)
    wait_for_tokens(path, 20)
    child.send_signal(signal.SIGINT)
    _, stderr = child.communicate(timeout=60)
    assert child.returncode == 130, stderr
    assert b"the same command" in stderr
    again = refold("run", *arguments)
    assert again.exit_code == 0, again.stderr
    assert "taken up: " in again.stderr
    assert [row["request_id"] for row in rows(again.stdout)] == [f"run1-{i}" for i in range(1, 401)]
    submitted = rows(refold("log", "--json", "--kind", "RequestSubmitted", path).stdout)
    assert len(submitted) == 400
    assert refold("run", *arguments).stdout != again.stdout, "that run is done: who asks again wants it again"


def test_sigterm_ends_a_run_in_good_order_as_ctrl_c_does(tmp_path):
    path = tmp_path / "x.db"
    model = ("--model", "simulated?eos=-1&step_ms=5", "--worker", "process")
    child = process("run", *model, "--journal", str(path), "--max-tokens", "2000", "one", start_new_session=True)
    wait_for_tokens(path, 5)
    os.killpg(child.pid, signal.SIGTERM)  # as systemd does: to everybody
    _, stderr = child.communicate(timeout=60)
    assert child.returncode == 143, stderr
    told = stderr.decode().splitlines()
    assert told[-3] == "terminated: closing the journal when the steps in flight are done; once more ends it at once"
    assert told[-2] == "refold: terminated"
    assert told[-1].startswith(
        "  hint: the journal is whole: `refold run --model 'simulated?eos=-1&step_ms=5' --journal"
    )
    (closed,) = rows(refold("log", "--json", "--kind", "EngineClosed", path).stdout)
    assert closed["event"]["reason"] == "interrupted"
    assert "WorkerLost" not in refold("log", "--json", path).stdout


def wait_for_tokens(path, num_tokens, timeout=30):
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        events = rows(refold("log", "--json", "--kind", "OutputDelivered", path).stdout) if path.exists() else []
        if sum(len(row["event"]["token_ids"]) for row in events) >= num_tokens:
            return
        time.sleep(0.02)
    raise AssertionError(f"no {num_tokens} tokens in {timeout} s")


def test_new_prompts_and_unfinished_ones_are_served_together(tmp_path):
    path = tmp_path / "x.db"
    child = process("run", "--model", "simulated?eos=-1&step_ms=5", "--journal", str(path), "--max-tokens", "60", "old")
    wait_for_tokens(path, 5)
    child.kill()
    child.communicate()
    result = run(path, "--max-tokens", 2, "new")
    assert result.exit_code == 0, result.stderr
    titles = [line for line in result.stdout.splitlines() if line.startswith("== ")]
    assert titles == ["== run1-1 (60 tokens, length): left by an earlier run", "== run2-1 (2 tokens, length): new"]


def test_unfinished_requests_of_another_model_are_not_touched(tmp_path):
    path = tmp_path / "x.db"
    child = process("run", "--model", "simulated?eos=-1&step_ms=5", "--journal", str(path), "--max-tokens", "60", "old")
    wait_for_tokens(path, 5)
    child.kill()
    child.communicate()
    other = refold("run", "--model", "simulated?vocab=99", "--journal", path, "new")
    assert other.exit_code == 2
    assert "another journal" in other.stderr
    assert refold("verify", path).exit_code == 0


def test_a_journal_in_memory_works_and_is_gone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run("memory:", "--max-tokens", 2, "hi")
    assert result.exit_code == 0, result.stderr
    assert not list(tmp_path.iterdir())


def test_it_runs_as_a_module_too(tmp_path):
    status, stdout, stderr = finished("run", *MODEL, "--journal", str(tmp_path / "x.db"), "--max-tokens", "2", "hi")
    assert status == 0, stderr
    assert len(stdout.split()) == 2


def test_an_idle_session_keeps_nobody_waiting(journal):
    with Engine(model="simulated?eos=-1", journal=journal) as engine:
        asyncio.run(one_turn(engine))
    assert run(journal, "--max-tokens", 4, "hello").exit_code == 0


async def one_turn(engine):
    session = await engine.open_session([1, 2, 3], SamplingParams(max_tokens=2))
    async for _ in session.turn():
        pass


def test_an_engine_that_closed_is_not_told_as_a_loss(journal):
    with Engine(model="simulated?eos=-1&step_ms=2", journal=journal) as engine:
        engine.enqueue([1, 2, 3], SamplingParams(max_tokens=40), request_id="across")
        eventually(lambda: engine.stats().tokens > 3)
    assert "closed in good order" in refold("show", journal).stdout
    assert "worker" not in refold("show", journal).stdout
    assert run(journal).exit_code == 0
    assert "engine 1 had closed; the next one computes it again" in refold("request", "across", journal).stdout
    assert "was closed; 1 unfinished request" in run_after_close(journal)
    for verb in (("show",), ("request", "across"), ("log",), ("verify",)):
        assert " lost" not in refold(*verb, journal).stdout.replace("0 workers lost", ""), verb
    (life,) = rows(refold("request", "across", "--json", journal).stdout)
    assert life["num_workers_lost"] == 0
    (verdict,) = rows(refold("verify", "--json", journal).stdout)
    assert verdict["totals"]["lost_workers"] == 0


def test_what_was_left_is_shown_though_it_has_ended_before_anybody_asked(journal, monkeypatch):
    import refold.engine.cli.run as run_module

    named = run_module._name
    monkeypatch.setattr(run_module, "_name", lambda *arguments: (time.sleep(0.5), named(*arguments)))
    ids = [f"left-{number}" for number in range(5)]
    with Engine(model="simulated?eos=-1", journal=journal) as engine:
        engine.pause()
        for request_id in ids:
            engine.enqueue([1, 2, 3], SamplingParams(max_tokens=1), request_id=request_id)
    result = run(journal)
    assert result.exit_code == 0, result.stderr
    assert [line.split()[1] for line in result.stdout.splitlines() if line.startswith("== ")] == ids


def run_after_close(journal):
    with Engine(model="simulated?eos=-1&step_ms=2", journal=journal) as engine:
        engine.enqueue([1, 2, 3], SamplingParams(max_tokens=40), request_id="again")
    return run(journal).stderr


def test_greedy_completions_of_one_prompt_are_said_to_be_alike(journal):
    greedy, drawn = (run(journal, "-n", 2, "--max-tokens", 2, "--temperature", t, "hello") for t in (0, 0.8))
    assert greedy.exit_code == 0
    assert "the 2 completions of a prompt are alike; give `--temperature 0.8`" in greedy.stderr
    assert "alike" not in drawn.stderr


def test_blanks_before_an_object_in_a_file_of_prompts_make_no_text_of_it(journal, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text(' {"prompt": "one", "request_id": "a"}\n\t{"prompt": "two", "request_id": "b"}\n { no object\n')
    done = run(journal, "--file", file, "--max-tokens", 2, "--json")
    assert done.exit_code == 2
    assert [row["request_id"] for row in rows(done.stdout) if "request_id" in row] == ["a", "b"]
    assert f"{file} line 3" in done.stderr


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{}", "it has neither a prompt nor messages"),
        ('{"request_id": "a"}', "it has neither a prompt nor messages"),
        ('{"prompt": "a", "messages": [{"role": "user", "content": "a"}]}', "it has a prompt and messages"),
        ('\ufeff{"prompt": "two"}', "it begins with a byte order mark (U+FEFF, bytes EF BB BF)"),
        ("\ufefftwo", "it begins with a byte order mark (U+FEFF, bytes EF BB BF)"),
    ],
)
def test_a_line_that_is_no_prompt_is_told_what_is_wrong_with_it(journal, tmp_path, line, told):
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'\ufeff{{"prompt": "one", "request_id": "a"}}\n{line}\n', encoding="utf-8")
    done = run(journal, "--file", file, "--max-tokens", 2, "--json")
    assert done.exit_code == 2
    served, refused = sorted(rows(done.stdout), key=lambda row: "error" in row)
    assert served["request_id"] == "a"
    assert refused["error"].startswith(told)
    assert f"refold: {file} line 2: {told}" in done.stderr


def test_the_way_to_take_a_byte_order_mark_off_works(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('\ufeff{"prompt": "one"}\n\ufefftwo\n', encoding="utf-8")
    shell = subprocess.run(["sed", r"s/^\xef\xbb\xbf//", file], capture_output=True, check=True)
    assert shell.stdout.decode() == '{"prompt": "one"}\ntwo\n'


def test_more_tokens_than_the_model_has_room_for_are_refused_and_a_default_is_cut(tmp_path):
    small = ("run", "--model", "simulated?eos=-1&len=32", "--journal", tmp_path / "x.db", "--no-chat")
    refused = refold(*small, "--max-tokens", 10**9, "twenty characters...")
    assert refused.exit_code == 2
    assert (
        "max_tokens is 1000000000, and the model takes 32 tokens, 20 of them prompt: give at most 12" in refused.stderr
    )
    assert not (tmp_path / "x.db").exists()
    served = refold(*small, "twenty characters...")
    assert served.exit_code == 0, served.stderr
    assert len(served.stdout.split()) == 12


def test_an_answer_stands_under_its_own_prompt_when_another_line_asks_for_the_same_id(tmp_path):
    lines = [
        {"prompt": "first question", "request_id": "d"},
        {"prompt": "second question", "request_id": "d"},
        {"prompt": "x"},
    ]
    (tmp_path / "twice.txt").write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = refold(
        "run",
        "--model",
        "simulated",
        "--journal",
        tmp_path / "j.db",
        "--max-tokens",
        4,
        "--file",
        tmp_path / "twice.txt",
    )
    assert result.exit_code == 2
    assert "first question" in result.stdout
    assert "second question" not in result.stdout
