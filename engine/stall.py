"""A turn that makes no progress says so: who waits, what it needs, what is free, who holds the rest."""

from refold.journal.errors import InvariantViolation
from refold.scheduler.state import State

_MAX_NAMED = 8


def stall(state: State) -> InvariantViolation | None:
    """The report, if nothing is in flight and yet someone waits; call it when nothing could be scheduled.

    Admission refuses what can never fit, so with an empty window somebody can always be scheduled: this is a bug.
    """
    queues, pool = state.queues, state.pool
    if state.window.in_flight or not state.worker_alive or not (queues.running or queues.waiting):
        return None
    waiters = [
        f"{request.request_id!r} needs {-(-len(request.tokens) // pool.block_size) - len(request.block_ids)} blocks"
        for request in queues.waiting[:_MAX_NAMED]
    ]
    holders = [f"{request.request_id!r} holds {len(request.block_ids)}" for request in queues.running[:_MAX_NAMED]]
    return InvariantViolation(
        f"no step can be scheduled with nothing in flight: {pool.num_free} of {pool.num_blocks} blocks are free; "
        f"{len(queues.waiting)} wait ({'; '.join(waiters)}); {len(queues.running)} run ({'; '.join(holders)}); "
        "this is a bug of refold: keep the journal and report it"
    )
