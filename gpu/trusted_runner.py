"""Which form of a model runs: the fastest that passes the self-test on this machine.

The forms compute the same model with other kernels. Each is made, and tried in company (`refold.gpu.company`), fastest first; one that
fails is given up for the next. The compiled library must also be right: it was made here, and nobody has tried it before. Where
all of them fail, the fastest of torch's runs: a worker whose bits depend on the batch is still a worker. What was found is
part of its environment: `step`, `self_test`, `batch_invariant`, and `not_native`, why there is no library.
"""

from collections.abc import Callable, Iterator

import torch

from refold.gpu.company import Room, find_dependence
from refold.gpu.model_runner import ModelRunner, Runner
from refold.gpu.models.native_llama import why_not
from refold.gpu.native import load_library
from refold.gpu.native_runner import NativeRunner
from refold.gpu.plain import find_error
from refold.gpu.spec import ModelSpec
from refold.journal.errors import Rejected

Form = tuple[str, Callable[[], Runner]]


def trusted_runner(
    spec: ModelSpec, weights: dict[str, torch.Tensor], room: Room, dtype: torch.dtype
) -> tuple[Runner, dict[str, str]]:
    """The runner, and facts of it that are to be told. Raises Rejected for bytes without the library."""
    faults: list[str] = []
    for name, make in _forms(spec, weights, room, dtype):
        runner = make()
        fault = _fault(runner, spec, room)
        if fault is None and isinstance(runner, NativeRunner):
            fault = find_error(runner.run, spec, weights, room, dtype)
        if fault is None:
            return runner, runner.facts | _told("passed", faults, is_invariant=True)
        faults.append(f"{name}: {fault}")
        del runner  # two copies of the weights would not fit everywhere
    runner = next(make for name, make in _forms(spec, weights, room, dtype) if name != "native")()
    return runner, runner.facts | _told("failed", faults, is_invariant=False)


def _fault(runner: Runner, spec: ModelSpec, room: Room) -> str | None:
    """What keeps a form from being trusted, in words."""
    if runner.facts["batch_invariant"] != "yes":
        return "its kernels give a row other bits with another number of rows"
    found = find_dependence(runner.run, spec.vocab_size, room)
    return None if found is None else found.words


def _forms(spec: ModelSpec, weights: dict[str, torch.Tensor], room: Room, dtype: torch.dtype) -> Iterator[Form]:
    """Fastest first. The packed form falls back to the plain one by itself where there are no packing operators."""
    library = why_not(spec) or load_library()
    missing: dict[str, str] = {}
    if isinstance(library, str):
        missing["not_native"] = library
    else:
        found = library
        yield "native", lambda: NativeRunner(found, spec, weights, room, dtype)
    if dtype == torch.int8:
        why = missing.get("not_native", "it fails its self-test")
        raise Rejected(f"dtype 'int8' needs the compiled library: {why}; take 'bfloat16' or 'float32'")

    def make(*, packed: bool) -> Runner:
        runner = ModelRunner(spec, weights, **room._asdict(), dtype=dtype, may_pack=packed)
        runner.facts |= missing
        return runner

    yield "packed", lambda: make(packed=True)
    yield "plain", lambda: make(packed=False)


def _told(verdict: str, faults: list[str], *, is_invariant: bool) -> dict[str, str]:
    words = f"{verdict} ({'; '.join(faults)})" if faults else verdict
    return {"self_test": words, "batch_invariant": "yes" if is_invariant else "no"}
