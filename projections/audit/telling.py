"""Events that change no row of the read model: each is told in `audit_events`, and that is all."""

from collections.abc import Callable
from typing import Any

from refold.journal.events import LogitsRecorded, LogprobsDelivered
from refold.projections.audit.now import Now


def of_request(detail: Callable[[Any], str]) -> Callable[[Now, Any], None]:
    """An event that names one request and changes no row of it."""

    def tell(now: Now, event: Any) -> None:
        now.story.num_request_events += 1
        now.tell(type(event).__name__, event.handle, detail(event))

    return tell


def of_step(now: Now, event: LogprobsDelivered | LogitsRecorded) -> None:
    """An event that names many requests and changes no row of them: one row tells of it."""
    now.story.num_request_events += len(event.handles)
    now.tell(type(event).__name__, 0, "", step=event.step, num=len(event.handles))


def of_engine(detail: Callable[[Any], str]) -> Callable[[Now, Any], None]:
    """An event that names no request."""

    def tell(now: Now, event: Any) -> None:
        now.tell(type(event).__name__, 0, detail(event))

    return tell
