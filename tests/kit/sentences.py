"""Words for tests of the core: given an engine, when it is ordered to, then these facts.

The names of requests are spoken of, never their handles; what a step works on is a mapping from name to tokens.
"""

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from refold.gpu.batch import WorkOrder
from refold.gpu.simulated import SimulatedWorker, _Slot, simulated_token
from refold.journal.codec import decode, encode
from refold.journal.events import (
    EngineConfig,
    Event,
    OutputDelivered,
    RequestFinished,
    RequestPreempted,
    RequestSubmitted,
    Sampling,
    StaleOutputConsumed,
    StepScheduled,
)
from refold.journal.record import EMPTY_HEAD, head_after, seal
from refold.projections.requests import Request
from refold.scheduler.commands import ResetCache
from refold.scheduler.fold import fold
from refold.scheduler.state import digest
from tests.kit.drive import Drive, config, delivered_tokens

E = TypeVar("E", bound=Event)


# -- given ------------------------------------------------------------------------------------------------------------


def opened(**changes: object) -> Drive:
    """An engine that is open, with a worker."""
    drive = Drive(config(**changes))
    drive.open()
    return drive


def under_pressure(depth: int = 3, **changes: object) -> Drive:
    """Four blocks of four; requests `a` and `b` hold two each, with two of their samples in flight, and need a third."""
    drive = opened(**({"num_blocks": 4, "block_size": 4, "max_in_flight_steps": depth} | changes))
    drive.submit("a", 7)
    drive.submit("b", 7)
    for _ in range(2):
        drive.schedule()
        if depth == 1:
            drive.complete()
    return drive


def random_life(seed: int, turns: int = 100, **changes: object) -> Drive:
    """A short life under memory pressure, with aborts and resets, to its end."""
    rng = random.Random(seed)
    block_size = rng.choice((1, 2, 4))
    drawn = {
        "block_size": block_size,
        "num_blocks": 48 // block_size,
        "vocab_size": 50,
        "eos_token_ids": rng.choice(((), (2,))),
        "max_num_seqs": 6,
        "max_num_batched_tokens": rng.choice((8, 24)),
        "max_in_flight_steps": rng.choice((1, 2, 3, 4, 8)),
        "policy": rng.choice(("fcfs", "priority")),
        "long_prefill_token_threshold": rng.choice((0, 3)),
        "watermark_blocks": rng.choice((0, 1)),
        "admit_full_sequence": rng.choice((True, False)),
        "enable_prefix_caching": rng.choice((True, True, False)),
    }
    drive = opened(**(drawn | changes))
    for turn in range(turns):
        roll = rng.random()
        if roll < 0.2:
            length = rng.choice((1, 5, 12))
            prompt = [7, 1, 2, 1] * 3 if rng.random() < 0.5 else [rng.randrange(50) for _ in range(12)]
            drive.submit(
                f"r{turn}", prompt[:length], rng.choice((1, 4, 12)), seed=rng.randrange(99), priority=rng.randrange(3)
            )
        elif roll < 0.23 and drive.state.requests.live():
            drive.abort(rng.choice(drive.state.requests.live()).request_id)
        elif roll < 0.25:
            reset(drive)
        elif roll < 0.65 or not drive.orders:
            drive.schedule()
        else:
            drive.complete()
    drive.run()
    return drive


# -- when -------------------------------------------------------------------------------------------------------------


def fill(drive: Drive) -> list[Event]:
    """Schedule until the window is full or there is nothing to do."""
    events: list[Event] = []
    while facts := drive.schedule():
        events += facts
    return events


def crashed(records: list[list[Event]], engine_config: EngineConfig, *, laws: bool = True) -> Drive:
    """What is left when the process dies behind these records: their bytes, folded by another process. Not opened yet."""
    drive = Drive(engine_config, laws=laws)
    head = EMPTY_HEAD._replace(engine_epoch=1)
    for events in records:
        record = seal(head, 0, *encode(events))
        head = head_after(record)
        drive.records.append(decode(record))
        for event in drive.records[-1]:
            fold(drive.state, event)
            if drive.book is not None:
                drive.book.observe(drive.state, event)
    return drive


def drain(drive: Drive) -> list[Event]:
    """Let everything in flight come back."""
    events: list[Event] = []
    while drive.orders:
        events += drive.complete()
    return events


def reset(drive: Drive) -> list[Event]:
    """Reset the cache, the running requests too."""
    return drive.do(ResetCache(reset_running=True))


# -- then -------------------------------------------------------------------------------------------------------------


def all_of(kind: type[E], records: Iterable[list[Event]]) -> list[E]:
    """Every event of a kind in a journal, in order."""
    return [event for events in records for event in events if isinstance(event, kind)]


def the(kind: type[E], events: list[Event]) -> E:
    """The one event of a kind."""
    found = [event for event in events if isinstance(event, kind)]
    assert len(found) == 1, f"{len(found)} of {kind.__name__} in {story(events)}"
    return found[0]


def story(events: list[Event]) -> list[str]:
    """What happened, by name."""
    return [type(event).__name__ for event in events]


def named(drive: Drive, name: str) -> Request:
    """The live request of this name."""
    request = drive.state.requests.find_live(name)
    assert request is not None, f"{name} is not live"
    return request


def is_live(drive: Drive, name: str) -> bool:
    """Whether a request of this name is still to finish."""
    return drive.state.requests.find_live(name) is not None


def name_of(drive: Drive, handle: int) -> str:
    """The name behind a handle."""
    return next(name for name, each in drive.state.requests.handle_by_id.items() if each == handle)


def work(drive: Drive, events: list[Event]) -> dict[str, int]:
    """Request -> tokens of the step that these events schedule, in batch order; empty if they schedule none."""
    step = next((event for event in events if isinstance(event, StepScheduled)), None)
    if step is None:
        return {}
    return {name_of(drive, h): n for h, n in zip(step.handles, step.num_tokens, strict=True)}


def victims(drive: Drive, events: Iterable[Event]) -> list[str]:
    """Who was preempted, in order."""
    return [name_of(drive, event.handle) for event in events if isinstance(event, RequestPreempted)]


def names(requests: Iterable[Request]) -> list[str]:
    """The names of a queue, in its order."""
    return [request.request_id for request in requests]


def counters(drive: Drive, name: str) -> dict[str, int]:
    """A request's counters, by their short names."""
    request = named(drive, name)
    return {
        "computed": request.num_computed_tokens,
        "placeholders": request.num_output_placeholders,
        "in_flight": request.num_in_flight_tokens,
        "stale": request.num_stale_output_tokens,
        "deliverable": request.num_deliverable_stale_tokens,
    }


def ends(records: Iterable[list[Event]], drive: Drive) -> dict[str, tuple[str, int]]:
    """Request -> (finish reason, number of outputs)."""
    return {name_of(drive, e.handle): (e.reason, e.num_output_tokens) for e in all_of(RequestFinished, records)}


def outputs(drive: Drive) -> dict[str, list[int]]:
    """What each client got."""
    return delivered_tokens(drive.records)


def due(submitted: RequestSubmitted, engine_config: EngineConfig) -> list[int]:
    """What a request must be given if nothing ends it early: the tokens of its seed, up to its natural end."""
    sampling, prompt = submitted.sampling, len(submitted.prompt_token_ids)
    stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else engine_config.eos_token_ids)}
    tokens: list[int] = []
    for position in range(prompt, min(prompt + sampling.max_tokens, engine_config.max_model_len)):
        tokens.append(simulated_token(sampling, position, prompt, engine_config))
        if tokens[-1] in stops and len(tokens) > sampling.min_tokens:
            break
    return tokens


def all_due(drive: Drive) -> dict[str, list[int]]:
    """What every request must be given."""
    return {e.request_id: due(e, drive.config) for e in all_of(RequestSubmitted, drive.records)}


def token_at(drive: Drive, name: str, position: int, prompt: int) -> int:
    """The token that a request of this name, submitted without a seed of its own, has at a position."""
    sampling = Sampling(seed=sum(name.encode()), max_tokens=1)
    return simulated_token(sampling, position, prompt, drive.config)


def scheduled_tokens(drive: Drive) -> int:
    """How many tokens all steps computed together."""
    return sum(sum(event.num_tokens) for event in all_of(StepScheduled, drive.records))


@contextmanager
def nothing_changes(drive: Drive) -> Iterator[None]:
    """The state is the same after as before, to the last counter."""
    before, records = digest(drive.state), len(drive.records)
    yield
    assert digest(drive.state) == before
    assert len(drive.records) == records


# -- a worker whose samples can be told apart -------------------------------------------------------------------------


class EmittingWorker(SimulatedWorker):
    """No two of its samples are alike: a token tells which sample it was. `emitted`: handle -> (position, token) in order."""

    def __init__(self, engine_config: EngineConfig) -> None:
        super().__init__(engine_config)
        self.emitted: dict[int, list[tuple[int, int]]] = {}
        self._next_token = 0
        self._handle_of: dict[int, int] = {}

    def _take_over(self, order: WorkOrder) -> None:
        super()._take_over(order)
        self._handle_of = {id(slot): handle for handle, slot in self._slots.items()}

    def _token(self, slot: _Slot, position: int) -> int:
        self._next_token += 1
        handle = self._handle_of[id(slot)]
        self.emitted.setdefault(handle, []).append((position, self._next_token))
        return self._next_token


def emitting(**changes: object) -> tuple[Drive, EmittingWorker]:
    """An open engine whose worker never samples the same token twice."""
    drive = opened(**({"vocab_size": 1_000_000} | changes))
    worker = EmittingWorker(drive.config)
    drive.worker = worker
    return drive, worker


def delivered(events: Iterable[Event]) -> dict[int, list[int]]:
    """Handle -> tokens that these events hand out, whether current or stale."""
    given: dict[int, list[int]] = {}
    for event in events:
        if isinstance(event, OutputDelivered | StaleOutputConsumed):
            tokens = iter(event.token_ids)
            counts = event.counts or [1] * len(event.handles)
            fates = event.delivered if isinstance(event, StaleOutputConsumed) else [True] * len(counts)
            for handle, count, is_out in zip(event.handles, counts, fates, strict=True):
                taken = [next(tokens) for _ in range(count)]
                if is_out:
                    given.setdefault(handle, []).extend(taken)
    return given
