"""Workers by model name. What a worker needs is imported when one is made: the simulated worker runs without torch."""

import os
from urllib.parse import parse_qs

from refold.gpu.batch import Worker
from refold.gpu.weights import describe_model
from refold.journal.errors import Rejected
from refold.journal.events import EngineConfig

SIMULATED = "simulated"


def create_worker(config: EngineConfig, *, threads: int | None = None, dtype: str = "float32") -> Worker:
    """Make the worker for `config.model`.

    `threads` sets torch's thread count for this process (None: leave it). Raises Rejected if the model can't be loaded.
    """
    if config.model.partition("?")[0] == SIMULATED:
        from refold.gpu.simulated import SimulatedWorker  # noqa: PLC0415

        return SimulatedWorker(config, _step_seconds(config.model))
    # Torch's threads meet after every operator. By default they spin while they wait, and on a machine with other work to do
    # (this engine's own journal, say) a spinning thread keeps the one that it waits for from running: steps took five times
    # as long. Counts only if torch is not loaded yet; costs a tenth on an idle machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    description = describe_model(config.model)
    try:
        from refold.gpu.worker import TorchWorker  # noqa: PLC0415
    except ImportError as error:
        raise Rejected(f"model {config.model!r} needs torch ({error}): pip install 'refold[gpu]'") from error
    return TorchWorker(config, description, threads=threads, dtype=dtype)


def _step_seconds(model: str) -> float:
    """How long a step of `simulated?step_ms=2` takes. The name was checked when the engine looked its model up."""
    return int(parse_qs(model.partition("?")[2]).get("step_ms", ["0"])[-1]) / 1000
