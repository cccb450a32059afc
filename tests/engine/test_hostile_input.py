"""Whatever a caller gives: one clear line that names the value and the remedy, nothing in the journal, nobody else touched."""

import asyncio
import math
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import Any

import pytest

from refold import Engine, NotFound, Rejected, SamplingParams
from refold.engine.config import EngineArgs, EngineOptions
from refold.journal.events import RequestSubmitted
from refold.journal.stores import open_reader
from tests.kit.engines import MODEL, collect, joined, lawful_events, must_produce

HUGE = 10**5000


class Unspeakable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


BAD_SAMPLING: list[tuple[dict[str, Any], str]] = [
    ({"temperature": math.nan}, "temperature is nan: give 0 (greedy) to 1000000"),
    ({"temperature": math.inf}, "temperature is inf"),
    ({"temperature": -0.1}, "temperature is -0.1"),
    ({"temperature": "1"}, "temperature is '1'"),
    ({"temperature": True}, "temperature is True"),
    ({"temperature": None}, "temperature is None"),
    ({"top_p": 0.0}, "top_p is 0.0: give more than 0, at most 1"),
    ({"top_p": 1.5}, "top_p is 1.5"),
    ({"top_p": math.nan}, "top_p is nan"),
    ({"top_k": -1}, "top_k is -1"),
    ({"top_k": 2.5}, "top_k is 2.5"),
    ({"max_tokens": 0}, "max_tokens is 0: give 1 to 2147483647"),
    ({"max_tokens": 1e9}, "max_tokens is 1000000000.0: give an integer, 1 to 2147483647"),
    ({"top_p": "0.5"}, "top_p is '0.5': give a number, more than 0, at most 1"),
    ({"max_tokens": -5}, "max_tokens is -5"),
    ({"max_tokens": HUGE}, "max_tokens is a number of 16610 bits"),
    ({"max_tokens": 1e3}, "max_tokens is 1000.0"),
    ({"max_tokens": True}, "max_tokens is True"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens is 9, more than max_tokens 8: lower it"),
    ({"seed": -1}, "seed is -1: give 0 to 2^63 - 1, or None"),
    ({"seed": 2**63}, "seed is 9223372036854775808"),
    ({"seed": HUGE}, "seed is a number of 16610 bits"),
    ({"stop_token_ids": "abc"}, "stop_token_ids is 'abc': give up to 256 token ids"),
    ({"stop_token_ids": [1.5]}, "stop_token_ids[0] is 1.5"),
    ({"stop_token_ids": [True]}, "stop_token_ids[0] is True"),
    ({"stop_token_ids": list(range(257))}, "stop_token_ids is [0, 1, 2"),
    ({"stop_token_ids": {HUGE: 1}}, "stop_token_ids is a dict"),
    ({"min_p": math.nan}, "min_p is nan: give 0 (no limit) to 1"),
    ({"min_p": -0.1}, "min_p is -0.1"),
    ({"repetition_penalty": 0}, "repetition_penalty is 0: give 0.01 to 100; 1 is none"),
    ({"repetition_penalty": math.inf}, "repetition_penalty is inf"),
    ({"repetition_penalty": 5e-324}, "repetition_penalty is 5e-324"),
    ({"presence_penalty": math.nan}, "presence_penalty is nan: give -2 to 2"),
    ({"presence_penalty": -2.5}, "presence_penalty is -2.5"),
    ({"frequency_penalty": math.inf}, "frequency_penalty is inf"),
    ({"frequency_penalty": HUGE}, "frequency_penalty is a number of 16610 bits"),
    ({"logit_bias": {5: math.nan}}, "logit_bias[5] is nan"),
    ({"logit_bias": {5: 1.0, "5": 2.0}}, "logit_bias is {5: 1.0, '5': 2.0}: give each token one bias"),
    (
        {"logit_bias": {5: 100.5}},
        "logit_bias[5] is 100.5: give a dict from up to 1024 token ids to -100 to 100, or None",
    ),
    ({"logit_bias": {"x": 1.0}}, "logit_bias is 'x'"),
    ({"logit_bias": {"1" * 5000: 1.0}}, "logit_bias is '11111"),
    ({"logit_bias": {1.5: 1.0}}, "logit_bias is 1.5"),
    ({"logit_bias": {True: 1.0}}, "logit_bias is True"),
    ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "logit_bias is {0: 1.0"),
    ({"logit_bias": [(1, 1.0)]}, "logit_bias is [(1, 1.0)]"),
    ({"logprobs": 21}, "logprobs is 21: give 0 to 20, or None"),
    ({"logprobs": True}, "logprobs is True"),
    ({"logprobs": -1}, "logprobs is -1"),
    ({"prompt_logprobs": HUGE}, "prompt_logprobs is a number of 16610 bits"),
    ({"n": 0}, "n is 0: give 1 to 64"),
    ({"n": 65}, "n is 65"),
    ({"n": 2.0}, "n is 2.0"),
    ({"stop_token_ids": Unspeakable()}, "stop_token_ids is <Unspeakable instance at"),
    ({"ignore_eos": "yes"}, "ignore_eos is 'yes': give True or False"),
    ({"best_of": 2}, "'best_of' is no option: SamplingParams has temperature, top_k"),
]


@pytest.mark.parametrize(
    ("values", "line"), BAD_SAMPLING, ids=lambda v: "-".join(v)[:40] if isinstance(v, dict) else ""
)
def test_a_sampling_parameter_that_cant_be_is_rejected_in_one_line(values: dict[str, Any], line: str) -> None:
    with pytest.raises(Rejected) as caught:
        SamplingParams(**values)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_sampling_parameters_are_frozen_equal_by_value_and_take_lists() -> None:
    params = SamplingParams(stop_token_ids=[1, 2], temperature=1)  # type: ignore[arg-type]
    assert params == SamplingParams(stop_token_ids=(1, 2))
    assert hash(params) == hash(SamplingParams(stop_token_ids=(1, 2)))
    with pytest.raises(ValueError, match="frozen"):
        params.top_k = 3  # type: ignore[misc]


BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"block_size": 0}, "block_size is 0: give 1 to 1024"),
    ({"num_blocks": -1}, "num_blocks is -1"),
    ({"num_blocks": HUGE}, "num_blocks is a number of"),
    ({"max_in_flight_steps": 9}, "max_in_flight_steps is 9: give 1 to 8"),
    ({"durability": "maybe"}, "durability is 'maybe': give 'synced' or 'buffered'"),
    ({"policy": "lottery"}, "policy is 'lottery': give 'fcfs', 'priority' or 'fair_share'"),
    ({"tenant_weights": {"a": 2}}, "tenant_weights is given with policy 'fcfs'"),
    (
        {"policy": "fair_share", "tenant_weights": {"a": 0}},
        "tenant_weights['a'] is 0: give a dict from tenant to a weight",
    ),
    ({"policy": "fair_share", "tenant_weights": {"a\n": 1}}, "tenant_weights names 'a\\n'"),
    ({"policy": "fair_share", "tenant_weights": [("a", 1)]}, "tenant_weights is [('a', 1)]"),
    ({"decode_stagger": 0}, "decode_stagger is 0: give 1 to 8"),
    ({"speculation": "oracle"}, "speculation is 'oracle': give 'off', 'ngram' or 'worker'"),
    ({"dtype": "int4"}, "dtype is 'int4': give 'float32', 'bfloat16' or 'int8'"),
    ({"num_speculative_tokens": 9}, "num_speculative_tokens is 9: give 1 to 8"),
    ({"speculation_by_batch": ((4, 9),)}, "speculation_by_batch[0][1] is 9: give pairs"),
    ({"speculation_by_batch": ((4, 2), (4, 1))}, "speculation_by_batch has batch sizes [4, 4]"),
    ({"speculation_by_batch": ((8, 1), (4, 1))}, "ascending order"),
    ({"session_idle_s": 0}, "session_idle_s is 0: give more than 0"),
    ({"session_idle_s": float("nan")}, "session_idle_s is nan"),
    ({"stream": ""}, "stream is ''"),
    ({"stream": "a\0b"}, "stream is 'a\\x00b': give 1 to 200 printable characters"),
    ({"windows": 2}, "'windows' is no option"),
    ({"max_model_len": 5000}, "max_model_len is 5000: model 'simulated?vocab=1000&eos=-1' takes 4096 at most"),
    ({"num_blocks": 4, "watermark_blocks": 4}, "watermark_blocks is 4: give less than num_blocks, which is 4"),
]


@pytest.mark.parametrize(
    ("options", "line"), BAD_OPTIONS, ids=lambda v: "-".join(v)[:40] if isinstance(v, dict) else ""
)
def test_an_engine_option_that_cant_be_is_rejected_in_one_line(options: dict[str, Any], line: str) -> None:
    with pytest.raises(Rejected) as caught, Engine(MODEL, **options):
        pass
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("model", "line"),
    [
        ("no-such-model", "unknown model 'no-such-model'"),
        ("", "model is ''"),
        ("simulated?step_ms=-1", "step_ms is '-1'; give 0 to 60000"),
        ("simulated?vocab=1e9", "vocab is '1e9'"),
        ("simulated?colour=red", "'colour' is no option"),
        ("simulated?vocab=8&eos=8", "eos is 8; give less than vocab"),
        ("\ud800", "model is '\\ud800': give a model's name, file or folder"),
    ],
)
def test_a_model_that_cant_be_is_rejected_in_one_line(model: str, line: str) -> None:
    with pytest.raises(Rejected) as caught, Engine(model):
        pass
    assert line in str(caught.value)


def test_the_type_checker_s_options_are_the_engine_s_options() -> None:
    assert set(EngineOptions.__annotations__) == set(EngineArgs.model_fields) - {"model", "journal"}


BAD_PROMPTS: list[tuple[Any, str]] = [
    ("", "the prompt is empty"),
    ([], "the prompt is empty"),
    ("a\ud800b", "the prompt has U+D800 at index 1, which is no text: remove it"),
    ("a\0b", "the prompt has U+0000 at index 1"),
    ([1, 1000], "prompt token 1000 at index 1: give token ids from 0 to 999"),
    ([-1], "prompt token -1 at index 0"),
    ([True], "prompt token True at index 0"),
    ([1.0], "prompt token 1.0 at index 0"),
    ([None], "prompt token None at index 0"),
    ([HUGE], "prompt token a number of 16610 bits at index 0"),
    (["a"], "prompt token 'a' at index 0"),
    ([1] * 4096, "the prompt has 4096 tokens, the model takes 4096"),
    ("x" * 5000, "the prompt has 5000 tokens"),
    ("x" * 2_000_000, "the prompt has 2000000 characters"),
    (None, "the prompt is a NoneType: give text, a list of token ids or a list of messages"),
    (b"bytes", "the prompt is a bytes"),
    (7, "the prompt is a int"),
    ([{"role": "user"}], "content of message 0 is a NoneType: give a string"),
    ([{"role": "user", "content": "a\0"}], "content of message 0 has U+0000"),
    ([{"role": "user", "content": "x"}, 3], "message 1 is a int: give a dict with role and content"),
]

BAD_ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"request_id": ""}, "request_id is ''"),
    ({"request_id": "a\nb"}, "request_id is 'a\\nb': give 1 to 256 printable characters"),
    ({"request_id": "a\0"}, "request_id has U+0000"),
    ({"request_id": "\udfff"}, "request_id has U+DFFF"),
    ({"request_id": "x" * 257}, "request_id has 257 characters: give at most 256"),
    ({"request_id": 7}, "request_id is a int: give a string"),
    ({"cache_salt": "\ud800"}, "cache_salt has U+D800"),
    ({"cache_salt": "\0"}, "cache_salt has U+0000"),
    ({"cache_salt": "x" * 257}, "cache_salt has 257 characters"),
    ({"cache_salt": None}, "cache_salt is a NoneType"),
    ({"tenant": 7}, "tenant is a int"),
    ({"tenant": "a\tb"}, "tenant is 'a\\tb'"),
    ({"tenant": "x" * 257}, "tenant has 257 characters"),
    ({"priority": HUGE}, "priority is a number of 16610 bits"),
    ({"priority": 1.5}, "priority is 1.5: give a 64-bit integer"),
    ({"priority": True}, "priority is True"),
    ({"sampling": {"max_tokens": 3}}, "sampling is a dict: give SamplingParams(...) or None"),
    ({"sampling": SamplingParams(stop_token_ids=(1000,))}, "stop_token_ids has 1000: give token ids of the model"),
]


@pytest.fixture
def watched(tmp_path: Path) -> Any:
    """An engine with one long request running; afterwards: it is unharmed, and nothing else reached the journal."""
    journal = str(tmp_path / "journal.db")
    sampling = SamplingParams(seed=1, max_tokens=200)
    with Engine("simulated?vocab=1000&eos=-1&step_ms=1", journal) as engine:
        engine.enqueue([1, 2], sampling, request_id="bystander")
        yield engine
        (bystander,) = engine.wait(["bystander"])
        assert bystander.token_ids == must_produce([1, 2], sampling)
    submitted = [e for e in lawful_events(open_reader(journal)) if isinstance(e, RequestSubmitted)]
    assert [event.request_id for event in submitted] == ["bystander"]


def rejected_line(call: Callable[[], Any]) -> str:
    with pytest.raises(Rejected) as caught:
        call()
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300
    return str(caught.value)


class Level(IntEnum):
    """What a host may number its tenants' priorities, and the tokens of its model, with."""

    URGENT = -5
    BOS = 1
    FAR = 999_999


def test_an_int_enum_is_the_integer_that_it_is(tmp_path: Path) -> None:
    journal = str(tmp_path / "journal.db")
    with Engine("simulated?vocab=1000", journal) as engine:
        sampling = SamplingParams(max_tokens=Level.BOS, seed=Level.BOS)
        engine.enqueue([Level.BOS, 2], sampling, request_id="a", priority=Level.URGENT)
        engine.wait(["a"])
        assert "prompt token <Level.FAR: 999999> at index 0" in rejected_line(lambda: engine.enqueue([Level.FAR]))
    (submitted,) = [e for e in lawful_events(open_reader(journal)) if isinstance(e, RequestSubmitted)]
    assert (submitted.priority, submitted.prompt_token_ids) == (-5, [1, 2])
    assert {type(each) for each in (submitted.priority, *submitted.prompt_token_ids)} == {int}


def test_a_stream_is_resumed_after_an_int_enum(tmp_path: Path) -> None:
    async def tokens() -> list[list[int]]:
        async with Engine(MODEL, str(tmp_path / "journal.db")) as engine:
            await engine.submit([1, 2], SamplingParams(max_tokens=4, seed=1, ignore_eos=True), request_id="a")
            whole = joined(await collect(engine.resume("a")))
            return [whole, joined(await collect(engine.resume("a", after=Level.BOS)), first=2)]

    whole, rest = asyncio.run(tokens())
    assert rest == whole[2:]
    assert rest


def test_a_prompt_that_cant_be_is_rejected_and_leaves_no_trace(watched: Engine) -> None:
    for prompt, line in BAD_PROMPTS:
        assert line in rejected_line(lambda prompt=prompt: watched.enqueue(prompt)), line


def test_an_argument_that_cant_be_is_rejected_and_leaves_no_trace(watched: Engine) -> None:
    for arguments, line in BAD_ARGUMENTS:
        assert line in rejected_line(lambda arguments=arguments: watched.enqueue([1], **arguments)), line


def test_every_way_in_rejects_alike(watched: Engine) -> None:
    async def scenario() -> None:
        with pytest.raises(Rejected, match="U\\+0000"):
            await watched.submit("a\0")
        with pytest.raises(Rejected, match="U\\+0000"):
            await collect(watched.generate("a\0"))
        with pytest.raises(Rejected, match="after is -2"):
            await collect(watched.resume("bystander", -2))
        with pytest.raises(Rejected, match="after is True"):
            await collect(watched.resume("bystander", True))
        with pytest.raises(NotFound, match="no request 'nobody'"):
            await collect(watched.resume("nobody"))
        with pytest.raises(Rejected, match="request_id is a int"):
            await collect(watched.resume(7))  # type: ignore[arg-type]

    asyncio.run(scenario())
    with pytest.raises(Rejected, match="U\\+0000"):
        watched.run([[1], "a\0"])
    with pytest.raises(Rejected, match="sampling has 1 values for 2 prompts"):
        watched.run([[1], [2]], [None])
    with pytest.raises(NotFound, match="no request 'nobody'"):
        watched.wait(["nobody"])
    with pytest.raises(Rejected, match="request_id is a NoneType"):
        watched.abort(None)  # type: ignore[arg-type]
    with pytest.raises(Rejected, match="reset_running is 1"):
        watched.reset_prefix_cache(1)  # type: ignore[arg-type]
    with pytest.raises(Rejected, match="can't be reset while 1 requests run"):
        watched.reset_prefix_cache()
    assert not watched.abort("nobody")


def test_nobody_can_resume_beyond_the_end_of_what_there_is() -> None:
    sampling = SamplingParams(seed=1, max_tokens=4)

    async def scenario() -> None:
        async with Engine("simulated?vocab=1000&eos=-1&step_ms=5") as engine:
            await collect(engine.generate([1], sampling, request_id="done"))
            assert joined(await collect(engine.resume("done", 1)), first=2) == must_produce([1], sampling)[2:]
            (last,) = await collect(engine.resume("done", 3))
            assert (last.index, last.token_ids, last.finish_reason) == (4, [], "length")
            for after in (4, 5, 2**31 - 1):
                with pytest.raises(
                    Rejected, match=f"after is {after}, and request 'done' has 4 outputs: give 3 at most"
                ):
                    await collect(engine.resume("done", after))
            session = await engine.open_session([1], SamplingParams(seed=1, max_tokens=400), request_id="talk")
            with pytest.raises(Rejected, match="after is 399, and request 'talk' has"):
                await engine.attach_session("talk", 399)
            engine.abort(session.request_id)

    asyncio.run(scenario())


def test_tokens_that_a_buffered_engine_lost_come_again_to_whoever_had_them() -> None:
    sampling = SamplingParams(seed=1, max_tokens=40)

    async def scenario() -> None:
        async with Engine("simulated?vocab=1000&eos=-1&step_ms=5", durability="buffered") as engine:
            await engine.submit([1], sampling, request_id="mine")
            assert joined(await collect(engine.resume("mine", 29)), first=30) == must_produce([1], sampling)[30:]

    asyncio.run(scenario())


def test_a_submission_can_be_checked_before_there_is_an_engine(tmp_path: Path) -> None:
    engine = Engine("simulated?vocab=1000&eos=-1&len=64", tmp_path / "journal.db", block_size=4, num_blocks=4)
    engine.check([1, 2, 3], SamplingParams(max_tokens=4))
    for arguments, line in BAD_ARGUMENTS:
        assert line in rejected_line(lambda arguments=arguments: engine.check([1], **arguments)), line
    with pytest.raises(Rejected, match="can need 5 blocks of 4, the pool has 4"):
        engine.check([1], SamplingParams(max_tokens=20))
    assert not (tmp_path / "journal.db").exists()
    with engine:
        engine.check([1], SamplingParams(max_tokens=4))
        assert engine.stats().requests == 0
    assert Engine("simulated").tokenizer is not None


def test_a_text_in_the_place_of_a_list_of_prompts_is_refused() -> None:
    with (
        Engine(MODEL) as engine,
        pytest.raises(Rejected, match=r"prompts is the text 'hello': give a list .* \['hello'\]"),
    ):
        engine.run("hello")
    with Engine(MODEL) as engine:
        assert engine.stats().requests == 0


def test_an_engine_says_whether_a_name_is_known(tmp_path: Path) -> None:
    with Engine(MODEL, tmp_path / "x.db") as engine:
        assert not engine.knows("a")
        engine.run(
            [[1], [2]], [SamplingParams(max_tokens=1), SamplingParams(max_tokens=1, n=2)], request_ids=["a", "b"]
        )
        assert [engine.knows(name) for name in ("a", "b", "b#1", "c")] == [True, True, True, False]
    with Engine(MODEL, tmp_path / "x.db") as engine:
        assert engine.knows("a")


def test_an_id_that_is_taken_is_rejected_and_its_owner_is_not_aborted() -> None:
    sampling = SamplingParams(seed=1, max_tokens=40)

    async def scenario() -> None:
        async with Engine("simulated?vocab=1000&eos=-1&step_ms=1") as engine:
            stream = engine.generate([1], sampling, request_id="mine")
            deltas = [await anext(stream)]
            with pytest.raises(Rejected, match="request id 'mine' is taken"):
                await collect(engine.generate([2], request_id="mine"))
            hasty = asyncio.create_task(collect(engine.generate([2], request_id="mine")))
            await asyncio.sleep(0)
            hasty.cancel()
            deltas += await collect(stream)
        assert joined(deltas) == must_produce([1], sampling)
        assert deltas[-1].finish_reason == "length"

    asyncio.run(scenario())


def test_a_request_that_can_never_fit_is_rejected_with_the_numbers() -> None:
    with Engine(MODEL, block_size=4, num_blocks=4) as engine:
        line = rejected_line(lambda: engine.enqueue([1] * 10, SamplingParams(max_tokens=10)))
        assert "can need 5 blocks of 4, the pool has 4; lower max_tokens or enlarge the pool" in line
        (fits,) = engine.run([[1] * 10], SamplingParams(seed=1, max_tokens=7))
        assert len(fits.token_ids) == 7


def test_a_prompt_that_its_caller_changes_afterwards_stays_what_it_was() -> None:
    prompt = [1, 2, 3]
    with Engine("simulated?vocab=1000&eos=-1&step_ms=1", max_num_batched_tokens=1) as engine:
        request_id = engine.enqueue(prompt, SamplingParams(seed=1, max_tokens=5))
        prompt[:] = [10**9] * 5
        (done,) = engine.wait([request_id])
    assert done.token_ids == must_produce([1, 2, 3], SamplingParams(seed=1, max_tokens=5))


@pytest.mark.parametrize("name", ["check", "submit", "enqueue", "open_session"])
@pytest.mark.parametrize("option", ["bogus", "is_patient", "resumable"])
def test_an_option_that_no_request_has_is_told_by_the_method_that_was_called(name: str, option: str) -> None:
    async def scenario() -> None:
        async with Engine(MODEL) as engine:
            called = getattr(engine, name)([1], **{option: True})
            await called

    known = "prompt, sampling, request_id, priority, cache_salt, tenant"
    with pytest.raises(TypeError) as caught:
        asyncio.run(scenario())
    assert str(caught.value) == f"Engine.{name}() got an unexpected keyword argument '{option}': it takes {known}"


def test_a_subclass_of_text_is_the_text():
    """The journal's encoder takes plain strings only; numpy's are a subclass."""

    class Name(str):
        __slots__ = ()

    with Engine("simulated") as engine:
        taken = [engine.enqueue("x", request_id=Name("a")), engine.enqueue("y", tenant=Name("t"), cache_salt=Name("s"))]
        assert taken[0] == "a"
        assert [done.finish_reason for done in engine.wait()] == ["length", "length"]
