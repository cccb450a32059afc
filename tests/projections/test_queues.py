"""Queues against sorted lists: whatever order requests come and go in, they stand in the order of their policy."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from refold.journal.events import EngineConfig, Policy, RequestSubmitted, Sampling
from refold.projections import queues
from refold.projections.queues import Queues
from refold.projections.requests import FINISHED, IDLE, PREEMPTED, RUNNING, WAITING, Request
from tests.kit.drive import config


def arrival(handle: int, engine_config: EngineConfig, *, priority: int = 0, tenant: str = "", size: int = 4) -> Request:
    """A request that has just come."""
    event = RequestSubmitted(
        handle=handle,
        request_id=f"r{handle}",
        prompt_token_ids=[1] * size,
        sampling=Sampling(seed=0, max_tokens=4),
        arrival_ns=handle,
        priority=priority,
        tenant=tenant,
    )
    return Request(event, engine_config)


class QueuesBesideAModel(RuleBasedStateMachine):
    """The model: request -> status. Where everybody stands follows from that and from the keys."""

    def __init__(self) -> None:
        super().__init__()
        self.config = config(policy="priority")
        self.queues = Queues()
        self.status: dict[int, str] = {}
        self.requests: dict[int, Request] = {}

    @rule(priority=st.integers(-2, 2))
    def somebody_arrives(self, priority: int) -> None:
        request = arrival(len(self.requests) + 1, self.config, priority=priority)
        self.requests[request.handle] = request
        queues.arrive(self.queues, request, self.config, request.handle)
        self.status[request.handle] = WAITING

    @rule(data=st.data(), status=st.sampled_from((RUNNING, WAITING, PREEMPTED, IDLE)))
    def somebody_moves(self, data: st.DataObject, status: str) -> None:
        if self.status:
            handle = data.draw(st.sampled_from(sorted(self.status)))
            queues.leave(self.queues, self.requests[handle])
            queues.enter(self.queues, self.requests[handle], status)
            self.status[handle] = status

    @rule(data=st.data())
    def somebody_ends(self, data: st.DataObject) -> None:
        if self.status:
            handle = data.draw(st.sampled_from(sorted(self.status)))
            queues.leave(self.queues, self.requests[handle])
            del self.status[handle]

    @rule(policy=st.sampled_from(("fcfs", "priority")))
    def the_policy_changes(self, policy: Policy) -> None:
        self.config = config(policy=policy)
        queues.reorder(self.queues, self.config)

    @invariant()
    def everybody_stands_where_the_status_says_in_the_order_of_the_policy(self) -> None:
        def order(handle: int) -> tuple[int, int]:
            priority = self.requests[handle].priority if self.config.policy == "priority" else 0
            return (priority, handle)

        for queue, statuses in (
            (self.queues.waiting, (WAITING, PREEMPTED)),
            (self.queues.running, (RUNNING,)),
            (self.queues.idle, (IDLE,)),
        ):
            expected = sorted((h for h, status in self.status.items() if status in statuses), key=order)
            assert [r.handle for r in queue] == expected
            assert all(r.status == self.status[r.handle] for r in queue)


TestQueuesBesideAModel = QueuesBesideAModel.TestCase
TestQueuesBesideAModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_finished_request_has_no_queue() -> None:
    engine_config, table = config(), Queues()
    with pytest.raises(AssertionError):
        queues.enter(table, arrival(1, engine_config), FINISHED)


def test_somebody_who_is_not_there_can_not_leave() -> None:
    engine_config, table = config(), Queues()
    queues.arrive(table, arrival(1, engine_config), engine_config, 1)
    with pytest.raises((AssertionError, IndexError)):
        queues.leave(table, arrival(2, engine_config))
    assert [r.handle for r in table.waiting] == [1]


@given(
    arrivals=st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 40)), min_size=1, max_size=30),
    weights=st.dictionaries(st.sampled_from("abc"), st.integers(1, 4)),
)
@settings(max_examples=60, deadline=None)
def test_under_fair_share_a_tenants_own_requests_keep_their_order(
    arrivals: list[tuple[str, int]], weights: dict[str, int]
) -> None:
    engine_config, table = config(policy="fair_share", tenant_weights=weights), Queues()
    for handle, (tenant, size) in enumerate(arrivals, 1):
        queues.arrive(table, arrival(handle, engine_config, tenant=tenant, size=size), engine_config, handle)
    for tenant in "abc":
        own = [r.handle for r in table.waiting if r.tenant == tenant]
        assert own == sorted(own)
    keys = [r.queue_key for r in table.waiting]
    assert keys == sorted(set(keys))


def test_forgetting_what_is_past_changes_nobodys_place() -> None:
    engine_config = config(policy="fair_share")
    orders = []
    for forget in (False, True):
        table = Queues()
        for handle in range(1, 30):
            tenant = "ab"[handle % 3 == 0]
            queues.arrive(
                table, arrival(handle, engine_config, tenant=tenant, size=1 + handle % 7), engine_config, handle
            )
            if handle % 4 == 0:
                first = table.waiting[0]
                queues.leave(table, first)
                queues.enter(table, first, RUNNING)
            if forget:
                queues.forget_past(table)
        orders.append([[r.handle for r in table.running], [r.handle for r in table.waiting]])
    assert orders[0] == orders[1]
