"""What is no error but must not pass in silence: one line on stderr that says where, what it means and what to do."""

import json
import shutil
from pathlib import Path

import pytest

from refold import Engine
from refold.journal.stores import open_store
from refold.journal.stores.segments.snapshot_files import pack_snapshot, snapshot_name
from refold.journal.testing_extras import snapshot_at
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

    def test_whatever_else_opens_the_journal_for_writing_logs_it_too(self, journal: Path, mark: Path) -> None:
        damaged, folder = mark.read_bytes(), journal.parent
        for verb in (
            ("redact", journal, "run1-1"),
            ("archive", "--until", "2", "--to", folder / "archive", journal),
            ("compact", journal),
        ):
            mark.write_bytes(damaged)
            status, _, stderr = finished(*map(str, verb))
            assert status == 0, stderr
            (logged,) = events(stderr)
            assert (logged["event"], logged["journal"]) == ("mark_ignored", str(journal)), verb
            assert logged["reason"].startswith(f"{mark} is damaged")

    def test_a_copy_says_it_of_its_source(self, journal: Path, mark: Path, tmp_path: Path) -> None:
        copied = refold("copy", journal, tmp_path / "copy.db")
        assert copied.exit_code == 0
        assert copied.stderr.startswith(f"refold: {mark} is damaged")

    def test_an_engine_that_is_given_a_store_logs_it_with_the_journals_place(
        self, journal: Path, mark: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        store = open_store(str(journal))
        with Engine("simulated", store) as engine:
            engine.run(["by an object"])
        store.close()
        (logged,) = events(capsys.readouterr().err)
        assert (logged["event"], logged["journal"]) == ("mark_ignored", str(journal))
        assert logged["reason"].startswith(f"{mark} is damaged")


class TestALostMarkOfSegments:
    """Engines refuse, readers warn once and go on, and there is a way out."""

    @pytest.fixture
    def journal(self, tmp_path: Path) -> Path:
        path = tmp_path / "plain"
        assert refold(*RUN, "--journal", f"{path}/", "hello").exit_code == 0
        (path / "main" / "mark").unlink()
        return path

    @pytest.mark.parametrize(
        "verb",
        [("log",), ("show",), ("show", "--at", "3"), ("stat",), ("replay",), ("request", "run1-1"), ("quarantine",)],
        ids=" ".join,
    )
    def test_a_verb_that_reads_says_so_in_one_line_and_reads(self, journal: Path, verb: tuple[str, ...]) -> None:
        told = refold(*verb, journal)
        assert told.exit_code == 0, told.stderr
        assert told.stdout
        (line,) = told.stderr.splitlines()
        assert line.startswith(f"refold: {journal}/main/mark is gone: ")
        assert f"`refold copy --accept-end {journal} NEW`" in line

    @pytest.mark.parametrize(
        "verb",
        [
            ("verify",),
            ("head",),
            ("compact",),
            ("archive", "--until", "2", "--to", "elsewhere"),
            ("redact",),
            (*RUN, "more", "--journal"),
        ],
        ids=lambda verb: verb[0],
    )
    def test_a_verb_that_would_vouch_for_the_end_refuses(self, journal: Path, verb: tuple[str, ...]) -> None:
        names = (journal, "run1-1") if verb == ("redact",) else (journal,)
        told = refold(*verb, *names)
        assert told.exit_code == 3
        complaint, hint = told.stderr.splitlines()
        assert f"{journal}/main/mark is gone: " in complaint
        assert hint == f"  hint: `refold log -n 20 {journal}` lists the last of what is whole"

    def test_a_copy_is_made_for_whoever_accepts_the_end_and_says_what_is_not_known(
        self, journal: Path, tmp_path: Path
    ) -> None:
        new = tmp_path / "new"
        refused = refold("copy", journal, f"{new}/")
        assert refused.exit_code == 3
        assert "--accept-end" in refused.stderr
        copied = refold("copy", "--accept-end", journal, f"{new}/")
        assert copied.exit_code == 0, copied.stderr
        *_, head, unknown = copied.stdout.splitlines()
        num_records = int(head.removeprefix("  head ").split(":")[0])
        assert unknown == f"  whether {journal} had acknowledged records from {num_records} on can't be known"
        assert json.loads(refold("copy", "--accept-end", "--json", journal, new).stdout)["end_is_vouched"] is False
        assert json.loads(refold("copy", "--json", new, tmp_path / "third.db").stdout)["end_is_vouched"] is True
        assert refold("verify", new).exit_code == 0
        assert refold(*RUN, "--journal", new, "more").exit_code == 0

    def test_a_copy_says_how_many_records_are_lost_where_a_snapshot_proves_it(
        self, journal: Path, tmp_path: Path
    ) -> None:
        num_records = json.loads(refold("stat", "--json", journal).stdout)["num_records"]
        snapshot = snapshot_at(num_records + 3)
        (journal / "main" / snapshot_name(snapshot.position)).write_bytes(pack_snapshot(snapshot))
        copied = refold("copy", "--accept-end", journal, tmp_path / "new.db")
        assert copied.exit_code == 0, copied.stderr
        assert copied.stdout.splitlines()[-1] == (
            f"  records {num_records} to {num_records + 2} are lost: a snapshot beside the records of {journal} "
            f"says that it had {num_records + 3} records; whether it had acknowledged more can't be known"
        )
        report = json.loads(refold("copy", "--accept-end", "--json", journal, tmp_path / "new.db").stdout)
        assert (report["end_is_vouched"], report["num_lost"], report["lost_told_by"]) == (False, 3, "snapshot")

    def test_a_hint_names_the_journal_also_where_a_verb_has_two_of_them(self, journal: Path) -> None:
        told = refold("redact", journal, "run1-1")
        assert told.exit_code == 3
        assert told.stderr.splitlines()[-1] == f"  hint: `refold log -n 20 {journal}` lists the last of what is whole"
        assert refold("prove", journal, "999").stderr.splitlines()[-1] == (
            f"  hint: `refold log -n 1 {journal}` shows the last record"
        )
