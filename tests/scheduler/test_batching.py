"""Batching: which tokens a step takes, under which budgets, and who goes first."""

import pytest

from refold.journal.events import RequestSubmitted, StepScheduled
from tests.kit.drive import Drive
from tests.kit.sentences import (
    all_due,
    all_of,
    drain,
    ends,
    fill,
    named,
    names,
    opened,
    outputs,
    scheduled_tokens,
    the,
    work,
)


def large(**changes: object) -> Drive:
    """Room for anything: 400 blocks of 16, prompts up to 4000 tokens."""
    room = {"num_blocks": 400, "block_size": 16, "max_model_len": 4000, "max_num_seqs": 16, "max_in_flight_steps": 1}
    return opened(**(room | changes))


def step(drive: Drive) -> dict[str, int]:
    """Plan one step and let it come back."""
    events = drive.schedule()
    if events:
        drive.complete()
    return work(drive, events)


# -- budgets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("caching", [True, False])
def test_all_that_fit_are_scheduled_whole_in_the_order_of_arrival(caching: bool) -> None:
    drive = large(max_num_batched_tokens=1024, enable_prefix_caching=caching)
    lengths = {f"r{i}": 10 + 3 * i for i in range(10)}
    for name, length in lengths.items():
        drive.submit(name, length)

    events = drive.schedule()

    assert work(drive, events) == lengths
    assert list(work(drive, events)) == list(lengths)
    assert names(drive.state.queues.running) == list(lengths)
    assert the(StepScheduled, events).chunk_entries == []


def test_long_prompts_share_a_step_by_cap_and_budget() -> None:
    drive = large(max_num_batched_tokens=1024, long_prefill_token_threshold=400, enable_prefix_caching=False)
    for name in "abc":
        drive.submit(name, 800)
    assert step(drive) == {"a": 400, "b": 400, "c": 224}
    assert step(drive) == {"a": 400, "b": 400, "c": 224}
    assert step(drive) == {"a": 1, "b": 1, "c": 352}
    assert step(drive) == {"a": 1, "b": 1, "c": 1}


def test_a_chunk_samples_nothing_and_the_last_chunk_does() -> None:
    drive = large(max_num_batched_tokens=10)
    drive.submit("a", 25)
    chunks = [the(StepScheduled, drive.schedule())]
    samples = [drive.complete()]
    for _ in range(2):
        chunks.append(the(StepScheduled, drive.schedule()))
        samples.append(drive.complete())
    assert [(s.num_tokens, s.first_positions, s.chunk_entries) for s in chunks] == [
        ([10], [0], [0]),
        ([10], [10], [0]),
        ([5], [20], []),
    ]
    assert [events[0].token_ids for events in samples][:2] == [[], []]  # type: ignore[attr-defined]
    assert named(drive, "a").num_output_tokens == 1


def test_those_who_decode_are_served_before_a_prompt_takes_the_rest() -> None:
    drive = large(max_num_batched_tokens=20)
    drive.submit("a", 5)
    drive.submit("b", 5)
    step(drive)
    drive.submit("long", 100)
    assert step(drive) == {"a": 1, "b": 1, "long": 18}
    assert step(drive) == {"a": 1, "b": 1, "long": 18}


def test_a_running_chunk_goes_before_a_newcomer_and_the_newcomer_takes_the_rest() -> None:
    drive = large(max_num_batched_tokens=16)
    drive.submit("a", 20)
    drive.submit("b", 30)
    assert step(drive) == {"a": 16}
    assert step(drive) == {"a": 4, "b": 12}
    assert step(drive) == {"a": 1, "b": 15}


def test_the_cap_is_for_prefill_and_also_for_computing_again() -> None:
    drive = large(max_num_batched_tokens=64, long_prefill_token_threshold=8, enable_prefix_caching=False)
    drive.submit("a", 20, max_tokens=20)
    assert [step(drive) for _ in range(4)] == [{"a": 8}, {"a": 8}, {"a": 4}, {"a": 1}]


@pytest.mark.parametrize("budget", [1, 2, 3, 7, 40])
@pytest.mark.parametrize("depth", [1, 3])
def test_no_step_exceeds_the_budget_or_schedules_nothing(budget: int, depth: int) -> None:
    drive = large(max_num_batched_tokens=budget, max_in_flight_steps=depth, max_num_seqs=4)
    for i in range(6):
        drive.submit(f"r{i}", 5 + 4 * i, max_tokens=4)
    drive.run(100_000)
    steps = all_of(StepScheduled, drive.records)
    assert all(1 <= sum(s.num_tokens) <= budget and min(s.num_tokens) >= 1 for s in steps)
    assert max(sum(s.num_tokens) for s in steps) == budget
    assert outputs(drive) == all_due(drive)


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_no_more_run_than_there_are_seats(limit: int) -> None:
    drive = large(max_num_seqs=limit, max_num_batched_tokens=64)
    for i in range(5):
        drive.submit(f"r{i}", 4, max_tokens=3)
    assert len(step(drive)) == limit
    assert len(drive.state.queues.running) == limit
    assert len(drive.state.queues.waiting) == 5 - limit
    drive.run()
    assert max(len(s.handles) for s in all_of(StepScheduled, drive.records)) == limit
    assert outputs(drive) == all_due(drive)


def test_a_seat_is_free_again_in_the_step_after_an_end() -> None:
    drive = large(max_num_seqs=1, max_num_batched_tokens=64)
    drive.submit("a", 4, max_tokens=1)
    drive.submit("b", 4, max_tokens=1)
    assert step(drive) == {"a": 4}
    assert step(drive) == {"b": 4}


# -- who comes in -----------------------------------------------------------------------------------------------------


def test_a_request_comes_in_only_if_all_its_known_tokens_fit() -> None:
    drive = opened(num_blocks=8, max_num_batched_tokens=8)
    drive.submit("holder", 8, max_tokens=12)
    drive.schedule()
    drive.submit("long", 28, max_tokens=1)  # seven blocks, six are free
    assert work(drive, drive.schedule()) == {"holder": 1}
    drive.run()
    assert outputs(drive) == all_due(drive)


def test_or_if_its_first_chunk_does_where_that_is_configured() -> None:
    drive = opened(num_blocks=8, max_num_batched_tokens=8, admit_full_sequence=False)
    drive.submit("holder", 8, max_tokens=12)
    drive.schedule()
    drive.submit("long", 28, max_tokens=1)
    assert work(drive, drive.schedule()) == {"holder": 1, "long": 7}
    drive.run()
    assert outputs(drive) == all_due(drive)


def test_blocks_for_the_first_chunk_must_be_there_all_the_same() -> None:
    drive = opened(num_blocks=4, max_num_batched_tokens=16, admit_full_sequence=False)
    drive.submit("holder", 9, max_tokens=4)
    drive.schedule()
    drive.submit("next", 16, max_tokens=1)
    assert work(drive, drive.schedule()) == {"holder": 1}, "one block is free; the chunk needs four"


@pytest.mark.parametrize(("watermark", "comes_in"), [(0, True), (1, True), (2, False)])
def test_the_watermark_stays_free_while_somebody_runs(watermark: int, comes_in: bool) -> None:
    drive = opened(num_blocks=5, watermark_blocks=watermark)
    drive.submit("runs", 7)  # two blocks, and its next token has a place in them
    drive.schedule()
    drive.submit("next", 7)  # two of the other three
    assert ("next" in work(drive, drive.schedule())) is comes_in


def test_a_request_alone_ignores_the_watermark() -> None:
    drive = opened(num_blocks=4, watermark_blocks=4)
    drive.submit("alone", 16, max_tokens=1)
    assert work(drive, drive.schedule()) == {"alone": 16}


def test_those_who_run_ignore_the_watermark() -> None:
    drive = opened(num_blocks=3, watermark_blocks=3, max_in_flight_steps=1)
    drive.submit("a", 4, max_tokens=6)
    drive.run()
    assert outputs(drive) == all_due(drive)


def test_nobody_overtakes_the_first_who_does_not_fit() -> None:
    drive = opened(num_blocks=4)
    drive.submit("holder", 8, max_tokens=4)
    drive.schedule()
    drive.submit("big", 12, max_tokens=1)
    drive.submit("small", 1, max_tokens=1)
    assert work(drive, drive.schedule()) == {"holder": 1}
    drive.run()
    assert list(ends(drive.records, drive)) == ["holder", "big", "small"]


# -- priority ---------------------------------------------------------------------------------------------------------


def admitted(drive: Drive) -> list[str]:
    """Everybody, in the order in which they come in, one seat at a time."""
    order: list[str] = []
    while any(drive.state.queues.waiting):
        fill(drive)
        order += [r.request_id for r in drive.state.queues.running if r.request_id not in order]
        drain(drive)
    return order


PRIORITIES = [
    ({"a": 2, "b": 1, "c": 0}, "cba"),
    ({"a": 1, "b": 1, "c": 1}, "abc"),
    ({"a": 5, "b": 0, "c": 5, "d": 0, "e": -1}, "ebdac"),
    ({"a": 2**63 - 1, "b": -(2**63)}, "ba"),
]


@pytest.mark.parametrize(("priorities", "order"), PRIORITIES)
def test_the_urgent_come_in_first_and_equals_as_they_arrived(priorities: dict[str, int], order: str) -> None:
    drive = opened(policy="priority", max_num_seqs=1)
    for name, priority in priorities.items():
        drive.submit(name, 4, max_tokens=1, priority=priority)
    assert names(drive.state.queues.waiting) == list(order)
    assert admitted(drive) == list(order)
    assert list(ends(drive.records, drive)) == list(order)


def test_first_come_first_served_knows_no_priority() -> None:
    drive = opened(max_num_seqs=1)
    for name, priority in {"a": 9, "b": 0, "c": 5}.items():
        drive.submit(name, 4, max_tokens=1, priority=priority)
    assert admitted(drive) == ["a", "b", "c"]


def test_few_seats_go_to_the_best() -> None:
    drive = opened(policy="priority", max_num_seqs=2, max_num_batched_tokens=64)
    for name, priority in {"a": 3, "b": 1, "c": 2, "d": 0}.items():
        drive.submit(name, 4, max_tokens=4, priority=priority)
    assert list(work(drive, drive.schedule())) == ["d", "b"]
    assert names(drive.state.queues.waiting) == ["c", "a"]


def test_a_late_urgent_one_waits_for_a_seat_and_goes_first_then() -> None:
    drive = opened(policy="priority", max_num_seqs=1, max_in_flight_steps=1)
    drive.submit("runs", 4, max_tokens=2, priority=9)
    drive.schedule()
    drive.submit("low", 4, max_tokens=1, priority=5)
    drive.submit("high", 4, max_tokens=1, priority=0)
    drive.run()
    assert list(ends(drive.records, drive)) == ["runs", "high", "low"]


def test_those_who_run_are_served_in_the_same_order() -> None:
    drive = opened(policy="priority", max_num_batched_tokens=4, max_num_seqs=3)
    drive.submit("low", 3, max_tokens=9, priority=5)
    drive.schedule()
    drive.submit("high", 6, max_tokens=9, priority=0)
    assert work(drive, drive.schedule()) == {"low": 1, "high": 3}
    drain(drive)
    assert work(drive, drive.schedule()) == {"high": 3, "low": 1}


# -- the end of a request, and no step beyond it ----------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5])
def test_no_token_is_computed_in_vain_at_any_depth(max_tokens: int, depth: int) -> None:
    drive = opened(num_blocks=32, max_in_flight_steps=depth, enable_prefix_caching=False)
    drive.submit("a", 7, max_tokens)
    drive.schedule()
    drive.submit("b", 9, max_tokens)
    drive.run()
    assert ends(drive.records, drive) == {"a": ("length", max_tokens), "b": ("length", max_tokens)}
    assert scheduled_tokens(drive) == (7 + max_tokens - 1) + (9 + max_tokens - 1)
    assert outputs(drive) == all_due(drive)


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize(("prompt", "left"), [(10, 6), (15, 1), (1, 15)])
def test_the_models_length_ends_a_request_without_a_step_too_many(prompt: int, left: int, depth: int) -> None:
    drive = opened(max_model_len=16, max_in_flight_steps=depth)
    drive.submit("a", prompt, max_tokens=100)
    drive.run()
    assert ends(drive.records, drive) == {"a": ("length", left)}
    assert scheduled_tokens(drive) == 15


def test_a_full_pool_is_enough_for_the_longest_request_it_admits() -> None:
    drive = opened(num_blocks=4, max_in_flight_steps=3)
    drive.submit("a", 5, max_tokens=12)  # 17 tokens: the last is never computed, 16 fill the pool
    drive.run()
    assert ends(drive.records, drive) == {"a": ("length", 12)}


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_a_stop_token_ends_it_and_what_was_sampled_beyond_is_thrown_away(depth: int) -> None:
    drive = opened(num_blocks=16, vocab_size=5, max_in_flight_steps=depth)
    drive.submit("a", [1, 2, 3], max_tokens=40, stop_token_ids=(3,))
    drive.run()
    tokens = outputs(drive)["a"]
    assert tokens == all_due(drive)["a"]
    assert tokens.index(3) == len(tokens) - 1 < 39
    assert ends(drive.records, drive) == {"a": ("stop", len(tokens))}
    assert scheduled_tokens(drive) <= 3 + len(tokens) - 1 + (depth - 1)


def test_the_models_end_of_sequence_ends_it_unless_it_is_ignored() -> None:
    drive = opened(num_blocks=32, vocab_size=5, eos_token_ids=(0, 4), max_num_seqs=2)
    drive.submit("ends", [1, 2, 3], max_tokens=40, seed=5)
    drive.submit("goes-on", [1, 2, 3], max_tokens=40, seed=5, ignore_eos=True)
    drive.run()
    got = outputs(drive)
    assert ends(drive.records, drive)["goes-on"] == ("length", 40)
    assert got["ends"] == got["goes-on"][: len(got["ends"])]
    assert got["ends"][-1] in (0, 4)
    assert ends(drive.records, drive)["ends"] == ("stop", len(got["ends"]))


@pytest.mark.parametrize("min_tokens", [0, 1, 3, 8])
def test_no_stop_before_the_least_number_of_tokens(min_tokens: int) -> None:
    drive = opened(num_blocks=32, vocab_size=2, eos_token_ids=(0,))
    drive.submit("a", [1, 1], max_tokens=40, min_tokens=min_tokens, seed=3)
    drive.run()
    tokens = outputs(drive)["a"]
    assert 0 not in tokens[:min_tokens]
    assert tokens[-1] == 0
    assert len(tokens) > min_tokens


def test_a_worker_that_stops_too_early_is_not_believed() -> None:
    """The stop is the scheduler's to tell: a stop token among the first `min_tokens` is a token like others."""
    drive = opened(num_blocks=32, vocab_size=10)
    drive.submit("a", [1, 1], max_tokens=9, min_tokens=2, stop_token_ids=(7,))
    drive.schedule()
    output = drive.run_worker()
    drive.deliver(type(output)(step=0, generation=1, counts=[1], token_ids=[7], positions=[2]))
    assert named(drive, "a").num_output_tokens == 1


@pytest.mark.parametrize("max_tokens", [1, 3])
def test_a_stop_token_in_the_last_place_is_a_stop(max_tokens: int) -> None:
    drive = opened()
    probe = opened()
    probe.submit("a", 5, max_tokens)
    probe.run()
    last = outputs(probe)["a"][-1]
    drive.submit("a", 5, max_tokens, stop_token_ids=(last,))
    drive.run()
    assert ends(drive.records, drive)["a"] == ("stop", max_tokens)


def test_everything_that_was_submitted_ends() -> None:
    drive = opened(num_blocks=10, max_in_flight_steps=3)
    for i in range(20):
        drive.submit(f"r{i}", 1 + i % 9, max_tokens=1 + i % 7)
    drive.run()
    assert set(ends(drive.records, drive)) == {e.request_id for e in all_of(RequestSubmitted, drive.records)}
    assert drive.state.pool.num_free == 10
    assert outputs(drive) == all_due(drive)
