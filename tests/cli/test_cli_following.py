"""Following a journal that is moved away, or replaced by another of its name: nobody waits for ever for what can't come."""

import shutil
from pathlib import Path

import pytest

from refold.engine.engine import Engine
from refold.journal.stores import open_reader
from tests.cli.command import assert_one_line_and_a_hint, process, refold
from tests.kit.engines import eventually

RUN = ("run", "--model", "simulated", "--max-tokens", "3")
FOLLOWERS = [("log", "--follow"), ("copy", "--follow"), ("audit", "follow")]


@pytest.fixture(params=["J.db", "J/"])
def journal(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    url = f"{tmp_path}/{request.param}"
    assert refold(*RUN, "--journal", url, "hello").exit_code == 0
    return url


@pytest.mark.parametrize("is_replaced", [True, False], ids=["replaced", "moved away"])
@pytest.mark.parametrize("verb", FOLLOWERS, ids=" ".join)
def test_whoever_follows_a_journal_is_told_when_its_place_has_another_or_none(
    journal: str, tmp_path: Path, verb: tuple[str, ...], is_replaced: bool
) -> None:
    followed = tmp_path / "followed"
    with followed.open("wb") as out:
        more = [f"{tmp_path}/replica.db"] if verb[0] == "copy" else []
        child = process(*verb, journal, *more, stdout=out)
        eventually(lambda: followed.read_bytes() != b"", 90)
        (tmp_path / "elsewhere").mkdir()
        for path in tmp_path.glob("J*"):
            if "audit" not in path.name:
                shutil.move(path, tmp_path / "elsewhere")
        if is_replaced:
            assert refold(*RUN, "--journal", f"{tmp_path}/other.db", "hello").exit_code == 0
            assert refold("copy", f"{tmp_path}/other.db", journal).exit_code in {0, 3}
        _, stderr = child.communicate(timeout=90)
    assert child.returncode == 3, stderr
    told = "\n".join(line for line in stderr.decode().splitlines() if line != "following; Ctrl-C ends")
    assert_one_line_and_a_hint(told)
    assert "is no longer the journal that was followed: " in told


def test_a_journal_that_is_compacted_and_written_on_is_followed_all_the_same(journal: str, tmp_path: Path) -> None:
    copied = tmp_path / "copied"
    with copied.open("wb") as out:
        child = process("copy", "--follow", journal, f"{tmp_path}/replica.db", stdout=out)
    eventually(lambda: copied.read_bytes() != b"", 90)
    assert refold("compact", journal).exit_code == 0
    with Engine("simulated", journal) as engine:
        engine.run(["more"])
    end = open_reader(journal).head().position
    reader = open_reader(f"{tmp_path}/replica.db")
    eventually(lambda: reader.head().position == end, 90)
    child.terminate()
    child.communicate(timeout=90)


@pytest.mark.parametrize("name", ["none.db", "x" * 5000, "file/none.db"])
@pytest.mark.parametrize("verb", FOLLOWERS, ids=" ".join)
def test_whoever_would_follow_what_is_not_there_is_told_as_everybody(
    tmp_path: Path, verb: tuple[str, ...], name: str
) -> None:
    (tmp_path / "file").touch()
    more = [tmp_path / "replica.db"] if verb[0] == "copy" else []
    told = refold(*verb, tmp_path / name, *more)
    assert told.exit_code == 3
    assert_one_line_and_a_hint(told.stderr)
    assert "bug" not in told.stderr
