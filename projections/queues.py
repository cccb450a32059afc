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

from refold.journal.events import EngineConfig, Policy
from refold.projections.requests import FINISHED, IDLE, PREEMPTED, RUNNING, WAITING, Request

_SHARE = 1 << 20


class Queues:
    """`waiting` and `running`, each sorted by `queue_key`, and `idle`: sessions between two chunks of input.

    Under `fair_share`, `tenant_tags` holds the tag at which a tenant's last request finishes and its next one starts, and
    `virtual_now` the largest of the requests admitted (self-clocked fair queueing: Golestani, INFOCOM 1994). A tenant that
    was away starts at now: it saves nothing up, and a busy one can't push it back. Each admission moves now on, so that
    whoever waits is reached, however many tenants come, and what is past can be forgotten.
    """

    __slots__ = ("idle", "num_turns", "running", "tenant_tags", "virtual_now", "waiting")

    def __init__(self) -> None:
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.idle: list[Request] = []
        self.tenant_tags: dict[str, int] = {}
        self.virtual_now = 0
        self.num_turns = 0


def _fcfs_key(queues: Queues, request: Request, config: EngineConfig) -> int:  # noqa: ARG001
    return 0


def _priority_key(queues: Queues, request: Request, config: EngineConfig) -> int:  # noqa: ARG001
    return request.priority


def _fair_share_key(queues: Queues, request: Request, config: EngineConfig) -> int:
    """The finish tag: where the tenant's last request finishes, and on by what this one may cost over the tenant's weight."""
    start = max(queues.virtual_now, queues.tenant_tags.get(request.tenant, 0))
    cost = (
        (request.max_total_tokens - request.num_computed_tokens)
        * _SHARE
        // config.tenant_weights.get(request.tenant, 1)
    )
    queues.tenant_tags[request.tenant] = start + cost
    return start + cost


QUEUE_KEYS: dict[Policy, Callable[[Queues, Request, EngineConfig], int]] = {
    "fcfs": _fcfs_key,
    "priority": _priority_key,
    "fair_share": _fair_share_key,
}
"""Policy -> first part of the key. The second is the order of arrival, and makes the order total."""

_by_key = attrgetter("queue_key")
_QUEUE_NAMES = {RUNNING: "running", WAITING: "waiting", PREEMPTED: "waiting", IDLE: "idle"}


def arrive(queues: Queues, request: Request, config: EngineConfig, last_handle: int) -> None:
    """Give a request that is in no queue its place in the order, and put it in the waiting queue.

    A session comes anew with every turn: it goes behind whoever has come meanwhile, or one that always has its next chunk
    ready would keep its seat for ever. The arrivals so far are the handles given and the turns after a first.
    """
    queues.num_turns += request.num_earlier_outputs > 0
    request.queue_key = (QUEUE_KEYS[config.policy](queues, request, config), last_handle + queues.num_turns)
    enter(queues, request, WAITING)


def enter(queues: Queues, request: Request, status: str) -> None:
    """Put a request that is in no queue where its status belongs."""
    request.status = status
    queue = _queue_of(queues, status)
    if not queue or queue[-1].queue_key < request.queue_key:
        queue.append(request)
    else:
        queue.insert(bisect_left(queue, request.queue_key, key=_by_key), request)
    if status is RUNNING and request.queue_key[0] > queues.virtual_now:
        queues.virtual_now = request.queue_key[0]


def leave(queues: Queues, request: Request) -> None:
    """Take a request out of the queue that it is in."""
    queue = _queue_of(queues, request.status)
    index = 0 if queue[0] is request else bisect_left(queue, request.queue_key, key=_by_key)
    assert queue[index] is request, request.request_id
    del queue[index]


def reorder(queues: Queues, config: EngineConfig) -> None:
    """Give every request its place anew, in order of arrival, under another configuration."""
    queues.tenant_tags.clear()
    queues.virtual_now = 0
    for request in sorted((*queues.waiting, *queues.running, *queues.idle), key=lambda request: request.queue_key[1]):
        request.queue_key = (QUEUE_KEYS[config.policy](queues, request, config), request.queue_key[1])
    for queue in (queues.waiting, queues.running, queues.idle):
        queue.sort(key=_by_key)


def forget_past(queues: Queues) -> None:
    """Drop the tags of tenants that have nothing ahead of now: they would start at now anyway."""
    past = [tenant for tenant, tag in queues.tenant_tags.items() if tag <= queues.virtual_now]
    for tenant in past:
        del queues.tenant_tags[tenant]


def _queue_of(queues: Queues, status: str) -> list[Request]:
    if status is RUNNING:
        return queues.running
    assert status is not FINISHED, "a finished request is in no queue"
    queue: list[Request] = getattr(queues, _QUEUE_NAMES[status])
    return queue
