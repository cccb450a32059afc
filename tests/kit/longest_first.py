"""The order of the tests: those that take longest come first, so that no worker is alone with one of them at the end.

Of several workers, each gets an equal share of the list to begin with, and takes from others when it has none left (`pytest-xdist
--dist worksteal`). So the long tests are dealt out, one to the beginning of each share in turn. All others keep their places beside
their modules', whose fixtures they share.
"""

import os
from collections.abc import Sequence
from itertools import islice
from typing import Protocol, TypeVar

LONGEST = (
    "test_golden_tokens.py::",
    "test_docs.py::test_the_examples_of_the_page_run[docs/tutorial.md]",
    "test_batch_invariance.py::test_the_real_model_gives_the_same_bits_in_any_company",
    "test_golden_engine.py::",
    "test_docs.py::test_the_examples_of_the_page_run[docs/determinism.md]",
    "test_docs.py::test_the_examples_of_the_page_run[docs/how-to.md]",
    "test_killed_writer.py::test_a_writer_killed_forty_times_loses_nothing_that_it_acknowledged[postgresql]",
    "test_docs.py::test_the_examples_of_the_page_run[README.md]",
    "test_compiled.py::test_mypyc_makes_c",
    "test_fault_matrix.py::",
    "test_shrink_journal.py::test_a_failing_journal_shrinks_and_fails_the_same_way",
    "gpu/test_determinism.py::test_a_kill_in_the_middle_changes_none_either",
    "test_executed_again.py::test_another_process_computes_the_same_bits",
    "simulation/test_shrink.py::",
    "test_docs.py::test_the_examples_of_the_page_run[docs/history.md]",
    "test_docs.py::test_the_examples_of_the_page_run[docs/reference/audit.md]",
)
"""Parts of names, the longest first. What several names fit goes to one worker, next to each other: their fixtures take as long."""


class Named(Protocol):
    """What we need of a test."""

    @property
    def nodeid(self) -> str: ...


T = TypeVar("T", bound=Named)


def longest_first(tests: Sequence[T], num_workers: int) -> list[T]:
    """The same tests in the order in which `num_workers` should start them."""
    groups = [[test for test in tests if name in test.nodeid] for name in LONGEST]
    long = {id(test) for group in groups for test in group}
    others = iter([test for test in tests if id(test) not in long])
    ordered: list[T] = []
    for worker in range(num_workers):
        share = [test for group in groups[worker::num_workers] for test in group]
        size = len(tests) * (worker + 1) // num_workers - len(ordered)
        ordered += [*share, *islice(others, max(0, size - len(share)))]
    return [*ordered, *others]


def number_of_workers() -> int:
    """How many workers run these tests; pytest-xdist tells."""
    return int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
