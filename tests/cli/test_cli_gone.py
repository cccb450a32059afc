"""A SQLite journal whose file is gone while its mark is there is a loss, not a journal that has never been."""

from pathlib import Path

import pytest

from refold.engine.engine import Engine
from tests.cli.command import refold

VERBS = {
    "log": (),
    "stat": (),
    "verify": (),
    "head": (),
    "migrate": (),
    "migrate --check": (),
    "audit requests": (),
    "run": ("--model", "simulated", "hello", "--journal"),
}


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_says_that_the_file_is_gone_and_how_to_go_on(tmp_path: Path, verb: str) -> None:
    journal = tmp_path / "J.db"
    with Engine("simulated", journal).open() as engine:
        engine.run(["one"])
    journal.rename(tmp_path / "elsewhere.db")
    result = refold(*verb.split(), *VERBS[verb], journal)
    assert result.exit_code == 3, result.stdout
    assert f"{journal} is gone, but records up to" in result.stderr
    assert f"put it back, or remove {journal}.mark too to begin a new journal" in result.stderr
    Path(f"{journal}.mark").unlink()
    result = refold(*verb.split(), *VERBS[verb], journal)
    assert "is gone" not in result.stderr
