"""The engine generates what its requests must produce, whatever the window, the pool and the company."""

import asyncio
import random
from pathlib import Path

import pytest

from refold import Engine, Rejected, SamplingParams
from refold.journal.events import (
    EngineClosed,
    EngineOpened,
    RequestPreempted,
    RequestSubmitted,
    StateDigest,
    WorkerStarted,
)
from refold.journal.stores import open_reader
from tests.kit.engines import MODEL, collect, durable_outputs, joined, lawful_events, must_produce

SMALL_POOL = {"block_size": 4, "num_blocks": 20, "max_num_seqs": 8, "max_num_batched_tokens": 32}


def some_requests(count: int, seed: int) -> tuple[list[list[int]], list[SamplingParams]]:
    rng = random.Random(seed)
    prompts = [[rng.randrange(1000) for _ in range(rng.randint(1, 30))] for _ in range(count)]
    return prompts, [SamplingParams(seed=rng.getrandbits(60), max_tokens=rng.randint(1, 40)) for _ in prompts]


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_tokens_are_a_function_of_seed_and_position_at_every_depth(depth: int) -> None:
    prompts, samplings = some_requests(30, seed=depth)
    with Engine(MODEL, max_in_flight_steps=depth, **SMALL_POOL) as engine:
        completions = engine.run(prompts, samplings)
        assert engine.stats().preemptions > 0, "the pool is small enough to preempt"
    for prompt, sampling, completion in zip(prompts, samplings, completions, strict=True):
        assert completion.token_ids == must_produce(prompt, sampling)
        assert completion.finish_reason == "length"
        assert completion.num_prompt_tokens == len(prompt)


def test_the_journal_of_a_run_is_lawful_and_says_what_clients_saw(tmp_path: Path) -> None:
    journal = str(tmp_path / "journal.db")
    prompts, samplings = some_requests(20, seed=7)
    with Engine(MODEL, journal, max_in_flight_steps=3, **SMALL_POOL) as engine:
        completions = engine.run(prompts, samplings)
    reader = open_reader(journal)
    events, outbox = lawful_events(reader), durable_outputs(reader)
    kinds = [type(event) for event in events]
    assert kinds[:2] == [EngineOpened, WorkerStarted]
    assert kinds[-2:] == [StateDigest, EngineClosed]
    assert RequestPreempted in kinds
    assert [outbox.by_id[c.request_id].token_ids for c in completions] == [c.token_ids for c in completions]


def test_a_stream_brings_indices_without_gap_and_ends_with_a_reason() -> None:
    sampling = SamplingParams(seed=3, max_tokens=25)

    async def scenario() -> None:
        async with Engine(MODEL) as engine:
            deltas = await collect(engine.generate([1, 2, 3], sampling, request_id="a"))
        assert joined(deltas) == must_produce([1, 2, 3], sampling)
        assert [delta.finish_reason for delta in deltas if delta.finish_reason] == ["length"]
        assert deltas[-1].finish_reason == "length"
        assert {delta.request_id for delta in deltas} == {"a"}

    asyncio.run(scenario())


def test_a_stop_token_ends_a_request_and_is_in_its_tokens_but_not_in_its_text() -> None:
    free = must_produce([5], SamplingParams(seed=11, max_tokens=20))
    stop = free[9]
    with Engine(MODEL) as engine:
        (done,) = engine.run([[5]], SamplingParams(seed=11, max_tokens=20, stop_token_ids=(stop,)))
    assert done.finish_reason == "stop"
    assert done.token_ids == free[: free.index(stop) + 1]
    assert done.text == "".join(f"{token} " for token in done.token_ids[:-1])


def test_the_model_s_end_of_sequence_stops_unless_it_is_ignored() -> None:
    model = "simulated?vocab=10&eos=4"
    sampling = SamplingParams(seed=1, max_tokens=200)
    with Engine(model) as engine:
        (ended,) = engine.run([[1]], sampling)
        (went_on,) = engine.run([[1]], SamplingParams(seed=1, max_tokens=200, ignore_eos=True))
    assert ended.token_ids == must_produce([1], sampling, model)
    assert ended.token_ids[-1] == 4
    assert ended.finish_reason == "stop"
    assert (len(went_on.token_ids), went_on.finish_reason) == (200, "length")


SMALL_MODEL = "simulated?vocab=1000&eos=-1&len=32"


def test_generation_ends_with_the_model_s_length_where_nobody_said_how_much() -> None:
    with Engine(SMALL_MODEL) as engine:
        (done,) = engine.run([[1] * 20], SamplingParams(seed=1))
    assert (len(done.token_ids), done.finish_reason) == (12, "length")


def test_more_tokens_than_the_model_has_room_for_are_refused_with_how_many_there_can_be() -> None:
    told = "max_tokens is 13, and the model takes 32 tokens, 20 of them prompt: give at most 12"
    with Engine(SMALL_MODEL) as engine:
        too_many = SamplingParams(max_tokens=13)
        asking = (engine.check, engine.enqueue, lambda *asked: engine.run([asked[0]], asked[1]))
        for ask in asking:
            with pytest.raises(Rejected, match=told):
                ask([1] * 20, too_many)
        with pytest.raises(Rejected, match=r"max_tokens is 1000000000, .* give at most 31"):
            engine.check([1], SamplingParams(max_tokens=10**9, n=2))
        (done,) = engine.run([[1] * 20], SamplingParams(max_tokens=12))
        assert len(done.token_ids) == 12
        assert engine.unfinished() == []


def test_a_session_s_turn_is_refused_what_can_never_fit() -> None:
    async def scenario() -> None:
        async with Engine(SMALL_MODEL) as engine:
            with pytest.raises(Rejected, match="give at most 12"):
                await engine.open_session([1] * 20, SamplingParams(max_tokens=13))
            async with await engine.open_session([1] * 4, SamplingParams(max_tokens=4)) as session:
                async for _ in session.turn():
                    pass
                with pytest.raises(Rejected, match=r"max_tokens is 32, .* 1 of them prompt: give at most 31"):
                    await session.extend([1], SamplingParams(max_tokens=32))

    asyncio.run(scenario())


def test_one_root_seed_and_one_order_of_submission_give_the_same_tokens() -> None:
    def tokens(seed: int) -> list[list[int]]:
        with Engine(MODEL, seed=seed) as engine:
            return [done.token_ids for done in engine.run([[1], [1], [1]], SamplingParams(max_tokens=10))]

    first = tokens(7)
    assert tokens(7) == first
    assert tokens(8) != first
    assert len({tuple(each) for each in first}) == 3, "each request has a seed of its own"


def test_the_seed_that_was_drawn_is_in_the_journal(tmp_path: Path) -> None:
    journal = str(tmp_path / "journal.db")
    with Engine(MODEL, journal) as engine:
        (done,) = engine.run([[1, 2]], SamplingParams(max_tokens=10))
    (submitted,) = [e for e in lawful_events(open_reader(journal)) if isinstance(e, RequestSubmitted)]
    assert done.token_ids == must_produce([1, 2], SamplingParams(seed=submitted.sampling.seed, max_tokens=10))


def test_text_and_conversations_are_prompts_too() -> None:
    with Engine("simulated?eos=-1") as engine:
        text, chat = engine.run(["hé", [{"role": "user", "content": "hi"}]], SamplingParams(seed=1, max_tokens=3))
    assert text.num_prompt_tokens == len("hé".encode())
    assert chat.num_prompt_tokens == len("user: hi\n")
    assert text.text == "".join(f"{token} " for token in text.token_ids)


def test_run_tells_every_delta_as_it_comes() -> None:
    prompts, samplings = some_requests(5, seed=1)
    deltas: dict[str, list] = {}
    with Engine(MODEL) as engine:
        ids = [f"r{i}" for i in range(5)]
        completions = engine.run(
            prompts, samplings, request_ids=ids, on_delta=lambda d: deltas.setdefault(d.request_id, []).append(d)
        )
    for request_id, completion in zip(ids, completions, strict=True):
        assert joined(deltas[request_id]) == completion.token_ids


def test_run_works_inside_a_running_event_loop() -> None:
    async def scenario() -> None:
        async with Engine(MODEL) as engine:
            (done,) = engine.run([[1]], SamplingParams(seed=1, max_tokens=5))
            assert len(done.token_ids) == 5

    asyncio.run(scenario())


def test_under_the_policy_priority_small_numbers_go_first() -> None:
    async def scenario() -> list[str]:
        ends: list[str] = []
        options = {"policy": "priority", "max_num_seqs": 1, "max_in_flight_steps": 1}
        async with Engine("simulated?vocab=100&eos=-1&step_ms=2", **options) as engine:

            async def one(name: str, priority: int) -> None:
                await collect(engine.generate([1], SamplingParams(max_tokens=10), request_id=name, priority=priority))
                ends.append(name)

            first = asyncio.create_task(one("first", 0))
            await asyncio.sleep(0.01)
            await asyncio.gather(first, one("late", 5), one("urgent", -5))
        return ends

    ends = asyncio.run(scenario())
    assert ends.index("urgent") < ends.index("late")


def test_the_prefix_cache_can_be_reset_and_nothing_changes_but_the_work(tmp_path: Path) -> None:
    journal = str(tmp_path / "journal.db")
    prompt, sampling = list(range(64)), SamplingParams(seed=5, max_tokens=8)
    with Engine(MODEL, journal) as engine:
        before = engine.run([prompt], sampling)[0].token_ids
        again = engine.run([prompt], sampling)[0].token_ids
        engine.reset_prefix_cache()
        after = engine.run([prompt], sampling)[0].token_ids
    assert before == again == after == must_produce(prompt, sampling)
    lawful_events(open_reader(journal))


def test_resetting_the_cache_under_running_requests_computes_them_again() -> None:
    sampling = SamplingParams(seed=5, max_tokens=60)

    async def scenario() -> None:
        async with Engine("simulated?vocab=1000&eos=-1&step_ms=2") as engine:
            stream = engine.generate([1, 2, 3], sampling)
            deltas = [await anext(stream)]
            engine.reset_prefix_cache(reset_running=True)
            deltas += await collect(stream)
            assert joined(deltas) == must_produce([1, 2, 3], sampling)
            assert engine.stats().preemptions == 1

    asyncio.run(scenario())


def test_stats_add_up() -> None:
    prompts, samplings = some_requests(10, seed=3)
    with Engine(MODEL, **SMALL_POOL) as engine:
        completions = engine.run(prompts, samplings)
        stats = engine.stats()
    assert stats.tokens == sum(len(done.token_ids) for done in completions)
    assert (stats.requests, stats.finished) == (10, {"length": 10})
    assert (stats.running, stats.waiting, stats.in_flight_steps) == (0, 0, 0)
    assert (stats.free_blocks, stats.num_blocks) == (20, 20)
