"""Drive the core by hand: commands in, events kept, an in-order simulated worker behind a window. No threads, no clock."""

from collections import deque
from collections.abc import Sequence
from typing import Any

from refold.gpu.batch import AdmittedRequest, StepOutput, WorkOrder
from refold.gpu.simulated import SimulatedWorker
from refold.journal.events import (
    EngineConfig,
    Event,
    RequestFinished,
    RequestPreempted,
    Sampling,
    SessionTurnEnded,
    StepScheduled,
    WorkerLost,
    WorkerStarted,
)
from refold.scheduler.commands import (
    AbortRequest,
    Command,
    CompleteStep,
    LoseWorker,
    OpenEngine,
    ScheduleStep,
    StartWorker,
    SubmitRequest,
)
from refold.scheduler.decide import decide
from refold.scheduler.fold import fold
from refold.scheduler.lawbook import LawBook
from refold.scheduler.state import State


def config(**changes: object) -> EngineConfig:
    """A small simulated engine: 8 blocks of 4, up to 4 requests, 16 tokens a step, window 2."""
    defaults: dict[str, object] = {
        "model": "simulated",
        "model_fingerprint": "simulated",
        "vocab_size": 1000,
        "eos_token_ids": (),
        "max_model_len": 256,
        "block_size": 4,
        "num_blocks": 8,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "max_in_flight_steps": 2,
    }
    return EngineConfig(**(defaults | changes))  # type: ignore[arg-type]


class Drive:
    """An engine without a shell. Every event passes the laws, and `records` is its journal.

    `commands` are those that made the records, one each.
    """

    def __init__(self, engine_config: EngineConfig | None = None, *, laws: bool = True) -> None:
        self.config = engine_config or config()
        self.state = State()
        self.book = LawBook() if laws else None
        self.records: list[list[Event]] = []
        self.commands: list[Command] = []
        self.orders: deque[WorkOrder] = deque()
        self.released: list[int] = []
        self.worker: SimulatedWorker | None = None
        self.outputs: dict[str, list[int]] = {}
        self._clock_ns = 0

    # -- orders -------------------------------------------------------------------------------------------------------

    def do(self, command: Command) -> list[Event]:
        """Decide, keep, fold, and look after the worker."""
        events = decide(self.state, command)
        if events:
            self.records.append(events)
            self.commands.append(command)
        for event in events:
            fold(self.state, event)
            if self.book is not None:
                self.book.observe(self.state, event)
            self._serve(event)
        return events

    def open(self, engine_config: EngineConfig | None = None) -> list[Event]:
        """Open the engine with a worker; after a crash, lose the old worker first."""
        self.config = engine_config or self.config
        lost = self.do(LoseWorker(reason="engine restarted"))
        epoch = self.state.engine_epoch + 1
        opened = self.do(OpenEngine(engine_epoch=epoch, refold_version="test", root_seed=0, config=self.config))
        return [*lost, *opened, *self.do(StartWorker(kind="simulated", environment={}))]

    def submit(
        self, request_id: str, prompt: Sequence[int] | int, max_tokens: int = 8, **changes: object
    ) -> list[Event]:
        """Submit a request; an int prompt is that many tokens, drawn from the id."""
        if isinstance(prompt, int):
            prompt = [(i * 7 + sum(request_id.encode())) % self.config.vocab_size for i in range(prompt)]
        of_command = ("priority", "cache_salt", "tenant", "adapter", "media", "resumable", "grammar")
        command_fields = {k: changes.pop(k) for k in of_command if k in changes}
        sampling = Sampling(**({"seed": sum(request_id.encode()), "max_tokens": max_tokens} | changes))  # type: ignore[arg-type]
        self._clock_ns += 1
        command = SubmitRequest(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            sampling=sampling,
            arrival_ns=self._clock_ns,
            **command_fields,  # type: ignore[arg-type]
        )
        return self.do(command)

    def schedule(self) -> list[Event]:
        """Plan one step."""
        return self.do(ScheduleStep())

    def run_worker(self) -> StepOutput:
        """Let the worker execute its oldest order."""
        assert self.worker is not None
        return self.worker.execute(self.orders.popleft())

    def complete(self) -> list[Event]:
        """Let the worker execute its oldest order, and deliver the output."""
        return self.deliver(self.run_worker())

    def deliver(self, output: StepOutput, refused_entries: Sequence[int] = (), time_ns: int = 0) -> list[Event]:
        """Deliver an output that the worker made."""
        return self.do(
            CompleteStep(
                step=output.step,
                generation=output.generation,
                counts=output.counts,
                token_ids=output.token_ids,
                positions=output.positions,
                refused_entries=list(refused_entries),
                time_ns=time_ns,
                digests=output.digests,
                logprobs=output.logprobs,
                prompt_logprobs=output.prompt_logprobs,
            )
        )

    def abort(self, request_id: str) -> list[Event]:
        """Abort a request."""
        return self.do(AbortRequest(request_id=request_id))

    def run(self, max_turns: int = 10_000) -> None:
        """Fill the window, then drain one, until nothing is left; fails on a livelock."""
        for _ in range(max_turns):
            while self.schedule():
                pass
            if not self.orders:
                assert self.state.is_quiescent, f"stalled with {[r.request_id for r in self.state.requests.live()]}"
                return
            self.complete()
        raise AssertionError(f"no end after {max_turns} turns")

    # -- what the shell does ------------------------------------------------------------------------------------------

    def _serve(self, event: Any) -> None:
        kind = type(event)
        if kind is StepScheduled:
            self.orders.append(self._order(event))
            self.released = []
        elif kind in (RequestPreempted, RequestFinished, SessionTurnEnded):
            self.released.append(event.handle)
        elif kind is WorkerStarted:
            self.worker = SimulatedWorker(self.config)
        elif kind is WorkerLost:
            self.worker = None
            self.orders.clear()
            self.released = []

    def _order(self, event: StepScheduled) -> WorkOrder:
        admitted = []
        for admission in event.admissions:
            request = self.state.requests.by_handle[event.handles[admission.entry]]
            num_new = sum(len(a.block_ids) for a in event.allocations if a.entry == admission.entry)
            admitted.append(
                AdmittedRequest(
                    entry=admission.entry,
                    handle=request.handle,
                    epoch=admission.epoch,
                    token_ids=list(request.tokens),
                    num_prompt_tokens=request.num_prompt_tokens,
                    sampling=request.sampling,
                    hit_block_ids=request.block_ids[: len(request.block_ids) - num_new],
                )
            )
        return WorkOrder(
            generation=self.state.worker_generation, scheduled=event, admitted=admitted, released=list(self.released)
        )


def delivered_tokens(records: list[list[Event]]) -> dict[str, list[int]]:
    """What each client got, from the journal alone: request id -> tokens, checked gapless."""
    from refold.projections.outbox import Outbox

    outbox = Outbox()
    for events in records:
        for event in events:
            outbox.observe(event)
    return {request_id: list(entry.token_ids) for request_id, entry in outbox.by_id.items()}
