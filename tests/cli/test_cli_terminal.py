"""What a run looks like on a screen that stdout and stderr share: each line is whole, whoever wrote it, and data goes where it was sent."""

import json
import os
import pty
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.command import process

STEPS = ("run", "--model", "simulated?eos=-1&step_ms=20", "--no-chat")


class Screen:
    """A terminal, and what was written to it."""

    def __init__(self) -> None:
        self._screen, self._terminal = pty.openpty()
        self.seen = b""

    def of(
        self,
        *arguments: str,
        at: bytes = b"",
        then: Callable[["subprocess.Popen[bytes]"], None] | None = None,
        **streams: object,
    ) -> list[str]:
        """The lines that a command wrote, to which `then` happens once `at` was written."""
        child = process(*arguments, **({"stdout": self._terminal, "stderr": self._terminal} | streams))
        os.close(self._terminal)
        while part := self._read():
            self.seen += part
            if then is not None and at in self.seen:
                then(child)
                then = None
        os.close(self._screen)
        child.wait(timeout=60)
        return self.seen.decode().replace("\r\n", "\n").splitlines()

    def _read(self) -> bytes:
        try:
            return os.read(self._screen, 4096)
        except OSError:  # nobody has the terminal open any more
            return b""


def interrupt(child: "subprocess.Popen[bytes]") -> None:
    child.send_signal(signal.SIGINT)


def kill_worker(child: "subprocess.Popen[bytes]") -> None:
    threads = Path(f"/proc/{child.pid}/task").iterdir()
    (worker,) = [int(pid) for thread in threads for pid in (thread / "children").read_text().split()]
    os.kill(worker, signal.SIGKILL)


def numbers(line: str) -> bool:
    """Whether a line is of a simulated answer, and of nothing else."""
    return bool(line) and all(word.isdigit() for word in line.split())


def test_a_complaint_that_cuts_a_streamed_answer_short_begins_on_a_line_of_its_own(tmp_path: Path) -> None:
    run = (*STEPS, "--journal", str(tmp_path / "x.db"), "--max-tokens", "500", "hello")
    lines = Screen().of(*run, at=b" ", then=interrupt)
    told = next(number for number, line in enumerate(lines) if "interrupted: closing the journal" in line)
    assert lines[told].startswith("interrupted: ")
    assert numbers(lines[told - 1]), "the answer so far"
    assert "refold: interrupted" in lines


def test_a_log_line_stands_for_itself_between_the_parts_of_a_streamed_answer_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    run = (*STEPS, "--worker", "process", "--journal", str(tmp_path / "x.db"), "--max-tokens", "40", "hello")
    lines = Screen().of(*run, at=b" ", then=kill_worker)
    before, told, after, journal = lines
    assert "[warning  ] worker_lost" in told
    assert told.startswith("20"), "it begins with its time"
    assert numbers(before)
    assert numbers(after)
    assert len(before.split()) + len(after.split()) == 40
    assert journal.startswith("journal: ")


def test_a_log_line_stands_for_itself_where_both_streams_go_to_one_pipe(tmp_path: Path) -> None:
    run = (*STEPS, "--worker", "process", "--journal", str(tmp_path / "x.db"), "--max-tokens", "40", "hello")
    child = process(*run, stderr=subprocess.STDOUT)
    assert child.stdout is not None
    begun = os.read(child.stdout.fileno(), 100)
    kill_worker(child)
    rest = child.communicate(timeout=60)[0]
    before, told, after, _ = (begun + rest).decode().splitlines()
    assert json.loads(told)["event"] == "worker_lost", "nobody watches: it is JSON"
    assert len(before.split()) + len(after.split()) == 40


def test_an_answer_in_a_file_is_not_broken_by_a_log_line(tmp_path: Path) -> None:
    run = (*STEPS, "--worker", "process", "--journal", str(tmp_path / "x.db"), "--max-tokens", "40", "hello")
    answer = tmp_path / "answer.txt"

    with answer.open("wb") as file:
        child = process(*run, stdout=file)
        while not answer.stat().st_size and child.poll() is None:
            time.sleep(0.01)
        kill_worker(child)
        stderr = child.communicate(timeout=60)[1].decode()
    assert "worker_lost" in stderr
    (line,) = answer.read_text(encoding="utf-8").splitlines()
    assert len(line.split()) == 40


SLOW = ("run", "--model", "simulated?eos=-1&step_ms=100", "--no-chat", "--max-tokens", "28")


@pytest.mark.parametrize("prompts", [("one",), ("one", "two")], ids=["streamed", "in turn"])
def test_what_goes_to_a_file_goes_there_though_a_bar_is_drawn_meanwhile(
    tmp_path: Path, prompts: tuple[str, ...]
) -> None:
    answers = tmp_path / "answers.txt"
    with answers.open("wb") as file:
        screen = Screen()
        screen.of(*SLOW, "--journal", str(tmp_path / "x.db"), *prompts, stdout=file)
    assert b"generating" in screen.seen, "there was a bar"
    words = [line.split() for line in answers.read_text(encoding="utf-8").splitlines() if numbers(line)]
    assert [len(each) for each in words] == [28] * len(prompts)


def test_an_answer_that_streams_to_a_screen_for_long_is_one_line_without_a_bar_in_it(tmp_path: Path) -> None:
    answer, journal = Screen().of(*SLOW, "--journal", str(tmp_path / "x.db"), "one")
    assert numbers(answer)
    assert len(answer.split()) == 28
    assert journal.startswith("journal: ")
