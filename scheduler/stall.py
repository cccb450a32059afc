"""Stalls: who waits, for what, what is free, and who holds the rest.

A turn that schedules nothing is normal while steps are in flight. With nothing in flight, everyone who waits must wait for
somebody outside: a worker, a grammar, more input, the end of a pause. Whoever doesn't is the victim of a bug, and
`is_wedged` says so: what admission let in can always be scheduled in an idle engine.
"""

from typing import Literal, NamedTuple

from refold.projections.requests import IDLE, RUNNING, WAITING, Request
from refold.scheduler.state import State
from refold.scheduler.trials import on_trial

WaitReason = Literal[
    "worker",
    "pause",
    "grammar",
    "input",
    "window",
    "output",
    "cadence",
    "stale_output",
    "seat",
    "fence",
    "blocks",
    "encoder",
    "trial",
    "turn",
]

WAIT_WORDS: dict[WaitReason, str] = {
    "worker": "a worker to start",
    "pause": "the engine to be resumed",
    "grammar": "its grammar",
    "input": "its next chunk of input",
    "window": "a step in flight to come back",
    "output": "its own output in flight",
    "cadence": "its last sampling step to move on",
    "stale_output": "its stale output to drain",
    "seat": "a seat in the batch",
    "fence": "blocks behind a step in flight",
    "blocks": "blocks",
    "encoder": "the encoder's output for its media",
    "trial": "the trial of others, who may be what kills the worker",
    "turn": "its turn",
}


_OUTSIDE = ("worker", "pause", "grammar", "input")


class Waiter(NamedTuple):
    """A request that can't be scheduled now. `needed_blocks` for all its tokens, those in flight too; `held_blocks` it has already."""

    request_id: str
    status: str
    reason: WaitReason
    needed_blocks: int
    held_blocks: int


class StallReport(NamedTuple):
    """Everybody who waits, in the order in which they are served, and everybody who holds blocks."""

    num_blocks: int
    num_free: int
    num_fenced: int
    waiters: list[Waiter]
    holders: list[tuple[str, int]]

    @property
    def is_wedged(self) -> bool:
        """Asked with nothing in flight and nothing schedulable: somebody waits, and not for somebody outside."""
        return any(w.reason not in _OUTSIDE for w in self.waiters)

    def __str__(self) -> str:
        """One line."""
        waits = "; ".join(
            f"{w.request_id!r} waits for {WAIT_WORDS[w.reason]}"
            + (f" ({w.needed_blocks} needed)" if w.reason in ("blocks", "fence") else "")
            for w in self.waiters[:8]
        )
        holds = ", ".join(f"{request_id!r} {count}" for request_id, count in self.holders[:8])
        more = len(self.waiters) - 8
        return (
            f"{self.num_free} of {self.num_blocks} blocks free, {self.num_fenced} fenced; {waits or 'nobody waits'}"
            + (f" and {more} more" if more > 0 else "")
            + f"; held: {holds or 'none'}"
        )


def stall_report(state: State, *, heed_window: bool = True) -> StallReport:
    """Why each live request isn't scheduled in the next step; without `heed_window`, as if the window always had room."""
    pool, queues = state.pool, state.queues
    full = heed_window and len(state.window.in_flight) >= state.config.max_in_flight_steps
    trial = on_trial(state)
    waiters = [_waiter(state, r, _why_running(state, r, full)) for r in queues.running]
    blocked = False
    for request in queues.waiting:
        reason = _why_waiting(state, request, full, behind=blocked)
        if trial is not None and request.handle not in trial and reason not in _OUTSIDE:
            reason = "trial"
        blocked = blocked or reason in ("seat", "fence", "blocks")
        waiters.append(_waiter(state, request, reason))
    waiters += [_waiter(state, r, "input") for r in queues.idle]
    live = state.requests.live()
    holders = sorted(((r.request_id, len(r.block_ids)) for r in live if r.block_ids), key=lambda h: (-h[1], h[0]))
    return StallReport(pool.num_blocks, pool.num_free, pool.num_fenced, waiters, holders)


def _waiter(state: State, request: Request, reason: WaitReason) -> Waiter:
    needed = _num_missing_blocks(state, request)
    return Waiter(request.request_id, request.status, reason, needed, len(request.block_ids))


def _why_held_up(state: State, full: bool) -> WaitReason | None:
    if not state.worker_alive:
        return "worker"
    if state.paused == "all":
        return "pause"
    return "window" if full else None


def _why_running(state: State, request: Request, full: bool) -> WaitReason:
    assert request.status is RUNNING, request.request_id
    held_up = _why_held_up(state, full)
    if held_up is not None:
        return held_up
    if len(request.tokens) + request.num_output_placeholders >= request.max_total_tokens:
        return "output"
    if request.num_sampling_in_flight and (request.grammar or state.config.decode_stagger > 1):
        return "output" if request.grammar else "cadence"
    return _what_is_missing(state, request)


def _why_waiting(state: State, request: Request, full: bool, *, behind: bool) -> WaitReason:
    assert request.status is not IDLE, request.request_id
    held_up = _why_held_up(state, full)
    if request.waits_for_grammar:
        return "grammar"
    if held_up is not None:
        return held_up
    if request.num_deliverable_stale_tokens:
        return "stale_output"
    if state.paused is not None and request.status is WAITING and not request.block_ids:
        return "pause"
    if len(state.queues.running) >= state.config.max_num_seqs:
        return "seat"
    if behind:
        return "turn"
    return _what_is_missing(state, request)


def _what_is_missing(state: State, request: Request) -> WaitReason:
    if request.media and _num_missing_blocks(state, request) <= state.pool.num_free:
        return "encoder"
    return "fence" if state.pool.num_fenced else "blocks"


def _num_missing_blocks(state: State, request: Request) -> int:
    """Blocks that a request lacks for all its tokens, those in flight included."""
    end = len(request.tokens) + request.num_output_placeholders
    return max(-(-end // state.pool.block_size) - len(request.block_ids), 0)
