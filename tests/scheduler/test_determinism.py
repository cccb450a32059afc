"""One journal, one state; one state and one command, one decision. On any machine, in any process, under any hash seed."""

import os
import subprocess
import sys
from array import array
from collections import deque
from pathlib import Path

import msgspec
import pytest

from refold.journal.codec import encode
from refold.journal.events import (
    Event,
    OutputDelivered,
    RequestFinished,
    RequestPreempted,
    StaleOutputConsumed,
    StepScheduled,
)
from refold.scheduler.commands import Command, CompleteStep, RecordDigest, ScheduleStep
from refold.scheduler.decide import decide
from refold.scheduler.fold import fold, fold_all
from refold.scheduler.state import State, digest
from tests.kit.drive import Drive
from tests.kit.form import interpreted_only
from tests.kit.sameness import slots_of
from tests.kit.sentences import all_of, crashed, fill, opened, random_life
from tests.kit.simulation import Simulation

ROOT = Path(__file__).resolve().parents[2]
HASH_SEEDS = ("0", "1", "2")

FOLD = r"""
import sys
from refold.journal.codec import decode
from refold.journal.events import SCHEMA_VERSION
from refold.journal.record import Record
from refold.scheduler.fold import fold_all
from refold.scheduler.state import State, digest
state = State()
for position, line in enumerate(open(sys.argv[1], "rb")):
    body, content = line.rstrip(b"\n").split(b"\t")
    fold_all(state, decode(Record(position, 1, SCHEMA_VERSION, 0, body, content, b"", b"")))
    print(digest(state))
"""


def in_a_fresh_process(hash_seed: str, *arguments: str) -> list[str]:
    """What a new interpreter prints, under this hash seed."""
    command = [sys.executable, *arguments]
    environment = os.environ | {"PYTHONHASHSEED": hash_seed}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_journal_folds_alike_at_every_record_in_any_process_and_under_any_hash_seed(tmp_path: Path) -> None:
    simulation = Simulation(11)
    simulation.play()
    state, expected = State(), []
    for events in simulation.drive.records:
        fold_all(state, events)
        expected.append(digest(state))
    assert len(set(expected)) > 50
    journal = tmp_path / "bodies.jsonl"
    journal.write_bytes(b"\n".join(b"\t".join(encode(events)) for events in simulation.drive.records))
    for hash_seed in HASH_SEEDS:
        assert in_a_fresh_process(hash_seed, "-c", FOLD, str(journal)) == expected


# -- deciding again ---------------------------------------------------------------------------------------------------


def rebuilt(events: list[Event], state: State) -> Command | None:
    """The command that led to a record, by what the record and the state before it tell; None for other records."""
    kinds = {type(event) for event in events}
    if StepScheduled in kinds or any(e.reason == "kv_pressure" for e in all_of(RequestPreempted, [events])):
        return ScheduleStep()
    if not kinds & {OutputDelivered, StaleOutputConsumed}:
        return None
    step = state.window.in_flight[0]
    came_back: dict[int, list[int]] = {}
    for event in events:
        if isinstance(event, OutputDelivered | StaleOutputConsumed):
            tokens = iter(event.token_ids)
            for handle, count in zip(event.handles, event.counts or [1] * len(event.handles), strict=True):
                came_back[handle] = [next(tokens) for _ in range(count)]
    counts = [len(came_back[handle]) for handle in step.handles]
    positions = [len(r.tokens) if count else -1 for r, count in zip(step.requests, counts, strict=True)]
    token_ids = [token for handle in step.handles for token in came_back[handle]]
    return CompleteStep(
        step=step.step, generation=state.worker_generation, counts=counts, token_ids=token_ids, positions=positions
    )


@pytest.mark.parametrize("seed", range(100, 116))
def test_every_step_of_a_journal_would_be_decided_again_from_the_journal_alone(seed: int) -> None:
    drive = random_life(seed)
    state, decided = State(), 0
    for events in drive.records:
        command = rebuilt(events, state)
        if command is not None:
            before = digest(state)
            assert decide(state, command) == events
            assert decide(state, command) == events, "twice: deciding changes nothing"
            assert digest(state) == before
            decided += 1
        fold_all(state, events)
    assert decided > 30
    assert digest(state) == digest(drive.state)


@pytest.mark.parametrize("seed", range(100, 116))
def test_an_event_says_for_ever_what_it_said_when_it_was_decided(seed: int) -> None:
    """The journal's thread encodes it later; nobody may change a list that it holds."""
    simulation = Simulation(seed)
    simulation.play()
    assert [encode(events) for events in simulation.drive.records] == simulation.drive.bytes


def test_a_decision_is_that_of_the_bytes_too() -> None:
    """Half a journal, folded from its bytes by another, decides what the first one decided."""
    drive = opened(num_blocks=10, max_in_flight_steps=4)
    for i in range(6):
        drive.submit(f"r{i}", 3 + i)
    fill(drive)
    for _ in range(12):
        twin = crashed(drive.records, drive.config)
        assert digest(twin.state) == digest(drive.state)
        output = drive.run_worker()
        command = CompleteStep(
            step=output.step,
            generation=output.generation,
            counts=output.counts,
            token_ids=output.token_ids,
            positions=output.positions,
        )
        assert twin.do(command) == drive.do(command)
        assert twin.do(ScheduleStep()) == drive.do(ScheduleStep())


# -- what a digest sees -----------------------------------------------------------------------------------------------


DERIVED = {
    "first_output_position",
    "plain_until",
    "stop_ids",
    "requests",
    "filled",
    "run",
    "batch",
}
DERIVED |= {"sampled_positions", "due_entries", "last_entries"}
"""What follows from other fields (a request's stop tokens from its sampling, a step's requests from its handles, runs from the
order of sharing), or is over before its record ends (what a step filled). A batch's columns are its step's, or follow from its
requests."""


def another(value: object) -> object:
    """A value that differs from this one, of its kind."""
    match value:
        case bool():
            return not value
        case int():
            return value + 1
        case str():
            return value + "x"
        case None:
            return "x"
        case frozenset():
            return value | {99}
        case set():
            return {*value, 99}
        case tuple():
            return (*value, 99)
        case array():
            return array("q", [*value, 99])
        case dict():
            return value | {99: "drop"}
        case list() | deque():
            return type(value)([*value, value[0] if value else 99])
    return msgspec.structs.replace(value, seed=value.seed + 1)  # type: ignore[type-var, attr-defined]


@interpreted_only
def test_a_digest_sees_every_field_of_a_request_and_of_a_step_in_flight() -> None:
    """A new field that decisions depend on and that the digest forgets fails here."""
    drive = opened(speculation="worker", num_speculative_tokens=2)
    drive.submit("a", 9)
    drive.schedule()
    drive.complete()
    drive.schedule()
    step = drive.state.window.in_flight[0]
    assert step.epochs is step.batch.epochs
    assert step.handles is step.batch.handles
    held = (next(iter(drive.state.requests.by_handle.values())), step)
    expected, seen = digest(drive.state), 0
    for part in held:
        for name in slots_of(type(part)):
            if name in DERIVED:
                continue
            before = getattr(part, name)
            setattr(part, name, another(before))
            assert digest(drive.state) != expected, f"{type(part).__name__}.{name}"
            setattr(part, name, before)
            seen += 1
    assert digest(drive.state) == expected
    assert seen > 39


def test_a_digest_sees_the_order_of_free_blocks() -> None:
    """Two pools with the same free blocks in another order would hand out others next."""
    drive = opened()
    before = digest(drive.state)
    drive.state.pool.free_blank.move_to_end(3)
    assert digest(drive.state) != before


def test_a_recorded_digest_is_that_of_the_state_before_it() -> None:
    drive: Drive = opened()
    drive.submit("a", 6)
    drive.schedule()
    expected = digest(drive.state)
    (event,) = drive.do(RecordDigest())
    assert event.digest == expected  # type: ignore[attr-defined]
    assert digest(drive.state) == expected, "recording it changes nothing"


def test_an_event_that_does_not_fit_the_state_stops_the_fold() -> None:
    """A damaged journal must not fold to some state or other."""
    drive = random_life(3)
    for index, events in enumerate(drive.records):
        if any(isinstance(event, StepScheduled | OutputDelivered | RequestFinished) for event in events):
            state = State()
            for earlier in drive.records[:index]:
                fold_all(state, earlier)
            for event in events:
                fold(state, event)
            with pytest.raises((AssertionError, KeyError, IndexError)):
                fold_all(state, events)
