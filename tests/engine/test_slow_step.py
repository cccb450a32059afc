"""A worker that is slower than it could be says so once, in plain words; one that is as somebody wants it says nothing."""

import pytest

from refold import Engine, SamplingParams
from refold.engine.slow_step import why_slow
from refold.gpu.batch import StepOutput, WorkOrder
from refold.gpu.native import CHOSEN
from refold.gpu.simulated import SimulatedWorker
from refold.journal.events import EngineConfig
from tests.kit.engines import MODEL

TOLD = {
    "no C++ compiler": "install g++ (apt-get install g++), or let CXX name",
    "c++: step.cpp:1: error": "mend the compiler, or install g++",
    "a width is no multiple of 16": "it is the model's shape",
}


@pytest.mark.parametrize("missing", TOLD)
def test_it_says_what_falls_back_what_it_costs_and_what_to_do(missing: str) -> None:
    found = why_slow({"step": "torch", "not_native": missing, "self_test": "passed"})
    assert found is not None
    assert found[0].startswith(f"torch operators compute the model, as there is no compiled library ({missing}): ")
    assert "1.7 to 4.4 times in bfloat16" in found[0]
    assert TOLD[missing] in found[1]


def test_a_library_that_fails_its_self_test_is_told_of() -> None:
    found = why_slow({"step": "torch", "self_test": "passed (native: its logits are off by 0.5)"})
    assert found is not None
    assert "fails its self-test (passed (native: its logits are off by 0.5))" in found[0]


@pytest.mark.parametrize(
    "environment",
    [{}, {"step": "native", "self_test": "passed"}, {"step": "torch", "not_native": CHOSEN, "self_test": "passed"}],
)
def test_what_is_fast_or_wanted_is_not_told_of(environment: dict[str, str]) -> None:
    assert why_slow(environment) is None


def test_an_engine_says_it_once_however_many_workers_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    class Slow(SimulatedWorker):
        deaths = 0

        def environment(self) -> dict[str, str]:
            return {"step": "torch", "not_native": "no C++ compiler"}

        def execute(self, order: WorkOrder) -> StepOutput:
            if Slow.deaths == 0:
                Slow.deaths += 1
                raise RuntimeError("once")
            return super().execute(order)

    def make(config: EngineConfig) -> Slow:
        return Slow(config)

    with Engine(MODEL, make_worker=make) as engine:
        engine.run([[1]], SamplingParams(max_tokens=4))
    assert Slow.deaths == 1
    assert capsys.readouterr().err.count("worker_slow") == 1
