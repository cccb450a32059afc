"""What the scheduler can do, asked for through the engine: tenants, pauses, drafts, and who waits for what."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from refold import Engine, Rejected, SamplingParams
from refold.engine.engine import EngineStopped
from refold.journal.events import (
    EnginePaused,
    EngineResumed,
    Event,
    OutputDelivered,
    RequestFinished,
    RequestSubmitted,
    StepScheduled,
)
from refold.journal.stores import open_reader
from tests.kit.engines import MODEL, collect, eventually, lawful_events, must_produce

SLOW = "simulated?vocab=1000&eos=-1&step_ms=1"


@pytest.fixture
def journal(tmp_path: Path) -> str:
    return str(tmp_path / "journal.db")


def events_of(journal: str, kind: type[Event]) -> list[Any]:
    """A lawful journal's events of one kind."""
    return [event for event in lawful_events(open_reader(journal)) if isinstance(event, kind)]


# -- fair share --------------------------------------------------------------------------------------------------------


def test_tenants_are_served_by_their_weights(journal: str) -> None:
    options = {"policy": "fair_share", "tenant_weights": {"gold": 3}, "max_num_seqs": 1, "max_in_flight_steps": 1}
    sampling = SamplingParams(seed=1, max_tokens=4)
    with Engine(MODEL, journal, **options) as engine:
        engine.pause()
        ids = [engine.enqueue([i], sampling, tenant="iron") for i in range(12)]
        ids += [engine.enqueue([i], sampling, tenant="gold") for i in range(12)]
        engine.unpause()
        engine.wait(ids)
    tenants = {event.handle: event.tenant for event in events_of(journal, RequestSubmitted)}
    order = [tenants[event.handle] for event in events_of(journal, RequestFinished)]
    assert order[:8].count("gold") == 6, "three of four while both wait, though they came last"
    assert sorted(order) == ["gold"] * 12 + ["iron"] * 12


# -- pause -------------------------------------------------------------------------------------------------------------


def test_a_pause_holds_everybody_and_its_end_lets_them_go_on(journal: str) -> None:
    sampling = SamplingParams(seed=2, max_tokens=200)
    with Engine(SLOW, journal) as engine:
        engine.enqueue([1], sampling, request_id="a")
        eventually(lambda: engine.stats().tokens > 5)
        engine.pause()
        engine.pause()
        eventually(lambda: engine.stats().in_flight_steps == 0)
        steps = engine.stats().steps
        late = engine.enqueue([2], sampling)
        assert (engine.stats().paused, engine.stats().steps) == ("all", steps)
        assert "'a' waits for the engine to be resumed" in str(engine.stall_report())
        engine.unpause()
        engine.unpause()
        assert [done.token_ids for done in engine.wait(["a", late])] == [must_produce([n], sampling) for n in (1, 2)]
        assert engine.stats().paused is None
    events = lawful_events(open_reader(journal))
    assert [type(e) for e in events if isinstance(e, EnginePaused | EngineResumed)] == [EnginePaused, EngineResumed]


def test_a_pause_for_new_requests_lets_others_end_and_a_drain_refuses_them() -> None:
    sampling = SamplingParams(seed=3, max_tokens=50)
    with Engine(SLOW) as engine:
        engine.enqueue([1], sampling, request_id="old")
        eventually(lambda: engine.stats().running == 1)
        engine.pause("new")
        engine.enqueue([2], sampling, request_id="new")
        assert engine.wait(["old"])[0].token_ids == must_produce([1], sampling)
        assert (engine.stats().running, engine.stats().waiting) == (0, 1)
        engine.pause("drain")
        with pytest.raises(Rejected, match="draining"):
            engine.enqueue([3], sampling)
        engine.unpause()
        assert engine.wait(["new"])[0].token_ids == must_produce([2], sampling)


def test_a_paused_engine_closes_and_the_next_one_is_not_paused(journal: str) -> None:
    sampling = SamplingParams(seed=4, max_tokens=20)
    with Engine(MODEL, journal) as engine:
        engine.pause()
        engine.enqueue([1], sampling, request_id="a")
    with Engine(MODEL, journal) as engine:
        assert engine.wait(["a"])[0].token_ids == must_produce([1], sampling)


def test_a_pause_that_cant_be_is_rejected() -> None:
    with Engine(MODEL) as engine, pytest.raises(Rejected, match="mode is 'later': give 'all', 'new' or 'drain'"):
        engine.pause("later")  # type: ignore[arg-type]


# -- who waits for what ------------------------------------------------------------------------------------------------


def test_the_stall_report_names_waiters_what_is_free_and_holders() -> None:
    options = {"block_size": 4, "num_blocks": 8, "max_num_seqs": 4}

    async def scenario() -> None:
        async with Engine(MODEL, **options) as engine:
            assert str(engine.stall_report()) == "8 of 8 blocks free, 0 fenced; nobody waits; held: none"
            session = await engine.open_session([1] * 10, SamplingParams(seed=1, max_tokens=3), request_id="chat")
            await collect(session.turn())
            engine.pause()
            await engine.submit([2] * 9, SamplingParams(max_tokens=9), request_id="late")
            report = engine.stall_report()
        assert [(w.request_id, w.reason) for w in report.waiters] == [("late", "pause"), ("chat", "input")]
        assert report.holders == [("chat", 3)]
        assert str(report) == (
            "5 of 8 blocks free, 0 fenced; 'late' waits for the engine to be resumed; "
            "'chat' waits for its next chunk of input; held: 'chat' 3"
        )
        with pytest.raises(EngineStopped):
            engine.stall_report()

    asyncio.run(scenario())


# -- speculation and stagger -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("speculation", ["ngram", "worker"])
def test_drafts_change_the_work_and_not_the_tokens(depth: int, speculation: Any, journal: str) -> None:
    model = "simulated?vocab=4&eos=-1"
    prompts = [[i % 4] * (i + 1) for i in range(6)]
    samplings = [SamplingParams(seed=i, max_tokens=40) for i in range(6)]
    with Engine(model, journal, speculation=speculation, num_speculative_tokens=4, max_in_flight_steps=depth) as engine:
        done = engine.run(prompts, samplings)
    expected = [must_produce(prompt, sampling, model) for prompt, sampling in zip(prompts, samplings, strict=True)]
    assert [each.token_ids for each in done] == expected
    delivered = events_of(journal, OutputDelivered)
    assert sum(sum(event.accepted_drafts) for event in delivered) > 0
    assert max(max(event.counts, default=1) for event in delivered) > 1
    assert max(max(event.num_drafts, default=0) for event in events_of(journal, StepScheduled)) <= 4


def test_the_look_up_drafts_as_much_with_steps_in_flight_as_without(tmp_path: Path) -> None:
    """It needs the last token known: a request is left out of the steps until its own has come back."""
    accepted = {}
    for depth in (1, 2, 4):
        journal = str(tmp_path / f"depth{depth}.db")
        options = {"speculation": "ngram", "num_speculative_tokens": 4, "max_in_flight_steps": depth}
        with Engine("simulated?vocab=4&eos=-1", journal, **options) as engine:
            engine.run([[i % 4] * 9 for i in range(6)], [SamplingParams(seed=i, max_tokens=60) for i in range(6)])
        accepted[depth] = sum(sum(event.accepted_drafts) for event in events_of(journal, OutputDelivered))
    assert accepted[1] == accepted[2] == accepted[4] > 60


def test_a_large_batch_gets_fewer_drafts(journal: str) -> None:
    options = {"speculation": "worker", "num_speculative_tokens": 4, "speculation_by_batch": ((1, 3), (2, 1))}
    sampling = SamplingParams(seed=5, max_tokens=30)
    with Engine(MODEL, journal, **options) as engine:
        done = engine.run([[1], [2], [3]], [sampling, sampling, SamplingParams(seed=5, max_tokens=100)])
    assert done[0].token_ids == must_produce([1], sampling)
    most: dict[int, int] = {}
    for step in events_of(journal, StepScheduled):
        entries = len(step.handles)
        most[entries] = max(most.get(entries, 0), *step.num_drafts, 0)
    assert (most[1], most[3]) == (3, 0)


def steps_that_follow_at_once(journal: str) -> int:
    """How often a request sampled in two steps in a row with the first of them still in flight."""
    in_flight: dict[int, list[int]] = {}
    found = 0
    for event in lawful_events(open_reader(journal)):
        if isinstance(event, StepScheduled):
            before = in_flight.get(event.step - 1, [])
            found += sum(handle in before for handle in event.handles)
            in_flight[event.step] = event.handles
        elif isinstance(event, OutputDelivered):
            del in_flight[event.step]
    return found


def test_a_stagger_keeps_samples_of_one_request_apart(tmp_path: Path) -> None:
    sampling = SamplingParams(seed=6, max_tokens=20)
    found = []
    for stagger in (1, 2):
        journal = str(tmp_path / f"{stagger}.db")
        with Engine(SLOW, journal, max_in_flight_steps=4, decode_stagger=stagger) as engine:
            done = engine.run([[1], [2]], sampling)
        assert [each.token_ids for each in done] == [must_produce([n], sampling) for n in (1, 2)]
        found.append(steps_that_follow_at_once(journal))
    assert found[0] > 20
    assert found[1] == 0
