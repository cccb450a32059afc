"""Which form of a model runs: the fastest that passes the self-test on this machine.

The forms compute the same model with other kernels. Each is made, and tried in company (`refold.gpu.company`), fastest first; one that
fails is given up for the next. Where all of them fail, the first runs: a worker whose bits depend on the batch is still a
worker. What was found is part of its environment: `self_test`, and `batch_invariant`.
"""

from collections.abc import Callable, Iterator

import torch

from refold.gpu.company import Room, find_dependence
from refold.gpu.model_runner import ModelRunner
from refold.gpu.spec import ModelSpec

Form = tuple[str, Callable[[], ModelRunner]]


def trusted_runner(
    spec: ModelSpec, weights: dict[str, torch.Tensor], room: Room, dtype: torch.dtype
) -> tuple[ModelRunner, dict[str, str]]:
    """The runner, and facts of it that are to be told."""
    faults: list[str] = []
    for name, make in _forms(spec, weights, room, dtype):
        runner = make()
        fault = _fault(runner, spec, room)
        if fault is None:
            return runner, runner.facts | _told("passed", faults, is_invariant=True)
        faults.append(f"{name}: {fault}")
        del runner  # two copies of the weights would not fit everywhere
    runner = next(_forms(spec, weights, room, dtype))[1]()
    return runner, runner.facts | _told("failed", faults, is_invariant=False)


def _fault(runner: ModelRunner, spec: ModelSpec, room: Room) -> str | None:
    """What keeps a form from being trusted, in words."""
    if runner.facts["batch_invariant"] != "yes":
        return "its kernels give a row other bits with another number of rows"
    found = find_dependence(runner.run, spec.vocab_size, room)
    return None if found is None else found.words


def _forms(spec: ModelSpec, weights: dict[str, torch.Tensor], room: Room, dtype: torch.dtype) -> Iterator[Form]:
    """Fastest first. The packed form falls back to the plain one by itself where there are no packing operators."""

    def make(*, packed: bool) -> ModelRunner:
        return ModelRunner(spec, weights, **room._asdict(), dtype=dtype, may_pack=packed)

    yield "packed", lambda: make(packed=True)
    yield "plain", lambda: make(packed=False)


def _told(verdict: str, faults: list[str], *, is_invariant: bool) -> dict[str, str]:
    words = f"{verdict} ({'; '.join(faults)})" if faults else verdict
    return {"self_test": words, "batch_invariant": "yes" if is_invariant else "no"}
