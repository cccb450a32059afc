"""Lives of the engine and of its worker.

Recovery is: fold the journal, lose the worker, open the engine, start a worker. Nothing waits for what was in flight: it is
gone, its requests move to their next epoch under the `drop` policy and are computed again by the ordinary rules. Their
known tokens stay, so no client sees a token twice.
"""

from refold.journal.errors import Rejected
from refold.journal.events import (
    EngineClosed,
    EngineConfig,
    EngineOpened,
    Event,
    RequestFinished,
    WorkerLost,
    WorkerStarted,
)
from refold.projections.requests import FINISHED, RUNNING, Request
from refold.scheduler.admission import num_blocks_at_most
from refold.scheduler.commands import CloseEngine, LoseWorker, OpenEngine, StartWorker
from refold.scheduler.sessions import turns_at_most
from refold.scheduler.state import State
from refold.scheduler.trials import suspects_of_loss, verdict

MAX_TENANT_WEIGHT = 1 << 20


def open_engine(state: State, command: OpenEngine) -> list[Event]:
    """Start a life. Requests that the new configuration can't hold end with reason `capacity`."""
    if state.worker_alive:
        raise Rejected("the engine opens before its worker starts: lose the old worker first")
    live = state.requests.live()
    config = command.config
    wrong = {name: weight for name, weight in config.tenant_weights.items() if not 1 <= weight <= MAX_TENANT_WEIGHT}
    if wrong:
        name = min(wrong)
        raise Rejected(f"tenant {name[:40]!r} has weight {wrong[name]}: give 1 to {MAX_TENANT_WEIGHT}")
    if live and config.model_fingerprint != state.config.model_fingerprint:
        raise Rejected(
            f"the journal has {len(live)} unfinished requests of model {state.config.model!r} "
            f"({state.config.model_fingerprint[:12]}), this is {config.model!r} ({config.model_fingerprint[:12]}): "
            "open it with that model, or use another journal"
        )
    opened = EngineOpened(
        engine_epoch=command.engine_epoch,
        refold_version=command.refold_version,
        root_seed=command.root_seed,
        config=config,
        stream=command.stream,
    )
    ends = [
        RequestFinished(
            handle=r.handle,
            reason="capacity",
            num_output_tokens=r.next_output_index,
            message=f"{len(r.tokens)} tokens known; the reopened engine has {config.num_blocks} blocks of {config.block_size}"
            f" and a model length of {config.max_model_len}",
        )
        for r in live
        if not _can_hold(r, config)
    ]
    return [opened, *ends]


def _can_hold(request: Request, config: EngineConfig) -> bool:
    """Whether a request, with all the input that waits for its turn, can come to its end under this configuration."""
    longest_media = max((media.num_tokens for media in request.media), default=0)
    if len(request.tokens) >= config.max_model_len:
        return False
    if longest_media > min(config.encoder_budget_tokens, config.encoder_cache_tokens):
        return False
    return all(
        prompt < config.max_model_len and num_blocks_at_most(prompt, max_tokens, config) <= config.num_blocks
        for prompt, max_tokens in turns_at_most(request, config)
    )


def close_engine(state: State, command: CloseEngine) -> list[Event]:
    """End a life in good order."""
    return [EngineClosed(engine_epoch=state.engine_epoch, reason=command.reason)] if state.is_open else []


def start_worker(state: State, command: StartWorker) -> list[Event]:
    """A worker is ready."""
    if state.worker_alive or not state.is_open:
        raise Rejected("a worker starts in an open engine that has none")
    generation = state.worker_generation + 1
    return [WorkerStarted(generation=generation, kind=command.kind, environment=command.environment)]


def lose_worker(state: State, command: LoseWorker) -> list[Event]:
    """The worker is gone, and all that it held. If a request was alone with dying workers often enough, it is found out."""
    if not state.worker_alive:
        return []
    holders = [
        r.handle
        for r in state.requests.by_handle.values()
        if r.status is not FINISHED and (r.status is RUNNING or r.num_in_flight_tokens or r.block_ids)
    ]
    steps = [step.step for step in state.window.in_flight]
    suspects = suspects_of_loss(state) if command.by_step else []
    lost = WorkerLost(
        generation=state.worker_generation, reason=command.reason, steps=steps, handles=holders, suspects=suspects
    )
    return [lost, *verdict(state, suspects)]
