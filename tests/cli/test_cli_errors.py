"""Bad input: each gets one line, one hint, the right exit status, and harms nothing."""

import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from refold.engine.cli.app import VERBS
from refold.engine.cli.failures import explain
from tests.cli.command import assert_one_line_and_a_hint, finished, process, refold
from tests.history.journals import eventful_lives, long_life, write_journal

READERS = [("log",), ("show",), ("verify",), ("request", "req-1")]


@pytest.fixture
def journal(tmp_path):
    path = tmp_path / "refold.db"
    write_journal(path, eventful_lives()[0])
    return path


def foreign(path):
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE customers (id INTEGER)")
    connection.close()


def folder(path):
    path.mkdir()
    (path / "letter.txt").write_text("hello")


def newer(path):
    write_journal(path, eventful_lives()[0])
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()


def torn(path):
    write_journal(path, eventful_lives()[0])
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 3])


def damaged_page(path):
    write_journal(path, eventful_lives()[0])
    data = bytearray(path.read_bytes())
    data[len(data) // 2 :] = os.urandom(len(data) - len(data) // 2)
    path.write_bytes(data)


NOT_JOURNALS = {
    "missing": (lambda path: None, 3),
    "no database": (lambda path: path.write_text("hello, I am a letter\n" * 99), 3),
    "empty file": (lambda path: path.touch(), 3),
    "a folder": (folder, 3),
    "foreign": (foreign, 3),
    "newer": (newer, 4),
    "torn": (torn, 3),
    "damaged": (damaged_page, 3),
}


@pytest.mark.parametrize("verb", READERS, ids=lambda v: v[0])
@pytest.mark.parametrize("kind", NOT_JOURNALS)
def test_what_is_no_readable_journal_is_said_to_be_none(tmp_path, verb, kind):
    make, status = NOT_JOURNALS[kind]
    path = tmp_path / "journal.db"
    make(path)
    before = path.read_bytes() if path.is_file() else None
    result = refold(*verb, path)
    assert result.exit_code == status, result.stderr
    assert_one_line_and_a_hint(result.stderr)
    assert "journal.db" in result.stderr
    if before is not None:
        assert path.read_bytes() == before


@pytest.mark.parametrize("kind", ["no database", "a folder", "foreign", "newer", "torn"])
def test_run_and_migrate_leave_alone_what_is_no_journal_of_ours(tmp_path, kind):
    make, status = NOT_JOURNALS[kind]
    path = tmp_path / "journal.db"
    make(path)
    before = path.read_bytes() if path.is_file() else None
    for arguments in (("migrate", path), ("run", "--model", "simulated", "--journal", path, "hi")):
        result = refold(*arguments)
        assert result.exit_code == status, result.stderr
        assert_one_line_and_a_hint(result.stderr)
    if before is not None:
        assert path.read_bytes() == before


@pytest.mark.parametrize(
    "url", ["sqllite:///x.db", "segment:///x", "http://x/y", "postgresql://h/", "postgresql://h:x/d", "memory:"]
)
@pytest.mark.parametrize("verb", ["stat", "verify", "audit requests", "audit rebuild"])
def test_of_a_url_that_names_no_store_nobody_says_that_the_same_command_goes_on(verb, url):
    told = refold(*verb.split(), url)
    assert (told.exit_code, told.stdout) == (3, "")
    assert_one_line_and_a_hint(told.stderr)
    assert "the same command" not in told.stderr


@pytest.mark.parametrize(
    "url", ["", "postgresql://h/d", "sqlite:memory", "sqlite:///", "file:x.db", "\udcff.db", "a\x00b", "memory:"]
)
@pytest.mark.parametrize("verb", READERS, ids=lambda v: v[0])
def test_a_url_that_names_no_file_is_refused(verb, url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = refold(*verb, url)
    assert result.exit_code == (3 if url else 2), result.stderr
    assert_one_line_and_a_hint(result.stderr)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("where", ["/proc/none/x.db", "{tmp}/no/such/folder/x.db", "{tmp}/file/x.db"])
def test_run_where_nothing_can_be_written(tmp_path, where):
    (tmp_path / "file").touch()
    result = refold("run", "--model", "simulated", "--journal", where.format(tmp=tmp_path), "hi")
    assert result.exit_code == 3, result.stderr
    assert_one_line_and_a_hint(result.stderr)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_run_in_a_folder_without_the_right_to_write(tmp_path):
    tmp_path.chmod(0o500)
    result = refold("run", "--model", "simulated", "--journal", tmp_path / "x.db", "hi")
    tmp_path.chmod(0o700)
    assert result.exit_code == 3
    assert_one_line_and_a_hint(result.stderr)


@pytest.fixture
def open_folder():
    """A folder that every user may enter, unlike pytest's."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@contextmanager
def nobody_special():
    """This process without root's right to read everything; nothing where it has none."""
    if os.geteuid() != 0:
        yield
        return
    os.setresuid(65534, 65534, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)


@pytest.mark.parametrize("verb", [*READERS, ("run", "--model", "simulated", "hi", "--journal")], ids=lambda v: v[0])
def test_a_journal_that_this_user_may_not_read_is_said_to_be_unreadable(verb, open_folder):
    journal = open_folder / "x.db"
    assert refold("run", "--model", "simulated", "--journal", journal, "hi").exit_code == 0
    refold(*verb, journal)  # what it imports is imported while everything can be read
    journal.chmod(0)
    with nobody_special():
        result = refold(*verb, journal)
    assert (result.exit_code, result.stdout) == (3, "")
    assert_one_line_and_a_hint(result.stderr)
    assert result.stderr.startswith(
        f"refold: cannot read {journal}: it is there, and this user has no right to read it; give it"
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ("lgo",),
        ("--frobnicate",),
        ("log", "--frobnicate"),
        ("log", "a", "b"),
        ("log", "--since", "-1"),
        ("log", "--since", "1.5"),
        ("log", "-n", "many"),
        ("log", "--follow", "--reverse"),
        ("log", "--follow", "--until", "3"),
        ("show", "--at"),
        ("request",),
        ("verify", "--head", "7"),
        ("run", "--max-tokens", "x"),
    ],
)
def test_usage_errors_are_one_line_and_one_hint(arguments, journal, monkeypatch):
    monkeypatch.chdir(journal.parent)
    result = refold(*arguments)
    assert result.exit_code == 2, result.stderr
    assert result.stdout == ""
    assert_one_line_and_a_hint(result.stderr)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--temperature", "nan"),
        ("--temperature", "inf"),
        ("--temperature", "-1"),
        ("--top-p", "0"),
        ("--top-p", "nan"),
        ("--top-p", "1.5"),
        ("--top-k", "-1"),
        ("--max-tokens", "0"),
        ("--max-tokens", "-5"),
        ("--max-tokens", "9" * 30),
        ("--seed", "-1"),
        ("--seed", "9" * 30),
        ("--num-blocks", "0"),
        ("--num-blocks", "9" * 30),
        ("--block-size", "-16"),
        ("--max-num-seqs", "0"),
        ("--max-num-batched-tokens", "0"),
        ("--max-in-flight-steps", "0"),
        ("--window", "99"),
        ("--policy", "lottery"),
        ("--threads", "0"),
        ("--model", "no-such-model"),
        ("--model", "simulated?speed=9"),
        ("--model", "no\x1bsuch"),
        ("--file", "no-such-file.txt"),
    ],
)
def test_parameters_that_cannot_be_are_rejected_before_a_journal_exists(tmp_path, option, value):
    arguments = {"--model": "simulated"} | {option: value}
    flat = [word for pair in arguments.items() for word in pair]
    result = refold("run", "--journal", tmp_path / "x.db", *flat, "hi")
    assert result.exit_code == 2, result.stderr
    assert_one_line_and_a_hint(result.stderr)
    assert result.stdout == ""
    assert not (tmp_path / "x.db").exists()


@pytest.mark.parametrize("verb", [("redact", "nofile.db", "x"), ("quarantine", "nofile.db"), ("stat", "nofile.db")])
def test_a_journal_that_is_not_there_has_one_exit_status_whatever_is_asked_of_it(tmp_path, monkeypatch, verb):
    monkeypatch.chdir(tmp_path)
    result = refold(*verb)
    assert result.exit_code == 3
    assert "no journal at" in result.stderr
    assert_one_line_and_a_hint(result.stderr)


@pytest.mark.parametrize("verb", [("stalls",), ("why", "x")])
@pytest.mark.parametrize("least", ["nan", "inf"])
def test_a_time_that_compares_with_nothing_is_refused(tmp_path, verb, least):
    result = refold(*verb, tmp_path / "x.db", "--least", least)
    assert result.exit_code == 2
    assert "is no number of milliseconds" in result.stderr


def test_a_broken_model_file_is_rejected(tmp_path):
    pytest.importorskip("gguf")
    for number, content in enumerate((b"", b"GGUF", b"GGUF\x03\x00\x00\x00" + b"\xff" * 64, os.urandom(4096))):
        model = tmp_path / f"broken-{number}.gguf"
        model.write_bytes(content)
        result = refold("run", "--journal", tmp_path / "x.db", "--model", model, "hi")
        assert result.exit_code == 2, result.stderr
        assert_one_line_and_a_hint(result.stderr)
        assert not (tmp_path / "x.db").exists()


@pytest.mark.parametrize(
    ("model", "lines"),
    [
        ("simulated", b'{"prompt": ""}\n'),
        ("simulated", b"nul \x00 inside\n"),
        ("simulated", b'{"prompt": "nul \\u0000 inside"}\n'),
        ("simulated", b'{"prompt": []}\n'),
        ("simulated", b'{"prompt": [99999999999]}\n'),
        ("simulated", b'{"prompt": [-1]}\n'),
        ("simulated", b'{"messages": [{"role": "user"}]}\n'),
        ("simulated", b'{"messages": [{"role": 3, "content": null}]}\n'),
        ("simulated", b'{"prompt": "x", "request_id": ""}\n'),
        ("simulated", b'{"prompt": "x", "request_id": "a\\u001bb"}\n'),
        ("simulated?len=8", b"longer than eight tokens\n"),
    ],
)
def test_a_prompt_that_cannot_be_served_stands_in_nobodys_way(tmp_path, model, lines):
    arguments = ("run", "--model", model, "--max-tokens", "2", "--no-chat", "--journal", tmp_path / "x.db", "-")
    result = refold(*arguments, stdin=b"ok\n" + lines + b"also\n")
    assert result.exit_code == 2, result.stderr
    assert "stdin line 2" in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout.count("(2 tokens, length)") == 2
    assert refold("verify", tmp_path / "x.db").exit_code == 0


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"\xff\xfe\n", "not UTF-8"),
        (b"{not json}\n", "stdin line 2"),
        (b'{"prompt": "x", "prompts": 1}\n', "prompts"),
        (b"{}\n", "neither a prompt nor messages"),
        (b'{"prompt": "x", "messages": []}\n', "a prompt and messages"),
        (b'{"prompt": "x", "sampling": {"temperature": -1}}\n', "temperature"),
        (b'{"prompt": "x", "sampling": {"heat": 1}}\n', "heat"),
        (b'{"prompt": "x", "sampling": {"temperature": NaN}}\n', "stdin line 2"),
        (b'{"prompt": "\\ud800"}\n', "stdin line 2: \\ud800 without its other half is no character"),
        (b'{"messages": [{"role": "user", "content": "x\\udc00y"}]}\n', "stdin line 2: \\udc00 without its other half"),
        (b'{"messages": []}\n', "stdin line 2: messages is empty"),
        (b'{"prompt": "x", "prompt": "y"}\n', "'prompt' is given twice"),
        (b'{"prompt": "x", "sampling": ' + b'{"a":' * 5000 + b"1" + b"}" * 5001 + b"\n", "nested too deeply"),
        (b'{"prompt": "x", "sampling": {"logit_bias": {"7": 1, "7": 2}}}\n', "'7' is given twice"),
        (b'{"prompt": "x", "sampling": {"logit_bias": {"7": 1, "07": 2}}}\n', "give each token one bias"),
    ],
)
def test_a_line_that_is_no_prompt_is_named_and_the_others_are_served(tmp_path, line, says):
    arguments = ("run", "--model", "simulated", "--max-tokens", 2, "--journal", tmp_path / "x.db", "-")
    result = refold(*arguments, stdin=b"fine\n" + line + b"also\n")
    assert result.exit_code == 2, result.stderr
    assert_one_line_and_a_hint("\n".join(result.stderr.splitlines()[:2]))
    assert "stdin line 2: " in result.stderr
    assert says in result.stderr
    assert result.stdout.count("(2 tokens, length)") == 2


@pytest.mark.parametrize("line", [b"\xff\xfe\n", b"{not json}\n"])
def test_lines_that_are_all_no_prompts_open_no_engine(tmp_path, line):
    result = refold("run", "--model", "simulated", "--json", "--journal", tmp_path / "x.db", "-", stdin=line)
    assert result.exit_code == 2, result.stderr
    assert_one_line_and_a_hint(result.stderr)
    assert '"place":"stdin line 1"' in result.stdout
    assert not (tmp_path / "x.db").exists()


@pytest.mark.parametrize("text", [b"", b"\n", b"  \n\r\n"])
def test_a_file_without_a_prompt_is_said_to_have_none(tmp_path, text):
    file = tmp_path / "prompts.txt"
    file.write_bytes(text)
    for arguments in (("-",), ("--file", "-"), ("--file", file)):
        result = refold("run", "--model", "simulated", "--journal", tmp_path / "x.db", *arguments, stdin=text)
        assert result.exit_code == 2
        assert_one_line_and_a_hint(result.stderr)
        assert "has no prompt in it" in result.stderr
        assert not (tmp_path / "x.db").exists()


@pytest.mark.parametrize(
    ("model", "line", "says"),
    [
        ("simulated", '{"prompt": []}', "the prompt is empty"),
        ("simulated", '{"prompt": [99999999999]}', "prompt token 99999999999 at index 0"),
        ("simulated?len=8", "longer than eight tokens", "the prompt has"),
        ("simulated", '{"prompt": "x", "request_id": "a\\u001bb"}', "request_id"),
        ("simulated", '{"prompt": "x", "sampling": {"max_tokens": 4000}}', "the pool has 20"),
    ],
)
def test_prompts_that_are_all_rejected_open_no_engine(tmp_path, model, line, says):
    path = tmp_path / "x.db"
    arguments = ("run", "--model", model, "--num-blocks", 20, "--no-chat", "--journal", path)
    result = refold(*arguments, "--file", "-", stdin=f"{line}\n{line}\n")
    assert result.exit_code == 2, result.stderr
    assert result.stderr.count(says) == 2
    assert "stdin line 1: " in result.stderr
    assert "stdin line 2: " in result.stderr
    assert not path.exists()


def test_lone_surrogates_in_an_argument_are_rejected(tmp_path):
    path = tmp_path / "x.db"
    arguments = ["run", "--model", "simulated", "--journal", str(path), "--max-tokens", "2", b"caf\xe9", "fine"]
    status, stdout, stderr = finished(*arguments)
    assert status == 2, stderr
    assert "U+DCE9" in stderr
    assert "prompt 1" in stderr
    assert stdout
    assert refold("verify", path).exit_code == 0


def test_no_prompt_and_nothing_to_finish_is_a_usage_error(tmp_path):
    result = refold("run", "--model", "simulated", "--journal", tmp_path / "x.db")
    assert result.exit_code == 2
    assert_one_line_and_a_hint(result.stderr)
    assert not (tmp_path / "x.db").exists()


def test_a_second_engine_on_the_same_journal_is_refused(tmp_path):
    path = str(tmp_path / "x.db")
    first = process("run", "--model", "simulated?step_ms=40", "--max-tokens", "400", "--journal", path, "long")
    try:
        wait_until_it_serves(path)
        status, stdout, stderr = finished("run", "--model", "simulated", "--journal", path, "second")
        assert status == 5, stderr
        assert stdout == ""
        assert_one_line_and_a_hint(stderr)
        assert str(first.pid) in stderr
        assert refold("log", path).exit_code == 0
        assert refold("verify", path).exit_code == 0
    finally:
        first.kill()
        first.wait()


def wait_until_it_serves(path, timeout=30):
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if "came back" in refold("log", path).stdout:
            return
        time.sleep(0.05)
    raise AssertionError("the engine did not start to serve")


def test_a_file_locked_by_another_program_is_locked_not_corrupt(tmp_path, monkeypatch):
    import refold.journal.stores.sqlite_file as sqlite_file

    path = tmp_path / "x.db"
    write_journal(path, eventful_lives()[0])
    with sqlite3.connect(path, isolation_level=None) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
        connection.execute("BEGIN EXCLUSIVE")
        monkeypatch.setattr(sqlite_file, "BUSY_TIMEOUT_S", 0.05)
        result = refold("log", path)
        connection.execute("ROLLBACK")
    connection.close()
    assert result.exit_code == 5, result.stderr
    assert_one_line_and_a_hint(result.stderr)


def test_a_closed_pipe_is_silent(tmp_path):
    path = tmp_path / "long.db"
    write_journal(path, long_life(200))
    for verb in ("log", "log --json"):
        child = process(*verb.split(), str(path))
        child.stdout.readline()
        child.stdout.close()
        assert child.stderr.read() == b""
        assert child.wait(timeout=20) in {141, 0}
    shell = f"set -o pipefail; '{sys.executable}' -m refold log '{path}' | head -1"
    result = subprocess.run(["bash", "-c", shell], capture_output=True, check=False, text=True)
    assert len(result.stdout.splitlines()) == 1
    assert result.stderr == ""


def test_debug_shows_the_traceback_and_nothing_else_does(tmp_path):
    assert "Traceback" not in refold("log", tmp_path / "none.db").stderr
    assert "Traceback" in refold("log", "--debug", tmp_path / "none.db").stderr
    assert "Traceback" in refold("--debug", "log", tmp_path / "none.db").stderr
    assert "Traceback" in refold("log", tmp_path / "none.db", REFOLD_DEBUG="1").stderr
    assert "Traceback" not in refold("log", tmp_path / "none.db", REFOLD_DEBUG="0").stderr


def test_a_bug_of_ours_is_said_to_be_one(journal, monkeypatch):
    import refold.engine.cli.walk as walk

    def broken(*_):
        raise ZeroDivisionError("division by\nzero")

    monkeypatch.setattr(walk, "_choose", broken)
    result = refold("log", journal)
    assert result.exit_code == 70
    assert_one_line_and_a_hint(result.stderr)
    assert "a bug of refold: ZeroDivisionError" in result.stderr


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_with_examples(verb):
    result = refold(verb, "--help")
    assert result.exit_code == 0
    assert "Examples:" in result.stdout
    assert f"refold {verb}" in result.stdout
    assert refold(verb, "-h").stdout == result.stdout


def test_version_names_python_and_sqlite():
    result = refold("--version")
    assert result.exit_code == 0
    from refold import __version__

    assert result.stdout.startswith(f"refold {__version__} (Python 3.")
    assert f"SQLite {sqlite3.sqlite_version}" in result.stdout


@pytest.mark.parametrize("moment", range(7))
def test_an_interrupt_at_any_moment_leaves_a_journal_that_goes_on(tmp_path, moment):
    path = tmp_path / "x.db"
    prompts = [f"prompt number {i}" for i in range(5)]
    arguments = ["--model", "simulated?step_ms=4&eos=-1", "--max-tokens", "60", "--journal", str(path)]
    child = process("run", *arguments, *prompts)
    time.sleep(0.15 + moment * 0.13)
    child.send_signal(signal.SIGINT)
    _, stderr = child.communicate(timeout=30)
    if child.returncode == 130:
        assert b"Traceback" not in stderr
        assert b"interrupted" in stderr
    elif child.returncode:  # before our first line runs, Python itself answers the signal, in a way of its own
        assert child.returncode in {1, -signal.SIGINT}, stderr
        assert b"/engine/" not in stderr
    if not path.exists() or refold("migrate", "--check", path).exit_code:
        return
    assert refold("verify", path).exit_code == 0
    again = refold("run", *arguments)
    assert again.exit_code in {0, 2}, again.stderr  # 2: nothing was left
    verdict = refold("verify", path)
    assert verdict.exit_code == 0
    submitted = refold("log", "--json", "--kind", "RequestSubmitted", path).stdout.count("\n")
    ended = refold("log", "--json", "--kind", "RequestFinished", path).stdout
    assert ended.count('"reason":"length"') == submitted
    assert "abort" not in ended


def test_an_interrupt_that_an_import_wrapped_is_an_interrupt_still():
    error = RuntimeError("Error calling __set_name__")
    error.__cause__ = KeyboardInterrupt()
    assert explain(error) == ("interrupted", "", 130)


@pytest.mark.parametrize("order", [["report", "-o"], ["trace", "-o"], ["head", "--out"]])
@pytest.mark.parametrize("part", ["", "-wal", ".mark"])
def test_a_file_of_the_journal_itself_is_no_output(tmp_path: Path, order: list[str], part: str) -> None:
    journal = tmp_path / "run.db"
    write_journal(journal, eventful_lives()[0])
    link = tmp_path / "link"
    link.symlink_to(f"{journal}{part}")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.exists()}
    for output in (f"{journal}{part}", link):
        said = refold(*order, output, journal)
        assert said.exit_code == 2
        assert "is a file of the journal" in said.stderr
        assert_one_line_and_a_hint(said.stderr)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.exists()} == before


def test_a_file_among_the_segments_is_no_output(tmp_path: Path) -> None:
    journal = f"segments:///{tmp_path}/run"
    assert refold("run", "hi", "--model", "simulated", "--journal", journal).exit_code == 0
    (mark,) = tmp_path.glob("run/*/mark")
    before = mark.read_bytes()
    assert refold("report", "-o", mark, journal).exit_code == 2
    assert mark.read_bytes() == before
    assert refold("report", "-o", tmp_path / "run.html", journal).exit_code == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ("sql", "JOURNAL", "select '\udcff'"),
        ("capsule", "--note", "\udcff", "JOURNAL", "c"),
        ("fork", "--set", "a=\udcff", "JOURNAL"),
    ],
)
def test_bytes_that_are_no_text_are_refused_in_one_line(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    journal = tmp_path / "run.db"
    write_journal(journal, eventful_lives()[0])
    said = refold(*[str(journal) if word == "JOURNAL" else word for word in arguments])
    assert said.exit_code == 2
    assert "no UTF-8" in said.stderr
    assert_one_line_and_a_hint(said.stderr)
