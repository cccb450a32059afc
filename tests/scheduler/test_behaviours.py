"""The page of behaviours names tests that exist, and the behaviours that belong to no other file."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from refold.journal.events import Admission, RequestPreempted, StepScheduled
from tests.kit.drive import Drive
from tests.kit.features import close, drafting, extend, picture, settle, steps
from tests.kit.sentences import all_due, all_of, name_of, named, names, opened, outputs, reset

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "scheduler-behaviours.md"
REFERENCE = re.compile(r"`(test_\w+\.py)::(test_\w+)`")

# -- the page ---------------------------------------------------------------------------------------------------------


@cache
def names_in(file: Path) -> set[str]:
    """The names of the tests of a file."""
    return {node.name for node in ast.parse(file.read_text(encoding="utf-8")).body if isinstance(node, ast.FunctionDef)}


def unfounded(page: str, folder: Path) -> Iterator[str]:
    """Rows of behaviours that name no test and no reason, and tests that don't exist."""
    behaviours, _, _ = page.partition("\n## Where refold differs")
    for row in re.findall(r"^\| .*\|$", behaviours, re.MULTILINE):
        answer = row.split("|")[2]
        if answer.strip() != "test" and not REFERENCE.search(answer) and "left out because" not in answer:
            yield f"neither a test nor a reason: {row}"
    for file, name in REFERENCE.findall(page):
        if not (folder / file).is_file() or name not in names_in(folder / file):
            yield f"no such test: {file}::{name}"


def test_every_behaviour_on_the_page_has_a_test_that_exists_or_a_reason() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert not list(unfounded(page, HERE))
    assert len(REFERENCE.findall(page)) > 100


@pytest.mark.parametrize(
    "row",
    [
        "| it flies | `test_behaviours.py::test_it_flies` |",
        "| it flies | `test_flight.py::test_it_flies` |",
        "| it flies | one day |",
        "| it flies |  |",
    ],
)
def test_a_page_that_promises_too_much_is_caught(row: str) -> None:
    assert len(list(unfounded(f"| behaviour | test |\n|---|---|\n{row}\n", HERE))) == 1


# -- statistics are facts ---------------------------------------------------------------------------------------------


def admissions(drive: Drive) -> dict[str, list[Admission]]:
    """Request -> its admissions, in order."""
    found: dict[str, list[Admission]] = {}
    for step in steps(drive):
        for admission in step.admissions:
            found.setdefault(name_of(drive, step.handles[admission.entry]), []).append(admission)
    return found


def test_an_admission_is_a_fact_once_however_often_it_was_tried() -> None:
    drive = opened(num_blocks=8, max_in_flight_steps=1)
    prompt = list(range(17))
    drive.submit("a", prompt, 8)
    drive.submit("b", [*prompt[:8], *range(100, 113)], 4)
    tried = 0
    while "b" not in admissions(drive):
        drive.schedule()
        tried += 1
        drive.complete()
    drive.run()
    assert tried > 3
    assert {name: len(found) for name, found in admissions(drive).items()} == {"a": 1, "b": 1}
    assert len(admissions(drive)["b"][0].hit_block_ids) == 2


def test_coming_back_is_told_apart_by_its_epoch() -> None:
    drive = opened(num_blocks=16, max_in_flight_steps=1)
    drive.submit("a", 9, 6)
    drive.schedule()
    drive.complete()
    drive.submit("b", 9, 6)
    drive.schedule()
    reset(drive)
    drive.run()
    assert [a.epoch for a in admissions(drive)["a"]] == [0, 1]
    assert len(all_of(RequestPreempted, drive.records)) == 2
    assert outputs(drive) == all_due(drive)


def test_without_a_cache_there_are_no_hits_to_count() -> None:
    drive = opened(num_blocks=16, enable_prefix_caching=False)
    for name in "ab":
        drive.submit(name, list(range(12)), 4)
        settle(drive)
    assert [a.hit_block_ids for found in admissions(drive).values() for a in found] == [[], []]


def test_requests_are_counted_where_they_are() -> None:
    drive = opened(num_blocks=16, max_num_seqs=2, max_in_flight_steps=1)
    for name in "abcd":
        drive.submit(name, 3, 4)
    drive.submit("g", 3, 4, grammar="json")
    queues = drive.state.queues
    assert (names(queues.running), names(queues.waiting)) == ([], ["a", "b", "c", "d", "g"])
    drive.schedule()
    assert (names(queues.running), names(queues.waiting)) == (["a", "b"], ["c", "d", "g"])
    for number, name in enumerate(["g", "c", "d"], 1):
        drive.abort(name)
        assert len(queues.waiting) == 3 - number
        assert len(drive.state.requests.live()) == 5 - number


# -- the end of everything --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 4, 8])
def test_when_all_have_ended_nothing_is_left(depth: int) -> None:
    drive, _ = drafting(
        3,
        lambda position: position % 4,
        max_in_flight_steps=depth,
        num_blocks=12,
        encoder_budget_tokens=6,
        encoder_cache_tokens=8,
    )
    drive.submit("plain", 9, 8)
    drive.submit("gone", 9, 8)
    drive.submit("seeing", 9, 8, media=[picture("cat", 1, 6)])
    drive.submit("talking", 9, 3, resumable=True)
    drive.submit("strict", 9, 8, grammar="json")
    drive.schedule()
    drive.abort("gone")
    settle(drive)
    extend(drive, "talking", [1, 2])
    close(drive, "talking")
    drive.abort("strict")
    settle(drive)

    state = drive.state
    assert state.is_quiescent
    assert (state.requests.by_handle, state.requests.sessions) == ({}, {})
    assert (state.queues.running, state.queues.waiting, state.queues.idle) == ([], [], [])
    assert state.pool.num_free == state.pool.num_blocks == 12
    assert set(state.pool.ref_counts) == {0}
    assert (state.pool.num_fenced, state.pool.provisional) == (0, {})
    assert list(state.encoder.users.values()) == [set()]
    assert all_of(StepScheduled, drive.records)


def test_a_request_that_has_ended_with_work_in_flight_is_kept_until_it_has_come_back() -> None:
    drive = opened(max_in_flight_steps=3)
    drive.submit("a", 3)
    drive.schedule()
    handle = named(drive, "a").handle
    drive.abort("a")
    assert handle in drive.state.requests.by_handle
    drive.complete()
    assert handle not in drive.state.requests.by_handle
