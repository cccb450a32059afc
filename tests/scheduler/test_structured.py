"""Structured output: a request waits for its grammar, samples one token at a time, and a refusal ends it alone."""

import pytest

from refold.journal.events import (
    DraftsProposed,
    GrammarReady,
    OutputDelivered,
    RequestFinished,
    StaleOutputConsumed,
    StepScheduled,
)
from tests.kit.drive import Drive
from tests.kit.features import close, drafting, drafts_of, extend, fail, judged, propose, ready, settle, steps
from tests.kit.sentences import (
    all_due,
    all_of,
    drain,
    ends,
    fill,
    is_live,
    name_of,
    named,
    names,
    nothing_changes,
    opened,
    outputs,
    reset,
    story,
    the,
    token_at,
    victims,
    work,
)

DEPTHS = (1, 2, 4, 8)


def constrained(*, is_ready: bool = True, max_tokens: int = 6, **changes: object) -> Drive:
    """A request `g` whose output is constrained."""
    drive = opened(**({"num_blocks": 16, "max_in_flight_steps": 4} | changes))
    drive.submit("g", 5, max_tokens, grammar="json")
    if is_ready:
        ready(drive, "g")
    return drive


def refuse(drive: Drive, name: str) -> list[object]:
    """The oldest step comes back, and the grammar refuses what it brings for this request."""
    entry = [name_of(drive, handle) for handle in drive.orders[0].scheduled.handles].index(name)
    return list(drive.deliver(drive.run_worker(), refused_entries=[entry]))


# -- waiting for the grammar ------------------------------------------------------------------------------------------


def test_it_waits_until_its_grammar_is_ready() -> None:
    drive = constrained(is_ready=False)
    assert drive.schedule() == []
    assert story(ready(drive, "g")) == ["GrammarReady"]
    assert work(drive, drive.schedule()) == {"g": 5}


def test_those_behind_it_do_not_wait_and_it_keeps_its_place() -> None:
    drive = opened(num_blocks=32, max_num_seqs=3, max_in_flight_steps=1)
    drive.submit("a", 3, 9)
    drive.submit("g", 3, 9, grammar="json")
    drive.submit("h", 3, 9, grammar="json")
    drive.submit("b", 3, 9)
    assert work(drive, drive.schedule()) == {"a": 3, "b": 3}
    assert names(drive.state.queues.waiting) == ["g", "h"]
    drive.complete()
    ready(drive, "h")
    assert list(work(drive, drive.schedule())) == ["a", "b", "h"]
    drive.complete()
    ready(drive, "g")
    assert "g" not in work(drive, drive.schedule()), "the seats are taken: it waits like anybody"
    drive.abort("b")
    drive.complete()
    assert list(work(drive, drive.schedule())) == ["a", "h", "g"], "those who run, in order, then who comes in"
    drive.complete()
    assert list(work(drive, drive.schedule())) == ["a", "g", "h"]


def test_many_kinds_of_waiting_are_passed_over_in_order_and_come_in_in_order() -> None:
    drive = opened(num_blocks=64, max_num_seqs=8, max_num_batched_tokens=64)
    for name, grammar in (("a", "x"), ("b", ""), ("c", "x"), ("d", ""), ("e", "x")):
        drive.submit(name, 3, 9, grammar=grammar)
    assert list(work(drive, drive.schedule())) == ["b", "d"]
    for name in "eca":
        ready(drive, name)
    step = the(StepScheduled, drive.schedule())
    admitted = [name_of(drive, step.handles[a.entry]) for a in step.admissions]
    assert admitted == ["a", "c", "e"], "as they arrived, whichever grammar was ready first"


@pytest.mark.parametrize("case", ["unknown", "ready already", "without a grammar", "finished"])
def test_a_grammar_that_nobody_waits_for_is_no_fact(case: str) -> None:
    drive = constrained()
    drive.submit("plain", 3)
    if case == "finished":
        drive.abort("g")
    name = {"unknown": "x", "without a grammar": "plain"}.get(case, "g")
    with nothing_changes(drive):
        assert ready(drive, name) == []


def test_a_grammar_that_can_not_be_compiled_ends_its_request_and_no_other() -> None:
    drive = constrained(is_ready=False)
    drive.submit("a", 3)
    drive.schedule()

    events = fail(drive, "g", "the grammar does not compile: unexpected '}' at 7")

    finished = the(RequestFinished, events)
    assert (finished.reason, finished.num_output_tokens) == ("error", 0)
    assert finished.message == "the grammar does not compile: unexpected '}' at 7"
    drive.run()
    assert outputs(drive) == {"g": [], "a": all_due(drive)["a"]}
    assert fail(drive, "g", "again") == []


def test_while_it_waits_it_may_be_aborted() -> None:
    drive = constrained(is_ready=False)
    assert story(drive.abort("g")) == ["RequestAborted", "RequestFinished"]
    assert drive.state.is_quiescent


def test_a_grammar_once_ready_stays_so() -> None:
    drive = constrained()
    drive.schedule()
    reset(drive)
    assert work(drive, drive.schedule()) == {"g": 5}
    drive.open()
    assert work(drive, drive.schedule()) == {"g": 5}
    assert len(all_of(GrammarReady, drive.records)) == 1
    drive.run()
    assert outputs(drive) == all_due(drive)


# -- one token at a time ----------------------------------------------------------------------------------------------


def test_it_does_not_sample_while_an_earlier_sample_is_in_flight() -> None:
    drive = constrained()
    drive.schedule()
    assert drive.schedule() == []
    drive.complete()
    assert work(drive, drive.schedule()) == {"g": 1}
    assert drive.schedule() == []


def test_others_go_on_meanwhile() -> None:
    drive = constrained()
    drive.submit("a", 3)
    assert work(drive, drive.schedule()) == {"g": 5, "a": 3}
    assert [work(drive, drive.schedule()) for _ in range(3)] == [{"a": 1}] * 3


def test_chunks_of_its_prompt_may_follow_each_other() -> None:
    drive = constrained(max_num_batched_tokens=2)
    assert [work(drive, events) for events in iter(drive.schedule, [])] == [{"g": 2}, {"g": 2}, {"g": 1}]


def test_a_sample_that_is_to_be_dropped_does_not_count() -> None:
    drive = constrained()
    drive.schedule()
    reset(drive)
    assert work(drive, drive.schedule()) == {"g": 5}
    assert drive.schedule() == []
    drive.run()
    assert outputs(drive) == all_due(drive)


@pytest.mark.parametrize("speculation", ["off", "ngram", "worker"])
@pytest.mark.parametrize("depth", DEPTHS)
def test_in_no_history_has_it_two_samples_in_flight(depth: int, speculation: str) -> None:
    drive = opened(
        num_blocks=10,
        max_in_flight_steps=depth,
        speculation=speculation,
        num_speculative_tokens=3,
        vocab_size=3,
        max_num_batched_tokens=16,
    )
    for name in "abcd":
        drive.submit(name, 6, 12, grammar="json" if name in "bd" else "")
    ready(drive, "b")
    ready(drive, "d")
    for _ in range(400):
        while drive.schedule():
            for name in "bd":
                assert not is_live(drive, name) or named(drive, name).num_sampling_in_flight <= 1
        if not drive.orders:
            break
        drive.complete()
    assert drive.state.is_quiescent
    assert outputs(drive) == all_due(drive)


# -- drafts -----------------------------------------------------------------------------------------------------------


def test_the_workers_drafts_are_not_for_it() -> None:
    drive, _ = drafting(3, 3, max_in_flight_steps=1)
    drive.submit("g", 5, 9, grammar="json")
    drive.submit("a", 5, 9)
    ready(drive, "g")
    drive.schedule()
    drive.complete()
    assert drafts_of(drive, drive.schedule()) == {"g": 0, "a": 3}


def test_those_of_its_grammars_drafter_are() -> None:
    drive = constrained(max_in_flight_steps=1, speculation="ngram", num_speculative_tokens=4, vocab_size=3)
    drive.schedule()
    drive.complete()
    right = [token_at(drive, "g", position, prompt=5) for position in (6, 7)]
    wrong = (token_at(drive, "g", 8, prompt=5) + 1) % 3
    assert the(DraftsProposed, propose(drive, "g", [*right, wrong])).token_ids == [*right, wrong]

    assert drafts_of(drive, drive.schedule()) == {"g": 3}

    delivered = the(OutputDelivered, drive.complete())
    assert (delivered.counts, delivered.accepted_drafts) == ([3], [2])
    assert drafts_of(drive, drive.schedule()) == {"g": 0}, "and none of the look-up's"
    drive.run()
    assert outputs(drive) == all_due(drive)


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_a_refused_token_is_delivered_and_ends_the_request_with_an_error() -> None:
    drive = constrained()
    drive.submit("a", 3, 3)
    drive.schedule()

    events = refuse(drive, "g")

    assert [type(event).__name__ for event in events] == ["OutputDelivered", "RequestFinished"]
    finished = all_of(RequestFinished, drive.records)[0]
    assert (finished.reason, finished.num_output_tokens, finished.stop_token_id) == ("error", 1, None)
    assert finished.message == "the grammar 'json' refuses the last token"
    assert outputs(drive)["g"] == [token_at(drive, "g", 5, prompt=5)]
    assert not is_live(drive, "g")
    drive.run()
    assert outputs(drive)["a"] == all_due(drive)["a"], "nobody else heard of it"
    assert drive.state.pool.num_free == drive.state.pool.num_blocks


def test_of_a_refused_run_of_drafts_all_is_delivered() -> None:
    drive = constrained(max_in_flight_steps=1, speculation="ngram", num_speculative_tokens=4)
    drive.schedule()
    drive.complete()
    right = [token_at(drive, "g", position, prompt=5) for position in (6, 7, 8)]
    propose(drive, "g", right[:2])
    drive.schedule()
    refuse(drive, "g")
    assert outputs(drive)["g"][1:] == right
    assert ends(drive.records, drive) == {"g": ("error", 4)}


@pytest.mark.parametrize("end", ["its last token", "a stop token"])
def test_a_refusal_goes_before_any_other_end(end: str) -> None:
    drive = opened(num_blocks=16)
    stops = (token_at(drive, "g", 5, prompt=5),) if end == "a stop token" else ()
    drive.submit("g", 5, 1 if end == "its last token" else 9, grammar="json", stop_token_ids=stops)
    ready(drive, "g")
    drive.schedule()
    refuse(drive, "g")
    assert ends(drive.records, drive) == {"g": ("error", 1)}


def test_a_chunk_that_samples_nothing_can_not_be_refused() -> None:
    drive = constrained(max_num_batched_tokens=3)
    drive.schedule()
    refuse(drive, "g")
    assert is_live(drive, "g")
    drive.run()
    assert outputs(drive) == all_due(drive)


def test_a_stale_token_may_be_refused_as_well() -> None:
    drive = opened(num_blocks=4, max_in_flight_steps=3)
    drive.submit("a", 7, 8)
    drive.submit("g", 8, 8, grammar="json")
    ready(drive, "g")
    drive.schedule()
    drive.schedule()
    assert victims(drive, drive.schedule()) == ["g"]
    assert named(drive, "g").num_deliverable_stale_tokens == 8
    refuse(drive, "g")
    assert all_of(StaleOutputConsumed, drive.records)[-1].delivered == [True]
    assert ends(drive.records, drive)["g"][0] == "error"
    drive.run()
    assert outputs(drive)["a"] == all_due(drive)["a"]


def test_one_that_is_dropped_is_not_even_heard_of() -> None:
    drive = constrained()
    drive.schedule()
    reset(drive)
    refuse(drive, "g")
    assert is_live(drive, "g")
    drive.run()
    assert outputs(drive) == all_due(drive)


# -- sessions ---------------------------------------------------------------------------------------------------------


def test_a_session_keeps_its_grammar_over_all_turns() -> None:
    drive = opened(num_blocks=16, max_in_flight_steps=4)
    drive.submit("g", 5, 2, grammar="json", resumable=True)
    assert drive.schedule() == []
    ready(drive, "g")
    settle(drive)
    extend(drive, "g", [1], max_tokens=3)
    assert work(drive, drive.schedule()) == {"g": 1}
    assert drive.schedule() == []
    settle(drive)
    close(drive, "g")
    assert not judged(drive).unfinished


@pytest.mark.parametrize("chunk_waits", [False, True])
def test_a_refusal_ends_a_session_with_all_that_it_had_ahead(chunk_waits: bool) -> None:
    drive = opened(num_blocks=16, max_in_flight_steps=4)
    drive.submit("g", 5, 5, grammar="json", resumable=True)
    ready(drive, "g")
    drive.schedule()
    if chunk_waits:
        extend(drive, "g", [1])
    refuse(drive, "g")
    assert ends(drive.records, drive) == {"g": ("error", 1)}
    assert drive.state.requests.sessions == {}
    drain(drive)
    assert drive.state.is_quiescent


def test_a_grammar_may_become_ready_after_the_session_got_its_next_chunk_and_was_closed() -> None:
    drive = opened(num_blocks=16)
    drive.submit("g", 5, 2, grammar="json", resumable=True)
    extend(drive, "g", [1, 2], max_tokens=2)
    close(drive, "g")
    assert fill(drive) == []
    ready(drive, "g")
    settle(drive)
    assert ends(drive.records, drive) == {"g": ("length", 4)}
    assert not judged(drive).unfinished
    assert steps(drive)
