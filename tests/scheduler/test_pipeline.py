"""The pipeline: many steps in flight, samples of a request at a distance, steps back in order, and none in vain."""

import pytest

from refold.journal.events import Event, OutputDelivered, RequestPreempted, StaleOutputConsumed, StepScheduled
from tests.kit.drive import Drive
from tests.kit.features import sampling_steps, settle, steps, turns
from tests.kit.sentences import (
    all_due,
    all_of,
    fill,
    named,
    opened,
    outputs,
    reset,
    scheduled_tokens,
    token_at,
    work,
)

DEPTHS = (1, 2, 4, 8)
CADENCES = [(depth, stagger) for depth in DEPTHS for stagger in sorted({1, 2, depth})]


class Cadence:
    """Follows a journal: how far apart are the samples of one request that are in flight together."""

    def __init__(self) -> None:
        self.in_flight: dict[int, dict[int, bool]] = {}
        self.distances: list[int] = []

    def observe(self, event: Event) -> None:
        match event:
            case StepScheduled():
                samples = {h: e not in event.chunk_entries for e, h in enumerate(event.handles)}
                for handle in (h for h, is_sample in samples.items() if is_sample):
                    earlier = [step for step, entries in self.in_flight.items() if entries.get(handle)]
                    self.distances += [event.step - max(earlier)] if earlier else []
                self.in_flight[event.step] = samples
            case RequestPreempted():
                for entries in self.in_flight.values():
                    entries.pop(event.handle, None)
            case OutputDelivered() | StaleOutputConsumed():
                for handle in event.handles:
                    self.in_flight[event.step].pop(handle, None)


def busy(depth: int, stagger: int) -> Drive:
    """Six requests that come in one by one, served to their end."""
    drive = opened(
        max_in_flight_steps=depth, decode_stagger=stagger, num_blocks=64, max_num_seqs=6, max_num_batched_tokens=12
    )
    for i in range(6):
        drive.submit(f"r{i}", 3 + 4 * (i % 3), max_tokens=9 + i)
        drive.schedule()
        if len(drive.orders) == depth:
            drive.complete()
    drive.run()
    return drive


# -- cadence ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("depth", "stagger"), CADENCES)
def test_samples_of_a_request_that_are_in_flight_together_keep_their_distance(depth: int, stagger: int) -> None:
    cadence = Cadence()
    for events in busy(depth, stagger).records:
        for event in events:
            cadence.observe(event)
    assert all(distance >= stagger for distance in cadence.distances), cadence.distances
    if depth > stagger:
        assert stagger in cadence.distances, "and no more than that"
    else:
        assert cadence.distances == [], "with a distance as long as the window, one sample is in flight at a time"


@pytest.mark.parametrize(("depth", "stagger"), CADENCES)
def test_cadence_changes_no_token(depth: int, stagger: int) -> None:
    drive = busy(depth, stagger)
    assert outputs(drive) == all_due(drive)


def test_with_company_a_request_goes_again_at_its_distance_while_its_last_sample_is_in_flight() -> None:
    drive = opened(max_in_flight_steps=8, decode_stagger=2)
    drive.submit("a", 3)
    assert work(drive, drive.schedule()) == {"a": 3}
    drive.submit("b", 3)
    scheduled = [work(drive, drive.schedule()) for _ in range(4)]
    assert scheduled == [{"b": 3}, {"a": 1}, {"b": 1}, {"a": 1}]
    assert named(drive, "a").num_sampling_in_flight == 3


def test_three_requests_fill_three_stages_in_turn() -> None:
    drive = opened(max_in_flight_steps=4, decode_stagger=3, num_blocks=32)
    for name in "abc":
        drive.submit(name, 3, max_tokens=20)
        drive.schedule()
    order = [next(iter(work(drive, fill_one(drive)))) for _ in range(9)]
    assert order == list("abcabcabc")


def fill_one(drive: Drive) -> list[Event]:
    """One more step, with the oldest come back if there is no room."""
    if len(drive.orders) == drive.config.max_in_flight_steps:
        drive.complete()
    return drive.schedule()


@pytest.mark.parametrize("stagger", [2, 4, 8])
def test_a_lone_request_waits_for_its_own_sample_and_for_nothing_else(stagger: int) -> None:
    drive = opened(max_in_flight_steps=8, decode_stagger=stagger)
    drive.submit("a", 3, max_tokens=6)
    drive.schedule()
    for _ in range(5):
        assert drive.schedule() == [], "its sample is in flight, and there is no other step to count"
        drive.complete()
        assert work(drive, drive.schedule()) == {"a": 1}, "as soon as it is back, however near the last step is"
    drive.run()
    assert sampling_steps(drive, "a") == [0, 1, 2, 3, 4, 5]


def test_without_a_distance_a_lone_request_fills_the_window() -> None:
    drive = opened(max_in_flight_steps=4, decode_stagger=1)
    drive.submit("a", 3)
    fill(drive)
    assert len(drive.state.window.in_flight) == 4
    assert sampling_steps(drive, "a") == [0, 1, 2, 3]


def test_chunks_of_a_prompt_follow_each_other_without_distance() -> None:
    drive = opened(max_in_flight_steps=4, decode_stagger=4, max_num_batched_tokens=4)
    drive.submit("a", 11)
    scheduled = [work(drive, events) for events in iter(drive.schedule, [])]
    assert scheduled == [{"a": 4}, {"a": 4}, {"a": 3}]
    assert sampling_steps(drive, "a") == [2], "then it samples, and keeps its distance"


def test_one_who_keeps_its_distance_is_no_hindrance_to_a_newcomer() -> None:
    drive = opened(max_in_flight_steps=4, decode_stagger=4)
    drive.submit("a", 3)
    drive.schedule()
    assert drive.schedule() == []
    drive.submit("b", 3)
    assert work(drive, drive.schedule()) == {"b": 3}


def test_a_sample_that_is_to_be_dropped_is_no_reason_to_keep_a_distance() -> None:
    drive = opened(max_in_flight_steps=4, decode_stagger=4, num_blocks=16)
    drive.submit("a", 3)
    drive.schedule()
    reset(drive)
    assert work(drive, drive.schedule()) == {"a": 3}, "its epoch has no sample in flight"
    assert drive.schedule() == [], "now it has"
    drive.run()
    assert outputs(drive) == all_due(drive)


# -- no step in vain --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5])
@pytest.mark.parametrize(("depth", "stagger"), CADENCES)
def test_no_token_is_computed_in_vain_at_any_depth_and_distance(depth: int, stagger: int, max_tokens: int) -> None:
    drive = opened(max_in_flight_steps=depth, decode_stagger=stagger, num_blocks=16)
    drive.submit("a", 5, max_tokens)
    drive.schedule()
    drive.submit("b", 9, max_tokens)
    drive.run()
    assert scheduled_tokens(drive) == 5 + 9 + 2 * (max_tokens - 1)
    assert len(sampling_steps(drive, "a")) == len(sampling_steps(drive, "b")) == max_tokens
    assert not all_of(StaleOutputConsumed, drive.records), "nothing was in flight beyond the end"


@pytest.mark.parametrize(("depth", "stagger"), CADENCES)
def test_the_models_length_is_an_end_that_wastes_no_step_either(depth: int, stagger: int) -> None:
    drive = opened(max_in_flight_steps=depth, decode_stagger=stagger, max_model_len=12)
    drive.submit("a", 7, max_tokens=50)
    drive.run()
    assert scheduled_tokens(drive) == 11
    assert len(outputs(drive)["a"]) == 5


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_stop_token_that_nobody_could_foresee_wastes_what_is_in_flight_and_no_more(depth: int) -> None:
    drive = opened(max_in_flight_steps=depth, num_blocks=16)
    drive.submit("a", 5, max_tokens=20, stop_token_ids=(token_at(drive, "a", 7, prompt=5),))
    drive.run()
    assert outputs(drive) == all_due(drive)
    assert len(outputs(drive)["a"]) == 3
    assert scheduled_tokens(drive) == 5 + 2 + (depth - 1)


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_request_whose_end_is_in_flight_gives_its_place_in_the_step_to_others(depth: int) -> None:
    drive = opened(max_in_flight_steps=depth, max_num_batched_tokens=4, num_blocks=16)
    drive.submit("a", 4, max_tokens=1)
    drive.submit("b", 4, max_tokens=1)
    scheduled = [work(drive, events) for events in turns(drive) if work(drive, events)]
    assert scheduled == [{"a": 4}, {"b": 4}]


# -- aborted on the way -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", DEPTHS)
def test_aborted_one_by_one_each_keeps_what_it_was_given_and_gets_no_more(depth: int) -> None:
    drive = opened(max_in_flight_steps=depth, num_blocks=80, max_num_seqs=10, max_num_batched_tokens=64)
    for i in range(10):
        drive.submit(f"r{i}", 5, max_tokens=25)
    kept = {}
    for i in range(10):
        fill(drive)
        drive.complete()
        drive.abort(f"r{i}")
        kept[f"r{i}"] = outputs(drive)[f"r{i}"]
    while drive.orders:
        drive.complete()
    assert {name: len(tokens) for name, tokens in kept.items()} == {f"r{i}": i + 1 for i in range(10)}
    assert outputs(drive) == kept
    assert drive.state.is_quiescent
    assert drive.state.pool.num_free == drive.state.pool.num_blocks


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("computed", [4, 8, 12, 16, 20])
def test_a_prompt_in_chunks_may_lose_its_place_at_any_border(computed: int, depth: int) -> None:
    drive = opened(max_in_flight_steps=depth, num_blocks=16, max_num_batched_tokens=4)
    drive.submit("a", 20, max_tokens=6)
    while named(drive, "a").num_computed_tokens < computed:
        if not drive.schedule():
            drive.complete()
    assert named(drive, "a").num_computed_tokens == computed
    reset(drive)
    assert named(drive, "a").num_output_placeholders == 0
    drive.run()
    assert outputs(drive) == all_due(drive)
    assert scheduled_tokens(drive) == computed + 20 + 5, "what was computed, then all of it again"


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("ahead", range(1, 8))
def test_or_give_it_up_for_another(ahead: int, depth: int) -> None:
    """Two prompts in chunks of three, and blocks for one and a bit: the urgent one comes a few chunks later."""
    drive = opened(
        max_in_flight_steps=depth,
        num_blocks=10,
        max_num_batched_tokens=6,
        long_prefill_token_threshold=3,
        policy="priority",
        admit_full_sequence=False,
        enable_prefix_caching=False,
    )
    drive.submit("a", 30, max_tokens=6, priority=2)
    while named(drive, "a").num_computed_tokens < 3 * ahead:
        if not drive.schedule():
            drive.complete()
    drive.submit("b", 30, max_tokens=6, priority=1)
    drive.run()
    preempted = all_of(RequestPreempted, drive.records)[0]
    assert (preempted.handle, preempted.num_computed_tokens < 30) == (1, True), "in the middle of its prompt"
    assert outputs(drive) == all_due(drive)


# -- order ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("depth", "stagger"), CADENCES)
def test_steps_come_back_in_the_order_in_which_they_were_scheduled(depth: int, stagger: int) -> None:
    drive = busy(depth, stagger)
    scheduled = [step.step for step in steps(drive)]
    assert scheduled == list(range(len(scheduled)))
    assert [event.step for event in all_of(OutputDelivered, drive.records)] == scheduled


@pytest.mark.parametrize(("depth", "stagger"), CADENCES)
def test_the_window_is_filled_as_far_as_it_goes_and_never_beyond(depth: int, stagger: int) -> None:
    drive = opened(max_in_flight_steps=depth, decode_stagger=stagger, num_blocks=64, max_num_seqs=8)
    for i in range(depth):
        drive.submit(f"r{i}", 3, max_tokens=24)
        drive.schedule()
    assert len(drive.state.window.in_flight) == depth
    assert drive.schedule() == []
    for _ in range(12):
        drive.complete()
        fill(drive)
        assert len(drive.state.window.in_flight) == depth, "one request per stage keeps every stage at work"
    settle(drive)
    assert outputs(drive) == all_due(drive)
