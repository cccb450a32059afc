"""The simulated and the torch worker pass one suite."""

from collections.abc import Iterator

import pytest

from refold.gpu.batch import Worker
from refold.gpu.factory import create_worker
from refold.gpu.simulated import SimulatedWorker
from refold.journal.errors import Rejected, WorkerLost
from refold.journal.events import EngineConfig, Sampling
from tests.kit import tiny_llama
from tests.kit.worker_contract import DraftContract, WorkerContract, config_for
from tests.kit.worker_driver import WorkerDriver


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_llama.write_folder(tmp_path_factory.mktemp("tiny"), tiny_llama.tensors()))


class TestSimulatedWorker(WorkerContract):
    @pytest.fixture
    def config(self) -> EngineConfig:
        return config_for("simulated")

    @pytest.fixture
    def worker(self, config: EngineConfig) -> Worker:
        return SimulatedWorker(config)


class TestTorchWorker(WorkerContract):
    @pytest.fixture(params=[8, 24, 1, 256])
    def config(self, tiny: str, request: pytest.FixtureRequest) -> EngineConfig:
        return config_for(tiny, block_size=request.param, num_blocks=-(-768 // request.param) * 4)

    @pytest.fixture
    def worker(self, config: EngineConfig) -> Iterator[Worker]:
        pytest.importorskip("torch", reason="torch is not installed")
        worker = create_worker(config, threads=1)
        yield worker
        worker.close()


class TestTorchWorkerInBfloat16(WorkerContract):
    @pytest.fixture
    def config(self, tiny: str) -> EngineConfig:
        return config_for(tiny)

    @pytest.fixture
    def worker(self, config: EngineConfig) -> Worker:
        pytest.importorskip("torch", reason="torch is not installed")
        worker = create_worker(config, threads=1, dtype="bfloat16")
        if worker.environment()["batch_invariant"] != "yes":
            pytest.skip("bfloat16 products on this machine depend on the batch")
        return worker


SPECULATING = {"speculation": "worker", "num_speculative_tokens": 5}


class TestDraftsOfTheSimulatedWorker(DraftContract):
    @pytest.fixture
    def draft_config(self) -> EngineConfig:
        return config_for("simulated", **SPECULATING)

    @pytest.fixture
    def draft_worker(self, draft_config: EngineConfig) -> Worker:
        return SimulatedWorker(draft_config)


class TestDraftsOfTheTorchWorker(DraftContract):
    @pytest.fixture
    def draft_config(self, tiny: str) -> EngineConfig:
        return config_for(tiny, **SPECULATING)

    @pytest.fixture(params=["float32", "bfloat16"])
    def draft_worker(self, draft_config: EngineConfig, request: pytest.FixtureRequest) -> Worker:
        pytest.importorskip("torch", reason="torch is not installed")
        worker = create_worker(draft_config, threads=1, dtype=request.param)
        if worker.environment()["batch_invariant"] != "yes":
            pytest.skip(f"{request.param} products on this machine depend on the batch")
        return worker


def test_the_factory_goes_by_the_name_of_the_model(tiny: str) -> None:
    assert create_worker(config_for("simulated")).kind == "simulated"
    pytest.importorskip("torch", reason="torch is not installed")
    assert create_worker(config_for(tiny)).kind == "torch"


def test_numbers_that_are_none_lose_the_worker(tiny: str) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from refold.gpu.models.native_llama import NativeLlama

    config = config_for(tiny)
    worker = create_worker(config, threads=1)
    model = worker._runner._model  # type: ignore[attr-defined]
    norm = model._held["final_norm"] if isinstance(model, NativeLlama) else model._final_norm
    norm.fill_(torch.nan)
    drive = WorkerDriver(worker, config)
    with pytest.raises(WorkerLost, match="logits of handle 0 at position 3 are not finite"):
        drive.step([(drive.add([1, 2, 3], Sampling(seed=0, max_tokens=1)), 3)])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_fingerprint": "0" * 64}, "has fingerprint"),
        ({"vocab_size": 7}, "has 160 tokens, the engine expects 7"),
        ({"max_model_len": 5000}, "max_model_len 5000 is more than the model's 1024"),
        ({"num_blocks": 1 << 40}, "KV cache of 1099511627776 blocks"),
    ],
)
def test_a_config_that_the_model_cannot_serve_is_refused(tiny: str, changes: dict, says: str) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    with pytest.raises(Rejected, match=says):
        create_worker(config_for(tiny, **changes))


def test_an_unknown_dtype_is_refused(tiny: str) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    with pytest.raises(Rejected, match="dtype 'int3' is unknown"):
        create_worker(config_for(tiny), dtype="int3")
