"""Running the command: in this process for speed, or as a real one."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence

from click.testing import CliRunner, Result

from refold.engine.cli.app import app


def refold(*arguments: object, stdin: bytes | str | None = None, **environment: str) -> Result:
    """The command in this process; `.exit_code`, `.stdout`, `.stderr`."""
    env = {"REFOLD_JOURNAL": None, "REFOLD_DEBUG": None, "NO_COLOR": None, "FORCE_COLOR": None} | environment
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin, env=env)


def process(*arguments: str | bytes, **options: object) -> "subprocess.Popen[bytes]":
    """The command as a process of its own."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command: Sequence[str | bytes] = [sys.executable, "-m", "refold", *arguments]
    return subprocess.Popen(command, **(pipes | options))  # type: ignore[call-overload]


def finished(*arguments: str | bytes, timeout: float = 60, **options: object) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of a process."""
    child = process(*arguments, **options)
    try:
        stdout, stderr = child.communicate(timeout=timeout)
    finally:
        child.kill()
    return child.returncode, (stdout or b"").decode(), (stderr or b"").decode()


def rows(text: str) -> list[dict]:
    """NDJSON, parsed: one object on each line."""
    return [json.loads(line) for line in text.splitlines()]


def assert_one_line_and_a_hint(stderr: str) -> None:
    """An error is `refold: ...`, and a hint, and no traceback."""
    lines = [line for line in stderr.splitlines() if line.strip()]
    assert lines, "no word of the error on stderr"
    assert lines[0].startswith("refold: "), stderr
    assert len(lines[0]) > 20
    assert lines[1].startswith("  hint: "), stderr
    assert len(lines) == 2, stderr
    assert "Traceback" not in stderr


BARE = {key: value for key, value in os.environ.items() if not key.startswith("REFOLD")}
"""The environment without our own variables."""
