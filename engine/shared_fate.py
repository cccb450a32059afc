"""A worker in the engine's own process shares its fate: what kills the one kills the other, and the journal can't tell by whom.

An engine that ended without a word may have been killed by its worker's computation, or by whoever pulled the plug. From the journal
both look alike, and as computing runs ahead of the disk, the deadly step need not even be there. So nobody is suspected: to convict a
request because an operator, or a supervisor that lost patience, killed three engines over it would break what a journal is for. A
request that kills its process is not found out here. Whoever opens the next engine with such a worker is told which requests
it may be, and where they would be found.
"""

from refold.engine.logs import get_logger
from refold.scheduler.state import State
from refold.scheduler.trials import suspects_of_loss

_MAX_NAMED = 8


def warn_if_shared(state: State, *, was_closed: bool) -> None:
    """Warn if the engine before this one died over requests. `state` is what it left: its last step, if that is known."""
    handles = suspects_of_loss(state) or [request.handle for request in state.requests.live()]
    if was_closed or not handles:
        return
    ids = [state.requests.by_handle[handle].request_id for handle in handles]
    get_logger().warning(
        "worker_shares_the_engines_fate",
        reason="the last engine ended without a word. If its worker was in its own process and one of these requests killed it there, "
        "this engine ends alike: its worker is in its own process too, where nobody finds out",
        hint="if it ends again, open the journal with worker='process' (`refold run --worker process`): there a request that kills "
        "its workers is found and ends with an error. A worker of your own (make_worker) can speak to a process as "
        "refold.gpu.process.ProcessWorker does",
        requests=ids[:_MAX_NAMED],
        num_requests=len(ids),
    )
