"""Workers by model name. What a worker needs is imported when one is made: the simulated worker runs without torch."""

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

        return SimulatedWorker(config)
    description = describe_model(config.model)
    try:
        from refold.gpu.worker import TorchWorker  # noqa: PLC0415
    except ImportError as error:
        raise Rejected(f"model {config.model!r} needs torch ({error}): pip install 'refold[gpu]'") from error
    return TorchWorker(config, description, threads=threads, dtype=dtype)
