"""A row's bits do not depend on who else is in the step, how its prompt was cut, or whether it is computed again.

Tokens would hide a difference in the last bit for a long time, so logits and cache contents are compared bit by bit.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from refold.gpu.attention import Span, attend, plan_attention, smallest_invariant_query_rows  # noqa: E402
from refold.gpu.batch import StepOutput  # noqa: E402
from refold.gpu.kv_cache import KvCache  # noqa: E402
from refold.gpu.linear import Linear, choose_linear, smallest_invariant_rows  # noqa: E402
from refold.gpu.model_runner import Entry, ModelRunner  # noqa: E402
from refold.gpu.models.llama import gated  # noqa: E402
from refold.gpu.native import SWITCH  # noqa: E402
from refold.gpu.spec import ModelSpec  # noqa: E402
from refold.gpu.weights import describe_model  # noqa: E402
from refold.gpu.worker import TorchWorker  # noqa: E402
from refold.gpu.workspace import Workspace  # noqa: E402
from refold.journal.events import EngineConfig, Sampling  # noqa: E402
from tests.kit import tiny_llama  # noqa: E402
from tests.kit.worker_driver import Request, WorkerDriver  # noqa: E402


@pytest.fixture
def as_many_threads_afterwards() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request: pytest.FixtureRequest, as_many_threads_afterwards: None) -> int:
    torch.set_num_threads(request.param)
    return request.param


class RecordingRunner:
    """Passes steps on and keeps the last logits."""

    def __init__(self, inner: ModelRunner) -> None:
        self.inner = inner
        self.logits = torch.empty(0)

    def run(self, entries: list[Entry]) -> torch.Tensor:
        self.logits = self.inner.run(entries)
        return self.logits


class LogitsDriver(WorkerDriver):
    """Keeps every logits row by (first token of the prompt, position). A row seen twice must be the same row."""

    def __init__(self, worker: TorchWorker, config: EngineConfig, *, seed: int = 0) -> None:
        super().__init__(worker, config, seed=seed)
        if not isinstance(worker._runner, RecordingRunner):
            worker._runner = RecordingRunner(worker._runner)  # type: ignore[assignment, arg-type]
        self.runner = worker._runner
        self.rows: dict[tuple[int, int], torch.Tensor] = {}
        self.final_cache: dict[int, torch.Tensor] = {}

    def step(self, entries: list[tuple[Request, int]]) -> StepOutput:  # type: ignore[override]
        output = super().step(entries)
        sampled = [
            (request, position)
            for (request, _), position in zip(entries, output.positions, strict=True)
            if position >= 0
        ]
        for (request, position), row in zip(sampled, self.runner.logits, strict=True):
            self.rows[request.prompt[0], position] = row.clone()
            if not request.wanted:
                self.final_cache[request.prompt[0]] = self.cache_of(request)
        return output

    def cache_of(self, request: Request) -> torch.Tensor:
        """Keys and values of all computed positions: (layers, 2 * heads, positions, head_dim)."""
        size = self.config.block_size
        slots = torch.tensor([request.blocks[at // size] * size + at % size for at in range(request.computed)])
        return self.runner.inner.cache.read(slots)


def config_for(model: str, **changes: object) -> EngineConfig:
    found = describe_model(model)
    fields: dict[str, object] = {
        "model": model,
        "model_fingerprint": found.fingerprint,
        "vocab_size": found.vocab_size,
        "eos_token_ids": found.eos_token_ids,
        "max_model_len": 1024,
        "block_size": 16,
        "num_blocks": 400,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 256,
    }
    return EngineConfig(**(fields | changes))  # type: ignore[arg-type]


def prompts(lengths: list[int], vocab_size: int) -> list[list[int]]:
    return [
        [n + 5, *((n * 977 + i * i * 13) % vocab_size for i in range(1, length))] for n, length in enumerate(lengths)
    ]


def check_same_bits(
    workers: list[TorchWorker], config: EngineConfig, lengths: list[int], tokens: int, seeds: list[int]
) -> int:
    """Each request alone on the first worker, then all in random company on the last. Returns how many logits rows were compared."""
    sampling = Sampling(seed=3, max_tokens=tokens, temperature=0.8, ignore_eos=True)
    alone = LogitsDriver(workers[0], config)
    for prompt in prompts(lengths, config.vocab_size):
        alone.run_alone(alone.add(prompt, sampling))
    compared = 0
    for seed in seeds:
        together = LogitsDriver(workers[-1], config, seed=seed)
        found = [together.add(prompt, sampling) for prompt in prompts(lengths, config.vocab_size)]
        assert together.run_random(budget=96, drop_rate=0.1) > 0
        assert together.rows.keys() == alone.rows.keys()
        for key, row in together.rows.items():
            assert torch.equal(row, alone.rows[key]), f"seed {seed}: request {key[0]} position {key[1]}"
        for request, other in zip(found, alone.requests.values(), strict=True):
            assert request.outputs == other.outputs
            assert torch.equal(together.final_cache[request.prompt[0]], alone.final_cache[other.prompt[0]])
        compared += len(together.rows)
    return compared


@pytest.mark.parametrize("step", ["native", "torch"])
def test_a_tiny_model_gives_the_same_bits_in_any_company(
    threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    monkeypatch.setenv(SWITCH, step)
    home = str(tiny_llama.write_folder(tmp_path, tiny_llama.tensors()))
    config = config_for(home)
    worker = TorchWorker(config, describe_model(home), threads=threads)
    assert worker.environment()["batch_invariant"] == "yes"
    assert worker.environment()["threads"] == str(threads)
    lengths = [1, 2, 5, 31, 33, 64, 100, 127, 128, 129, 200, 255, 257, 400]
    tokens, seeds = 20 // threads, [1, 2, 3][threads - 1 :]  # two threads wait for each other where others compute
    assert check_same_bits([worker], config, lengths, tokens=tokens, seeds=seeds) == 14 * tokens * len(seeds)


@pytest.mark.usefixtures("as_many_threads_afterwards")
def test_the_real_model_gives_the_same_bits_in_any_company() -> None:
    """Alone with one thread, in company with two."""
    config = config_for("smollm2")
    workers = [TorchWorker(config, describe_model("smollm2"), threads=threads) for threads in (1, 2)]
    assert [worker.environment()["batch_invariant"] for worker in workers] == ["yes", "yes"]
    assert [worker.environment()["threads"] for worker in workers] == ["1", "2"]
    assert check_same_bits(workers, config, [1, 7, 40, 124, 150], tokens=6, seeds=[5]) == 5 * 6


@pytest.mark.parametrize("shape", [(96, 64), (576, 1536), (960, 576)])
def test_linear_rows_have_the_same_bits_at_any_number_of_rows(threads: int, shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(threads)
    linear = Linear(torch.randn(*shape, generator=generator), choose_linear(torch.float32))
    least = smallest_invariant_rows(linear, shape[1], torch.float32)
    assert least is not None
    rows = torch.randn(200, shape[1], generator=generator)
    full = linear(rows)
    for count in range(least, 200, 1 if threads == 1 else 7):
        assert torch.equal(linear(rows[:count]), full[:count]), count
        assert torch.equal(linear(rows[200 - count :]), full[200 - count :]), count


@pytest.mark.parametrize("threads", [1, 2, 3, 4, 5, 7, 16])
def test_operations_by_element_and_by_row_have_the_same_bits_however_threads_divide_them(threads: int) -> None:
    generator = torch.Generator().manual_seed(9)
    rows = torch.randn(260, 3072, generator=generator) * 3
    operations = {
        "gated": gated,
        "softmax": lambda each: each[:, :128].softmax(-1),
        "norm": lambda each: torch.nn.functional.rms_norm(each[:, :576], (576,)),
        "exp": torch.exp,
        "log": lambda each: each.abs().log(),
    }
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    expected = {name: operation(rows) for name, operation in operations.items()}
    try:
        torch.set_num_threads(threads)
        for count in (2, 21, 22, 43, 44, 85, 86, 87, 101, 128, 129, 200, 259):
            for name, operation in operations.items():
                assert torch.equal(operation(rows[:count]), expected[name][:count]), (name, count)
    finally:
        torch.set_num_threads(before)


SPEC = ModelSpec(
    num_layers=1,
    width=8,
    num_heads=6,
    num_kv_heads=2,
    head_dim=64,
    mlp_width=8,
    vocab_size=8,
    max_positions=2048,
    rope_theta=1e4,
    norm_eps=1e-5,
    tied_embeddings=True,
    eos_token_ids=(),
)


def test_attention_rows_have_the_same_bits_at_every_position(threads: int) -> None:
    """One sequence of 420 positions: whole, cut every way from 1 to 70, and each position alone. And they are right."""
    generator = torch.Generator().manual_seed(threads)
    length, size = 420, 16
    cache = KvCache(SPEC, num_blocks=64, block_size=size, dtype=torch.float32)
    blocks = torch.randperm(64, generator=generator)[: -(-length // size)].tolist()
    slots = torch.tensor([blocks[at // size] * size + at % size for at in range(length)])
    keys, values = torch.randn(2, SPEC.num_kv_heads, length, SPEC.head_dim, generator=generator)
    cache.write(0, cache.planes(slots), torch.cat([keys, values]).reshape(-1, SPEC.head_dim))
    queries = torch.randn(length, SPEC.num_kv_heads, SPEC.group, SPEC.head_dim, generator=generator)
    workspace = Workspace(torch.float32)
    min_rows = smallest_invariant_query_rows(SPEC.head_dim, torch.float32)
    assert min_rows is not None

    def run(pieces: list[tuple[int, int]]) -> torch.Tensor:
        """Attend pieces (start, stop) in one step, in their order."""
        spans, at = [], 0
        for start, stop in pieces:
            spans.append(Span(at, start, stop - start, blocks))
            at += stop - start
        plan = plan_attention(spans, cache, SPEC, min_rows=min_rows, dtype=torch.float32)
        return attend(torch.cat([queries[a:b] for a, b in pieces]), 0, cache, plan, workspace)

    whole = run([(0, length)])
    repeated = keys.repeat_interleave(SPEC.group, 0), values.repeat_interleave(SPEC.group, 0)
    plain = torch.nn.functional.scaled_dot_product_attention(
        queries.flatten(1, 2).transpose(0, 1).double(), repeated[0].double(), repeated[1].double(), is_causal=True
    )
    assert torch.allclose(whole.flatten(1, 2).transpose(0, 1).double(), plain, atol=2e-6)
    for piece in (1, 2, 3, 4, 5, 7, 31, 32, 33, 50, 64, 65, 70):
        pieces = [(at, min(at + piece, length)) for at in range(0, length, piece)]
        assert torch.equal(run(pieces), whole), f"pieces of {piece}"
    for at in range(0, length, 1 if threads == 1 else 13):
        assert torch.equal(run([(at, at + 1)])[0], whole[at]), f"position {at} alone"
    many = [(at, at + 1) for at in torch.randperm(length, generator=generator).tolist()]
    assert torch.equal(run(many), torch.cat([whole[a:b] for a, b in many]))
