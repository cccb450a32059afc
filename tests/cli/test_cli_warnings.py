"""What is no error but must not pass in silence: one line on stderr that says where, what it means and what to do."""

import json
import shutil
from pathlib import Path

import pytest

from tests.cli.command import finished, refold

RUN = ("run", "--model", "simulated", "--max-tokens", "2")


def events(stderr: str) -> list[dict]:
    """The engine's log lines among others."""
    return [json.loads(line) for line in stderr.splitlines() if line.startswith("{")]


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    path = tmp_path / "x.db"
    assert refold(*RUN, "--journal", path, "hello").exit_code == 0
    return path


class TestADamagedMark:
    @pytest.fixture
    def mark(self, journal: Path) -> Path:
        path = journal.with_name("x.db.mark")
        content = bytearray(path.read_bytes())
        content[70] ^= 1
        path.write_bytes(content)
        return path

    def test_verify_says_so_in_one_line_and_verifies_the_rest(self, journal: Path, mark: Path) -> None:
        told = refold("verify", journal)
        assert told.exit_code == 0, told.stderr
        assert told.stdout.startswith("verified: ")
        (line,) = told.stderr.splitlines()
        assert line.startswith(f"refold: {mark} is damaged (1 of its 1 marks)")
        assert "`refold verify --head`" in line

    def test_a_run_logs_it_and_goes_on_though_an_older_copy_took_the_journals_place(
        self, journal: Path, tmp_path: Path
    ) -> None:
        older = shutil.copy(journal, tmp_path / "older.db")
        assert refold(*RUN, "--journal", journal, "again").exit_code == 0
        shutil.copy(older, journal)
        mark = journal.with_name("x.db.mark")
        mark.write_bytes(mark.read_bytes()[:-1] + b"?")
        status, _, stderr = finished(*RUN, "--journal", str(journal), "once more")
        assert status == 0, stderr
        (logged,) = events(stderr)
        assert logged["event"] == "mark_ignored"
        assert logged["level"] == "warning"
        assert logged["reason"].startswith(f"{mark} is damaged")
        assert refold("verify", journal).stderr == "", "what was appended has moved the mark"
