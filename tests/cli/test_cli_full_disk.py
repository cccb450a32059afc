"""A disk that is full: the numbers, and which prompts need the same command again."""

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from refold import migrations
from refold.journal.copying import BATCH_RECORDS
from refold.journal.stores import open_store
from refold.journal.testing import make_records
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
    # SQLite says `disk I/O error` where its 150th call is a sync: it tells a full disk by a write alone.
    remedy = r"(free disk space|check the disk and its free space)"
    assert re.search(rf"cannot write records? \d+.* to .*\([\d,]+ bytes free in .*/volume.*\); {remedy}", line), line
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


@pytest.mark.parametrize(("name", "num_calls", "step"), [("copy.db", 1000, 200), ("copy/", 14, 2)])
@pytest.mark.parametrize("as_json", [False, True])
def test_a_copy_that_fills_the_disk_says_how_many_records_it_has_and_goes_on_from_there(
    tmp_path: Path, name: str, num_calls: int, step: int, as_json: bool
) -> None:
    journal, known = tmp_path / "x.db", None
    migrations.ensure(str(journal))
    store = open_store(str(journal))
    store.append("main", make_records(store.open_stream(), 3 * BATCH_RECORDS))
    store.close()
    while known is None:  # until the first batch is in
        folder = tmp_path / str(num_calls)
        folder.mkdir()
        target = f"{folder}/{name}"
        copy = ("copy", *["--json"] * as_json, str(journal), target)
        full = on_a_full_disk(folder, num_calls, *copy, mode=ONCE)
        assert full.returncode == 3, (num_calls, full.stdout, full.stderr)
        known = re.search(r"has ([\d,]+) records of stream main: the same command goes on from there", full.stderr)
        num_calls += step
    num_there = int(known[1].replace(",", ""))
    assert num_there in {BATCH_RECORDS, 2 * BATCH_RECORDS}
    assert_one_line_and_a_hint(full.stderr)
    assert f"{target} has " in full.stderr
    if as_json:
        (report,) = rows(full.stdout)
        assert (report["ok"], report["num_records"]) == (False, num_there)
    (report,) = rows(refold("copy", "--json", journal, target).stdout)
    assert (report["ok"], report["num_records"]) == (True, 3 * BATCH_RECORDS)
    assert report["num_copied"] == 3 * BATCH_RECORDS - num_there
