"""Sessions through the engine: turn after turn, left and found again, across closes and kills."""

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
from refold.engine.engine import Delta, Session
from refold.engine.idleness import IdleLimit
from refold.gpu.simulated import SimulatedWorker
from refold.journal.events import (
    Event,
    RequestPreempted,
    SessionClosed,
    SessionTurnEnded,
)
from refold.journal.stores import open_reader
from tests.kit import tiny_llama
from tests.kit.drive import Drive
from tests.kit.engines import MODEL, becomes, collect, durable_outputs, joined, lawful_events, must_produce
from tests.kit.features import complete_at
from tests.project.tree import ROOT

SLOW = "simulated?vocab=1000&eos=-1&step_ms=1"


@pytest.fixture
def journal(tmp_path: Path) -> str:
    return str(tmp_path / "journal.db")


def events_of(journal: str, kind: type[Event]) -> list[Any]:
    """A lawful journal's events of one kind."""
    return [event for event in lawful_events(open_reader(journal)) if isinstance(event, kind)]


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
            with pytest.raises(Rejected, match="has ended"):
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


def test_only_the_sessions_whose_time_is_over_are_closed_and_no_sooner() -> None:
    drive = Drive()
    drive.open()
    limit = IdleLimit(1e-7, 0)
    assert limit.seconds_left(drive.state, 0) is None
    for name, time_ns in (("early", 10), ("late", 20)):
        drive.submit(name, 3, max_tokens=1, resumable=True)
        drive.schedule()
        complete_at(drive, time_ns)
    assert limit.seconds_left(drive.state, 50) == 50e-9
    assert limit.overdue(drive.state, 100) is None
    assert limit.seconds_left(drive.state, 100) == 10e-9
    for now_ns, name in ((110, "early"), (120, "late")):
        assert limit.overdue(drive.state, now_ns - 1) is None
        command = limit.overdue(drive.state, now_ns)
        assert command is not None
        drive.do(command)
        assert drive.state.requests.find_live(name) is None
    assert limit.overdue(drive.state, 1000) is None
    assert limit.seconds_left(drive.state, 1000) is None


def test_whoever_extends_a_session_that_is_over_is_told_what_a_program_can_do() -> None:
    async def scenario() -> None:
        async with Engine(SLOW) as engine:
            ended = await engine.open_session([1], SamplingParams(max_tokens=1), request_id="ended")
            await collect(ended.turn())
            await ended.close()
            with pytest.raises(Rejected, match=r"session 'ended' has ended: .*: open another with open_session"):
                await ended.extend([2])
            closed = await engine.open_session([1], SamplingParams(max_tokens=3000), request_id="closed")
            await closed.close()
            with pytest.raises(Rejected, match=r"session 'closed' is closed, .*: open another with open_session"):
                await closed.extend([2])
            engine.abort("closed")

    asyncio.run(scenario())


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
            assert engine.unfinished(sessions=True) == ["used"]
            with pytest.raises(Rejected, match="has ended"):
                await left.extend()
            await collect(used.turn())
            await becomes(lambda: engine.unfinished(sessions=True) == [])

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
    pytest.importorskip("torch")
    model = str(tiny_llama.write_folder(tmp_path / "llama", tiny_llama.tensors()))
    greedy = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    prompt, extension = [5, 9, 17, 33, 65], [7, 11, 13]
    options = {"block_size": 4, "num_blocks": 32, "max_in_flight_steps": 2, "enable_prefix_caching": False}
    options |= {"worker": "thread", "threads": 1}  # to start a process takes longer than all of this

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
