"""The page of promises: each has a test, and the tests exist."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "determinism.md"
REFERENCE = re.compile(r"`((?:\w+/)?test_\w+\.py)::(\w+)`")
PROMISE = re.compile(r"\b(?:bit-exact|token-exact|not promised)\b")


def names_in(file: Path) -> set[str]:
    """The names of a file's tests, those in classes too."""
    found = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    return {node.name for node in found if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def unfounded(page: str, folder: Path) -> Iterator[str]:
    """Rows that promise without a test, or promise nothing; tests that don't exist."""
    for row in re.findall(r"^\| .*\|$", page, re.MULTILINE):
        *_, tests, _ = row.split("|")
        if tests.strip() == "tests":
            continue
        if not REFERENCE.search(tests):
            yield f"no test: {row}"
        if not PROMISE.search(row):
            yield f"no promise: {row}"
    for file, name in REFERENCE.findall(page):
        if not (folder / file).is_file() or name not in names_in(folder / file):
            yield f"no such test: {file}::{name}"


def test_every_promise_on_the_page_has_a_test_that_exists() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert not list(unfounded(page, TESTS))
    assert len(REFERENCE.findall(page)) > 20
    assert len(re.findall(r"^\| .*\|$", page, re.MULTILINE)) >= 15


@pytest.mark.parametrize(
    "row",
    [
        "| on Mondays | bit-exact | `project/test_determinism_page.py::test_on_mondays` |",
        "| on Mondays | bit-exact | `project/test_mondays.py::test_on_mondays` |",
        "| on Mondays | bit-exact | measured once |",
        "| on Mondays | likely | `project/test_determinism_page.py::test_a_promise_without_a_test_is_caught` |",
    ],
)
def test_a_promise_without_a_test_is_caught(row: str) -> None:
    assert len(list(unfounded(f"| what | promise | tests |\n|---|---|---|\n{row}\n", TESTS))) == 1
