"""Workers like ones that were: for a journal's configuration and the environment that its worker told."""

from collections.abc import Mapping
from typing import get_args

from msgspec.structs import replace

from refold.engine.models import Dtype, WorkerOptions, find_model
from refold.gpu.batch import Worker
from refold.journal.errors import Rejected
from refold.journal.events import EngineConfig


class Successors:
    """Makes workers. `model`: where the weights are now; None for where the journal says that they were."""

    __slots__ = ("_model",)

    def __init__(self, model: str | None = None) -> None:
        self._model = model

    def make(self, config: EngineConfig, environment: Mapping[str, str]) -> Worker:
        """A worker with the recorded number of threads and data type, in a process of its own where it has weights.

        Raises:
            Rejected: the model isn't there, or isn't the recorded one.
            WorkerLost: its process failed.
        """
        options = WorkerOptions(threads=_threads(environment), dtype=_dtype(environment))
        model = find_model(self._model or config.model, options)
        if model.fingerprint != config.model_fingerprint:
            raise Rejected(
                f"model {model.name!r} has fingerprint {model.fingerprint[:12]}, the journal was written with "
                f"{config.model_fingerprint[:12]}: name the file or folder that has its weights"
            )
        return model.make_worker(replace(config, model=model.name))


def _threads(environment: Mapping[str, str]) -> int | None:
    told = environment.get("threads", "")
    return int(told) if told.isdecimal() and 0 < int(told) <= 1024 else None


def _dtype(environment: Mapping[str, str]) -> Dtype:
    told = environment.get("dtype", "float32")
    dtypes: dict[str, Dtype] = {dtype: dtype for dtype in get_args(Dtype)}
    if told not in dtypes:
        raise Rejected(f"the journal's worker computed in {told!r}, which this refold can't: use the one that wrote it")
    return dtypes[told]
