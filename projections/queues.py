"""Queues: who runs and who waits, both in one order.

A policy is a key: small goes first. The waiting queue is served from its small end; the running batch is planned in the
same order, and the victim of a preemption is its large end. So a victim always comes later in the plan than the request
that needs its blocks: it can't have been scheduled in the same step, and there is no same-step rollback to get wrong.
The request with the smallest key is never preempted for another, so there is always one that makes progress.

Which queue a live request is in follows from its status (law L6). Membership changes in this module only.
"""

from bisect import bisect_left
from collections.abc import Callable
from operator import attrgetter

from refold.journal.events import Policy
from refold.projections.requests import FINISHED, PREEMPTED, RUNNING, WAITING, Request

QueueKey = tuple[int, int]

QUEUE_KEYS: dict[Policy, Callable[[Request], QueueKey]] = {
    "fcfs": lambda r: (0, r.handle),
    "priority": lambda r: (r.priority, r.handle),
}
"""Policy -> key. The handle is the order of arrival and makes the order total."""

_by_key = attrgetter("queue_key")


class Queues:
    """`waiting` and `running`, each sorted by `queue_key`."""

    __slots__ = ("running", "waiting")

    def __init__(self) -> None:
        self.waiting: list[Request] = []
        self.running: list[Request] = []


def enter(queues: Queues, request: Request, status: str) -> None:
    """Put a request that is in no queue where its status belongs."""
    request.status = status
    queue = _queue_of(queues, status)
    queue.insert(bisect_left(queue, request.queue_key, key=_by_key), request)


def leave(queues: Queues, request: Request) -> None:
    """Take a request out of the queue that it is in."""
    queue = _queue_of(queues, request.status)
    index = bisect_left(queue, request.queue_key, key=_by_key)
    assert queue[index] is request, request.request_id
    del queue[index]


def reorder(queues: Queues, policy: Policy) -> None:
    """Sort both queues anew, under another policy."""
    key = QUEUE_KEYS[policy]
    for queue in (queues.waiting, queues.running):
        for request in queue:
            request.queue_key = key(request)
        queue.sort(key=_by_key)


def _queue_of(queues: Queues, status: str) -> list[Request]:
    assert status is not FINISHED, "a finished request is in no queue"
    assert status in (WAITING, PREEMPTED, RUNNING), status
    return queues.running if status is RUNNING else queues.waiting
