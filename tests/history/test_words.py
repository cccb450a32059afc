"""Words: every event has a sentence, and no sentence can harm a terminal."""

import pytest

from refold.engine.history.plain import count, listed, safe
from refold.engine.history.relations import Names, handles_of, steps_of
from refold.engine.history.words import sentence
from refold.journal.events import (
    EVENT_TYPES,
    CacheReset,
    ContentRedacted,
    DraftsProposed,
    EngineClosed,
    EnginePaused,
    EngineResumed,
    GrammarReady,
    LogitsRecorded,
    LogprobsDelivered,
    OutputDelivered,
    PromptLogprobsDelivered,
    QuarantineLifted,
    RequestAborted,
    RequestFinished,
    RequestPreempted,
    RequestQuarantined,
    RequestSubmitted,
    Sampling,
    SessionClosed,
    SessionExtended,
    SessionTurnEnded,
    StaleOutputConsumed,
    StepScheduled,
    WorkerLost,
    WorkerStarted,
)
from tests.history.journals import eventful_lives


def names(**known):
    book = Names()
    for request_id, handle in known.items():
        book.observe(
            RequestSubmitted(
                handle=handle, request_id=request_id, prompt_token_ids=[1], sampling=SAMPLING, arrival_ns=0
            )
        )
    return book


SAMPLING = Sampling(seed=7, max_tokens=40)


def test_every_kind_of_event_has_a_sentence():
    lives, _ = eventful_lives()
    events = {type(e): e for life in lives for record in life for e in record}
    rare = (
        CacheReset(reset_running=True),
        GrammarReady(handle=1),
        SessionExtended(handle=1, token_ids=[1], sampling=SAMPLING),
        SessionClosed(handle=1),
        SessionTurnEnded(handle=1, reason="stop", num_output_tokens=2, stop_token_id=1),
        DraftsProposed(handle=1, token_ids=[1, 2]),
        EnginePaused(mode="drain"),
        EngineResumed(),
        LogprobsDelivered(
            step=1, handles=[1], first_output_indices=[0], counts=[1], num_top=[1], surprisals=[1, 5, 7, 5]
        ),
        PromptLogprobsDelivered(handle=1, count=1, num_top=0, surprisals=[3, 9]),
        LogitsRecorded(step=1, handles=[1], digests=[2**64 - 1]),
        RequestQuarantined(handle=1, content_digest="ab", num_lost_workers=3),
        QuarantineLifted(handle=1),
        ContentRedacted(handles=[1], positions=[0, 3], content_hashes=["", "ab" * 32], reason="asked by mail"),
    )
    events |= {type(event): event for event in rare}
    assert set(events) == set(EVENT_TYPES)
    for event in events.values():
        words = sentence(event, names())
        assert words
        assert words.isprintable()
        assert "contradict" not in words


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (
            RequestPreempted(
                handle=2,
                reason="kv_pressure",
                stale_policy="deliver",
                released_block_ids=[1, 2],
                num_computed_tokens=9,
                num_stale_output_tokens=3,
                for_handle=1,
                needed_blocks=1,
                free_blocks=0,
            ),
            (
                "b preempted for a: needed 1 block, 0 free; released 2 blocks with 9 computed tokens; "
                "3 scheduled tokens in flight turned stale, policy deliver"
            ),
        ),
        (
            RequestPreempted(
                handle=2,
                reason="cache_reset",
                stale_policy="drop",
                released_block_ids=[1],
                num_computed_tokens=1,
                num_stale_output_tokens=0,
            ),
            "b preempted for a cache reset; released 1 block with 1 computed token",
        ),
        (
            RequestSubmitted(handle=9, request_id="c", prompt_token_ids=[1, 2], sampling=SAMPLING, arrival_ns=0),
            "c submitted: 2 prompt tokens, up to 40 more, greedy",
        ),
        (
            RequestFinished(handle=1, reason="stop", num_output_tokens=1, stop_token_id=2),
            "a finished: stop after 1 token (stop token 2)",
        ),
        (
            StepScheduled(step=4, handles=[1, 3], num_tokens=[1, 7], first_positions=[0, 0], chunk_entries=[1]),
            "step 4 scheduled: 8 tokens of 2 requests, 1 chunk of a longer prompt",
        ),
        (
            StaleOutputConsumed(
                step=4,
                handles=[1, 2],
                num_tokens=[1, 5],
                delivered=[True, False],
                counts=[1, 1],
                token_ids=[5, 6],
                first_output_indices=[0, -1],
            ),
            "step 4 came back stale for a (1 scheduled token, 1 output delivered), b (5 scheduled tokens, 1 output dropped)",
        ),
        (
            WorkerLost(generation=1, reason="killed", steps=[3, 4], handles=[1, 7]),
            "worker 1 lost: killed; steps 3, 4 went with it; a, #7 will compute again",
        ),
    ],
)
def test_a_sentence_carries_the_numbers(event, words):
    assert sentence(event, names(a=1, b=2)) == words


@pytest.mark.parametrize(
    "event",
    [
        EngineClosed(engine_epoch=1, reason="\x1b[2J\x07 cleared"),
        WorkerStarted(generation=1, kind="x\ny", environment={"a\x1b": "b\r"}),
        WorkerLost(generation=1, reason="a\x00b", steps=[], handles=[]),
        RequestFinished(handle=1, reason="error", num_output_tokens=0, message="\x9b31m"),
        RequestAborted(handle=1, cause="\u202ereversed"),
    ],
)
def test_hostile_text_is_escaped(event):
    assert sentence(event, names(a=1)).isprintable()


def test_a_forged_event_gets_its_name_only():
    event = StaleOutputConsumed(
        step=1, handles=[1, 2], num_tokens=[1], delivered=[True], counts=[1], token_ids=[], first_output_indices=[]
    )
    assert sentence(event, names()) == "StaleOutputConsumed with columns that contradict each other"


def test_relations_name_handles_and_steps():
    preempted = RequestPreempted(
        handle=2, reason="kv_pressure", stale_policy="deliver", released_block_ids=[], num_computed_tokens=0,
        num_stale_output_tokens=0, for_handle=5,
    )  # fmt: skip
    assert tuple(handles_of(preempted)) == (2, 5)
    assert tuple(steps_of(preempted)) == ()
    assert tuple(steps_of(OutputDelivered(step=3, handles=[1], token_ids=[1], first_output_indices=[0]))) == (3,)
    assert tuple(steps_of(WorkerLost(generation=1, reason="", steps=[1, 2], handles=[]))) == (1, 2)


def test_a_name_that_was_used_again_belongs_to_the_last_request():
    book = names(a=1)
    book.observe(RequestSubmitted(handle=8, request_id="a", prompt_token_ids=[1], sampling=SAMPLING, arrival_ns=0))
    assert book.handle_of("a") == 8
    assert book[1] == "a"


def test_plain_text():
    assert safe("naïve ünïcode 日本") == "naïve ünïcode 日本"
    assert safe("a\x00\n\ud800") == "a\\x00\\n\\ud800"
    assert count(1, "token") == "1 token"
    assert count(2000, "token") == "2,000 tokens"
    assert listed(["a", "b"]) == "a, b"
    assert listed(list("abcdefg")) == "a, b, c and 4 more"
