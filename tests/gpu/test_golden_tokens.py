"""The packaged model, greedy, in float32: token for token what Hugging Face transformers makes of the same file.

See tests/golden/make_golden_tokens.py. The worker is driven directly, with orders that no scheduler would give.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from refold.gpu.batch import Worker
from refold.gpu.factory import create_worker
from refold.gpu.weights import describe_model
from refold.journal.events import EngineConfig, Sampling
from tests.kit.worker_driver import Request, WorkerDriver

pytest.importorskip("torch", reason="torch is not installed")

CASES = json.loads((Path(__file__).parent.parent / "golden" / "smollm2_greedy.json").read_text("utf-8"))["cases"]
NUM_TOKENS = 48
GREEDY = Sampling(seed=0, max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def config() -> EngineConfig:
    model = describe_model("smollm2")
    return EngineConfig(
        model="smollm2",
        model_fingerprint=model.fingerprint,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        max_model_len=1024,
        block_size=16,
        num_blocks=320,
        max_num_seqs=32,
        max_num_batched_tokens=256,
    )


@pytest.fixture(scope="module")
def worker(config: EngineConfig) -> Iterator[Worker]:
    # One thread: under other load, two that wait for each other after every operator take many times as long.
    worker = create_worker(config, threads=1)
    yield worker
    worker.close()


@pytest.fixture
def drive(worker: Worker, config: EngineConfig) -> WorkerDriver:
    return WorkerDriver(worker, config, seed=11)


def requests(drive: WorkerDriver, cases: list[dict]) -> list[Request]:
    return [drive.add(case["prompt_token_ids"], GREEDY) for case in cases]


def test_the_golden_file_is_what_the_tests_say_it_is() -> None:
    assert len(CASES) == 20
    assert {len(case["output_token_ids"]) for case in CASES} == {NUM_TOKENS}
    lengths = [len(case["prompt_token_ids"]) for case in CASES]
    assert (min(lengths), max(lengths)) == (5, 505)


# A token alone costs a whole step, so by default a few prompts run alone; set REFOLD_EXHAUSTIVE for all of them.
ALONE = range(len(CASES)) if os.environ.get("REFOLD_EXHAUSTIVE") else (0, 5, 8)


@pytest.mark.parametrize("number", ALONE)
def test_a_prompt_alone(drive: WorkerDriver, number: int) -> None:
    case = CASES[number]
    assert drive.run_alone(drive.add(case["prompt_token_ids"], GREEDY)) == case["output_token_ids"]


def test_all_prompts_in_random_batches_chunks_and_recomputations(drive: WorkerDriver) -> None:
    found = requests(drive, CASES)
    assert drive.run_random(budget=256, drop_rate=0.015) >= 5
    for request, case in zip(found, CASES, strict=True):
        assert request.outputs == case["output_token_ids"], case["prompt"]


def test_prompts_with_long_common_beginnings_share_their_blocks(drive: WorkerDriver) -> None:
    cases = [case for case in CASES if case["prompt"].startswith(("You are the night clerk", "The lighthouse keeper"))]
    found = requests(drive, cases)
    writers: list[Request] = []
    for request in found:
        twin = next((each for each in writers if each.prompt[:32] == request.prompt[:32]), None)
        if twin is None:
            writers.append(request)
            drive.reserve(request)
            continue
        common = next((i for i, (a, b) in enumerate(zip(twin.prompt, request.prompt, strict=False)) if a != b), 10**9)
        common = min(common, len(twin.prompt), len(request.prompt) - 1)
        drive.share(request, twin, common // drive.config.block_size)
    shared = [request for request in found if request not in writers]
    assert len(writers) == 2
    assert len(shared) == 6
    assert sum(request.computed for request in shared) > 500
    # Writers and readers of the same blocks are in one step.
    drive.step([(request, len(request.tokens) - request.computed) for request in found])
    for _ in range(23):
        drive.step([(request, 1) for request in found])
    for request, case in zip(found, cases, strict=True):
        assert request.outputs == case["output_token_ids"][:24], case["prompt"]
