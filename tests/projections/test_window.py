"""The window and the counters: kept one by one, they are what the entries in flight add up to, whatever happens."""

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from refold.journal.events import RequestSubmitted, Sampling, StalePolicy, StepScheduled
from refold.projections import counters, requests, steps
from refold.projections.requests import FINISHED, Request, RequestTable
from refold.projections.steps import Window
from tests.kit.drive import config

CONFIG = config()


def submitted(table: RequestTable, **changes: object) -> Request:
    """One more request of the table's."""
    fields: dict[str, object] = {
        "handle": table.next_handle,
        "request_id": f"r{table.next_handle}",
        "prompt_token_ids": list(range(30)),
        "sampling": Sampling(seed=0, max_tokens=100),
        "arrival_ns": 0,
    }
    return requests.submit(table, RequestSubmitted(**(fields | changes)), CONFIG)  # type: ignore[arg-type]


class Entry:
    """The model's entry in flight: how many tokens, does it sample, and what has become of its epoch."""

    def __init__(self, handle: int, n: int, *, samples: bool) -> None:
        self.handle = handle
        self.n = n
        self.samples = samples
        self.fate: StalePolicy | None = None


class CountersBesideAModel(RuleBasedStateMachine):
    """The model keeps entries and adds them up; nothing is ever subtracted in it."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.window = RequestTable(), Window()
        self.steps: list[list[Entry]] = []
        self.all = [submitted(self.table) for _ in range(4)]

    def _live(self) -> list[Request]:
        return [r for r in self.all if r.status is not FINISHED]

    @precondition(lambda self: self._live() and len(self.steps) < 6)
    @rule(data=st.data())
    def a_step_is_scheduled(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(self._live()), unique=True, min_size=1))
        wanted = [max(len(r.tokens) - r.num_computed_tokens, 1) for r in chosen]
        ns = [data.draw(st.sampled_from((n, data.draw(st.integers(1, min(n, 9)))))) for n in wanted]
        chunks = [i for i, (n, most) in enumerate(zip(ns, wanted, strict=True)) if n < most]
        event = StepScheduled(
            step=self.window.next_step,
            handles=[r.handle for r in chosen],
            num_tokens=ns,
            first_positions=[r.num_computed_tokens for r in chosen],
            chunk_entries=chunks,
        )
        step = steps.open_step(self.window, event, self.table.by_handle)
        assert step.requests == chosen
        assert step.epochs == [r.epoch for r in chosen]
        samples = [i not in chunks for i in range(len(chosen))]
        counters.schedule(event.step, chosen, ns, event.first_positions, samples, [0] * len(chosen))
        self.steps.append(
            [Entry(r.handle, n, samples=i not in chunks) for i, (r, n) in enumerate(zip(chosen, ns, strict=True))]
        )

    @precondition(lambda self: self.steps)
    @rule()
    def the_oldest_step_comes_back(self) -> None:
        step, entries = self.window.in_flight[0], self.steps.pop(0)
        assert {i: e.fate for i, e in enumerate(entries) if e.fate} == step.stale
        current = [i for i in range(len(entries)) if i not in step.stale]
        settled = [step.requests[i] for i in current]
        counts = [int(entries[i].samples) for i in current]
        ns = [entries[i].n for i in current]
        counters.settle(settled, ns, [0] * len(current), counts, [7] * sum(counts), 0)
        if current:
            step.delivered = True
            assert steps.resolve(self.window, step, len(current)) is not bool(step.stale)
        for i, policy in sorted(step.stale.items()):
            counters.settle_stale(step.requests[i], entries[i].n, policy == "deliver")
            requests.forget_if_drained(self.table, step.requests[i])
        if step.stale:
            assert steps.resolve(self.window, step, len(step.stale))
        assert step not in self.window.in_flight

    @precondition(lambda self: self._live())
    @rule(data=st.data(), policy=st.sampled_from(("deliver", "drop")))
    def somebodys_epoch_ends(self, data: st.DataObject, policy: StalePolicy) -> None:
        self._bump(data.draw(st.sampled_from(self._live())), policy)

    @precondition(lambda self: self._live())
    @rule(data=st.data())
    def somebody_finishes(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self._live()))
        self._bump(request, "drop")
        requests.finish(self.table, request, "abort")

    def _bump(self, request: Request, policy: StalePolicy) -> None:
        deliverable, last = steps.mark_stale(self.window, request, policy)
        assert last == steps.last_step_of(self.window, request)
        counters.raise_epoch(request, deliverable)
        requests.forget_computed(request)
        for entries in self.steps:
            for entry in entries:
                if entry.handle == request.handle and entry.fate != "drop":
                    entry.fate = policy

    @rule()
    def the_worker_is_lost(self) -> None:
        self.window.in_flight.clear()
        self.steps.clear()
        for request in list(self.table.by_handle.values()):
            counters.lose_in_flight(request)
            requests.forget_computed(request)
            counters.raise_epoch(request, 0)
            requests.forget_if_drained(self.table, request)

    @invariant()
    def the_counters_are_the_sums(self) -> None:
        in_flight = [entry for entries in self.steps for entry in entries]
        for request in self.all:
            mine = [entry for entry in in_flight if entry.handle == request.handle]
            fresh = [entry for entry in mine if entry.fate is None]
            assert request.num_in_flight_tokens == sum(e.n for e in mine)
            assert request.num_stale_output_tokens == sum(e.n for e in mine if e.fate)
            assert request.num_deliverable_stale_tokens == sum(e.n for e in mine if e.fate == "deliver")
            assert request.num_output_placeholders == request.num_sampling_in_flight == sum(e.samples for e in fresh)
            assert (request.handle in self.table.by_handle) is (request.status is not FINISHED or bool(mine))

    @invariant()
    def the_last_step_of_a_request_is_found(self) -> None:
        first = self.window.next_step - len(self.steps)
        for request in self._live():
            mine = [first + i for i, entries in enumerate(self.steps) if request.handle in [e.handle for e in entries]]
            assert steps.last_step_of(self.window, request) == (mine[-1] if mine else None)


TestCountersBesideAModel = CountersBesideAModel.TestCase
TestCountersBesideAModel.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


# -- the last batch --------------------------------------------------------------------------------------------------


def came_back(table: RequestTable, window: Window) -> steps.InFlightStep:
    """One step of all who are in the table, which came back: nothing is in flight."""
    requests_, event = list(table.by_handle.values()), of_all(table, window)
    step = steps.open_step(window, event, table.by_handle)
    samples, drafts, tokens = [True] * len(requests_), [0] * len(requests_), [7] * len(requests_)
    counters.schedule(event.step, requests_, event.num_tokens, event.first_positions, samples, drafts)
    counters.settle(requests_, event.num_tokens, drafts, [1] * len(requests_), tokens, 0)
    assert steps.resolve(window, step, len(requests_))
    return step


def of_all(table: RequestTable, window: Window) -> StepScheduled:
    known = table.by_handle.values()
    num_tokens = [len(r.tokens) - r.num_computed_tokens for r in known]
    firsts = [r.num_computed_tokens for r in known]
    return StepScheduled(
        step=window.next_step, handles=list(table.by_handle), num_tokens=num_tokens, first_positions=firsts
    )


def test_who_goes_on_after_a_step_came_back_shares_its_batch() -> None:
    table, window = RequestTable(), Window()
    submitted(table), submitted(table)
    first = came_back(table, window)
    assert came_back(table, window).batch is first.batch


@pytest.mark.parametrize("whose", [0, 1])
def test_who_left_in_between_has_a_new_batch(whose: int) -> None:
    table, window = RequestTable(), Window()
    both = [submitted(table), submitted(table)]
    first = came_back(table, window)
    counters.raise_epoch(both[whose], 0)
    after = came_back(table, window)
    assert after.batch is not first.batch
    assert after.epochs == [request.epoch for request in both]


# -- what must not be ------------------------------------------------------------------------------------------------


def test_steps_are_numbered_without_a_gap() -> None:
    table, window = RequestTable(), Window()
    submitted(table)
    event = StepScheduled(step=1, handles=[1], num_tokens=[3], first_positions=[0])
    with pytest.raises(AssertionError):
        steps.open_step(window, event, table.by_handle)


def test_a_step_has_an_entry() -> None:
    with pytest.raises(AssertionError):
        steps.open_step(Window(), StepScheduled(step=0, handles=[], num_tokens=[], first_positions=[]), {})


def test_what_was_never_scheduled_does_not_come_back() -> None:
    request = submitted(RequestTable())
    with pytest.raises(AssertionError):
        counters.settle([request], [1], [0], [0], [], 0)
    with pytest.raises(AssertionError):
        counters.settle([request], [1], [0], [1], [7], 0)
    request = submitted(RequestTable())
    with pytest.raises(AssertionError):
        counters.settle_stale(request, 1, True)


def test_handles_are_given_in_order() -> None:
    with pytest.raises(AssertionError):
        submitted(RequestTable(), handle=7)


def test_a_request_finishes_once() -> None:
    table = RequestTable()
    request = submitted(table)
    requests.finish(table, request, "stop")
    with pytest.raises(AssertionError):
        requests.finish(table, request, "stop")


def test_ids_of_finished_requests_are_remembered_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "REMEMBERED_FINISHED_IDS", 3)
    table = RequestTable()
    for _ in range(5):
        requests.finish(table, submitted(table), "stop")
    assert list(table.handle_by_id) == ["r3", "r4", "r5"] == list(table.finished_ids)
    assert table.by_handle == {}
