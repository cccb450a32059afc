"""Groups of records moved about in a journal of segments: every verb names the same record and kind, and what it hints at works."""

import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from refold.engine.engine import Engine
from refold.journal.stores.segments.frames import unpack_group, unpack_segment_header
from tests.cli.command import refold

VERBS = {
    "verify": (),
    "log": (),
    "show": (),
    "stat": (),
    "audit requests": (),
    "compact": (),
    "run": ("--model", "simulated", "hello", "--journal"),
}
AMONG = 20

Change = Callable[[list[bytes], int], list[bytes]]
CHANGES: dict[str, tuple[Change, int, str]] = {
    "twice": (lambda all_, at: [*all_[: at + 1], *all_[at:]], 1, "inserted"),
    "swapped": (lambda all_, at: [*all_[:at], all_[at + 1], all_[at], *all_[at + 2 :]], 0, "reordered"),
    "removed": (lambda all_, at: [*all_[:at], *all_[at + 1 :]], 0, "deleted"),
    "once more behind the end": (lambda all_, at: [*all_, all_[at]], len, "inserted"),
}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("misplaced") / "J"
    with Engine("simulated", f"segments:///{root}").open() as engine:
        engine.run(["one", "two"])
    return root


@pytest.fixture(params=CHANGES)
def damaged(request: pytest.FixtureRequest, original: Path, tmp_path: Path) -> tuple[Path, int, str]:
    """A journal, the first bad position in it, and the kind."""
    root = shutil.copytree(original, tmp_path / "J")
    (path,) = (root / "main").glob("*.seg")
    data = path.read_bytes()
    offset = begin = unpack_segment_header(data).size
    groups, starts = list[bytes](), list[int]()
    while (group := unpack_group(data, offset, offset)) is not None:
        groups.append(data[group.start : group.end])
        starts.append(group.position)
        offset, stop = group.end, group.stop
    change, where, kind = CHANGES[request.param]
    path.write_bytes(data[:begin] + b"".join(change(groups, AMONG)))
    return root, stop if where is len else starts[AMONG + where], kind


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_names_the_first_bad_record_and_what_became_of_it(damaged: tuple[Path, int, str], verb: str) -> None:
    journal, position, kind = damaged
    result = refold(*verb.split(), *VERBS[verb], journal)
    assert result.exit_code == 3, result.stdout
    assert f"record {position} in " in result.stderr
    assert f" ({kind}); restore it from a backup" in result.stderr
    assert set(re.findall(r"record (\d+) in ", result.stderr)) == {str(position)}
    for command in re.findall(r"`(refold log .*?)`", result.stderr):
        assert f"--until {position - 1} " in command
        done = refold(*shlex.split(command)[1:])
        assert (done.exit_code, done.stderr) == (0, "")
        assert int(done.stdout.splitlines()[-1].split()[0]) == position - 1
