"""What clients may have, and how much of everything there was: by the journal alone, and the same from both ends."""

from itertools import pairwise

import pytest

from refold.journal.events import (
    EngineClosed,
    OutputDelivered,
    RequestFinished,
    RequestPreempted,
    RequestSubmitted,
    Sampling,
    StaleOutputConsumed,
    StepScheduled,
    WorkerLost,
)
from refold.projections.outbox import Outbox
from refold.projections.totals import Totals
from refold.scheduler.commands import LoseWorker, StartWorker
from tests.kit.drive import Drive
from tests.kit.sameness import differences
from tests.kit.sentences import all_due, all_of, opened, outputs, random_life, reset, scheduled_tokens


def eventful() -> Drive:
    """Pressure, a reset, an abort and a lost worker."""
    drive = opened(num_blocks=8, max_in_flight_steps=3, max_num_batched_tokens=12)
    for i in range(6):
        drive.submit(f"r{i}", 5 + i, max_tokens=9)
    for turn in range(60):
        if turn == 12:
            reset(drive)
        if turn == 30:
            drive.do(LoseWorker(reason="killed"))
            drive.do(StartWorker(kind="simulated", environment={}))
        if turn == 40:
            drive.abort("r5")
        if not drive.schedule() and drive.orders:
            drive.complete()
    drive.run()
    return drive


def submission(handle: int) -> RequestSubmitted:
    return RequestSubmitted(
        handle=handle,
        request_id=f"r{handle}",
        prompt_token_ids=[1, 2],
        sampling=Sampling(seed=0, max_tokens=9),
        arrival_ns=0,
    )


def delivery(handle: int, index: int, *tokens: int, step: int = 0) -> OutputDelivered:
    return OutputDelivered(
        step=step, handles=[handle], token_ids=list(tokens), first_output_indices=[index], counts=[len(tokens)]
    )


# -- outbox -----------------------------------------------------------------------------------------------------------


def test_everybody_gets_what_is_due_and_an_end() -> None:
    drive = eventful()
    outbox = Outbox()
    for events in drive.records:
        outbox.observe_all(events)
    for name, due in all_due(drive).items():
        output = outbox.by_id[name]
        assert output.finish_reason == ("abort" if name == "r5" else "length")
        assert output.token_ids == due[: len(output.token_ids)]
        assert name == "r5" or output.token_ids == due


def test_what_changed_is_told_and_nothing_else() -> None:
    drive = eventful()
    one_by_one, at_once = Outbox(), Outbox()
    for events in drive.records:
        changed = {output.handle for event in events for output in one_by_one.observe(event)}
        before = {h: (len(o.token_ids), o.finish_reason) for h, o in at_once.by_handle.items()}
        told = at_once.observe_all(events)
        after = {h: (len(o.token_ids), o.finish_reason) for h, o in at_once.by_handle.items()}
        assert set(told) == changed == {h for h in after if after[h] != before.get(h)}


def steady(*columns: tuple[int, int, int]) -> OutputDelivered:
    """One token for each: handle, output index, token."""
    handles, indices, tokens = map(list, zip(*columns, strict=True))
    return OutputDelivered(step=1, handles=handles, token_ids=tokens, first_output_indices=indices)


@pytest.mark.parametrize("index", [0, 2, 3, -1])
def test_nor_does_it_pass_among_others_in_the_steady_decode(index: int) -> None:
    outbox = Outbox()
    outbox.observe_all([submission(handle) for handle in (1, 2, 3)])
    told = outbox.observe_all([steady((1, 0, 7), (2, 0, 8), (3, 0, 9))])
    assert {handle: output.token_ids for handle, output in told.items()} == {1: [7], 2: [8], 3: [9]}
    with pytest.raises(AssertionError, match=f"'r2': index {index}, expected 1"):
        outbox.observe(steady((1, 1, 7), (2, index, 8), (3, 1, 9)))
    with pytest.raises(AssertionError):
        outbox.observe(steady((1, 1, 7), (1, 1, 7)))
    outbox.observe(RequestFinished(handle=2, reason="stop", num_output_tokens=1, stop_token_id=8))
    with pytest.raises(AssertionError, match="a token for 'r2' after its end"):
        outbox.observe(steady((1, 1, 7), (2, 1, 8)))
    assert {handle: output.token_ids for handle, output in outbox.by_handle.items()} == {1: [7], 2: [8], 3: [9]}


def test_what_is_kept_by_columns_is_there_when_somebody_looks() -> None:
    outbox = Outbox()
    outbox.observe_all([submission(handle) for handle in (1, 2, 3)])
    for index in range(70):
        outbox.absorb([steady((1, index, index), (2, index, 100 + index), (3, index, 200 + index))])
        if index in {0, 40, 41}:
            assert outbox.by_id["r2"].token_ids == list(range(100, 101 + index))
    outbox.absorb([steady((3, 70, 270), (1, 70, 70)), steady((3, 71, 271), (1, 71, 71))])
    outbox.absorb([delivery(1, 72, 72, 73), RequestFinished(handle=3, reason="length", num_output_tokens=72)])
    assert {handle: output.token_ids for handle, output in outbox.by_handle.items()} == {
        1: list(range(74)),
        2: list(range(100, 170)),
        3: list(range(200, 272)),
    }


def test_absorbed_or_observed_is_the_same() -> None:
    for drive in (eventful(), *map(random_life, range(12))):
        for every in (1, 7, len(drive.records)):
            observed, absorbed = Outbox(), Outbox()
            for number, events in enumerate(drive.records):
                observed.observe_all(events)
                absorbed.absorb(events)
                if number % every == 0:
                    assert differences(observed, absorbed) == []
            assert differences(observed, absorbed) == []


@pytest.mark.parametrize("num_before", [0, 1, 2, 40])
@pytest.mark.parametrize("index", [0, 2, 41, -1])
def test_nor_does_it_pass_where_tokens_are_kept_by_columns(index: int, num_before: int) -> None:
    outbox = Outbox()
    outbox.absorb([submission(handle) for handle in (1, 2, 3)])
    outbox.absorb([steady((1, at, 7), (2, at, 8), (3, at, 9)) for at in range(num_before)])
    if index != num_before:
        with pytest.raises(AssertionError, match=f"'r2': index {index}, expected {num_before}"):
            outbox.absorb([steady((1, num_before, 7), (2, index, 8), (3, num_before, 9))])
    with pytest.raises(AssertionError):
        outbox.absorb([steady((1, num_before, 7), (1, num_before, 7))])
    with pytest.raises(AssertionError):
        outbox.absorb(
            [OutputDelivered(step=1, handles=[1, 2, 3], token_ids=[7, 8], first_output_indices=[num_before] * 3)]
        )
    with pytest.raises(KeyError):
        outbox.absorb([steady((1, num_before, 7), (4, 0, 7))])
    outbox.absorb([RequestFinished(handle=2, reason="stop", num_output_tokens=num_before, stop_token_id=8)])
    with pytest.raises(AssertionError, match="a token for 'r2' after its end"):
        outbox.absorb([steady((1, num_before, 7), (2, num_before, 8), (3, num_before, 9))])
    assert [output.token_ids for output in outbox.by_handle.values()] == [
        [7] * num_before,
        [8] * num_before,
        [9] * num_before,
    ]


@pytest.mark.parametrize("index", [0, 2, 3, -1])
def test_a_gap_or_a_repetition_stops_at_the_last_door(index: int) -> None:
    outbox = Outbox()
    outbox.observe(submission(1))
    outbox.observe(delivery(1, 0, 7))
    with pytest.raises(AssertionError, match=r"'r1': index .*, expected 1"):
        outbox.observe(delivery(1, index, 8))


def test_no_token_passes_after_the_end_and_there_is_one_end() -> None:
    outbox = Outbox()
    outbox.observe(submission(1))
    outbox.observe(delivery(1, 0, 7))
    end = RequestFinished(handle=1, reason="stop", num_output_tokens=1, stop_token_id=7)
    outbox.observe(end)
    with pytest.raises(AssertionError, match="after its end"):
        outbox.observe(delivery(1, 1, 8))
    with pytest.raises(AssertionError, match="finished twice"):
        outbox.observe(end)


def test_an_end_tells_how_many_tokens_there_were() -> None:
    outbox = Outbox()
    outbox.observe(submission(1))
    with pytest.raises(AssertionError):
        outbox.observe(RequestFinished(handle=1, reason="length", num_output_tokens=1))


def test_the_oldest_of_the_finished_are_forgotten_and_nobody_who_lives() -> None:
    outbox = Outbox(max_finished=2)
    for handle in range(1, 6):
        outbox.observe(submission(handle))
    for handle in (2, 3, 4):
        outbox.observe(RequestFinished(handle=handle, reason="abort", num_output_tokens=0))
    assert list(outbox.by_id) == ["r1", "r3", "r4", "r5"]
    assert list(outbox.by_handle) == [1, 3, 4, 5]


def test_an_id_that_is_used_again_is_not_forgotten_with_its_first_owner() -> None:
    outbox = Outbox(max_finished=1)
    outbox.observe(submission(1))
    outbox.observe(RequestFinished(handle=1, reason="abort", num_output_tokens=0))
    second = RequestSubmitted(
        **{f: getattr(submission(2), f) for f in submission(2).__struct_fields__} | {"request_id": "r1"}
    )
    outbox.observe(second)
    outbox.observe(submission(3))
    outbox.observe(RequestFinished(handle=3, reason="abort", num_output_tokens=0))
    assert outbox.by_id["r1"].handle == 2


# -- totals -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("life", [eventful, lambda: random_life(5), lambda: random_life(6)])
def test_totals_are_what_the_journal_adds_up_to(life: object) -> None:
    drive = life()  # type: ignore[operator]
    totals = Totals()
    for events in drive.records:
        totals.observe_all(events)
    got, finished = outputs(drive), all_of(RequestFinished, drive.records)
    stale = all_of(StaleOutputConsumed, drive.records)
    lost, closed = all_of(WorkerLost, drive.records), 0
    for before, after in pairwise(e for events in drive.records for e in events):
        closed += type(before) is EngineClosed and type(after) is WorkerLost
    assert totals.requests == len(got) == len(finished)
    assert totals.tokens == sum(len(tokens) for tokens in got.values())
    assert totals.finished == {r: [e.reason for e in finished].count(r) for r in {e.reason for e in finished}}
    assert totals.prompt_tokens == sum(len(e.prompt_token_ids) for e in all_of(RequestSubmitted, drive.records))
    assert totals.scheduled_tokens == scheduled_tokens(drive)
    assert totals.steps == len(all_of(StepScheduled, drive.records))
    assert totals.preemptions == len(all_of(RequestPreempted, drive.records))
    assert totals.stale_tokens_delivered + totals.stale_tokens_dropped == sum(len(e.token_ids) for e in stale)
    assert (totals.lost_workers, totals.lost_steps) == (len(lost) - closed, sum(len(e.steps) for e in lost))
    current = sum(len(e.token_ids) for e in all_of(OutputDelivered, drive.records))
    assert totals.tokens == current + totals.stale_tokens_delivered
