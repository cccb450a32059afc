"""A turn that makes no progress says so: who waits, what it needs, what is free, who holds the rest."""

from refold.journal.errors import InvariantViolation
from refold.scheduler.stall import stall_report
from refold.scheduler.state import State


def stall(state: State) -> InvariantViolation | None:
    """The report, if nothing is in flight and yet someone waits for nobody outside; call it when nothing could be scheduled.

    Admission refuses what can never fit, so with an empty window somebody can always be scheduled: this is a bug.
    """
    if state.window.in_flight or not state.worker_alive:
        return None
    report = stall_report(state)
    if not report.is_wedged:
        return None
    return InvariantViolation(
        f"no step can be scheduled with nothing in flight: {report}; this is a bug of refold: keep the journal and report it"
    )
