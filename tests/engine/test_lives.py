"""Close, crash, reopen: what was unfinished goes on, and whoever comes back continues where they were."""

import asyncio
import os
import threading
from pathlib import Path

import pytest

from refold import Engine, JournalOwned, NotFound, Rejected, SamplingParams, WorkerLost
from refold.engine.engine import Delta, EngineStopped
from refold.engine.life import Life
from refold.gpu.batch import Worker
from refold.gpu.simulated import SimulatedWorker
from refold.journal.events import (
    EngineClosed,
    EngineConfig,
    EngineOpened,
    RequestFinished,
    RequestSubmitted,
    StateDigest,
)
from refold.journal.events import WorkerLost as WorkerLostEvent
from refold.journal.stores import open_reader
from refold.journal.stores.memory import MemoryJournal, MemoryStore
from refold.projections.outbox import Outbox
from tests.kit.engines import becomes, collect, eventually, joined, lawful_events, must_produce
from tests.kit.form import interpreted_only

MODEL = "simulated?vocab=1000&eos=-1&step_ms=1"
LONG = SamplingParams(seed=9, max_tokens=400)
SHORT = SamplingParams(seed=3, max_tokens=12)


@pytest.fixture
def journal(tmp_path: Path) -> str:
    return str(tmp_path / "journal.db")


async def see_some(engine: Engine, request_id: str, tokens: int, after: int = -1) -> list[Delta]:
    """Follow a request until `tokens` of its tokens are seen, then leave."""
    seen: list[Delta] = []
    stream = engine.resume(request_id, after)
    async for delta in stream:
        seen.append(delta)
        if sum(len(each.token_ids) for each in seen) >= tokens:
            break
    await stream.aclose()
    return seen


def test_a_request_goes_on_across_restarts_and_its_client_with_it(journal: str) -> None:
    seen: list[Delta] = []

    async def life() -> None:
        async with Engine(MODEL, journal) as engine:
            assert engine.recovery is not None
            if not seen:
                await engine.submit([1, 2], LONG, request_id="a")
            else:
                assert (engine.recovery.requests, engine.recovery.was_closed) == (1, True)
                assert engine.unfinished() == ["a"]
            after = seen[-1].index + len(seen[-1].token_ids) - 1 if seen else -1
            seen.extend(await see_some(engine, "a", 100, after))

    while not (seen and seen[-1].finish_reason):
        asyncio.run(life())
    assert joined(seen) == must_produce([1, 2], LONG)
    assert "".join(delta.text for delta in seen) == "".join(f"{token} " for token in must_produce([1, 2], LONG))
    events = lawful_events(open_reader(journal))
    assert sum(isinstance(event, EngineOpened) for event in events) >= 3
    assert sum(isinstance(event, EngineClosed) for event in events) == sum(isinstance(e, EngineOpened) for e in events)


def test_closing_finishes_the_steps_in_flight_and_records_how_things_stand(journal: str) -> None:
    with Engine(MODEL, journal, max_in_flight_steps=4) as engine:
        engine.enqueue([1], LONG, request_id="a")
        eventually(lambda: engine.stats().tokens > 5)
    events = lawful_events(open_reader(journal))
    assert [type(event) for event in events[-2:]] == [StateDigest, EngineClosed]
    with Engine(MODEL, journal) as engine:
        assert engine.recovery is not None
        assert (engine.recovery.steps_lost, engine.recovery.was_closed) == (0, True)
        assert engine.recovery.tokens > 5
        (done,) = engine.wait()
    assert done.token_ids == must_produce([1], LONG)
    lost = [event for event in lawful_events(open_reader(journal)) if isinstance(event, WorkerLostEvent)]
    assert [event.steps for event in lost] == [[]]


def test_a_client_of_an_engine_that_closes_is_told_so_and_its_request_is_not_aborted(journal: str) -> None:
    async def scenario() -> list[Delta]:
        seen: list[Delta] = []
        engine = await asyncio.to_thread(Engine(MODEL, journal).open)

        async def client() -> None:
            async for delta in engine.generate([1], LONG, request_id="a"):
                seen.append(delta)  # noqa: PERF401 - what was seen before the end must be kept

        task = asyncio.create_task(client())
        await becomes(lambda: seen)
        await engine.aclose()
        with pytest.raises(EngineStopped, match="what was unfinished continues"):
            await task
        return seen

    seen = asyncio.run(scenario())
    with Engine(MODEL, journal) as engine:
        (done,) = engine.wait()
    assert done.finish_reason == "length"
    assert done.token_ids[: len(joined(seen))] == joined(seen)


def test_a_finished_request_can_be_read_again_in_any_later_life(journal: str) -> None:
    with Engine(MODEL, journal) as engine:
        engine.run([[1]], SHORT, request_ids=["a"])

    async def scenario() -> None:
        async with Engine(MODEL, journal) as engine:
            for after in (-1, 0, 5, 10, 11):
                deltas = await collect(engine.resume("a", after))
                assert joined(deltas, after + 1) == must_produce([1], SHORT)[after + 1 :]
                assert deltas[-1].finish_reason == "length"

    asyncio.run(scenario())


@interpreted_only
def test_what_the_outbox_has_forgotten_is_found_in_the_journal(journal: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Outbox.__init__, "__defaults__", (2,))
    with Engine(MODEL, journal) as engine:
        engine.run([[1], [2], [3], [4]], SHORT, request_ids=["a", "b", "c", "d"])
        life = engine._live()
        assert isinstance(life, Life)
        assert sum(life.core.delivery.find(name) is not None for name in "abcd") == 2
        for number, done in enumerate(engine.wait(["a", "b", "c", "d"]), start=1):
            assert done.token_ids == must_produce([number], SHORT)

        async def scenario() -> None:
            assert joined(await collect(engine.resume("a", 3)), 4) == must_produce([1], SHORT)[4:]
            with pytest.raises(NotFound, match="no request 'e' in stream 'main'"):
                await collect(engine.resume("e"))

        asyncio.run(scenario())


def test_an_id_stays_taken_after_a_restart(journal: str) -> None:
    with Engine(MODEL, journal) as engine:
        engine.run([[1]], SHORT, request_ids=["a"])
    with Engine(MODEL, journal) as engine, pytest.raises(Rejected, match="request id 'a' is taken"):
        engine.enqueue([1], request_id="a")


def test_other_options_in_the_next_life_change_nothing_but_the_schedule(journal: str) -> None:
    with Engine(MODEL, journal, block_size=4, num_blocks=120, max_in_flight_steps=4) as engine:
        engine.enqueue([1] * 30, LONG, request_id="a")
        eventually(lambda: engine.stats().tokens > 50)
    with Engine(MODEL, journal, block_size=16, num_blocks=64, max_in_flight_steps=1, policy="priority") as engine:
        (done,) = engine.wait(["a"])
    assert done.token_ids == must_produce([1] * 30, LONG)


def test_a_request_that_the_next_life_cant_hold_ends_for_want_of_capacity(journal: str) -> None:
    with Engine(MODEL, journal) as engine:
        engine.enqueue([1] * 30, LONG, request_id="a")
    with Engine(MODEL, journal, num_blocks=4) as engine:
        (done,) = engine.wait(["a"])
    assert done.finish_reason == "capacity"
    assert "the reopened engine has 4 blocks of 16" in done.message


def test_unfinished_requests_keep_their_model(journal: str) -> None:
    with Engine(MODEL, journal) as engine:
        engine.enqueue([1], LONG, request_id="a")
    with pytest.raises(Rejected, match="1 unfinished requests of model"), Engine("simulated?vocab=999&eos=-1", journal):
        pass
    with Engine(MODEL, journal) as engine:
        assert engine.wait()[0].token_ids == must_produce([1], LONG)
    with Engine("simulated?vocab=999&eos=-1", journal) as engine:
        assert engine.run([[1]], SHORT)[0].finish_reason == "length"


def test_streams_of_one_journal_are_engines_of_their_own() -> None:
    journal = MemoryJournal()
    with (
        Engine(MODEL, MemoryStore(journal), stream="a") as first,
        Engine(MODEL, MemoryStore(journal), stream="b") as second,
    ):
        assert first.run([[1]], SHORT, request_ids=["x"])[0].token_ids == must_produce([1], SHORT)
        assert second.run([[2]], SHORT, request_ids=["x"])[0].token_ids == must_produce([2], SHORT)
    lawful_events(MemoryStore(journal), "a")
    lawful_events(MemoryStore(journal), "b")


def test_an_engine_opens_once_and_closes_as_often_as_one_likes() -> None:
    engine = Engine(MODEL)
    with pytest.raises(EngineStopped, match="the engine is not open"):
        engine.enqueue([1])
    engine.open()
    with pytest.raises(Rejected, match="opens once"):
        engine.open()
    engine.close()
    engine.close()
    with pytest.raises(EngineStopped, match="the engine is closed"):
        engine.run([[1]])
    with pytest.raises(Rejected, match="opens once"):
        engine.open()


def test_an_engine_that_was_closed_before_it_was_opened_stays_closed_and_says_so() -> None:
    engine = Engine(MODEL)
    engine.close()
    with pytest.raises(Rejected, match="closed before it was opened, and stays closed: make a new one"):
        engine.open()
    for use in (lambda: engine.enqueue([1]), engine.await_worker, engine.stats):
        with pytest.raises(EngineStopped, match="closed before it was opened"):
            use()


def test_a_cancelled_opening_leaves_nothing_open(journal: str) -> None:
    async def scenario() -> None:
        async def opened() -> None:
            async with Engine(MODEL, journal):
                await asyncio.sleep(60)

        task = asyncio.create_task(opened())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())

    def reopens() -> bool:
        try:
            Engine(MODEL, journal).open().close()
        except JournalOwned:
            return False
        return True

    eventually(reopens)


def test_an_exception_in_the_body_closes_the_engine_and_comes_out(journal: str) -> None:
    def body(engine: Engine) -> None:
        engine.enqueue([1], LONG, request_id="a")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), Engine(MODEL, journal) as engine:
        body(engine)
    events = lawful_events(open_reader(journal))
    assert isinstance(events[-1], EngineClosed)
    assert not any(isinstance(event, RequestFinished) for event in events)


def test_a_journal_is_named_by_a_url_a_path_or_a_store(tmp_path: Path) -> None:
    for number, journal in enumerate([f"sqlite:///{tmp_path / 'a.db'}", tmp_path / "a.db", str(tmp_path / "a.db")]):
        with Engine(MODEL, journal) as engine:
            assert engine.stats().requests == number
            engine.run([[1]], SHORT)
    with pytest.raises(Rejected, match="journal is 7: give sqlite:///FILE, a path, memory: or a store"):
        Engine(MODEL, 7)  # type: ignore[arg-type]


class SlowToLoad:
    """Makes a worker when it is let, or finds that the model is unfit."""

    def __init__(self, unfit: Exception | None = None) -> None:
        self.may_load = threading.Event()
        self.unfit = unfit

    def __call__(self, config: EngineConfig) -> Worker:
        self.may_load.wait()
        if self.unfit is not None:
            raise self.unfit
        return SimulatedWorker(config)


def test_requests_are_journaled_while_the_worker_still_loads(journal: str) -> None:
    loading = SlowToLoad()
    engine = Engine(MODEL, journal, make_worker=loading).open(await_worker=False)
    engine.enqueue([1], SHORT, request_id="early")
    assert "early" in [e.request_id for e in lawful_events(open_reader(journal)) if isinstance(e, RequestSubmitted)]
    loading.may_load.set()
    engine.await_worker()
    assert engine.wait(["early"])[0].token_ids == must_produce([1], SHORT)
    engine.close()


@pytest.mark.parametrize(
    ("unfit", "ends"), [(Rejected("the weights are torn"), {"error": 1}), (WorkerLost("no device"), {})]
)
def test_a_worker_that_never_comes_refuses_newcomers_only_if_the_model_is_unfit(
    journal: str, unfit: Exception, ends: dict[str, int]
) -> None:
    with Engine(MODEL, journal) as engine:
        engine.enqueue([1], LONG, request_id="older")
    loading = SlowToLoad(unfit)
    with Engine(MODEL, journal, make_worker=loading).open(await_worker=False) as engine:
        engine.enqueue([1], SHORT, request_id="newcomer")
        loading.may_load.set()
        with pytest.raises(type(unfit), match=str(unfit)):
            engine.await_worker()
    finished = [e for e in lawful_events(open_reader(journal)) if isinstance(e, RequestFinished)]
    assert {e.reason: 1 for e in finished} == ends
    (*_, closed) = lawful_events(open_reader(journal))
    assert isinstance(closed, EngineClosed)
    assert closed.reason == str(unfit)
    assert all(e.message == "the weights are torn" for e in finished)
    with Engine(MODEL, journal) as engine:
        assert engine.unfinished() == (["older"] if ends else ["older", "newcomer"])


def test_an_engine_that_did_not_wait_can_be_closed_while_the_worker_loads(journal: str) -> None:
    loading = SlowToLoad()
    with Engine(MODEL, journal, make_worker=loading).open(await_worker=False) as engine:
        engine.enqueue([1], SHORT, request_id="early")
        threading.Timer(0.05, loading.may_load.set).start()
    with pytest.raises(EngineStopped):
        Engine(MODEL, journal).await_worker()
    with Engine(MODEL, journal) as engine:
        assert engine.recovery is not None
        assert engine.recovery.was_closed
        assert engine.wait()[0].token_ids == must_produce([1], SHORT)


def test_a_fork_of_the_process_is_told_that_the_engine_is_not_its_own_and_harms_nothing(tmp_path):
    with Engine("simulated", str(tmp_path / "x.db"), worker="thread") as engine:
        child = os.fork()
        if not child:
            status = 1
            try:
                engine.enqueue("from the fork")
            except EngineStopped as error:
                status = (
                    0
                    if f"lives in process {os.getppid()}, of which process {os.getpid()} is a fork" in str(error)
                    else 2
                )
            finally:
                engine.close()
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        (done,) = engine.run(["from the parent"], SamplingParams(max_tokens=3))
        assert len(done.token_ids) == 3
