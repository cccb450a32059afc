"""A pipe, a socket or a folder where a file of a journal should be: every verb says so at once, and how to go on."""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from refold.engine.engine import Engine
from tests.cli.command import finished, refold

# Each in a process of its own, for one that hangs can't be ended from inside. `SAID` separates what the verbs said.
ASK = """
import sys
from tests.cli.command import refold
for arguments in ("stat",), ("log",), ("verify",), ("migrate",), ("run", "--model", "simulated", "hi", "--journal"):
    result = refold(*arguments, sys.argv[1])
    print("SAID", result.exit_code, arguments[0], result.stderr, result.stdout)
"""


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        here = Path.cwd()
        os.chdir(path.parent)  # a socket's name is short
        sock.bind(path.name)
        os.chdir(here)


def a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


KINDS: dict[str, Callable[[Path], None]] = {
    "FIFO": os.mkfifo,
    "socket": a_socket,
    "folder": Path.mkdir,
    "device": a_device,
}


def said(journal: Path) -> dict[str, tuple[int, str]]:
    """What each verb said, and its exit status."""
    done = subprocess.run(
        [sys.executable, "-c", ASK, str(journal)], check=True, capture_output=True, text=True, timeout=45
    )
    answers = [part.split(" ", 2) for part in done.stdout.split("SAID ")[1:]]
    return {verb: (int(status), text) for status, verb, text in answers}


def put(kind: str, path: Path) -> None:
    path.unlink()
    KINDS[kind](path)


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    for url in (f"segments:///{folder}/J", str(folder / "J.db")):
        with Engine("simulated", url).open() as engine:
            engine.run(["one"])
    return folder


@pytest.fixture
def journals(originals: Path, tmp_path: Path) -> Path:
    return shutil.copytree(originals, tmp_path / "journals")


@pytest.mark.parametrize("kind", KINDS)
def test_in_the_place_of_a_segment(journals: Path, kind: str) -> None:
    (segment,) = (journals / "J" / "main").glob("*.seg")
    put(kind, segment)
    for verb, (status, text) in said(journals / "J").items():
        assert status == 3, (verb, text)
        assert f"{segment} is a {kind}" in text, verb
        assert "move it away" in text, verb


def test_a_folder_in_the_place_of_a_draft_of_a_segment_is_named_to_whoever_writes(tmp_path: Path) -> None:
    run = ("run", "--model", "simulated", "hi", "--journal", f"{tmp_path}/journal/")
    assert refold(*run).exit_code == 0
    draft = next((tmp_path / "journal" / "main").glob("*.seg")).with_suffix(".seg.new")
    draft.mkdir()
    for verb in (run, ("compact", tmp_path / "journal")):
        told = refold(*verb)
        assert told.exit_code == 3
        assert f"{draft} is a folder, where a file should be: move it away" in told.stderr
    assert refold("verify", tmp_path / "journal").exit_code == 0
    draft.rmdir()
    assert refold(*run).exit_code == 0


@pytest.mark.parametrize("kind", KINDS)
def test_in_the_place_of_a_mark_is_a_mark_that_is_lost(journals: Path, kind: str) -> None:
    put(kind, journals / "J" / "main" / "mark")
    answers = said(journals / "J")
    assert {verb: status for verb, (status, _) in answers.items()} == {
        "stat": 0, "log": 0, "verify": 3, "migrate": 0, "run": 3
    }  # fmt: skip
    for verb, (_, text) in answers.items():
        assert f"mark is a {kind}" in text, verb


@pytest.mark.parametrize("kind", KINDS)
def test_in_the_place_of_the_file_that_says_of_what_format_a_journal_is(journals: Path, kind: str) -> None:
    put(kind, journals / "J" / "SEGMENTS")
    for verb, (status, text) in said(journals / "J").items():
        assert status == 3, (verb, text)
        assert f"SEGMENTS is a {kind}" in text, verb
        assert "move it away" in text, verb
        assert "echo refold segments 1" in text, verb


@pytest.mark.parametrize(
    ("part", "kind"), [(part, kind) for part in ("", "-wal", ".lock") for kind in KINDS if part or kind != "folder"]
)  # a folder is a journal of segments
def test_in_the_place_of_a_sqlite_file_or_one_beside_it(journals: Path, part: str, kind: str) -> None:
    path = journals / f"J.db{part}"
    path.touch()
    put(kind, path)
    for verb, (status, text) in said(journals / "J.db").items():
        if part == ".lock" and verb != "run":
            assert status == 0, (verb, text)
            continue
        assert status == 3, (verb, text)
        assert f"{path} is a {kind}" in text, verb


@pytest.mark.parametrize("kind", KINDS)
def test_in_the_place_of_a_sqlite_mark_it_vouches_for_nothing(journals: Path, kind: str) -> None:
    put(kind, journals / "J.db.mark")
    for verb, (status, text) in said(journals / "J.db").items():
        assert status == 0, (verb, text)
        if verb in {"verify", "run"}:
            assert f"is a {kind}" in text, verb


@pytest.mark.parametrize(
    ("verb", "status"), [("verify", 0), ("copy", 0), ("audit requests", 3), ("sql", 3), ("run --audit", 0)]
)
def test_a_pipe_in_the_place_of_a_read_model_keeps_nobody_waiting(tmp_path: Path, verb: str, status: int) -> None:
    run = ("run", "--model", "simulated", "--journal", f"{tmp_path}/x/")
    assert refold(*run, "hello").exit_code == 0
    os.mkfifo(tmp_path / "x.audit.db")
    more = {"copy": (f"{tmp_path}/copy.db",), "sql": ("SELECT 1",)}.get(verb, ())
    command = (*run, "--audit", "more") if verb == "run --audit" else (*verb.split(), f"{tmp_path}/x/", *more)
    code, _, stderr = finished(*command)
    assert code == status, stderr
    if verb not in {"verify", "copy"}:  # a run goes on without, and says so
        assert "x.audit.db is a FIFO, where a file should be: move it away" in stderr
