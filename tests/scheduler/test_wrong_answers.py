"""A worker is not trusted: an answer that can't be its answer is refused, and changes nothing."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from refold.gpu.batch import StepOutput
from refold.journal.errors import Rejected, WorkerLost
from refold.scheduler.commands import LoseWorker, StartWorker
from tests.kit.drive import Drive
from tests.kit.sentences import all_due, nothing_changes, opened, outputs, reset, under_pressure

Wrong = Callable[[StepOutput], dict[str, Any]]


def mixed() -> tuple[Drive, StepOutput]:
    """A step that decodes `a` and `b` and computes a chunk of `c` is in flight; its right answer is known."""
    drive = opened(num_blocks=32, max_num_batched_tokens=12)
    drive.submit("a", 4)
    drive.submit("b", 4)
    drive.schedule()
    drive.complete()
    drive.submit("c", 20)
    drive.schedule()
    return drive, drive.run_worker()


def decoding() -> tuple[Drive, StepOutput]:
    """Two requests decode, nothing else: the short way through completion."""
    drive = opened(num_blocks=32)
    drive.submit("a", 4)
    drive.submit("b", 4)
    drive.schedule()
    drive.complete()
    drive.schedule()
    return drive, drive.run_worker()


def stale() -> tuple[Drive, StepOutput]:
    """As `mixed`, but the epoch of all of them is over."""
    drive, right = mixed()
    reset(drive)
    return drive, right


def changed(right: StepOutput, changes: dict[str, Any]) -> StepOutput:
    return StepOutput(**(msgspec.structs.asdict(right) | changes))


SHAPES: dict[str, Wrong] = {
    "one count too few": lambda r: {"counts": r.counts[:-1]},
    "one count too many": lambda r: {"counts": [*r.counts, 1]},
    "no counts": lambda r: {"counts": []},
    "one position too few": lambda r: {"positions": r.positions[:-1]},
    "one position too many": lambda r: {"positions": [*r.positions, 9]},
    "no tokens": lambda r: {"token_ids": []},
    "one token too few": lambda r: {"token_ids": r.token_ids[:-1]},
    "one token too many": lambda r: {"token_ids": [*r.token_ids, 1]},
    "an entry that sampled nothing": lambda r: {"counts": [0, *r.counts[1:]], "token_ids": r.token_ids[1:]},
    "an entry that sampled twice": lambda r: {"counts": [2, *r.counts[1:]], "token_ids": [1, *r.token_ids]},
    "a negative count": lambda r: {"counts": [-1, *r.counts[1:]]},
    "two for one and none for another": lambda r: {"counts": [2, 0, *r.counts[2:]]},
    "a negative token": lambda r: {"token_ids": [-1, *r.token_ids[1:]]},
    "a token beyond the vocabulary": lambda r: {"token_ids": [*r.token_ids[:-1], 1000]},
    "a token beyond all bounds": lambda r: {"token_ids": [2**80, *r.token_ids[1:]]},
    "one digest too few": lambda r: {"digests": [7] * (len(r.token_ids) - 1)},
    "a negative digest": lambda r: {"digests": [-1] * len(r.token_ids)},
    "a digest of 65 bits": lambda r: {"digests": [1 << 64] * len(r.token_ids)},
}
CHUNKS: dict[str, Wrong] = {
    "a chunk that sampled": lambda r: {"counts": [1, 1, 1], "token_ids": [*r.token_ids, 5]},
    "a chunk that sampled in another's place": lambda r: {"counts": [1, 0, 1]},
}
POSITIONS: dict[str, Wrong] = {
    "a position too early": lambda r: {"positions": [r.positions[0] - 1, *r.positions[1:]]},
    "a position too late": lambda r: {"positions": [r.positions[0], r.positions[1] + 1, *r.positions[2:]]},
    "no position": lambda r: {"positions": [-1, *r.positions[1:]]},
}


@pytest.mark.parametrize("wrong", (SHAPES | POSITIONS).values(), ids=(SHAPES | POSITIONS).keys())
@pytest.mark.parametrize("given", [mixed, decoding])
def test_a_wrong_answer_is_the_workers_end_and_changes_nothing(
    given: Callable[[], tuple[Drive, StepOutput]], wrong: Wrong
) -> None:
    drive, right = given()
    with nothing_changes(drive), pytest.raises(WorkerLost, match=rf"step {right.step}"):
        drive.deliver(changed(right, wrong(right)))
    recovers(drive)


@pytest.mark.parametrize("wrong", CHUNKS.values(), ids=CHUNKS.keys())
def test_a_chunk_has_nothing_to_say(wrong: Wrong) -> None:
    drive, right = mixed()
    with nothing_changes(drive), pytest.raises(WorkerLost):
        drive.deliver(changed(right, wrong(right)))
    recovers(drive)


@pytest.mark.parametrize("wrong", (SHAPES | CHUNKS).values(), ids=(SHAPES | CHUNKS).keys())
def test_stale_output_in_the_wrong_shape_is_refused_as_well(wrong: Wrong) -> None:
    drive, right = stale()
    with nothing_changes(drive), pytest.raises(WorkerLost):
        drive.deliver(changed(right, wrong(right)))
    recovers(drive)


def test_the_right_answer_is_still_welcome_after_a_wrong_one() -> None:
    drive, right = mixed()
    with pytest.raises(WorkerLost):
        drive.deliver(changed(right, {"counts": []}))
    assert drive.deliver(right)
    drive.run()
    assert outputs(drive) == all_due(drive)


@pytest.mark.parametrize(("token", "is_one"), [(0, True), (999, True), (1000, False), (-1, False)])
def test_the_vocabulary_ends_where_it_says(token: int, is_one: bool) -> None:
    drive, right = decoding()
    answer = changed(right, {"token_ids": [token, right.token_ids[1]]})
    if is_one:
        assert drive.deliver(answer)
        return
    with nothing_changes(drive), pytest.raises(WorkerLost, match=r"vocabulary has 1000"):
        drive.deliver(answer)


def test_a_position_is_told_with_the_request_and_the_one_that_is_next() -> None:
    drive, right = decoding()
    with pytest.raises(WorkerLost, match=r"sampled position 7 of request 'b' in step 1; position 5 is next"):
        drive.deliver(changed(right, {"positions": [5, 7]}))


def test_a_stale_token_that_is_still_to_be_delivered_must_be_for_its_place() -> None:
    drive = under_pressure()
    drive.schedule()
    right = drive.run_worker()
    with nothing_changes(drive), pytest.raises(WorkerLost, match=r"position 6 of request 'b'.*position 7 is next"):
        drive.deliver(changed(right, {"positions": [7, 6]}))
    recovers(drive)


# -- order, repetition, generations -----------------------------------------------------------------------------------


def test_steps_come_back_in_order() -> None:
    drive = opened(num_blocks=32, max_in_flight_steps=3)
    drive.submit("a", 4)
    for _ in range(3):
        drive.schedule()
    answers = [drive.run_worker() for _ in range(3)]
    with nothing_changes(drive), pytest.raises(WorkerLost, match=r"answered step 2 before step 0"):
        drive.deliver(answers[2])
    with nothing_changes(drive), pytest.raises(WorkerLost, match=r"answered step 1 before step 0"):
        drive.deliver(answers[1])
    for answer in answers:
        drive.deliver(answer)
    drive.run()
    assert outputs(drive) == all_due(drive)


@pytest.mark.parametrize("later", [0, 1])
def test_an_answer_is_taken_once(later: int) -> None:
    drive = opened(num_blocks=32, max_in_flight_steps=2)
    drive.submit("a", 4)
    drive.schedule()
    for _ in range(later):
        drive.schedule()
    answer = drive.run_worker()
    drive.deliver(answer)
    with nothing_changes(drive), pytest.raises(Rejected, match=r"step 0 came twice"):
        drive.deliver(answer)
    drive.run()
    assert outputs(drive) == all_due(drive)


@pytest.mark.parametrize("step", [0, 7, -1, 2**70])
def test_an_answer_to_nothing_is_refused(step: int) -> None:
    drive = opened()
    answer = StepOutput(step=step, generation=1, counts=[], token_ids=[], positions=[])
    with nothing_changes(drive), pytest.raises(Rejected, match=rf"step {step} "):
        drive.deliver(answer)


def test_an_answer_from_an_earlier_worker_is_refused_even_for_a_step_of_the_same_shape() -> None:
    drive, late = decoding()
    drive.do(LoseWorker(reason="test"))
    with nothing_changes(drive), pytest.raises(Rejected, match=r"generation 1"):
        drive.deliver(late)
    drive.do(StartWorker(kind="simulated", environment={}))
    drive.schedule()
    drive.complete()
    with nothing_changes(drive), pytest.raises(Rejected, match=r"generation 1, 2 is current"):
        drive.deliver(late)
    drive.run()
    assert outputs(drive) == all_due(drive)


def test_an_answer_from_a_worker_that_is_still_to_come_is_refused() -> None:
    drive, right = decoding()
    with nothing_changes(drive), pytest.raises(Rejected, match=r"generation 2"):
        drive.deliver(changed(right, {"generation": 2}))


def test_an_answer_to_a_dead_worker_is_refused() -> None:
    drive, right = decoding()
    drive.do(LoseWorker(reason="test"))
    with nothing_changes(drive), pytest.raises(Rejected):
        drive.deliver(right)


def recovers(drive: Drive) -> None:
    """The worker is replaced, and nobody misses a token."""
    drive.do(LoseWorker(reason="it answered nonsense"))
    drive.do(StartWorker(kind="simulated", environment={}))
    drive.run()
    assert outputs(drive) == all_due(drive)
