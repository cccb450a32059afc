"""Clients come from any thread and any event loop, are slow, leave early, or fail; none of them is another one's trouble."""

import asyncio
import gc
import threading
import time
from pathlib import Path

import pytest

from refold import Engine, Rejected, SamplingParams
from refold.engine.engine import Delta, EngineStopped
from refold.journal.events import RequestAborted, RequestFinished
from refold.journal.stores import open_reader
from refold.journal.stores.memory import MemoryStore
from tests.kit.engines import MODEL, becomes, collect, eventually, joined, lawful_events, must_produce
from tests.kit.faulty_store import FaultyStore

SLOW = "simulated?vocab=1000&eos=-1&step_ms=2"
LONG = SamplingParams(seed=2, max_tokens=1000)
SHORT = SamplingParams(seed=3, max_tokens=20)


def finishes(journal: str) -> dict[int, str]:
    return {e.handle: e.reason for e in lawful_events(open_reader(journal)) if isinstance(e, RequestFinished)}


# -- leaving and aborting ---------------------------------------------------------------------------------------------


def test_leaving_the_loop_early_aborts_the_request(tmp_path: Path) -> None:
    journal = str(tmp_path / "journal.db")

    async def scenario() -> None:
        async with Engine(SLOW, journal) as engine:
            async for delta in engine.generate([1], LONG):
                if delta.index + len(delta.token_ids) >= 3:
                    break
            gc.collect()
            await becomes(lambda: not engine.unfinished())

    asyncio.run(scenario())
    assert finishes(journal) == {1: "abort"}


def test_a_cancelled_client_s_request_is_aborted_even_before_it_is_accepted() -> None:
    store = FaultyStore(MemoryStore())

    async def scenario() -> None:
        async with Engine(SLOW, store) as engine:
            running = asyncio.create_task(collect(engine.generate([1], LONG, request_id="running")))
            await becomes(lambda: engine.stats().tokens > 0)
            store.gate.clear()
            hasty = asyncio.create_task(collect(engine.generate([1], LONG, request_id="hasty")))
            await becomes(lambda: engine.stats().requests == 2)
            for task in (running, hasty):
                task.cancel()
            results = await asyncio.gather(running, hasty, return_exceptions=True)
            assert [type(result) for result in results] == [asyncio.CancelledError] * 2
            store.gate.set()
            await becomes(lambda: not engine.unfinished())
            assert engine.stats().finished == {"abort": 2}

    asyncio.run(scenario())


def test_a_request_can_be_aborted_in_every_phase(tmp_path: Path) -> None:
    journal = str(tmp_path / "journal.db")
    options = {"max_num_seqs": 1, "max_num_batched_tokens": 8, "max_in_flight_steps": 3}
    with Engine(SLOW, journal, **options) as engine:
        engine.enqueue([1] * 200, LONG, request_id="prefilling")
        engine.enqueue([1], LONG, request_id="waiting")
        eventually(lambda: engine.stats().steps > 2)
        assert engine.abort("waiting")
        assert engine.abort("prefilling")
        engine.enqueue([1], LONG, request_id="decoding")
        eventually(lambda: engine.stats().tokens > 5)
        assert engine.abort("decoding")
        engine.abort("decoding")
        engine.enqueue([1], SHORT, request_id="finished")
        ids = ["prefilling", "waiting", "decoding", "finished"]
        ends = [done.finish_reason for done in engine.wait(ids)]
        assert not engine.abort("finished")
        assert not engine.abort("never was")
        stats = engine.stats()
        assert ends == ["abort", "abort", "abort", "length"]
        assert engine.run([[1]], SHORT)[0].token_ids == must_produce([1], SHORT)
        assert stats.free_blocks == stats.num_blocks
    events = lawful_events(open_reader(journal))
    assert [e.handle for e in events if isinstance(e, RequestAborted)] == [2, 1, 3]


def test_a_preempted_request_can_be_aborted() -> None:
    options = {"block_size": 4, "num_blocks": 16, "max_in_flight_steps": 3}
    with Engine(SLOW, **options) as engine:
        for name in "abc":
            engine.enqueue([1] * 10, SamplingParams(seed=1, max_tokens=50), request_id=name)
        eventually(lambda: engine.stats().preemptions > 0 and engine.stats().waiting > 0)
        for name in "cb":
            engine.abort(name)
        (done,) = engine.wait(["a"])
        assert done.token_ids == must_produce([1] * 10, SamplingParams(seed=1, max_tokens=50))
        eventually(lambda: engine.stats().free_blocks == 16)


def test_the_stream_of_an_aborted_request_ends_with_that_reason() -> None:
    async def scenario() -> None:
        async with Engine(SLOW) as engine:
            stream = engine.generate([1], LONG, request_id="a")
            deltas = [await anext(stream)]
            engine.abort("a")
            deltas += await collect(stream)
            assert deltas[-1].finish_reason == "abort"
            assert joined(deltas) == must_produce([1], LONG)[: len(joined(deltas))]

    asyncio.run(scenario())


def test_run_aborts_its_requests_when_the_caller_s_callback_fails() -> None:
    def fails(delta: Delta) -> None:
        raise ZeroDivisionError

    with Engine(SLOW) as engine:
        engine.enqueue([1], SHORT, request_id="bystander")
        with pytest.raises(ZeroDivisionError):
            engine.run([[1], [2]], LONG, on_delta=fails)
        assert engine.wait(["bystander"])[0].token_ids == must_produce([1], SHORT)
        eventually(lambda: engine.stats().finished == {"abort": 2, "length": 1})


def test_run_is_all_or_nothing() -> None:
    with Engine(SLOW) as engine:
        engine.enqueue([1], SHORT, request_id="taken")
        with pytest.raises(Rejected, match="request id 'taken' is taken"):
            engine.run([[1], [2], [3]], LONG, request_ids=["x", "taken", "y"])
        engine.wait(["taken"])
        eventually(lambda: engine.stats().finished == {"abort": 2, "length": 1})


def test_wait_and_resume_abort_nothing() -> None:
    def fails(delta: Delta) -> None:
        raise ZeroDivisionError

    async def leave(engine: Engine) -> None:
        stream = engine.resume("a")
        await anext(stream)
        await stream.aclose()

    sampling = SamplingParams(seed=2, max_tokens=60)
    with Engine(SLOW) as engine:
        engine.enqueue([1], sampling, request_id="a")
        with pytest.raises(ZeroDivisionError):
            engine.wait(["a"], on_delta=fails)
        asyncio.run(leave(engine))
        assert engine.wait(["a"])[0].token_ids == must_produce([1], sampling)


# -- many at once -----------------------------------------------------------------------------------------------------


def test_threads_and_event_loops_share_one_engine() -> None:
    done: dict[int, list[int]] = {}

    def with_a_loop(engine: Engine, number: int) -> None:
        async def many() -> None:
            async def one(k: int) -> None:
                sampling = SamplingParams(seed=k, max_tokens=20)
                done[k] = joined(await collect(engine.generate([k], sampling)))

            await asyncio.gather(*(one(number * 100 + k) for k in range(10)))

        asyncio.run(many())

    def without(engine: Engine, number: int) -> None:
        numbers = [number * 100 + k for k in range(10)]
        samplings = [SamplingParams(seed=k, max_tokens=20) for k in numbers]
        for k, completion in zip(numbers, engine.run([[k] for k in numbers], samplings), strict=True):
            done[k] = completion.token_ids

    with Engine(MODEL, block_size=4, num_blocks=40) as engine:
        threads = [threading.Thread(target=f, args=(engine, n)) for n, f in enumerate([with_a_loop, without] * 3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert len(done) == 60
    assert all(tokens == must_produce([k], SamplingParams(seed=k, max_tokens=20)) for k, tokens in done.items())


def test_a_slow_reader_gets_merged_deltas_and_delays_nobody() -> None:
    slow, fast = SamplingParams(seed=1, max_tokens=300), SamplingParams(seed=2, max_tokens=300)

    async def scenario() -> None:
        async with Engine(MODEL) as engine:
            deltas: list[Delta] = []
            quick = asyncio.create_task(collect(engine.generate([2], fast)))
            async for delta in engine.generate([1], slow):
                deltas.append(delta)
                await asyncio.sleep(0.05)
                if len(deltas) == 2:
                    assert joined(await asyncio.wait_for(quick, 10)) == must_produce([2], fast)
            assert joined(deltas) == must_produce([1], slow)
            assert len(deltas) < 20

    asyncio.run(scenario())


def test_many_readers_of_one_request_see_the_same() -> None:
    async def scenario() -> None:
        async with Engine(SLOW) as engine:
            await engine.submit([1], SamplingParams(seed=1, max_tokens=50), request_id="a")
            streams = await asyncio.gather(*(collect(engine.resume("a")) for _ in range(10)))
            expected = must_produce([1], SamplingParams(seed=1, max_tokens=50))
            assert all(joined(deltas) == expected for deltas in streams)

    asyncio.run(scenario())


def test_an_event_loop_that_dies_takes_only_its_own_readers_with_it() -> None:
    with Engine(SLOW) as engine:
        engine.enqueue([1], SamplingParams(seed=1, max_tokens=100), request_id="a")
        loop = asyncio.new_event_loop()
        stream = engine.resume("a")
        loop.run_until_complete(anext(stream))
        loop.close()
        assert engine.wait(["a"])[0].token_ids == must_produce([1], SamplingParams(seed=1, max_tokens=100))


def test_closing_waits_for_no_reader() -> None:
    engine = Engine(SLOW).open()
    engine.enqueue([1], LONG, request_id="a")
    told: list[Exception] = []

    def wait() -> None:
        try:
            engine.wait(["a"])
        except EngineStopped as error:
            told.append(error)

    reader = threading.Thread(target=wait)
    reader.start()
    eventually(lambda: engine.stats().tokens > 0)
    started_s = time.monotonic()
    engine.close()
    assert time.monotonic() - started_s < 5
    reader.join(5)
    assert len(told) == 1
