"""What clients get beside tokens: log-probabilities, of the prompt too, and several completions of one prompt."""

import asyncio
import json
import os
import re
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from refold import Completion, Engine, NotFound, Rejected, SamplingParams
from refold.engine.history.verify import verify_journal
from refold.gpu.noise import child_seed
from refold.journal.codec import decode
from refold.journal.events import LogprobsDelivered, PromptLogprobsDelivered, RequestPreempted, RequestSubmitted
from refold.journal.record import Head, Record
from refold.journal.stores import open_reader
from refold.journal.stores.memory import MemoryStore
from tests.kit import tiny_llama
from tests.kit.engines import eventually, older_rules_for_ids

MODEL = "simulated"


def events_of(journal: Path) -> list:
    with closing(open_reader(str(journal))) as reader:
        assert verify_journal(reader)
        return [event for record in reader.read() for event in decode(record)]


# -- log-probabilities ------------------------------------------------------------------------------------------------


def test_each_token_has_its_log_probability_in_deltas_and_completions(tmp_path: Path) -> None:
    deltas = []
    with Engine(MODEL, str(tmp_path / "j.db"), seed=1) as engine:
        params = [SamplingParams(max_tokens=12, logprobs=2, prompt_logprobs=1), SamplingParams(max_tokens=12)]
        asked, silent = engine.run([[1, 2, 3]] * 2, params, request_ids=["a", "b"], on_delta=deltas.append)
        (again,) = engine.wait(["a"])
    assert asked.logprobs is not None
    assert [each.token_id for each in asked.logprobs] == asked.token_ids
    assert all(each.logprob <= 0 and each.rank >= 1 and len(each.top) == 2 for each in asked.logprobs)
    assert asked.prompt_logprobs is not None
    assert [each and each.token_id for each in asked.prompt_logprobs] == [None, 2, 3]
    assert silent.logprobs is None
    assert silent.prompt_logprobs is None
    assert again == asked
    of_a = [delta for delta in deltas if delta.request_id == "a"]
    assert [each for delta in of_a for each in delta.logprobs or ()] == asked.logprobs
    assert of_a[0].prompt_logprobs == asked.prompt_logprobs
    assert all(delta.prompt_logprobs is None for delta in of_a[1:])


def test_they_are_there_when_the_engine_comes_back(tmp_path: Path) -> None:
    journal = str(tmp_path / "j.db")
    params = SamplingParams(max_tokens=9, logprobs=1, prompt_logprobs=0)
    with Engine(MODEL, journal, seed=1) as engine:
        (before,) = engine.run([[4, 5, 6]], params, request_ids=["a"])
    with Engine(MODEL, journal) as engine:
        assert engine.wait(["a"]) == [before]

        async def resumed() -> list:
            return [each async for delta in engine.resume("a", after=3) for each in delta.logprobs or ()]

        assert asyncio.run(resumed()) == (before.logprobs or [])[4:]


def test_a_redaction_erases_them(tmp_path: Path) -> None:
    journal = tmp_path / "j.db"
    params = SamplingParams(max_tokens=6, logprobs=3, prompt_logprobs=2)
    with Engine(MODEL, str(journal), seed=1) as engine:
        engine.run([[1, 2, 3], [1, 2, 4]], params, request_ids=["gone", "stays"])
        engine.redact("gone")
        with pytest.raises(Rejected, match="was redacted"):
            engine.wait(["gone"])
        (stays,) = engine.wait(["stays"])
        assert len(stays.logprobs or ()) == 6
    told = [event for event in events_of(journal) if isinstance(event, LogprobsDelivered)]
    for event in told:
        assert event.handles == [1, 2]
        assert event.surprisals[:8] == [-1] * 8, "1 is redacted"
        assert min(event.surprisals[8:]) >= 0
    of_prompts = {e.handle: e.surprisals for e in events_of(journal) if isinstance(e, PromptLogprobsDelivered)}
    assert of_prompts[1] == []
    assert len(of_prompts[2]) == 2 * 6


# -- on a model with weights ------------------------------------------------------------------------------------------

PROMPTS = [[7, 8, 9] * 5, list(range(40, 71)), [*range(40, 71), 3, 3], [5]]
ROOMY = {"num_blocks": 256, "block_size": 4, "worker": "thread", "threads": 1}
SCHEDULES = {
    "chunks": ROOMY | {"max_num_batched_tokens": 7},
    "pressure": ROOMY | {"num_blocks": 20, "max_num_batched_tokens": 24, "max_in_flight_steps": 3},
    "alone": ROOMY | {"max_num_seqs": 1},
    "drafts": ROOMY | {"speculation": "worker", "num_speculative_tokens": 4},
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    pytest.importorskip("torch", reason="torch is not installed")
    return str(tiny_llama.write_folder(tmp_path_factory.mktemp("tiny"), tiny_llama.tensors(seed=3)))


def answers(model: str, journal: Path, **options: object) -> list[Completion]:
    common = {"max_tokens": 24, "ignore_eos": True, "logprobs": 3, "prompt_logprobs": 2}
    kinds: list[dict] = [
        {"temperature": 0},
        {"seed": 1},
        {"seed": 2, "frequency_penalty": 0.5},
        {"repetition_penalty": 1.2, "seed": 3},
    ]
    params = [SamplingParams(**common, **kind) for kind in kinds]
    with Engine(model, str(journal), **options) as engine:  # type: ignore[arg-type]
        names = [f"r{n}" for n in range(len(PROMPTS))]
        return engine.run(PROMPTS, params, request_ids=names)


@pytest.fixture(scope="module")
def undisturbed(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> list[Completion]:
    return answers(tiny, tmp_path_factory.mktemp("roomy") / "j.db", **ROOMY)


def test_they_are_what_the_models_own_logits_say(undisturbed: list[Completion]) -> None:
    for prompt, completion in zip(PROMPTS, undisturbed, strict=True):
        tokens = [*prompt, *completion.token_ids]
        told = [*(completion.prompt_logprobs or ())[1:], *(completion.logprobs or ())]
        logits = tiny_llama.plain_logits(tiny_llama.tensors(seed=3), tokens).astype(np.float64)
        shares = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        assert len(told) == len(tokens) - 1
        for position, each in enumerate(told, start=1):
            row = shares[position - 1]
            assert each is not None
            assert each.token_id == tokens[position]
            assert each.logprob == pytest.approx(row[tokens[position]], abs=1e-4)
            assert each.top[0][1] == pytest.approx(row.max(), abs=1e-4)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_schedule_changes_a_number(schedule: str, tiny: str, tmp_path: Path, undisturbed: list[Completion]) -> None:
    assert answers(tiny, tmp_path / "j.db", **SCHEDULES[schedule]) == undisturbed
    if schedule == "pressure":
        assert RequestPreempted in {type(event) for event in events_of(tmp_path / "j.db")}


# -- several completions of one prompt --------------------------------------------------------------------------------


def test_each_prompt_has_as_many_completions_as_it_asked_for(tmp_path: Path) -> None:
    with Engine(MODEL, str(tmp_path / "j.db"), seed=1) as engine:
        params = [SamplingParams(n=3, seed=5, max_tokens=6), SamplingParams(seed=5, max_tokens=6)]
        three, one = engine.run([[1, 2, 3]] * 2, params, request_ids=["three", "one"])
        assert engine.choices("three") == ["three#0", "three#1", "three#2"]
        assert engine.choices("one") == ["one"]
        assert engine.wait(["three", "one"]) == [three, one]
        with pytest.raises(NotFound):
            engine.choices("none")
    assert one.choices == ()
    assert [each.request_id for each in three.choices] == ["three#0", "three#1", "three#2"]
    assert three.token_ids == three.choices[0].token_ids
    assert len({tuple(each.token_ids) for each in (*three.choices, one)}) == 4
    seeds = [event.sampling.seed for event in events_of(tmp_path / "j.db") if isinstance(event, RequestSubmitted)]
    assert seeds == [child_seed(5, 0), child_seed(5, 1), child_seed(5, 2), 5]


def test_their_deltas_come_in_one_stream(tmp_path: Path) -> None:
    with Engine(MODEL, str(tmp_path / "j.db"), seed=1) as engine:

        async def stream() -> dict[int, list[int]]:
            tokens: dict[int, list[int]] = {0: [], 1: []}
            ends = []
            async for delta in engine.generate([1, 2], SamplingParams(n=2, seed=3, max_tokens=7), request_id="a"):
                assert delta.request_id == f"a#{delta.choice}"
                assert delta.index == len(tokens[delta.choice])
                tokens[delta.choice] += delta.token_ids
                ends += [delta.choice] if delta.finish_reason else []
            assert sorted(ends) == [0, 1]
            return tokens

        got = asyncio.run(stream())
        assert got == {n: each.token_ids for n, each in enumerate(engine.wait(["a"])[0].choices)}


def test_to_abort_it_is_to_abort_all_and_so_is_to_leave_the_stream(tmp_path: Path) -> None:
    long = SamplingParams(n=3, max_tokens=4000, ignore_eos=True)
    with Engine(MODEL, str(tmp_path / "j.db"), seed=1) as engine:
        engine.enqueue([1, 2], long, request_id="a")
        assert engine.abort("a")
        assert [each.finish_reason for each in engine.wait(["a"])[0].choices] == ["abort"] * 3
        assert not engine.abort("a")

        async def look_once() -> None:
            stream = engine.generate([1, 2], long, request_id="b")
            await anext(stream)
            await stream.aclose()

        asyncio.run(look_once())
        assert [each.finish_reason for each in engine.wait(["b"])[0].choices] == ["abort"] * 3


def test_they_outlive_their_engine_together(tmp_path: Path) -> None:
    journal = str(tmp_path / "j.db")
    with Engine(MODEL, journal, seed=1) as engine:
        engine.enqueue([1, 2], SamplingParams(n=2, seed=4, max_tokens=400, ignore_eos=True), request_id="a")
    with Engine(MODEL, journal) as engine:
        (completion,) = engine.wait(["a"])
    assert [len(each.token_ids) for each in completion.choices] == [400, 400]


def test_if_one_name_is_taken_none_is_submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine(MODEL, str(tmp_path / "j.db"), seed=1) as engine:
        with older_rules_for_ids(monkeypatch):
            engine.run([[1]], SamplingParams(max_tokens=1), request_ids=["a#1"])
        with pytest.raises(
            Rejected, match="'a' is taken: the journal has 'a#1'; resume it, or submit under another id"
        ):
            engine.enqueue([1], SamplingParams(n=3, max_tokens=4000, ignore_eos=True), request_id="a")
    assert submitted_in(tmp_path / "j.db") == ["a#1"]


def submitted_in(journal: Path) -> list[str]:
    return [event.request_id for event in events_of(journal) if isinstance(event, RequestSubmitted)]


def test_a_name_and_the_names_of_its_completions_exclude_each_other(tmp_path: Path) -> None:
    one, two, three = (SamplingParams(n=n, max_tokens=2) for n in (1, 2, 3))
    with Engine(MODEL, str(tmp_path / "j.db"), seed=1) as engine:
        engine.run([[1], [1]], [one, two], request_ids=["one", "two"])
        for name, params, taken in (("one", two, "one"), ("two", three, "two#0"), ("two", one, "two#0")):
            message = f"'{name}' is taken: the journal has '{taken}'"
            with pytest.raises(Rejected, match=message):
                engine.enqueue([1], params, request_id=name)
            with pytest.raises(Rejected, match=message):
                asyncio.run(engine.submit([1], params, request_id=name))
            with pytest.raises(Rejected, match=message):
                engine.run([[1]], params, request_ids=[name])
        with pytest.raises(Rejected, match="'two' is taken: the journal has 'two#0'"):
            asyncio.run(engine.open_session([1], one, request_id="two"))
    assert submitted_in(tmp_path / "j.db") == ["one", "two#0", "two#1"]


def test_of_two_threads_that_want_one_name_one_gets_it_whole(tmp_path: Path) -> None:
    with Engine(MODEL, str(tmp_path / "j.db"), seed=1) as engine:
        for number in range(10):
            refused: list[Rejected] = []
            start = threading.Barrier(2)

            def want(n: int, name: str = f"r{number}", start=start, refused=refused) -> None:
                start.wait()
                try:
                    engine.enqueue([1], SamplingParams(n=n, max_tokens=1), request_id=name)
                except Rejected as error:
                    refused.append(error)

            threads = [threading.Thread(target=want, args=(n,)) for n in (5, 6)]
            for each in threads:
                each.start()
            for each in threads:
                each.join()
            assert len(refused) == 1
            assert len(engine.choices(f"r{number}")) in {5, 6}
            assert {each.finish_reason for each in engine.wait([f"r{number}"])[0].choices} == {"length"}
        names = [f"r{number}#{choice}" for number in range(10) for choice in range(len(engine.choices(f"r{number}")))]
    assert sorted(submitted_in(tmp_path / "j.db")) == sorted(names)


@pytest.mark.parametrize(
    "attempt",
    [
        lambda engine, name: engine.check([1], request_id=name),
        lambda engine, name: engine.enqueue([1], request_id=name),
        lambda engine, name: engine.run([[1]], request_ids=[name]),
        lambda engine, name: asyncio.run(engine.submit([1], request_id=name)),
        lambda engine, name: asyncio.run(anext(engine.generate([1], request_id=name))),
        lambda engine, name: asyncio.run(engine.open_session([1], request_id=name)),
    ],
)
def test_a_name_that_looks_like_a_completions_is_refused(attempt, tmp_path: Path) -> None:
    with Engine(MODEL, str(tmp_path / "j.db")) as engine:
        for name in ("a#0", "#12", "a#b#007"):
            message = f"request_id is '{name}': # and a number at the end tell the completions of one request apart"
            with pytest.raises(Rejected, match=message):
                attempt(engine, name)
        engine.run([[1]] * 4, SamplingParams(max_tokens=1), request_ids=["a#", "#1a", "a0", "a#\u0663"])
    assert len(submitted_in(tmp_path / "j.db")) == 4


def test_where_a_journal_has_both_from_before_each_name_means_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, long = ["a", "a#0", "a#1"], SamplingParams(max_tokens=4000, ignore_eos=True)
    with older_rules_for_ids(monkeypatch), Engine(MODEL, str(tmp_path / "j.db"), seed=1) as engine:
        for name in names:
            engine.enqueue([1], long, request_id=name)
    with Engine(MODEL, str(tmp_path / "j.db")) as engine:
        assert engine.unfinished() == names
        assert engine.choices("a") == ["a"]
        assert engine.abort("a")
        assert [(each.request_id, each.finish_reason) for each in engine.wait(["a"])] == [("a", "abort")]
        assert engine.unfinished() == names[1:]
        assert engine.abort("a#0")
        assert engine.abort("a#1")
        assert [each.request_id for each in engine.wait(names)] == names


def test_where_one_is_all_that_can_be_had_more_are_refused(tmp_path: Path) -> None:
    with Engine(MODEL, str(tmp_path / "j.db"), seed=1) as engine:
        with pytest.raises(Rejected, match="n is 2: one completion"):
            asyncio.run(engine.open_session([1], SamplingParams(n=2)))
        with pytest.raises(Rejected, match="give at most 253"):
            engine.enqueue([1], SamplingParams(n=2), request_id="a" * 255)


def test_json_that_names_tokens_by_text_is_understood() -> None:
    params = SamplingParams(**json.loads('{"logit_bias": {"5": 1.5, "17": -2}}'))
    assert params.resolve(0, 100).logit_bias == ((5, 1.5), (17, -2.0))


class SlowStore(MemoryStore):
    """A store of one's own on a slow disk."""

    def append(self, stream: str, records: Sequence[Record]) -> Head:
        time.sleep(0.5)
        return super().append(stream, records)


def test_ctrl_c_while_completions_are_submitted_aborts_none_of_them() -> None:
    store = SlowStore()
    with Engine("simulated?eos=-1&step_ms=20", store) as engine:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            engine.enqueue([1, 2, 3], SamplingParams(max_tokens=80, n=3), request_id="one")
        eventually(lambda: any(b"one#2" in record.body for record in store.read()))
        [completion] = engine.wait(["one"])
        assert [choice.finish_reason for choice in completion.choices] == ["length"] * 3


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (
            lambda engine: engine.run([[1], [2]], request_ids="pq"),
            "request_ids is the text 'pq': give one for each prompt",
        ),
        (lambda engine: engine.run([[1], [2]], request_ids=["a", "a"]), "request id 'a' is given twice"),
        (lambda engine: engine.run([[1]], request_ids=["b"], on_delta=5), "on_delta is 5: give something to call"),
        (lambda engine: engine.run(5), "prompts is 5: give a list of prompts"),
        (lambda engine: engine.run(None), "prompts is None: give a list of prompts"),
        (lambda engine: engine.wait("abc"), "request_ids is the text 'abc': give a list"),
        (lambda engine: engine.wait(5), "request_ids is 5: give a list"),
    ],
)
def test_what_can_be_seen_to_be_wrong_is_refused_before_anything_is_submitted(attempt, message) -> None:
    store = MemoryStore()
    with Engine("simulated?eos=-1", store) as engine:
        with pytest.raises(Rejected, match=re.escape(message)):
            attempt(engine)
        assert not any(map(engine.knows, ["a", "b", "pq", "p"]))


@pytest.mark.parametrize("given", [5, "", [], float("nan")])
def test_what_makes_no_worker_is_refused_before_anything_is_opened(given) -> None:
    with pytest.raises(Rejected, match=r"make_worker is .*: give something that makes a worker"):
        Engine("simulated", make_worker=given)
