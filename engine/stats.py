"""The engine at a glance."""

from dataclasses import dataclass

from refold.engine.core import EngineCore
from refold.journal.events import PauseMode


@dataclass(frozen=True, slots=True)
class Stats:
    """A snapshot. Totals are over the whole journal, not just this life of the engine.

    Attributes:
        running: requests in the batch.
        waiting: requests in the queue, preempted ones included.
        idle: sessions between two turns.
        paused: how scheduling is held back; None if it isn't.
        in_flight_steps: steps that the worker has not answered.
        free_blocks: KV blocks that may be taken, of `num_blocks`.
        num_blocks: KV blocks in the pool.
        requests: requests submitted.
        finished: how many ended with which reason.
        steps: steps scheduled.
        tokens: tokens generated.
        preemptions: how often a request lost its place, for want of memory or to a cache reset.
        stale_tokens_delivered: tokens of an ended epoch that were valid and kept.
        stale_tokens_dropped: those that were thrown away.
        lost_workers: workers replaced.
        durable_position: records on disk.
    """

    running: int
    waiting: int
    idle: int
    paused: PauseMode | None
    in_flight_steps: int
    free_blocks: int
    num_blocks: int
    requests: int
    finished: dict[str, int]
    steps: int
    tokens: int
    preemptions: int
    stale_tokens_delivered: int
    stale_tokens_dropped: int
    lost_workers: int
    durable_position: int


def snapshot(core: EngineCore) -> Stats:
    """Read while the engine runs: each number is right, but not all at the same instant."""
    state, totals = core.state, core.totals
    return Stats(
        running=len(state.queues.running),
        waiting=len(state.queues.waiting),
        idle=len(state.queues.idle),
        paused=state.paused,
        in_flight_steps=len(state.window.in_flight),
        free_blocks=state.pool.num_free,
        num_blocks=state.pool.num_blocks,
        requests=totals.requests,
        finished=dict(totals.finished),
        steps=totals.steps,
        tokens=totals.tokens,
        preemptions=totals.preemptions,
        stale_tokens_delivered=totals.stale_tokens_delivered,
        stale_tokens_dropped=totals.stale_tokens_dropped,
        lost_workers=totals.lost_workers,
        durable_position=core.durable_position,
    )
