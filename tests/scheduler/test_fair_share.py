"""Fair share: tenants are served by weight, nobody starves, nothing is saved up, and what is past is forgotten."""

from collections import Counter
from collections.abc import Iterable

import msgspec
import pytest

from refold.journal.errors import Rejected
from refold.journal.events import RequestPreempted, StepScheduled
from refold.scheduler.commands import OpenEngine
from refold.scheduler.decide import decide
from refold.scheduler.recovery import MAX_TENANT_WEIGHT
from refold.scheduler.state import State
from tests.kit.drive import Drive, config
from tests.kit.features import settle, turns
from tests.kit.sentences import all_due, all_of, is_live, name_of, names, opened, outputs, reset, victims, work


def shared(**changes: object) -> Drive:
    """One seat for all tenants: who comes in when is plain to see."""
    small = {"policy": "fair_share", "num_blocks": 64, "max_num_seqs": 1, "max_in_flight_steps": 1}
    return opened(**(small | changes))


def submit(drive: Drive, tenant: str, count: int = 1, prompt: int = 3, max_tokens: int = 2) -> list[str]:
    """Requests of a tenant, all alike if not told otherwise; returns their names."""
    known = len(drive.state.requests.handle_by_id)
    added = [f"{tenant}{known + i}" for i in range(count)]
    for name in added:
        drive.submit(name, prompt, max_tokens, tenant=tenant)
    return added


def served(drive: Drive) -> list[str]:
    """The tenants in the order in which their requests came in."""
    return [
        name_of(drive, step.handles[admission.entry]).rstrip("0123456789")
        for step in all_of(StepScheduled, drive.records)
        for admission in step.admissions
    ]


# -- weights ----------------------------------------------------------------------------------------------------------


def test_tenants_with_no_weight_named_take_turns_whoever_asked_first_or_most() -> None:
    drive = shared()
    submit(drive, "a", 12)
    submit(drive, "b", 4)
    drive.run()
    assert served(drive) == list("abababab" + "a" * 8)


@pytest.mark.parametrize(
    ("weight", "first_eight"), [(1, {"a": 4, "b": 4}), (3, {"a": 6, "b": 2}), (7, {"a": 7, "b": 1})]
)
def test_each_is_served_by_its_weight(weight: int, first_eight: dict[str, int]) -> None:
    drive = shared(tenant_weights={"a": weight})
    submit(drive, "b", 10)
    submit(drive, "a", 10)
    drive.run()
    assert Counter(served(drive)[:8]) == first_eight
    assert outputs(drive) == all_due(drive)


def test_what_counts_is_the_work_and_not_the_number_of_requests() -> None:
    """A request of `a` may cost four times one of `b`: 20 tokens, prompt and outputs, to 5."""
    drive = shared()
    submit(drive, "a", 4, prompt=10, max_tokens=10)
    submit(drive, "b", 16, prompt=3, max_tokens=2)
    drive.run()
    assert [served(drive)[5 * i : 5 * i + 5].count("a") for i in range(4)] == [1, 1, 1, 1]


def test_a_tenants_own_requests_keep_their_order() -> None:
    drive = shared(max_num_seqs=4)
    names_of_a = submit(drive, "a", 3, max_tokens=9) + submit(drive, "a", 3, max_tokens=1)
    submit(drive, "b", 5)
    settle(drive)
    admitted = [
        name_of(drive, step.handles[a.entry]) for step in all_of(StepScheduled, drive.records) for a in step.admissions
    ]
    assert [name for name in admitted if name in names_of_a] == names_of_a


def test_three_tenants_with_backlogs_have_their_shares_of_all_work() -> None:
    drive = shared(tenant_weights={"a": 1, "b": 2, "c": 5}, max_num_seqs=2, max_in_flight_steps=2)
    for tenant in "abc":
        submit(drive, tenant, 40)
    while len(served(drive)) < 64:
        if not drive.schedule():
            drive.complete()
    share = Counter(served(drive)[:64])
    assert abs(share["a"] - 8) <= 1
    assert abs(share["b"] - 16) <= 1
    assert abs(share["c"] - 40) <= 1


# -- nobody starves ---------------------------------------------------------------------------------------------------


def served_within(drive: Drive, name: str, arrivals: Iterable[list[str]], most: int) -> bool:
    """Whether a request ends within so many turns, each with its arrivals."""
    for _ in range(most):
        next(iter(arrivals), None)
        drive.schedule()
        if drive.orders:
            drive.complete()
        if not is_live(drive, name):
            return True
    return False


def test_a_small_tenant_is_served_beside_one_that_never_lets_up() -> None:
    drive = shared(tenant_weights={"a": 50})
    submit(drive, "a", 20)
    [small] = submit(drive, "b")
    flood = (submit(drive, "a") for _ in range(10_000))
    assert served_within(drive, small, flood, 200)


def test_an_old_tenant_is_served_however_many_new_ones_come() -> None:
    drive = shared()
    [_, second] = submit(drive, "a", 2)
    newcomers = (submit(drive, f"t{i}x") if i % 2 else [] for i in range(10_000))
    assert served_within(drive, second, newcomers, 40)


def test_a_long_request_is_served_beside_short_ones_that_never_let_up() -> None:
    drive = shared()
    [long] = submit(drive, "a", prompt=100, max_tokens=20)
    shorts = (submit(drive, f"t{i % 3}x") for i in range(10_000))
    assert served_within(drive, long, shorts, 400)


def test_under_pressure_whoever_is_furthest_ahead_of_its_share_gives_way() -> None:
    drive = shared(max_num_seqs=4, num_blocks=6, max_num_batched_tokens=64)
    submit(drive, "a", 2, prompt=8, max_tokens=9)
    submit(drive, "b", 1, prompt=8, max_tokens=9)
    events = [event for turn in turns(drive) for event in turn]
    assert victims(drive, events)[0] == "a1", "the second of its tenant, though it arrived before b's first"
    assert outputs(drive) == all_due(drive)


# -- nothing is saved up ----------------------------------------------------------------------------------------------


def test_a_tenant_that_was_away_has_nothing_saved_up() -> None:
    drive = shared()
    submit(drive, "b", 1)
    submit(drive, "a", 30)
    while served(drive).count("a") < 10:
        if not drive.schedule():
            drive.complete()
    submit(drive, "b", 10)
    already = len(served(drive))
    drive.run()
    assert served(drive)[already : already + 12].count("b") == 6, "half from now on, and no more to make up for"


def test_nor_has_a_busy_one_a_debt_from_when_nobody_else_was_there() -> None:
    drive = shared()
    submit(drive, "a", 20)
    drive.run()
    submit(drive, "a", 6)
    submit(drive, "b", 6)
    drive.run()
    assert served(drive)[20:] == list("ab" * 6)


def test_what_was_aborted_while_it_waited_counts_until_it_would_have_been_served() -> None:
    drive = shared()
    names_of_a = submit(drive, "a", 4)
    for name in names_of_a[1:]:
        drive.abort(name)
    submit(drive, "b", 3)
    submit(drive, "a", 1)
    drive.run()
    assert served(drive) == list("abbba")


# -- what is remembered -----------------------------------------------------------------------------------------------


def test_tenants_that_are_past_are_forgotten() -> None:
    drive = shared()
    for i in range(200):
        submit(drive, f"t{i}x")
        drive.run()
        assert len(drive.state.queues.tenant_tags) <= 2
    assert drive.state.queues.virtual_now > 0


def test_no_more_are_remembered_than_have_something_ahead() -> None:
    """Newcomers all the time, and somebody always waits."""
    drive = shared()
    most = 0
    for i in range(300):
        submit(drive, f"t{i}x")
        if i >= 5:
            drive.schedule()
            drive.complete()
            drive.schedule()
            drive.complete()
        most = max(most, len(drive.state.queues.tenant_tags))
    assert most <= 8
    assert len(drive.state.queues.waiting) >= 4


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_under_another_policy_nothing_is_remembered_of_tenants(policy: str) -> None:
    drive = shared(policy=policy)
    submit(drive, "a", 3)
    submit(drive, "b", 1)
    assert drive.state.queues.tenant_tags == {}
    drive.run()
    assert served(drive) == list("aaab")


# -- other lives ------------------------------------------------------------------------------------------------------


def test_reopened_with_a_share_for_each_those_who_live_are_put_in_order_anew() -> None:
    drive = shared(policy="fcfs")
    submit(drive, "a", 4)
    submit(drive, "b", 2)
    assert [name[0] for name in names(drive.state.queues.waiting)] == list("aaaabb")
    drive.open(msgspec.structs.replace(drive.config, policy="fair_share"))
    assert [name[0] for name in names(drive.state.queues.waiting)] == list("ababaa")
    drive.run()
    assert served(drive) == list("ababaa")


def test_reopened_without_they_are_in_the_order_of_their_arrival() -> None:
    drive = shared()
    submit(drive, "a", 4)
    submit(drive, "b", 2)
    drive.open(msgspec.structs.replace(drive.config, policy="fcfs"))
    assert [name[0] for name in names(drive.state.queues.waiting)] == list("aaaabb")
    assert (drive.state.queues.tenant_tags, drive.state.queues.virtual_now) == ({}, 0)
    drive.run()
    assert outputs(drive) == all_due(drive)


def test_reopened_with_other_weights_the_new_ones_count() -> None:
    drive = shared(tenant_weights={"a": 4})
    submit(drive, "b", 8)
    submit(drive, "a", 8)
    drive.open(msgspec.structs.replace(drive.config, tenant_weights={"b": 4}))
    drive.run()
    assert Counter(served(drive)[:10]) == {"b": 8, "a": 2}


def test_a_preemption_costs_a_tenant_nothing_and_brings_it_nothing() -> None:
    drive = shared()
    submit(drive, "a", 3)
    submit(drive, "b", 3)
    drive.schedule()
    before = dict(drive.state.queues.tenant_tags)
    drive.complete()
    reset(drive)
    assert all_of(RequestPreempted, drive.records)
    assert drive.state.queues.tenant_tags == before
    assert list(work(drive, drive.schedule())) == ["a0"], "where it was"
    drive.run()
    assert served(drive)[1:] == list("ababab")


@pytest.mark.parametrize(
    ("weight", "is_one"), [(0, False), (1, True), (MAX_TENANT_WEIGHT, True), (MAX_TENANT_WEIGHT + 1, False)]
)
def test_a_weight_is_at_least_one_and_has_an_end(weight: int, is_one: bool) -> None:
    opening = OpenEngine(
        engine_epoch=1,
        refold_version="test",
        root_seed=0,
        config=config(policy="fair_share", tenant_weights={"a": weight}),
    )
    if is_one:
        assert decide(State(), opening)
        drive = shared(tenant_weights={"a": weight})
        submit(drive, "a", 2)
        submit(drive, "b", 2)
        drive.run()
        assert outputs(drive) == all_due(drive)
    else:
        with pytest.raises(Rejected, match=f"tenant 'a' has weight {weight}: give 1 to {MAX_TENANT_WEIGHT}"):
            decide(State(), opening)
