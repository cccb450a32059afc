"""Commands: orders to the scheduler, in the imperative.

Time, randomness and identity come in with the command, drawn by the shell. A command that can't be obeyed raises
`Rejected` and changes nothing; one with nothing to do yields no event.
"""

import msgspec

from refold.journal.events import EngineConfig, Sampling


class Command(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """An order."""


class OpenEngine(Command, frozen=True):
    """Start a life of the engine under `config`. Nothing may be in flight: lose the old worker first."""

    engine_epoch: int
    refold_version: str
    root_seed: int
    config: EngineConfig


class CloseEngine(Command, frozen=True):
    """End this life of the engine in good order."""

    reason: str


class StartWorker(Command, frozen=True):
    """A worker is ready. Its generation is the last one's plus one."""

    kind: str
    environment: dict[str, str]


class LoseWorker(Command, frozen=True):
    """The worker, its steps in flight and its KV cache are gone. With no worker alive: nothing happened."""

    reason: str


class SubmitRequest(Command, frozen=True):
    """Queue a request. Rejected if it can never fit, if its id is taken or if its tokens are not the model's."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: Sampling
    arrival_ns: int
    priority: int = 0
    cache_salt: str = ""


class AbortRequest(Command, frozen=True):
    """End a request from outside. Of an id that is not live: nothing happens."""

    request_id: str
    cause: str = "client"


class FailRequest(Command, frozen=True):
    """End a request with reason `error`. Of an id that is not live: nothing happens."""

    request_id: str
    message: str


class ScheduleStep(Command, frozen=True):
    """Plan the next step, if the window has room and there is work."""


class CompleteStep(Command, frozen=True):
    """A step's output came back, in the columns of `refold.gpu.batch.StepOutput`."""

    step: int
    generation: int
    counts: list[int]
    token_ids: list[int]
    positions: list[int]


class ResetCache(Command, frozen=True):
    """Forget every cached block. With `reset_running`, preempt what runs first; without, Rejected if anything runs."""

    reset_running: bool = False


class RecordDigest(Command, frozen=True):
    """Record the digest of the folded state."""
