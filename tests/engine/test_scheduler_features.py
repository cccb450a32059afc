"""What the scheduler can do, asked for through the engine: tenants, pauses, drafts, sessions, and who waits for what."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from refold import Engine, NotFound, Rejected, SamplingParams
from refold.engine.engine import Delta, EngineStopped, Session
from refold.engine.prompts import extension_token_ids, prompt_token_ids
from refold.engine.text import Tokenizer
from refold.gpu.simulated import SimulatedWorker
from refold.journal.events import (
    EnginePaused,
    EngineResumed,
    Event,
    OutputDelivered,
    RequestFinished,
    RequestPreempted,
    RequestSubmitted,
    SessionClosed,
    SessionTurnEnded,
    StepScheduled,
)
from refold.journal.stores import open_reader
from tests.kit import tiny_llama
from tests.kit.engines import MODEL, becomes, collect, durable_outputs, eventually, joined, lawful_events, must_produce
from tests.project.tree import ROOT

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


def test_a_model_that_cant_verify_drafts_says_so(tmp_path: Path) -> None:
    model = str(tiny_llama.write_folder(tmp_path / "llama", tiny_llama.tensors()))
    with pytest.raises(Rejected, match="can't verify drafts yet; set it to 'off', or use the model 'simulated'"):
        Engine(model, speculation="ngram").open()


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


# -- sessions ----------------------------------------------------------------------------------------------------------

FIRST = SamplingParams(seed=7, max_tokens=6)
SECOND = SamplingParams(seed=8, max_tokens=5)


def two_turns(prompt: list[int], extension: list[int]) -> tuple[list[int], list[int]]:
    """What the turns of a simulated session must produce. The first one's last token is no context of the second."""
    first = must_produce(prompt, FIRST)
    return first, must_produce([*prompt, *first[:-1], *extension], SECOND)


def test_a_session_s_turns_are_read_one_by_one_and_as_one_stream(journal: str) -> None:
    async def scenario() -> None:
        async with Engine(MODEL, journal) as engine:
            whole = None
            async with await engine.open_session([1, 2], FIRST, request_id="s") as session:
                assert session.request_id == "s"
                whole = asyncio.create_task(collect(engine.resume("s")))
                first = await collect(session.turn())
                await session.extend([3, 4, 5], SECOND)
                second = await collect(session.turn())
                with pytest.raises(Rejected, match="no turn left to read: extend it first"):
                    await anext(session.turn())
            expected = two_turns([1, 2], [3, 4, 5])
            assert (joined(first), joined(second, len(expected[0]))) == expected
            assert (first[-1].finish_reason, second[-1].finish_reason) == ("length", "length")
            stream = await whole
            assert joined(stream) == [*expected[0], *expected[1]]
            assert [delta.finish_reason for delta in stream if delta.finish_reason] == ["stop"]
            again = await engine.attach_session("s", after=3)
            assert joined(await collect(again.turn()), 4) == expected[0][4:]
            assert joined(await collect(again.turn()), 6) == expected[1]

    asyncio.run(scenario())
    assert [event.num_output_tokens for event in events_of(journal, SessionTurnEnded)] == [6, 5]


def test_input_that_comes_early_waits_for_its_turn() -> None:
    async def scenario() -> None:
        async with Engine(SLOW) as engine:
            session = await engine.open_session("hi", FIRST)
            await session.extend("you", SECOND)
            await session.extend()
            await session.close()
            turns = [joined(await collect(session.turn()), first) for first in (0, 6, 11)]
            expected = two_turns(list(b"hi"), list(b"you"))
            context = [*b"hi", *expected[0][:-1], *b"you", *expected[1][:-1]]
            assert turns == [*expected, must_produce(context, SECOND)], "the last one goes on as the one before it"
            with pytest.raises(Rejected, match="not live"):
                await session.extend("more")

    asyncio.run(scenario())


def test_a_reader_that_leaves_a_turn_finds_the_rest_of_it() -> None:
    async def scenario() -> None:
        async with Engine(SLOW) as engine, await engine.open_session([1], FIRST) as session:
            stream = session.turn()
            seen = [await anext(stream)]
            await stream.aclose()
            seen += await collect(session.turn())
            assert joined(seen) == must_produce([1], FIRST)
            assert "".join(each.text for each in seen) == "".join(f"{token} " for token in must_produce([1], FIRST))

    asyncio.run(scenario())


def test_a_token_that_stops_a_turn_is_not_part_of_its_text() -> None:
    free = must_produce([1], FIRST)
    stopping = SamplingParams(seed=FIRST.seed, max_tokens=6, stop_token_ids=(free[2],))

    async def scenario() -> None:
        async with Engine(MODEL) as engine:
            async with await engine.open_session([1], stopping, request_id="s") as session:
                (*_, last) = turn = await collect(session.turn())
                assert (joined(turn), last.finish_reason) == (free[:3], "stop")
                await session.extend([], SamplingParams(max_tokens=1))
                await collect(session.turn())
            text = "".join(delta.text for delta in await collect(engine.resume("s")))
            assert text == "".join(f"{token} " for token in [*free[:2], free[2]])

    asyncio.run(scenario())


def test_an_abort_ends_a_session_s_turn() -> None:
    async def scenario() -> None:
        async with Engine(SLOW) as engine:
            session = await engine.open_session([1], SamplingParams(seed=1, max_tokens=3000), request_id="s")
            stream = session.turn()
            await anext(stream)
            engine.abort("s")
            assert (await collect(stream))[-1].finish_reason == "abort"
            await session.close()

    asyncio.run(scenario())


def test_the_text_of_an_extension_brings_no_special_tokens() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"<s>": 0, "a": 1, "b": 2}, merges=[]))
    inner.add_special_tokens(["<s>"])
    inner.post_processor = tokenizers.processors.TemplateProcessing(single=["<s>", "$A"], special_tokens=[("<s>", 0)])
    text = Tokenizer(inner, None, {})
    assert prompt_token_ids("ab", text, 3, 100) == [0, 1, 2]
    assert extension_token_ids("ab", text, 3, 100) == [1, 2]
    assert extension_token_ids("", text, 3, 100) == extension_token_ids([], text, 3, 100) == []


def test_only_a_session_can_be_attached_as_one() -> None:
    async def scenario() -> None:
        async with Engine(MODEL) as engine:
            await engine.submit([1], FIRST, request_id="plain")
            with pytest.raises(Rejected, match="'plain' is no session: resume it"):
                await engine.attach_session("plain")
            with pytest.raises(NotFound):
                await engine.attach_session("nobody")
            with pytest.raises(Rejected, match="after is -2"):
                await engine.attach_session("plain", -2)
            async with await engine.open_session([1], FIRST) as session:
                for bad, line in (([{"role": "user"}], "whole conversations"), (7, "a int"), ([-1], "token ids")):
                    with pytest.raises(Rejected, match=line):
                        await session.extend(bad)  # type: ignore[arg-type]
                assert joined(await collect(session.turn())) == must_produce([1], FIRST)

    asyncio.run(scenario())


def test_a_session_that_is_left_idle_is_closed_and_one_that_is_used_is_not(journal: str) -> None:
    async def scenario() -> None:
        async with Engine(MODEL, journal, session_idle_s=0.3) as engine:
            left = await engine.open_session([1], FIRST, request_id="left")
            used = await engine.open_session([2], FIRST, request_id="used")
            await collect(left.turn())
            for _ in range(6):
                await collect(used.turn())
                await asyncio.sleep(0.1)
                await used.extend()
            assert engine.unfinished() == ["used"]
            with pytest.raises(Rejected, match="not live"):
                await left.extend()
            await collect(used.turn())
            await becomes(lambda: engine.unfinished() == [])

    asyncio.run(scenario())
    assert len(events_of(journal, SessionClosed)) == 2


def test_sessions_give_their_memory_to_whoever_runs_and_go_on(journal: str) -> None:
    options = {"block_size": 4, "num_blocks": 8, "max_in_flight_steps": 2}

    async def scenario() -> None:
        async with Engine(MODEL, journal, **options) as engine:
            session = await engine.open_session([1] * 10, FIRST)
            first = await collect(session.turn())
            (big,) = await asyncio.to_thread(engine.run, [[9] * 20], SamplingParams(seed=3, max_tokens=10))
            assert big.token_ids == must_produce([9] * 20, SamplingParams(seed=3, max_tokens=10))
            await session.extend([5], SECOND)
            assert (joined(first), joined(await collect(session.turn()), 6)) == two_turns([1] * 10, [5])
            await session.close()

    asyncio.run(scenario())
    assert [event.reason for event in events_of(journal, RequestPreempted)] == ["session_reclaimed"]


class CountingWorker(SimulatedWorker):
    """Remembers how many slots it held after each order."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.slots: list[int] = []

    def execute(self, order: Any) -> Any:
        output = super().execute(order)
        self.slots.append(len(self._slots))
        return output


def test_the_worker_lets_go_of_a_session_at_the_end_of_its_turn() -> None:
    workers: list[CountingWorker] = []

    def make(config: Any) -> CountingWorker:
        workers.append(CountingWorker(config))
        return workers[-1]

    async def scenario() -> None:
        async with Engine(MODEL, make_worker=make) as engine:
            for n in range(5):
                await collect((await engine.open_session([n], FIRST)).turn())

    asyncio.run(scenario())
    assert max(workers[0].slots) == 1, "sessions between two turns keep their blocks, not their slots"


async def one_life(journal: str, turns: list[int], seen: list[Delta]) -> None:
    """Open or attach, read what is there, extend as often as is due."""
    async with Engine(SLOW, journal) as engine:
        after = seen[-1].index + len(seen[-1].token_ids) - 1 if seen else -1
        session: Session
        if seen:
            session = await engine.attach_session("s", after)
        else:
            session = await engine.open_session([1, 2], FIRST, request_id="s")
            seen += await collect(session.turn())
        for extension in turns:
            await session.extend([extension], SECOND)
        if turns:
            stream = session.turn()
            seen.append(await anext(stream))
            await stream.aclose()


def test_a_session_goes_on_across_restarts_even_in_the_middle_of_a_turn(journal: str) -> None:
    seen: list[Delta] = []
    asyncio.run(one_life(journal, [], seen))
    asyncio.run(one_life(journal, [3, 4], seen))

    async def last_life() -> None:
        async with Engine(MODEL, journal) as engine:
            session = await engine.attach_session("s", seen[-1].index + len(seen[-1].token_ids) - 1)
            if len(joined(seen)) < 11:
                seen.extend(await collect(session.turn()))
            seen.extend(await collect(session.turn()))
            await session.close()

    asyncio.run(last_life())
    first, second = two_turns([1, 2], [3])
    third = must_produce([1, 2, *first[:-1], 3, *second[:-1], 4], SECOND)
    assert joined(seen) == [*first, *second, *third]
    assert durable_outputs(open_reader(journal)).by_id["s"].token_ids == joined(seen)


KILLED = """
import asyncio, json, sys
from refold import Engine, SamplingParams

async def main(journal):
    async with Engine("simulated?vocab=1000&eos=-1&step_ms=2", journal) as engine:
        session = await engine.open_session([1, 2], SamplingParams(seed=7, max_tokens=6), request_id="s")
        async for delta in session.turn():
            print(json.dumps([delta.index, delta.token_ids]), flush=True)
        await session.extend([3], SamplingParams(seed=8, max_tokens=500))
        async for delta in session.turn():
            print(json.dumps([delta.index, delta.token_ids]), flush=True)

asyncio.run(main(sys.argv[1]))
"""


def test_a_session_whose_engine_is_killed_in_a_turn_goes_on_where_its_client_left_off(journal: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, journal], stdout=subprocess.PIPE, text=True, cwd=ROOT, env=dict(os.environ)
    ) as process:
        assert process.stdout is not None
        seen: list[int] = []
        for line in process.stdout:
            index, token_ids = json.loads(line)
            assert index == len(seen)
            seen += token_ids
            if len(seen) > 20:
                process.send_signal(signal.SIGKILL)
                break
        assert process.wait() == -signal.SIGKILL

    async def next_life() -> None:
        async with Engine(MODEL, journal) as engine:
            assert engine.recovery is not None
            assert not engine.recovery.was_closed
            session = await engine.attach_session("s", after=len(seen) - 1)
            deltas = await collect(session.turn())
            assert deltas[-1].finish_reason == "length"
            seen.extend(joined(deltas, len(seen)))
            await session.extend([4], SECOND)
            seen.extend(joined(await collect(session.turn()), len(seen)))
            await session.close()

    asyncio.run(next_life())
    first, long = must_produce([1, 2], FIRST), SamplingParams(seed=8, max_tokens=500)
    second = must_produce([1, 2, *first[:-1], 3], long)
    third = must_produce([1, 2, *first[:-1], 3, *second[:-1], 4], SECOND)
    assert seen == [*first, *second, *third]
    assert len(events_of(journal, SessionTurnEnded)) == 3


def test_on_a_model_two_turns_are_what_one_run_over_their_context_is(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    model = str(tiny_llama.write_folder(tmp_path / "llama", tiny_llama.tensors()))
    greedy = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    prompt, extension = [5, 9, 17, 33, 65], [7, 11, 13]
    options = {"block_size": 4, "num_blocks": 32, "max_in_flight_steps": 2, "enable_prefix_caching": False}

    async def session_s() -> list[list[int]]:
        async with Engine(model, **options) as engine, await engine.open_session(prompt, greedy) as session:
            first = joined(await collect(session.turn()))
            await session.extend(extension)
            return [first, joined(await collect(session.turn()), len(first))]

    first, second = asyncio.run(session_s())
    with Engine(model, **options) as engine:
        assert engine.run([prompt], greedy)[0].token_ids == first
        (whole,) = engine.run([[*prompt, *first[:-1], *extension]], greedy)
    assert whole.token_ids == second
