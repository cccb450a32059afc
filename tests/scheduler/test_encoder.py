"""The encoder: outputs for media are computed once, kept while they are needed and longer if there is room, and cost a budget."""

from collections.abc import Callable

import pytest

from refold.journal.errors import Rejected
from refold.journal.events import EncoderInput, Event, Media, RequestPreempted, StepScheduled
from refold.projections.encoder import EncoderCache, add, evict, stop_using, use
from tests.kit.drive import Drive
from tests.kit.features import (
    DraftingWorker,
    close,
    extend,
    judged,
    lose_worker,
    picture,
    settle,
    steps,
)
from tests.kit.sentences import (
    all_due,
    all_of,
    drain,
    fill,
    name_of,
    named,
    nothing_changes,
    opened,
    outputs,
    reset,
    the,
    victims,
    work,
)

PLACES = [1] * 64
"""What a prompt holds where its media stand, and everywhere else: the same token, so that tokens tell nothing apart."""


def seeing(budget: int = 8, cache: int = 16, **changes: object) -> Drive:
    """An engine with an encoder: at most `budget` embeddings a step, at most `cache` kept."""
    small = {"encoder_budget_tokens": budget, "encoder_cache_tokens": cache, "num_blocks": 32}
    return opened(**(small | {"max_in_flight_steps": 1, "max_num_batched_tokens": 32} | changes))


def submit(drive: Drive, name: str, prompt: int, media: list[Media], max_tokens: int = 4, **changes: object) -> None:
    drive.submit(name, PLACES[:prompt], max_tokens, media=media, **changes)


def seen(drive: Drive, events: list[Event]) -> list[tuple[str, str, bool]]:
    """Of the step that these events schedule: who needs which media, and whether they are computed in it."""
    step = next((event for event in events if isinstance(event, StepScheduled)), None)
    found = []
    for item in step.encoder_inputs if step is not None else ():
        request = drive.state.requests.by_handle[step.handles[item.entry]] if step is not None else None
        assert request is not None
        found.append((request.request_id, request.media[item.media].digest, item.computed))
    return found


def held(drive: Drive) -> dict[str, list[str]]:
    """Digest -> who needs it."""
    users = drive.state.encoder.users
    return {digest: [name_of(drive, handle) for handle in sorted(handles)] for digest, handles in users.items()}


# -- the budget of a step ---------------------------------------------------------------------------------------------


def test_media_are_encoded_in_the_step_that_computes_their_places() -> None:
    drive = seeing()
    submit(drive, "a", 9, [picture("cat", 2, 5)])
    step = the(StepScheduled, drive.schedule())
    assert step.encoder_inputs == [EncoderInput(entry=0, media=0, computed=True)]
    assert step.encoder_evictions == []
    assert (drive.state.encoder.used, held(drive)) == (5, {"cat": ["a"]})


def test_media_beyond_the_chunk_are_not_encoded_yet() -> None:
    drive = seeing(max_num_batched_tokens=4)
    submit(drive, "a", 12, [picture("cat", 0, 3), picture("dog", 6, 3)])
    assert seen(drive, drive.schedule()) == [("a", "cat", True)]
    drive.complete()
    assert seen(drive, drive.schedule()) == [("a", "dog", True)], "places 4 to 7 reach into it"
    drive.complete()
    assert seen(drive, drive.schedule()) == [], "it is there"


def test_a_chunk_ends_before_an_item_that_the_budget_can_not_pay_for() -> None:
    drive = seeing(budget=8, cache=32)
    submit(drive, "a", 20, [picture("cat", 1, 6), picture("dog", 9, 6)])

    first = drive.schedule()

    assert (work(drive, first), seen(drive, first)) == ({"a": 9}, [("a", "cat", True)])
    assert the(StepScheduled, first).chunk_entries == [0]
    drive.complete()
    second = drive.schedule()
    assert (work(drive, second), seen(drive, second)) == ({"a": 11}, [("a", "dog", True)])
    drive.run()
    assert outputs(drive) == all_due(drive)


def test_the_budget_is_the_steps_and_not_the_requests() -> None:
    """Three long prompts with one picture each, and a budget for one picture and a half."""
    drive = seeing(budget=9, cache=32, max_num_batched_tokens=64, enable_prefix_caching=False)
    for name, digest in (("a", "cat"), ("b", "dog"), ("c", "sky")):
        submit(drive, name, 12, [picture(digest, 4, 6)])

    first = drive.schedule()
    assert (work(drive, first), seen(drive, first)) == ({"a": 12, "b": 4, "c": 4}, [("a", "cat", True)])
    drive.complete()
    second = drive.schedule()
    assert (work(drive, second), seen(drive, second)) == ({"a": 1, "b": 8}, [("b", "dog", True)])
    drive.complete()
    third = drive.schedule()
    assert (work(drive, third), seen(drive, third)) == ({"a": 1, "b": 1, "c": 8}, [("c", "sky", True)])
    drive.run()
    assert outputs(drive) == all_due(drive)


def test_a_request_whose_first_place_must_wait_for_the_encoder_does_not_come_in_and_hinders_nobody() -> None:
    drive = seeing(budget=6)
    submit(drive, "a", 8, [picture("cat", 0, 6)])
    submit(drive, "b", 8, [picture("dog", 0, 6)])
    drive.submit("c", 3)
    events = drive.schedule()
    assert work(drive, events) == {"a": 8, "c": 3}
    assert named(drive, "b").status == "waiting"
    drive.run()
    assert outputs(drive) == all_due(drive)


@pytest.mark.parametrize("token_budget", [3, 4, 5, 7, 32])
@pytest.mark.parametrize("depth", [1, 2, 4, 8])
def test_no_chunk_ends_inside_an_item_whose_output_is_absent(depth: int, token_budget: int) -> None:
    drive = seeing(budget=5, cache=8, max_in_flight_steps=depth, max_num_batched_tokens=token_budget, num_blocks=24)
    submit(drive, "a", 18, [picture("cat", 2, 5), picture("dog", 7, 3), picture("sky", 12, 5)])
    submit(drive, "b", 16, [picture("sky", 1, 5), picture("cat", 9, 5)])
    submit(drive, "c", 12, [picture("dog", 4, 3), picture("dog", 8, 3)])
    drive.run()
    there: dict[int, set[int]] = {}
    for events in drive.records:
        for event in events:
            if isinstance(event, RequestPreempted):
                there.pop(event.handle, None)
            if isinstance(event, StepScheduled):
                _check_step(drive, event, there)
    assert outputs(drive) == all_due(drive)


def _check_step(drive: Drive, step: StepScheduled, there: dict[int, set[int]]) -> None:
    """No place of an item is computed whose output was not asked for in this step or before; the budget holds."""
    cost = 0
    submitted = {e.handle: e for events in drive.records for e in events if type(e).__name__ == "RequestSubmitted"}
    for item in step.encoder_inputs:
        media = submitted[step.handles[item.entry]].media[item.media]
        there.setdefault(step.handles[item.entry], set()).add(item.media)
        cost += media.num_tokens if item.computed else 0
    assert cost <= drive.config.encoder_budget_tokens
    for handle, n, first in zip(step.handles, step.num_tokens, step.first_positions, strict=True):
        for index, media in enumerate(submitted[handle].media):
            if media.start < first + n and media.start + media.num_tokens > first:
                assert index in there[handle], f"step {step.step} computes places of {media}"


# -- once for all -----------------------------------------------------------------------------------------------------


def test_the_same_picture_twice_in_one_request_is_encoded_once() -> None:
    drive = seeing(budget=8)
    submit(drive, "a", 16, [picture("cat", 1, 5), picture("cat", 9, 5)])
    assert seen(drive, drive.schedule()) == [("a", "cat", True), ("a", "cat", False)]
    assert drive.state.encoder.used == 5
    drive.run()
    assert outputs(drive) == all_due(drive)


def test_it_is_needed_until_the_last_of_its_places_is_passed() -> None:
    drive = seeing(budget=8, max_num_batched_tokens=8)
    submit(drive, "a", 16, [picture("cat", 1, 5), picture("cat", 9, 5)])
    drive.schedule()
    drive.complete()
    assert held(drive) == {"cat": []}, "of the first it is past, and the second has not been asked for"
    assert seen(drive, drive.schedule()) == [("a", "cat", False)], "it was still there"
    assert held(drive) == {"cat": ["a"]}
    drive.complete()
    assert held(drive) == {"cat": []}


def test_two_requests_in_one_step_share_one_encoding() -> None:
    drive = seeing(budget=6)
    submit(drive, "a", 8, [picture("cat", 1, 6)])
    submit(drive, "b", 9, [picture("cat", 2, 6)])
    assert seen(drive, drive.schedule()) == [("a", "cat", True), ("b", "cat", False)]
    assert held(drive) == {"cat": ["a", "b"]}


def test_a_later_request_finds_what_an_earlier_one_left() -> None:
    drive = seeing()
    submit(drive, "a", 8, [picture("cat", 1, 6)], max_tokens=1)
    drive.run()
    assert held(drive) == {"cat": []}
    submit(drive, "b", 9, [picture("cat", 3, 6)])
    assert seen(drive, drive.schedule()) == [("b", "cat", False)]


def test_a_later_step_may_use_what_an_earlier_one_still_computes() -> None:
    drive = seeing(max_in_flight_steps=2)
    submit(drive, "a", 8, [picture("cat", 1, 6)])
    drive.schedule()
    submit(drive, "b", 9, [picture("cat", 3, 6)])
    assert seen(drive, drive.schedule()) == [("b", "cat", False)]
    drive.run()
    assert outputs(drive) == all_due(drive)


def test_places_found_in_the_prefix_cache_need_no_encoder() -> None:
    drive = seeing()
    submit(drive, "a", 12, [picture("cat", 1, 6)], max_tokens=1)
    drive.run()
    submit(drive, "b", 12, [picture("cat", 1, 6)])
    events = drive.schedule()
    assert (work(drive, events), seen(drive, events)) == ({"b": 4}, [])


def test_a_prefix_that_ends_inside_an_item_needs_it_again() -> None:
    drive = seeing()
    submit(drive, "a", 6, [picture("cat", 1, 5)], max_tokens=1)
    drive.run()
    submit(drive, "b", 6, [picture("cat", 1, 5)])
    events = drive.schedule()
    assert (work(drive, events), seen(drive, events)) == ({"b": 2}, [("b", "cat", False)])


def test_and_waits_if_it_can_not_be_had() -> None:
    drive = seeing(budget=5, cache=5)
    submit(drive, "a", 6, [picture("cat", 1, 5)], max_tokens=1)
    drive.run()
    submit(drive, "x", 12, [picture("dog", 1, 5)])
    submit(drive, "b", 6, [picture("cat", 1, 5)])
    events = drive.schedule()
    assert (work(drive, events), seen(drive, events)) == ({"x": 12}, [("x", "dog", True)])
    assert the(StepScheduled, events).encoder_evictions == ["cat"]
    drive.complete()
    events = drive.schedule()
    assert (work(drive, events)["b"], seen(drive, events)) == (2, [("b", "cat", True)])
    drive.run()
    assert outputs(drive) == all_due(drive)


# -- how long it is needed --------------------------------------------------------------------------------------------


def test_it_is_needed_until_its_last_place_is_computed_and_no_longer() -> None:
    drive = seeing(max_num_batched_tokens=4)
    submit(drive, "a", 12, [picture("cat", 1, 6)])
    drive.schedule()
    drive.complete()
    assert held(drive) == {"cat": ["a"]}, "places 0 to 3 are computed"
    drive.schedule()
    assert held(drive) == {"cat": ["a"]}, "places 4 to 7 are in flight"
    drive.complete()
    assert held(drive) == {"cat": []}
    assert list(drive.state.encoder.evictable) == ["cat"], "it stays until its room is wanted"


def test_what_a_rejection_may_take_back_is_not_passed() -> None:
    """The frontier is what is computed less what is promised: an item at the end of a prompt is let go with the first token."""
    drive = seeing(max_in_flight_steps=3, speculation="worker", num_speculative_tokens=3)
    drive.worker = DraftingWorker(drive.config, lambda _: 0)
    submit(drive, "a", 8, [picture("cat", 2, 6)], max_tokens=12)
    fill(drive)
    assert named(drive, "a").num_computed_tokens > 8
    assert held(drive) == {"cat": ["a"]}
    drive.complete()
    assert named(drive, "a").next_position == 8
    assert held(drive) == {"cat": []}
    drive.run()
    assert outputs(drive) == all_due(drive)


def test_at_the_end_of_a_prompt_it_is_needed_until_the_first_token_is_known() -> None:
    drive = seeing(max_in_flight_steps=2, max_num_batched_tokens=4)
    submit(drive, "a", 8, [picture("cat", 2, 6)])
    drive.schedule()
    drive.schedule()
    assert (named(drive, "a").num_computed_tokens, named(drive, "a").next_position) == (8, 7)
    drive.complete()
    assert held(drive) == {"cat": ["a"]}, "its last place is computed in the step that samples, and that is in flight"
    drive.complete()
    assert held(drive) == {"cat": []}


@pytest.mark.parametrize("how", [Drive.abort, lambda drive, name: drive.run()], ids=["aborted", "finished"])
def test_whoever_has_ended_needs_nothing_any_more(how: Callable[[Drive, str], object]) -> None:
    drive = seeing(max_num_batched_tokens=4)
    submit(drive, "a", 12, [picture("cat", 1, 6)], max_tokens=1)
    drive.schedule()
    assert held(drive) == {"cat": ["a"]}
    how(drive, "a")
    assert held(drive) == {"cat": []}


def preempted_while_it_needs_its_picture() -> Drive:
    """`b` was preempted for `a` in the middle of its picture."""
    drive = seeing(
        num_blocks=5, max_num_batched_tokens=9, admit_full_sequence=False, enable_prefix_caching=False, cache=8
    )
    drive.submit("a", 7, max_tokens=9)
    submit(drive, "b", 12, [picture("cat", 1, 8)], max_tokens=2)
    for _ in range(20):
        if victims(drive, drive.schedule()) == ["b"]:
            return drive
        drive.complete()
    raise AssertionError("nobody was preempted")


def test_who_comes_back_uses_what_is_still_there() -> None:
    drive = preempted_while_it_needs_its_picture()
    assert held(drive) == {"cat": []}, "a victim needs nothing while it waits"
    assert list(drive.state.encoder.evictable) == ["cat"]
    drive.run()
    computed = [item.computed for step in steps(drive) for item in step.encoder_inputs]
    assert computed.count(True) == 1
    assert computed.count(False) >= 1, "pinned again, not computed again"
    assert not any(step.encoder_evictions for step in steps(drive))
    assert outputs(drive) == all_due(drive)


def test_a_victims_picture_goes_if_its_room_is_wanted_before_it_comes_back() -> None:
    drive = seeing(
        num_blocks=6,
        max_num_batched_tokens=9,
        policy="priority",
        admit_full_sequence=False,
        enable_prefix_caching=False,
        cache=8,
    )
    submit(drive, "low", 12, [picture("cat", 1, 8)], max_tokens=2, priority=9)
    drive.schedule()
    drive.complete()
    drive.submit("high", [2] * 20, 1, media=[picture("dog", 8, 8)], priority=0)
    drive.run()
    assert "low" in [name_of(drive, e.handle) for e in all_of(RequestPreempted, drive.records)]
    assert ["cat"] in [step.encoder_evictions for step in steps(drive)]
    by_name = [
        (name_of(drive, step.handles[item.entry]), item.computed)
        for step in steps(drive)
        for item in step.encoder_inputs
    ]
    assert by_name.count(("low", True)) == 2
    assert outputs(drive) == all_due(drive)


# -- eviction ---------------------------------------------------------------------------------------------------------


def with_three_pictures() -> Drive:
    """The cache holds three pictures of four that nobody needs, used in the order cat, dog, sky, then cat again."""
    drive = seeing(budget=8, cache=12)
    for name, digest in (("a", "cat"), ("b", "dog"), ("c", "sky"), ("d", "cat")):
        submit(drive, name, 6, [picture(digest, 0, 4)], max_tokens=1, cache_salt=name)
        drive.run()
    assert list(drive.state.encoder.evictable) == ["dog", "sky", "cat"]
    return drive


@pytest.mark.parametrize(("size", "evicted"), [(4, ["dog"]), (5, ["dog", "sky"]), (8, ["dog", "sky"])])
def test_the_longest_unused_goes_and_no_more_than_must(size: int, evicted: list[str]) -> None:
    drive = with_three_pictures()
    submit(drive, "e", 9, [picture("new", 0, size)])
    assert the(StepScheduled, drive.schedule()).encoder_evictions == evicted
    assert drive.state.encoder.used == 12 - 4 * len(evicted) + size


def test_nothing_goes_while_there_is_room() -> None:
    drive = seeing(budget=8, cache=12)
    for name, digest in (("a", "cat"), ("b", "dog"), ("c", "sky")):
        submit(drive, name, 6, [picture(digest, 0, 4)], max_tokens=1)
        drive.run()
    assert not any(step.encoder_evictions for step in steps(drive))


def test_what_the_same_entry_needs_does_not_go_for_it() -> None:
    drive = with_three_pictures()
    submit(drive, "e", 10, [picture("dog", 0, 4), picture("new", 4, 4)], cache_salt="e")
    events = drive.schedule()
    assert seen(drive, events) == [("e", "dog", False), ("e", "new", True)]
    assert the(StepScheduled, events).encoder_evictions == ["sky"]


def test_what_an_earlier_entry_of_the_step_needs_does_not_go_for_a_later_one() -> None:
    drive = with_three_pictures()
    submit(drive, "e", 6, [picture("dog", 0, 4)], cache_salt="e")
    submit(drive, "f", 10, [picture("new", 0, 8)], cache_salt="f")
    events = drive.schedule()
    assert seen(drive, events) == [("e", "dog", False), ("f", "new", True)]
    assert the(StepScheduled, events).encoder_evictions == ["sky", "cat"]


def test_what_goes_in_a_step_is_not_computed_in_the_same_step() -> None:
    drive = with_three_pictures()
    submit(drive, "e", 6, [picture("new", 0, 4)])
    submit(drive, "f", 6, [picture("dog", 0, 4)], cache_salt="f")

    events = drive.schedule()

    assert (seen(drive, events), the(StepScheduled, events).encoder_evictions) == ([("e", "new", True)], ["dog"])
    drive.complete()
    assert seen(drive, drive.schedule()) == [("f", "dog", True)]
    drive.run()
    assert outputs(drive) == all_due(drive)


def test_nor_is_it_for_a_later_place_of_the_same_entry() -> None:
    drive = with_three_pictures()
    submit(drive, "e", 12, [picture("new", 0, 4), picture("dog", 5, 4)], cache_salt="e")
    events = drive.schedule()
    assert (work(drive, events), seen(drive, events)) == ({"e": 5}, [("e", "new", True)])
    drive.run()
    assert outputs(drive) == all_due(drive)


def test_what_is_in_use_never_goes_and_the_third_waits_for_room() -> None:
    drive = seeing(budget=32, cache=12, max_num_batched_tokens=10)
    submit(drive, "a", 20, [picture("cat", 0, 6)])
    submit(drive, "b", 20, [picture("dog", 0, 6)])
    submit(drive, "c", 20, [picture("sky", 0, 6)])
    first = drive.schedule()
    assert work(drive, first) == {"a": 10}
    drive.complete()
    drive.run()
    used = 0
    sizes = {"cat": 6, "dog": 6, "sky": 6}
    for step in steps(drive):
        used += 6 * sum(item.computed for item in step.encoder_inputs) - sum(sizes[d] for d in step.encoder_evictions)
        assert used <= 12
    assert outputs(drive) == all_due(drive)


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_three_pictures_in_room_for_two_are_had_one_after_the_other(depth: int) -> None:
    """All three are long and in use at once: whoever can't have his picture waits, and nobody for ever."""
    drive = seeing(budget=16, cache=8, max_in_flight_steps=depth, max_num_batched_tokens=6, num_blocks=64)
    for i, digest in enumerate(("cat", "dog", "sky", "sun")):
        submit(drive, f"r{i}", 14, [picture(digest, 3, 4), picture(digest[::-1], 8, 4)])
    drive.run()
    assert outputs(drive) == all_due(drive)
    assert any(step.encoder_evictions for step in steps(drive))


def test_the_books_of_the_cache() -> None:
    cache = EncoderCache(10)
    add(cache, "cat", 6)
    use(cache, "cat", 1)
    use(cache, "cat", 2)
    stop_using(cache, "cat", 1)
    assert list(cache.evictable) == []
    stop_using(cache, "cat", 1)
    stop_using(cache, "cat", 2)
    stop_using(cache, "dog", 2)
    assert (list(cache.evictable), cache.used) == (["cat"], 6)
    with pytest.raises(AssertionError):
        add(cache, "cat", 6)
    use(cache, "cat", 3)
    with pytest.raises(KeyError):
        evict(cache, "cat")
    stop_using(cache, "cat", 3)
    evict(cache, "cat")
    assert (cache.used, cache.sizes, cache.users) == (0, {}, {})
    add(cache, "sky", 10)
    with pytest.raises(AssertionError):
        add(cache, "dog", 1)


# -- lives, resets, sessions ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("forget", [reset, lose_worker, Drive.open], ids=["reset", "worker lost", "reopened"])
def test_a_new_cache_holds_nothing_and_everything_is_computed_again(forget: object) -> None:
    drive = seeing(max_in_flight_steps=3, max_num_batched_tokens=6)
    submit(drive, "a", 16, [picture("cat", 1, 6), picture("dog", 8, 6)])
    drive.schedule()
    drive.schedule()
    assert held(drive) == {"cat": ["a"], "dog": ["a"]}
    assert callable(forget)
    forget(drive)
    assert (drive.state.encoder.used, held(drive)) == (0, {})
    assert named(drive, "a").media_held == set()
    again = drive.schedule()
    assert seen(drive, again) == [("a", "cat", True)]
    drive.run()
    assert outputs(drive) == all_due(drive)


def test_a_sessions_picture_is_needed_in_its_first_turn_only() -> None:
    drive = seeing()
    submit(drive, "s", 9, [picture("cat", 2, 6)], resumable=True)
    settle(drive)
    assert held(drive) == {"cat": []}
    extend(drive, "s", [5, 6])
    assert seen(drive, drive.schedule()) == []
    settle(drive)
    close(drive, "s")
    assert not judged(drive).unfinished


def test_if_its_blocks_were_taken_it_needs_the_picture_again() -> None:
    drive = seeing()
    submit(drive, "s", 9, [picture("cat", 2, 6)], resumable=True)
    settle(drive)
    reset(drive)
    extend(drive, "s", [5, 6])
    assert seen(drive, drive.schedule()) == [("s", "cat", True)]
    settle(drive)
    close(drive, "s")
    assert not judged(drive).unfinished


# -- identity ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "computed"),
    [
        ([picture("cat", 1, 6)], 1),
        ([picture("dog", 1, 6)], 13),
        ([picture("cat", 2, 6)], 13),
        ([], 13),
        ([picture("cat", 1, 6), picture("dog", 9, 3)], 5),
    ],
    ids=["the same", "another picture", "in another place", "no picture", "one more behind it"],
)
def test_the_same_tokens_with_other_media_are_another_content(other: list[Media], computed: int) -> None:
    drive = seeing()
    submit(drive, "a", 13, [picture("cat", 1, 6)], max_tokens=1)
    drive.run()
    submit(drive, "b", 13, other)
    assert work(drive, drive.schedule()) == {"b": computed}


# -- at the door ------------------------------------------------------------------------------------------------------

REFUSED: list[tuple[str, list[Media], str]] = [
    ("larger than a step's budget", [picture("cat", 0, 9)], r"'cat' has 9 embeddings, the encoder takes 8 at a time"),
    ("one over the other", [picture("cat", 0, 4), picture("dog", 3, 4)], r"'dog' at 3, 4 places, overlaps another"),
    ("out of order", [picture("cat", 6, 4), picture("dog", 0, 4)], r"give spans in order"),
    ("beyond the prompt", [picture("cat", 8, 5)], r"'cat' at 8, 5 places, .*leaves the prompt"),
    ("before the prompt", [picture("cat", -1, 4)], r"'cat' at -1"),
    ("of no size", [picture("cat", 0, 0)], r"'cat' at 0, 0 places"),
    ("of two sizes", [picture("cat", 0, 4), picture("cat", 5, 3)], r"4 embeddings elsewhere and 3 here"),
]


@pytest.mark.parametrize(("media", "message"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_media_are_refused(media: list[Media], message: str) -> None:
    drive = seeing(budget=8, cache=16)
    with nothing_changes(drive), pytest.raises(Rejected, match=message):
        submit(drive, "a", 12, media)
    submit(drive, "a", 12, [picture("cat", 0, 8)])
    drive.run()
    assert outputs(drive) == all_due(drive)


@pytest.mark.parametrize("moment", ["waiting", "running", "cached"])
def test_a_digest_has_one_size_across_requests(moment: str) -> None:
    """Or the second would be fed the first one's embeddings: a digest that isn't one of the content harms its sender only."""
    drive = seeing(budget=8, cache=16)
    submit(drive, "a", 12, [picture("cat", 0, 4)], max_tokens=2)
    if moment != "waiting":
        drive.schedule()
    if moment == "cached":
        drive.run()
    with nothing_changes(drive), pytest.raises(Rejected, match=r"'cat' has 4 embeddings elsewhere and 3 here"):
        submit(drive, "b", 12, [picture("cat", 0, 3)])
    submit(drive, "c", 12, [picture("cat", 1, 4)])
    drive.run()
    assert outputs(drive) == all_due(drive)


def test_what_the_cache_could_never_hold_is_refused_too() -> None:
    drive = seeing(budget=16, cache=8)
    with pytest.raises(Rejected, match="the encoder takes 8 at a time"):
        submit(drive, "a", 12, [picture("cat", 0, 9)])
    submit(drive, "a", 12, [picture("cat", 0, 8)])
    assert seen(drive, drive.schedule()) == [("a", "cat", True)]


def test_an_engine_without_an_encoder_takes_no_media() -> None:
    drive = opened()
    with pytest.raises(Rejected, match="the encoder takes 0 at a time"):
        submit(drive, "a", 12, [picture("cat", 0, 1)])


def test_ten_requests_with_one_picture_each_all_come_in() -> None:
    drive = seeing(budget=64, cache=64, max_num_seqs=10, max_num_batched_tokens=128, num_blocks=64)
    for i in range(10):
        submit(drive, f"r{i}", 8, [picture(f"p{i}", 1, 6)], max_tokens=2)
    events = drive.schedule()
    assert len(work(drive, events)) == 10
    assert seen(drive, events) == [(f"r{i}", f"p{i}", True) for i in range(10)]
    drain(drive)
    drive.run()
    assert outputs(drive) == all_due(drive)
