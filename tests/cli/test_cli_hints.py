"""What the command prints as a command is one: it is run as printed, by a shell, whatever the journal is called."""

import json
import os
import re
import shlex
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from refold.engine.cli.prompts_in import Asked
from refold.engine.cli.submission import Submission
from refold.engine.cli.typed import quoted, typed
from refold.engine.engine import Engine
from refold.engine.sampling_params import SamplingParams
from refold.journal.events import OutputDelivered, StateDigest
from refold.journal.stores import open_reader
from tests.cli.command import BARE, process, refold, rows
from tests.history.journals import eventful_lives, write_journal
from tests.kit.engines import eventually
from tests.kit.started_python import shared

NASTY = [
    'it\'s "mine".db',
    "two  spaces.db",
    "-rf.db",
    "$HOME `id` & ;.db",
    "tab\there\x1b[31m.db",
    "caf\u00e9 \\'.db",
    "--help",
]
COMMAND = re.compile(r"`(refold [^`]*)`")


def printed(text: str) -> list[str]:
    """The commands in it that name a journal or an id; bare verbs are only names."""
    return [command for command in COMMAND.findall(text) if len(command.split()) > 2]


def in_shell(command: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    """Run a printed command as someone who pastes it does. The shell is what counts: its `refold` needn't start Python."""
    there = BARE | {"PATH": f"{shared().folder.name}{os.pathsep}{os.environ['PATH']}"}
    done = ["bash", "-c", command]
    return subprocess.run(done, cwd=folder, env=there, capture_output=True, check=False, text=True, timeout=60)


def change(path: Path, statement: str) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute(statement)
    connection.close()


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    path = tmp_path / "it's damaged.db"
    write_journal(path, eventful_lives()[0])
    return path


@pytest.mark.parametrize("word", [*NASTY, "plain", "", "new\nline", "\udcff"])
def test_a_shell_gives_a_quoted_word_back_as_it_was(word: str) -> None:
    printed_back = subprocess.run(["bash", "-c", f"printf %s {quoted(word)}"], capture_output=True, check=True).stdout
    assert printed_back == word.encode("utf-8", "surrogateescape")
    assert quoted(word).isprintable()


def test_operands_that_look_like_options_come_after_two_dashes() -> None:
    assert typed("log", "-x.db", options=("-n", 3)) == "refold log -n 3 -- -x.db"
    assert typed("request", "--json", "x.db") == "refold request -- --json x.db"
    assert typed("log", "postgresql://ann:s3cret@h/db") == "refold log 'postgresql://ann:***@h/db'"


@pytest.mark.parametrize("name", [name for name in NASTY if "`" not in name])
def test_what_a_run_prints_can_be_pasted(tmp_path: Path, name: str) -> None:
    path = f"./{name}" if name.startswith("tab") else name
    result = refold("run", "--model", "simulated", "--journal", tmp_path / path, "--max-tokens", 2, "hi")
    assert result.exit_code == 0, result.stderr
    (command,) = printed(result.stderr)
    done = in_shell(command, tmp_path)
    assert done.returncode == 0, (command, done.stderr)
    assert done.stdout.startswith("run1-1: finished")


@pytest.mark.parametrize("request_id", ["--json", "it's", "a  b", "$x"])
def test_ids_are_quoted_too(tmp_path: Path, request_id: str) -> None:
    line = json.dumps({"prompt": "x", "request_id": request_id, "sampling": {"max_tokens": 1}})
    result = refold("run", "--model", "simulated", "--journal", tmp_path / "x.db", "-", stdin=line)
    (command,) = printed(result.stderr)
    assert in_shell(command, tmp_path).stdout.startswith(f"{request_id}: finished")


def test_a_journal_in_memory_has_no_command_that_could_read_it() -> None:
    result = refold("run", "--model", "simulated", "--journal", "memory:", "--max-tokens", 1, "hi")
    assert result.exit_code == 0
    assert not printed(result.stderr)


def test_the_head_to_keep_comes_with_its_command(journal: Path) -> None:
    (command,) = printed(refold("verify", journal).stdout)
    assert "--head" in command
    assert in_shell(command, journal.parent).returncode == 0
    change(journal, "DELETE FROM journal_records WHERE position > 50")
    assert in_shell(command, journal.parent).returncode == 3


DAMAGES = {
    "edited": ("UPDATE journal_records SET time_ns = time_ns + 1 WHERE position = 30", 30),
    "deleted": ("DELETE FROM journal_records WHERE position = 30", 30),
    "truncated": ("DELETE FROM journal_records WHERE position >= 50", 50),
    "undecodable": ('UPDATE journal_records SET body = \'[{"type":"Nonsense"}]\' WHERE position = 30', 30),
}
READING = [("log",), ("log", "--json"), ("log", "-n", "400"), ("log", "--reverse"), ("show",), ("request", "req-0")]


@pytest.mark.parametrize("verb", [*READING, ("verify",)], ids=" ".join)
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_said_in_one_line_after_what_is_sound_with_commands_that_work(
    journal: Path, damage: str, verb: tuple[str, ...]
) -> None:
    statement, position = DAMAGES[damage]
    change(journal, statement)
    result = refold(*verb, journal)
    assert result.exit_code == 3, result.stderr
    line, hint = result.stderr.splitlines()
    assert line.startswith("refold: ")
    assert f"record {position}" in line or f"ends at {position}" in line
    assert bool(result.stdout) == (verb != ("verify",))
    commands = printed(hint)
    assert commands
    for command in commands:
        done = in_shell(command, journal.parent)
        assert done.returncode == 0, (command, done.stderr)
        assert int(done.stdout.splitlines()[-1].split()[0]) == position - 1


@pytest.mark.parametrize("verb", ["redact {} req-1", "prove {} 40", "capsule {} {}.capsule", "head {}"])
def test_whatever_verb_meets_damage_the_line_and_the_command_name_the_journal(journal: Path, verb: str) -> None:
    change(journal, DAMAGES["edited"][0])
    result = refold(*[word.format(journal) for word in verb.split()])
    assert result.exit_code == 3, result.stdout
    line, hint = result.stderr.splitlines()
    assert line.startswith(f"refold: {journal}: record 30 ")
    (command,) = printed(hint)
    assert in_shell(command, journal.parent).returncode == 0, command


def test_log_prints_the_records_before_the_damage_and_none_behind_it(journal: Path) -> None:
    whole = refold("log", journal).stdout.splitlines()
    before = [line for line in whole if int(line.split()[0]) < 30]
    change(journal, DAMAGES["edited"][0])
    assert refold("log", journal).stdout.splitlines() == before
    assert refold("log", "-n", 400, "--reverse", journal).stdout.splitlines() == before[::-1]
    assert refold("log", "--until", 29, journal).exit_code == 0
    assert refold("log", "--until", 30, journal).exit_code == 3
    assert refold("log", "--since", 40, journal).exit_code == 3


def test_show_shows_the_last_sound_state_unless_another_was_asked_for(journal: Path) -> None:
    change(journal, DAMAGES["edited"][0])
    assert rows(refold("show", "--json", journal).stdout)[0]["position"] == 29
    assert refold("show", "--at", 29, journal).exit_code == 0
    for at in (30, 40):
        result = refold("show", "--at", at, journal)
        assert (result.exit_code, result.stdout) == (3, "")
    change(journal, "DELETE FROM journal_records WHERE position >= 20")
    result = refold("show", "--at", 25, journal)
    assert result.exit_code == 3, "a record that isn't there has no state"
    assert "record 20 is not there" in result.stderr


@pytest.mark.parametrize("verb", [("verify",), ("show",), ("request", "req-1")], ids=" ".join)
def test_a_contradiction_comes_with_commands_that_work(tmp_path: Path, verb: tuple[str, ...]) -> None:
    lives, _ = eventful_lives()
    if verb == ("verify",):
        lives[1][-2] = [StateDigest(digest="f" * 64)]
    else:
        record = next(r for r in lives[0] if type(r[0]) is OutputDelivered)
        record.append(record[0])
    write_journal(tmp_path / "a b.db", lives)
    result = refold(*verb, tmp_path / "a b.db")
    assert result.exit_code == (1 if verb == ("verify",) else 3), result.stderr
    commands = printed(result.stderr)
    assert len(commands) == 2
    for command in commands:
        status = in_shell(command, tmp_path).returncode
        assert status == (1 if command.startswith("refold verify") else 0), command


def test_show_at_a_position_that_is_not_there_names_the_command_for_the_last(journal: Path) -> None:
    (command,) = printed(refold("show", "--at", 10**6, journal).stderr)
    assert len(in_shell(command, journal.parent).stdout.splitlines()) == 1


def test_migrate_check_names_the_command_that_upgrades(tmp_path: Path) -> None:
    path = tmp_path / "a b.db"
    path.touch()
    (command,) = printed(refold("migrate", "--check", path).stderr)
    assert in_shell(command, tmp_path).returncode == 0
    assert refold("migrate", "--check", path).exit_code == 0


def test_a_journal_of_an_older_refold_names_the_command_that_upgrades(tmp_path: Path) -> None:
    path = tmp_path / "it's  old.db"
    write_journal(path, eventful_lives()[0])
    change(path, "PRAGMA user_version = 2")
    result = refold("log", path)
    assert result.exit_code == 3
    (command,) = printed(result.stderr)
    assert in_shell(command, tmp_path).returncode == 0
    assert refold("log", path).exit_code == 0


# -- a journal that ends in the middle of a life, and one that only begins ---------------------------------------------


@pytest.mark.parametrize("verb", [("log",), ("log", "-n", "3"), ("show",), ("request", "req-0")], ids=" ".join)
def test_a_journal_cut_by_a_crash_is_said_to_be_one(tmp_path: Path, verb: tuple[str, ...]) -> None:
    lives, _ = eventful_lives()
    write_journal(tmp_path / "cut.db", [lives[0]])
    result = refold(*verb, tmp_path / "cut.db")
    assert result.exit_code == 0
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"refold: the last engine ended without a word after record {len(lives[0]) - 1}")
    write_journal(tmp_path / "closed.db", lives)
    assert refold(*verb, tmp_path / "closed.db").stderr == ""
    assert refold("log", "--until", 3, tmp_path / "cut.db").stderr == ""
    assert refold("show", "--at", 3, tmp_path / "cut.db").stderr == ""


def test_a_journal_whose_engine_is_at_work_is_not_called_cut(tmp_path: Path) -> None:
    path = tmp_path / "live.db"
    child = process("run", "--model", "simulated?step_ms=40", "--max-tokens", "400", "--journal", str(path), "long")
    try:
        eventually(lambda: "came back" in refold("log", path).stdout, timeout_s=30)
        assert [refold(verb, path).stderr for verb in ("log", "show")] == ["", ""]
    finally:
        child.kill()
        child.wait()
    assert "ended without a word" in refold("log", path).stderr


@pytest.mark.parametrize("verb", [("log",), ("show",), ("verify",), ("request", "r")], ids=" ".join)
def test_a_journal_that_is_only_being_created_is_told_from_none(tmp_path: Path, verb: tuple[str, ...]) -> None:
    path = tmp_path / "a b.db"
    path.touch()
    result = refold(*verb, path)
    assert result.exit_code == 3
    assert "is empty: it has no tables yet" in result.stderr
    assert "try again in a moment" in result.stderr
    (command,) = printed(result.stderr)
    assert in_shell(command, tmp_path).returncode == 0
    assert refold("log", path).exit_code == 0


@pytest.mark.parametrize("verb", [("log",), ("show",), ("verify",), ("request", "r"), ("run", "hi")], ids=" ".join)
def test_a_foreign_file_is_not_sent_to_a_verb_that_refuses_it_too(tmp_path: Path, verb: tuple[str, ...]) -> None:
    path = tmp_path / "letter.txt"
    path.write_text("hello, I am a letter\n")
    at = ("--model", "simulated", "--journal", path) if verb[0] == "run" else (path,)
    result = refold(verb[0], *at, *verb[1:]) if verb[0] == "run" else refold(*verb, *at)
    assert result.exit_code == 3
    assert "letter.txt is not a SQLite file" in result.stderr
    assert "verify" not in result.stderr
    assert "the journal is an argument, or $REFOLD_JOURNAL, or ./refold.db" in result.stderr


@pytest.mark.parametrize(
    ("streams", "status", "said"),
    [
        ("2>&-", 0, ""),
        (">&-", 74, "the output can't be written: stdout is closed"),
        ("<&-", 0, ""),
        pytest.param(
            ">/dev/full",
            74,
            "the output can't be written: No space left on device",
            marks=pytest.mark.skipif(not Path("/dev/full").exists(), reason="no such device here"),
        ),
    ],
)
def test_a_stream_that_is_closed_or_full_is_no_bug(tmp_path: Path, streams: str, status: int, said: str) -> None:
    journal = tmp_path / "j.db"
    assert refold("run", "--model", "simulated", "--journal", journal, "hi").exit_code == 0
    command = f"{shlex.quote(sys.executable)} -m refold verify {shlex.quote(str(journal))} {streams}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == status
    assert said in done.stderr
    if streams == "2>&-":
        assert "is whole" in done.stdout


READING = (
    "stat",
    "log",
    "show",
    "verify",
    "audit requests",
    "request run1-1",
    "blame run1-1",
    "stalls",
    "head",
    "quarantine",
)


def in_bash(command: str) -> "subprocess.CompletedProcess[str]":
    line = command.replace("refold ", f"{shlex.quote(sys.executable)} -m refold ")
    buffered = BARE | {"PYTHONUNBUFFERED": ""}  # as it is for most: what can't be written is found late
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False, timeout=60, env=buffered)


@pytest.mark.parametrize("verb", [*READING, "--version", "--help"])
def test_whoever_cannot_have_the_answer_is_told_by_the_status(tmp_path: Path, verb: str) -> None:
    journal = tmp_path / "j.db"
    assert refold("run", "--model", "simulated", "--journal", journal, "hi").exit_code == 0
    command = f"refold {verb}" if verb.startswith("-") else f"refold {verb} {shlex.quote(str(journal))}"
    closed = in_bash(f"{command} >&-")
    assert (closed.returncode, closed.stdout) == (74, "")
    assert closed.stderr.startswith("refold: the output can't be written: stdout is closed\n  hint: ")
    gone = in_bash(f"{command} | exec true; exit ${{PIPESTATUS[0]}}")
    assert (gone.returncode, gone.stderr) == (141, "")


@pytest.mark.parametrize("where", [">&-", ">/dev/full"])
def test_an_answer_that_ends_at_a_damage_and_cannot_be_written_says_both(tmp_path: Path, where: str) -> None:
    journal = tmp_path / "j.db"
    assert refold("run", "--model", "simulated", "--journal", journal, "hi").exit_code == 0
    with closing(sqlite3.connect(journal)) as connection, connection:
        connection.execute("UPDATE journal_records SET time_ns = time_ns + 1 WHERE position = 3")
    done = in_bash(f"refold log {shlex.quote(str(journal))} {where}")
    assert done.returncode == 74, done.stderr
    assert "record 3 does not follow from the one before" in done.stderr
    assert "the output can't be written" in done.stderr
    assert "Exception" not in done.stderr


@pytest.mark.parametrize("verb", [("audit", "requests"), ("sql", "select 1")], ids=" ".join)
def test_an_answer_about_a_damaged_journal_says_so_by_its_status(tmp_path: Path, verb: tuple[str, ...]) -> None:
    journal = tmp_path / "j.db"
    assert refold("run", "--model", "simulated", "--journal", journal, "hi").exit_code == 0
    with closing(sqlite3.connect(journal)) as connection, connection:
        connection.execute("UPDATE journal_records SET time_ns = time_ns + 1 WHERE position = 3")
    at = (verb[0], journal, *verb[1:]) if verb[0] == "sql" else (*verb, journal)
    result = refold(*at)
    assert result.exit_code == 3
    assert result.stdout
    assert "about the records before the damage" in result.stderr
    assert f"refold log --until 2 {journal}" in refold("stalls", journal).stderr


def test_what_run_cannot_open_is_not_said_to_be_migrated(tmp_path: Path) -> None:
    for path in ("/proc/none/x.db", tmp_path / "no" / "folder" / "x.db"):
        result = refold("run", "--model", "simulated", "--journal", path, "hi")
        assert result.exit_code == 3
        assert f"refold: cannot open {path}: " in result.stderr


# -- interrupted before the model was there ----------------------------------------------------------------------------

SLOW_TO_LOAD = """
import sys, time
from refold.gpu.simulated import SimulatedWorker
begin = SimulatedWorker.__init__
def begin_slowly(*arguments, **options):
    time.sleep({seconds})
    begin(*arguments, **options)
SimulatedWorker.__init__ = begin_slowly
sys.argv = ["refold", *sys.argv[1:]]
from refold.engine.cli import main
main()
"""


def slow_run(seconds: float, *arguments: str) -> "subprocess.Popen[str]":
    code = SLOW_TO_LOAD.format(seconds=seconds)
    command = [sys.executable, "-c", code, "run", "--model", "simulated?eos=-1", *arguments]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, env=BARE, **pipes)  # type: ignore[call-overload, no-any-return]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_prompt_is_in_the_journal_before_its_model_is_loaded(tmp_path: Path, how: signal.Signals) -> None:
    path = tmp_path / "a b.db"
    child = slow_run(3, "--journal", str(path), "--max-tokens", "4", "one", "two")
    eventually(lambda: path.exists() and refold("log", path).stdout.count("submitted") == 2, timeout_s=30)
    child.send_signal(how)
    stdout, stderr = child.communicate(timeout=60)
    assert stdout == ""
    assert "worker" not in refold("log", path).stdout
    command = typed("run", options=("--model", "simulated?eos=-1", "--journal", str(path)))
    if how is signal.SIGINT:
        assert child.returncode == 130
        assert f"the journal is whole: `{command}` finishes what is left" in stderr
    done = in_shell(command, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("(4 tokens, length)") == 2


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_after_the_last_answer_has_nothing_to_interrupt(tmp_path: Path, how: signal.Signals) -> None:
    """The read model, which lags behind, is what the closing engine waits for."""
    file, path = tmp_path / "prompts.txt", tmp_path / "x.db"
    file.write_text("".join(f"number {number}\n" for number in range(60)))
    options = ("--model", "simulated?eos=-1", "--audit", "--json", "--max-tokens", "200", "--journal", str(path))
    child = process("run", *options, "--file", str(file), env=BARE)
    assert child.stdout is not None
    answers = [child.stdout.readline() for _ in range(60)]
    assert all(answers)
    time.sleep(0.1)
    child.send_signal(how)
    _, stderr = child.communicate(timeout=60)
    assert child.returncode == 0, stderr
    assert refold("verify", path).exit_code == 0
    (last,) = rows(refold("log", "-n", 1, "--json", path).stdout)
    assert (last["event"]["type"], last["event"]["reason"]) == ("EngineClosed", "closed")


def test_ctrl_c_while_a_process_loads_the_model_ends_it_at_once_and_says_how_to_go_on(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(NEVER_LOADED)
    path = tmp_path / "x.db"
    arguments = ["--model", "simulated?eos=-1", "--worker", "process", "--journal", str(path), "--max-tokens", "4"]
    environment = BARE | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    child = process("run", *arguments, "one", env=environment, start_new_session=True)
    eventually(lambda: path.exists() and refold("log", path).stdout.count("submitted") == 1, timeout_s=60)
    time.sleep(1)
    os.killpg(child.pid, signal.SIGINT)  # as a terminal does: to everybody
    start = time.monotonic()
    _, stderr = child.communicate(timeout=60)
    assert time.monotonic() - start < 15
    assert child.returncode == 130
    command = typed("run", options=("--model", "simulated?eos=-1", "--journal", str(path)))
    assert stderr.decode().splitlines() == [
        "interrupted: closing the journal when the steps in flight are done; once more ends it at once",
        "refold: interrupted",
        f"  hint: the journal is whole: `{command}` finishes what is left, and so does the same command",
    ]
    assert len(in_shell(command, tmp_path).stdout.split()) == 4


NEVER_LOADED = """
import sys
if "refold.gpu.process_main" in sys.orig_argv:
    import time
    from refold.gpu.simulated import SimulatedWorker
    SimulatedWorker.__init__ = lambda *_, **__: time.sleep(100)
"""


def test_an_interrupt_before_anything_is_journaled_says_so(tmp_path: Path) -> None:
    submission = Submission([], "simulated", str(tmp_path / "x.db"))
    assert submission.how_to_go_on() == "nothing was submitted yet: run the same command again"


def test_what_is_in_the_journal_is_asked_of_the_journal(tmp_path: Path) -> None:
    path = str(tmp_path / "x.db")
    submission = Submission([Asked("an argument", "hi", SamplingParams(), name) for name in "abc"], "simulated", path)
    with Engine("simulated", path) as engine:
        engine.run(["an earlier run's"], request_ids=["c"])
        submission.is_open, submission.since = True, open_reader(path).head().position
        engine.run(["hi"], request_ids=["b"])  # its receipt never came back
    assert submission.how_to_go_on() == (
        "1 of 3 prompts is in the journal, and finished: the same command submits the others"
    )


def test_bare_refold_is_a_question_for_help() -> None:
    result = refold()
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == refold("--help").stdout


# -- what a message says to do ----------------------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.db"
    write_journal(path, eventful_lives()[0])
    return path


def told(*arguments: object) -> tuple[str, str]:
    """The line and the hint of a refusal."""
    done = refold(*arguments)
    assert done.exit_code in {1, 2}, done.stdout
    line, hint = done.stderr.splitlines()
    return line.removeprefix("refold: "), hint.removeprefix("  hint: ")


def test_a_value_that_is_refused_leads_to_the_help_of_its_verb(tmp_path: Path) -> None:
    line, hint = told("run", "--model", "nope", "--journal", tmp_path / "x.db", "hi")
    assert line.startswith("unknown model 'nope': name ")
    assert hint == "`refold run --help` shows the options and examples"


def test_a_time_before_the_first_record_is_answered_with_the_time_of_that(small: Path) -> None:
    line, hint = told("show", "--at", "time:2020-01-01", small)
    assert line == "time 2020-01-01T00:00:00.000Z: the first record was made at 2026-09-21T14:13:20.000Z"
    assert hint == f"`refold show --at 0 {small}` shows the state after it"


@pytest.mark.parametrize(
    ("bounds", "said"),
    [
        (("--since", 10, "--until", 5), "--since 10 is behind --until 5: swap them"),
        (
            ("--after", "2026-12-01", "--before", "2026-01-01"),
            "--after 2026-12-01T00:00:00.000Z is later than --before 2026-01-01T00:00:00.000Z: swap them",
        ),
    ],
)
def test_a_range_that_ends_before_it_begins_is_refused(small: Path, bounds: tuple[object, ...], said: str) -> None:
    assert told("log", *bounds, small)[0] == said
    assert refold("log", "--since", 5, "--until", 5, small).stdout.startswith("      5  ")


def test_a_head_that_is_no_file_is_said_to_be_none(small: Path) -> None:
    line, hint = told("verify", "--head", "nofile", small)
    assert line == "--head 'nofile' is no file, and no POSITION:HASH with 64 hexadecimal digits"
    assert hint == "`refold head` writes such a file, and `refold verify` prints a POSITION:HASH"


def test_an_empty_folder_in_the_place_of_a_journal_is_told_what_it_becomes(tmp_path: Path) -> None:
    arguments = ("run", "--model", "simulated", "--max-tokens", "2", "--journal", tmp_path, "hi")
    said = f"{tmp_path} is an empty folder: it becomes a journal of segment files; for one file, name {tmp_path}/refold.db\n"
    assert refold(*arguments).stderr.startswith(said)
    assert "empty folder" not in refold(*arguments).stderr


def test_whoever_asks_for_the_last_0_events_gets_them_and_is_not_told_that_there_are_none(small: Path) -> None:
    done = refold("log", "-n", 0, small)
    assert (done.exit_code, done.stdout, done.stderr) == (0, "", "")


def test_a_place_beyond_the_end_is_answered_with_the_number_of_records(small: Path) -> None:
    (last,) = rows(refold("log", "-n", 1, "--json", small).stdout)
    for bound in (("--since", 9999), ("--after", "2999-01-01T00:00:00Z")):
        done = refold("log", *bound, small)
        assert (done.exit_code, done.stdout) == (0, "")
        assert done.stderr == (
            f"refold: nothing is there: the journal has {last['position'] + 1} records, at positions 0 to {last['position']}\n"
        )
    assert refold("log", "--since", last["position"], small).stderr == ""


def test_a_step_that_there_is_not_is_answered_with_those_that_there_are(small: Path) -> None:
    steps = [row["event"]["step"] for row in rows(refold("log", "--kind", "StepScheduled", "--json", small).stdout)]
    done = refold("log", "--step", steps[-1] + 9, small)
    assert (done.exit_code, done.stdout) == (0, "")
    assert done.stderr == f"refold: nothing is there: the journal has steps {steps[0]} to {steps[-1]}\n"
    in_part = refold("log", "--step", steps[-1], "--until", 0, small)
    assert in_part.stderr == "refold: nothing is there: the records asked for have no step\n"
    for asked in (("--step", steps[-1]), ("--step", steps[-1], "--kind", "WorkerLost")):
        assert refold("log", *asked, small).stderr == ""


@pytest.mark.parametrize(("option", "by_time"), [("--since", "--after"), ("--until", "--before")])
@pytest.mark.parametrize("value", ["abc", "-1", "1.5", "2026-09-21"])
def test_what_is_no_position_is_told_how_to_say_it(small: Path, option: str, by_time: str, value: str) -> None:
    line, hint = told("log", option, value, small)
    assert f"{value!r} is no position of a record: give a whole number, such as {option} 120" in line
    assert f"by time it is {by_time} 2026-09-21T14:14:30Z, by step --step 7" in line
    assert " log --help`" in hint


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"prompt": "x", "sampling": {"max_tokens": 1e9}}', "max_tokens is 1000000000.0: give an integer, 1 to"),
        ('{"prompt": "x", "sampling": {"max_tokens": 99999}}', "max_tokens is 99999"),
        ('{"prompt": []}', "the prompt is empty"),
        ('{"prompt": "x", "request_id": ""}', "request_id is ''"),
    ],
)
def test_a_line_that_cannot_be_served_is_the_line_to_correct(tmp_path: Path, line: str, says: str) -> None:
    run = ("run", "--model", "simulated", "--journal", tmp_path / "j.db", "--max-tokens", "2", "-")
    complaint, hint = refold(*run, stdin=f"fine\n{line}\n").stderr.splitlines()[:2]
    assert says in complaint
    assert hint == "  hint: nothing was started for it; correct stdin line 2 and give that line again"


def test_an_option_that_no_line_can_be_served_with_is_no_lines_fault(tmp_path: Path) -> None:
    run = ("run", "--model", "simulated", "--journal", tmp_path / "j.db", "--max-tokens", "99999", "-")
    complaint, hint = refold(*run, stdin="fine\n").stderr.splitlines()
    assert "max_tokens is 99999" in complaint
    assert hint == "  hint: `refold run --help` shows the options and examples"


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="Linux has a device that is always full")
@pytest.mark.parametrize(("verb", "option"), [("report", "-o"), ("trace", "-o"), ("head", "--out")])
def test_a_full_disk_is_no_wrong_name(tmp_path, verb, option):
    journal = tmp_path / "x.db"
    assert refold("run", "--model", "simulated", "--max-tokens", "2", "--journal", journal, "hi").exit_code == 0
    full = refold(verb, journal, option, "/dev/full")
    assert (full.exit_code, full.stderr.splitlines()[0]) == (
        74,
        "refold: /dev/full can't be written: No space left on device",
    )
    assert refold(verb, journal, option, tmp_path / "none" / "x").exit_code == 2


def test_a_package_that_is_not_installed_is_the_same_fault_in_every_verb_that_would_write_with_it(
    tmp_path, monkeypatch
):
    journal = tmp_path / "x.db"
    assert refold("run", "--model", "simulated", "--max-tokens", "2", "--journal", journal, "hi").exit_code == 0
    for name in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, None)
    for verb in (
        ("audit", "export", tmp_path / "lake"),
        ("archive", "--until", "2", "--to", tmp_path / "old", "--format", "parquet"),
    ):
        told = refold(*verb, journal)
        assert told.exit_code == 2, told.stderr
        assert "pip install 'refold[analytics]'" in told.stderr
    assert refold("verify", journal).exit_code == 0


def test_an_export_to_a_full_disk_is_no_wrong_name(tmp_path, monkeypatch):
    pytest.importorskip("pyarrow")
    journal = tmp_path / "x.db"
    assert refold("run", "--model", "simulated", "--max-tokens", "2", "--journal", journal, "hi").exit_code == 0
    (tmp_path / "lake").mkdir()
    (tmp_path / "lake" / "requests.parquet.part").symlink_to("/dev/full")
    told = refold("audit", "export", tmp_path / "lake", "--view", "requests", journal)
    assert told.exit_code == 74, told.stderr


def test_bisect_refuses_a_range_with_nothing_in_it(tmp_path):
    journal = tmp_path / "x.db"
    assert refold("run", "--model", "simulated", "--max-tokens", "9", "--journal", journal, "hi").exit_code == 0
    told = refold("bisect", "--python", "True", "--from", "9", "--to", "4", journal)
    assert told.exit_code == 2
    assert "--from is record 9 and --to is record 4: there is none between them" in told.stderr


@pytest.mark.parametrize("verb", ["log {}", "verify {}", "audit requests {}", "sql {} 'SELECT 1'", "audit follow {}"])
def test_an_empty_folder_is_told_with_both_ways_out(tmp_path: Path, verb: str) -> None:
    """A container that is given a file which isn't there gets such a folder."""
    folder = tmp_path / "it's a j.db"
    folder.mkdir()
    told = refold(*shlex.split(verb.format(shlex.quote(str(folder)))))
    assert told.exit_code == 3
    line, hint = told.stderr.splitlines()
    assert line == f"refold: {folder} is an empty folder, and no journal yet"
    removing, making = re.findall(r"`([^`]*)`", hint)
    assert in_shell(removing, tmp_path).returncode == 0
    assert not folder.exists()
    folder.mkdir()
    assert in_shell(making, tmp_path).returncode == 0
    assert refold("verify", folder).exit_code == 0


def test_a_file_without_tables_is_told_alike_by_those_who_ask_in_sql(tmp_path: Path) -> None:
    (tmp_path / "new.db").touch()
    told = [refold(*verb, tmp_path / "new.db", *more).stderr for verb, more in ((["log"], []), (["sql"], ["SELECT 1"]))]
    assert told[0] == told[1]
    assert "it has no tables yet" in told[0]


@pytest.mark.parametrize("step", [99_999, 2**62, 10**30])
def test_a_step_that_is_not_there_names_the_command_for_the_last(journal: Path, step: int) -> None:
    told = refold("show", "--at", f"step:{step}", journal)
    assert told.exit_code == 1
    assert re.match(r"refold: step \d+: the journal has no such step\n", told.stderr)
    (command,) = printed(told.stderr)
    shown = in_shell(command, journal.parent)
    assert len(shown.stdout.splitlines()) == 1
    assert "step " in shown.stdout
