"""Two runs of one program: what differs by nature is a note, what was decided otherwise is where they part."""

from pathlib import Path

import pytest

from refold import Engine, SamplingParams
from refold.engine.history.compare import Compared, compare
from refold.journal.stores import open_reader
from tests.cli.command import refold, rows

GREEDY = SamplingParams(max_tokens=6, temperature=0, seed=1)


def journal(
    path: Path, *, seed: int | None = None, ids: list[str] | None = None, params: SamplingParams = GREEDY
) -> str:
    """A run of two prompts, each served before the next is asked, step by step: nothing in it depends on who is faster."""
    with Engine("simulated?eos=-1", path, seed=seed, max_in_flight_steps=1) as engine:
        for number, prompt in enumerate([[1, 2, 3], [4, 5]]):
            engine.run([prompt], params, request_ids=None if ids is None else [ids[number]])
    return str(path)


def compared(left: str, right: str, *, exact: bool = False) -> Compared:
    one, other = open_reader(left), open_reader(right)
    try:
        return compare(one, other, exact=exact)
    finally:
        one.close()
        other.close()


def test_engines_with_seeds_of_their_own_and_requests_without_ids_are_alike_but_for_notes(tmp_path: Path) -> None:
    one, other = (journal(tmp_path / name) for name in ("a.db", "b.db"))
    found = compared(one, other)
    assert found.parting is None
    assert [note.split(":")[0].split(",")[0] for note in found.notes] == [
        "the engines had different seeds",
        "requests without an id got random ones",
        "digests of the state cover seeds and ids",
    ]
    result = refold("diff", one, other)
    assert result.exit_code == 0
    assert "alike: " in result.stdout
    assert "note: the engines had different seeds: " in result.stderr
    (row,) = rows(refold("diff", "--json", one, other).stdout)
    assert (row["ok"], len(row["notes"])) == (True, 3)


def test_exactness_can_be_demanded(tmp_path: Path) -> None:
    one, other = (journal(tmp_path / name) for name in ("a.db", "b.db"))
    found = compared(one, other, exact=True)
    assert found.parting is not None
    assert found.parting.words.startswith("they part at record 0: EngineOpened.root_seed")
    assert found.notes == ()
    assert refold("diff", "--exact", one, other).exit_code == 1


def test_two_runs_part_where_something_was_decided_otherwise(tmp_path: Path) -> None:
    drawn = SamplingParams(max_tokens=6, temperature=1)
    one, other = (journal(tmp_path / name, params=drawn) for name in ("a.db", "b.db"))
    found = compared(one, other)
    assert found.parting is not None
    assert found.parting.words.split(": ")[1].startswith("OutputDelivered.token_ids"), "other noise, other tokens"
    assert "requests without a seed got drawn ones, which differ as the engines' do" in found.notes


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"ids": ["x", "y"]}, "request_id"),
        ({"params": SamplingParams(max_tokens=6, temperature=0, seed=2)}, "sampling.seed"),
    ],
)
def test_ids_and_seeds_that_somebody_gave_count(tmp_path: Path, options: dict[str, object], where: str) -> None:
    one = journal(tmp_path / "a.db", seed=7, ids=["x", "z"])
    other = journal(tmp_path / "b.db", seed=7, **({"ids": ["x", "z"]} | options))  # type: ignore[arg-type]
    found = compared(one, other)
    assert found.parting is not None
    assert f"RequestSubmitted.{where}" in found.parting.words
    assert found.notes == ()


def test_the_same_seed_and_the_same_ids_leave_nothing_to_note(tmp_path: Path) -> None:
    one, other = (journal(tmp_path / name, seed=7, ids=["x", "y"]) for name in ("a.db", "b.db"))
    assert compared(one, other)[2:] == (None, ())
