"""Each law can be broken, and then it is that law that speaks. A law that can't fail is no law."""

from collections.abc import Callable
from functools import cache
from typing import Any

import msgspec
import pytest

from refold.journal.errors import InvariantViolation
from refold.journal.events import (
    Admission,
    Event,
    OutputDelivered,
    RequestFinished,
    RequestPreempted,
    RequestSubmitted,
    StaleOutputConsumed,
    StateDigest,
    StepScheduled,
    WorkerLost,
)
from refold.projections.requests import FINISHED, RUNNING, WAITING
from refold.scheduler.commands import LoseWorker, RecordDigest, StartWorker
from refold.scheduler.fold import fold
from refold.scheduler.lawbook import LawBook
from refold.scheduler.laws import LAWS, check_state
from refold.scheduler.state import State
from tests.kit.drive import Drive
from tests.kit.sentences import fill, named, opened, reset, under_pressure


def law_of(violation: InvariantViolation) -> str:
    """The law that a violation names. Its text is there too, on one line."""
    law, _, rest = str(violation).partition(" ")
    assert rest.startswith(f"broken ({LAWS[law]}): ")
    assert "\n" not in str(violation)
    return law


# -- states -----------------------------------------------------------------------------------------------------------


def busy() -> Drive:
    """`a` runs and has a step in flight, `b` was preempted and has stale output in flight, `c` waits."""
    drive = under_pressure()
    drive.submit("c", 3)
    drive.schedule()
    check_state(drive.state)
    return drive


def shared() -> Drive:
    """`a` and `b` run and share a block; a cached block and blank ones are free."""
    drive = opened(num_blocks=16, max_num_batched_tokens=32)
    drive.submit("earlier", 5, max_tokens=1)
    drive.run()
    drive.submit("a", list(range(6)))
    drive.submit("b", list(range(6)))
    drive.schedule()
    assert named(drive, "a").block_ids[0] == named(drive, "b").block_ids[0]
    check_state(drive.state)
    return drive


def quiet() -> Drive:
    """Everybody has ended, nothing is in flight."""
    drive = opened()
    drive.submit("a", 6, max_tokens=2)
    drive.run()
    check_state(drive.state)
    return drive


def _counter(name: str, by: int) -> Callable[[Drive], None]:
    def change(drive: Drive) -> None:
        request = named(drive, "a")
        setattr(request, name, getattr(request, name) + by)

    return change


def _unknown_handle(drive: Drive) -> None:
    del drive.state.requests.by_handle[named(drive, "a").handle]


def _forgotten_mark(drive: Drive) -> None:
    drive.state.window.in_flight[0].stale.clear()


def _mark_of_a_current_entry(drive: Drive) -> None:
    drive.state.window.in_flight[0].stale[0] = "drop"


def _another_policy(drive: Drive) -> None:
    drive.state.window.in_flight[0].stale[1] = "drop"


def _count_of_owners(drive: Drive) -> None:
    drive.state.pool.counts[named(drive, "a").block_ids[0]] += 1


def _holders_of_a_run(drive: Drive) -> None:
    (run,) = drive.state.pool.runs.values()
    run.num_holders += 1


def _run_of_another(drive: Drive) -> None:
    a, b = named(drive, "a"), named(drive, "b")
    a.run, b.run = b.run, None
    a.block_ids = a.block_ids[::-1]


def _run_forgotten(drive: Drive) -> None:
    drive.state.pool.runs.clear()


def _owned_and_free(drive: Drive) -> None:
    drive.state.pool.free_blank[named(drive, "a").block_ids[-1]] = None


def _nowhere(drive: Drive) -> None:
    drive.state.pool.free_blank.popitem()


def _fenced_twice(drive: Drive) -> None:
    pool = drive.state.pool
    pool.fences.append((1, list(pool.fences[0][1])))
    pool.num_fenced *= 2


def _count_of_fenced(drive: Drive) -> None:
    drive.state.pool.num_fenced += 1


def _shared_and_bare(drive: Drive) -> None:
    """The second request shares the first's last block, which is neither full nor hashed."""
    pool, bare = drive.state.pool, named(drive, "a").block_ids[-1]
    mine = named(drive, "b").block_ids.pop()
    pool.counts[mine] = 0
    pool.free_blank[mine] = None
    named(drive, "b").block_ids.append(bare)
    pool.counts[bare] += 1


def _blank_among_the_cached(drive: Drive) -> None:
    pool = drive.state.pool
    block, _ = pool.free_blank.popitem()
    pool.free_cached[block] = None


def _cached_among_the_blank(drive: Drive) -> None:
    pool = drive.state.pool
    block, _ = pool.free_cached.popitem()
    pool.free_blank[block] = None


def _hash_of_another_block(drive: Drive) -> None:
    pool = drive.state.pool
    content_hash = next(iter(pool.block_by_hash))
    pool.block_by_hash[content_hash] = named(drive, "a").block_ids[-1]


def _hash_not_found(drive: Drive) -> None:
    drive.state.pool.block_by_hash.popitem()


def _in_no_queue(drive: Drive) -> None:
    drive.state.queues.running.clear()


def _in_two_queues(drive: Drive) -> None:
    drive.state.queues.waiting.append(named(drive, "c"))


def _wrong_queue(drive: Drive) -> None:
    named(drive, "a").status = WAITING


def _out_of_order(drive: Drive) -> None:
    drive.state.queues.waiting.reverse()


def _not_in_the_table(drive: Drive) -> None:
    c = named(drive, "c")
    del drive.state.requests.by_handle[c.handle]


def _computed_while_preempted(drive: Drive) -> None:
    named(drive, "b").num_computed_tokens = 1


def _drafts_while_preempted(drive: Drive) -> None:
    named(drive, "b").drafts = [1]


def _blocks_while_waiting(drive: Drive) -> None:
    pool, block = drive.state.pool, named(drive, "a").block_ids.pop()
    assert pool.counts[block] == 1
    named(drive, "c").block_ids.append(block)


def _one_seat(drive: Drive) -> None:
    drive.state.config = msgspec.structs.replace(drive.state.config, max_num_seqs=1)


def _overrun(drive: Drive) -> None:
    request = named(drive, "a")
    request.max_total_tokens = len(request.tokens) + request.num_output_placeholders - 1


def _longer_than_the_model(drive: Drive) -> None:
    drive.state.config = msgspec.structs.replace(drive.state.config, max_model_len=6)


def _kept_after_its_end(drive: Drive) -> None:
    request = named(drive, "c")
    drive.state.queues.waiting.remove(request)
    request.status = FINISHED


def _fence_that_never_falls(drive: Drive) -> None:
    pool = drive.state.pool
    block, _ = pool.free_blank.popitem()
    pool.fences.append((99, [block]))
    pool.num_fenced += 1


def _embeddings_counted(drive: Drive) -> None:
    drive.state.encoder.used += 1


def _suspicion_that_stays(drive: Drive) -> None:
    drive.state.suspicion.num_losses[1] = 1


def _hash_missing(drive: Drive) -> None:
    named(drive, "a").block_hashes.pop()


def _plain_for_ever(drive: Drive) -> None:
    named(drive, "a").plain_until = 1 << 20


STATES: list[tuple[str, Callable[[], Drive], Callable[[Drive], None]]] = [
    ("L1", busy, _unknown_handle),
    ("L2", busy, _counter("num_prompt_tokens_in_flight", 1)),
    ("L2", busy, _counter("num_prompt_tokens_in_flight", -8)),
    ("L2", busy, _counter("num_stale_output_tokens", 1)),
    ("L2", busy, _counter("num_deliverable_stale_tokens", 1)),
    ("L2", busy, _counter("num_computed_tokens", 1)),
    ("L2", busy, _counter("num_computed_tokens", -1)),
    ("L2", busy, _counter("num_drafts_in_flight", 1)),
    ("L2", busy, _counter("epoch", 1)),
    ("L2", busy, _forgotten_mark),
    ("L2", busy, _mark_of_a_current_entry),
    ("L2", busy, _another_policy),
    ("L3", busy, _count_of_owners),
    ("L3", shared, _holders_of_a_run),
    ("L3", shared, _run_of_another),
    ("L3", shared, _run_forgotten),
    ("L3", busy, _owned_and_free),
    ("L3", quiet, _nowhere),
    ("L3", busy, _fenced_twice),
    ("L3", busy, _count_of_fenced),
    ("L3", shared, _shared_and_bare),
    ("L3", shared, _blank_among_the_cached),
    ("L3", shared, _cached_among_the_blank),
    ("L4", shared, _hash_of_another_block),
    ("L4", shared, _hash_not_found),
    ("L6", busy, _in_no_queue),
    ("L6", busy, _in_two_queues),
    ("L6", busy, _wrong_queue),
    ("L6", busy, _out_of_order),
    ("L6", busy, _not_in_the_table),
    ("L7", busy, _computed_while_preempted),
    ("L7", busy, _drafts_while_preempted),
    ("L7", busy, _blocks_while_waiting),
    ("L8", shared, _one_seat),
    ("L8", busy, _overrun),
    ("L8", busy, _longer_than_the_model),
    ("L9", busy, _kept_after_its_end),
    ("L10", quiet, _fence_that_never_falls),
    ("L13", quiet, _embeddings_counted),
    ("L14", quiet, _suspicion_that_stays),
    ("L15", busy, _plain_for_ever),
    ("L16", shared, _hash_missing),
]


def _named_case(case: tuple[Any, ...]) -> str:
    return f"{case[0]}{case[-1].__name__}"


@pytest.mark.parametrize(("law", "given", "spoil"), STATES, ids=map(_named_case, STATES))
def test_a_state_that_breaks_a_law_is_told_by_that_law(
    law: str, given: Callable[[], Drive], spoil: Callable[[Drive], None]
) -> None:
    drive = given()
    spoil(drive)
    with pytest.raises(InvariantViolation) as told:
        check_state(drive.state)
    assert law_of(told.value) == law


# -- events -----------------------------------------------------------------------------------------------------------


@cache
def life() -> list[Event]:
    """Preemptions with stale output in flight, chunks, prefix hits, a reset, an abort, a lost worker, a digest."""
    drive = opened(num_blocks=8, max_num_seqs=4, max_num_batched_tokens=12, max_in_flight_steps=3)
    for i in range(7):
        drive.submit(f"r{i}", list(range(4 + 3 * (i % 3))), max_tokens=9 + i, seed=i)
    for number in range(60):
        if number in (5, 26):
            reset(drive)
        if number == 40:
            drive.do(LoseWorker(reason="killed"))
            drive.do(StartWorker(kind="simulated", environment={}))
        if not drive.schedule() and drive.orders:
            drive.complete()
    drive.abort("r6")
    drive.run()
    drive.do(RecordDigest())
    return [event for events in drive.records for event in events]


Spoil = Callable[[Event, State], Event | None]


def verdict(spoil: Spoil) -> str:
    """Follow the life; the first event that `spoil` tells in another way is judged as told. Which law objects?"""
    state, book = State(), LawBook()
    for event in life():
        fold(state, event)
        told = spoil(event, state)
        if told is None:
            book.observe(state, event)
            continue
        with pytest.raises(InvariantViolation) as objection:
            book.observe(state, told)
        return law_of(objection.value)
    raise AssertionError("the life has no such event")


def test_the_life_as_it_was_breaks_no_law() -> None:
    state, book = State(), LawBook()
    for event in life():
        fold(state, event)
        book.observe(state, event)
    assert book.num_checks == len(life())
    kinds = {type(event) for event in life()}
    assert {RequestPreempted, StaleOutputConsumed, WorkerLost, StateDigest} <= kinds


def telling(kind: type[Event], change: Callable[[Any, State], dict[str, Any] | None]) -> Spoil:
    """Tell the first event of this kind in another way; None: not this one."""

    def spoil(event: Event, state: State) -> Event | None:
        changes = change(event, state) if type(event) is kind else None
        return None if changes is None else msgspec.structs.replace(event, **changes)

    return spoil


def _double(e: StepScheduled, state: State) -> dict[str, Any] | None:
    room = state.config.max_num_batched_tokens
    return {"num_tokens": [n * room + 1 for n in e.num_tokens]} if len(e.handles) > 1 else None


def _swapped_hits(e: StepScheduled, state: State) -> dict[str, Any] | None:
    for i, admission in enumerate(e.admissions):
        if len(admission.hit_block_ids) > 1:
            hits = admission.hit_block_ids[::-1]
            swapped = Admission(entry=admission.entry, epoch=admission.epoch, hit_block_ids=hits)
            return {"admissions": [*e.admissions[:i], swapped, *e.admissions[i + 1 :]]}
    return None


def _never_written(e: StepScheduled, state: State) -> dict[str, Any] | None:
    """A hit on a block that nobody has ever used."""
    blank = list(state.pool.free_blank)
    for i, admission in enumerate(e.admissions):
        if admission.hit_block_ids and blank:
            hits = [*admission.hit_block_ids[:-1], blank[0]]
            forged = Admission(entry=admission.entry, epoch=admission.epoch, hit_block_ids=hits)
            return {"admissions": [*e.admissions[:i], forged, *e.admissions[i + 1 :]]}
    return None


def _ended(state: State) -> int | None:
    """A handle that was given and lives no more."""
    return next((h for h in range(1, state.requests.next_handle) if h not in state.requests.by_handle), None)


def _to_somebody_gone(e: OutputDelivered, state: State) -> dict[str, Any] | None:
    return None if _ended(state) is None or len(e.handles) < 2 else {"handles": [_ended(state), *e.handles[1:]]}


def _schedules_somebody_gone(e: StepScheduled, state: State) -> dict[str, Any] | None:
    return None if _ended(state) is None else {"handles": [_ended(state), *e.handles[1:]]}


def _deliver_all(e: StaleOutputConsumed, state: State, *, alive: bool) -> dict[str, Any] | None:
    """Deliver what was to be dropped, where all of it is for somebody who lives, or all for somebody who doesn't."""
    live = {r.handle for r in state.requests.live()}
    if (
        any(e.delivered)
        or not (any if alive else all)(e.counts)
        or any((handle in live) is not alive for handle in e.handles)
    ):
        return None
    return {"delivered": [True] * len(e.handles), "first_output_indices": [0] * len(e.handles)}


def _dropped_to_the_living(e: StaleOutputConsumed, state: State) -> dict[str, Any] | None:
    return _deliver_all(e, state, alive=True)


def _dropped_to_the_dead(e: StaleOutputConsumed, state: State) -> dict[str, Any] | None:
    return _deliver_all(e, state, alive=False)


EVENTS: list[tuple[str, str, Spoil]] = [
    ("L1", "a step is left out", telling(StepScheduled, lambda e, _: {"step": e.step + 1})),
    ("L1", "a step is numbered twice", telling(StepScheduled, lambda e, _: {"step": e.step - 1} if e.step else None)),
    ("L1", "output of a step that is not in flight", telling(OutputDelivered, lambda e, _: {"step": e.step + 9})),
    (
        "L1",
        "output of a step before its elder's",
        telling(OutputDelivered, lambda e, s: {"step": e.step + 1} if len(s.window.in_flight) > 1 else None),
    ),
    (
        "L1",
        "an entry is resolved twice",
        telling(OutputDelivered, lambda e, _: {"handles": [e.handles[0]] * 2} if len(e.handles) == 2 else None),
    ),
    ("L1", "output to somebody who was not asked for it", telling(OutputDelivered, _to_somebody_gone)),
    ("L1", "stale output of somebody not in the step", telling(StaleOutputConsumed, lambda e, _: {"handles": [999]})),
    ("L1", "a lost step is not told", telling(WorkerLost, lambda e, _: {"steps": e.steps[1:]} if e.steps else None)),
    ("L1", "a step is lost that never was", telling(WorkerLost, lambda e, _: {"steps": [*e.steps, 9999]})),
    ("L4", "the shared blocks are mixed up", telling(StepScheduled, _swapped_hits)),
    ("L4", "a shared block was never written", telling(StepScheduled, _never_written)),
    (
        "L4",
        "a place is written twice",
        telling(
            StepScheduled,
            lambda e, _: {"first_positions": [p - 1 for p in e.first_positions]} if min(e.first_positions) else None,
        ),
    ),
    (
        "L5",
        "an output is left out",
        telling(OutputDelivered, lambda e, _: {"first_output_indices": [i + 1 for i in e.first_output_indices]}),
    ),
    (
        "L5",
        "an output is repeated",
        telling(
            OutputDelivered,
            lambda e, _: {"first_output_indices": [i - 1 for i in e.first_output_indices]} if not e.counts else None,
        ),
    ),
    (
        "L5",
        "a stale output is repeated",
        telling(
            StaleOutputConsumed,
            lambda e, _: (
                {"first_output_indices": [i - 1 for i in e.first_output_indices]} if any(e.delivered) else None
            ),
        ),
    ),
    ("L5", "what was to be dropped is delivered", telling(StaleOutputConsumed, _dropped_to_the_living)),
    (
        "L5",
        "a token too many",
        telling(
            OutputDelivered,
            lambda e, _: (
                {"counts": [2] * len(e.handles), "token_ids": [t for t in e.token_ids for _ in (0, 1)]}
                if not e.counts
                else None
            ),
        ),
    ),
    ("L5", "an end with other outputs", telling(RequestFinished, lambda e, _: {"num_output_tokens": 99})),
    ("L8", "a step beyond the budget", telling(StepScheduled, _double)),
    ("L8", "an entry without tokens", telling(StepScheduled, lambda e, _: {"num_tokens": [0] * len(e.handles)})),
    (
        "L8",
        "a request twice in a step",
        telling(
            StepScheduled, lambda e, _: {"handles": [e.handles[0]] * len(e.handles)} if len(e.handles) > 1 else None
        ),
    ),
    ("L8", "places without a block", telling(StepScheduled, lambda e, _: {"first_positions": [40] * len(e.handles)})),
    ("L9", "a token after the end", telling(StaleOutputConsumed, _dropped_to_the_dead)),
    ("L9", "somebody gone is scheduled", telling(StepScheduled, _schedules_somebody_gone)),
    (
        "L9",
        "somebody ends twice",
        telling(RequestFinished, lambda e, s: {"handle": e.handle - 1} if e.handle - 1 == _ended(s) else None),
    ),
    ("L9", "a handle is given again", telling(RequestSubmitted, lambda e, _: {"handle": 1} if e.handle > 1 else None)),
    ("L11", "another digest", telling(StateDigest, lambda e, _: {"digest": "0" * 64})),
]


@pytest.mark.parametrize(("law", "spoil"), [(e[0], e[2]) for e in EVENTS], ids=[f"{e[0]} {e[1]}" for e in EVENTS])
def test_an_event_that_breaks_a_law_is_told_by_that_law(law: str, spoil: Spoil) -> None:
    assert verdict(spoil) == law


# -- what needs a state and a memory ----------------------------------------------------------------------------------


def test_a_block_that_is_still_written_must_not_be_taken() -> None:
    """The fence falls too early, and the block goes to another request."""
    drive = under_pressure()
    drive.schedule()
    pool = drive.state.pool
    _, idle = pool.fences.popleft()
    pool.num_fenced = 0
    pool.free_blank.update(dict.fromkeys(idle))
    with pytest.raises(InvariantViolation, match=r"is taken in step 2, steps \[0\] still write it") as told:
        drive.schedule()
    assert law_of(told.value) == "L3"


def test_a_step_too_many_in_the_window_is_told() -> None:
    drive = opened(max_in_flight_steps=2)
    drive.submit("a", 4)
    drive.schedule()
    drive.state.config = msgspec.structs.replace(drive.state.config, max_in_flight_steps=9)
    drive.schedule()
    step = drive.state.window.in_flight[-1]
    drive.state.config = msgspec.structs.replace(drive.state.config, max_in_flight_steps=2)
    third = StepScheduled(step=step.step + 1, handles=step.handles, num_tokens=[1], first_positions=[5])
    assert drive.book is not None
    with pytest.raises(InvariantViolation, match="3 steps in flight") as told:
        drive.book.observe(drive.state, third)
    assert law_of(told.value) == "L8"


@pytest.mark.parametrize("block", [0, 1, -1])
def test_a_hash_that_is_not_that_of_the_tokens_is_told(block: int) -> None:
    drive = opened(num_blocks=8)
    drive.submit("a", list(range(9)))
    drive.schedule()
    pool, chosen = drive.state.pool, named(drive, "a").block_ids[block]
    old = pool.hashes[chosen]
    if old is not None:
        del pool.block_by_hash[old]
    pool.hashes[chosen] = bytes(16)
    pool.block_by_hash[bytes(16)] = chosen
    assert drive.book is not None
    with pytest.raises(InvariantViolation) as told:
        drive.book.check(drive.state)
    assert law_of(told.value) == "L4"


def test_a_hash_that_goes_away_by_itself_is_told() -> None:
    drive = opened(num_blocks=8)
    drive.submit("a", list(range(9)))
    fill(drive)
    pool = drive.state.pool
    _, block = pool.block_by_hash.popitem()
    pool.hashes[block] = None
    assert drive.book is not None
    with pytest.raises(InvariantViolation, match="published no more") as told:
        drive.book.check(drive.state)
    assert law_of(told.value) == "L4"


def test_tokens_that_the_journal_did_not_tell_are_told() -> None:
    drive = opened(num_blocks=8, max_in_flight_steps=1)
    drive.submit("a", 6)
    drive.schedule()
    drive.complete()
    drive.schedule()
    named(drive, "a").tokens.extend([7, 7])
    assert named(drive, "a").status == RUNNING
    output = drive.run_worker()
    fields = {"step": 1, "handles": [1], "token_ids": output.token_ids, "first_output_indices": [1]}
    assert drive.book is not None
    with pytest.raises(InvariantViolation, match="the journal tells otherwise") as told:
        drive.book.observe(drive.state, OutputDelivered(**fields))
    assert law_of(told.value) == "L5"


def test_every_law_has_been_broken_here() -> None:
    broken = {case[0] for case in STATES} | {case[0] for case in EVENTS}
    assert broken == set(LAWS)
