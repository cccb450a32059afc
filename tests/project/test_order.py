"""The order in which the suite runs: long tests first, one worker each, and nothing lost."""

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.kit.longest_first import LONGEST, longest_first

TESTS = Path(__file__).parents[1]


class Named(NamedTuple):
    nodeid: str


def suite(*names: str) -> list[Named]:
    """Ninety short tests in nine files, and these behind them."""
    short = [Named(f"tests/test_{file}.py::test_{number}") for file in range(9) for number in range(10)]
    return [*short, *map(Named, names)]


@pytest.mark.parametrize("num_workers", [1, 2, 3, 5, 8, 64, 200])
def test_every_test_runs_once_however_many_workers_there_are(num_workers: int) -> None:
    tests = suite(*(f"tests/x/{name}" for name in LONGEST))
    ordered = longest_first(tests, num_workers)
    assert sorted(ordered) == sorted(tests)
    assert len(ordered) == len(tests)


def test_each_worker_starts_with_a_long_one_and_the_longest_are_not_on_one() -> None:
    ordered = longest_first(suite(*(f"tests/x/{name}" for name in LONGEST[:6])), 3)
    shares = [ordered[:32], ordered[32:64], ordered[64:]]
    for worker, share in enumerate(shares):
        assert [test.nodeid.removeprefix("tests/x/") for test in share[:2]] == [LONGEST[worker], LONGEST[worker + 3]]


def test_the_others_keep_their_order() -> None:
    tests = suite(*(f"tests/x/{name}" for name in LONGEST))
    short = [test for test in longest_first(tests, 3) if "tests/x/" not in test.nodeid]
    assert short == suite()


@pytest.mark.parametrize("name", LONGEST, ids=range(len(LONGEST)))  # the names themselves would be found in those ids
def test_a_name_on_the_list_is_that_of_a_test(name: str) -> None:
    file, _, function = name.partition("::")
    found = [path for path in TESTS.rglob("test_*.py") if path.as_posix().endswith(f"/{file}")]
    assert len(found) == 1, found
    beginning = rf"^def {re.escape(function.partition('[')[0])}"
    assert not function or re.search(beginning, found[0].read_text(encoding="utf-8"), re.MULTILINE)
