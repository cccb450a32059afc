"""The life of a request, told from its events."""

import pytest

from refold.engine.cli.request import _WORDS
from refold.engine.history.life import LifeStory
from refold.engine.history.relations import Names
from refold.engine.history.words import sentence
from refold.journal.codec import decode
from refold.journal.events import RequestPreempted, RequestSubmitted, StaleOutputConsumed
from tests.history.journals import TICK_NS, eventful_lives, sealed
from tests.kit.drive import Drive, config, delivered_tokens
from tests.kit.simulator import Simulation


@pytest.fixture(scope="module")
def eventful():
    lives, _ = eventful_lives()
    return lives, sealed(lives)


def story_of(request_id, records):
    story = LifeStory(request_id)
    for record in records:
        story.observe(record, decode(record))
    return story


def kinds(life):
    return [moment.kind for moment in life.moments]


def test_every_request_ends_with_the_tokens_that_its_client_got(eventful):
    lives, records = eventful
    for request_id, tokens in delivered_tokens([r for life in lives for r in life]).items():
        life = story_of(request_id, records).life
        assert life.output_token_ids == tokens
        assert life.status == "finished"
        assert kinds(life)[0] == "submitted"
        assert kinds(life)[-1] == "finished"


def test_preemptions_say_why_for_whom_and_at_what_cost(eventful):
    lives, records = eventful
    story = story_of("req-3", records)
    events = [
        e for life in lives for r in life for e in r if type(e) is RequestPreempted and e.handle == story.life.handle
    ]
    told = [m for m in story.life.moments if m.kind == "preempted"]
    assert story.life.num_preemptions == len(told) == len(events) > 0
    for moment, event in zip(told, events, strict=True):
        assert moment.facts["needed_blocks"] == event.needed_blocks
        assert moment.facts["free_blocks"] == event.free_blocks
        assert moment.facts["num_stale_output_tokens"] == event.num_stale_output_tokens
        assert moment.facts["for_request_id"] == story.names[event.for_handle]


def test_stale_output_is_told_apart_from_current_output(eventful):
    lives, records = eventful
    consumed = [e for life in lives for r in life for e in r if type(e) is StaleOutputConsumed]
    delivered = sum(sum(c for c, d in zip(e.counts, e.delivered, strict=True) if d) for e in consumed)
    stories = [story_of(f"req-{i}", records).life for i in range(6)]
    assert sum(life.num_stale_tokens_delivered for life in stories) == delivered > 0
    assert sum(kinds(life).count("stale_delivered") for life in stories) > 0


def test_a_lost_worker_is_a_moment_with_what_was_in_flight(eventful):
    _, records = eventful
    life = story_of("req-2", records).life
    (lost,) = [m for m in life.moments if m.kind == "worker_lost"]
    assert life.num_workers_lost == 1
    assert lost.facts["num_lost_tokens"] > 0
    assert lost.engine_epoch == 2
    assert kinds(life)[kinds(life).index("worker_lost") + 1 :][:1] == ["resumed"]


def test_an_abort_is_told_with_its_cause(eventful):
    life = story_of("req-5", eventful[1]).life
    assert kinds(life) == ["submitted", "aborted", "finished"]
    assert life.finish_reason == "abort"
    assert life.time_to_first_token_ns is None


def test_latencies_come_from_record_times():
    drive = Drive(config(max_in_flight_steps=1))
    drive.open()
    drive.submit("r", 5, max_tokens=3)
    drive.run()
    records = sealed([drive.records])
    life = story_of("r", records).life
    positions = {m.kind: m.position for m in life.moments}
    submitted = positions["submitted"]
    assert life.queued_ns == (positions["admitted"] - submitted) * TICK_NS
    assert life.time_to_first_token_ns == (positions["first_token"] - submitted) * TICK_NS
    assert life.total_ns == (positions["finished"] - submitted) * TICK_NS
    assert life.mean_inter_token_ns == 2 * TICK_NS


def test_a_run_of_decode_steps_is_one_moment():
    drive = Drive(config(max_in_flight_steps=2))
    drive.open()
    drive.submit("r", 3, max_tokens=20)
    drive.run()
    life = story_of("r", sealed([drive.records])).life
    assert kinds(life) == ["submitted", "admitted", "prompt_end", "first_token", "output", "finished"]
    output = life.moments[-2]
    assert (output.facts["first_index"], output.facts["last_index"]) == (1, 19)


def test_an_unknown_id_has_no_life_and_similar_names(eventful):
    story = story_of("req-33", eventful[1])
    assert story.life is None
    assert "req-3" in story.names.similar("req-33")


def test_a_request_still_running_has_no_end(eventful):
    _, records = eventful
    life = story_of("req-2", records[:38]).life
    assert life.status == "running"
    assert life.total_ns is None
    assert life.output_token_ids


@pytest.mark.parametrize("seed", range(12))
def test_every_life_in_a_random_history_tells_what_its_client_got(seed):
    simulation = Simulation(seed)
    simulation.play()
    records = sealed([simulation.drive.records])
    names = Names()
    for events in simulation.drive.records:
        for event in events:
            if isinstance(event, RequestSubmitted):
                names.observe(event)
            words = sentence(event, names)
            assert words.isprintable()
            assert "contradict" not in words
    for request_id, tokens in delivered_tokens(simulation.drive.records).items():
        life = story_of(request_id, records).life
        assert life.output_token_ids == tokens, request_id
        assert all(moment.kind in _WORDS for moment in life.moments)
        assert all(_WORDS[moment.kind](moment.facts) for moment in life.moments)
