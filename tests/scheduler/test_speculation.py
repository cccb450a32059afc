"""Speculation: drafts of the worker's, of the look-up and from outside; what is promised for them, and what a rejection takes back."""

from collections import Counter
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refold.journal.errors import Rejected, WorkerLost
from refold.journal.events import (
    Drafts,
    DraftsProposed,
    Event,
    OutputDelivered,
    RequestFinished,
    RequestPreempted,
    StaleOutputConsumed,
    StepScheduled,
)
from refold.scheduler.drafting import LOOK_BACK_TOKENS, MAX_NGRAM, prompt_lookup
from tests.kit.drive import Drive
from tests.kit.features import EmittingDrafter, drafting, drafts_of, propose, steps, turns
from tests.kit.sentences import (
    all_due,
    all_of,
    counters,
    delivered,
    drain,
    ends,
    fill,
    named,
    nothing_changes,
    opened,
    outputs,
    reset,
    the,
    token_at,
    victims,
    work,
)

DEPTHS = (1, 2, 4, 8)

# -- the look-up ------------------------------------------------------------------------------------------------------

LOOKUPS: list[tuple[str, list[int], int, list[int]]] = [
    ("what followed the same tokens before", [1, 2, 3, 9, 8, 1, 2, 3], 2, [9, 8]),
    ("as many as asked for", [1, 2, 3, 9, 8, 7, 1, 2, 3], 1, [9]),
    ("no more than there are", [1, 2, 3, 9, 1, 2, 3], 8, [9, 1, 2, 3]),
    ("the longest match before a later one", [5, 6, 7, 1, 7, 2, 5, 6, 7], 1, [1]),
    ("of equal matches the latest", [7, 1, 7, 2, 7], 1, [2]),
    ("a match of one token if there is no better", [7, 1, 2, 7], 2, [1, 2]),
    ("no match longer than it looks for", [1, 2, 3, 4, 9, 0, 2, 3, 4, 8, 1, 2, 3, 4], 1, [8]),
    ("a match that overlaps the end", [4, 4, 4, 4], 3, [4]),
    ("nothing where nothing repeats", [1, 2, 3, 4], 4, []),
    ("nothing if none are asked for", [1, 1, 1], 0, []),
    ("nothing of one token", [1], 4, []),
    ("nothing of nothing", [], 4, []),
]


@pytest.mark.parametrize(
    ("tokens", "most", "drafts"), [case[1:] for case in LOOKUPS], ids=[case[0] for case in LOOKUPS]
)
def test_the_look_up_proposes(tokens: list[int], most: int, drafts: list[int]) -> None:
    before = list(tokens)
    assert prompt_lookup(tokens, most) == drafts
    assert tokens == before


@pytest.mark.parametrize(("between", "drafts"), [(LOOK_BACK_TOKENS - 3, [8]), (LOOK_BACK_TOKENS - 2, [])])
def test_the_look_up_looks_so_far_back_and_no_further(between: int, drafts: list[int]) -> None:
    tokens = [7, 8, *range(1000, 1000 + between), 7]
    assert prompt_lookup(tokens, 1) == drafts


@given(st.lists(st.integers(0, 2), max_size=30), st.integers(0, 8))
def test_the_look_up_finds_the_longest_latest_match(tokens: list[int], most: int) -> None:
    matches = [
        (length, start)
        for length in range(1, MAX_NGRAM + 1)
        for start in range(len(tokens) - length)
        if tokens[start : start + length] == tokens[-length:]
    ]
    length, start = max(matches, default=(len(tokens), 0))
    assert prompt_lookup(tokens, most) == tokens[start + length : start + length + most]


# -- where drafts come from -------------------------------------------------------------------------------------------


def test_of_the_workers_drafts_the_journal_has_the_number_and_of_the_look_ups_the_tokens() -> None:
    drive, _ = drafting(3, 1, max_in_flight_steps=1)
    drive.submit("a", 3)
    fill(drive)
    drive.complete()
    step = the(StepScheduled, drive.schedule())
    assert (step.num_tokens, step.num_drafts, step.drafts) == ([4], [3], [])

    drive = opened(speculation="ngram", num_speculative_tokens=3, max_in_flight_steps=1, vocab_size=2)
    drive.submit("a", [0, 1, 1, 0, 0, 1, 0, 1, 1, 1], max_tokens=20)
    fill(drive)
    drive.complete()
    drafts = prompt_lookup(named(drive, "a").tokens, 3)
    assert drafts, "in two tokens' text something repeats"
    step = the(StepScheduled, drive.schedule())
    assert (step.num_tokens, step.num_drafts) == ([1 + len(drafts)], [len(drafts)])
    assert step.drafts == [Drafts(entry=0, token_ids=drafts)]


def test_the_look_up_needs_every_token_known_so_it_drafts_for_nobody_with_a_sample_in_flight() -> None:
    drive = opened(speculation="ngram", num_speculative_tokens=3, max_in_flight_steps=2, num_blocks=32, vocab_size=2)
    drive.submit("a", [0, 1] * 8, max_tokens=8)
    drive.schedule()
    assert work(drive, drive.schedule()) == {"a": 1}
    assert steps(drive)[-1].num_drafts == []
    drain(drive)
    assert work(drive, drive.schedule())["a"] > 1, "with all of it back, it drafts"


def test_at_a_distance_as_long_as_the_window_the_look_up_drafts_at_every_depth() -> None:
    for depth in DEPTHS:
        drive = opened(
            speculation="ngram",
            num_speculative_tokens=3,
            max_in_flight_steps=depth,
            decode_stagger=depth,
            num_blocks=64,
            vocab_size=2,
        )
        drive.submit("a", [0, 1] * 8, max_tokens=16)
        drive.submit("b", [1, 0] * 8, max_tokens=16)
        drive.run()
        assert sum(sum(step.num_drafts) for step in steps(drive)) > 10
        assert outputs(drive) == all_due(drive)


@pytest.mark.parametrize("speculation", ["worker", "ngram"])
def test_drafts_from_outside_go_into_the_next_step_and_only_there(speculation: str) -> None:
    drive = opened(speculation=speculation, num_speculative_tokens=2, max_in_flight_steps=1)
    drive.submit("a", 3)
    fill(drive)
    drive.complete()
    right = [token_at(drive, "a", position, prompt=3) for position in (4, 5, 6)]

    assert the(DraftsProposed, propose(drive, "a", right)).token_ids == right

    step = the(StepScheduled, drive.schedule())
    assert step.drafts == [Drafts(entry=0, token_ids=right[:2])], "no more than the configuration allows"
    assert named(drive, "a").drafts == []
    came = the(OutputDelivered, drive.complete())
    assert (came.token_ids, came.accepted_drafts) == (right, [2])
    assert the(StepScheduled, drive.schedule()).drafts == []


@pytest.mark.parametrize("case", ["unknown", "waiting", "in flight", "speculation is off"])
def test_drafts_that_can_not_be_of_use_are_no_fact(case: str) -> None:
    drive = opened(speculation="off" if case == "speculation is off" else "ngram", num_speculative_tokens=2)
    drive.submit("a", 3)
    if case != "waiting":
        drive.schedule()
        if case != "in flight":
            drive.complete()
    assert propose(drive, "x" if case == "unknown" else "a", [1]) == []


def test_drafts_of_another_vocabulary_are_refused() -> None:
    drive = opened(speculation="ngram", num_speculative_tokens=2, vocab_size=50)
    drive.submit("a", 3)
    drive.schedule()
    drive.complete()
    with pytest.raises(Rejected, match="token 50 at index 1"):
        propose(drive, "a", [1, 50])
    assert named(drive, "a").drafts == []


def test_drafts_are_used_up_by_the_next_step_even_if_none_of_them_fits() -> None:
    drive = opened(speculation="ngram", num_speculative_tokens=2, max_in_flight_steps=1, max_num_batched_tokens=1)
    drive.submit("a", [1], max_tokens=4)
    fill(drive)
    drive.complete()
    propose(drive, "a", [1, 2])

    assert the(StepScheduled, drive.schedule()).num_drafts == []

    assert named(drive, "a").drafts == [], "they were for this place, not for the next"


@pytest.mark.parametrize(("max_tokens", "fitting"), [(2, 0), (3, 1), (4, 2), (9, 2)])
def test_as_many_as_may_still_come_are_taken_of_them_and_no_more(max_tokens: int, fitting: int) -> None:
    drive = opened(speculation="ngram", num_speculative_tokens=2, max_in_flight_steps=1)
    drive.submit("a", 3, max_tokens)
    fill(drive)
    drive.complete()
    right = [token_at(drive, "a", position, prompt=3) for position in (4, 5, 6)]
    propose(drive, "a", right)
    assert drafts_of(drive, drive.schedule()) == {"a": fitting}
    assert len(the(OutputDelivered, drive.complete()).token_ids) == fitting + 1
    drive.run()
    assert ends(drive.records, drive) == {"a": ("length", max_tokens)}


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("max_tokens", range(2, 9))
def test_of_the_workers_drafts_none_is_wanting_either(max_tokens: int, depth: int) -> None:
    """All drafts are right, so the steps are as few as they can be: one, then four tokens each, then the rest."""
    drive, _ = drafting(3, 3, max_in_flight_steps=depth)
    drive.submit("a", 3, max_tokens)
    drive.run()
    sizes = [step.num_tokens[0] for step in steps(drive)[1:]]
    rest = max_tokens - 1
    assert sizes == [4] * (rest // 4) + ([rest % 4] if rest % 4 else [])


def test_a_chunk_of_a_prompt_takes_no_drafts_and_keeps_none_for_later() -> None:
    drive = opened(speculation="ngram", num_speculative_tokens=2, max_in_flight_steps=1, max_num_batched_tokens=4)
    drive.submit("a", 7, max_tokens=4)
    fill(drive)
    drive.complete()
    propose(drive, "a", [1, 2])

    step = the(StepScheduled, drive.schedule())

    assert (step.num_tokens, step.num_drafts) == ([3], [])
    assert named(drive, "a").drafts == []


def test_a_preemption_takes_the_drafts_along() -> None:
    drive = opened(speculation="ngram", num_speculative_tokens=2, max_in_flight_steps=1)
    drive.submit("a", 3)
    fill(drive)
    drive.complete()
    propose(drive, "a", [1, 2])
    reset(drive)
    assert named(drive, "a").drafts == []
    assert the(StepScheduled, drive.schedule()).num_drafts == []


# -- how many ---------------------------------------------------------------------------------------------------------


def test_few_running_requests_have_many_drafts_and_many_have_few() -> None:
    drive, _ = drafting(
        4, 1, max_in_flight_steps=1, speculation_by_batch=((1, 8), (2, 2)), max_num_batched_tokens=64, max_num_seqs=8
    )
    seen = []
    for name in "abc":
        drive.submit(name, 3, max_tokens=30)
        drive.schedule()
        drive.complete()
        seen.append(drafts_of(drive, drive.schedule()))
        drive.complete()
    assert seen == [{"a": 4}, {"a": 2, "b": 2}, {"a": 0, "b": 0, "c": 0}], (
        "at most k, by the row of the batch, then none"
    )


def test_the_number_may_change_while_older_drafts_are_in_flight() -> None:
    drive, _ = drafting(3, 1, max_in_flight_steps=4, speculation_by_batch=((1, 3), (2, 1)))
    drive.submit("a", 6, max_tokens=12)
    drive.schedule()
    drive.complete()
    assert drafts_of(drive, drive.schedule()) == {"a": 3}
    reset(drive)
    drive.submit("b", 5, max_tokens=12)
    drive.schedule()
    assert drafts_of(drive, drive.schedule()) == {"a": 1, "b": 1}
    assert account(drive, "a") == (7, 9, 3, 13, 4)

    stale = the(StaleOutputConsumed, drive.complete())

    assert (stale.num_tokens, stale.counts) == ([4], [2])
    assert account(drive, "a") == (7, 9, 3, 9, 0)
    drive.run()
    assert outputs(drive) == all_due(drive)


def test_the_budget_of_a_step_goes_to_known_tokens_of_the_first_then_to_drafts() -> None:
    drive, _ = drafting(4, 0, max_in_flight_steps=1, max_num_batched_tokens=7)
    drive.submit("a", 3)
    drive.submit("b", 3)
    drive.schedule()
    drive.complete()
    step = drive.schedule()
    assert (work(drive, step), drafts_of(drive, step)) == ({"a": 5, "b": 2}, {"a": 4, "b": 1})


def test_the_first_decode_of_a_wholly_cached_prompt_has_no_drafts_and_the_second_has() -> None:
    drive, _ = drafting(3, 3, max_in_flight_steps=1)
    prompt = list(range(9))
    drive.submit("a", prompt, max_tokens=1)
    drive.run()
    drive.submit("b", prompt, max_tokens=8)
    first = drive.schedule()
    assert (work(drive, first), drafts_of(drive, first)) == ({"b": 1}, {"b": 0})
    drive.complete()
    assert drafts_of(drive, drive.schedule()) == {"b": 3}


# -- promises and rejections ------------------------------------------------------------------------------------------


def account(drive: Drive, name: str) -> tuple[int, int, int, int, int]:
    """Known tokens, computed, placeholders, in flight, stale."""
    c = counters(drive, name)
    return len(named(drive, name).tokens), c["computed"], c["placeholders"], c["in_flight"], c["stale"]


def test_promises_are_made_for_all_drafts_and_taken_back_for_those_that_are_rejected() -> None:
    """One draft of three is right: two tokens come back, and two of the four places are taken back."""
    drive, _ = drafting(3, 1, max_in_flight_steps=2)
    drive.submit("a", 7, max_tokens=20)

    assert work(drive, drive.schedule()) == {"a": 7}
    assert account(drive, "a") == (7, 7, 1, 7, 0)
    assert work(drive, drive.schedule()) == {"a": 4}
    assert account(drive, "a") == (7, 11, 5, 11, 0)
    drive.complete()
    assert account(drive, "a") == (8, 11, 4, 4, 0)
    step = the(StepScheduled, drive.schedule())
    assert (step.num_tokens, step.first_positions) == ([4], [11]), "as if all drafts in flight were accepted"
    assert account(drive, "a") == (8, 15, 8, 8, 0)
    assert the(OutputDelivered, drive.complete()).counts == [2]
    assert account(drive, "a") == (10, 13, 4, 4, 0)
    drive.complete()
    assert account(drive, "a") == (12, 11, 0, 0, 0)


@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
def test_places_whose_drafts_were_rejected_are_computed_again(accepted: int) -> None:
    drive, _ = drafting(3, accepted, max_in_flight_steps=1)
    drive.submit("a", 4, max_tokens=30)
    fill(drive)
    drive.complete()
    for _ in range(5):
        known = len(named(drive, "a").tokens)
        step = the(StepScheduled, drive.schedule())
        assert (step.first_positions, step.num_tokens) == ([known - 1], [4])
        came = the(OutputDelivered, drive.complete())
        assert (len(came.token_ids), came.accepted_drafts) == (accepted + 1, [accepted])


@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize("depth", DEPTHS)
def test_in_decode_the_computed_tokens_are_the_known_and_the_promised_but_one(k: int, depth: int) -> None:
    drive, _ = drafting(
        k, lambda position: position * 7 % (k + 1), max_in_flight_steps=depth, max_num_batched_tokens=64
    )
    for name in "abc":
        drive.submit(name, 5, max_tokens=20)
    certain: dict[tuple[int, int], int] = {}
    for _ in turns(drive):
        for r in drive.state.queues.running:
            if r.num_computed_tokens >= r.num_prompt_tokens:
                assert r.num_computed_tokens == len(r.tokens) + r.num_output_placeholders - 1
            before = certain.get((r.handle, r.epoch), 0)
            assert r.next_position >= before, "what is certain is never taken back within an epoch"
            certain[r.handle, r.epoch] = r.next_position
    assert outputs(drive) == all_due(drive)


def pressed() -> Drive:
    """`b` was preempted for `a` with its prompt and one step of three drafts in flight, of which one is right."""
    drive, _ = drafting(3, 1, num_blocks=6, max_in_flight_steps=4, max_num_batched_tokens=64)
    drive.submit("a", 7, max_tokens=12)
    drive.submit("b", 7, max_tokens=12)
    drive.schedule()
    drive.schedule()
    assert victims(drive, drive.schedule()) == ["b"]
    return drive


def test_a_rejection_in_a_stale_step_touches_nothing_but_what_drains() -> None:
    drive = pressed()
    assert account(drive, "b") == (7, 0, 0, 11, 11)
    drive.complete()
    assert account(drive, "b") == (8, 0, 0, 4, 4)

    stale = the(StaleOutputConsumed, drive.complete())

    assert (stale.num_tokens, stale.counts, stale.delivered, stale.accepted_drafts) == ([4], [2], [True], [1])
    assert account(drive, "b") == (10, 0, 0, 0, 0), "by what was scheduled, not by what was accepted"
    drive.run()
    assert outputs(drive) == all_due(drive)


def test_a_rejection_of_the_last_epoch_does_not_meet_the_promises_of_this_one() -> None:
    """The crash that this engine is built against: the old step's two rejections against the new step's one promise."""
    drive, _ = drafting(3, 1, max_in_flight_steps=4)
    drive.submit("a", 7, max_tokens=12)
    drive.schedule()
    drive.complete()
    drive.schedule()
    reset(drive)
    assert work(drive, drive.schedule()) == {"a": 8}
    assert account(drive, "a") == (8, 8, 1, 12, 4)

    stale = the(StaleOutputConsumed, drive.complete())

    assert (stale.counts, stale.delivered) == ([2], [False])
    assert account(drive, "a") == (8, 8, 1, 8, 0)
    drive.run()
    assert outputs(drive) == all_due(drive)


@pytest.mark.parametrize("counts", [[0], [5]])
def test_a_worker_that_answers_with_less_than_one_token_or_more_than_were_asked_for_is_lost(counts: list[int]) -> None:
    drive, _ = drafting(3, 1, max_in_flight_steps=1)
    drive.submit("a", 4)
    drive.schedule()
    drive.complete()
    drive.schedule()
    output = msgspec.structs.replace(drive.run_worker(), counts=counts, token_ids=[1] * counts[0])
    with nothing_changes(drive), pytest.raises(WorkerLost, match=r"at most \[4\] were asked for"):
        drive.deliver(output)


# -- ends -------------------------------------------------------------------------------------------------------------


def test_a_stop_inside_an_accepted_run_cuts_the_rest_and_tells_all_that_was_accepted() -> None:
    drive, _ = drafting(4, 4, max_in_flight_steps=1)
    drive.submit("a", 5, max_tokens=30, stop_token_ids=(token_at(drive, "a", 8, prompt=5),))
    drive.schedule()
    drive.complete()
    drive.schedule()

    events = drive.complete()

    came, finished = the(OutputDelivered, events), the(RequestFinished, events)
    assert (came.counts, came.accepted_drafts) == ([3], [4])
    assert came.token_ids == [token_at(drive, "a", position, prompt=5) for position in (6, 7, 8)]
    assert (finished.reason, finished.num_output_tokens) == ("stop", 4)
    assert finished.stop_token_id == came.token_ids[-1]
    assert drive.state.is_quiescent


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("stop_at", [7, 8, 9, 10, 11])
def test_wherever_in_a_run_the_stop_is_nothing_is_given_beyond_it(depth: int, stop_at: int) -> None:
    drive, _ = drafting(4, 4, max_in_flight_steps=depth, max_num_batched_tokens=64)
    drive.submit("b", 6, max_tokens=11)
    drive.submit("a", 6, max_tokens=30, stop_token_ids=(token_at(drive, "a", stop_at, prompt=6),))
    drive.run()
    assert outputs(drive) == all_due(drive)
    assert ends(drive.records, drive)["a"] == ("stop", stop_at - 5)


def test_a_stop_inside_a_stale_run_ends_a_preempted_request() -> None:
    drive, _ = drafting(3, 3, num_blocks=6, max_in_flight_steps=4, max_num_batched_tokens=64)
    drive.submit("a", 7, max_tokens=12)
    drive.submit("b", 7, max_tokens=12, stop_token_ids=(token_at(drive, "b", 9, prompt=7),))
    drive.schedule()
    drive.schedule()
    assert victims(drive, drive.schedule()) == ["b"]
    drive.complete()

    events = drive.complete()

    stale = the(StaleOutputConsumed, events)
    assert (stale.num_tokens, stale.counts, stale.accepted_drafts) == ([4], [2], [3])
    assert (the(RequestFinished, events).reason, the(RequestFinished, events).num_output_tokens) == ("stop", 3)
    drive.run()
    assert outputs(drive) == all_due(drive)


@pytest.mark.parametrize("accepted", [0, 2, 8])
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 9])
@pytest.mark.parametrize("depth", DEPTHS)
def test_no_draft_reaches_beyond_the_last_token(depth: int, max_tokens: int, accepted: int) -> None:
    drive, _ = drafting(8, accepted, max_in_flight_steps=depth, max_num_batched_tokens=64)
    drive.submit("a", 5, max_tokens)
    drive.run()
    for step in steps(drive):
        assert step.first_positions[0] + step.num_tokens[0] <= 5 + max_tokens - 1, "the last token is never computed"
    assert outputs(drive) == all_due(drive)
    assert ends(drive.records, drive) == {"a": ("length", max_tokens)}
    assert not all_of(StaleOutputConsumed, drive.records)


@pytest.mark.parametrize("depth", DEPTHS)
def test_no_draft_reaches_beyond_the_models_length(depth: int) -> None:
    drive, _ = drafting(8, 8, max_in_flight_steps=depth, max_model_len=16, max_num_batched_tokens=64)
    drive.submit("a", 7, max_tokens=100)
    drive.run()
    assert max(step.first_positions[0] + step.num_tokens[0] for step in steps(drive)) == 15
    assert ends(drive.records, drive) == {"a": ("length", 9)}


def test_whoever_may_have_reached_the_limit_waits_to_hear() -> None:
    drive, _ = drafting(3, 0, max_in_flight_steps=4)
    drive.submit("a", 4, max_tokens=5)
    drive.schedule()
    assert drafts_of(drive, drive.schedule()) == {"a": 3}, "1 + 4 tokens, if all are accepted"
    assert drive.schedule() == []
    drive.complete()
    assert drive.schedule() == []
    drive.complete()
    assert drafts_of(drive, drive.schedule()) == {"a": 2}, "all were rejected: three tokens to go"


# -- the prefix cache -------------------------------------------------------------------------------------------------


def published(drive: Drive, name: str) -> int:
    """How many of a request's blocks can be found by their content."""
    return sum(drive.state.pool.hashes[block] is not None for block in named(drive, name).block_ids)


@pytest.mark.parametrize(("accepted", "blocks"), [(0, 1), (1, 1), (2, 1), (3, 2)])
def test_a_block_is_published_only_when_its_last_place_holds_its_own_token(accepted: int, blocks: int) -> None:
    """Blocks of four, four tokens of prompt, then places 4 to 7. With two right, place 7 holds a rejected draft."""
    drive, _ = drafting(3, accepted, max_in_flight_steps=1)
    drive.submit("a", 4, max_tokens=20)
    drive.schedule()
    drive.complete()
    drive.schedule()
    assert published(drive, "a") == 1
    drive.complete()
    assert len(named(drive, "a").tokens) == 6 + accepted
    assert published(drive, "a") == blocks


def test_the_last_known_token_of_a_full_block_is_computed_before_the_block_is_found() -> None:
    drive, _ = drafting(3, 2, max_in_flight_steps=1)
    drive.submit("a", 4, max_tokens=20)
    for _ in range(2):
        drive.schedule()
        drive.complete()
    request = named(drive, "a")
    assert (len(request.tokens), published(drive, "a")) == (8, 1)
    drive.submit("b", [*request.tokens, 1], max_tokens=2)

    assert work(drive, drive.schedule()) == {"a": 4, "b": 1}, "b shares the block that a is about to make right"

    drive.run()
    assert outputs(drive) == all_due(drive)


@pytest.mark.parametrize("depth", DEPTHS)
def test_what_was_spoken_is_found_again_and_no_draft_is(depth: int) -> None:
    drive, _ = drafting(3, lambda position: position % 4, max_in_flight_steps=depth, max_num_batched_tokens=64)
    drive.submit("a", 5, max_tokens=20)
    drive.run()
    spoken = outputs(drive)["a"]
    first_prompt = [(i * 7 + ord("a")) % drive.config.vocab_size for i in range(5)]
    drive.submit("b", [*first_prompt, *spoken, 1], max_tokens=3)
    assert work(drive, drive.schedule()) == {"b": 26 - 24}, (
        "25 tokens are known, 24 of them in whole blocks and computed"
    )
    drive.run()
    assert outputs(drive) == all_due(drive)


# -- nobody sees a difference -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("speculation", ["worker", "ngram"])
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("k", range(1, 9))
def test_outputs_are_what_they_are_without_drafts(k: int, depth: int, speculation: str) -> None:
    given: list[dict[str, list[int]]] = []
    for mode in (speculation, "off"):
        drive = opened(
            speculation=mode,
            num_speculative_tokens=k,
            max_in_flight_steps=depth,
            decode_stagger=depth if mode == "ngram" else 1,
            num_blocks=12,
            vocab_size=3,
            max_num_batched_tokens=24,
        )
        for i, name in enumerate("abcd"):
            drive.submit(name, 4 + 3 * i, max_tokens=5 + 4 * i, stop_token_ids=(i % 3,), min_tokens=4)
        drive.run()
        given.append(outputs(drive))
    assert given[0] == given[1] == all_due(drive)


# -- the two scenarios that broke speculating schedulers --------------------------------------------------------------

PROMPT, WANTED, REQUESTS = 8, 24, 8


def pipelined(depth: int, stagger: int, resets: tuple[int, ...] = ()) -> tuple[Drive, EmittingDrafter, Counter[str]]:
    """Four blocks of 16, eight requests of 8 tokens that want 24 each, two at the start and one more at each turn; k = 3.

    Counts the epochs that ended while work of the request was in flight, and while older work was.
    """
    drive = opened(
        vocab_size=1_000_000,
        num_blocks=4,
        block_size=16,
        max_num_seqs=REQUESTS,
        max_num_batched_tokens=256,
        max_in_flight_steps=depth,
        decode_stagger=stagger,
        speculation="worker",
        num_speculative_tokens=3,
    )
    drive.worker = worker = EmittingDrafter(drive.config, lambda run: run)
    seen: Counter[str] = Counter()
    submitted = 0
    for turn in range(2_000):
        while submitted < min(REQUESTS, 2 + turn):
            drive.submit(f"r{submitted}", PROMPT, WANTED)
            submitted += 1
        before = {r.handle: (r.num_in_flight_tokens, r.num_stale_output_tokens) for r in drive.state.queues.running}
        events = reset(drive) if turn in resets else []
        for event in [*events, *(scheduled := drive.schedule())]:
            if isinstance(event, RequestPreempted):
                in_flight, stale = before.get(event.handle, (0, 0))
                seen.update({event.reason: 1, "in flight": in_flight > 0, "stale": stale > 0})
        if scheduled and len(drive.orders) < depth:
            continue
        if not drive.orders:
            assert drive.state.is_quiescent, "stalled"
            return drive, worker, seen
        drive.complete()
    raise AssertionError("livelock")


def each_has_its_own_24(drive: Drive, worker: EmittingDrafter) -> bool:
    """All ended with exactly 24 outputs, and output i was sampled for the place prompt + i."""
    given = delivered(event for events in drive.records for event in events)
    positions = {handle: {token: position for position, token in pairs} for handle, pairs in worker.emitted.items()}
    places = [[positions[handle][token] for token in tokens] for handle, tokens in given.items()]
    return (
        set(ends(drive.records, drive).values()) == {("length", WANTED)}
        and places == [[PROMPT + i for i in range(WANTED)]] * REQUESTS
    )


@pytest.mark.parametrize("stagger", [1, 3])
@pytest.mark.parametrize("depth", DEPTHS)
def test_memory_pressure_loses_no_sample_with_drafts_either(depth: int, stagger: int) -> None:
    drive, worker, seen = pipelined(depth, stagger)
    assert each_has_its_own_24(drive, worker)
    for handle, tokens in delivered(event for events in drive.records for event in events).items():
        assert tokens == [token for _, token in worker.emitted[handle]], "all that was sampled, in order, once"
    assert seen["kv_pressure"]
    assert bool(seen["in flight"]) == (depth > 1)


@pytest.mark.parametrize("resets", [(6, 14), (6, 7, 18, 19)])
@pytest.mark.parametrize("stagger", [1, 3])
@pytest.mark.parametrize("depth", DEPTHS)
def test_resets_under_pressure_repeat_nothing_with_drafts_either(
    depth: int, stagger: int, resets: tuple[int, ...]
) -> None:
    drive, worker, seen = pipelined(depth, stagger, resets)
    assert each_has_its_own_24(drive, worker)
    for handle, tokens in delivered(event for events in drive.records for event in events).items():
        emitted = iter([token for _, token in worker.emitted[handle]])
        assert all(token in emitted for token in tokens), "in the order in which they were sampled"
    assert seen["cache_reset"]


# -- statistics -------------------------------------------------------------------------------------------------------


def statistics(records: Sequence[Sequence[Event]]) -> tuple[int, int]:
    """Drafts verified and accepted, as the events tell."""
    drafted = {
        step.step: sum(step.num_drafts) for events in records for step in events if isinstance(step, StepScheduled)
    }
    back: set[int] = set()
    accepted = 0
    for events in records:
        for event in events:
            if isinstance(event, OutputDelivered | StaleOutputConsumed):
                back.add(event.step)
                accepted += sum(event.accepted_drafts)
    return sum(drafted[step] for step in back), accepted


@pytest.mark.parametrize("disturbance", ["none", "pressure", "reset"])
@pytest.mark.parametrize("depth", DEPTHS)
def test_what_was_accepted_is_told_whole_whatever_became_of_the_tokens(depth: int, disturbance: str) -> None:
    drive, worker = drafting(
        3,
        lambda position: position % 4,
        num_blocks=8 if disturbance == "pressure" else 64,
        max_in_flight_steps=depth,
        max_num_batched_tokens=64,
    )
    for name in "abc":
        drive.submit(name, 6, max_tokens=15)
    for turn, _ in enumerate(turns(drive)):
        if disturbance == "reset" and turn == 4:
            reset(drive)
    assert bool(all_of(RequestPreempted, drive.records)) == (disturbance != "none")
    verified, right = sum(count for _, count, _ in worker.drafted), sum(right for _, _, right in worker.drafted)
    assert statistics(drive.records) == (verified, right), "the worker's own account"


def test_the_rate_of_acceptance_is_the_same_with_and_without_a_preemption() -> None:
    rates = []
    for num_blocks in (64, 7):
        drive, _ = drafting(
            4, lambda position: 2, num_blocks=num_blocks, max_in_flight_steps=4, max_num_batched_tokens=64
        )
        drive.submit("a", 7, max_tokens=16)
        drive.submit("b", 7, max_tokens=16)
        drive.run()
        rates.append([count_of_full_runs(drive), bool(all_of(StaleOutputConsumed, drive.records))])
    assert rates == [[2.0, False], [2.0, True]]


def count_of_full_runs(drive: Drive) -> float:
    """Accepted drafts per entry that had all four, stale ones too."""
    drafts = {(s.step, h): n for s in steps(drive) for h, n in zip(s.handles, s.num_drafts, strict=False)}
    accepted = [
        count
        for events in drive.records
        for event in events
        if isinstance(event, OutputDelivered | StaleOutputConsumed)
        for handle, count in zip(event.handles, event.accepted_drafts, strict=False)
        if drafts.get((event.step, handle)) == 4
    ]
    return sum(accepted) / len(accepted)
