"""A disk that is full: the numbers, and which prompts need the same command again."""

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.command import assert_one_line_and_a_hint, refold, rows
from tests.kit.disk import FROM_THEN_ON, ONCE, preloaded

NUM_PROMPTS = 200
ON_A_FULL_DISK = f"""
import sys
from pathlib import Path
from refold.engine.cli.app import app
from tests.kit.disk import Disk
disk = Disk()
disk.watch(Path(sys.argv[1]))
disk.fail(int(sys.argv[2]), {errno.ENOSPC}, int(sys.argv[3]))
app(sys.argv[4:])
"""


def on_a_full_disk(
    folder: Path, num_calls: int, *arguments: str, mode: int = FROM_THEN_ON
) -> "subprocess.CompletedProcess[str]":
    """The command on a disk that is full from its n-th write on, or for that one only."""
    command = (sys.executable, "-c", ON_A_FULL_DISK, str(folder), str(num_calls), str(mode), *arguments)
    return subprocess.run(command, env=preloaded(os.environ), capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize("name", ["x.db", "segments/"])
def test_a_disk_that_fills_up_under_a_run_is_told_with_numbers_and_the_command_that_goes_on(
    tmp_path: Path, name: str
) -> None:
    folder, file = tmp_path / "volume", tmp_path / "prompts.jsonl"
    folder.mkdir()
    file.write_text(
        "".join(f'{{"prompt": "number {number}", "request_id": "p{number}"}}\n' for number in range(NUM_PROMPTS))
    )
    begun = ("run", "--model", "simulated", "--journal", f"{folder}/{name}", "--max-tokens", "2")
    assert refold(*begun, "makes the journal").exit_code == 0
    run = (*begun, "--file", str(file))
    full = on_a_full_disk(folder, 150, *run)
    assert full.returncode == 3, full.stderr
    told = "\n".join(line for line in full.stderr.splitlines() if not line.startswith(("{", "journal:")))
    assert_one_line_and_a_hint(told)
    line, hint = told.splitlines()
    assert re.search(r"cannot write records? \d+.* to .*\([\d,]+ bytes free in .*/volume.*\); free disk space", line), (
        line
    )
    known = re.search(rf"  hint: once that is mended.*?\b(\d+) of {NUM_PROMPTS} prompts", hint)
    assert known, hint
    assert 0 < int(known[1]) < NUM_PROMPTS
    assert "the same command" in hint
    assert "submits the others" in hint
    again = refold(*run, "--json")
    assert again.exit_code == 0, again.stderr
    assert [row["request_id"] for row in rows(again.stdout)] == [f"p{number}" for number in range(NUM_PROMPTS)]


@pytest.mark.parametrize("verb", ["report", "trace"])
def test_a_file_that_a_full_disk_has_no_room_for_is_not_there_or_is_what_it_was(tmp_path: Path, verb: str) -> None:
    journal, folder = tmp_path / "x.db", tmp_path / "volume"
    folder.mkdir()
    assert refold("run", "--model", "simulated", "--journal", journal, "hello").exit_code == 0
    file = folder / "file"
    for there in (None, "what was there"):
        if there is not None:
            file.write_text(there)
            file.chmod(0o640)
        for num_calls in (1, 2, 3):  # not after that: then it's there, under its name
            full = on_a_full_disk(folder, num_calls, verb, "-o", str(file), str(journal), mode=ONCE)
            assert full.returncode == 74, (num_calls, full.stderr)
            assert_one_line_and_a_hint(full.stderr)
            assert f"{file} can't be written: " in full.stderr
            assert [(path, path.read_text()) for path in folder.iterdir()] == ([] if there is None else [(file, there)])
    assert refold(verb, "-o", file, journal).exit_code == 0
    assert file.stat().st_size > 1000
    assert file.stat().st_mode & 0o777 == 0o640
    assert list(folder.iterdir()) == [file]
