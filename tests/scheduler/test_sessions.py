"""Sessions: requests whose input comes in chunks. Turns, rewinds, ends, and memory that is given up to whoever needs it."""

from collections.abc import Callable

import pytest

from refold.journal.errors import Rejected
from refold.journal.events import (
    Event,
    OutputDelivered,
    RequestAborted,
    RequestFinished,
    RequestPreempted,
    RequestSubmitted,
    SessionClosed,
    SessionExtended,
    SessionTurnEnded,
    StaleOutputConsumed,
    StepScheduled,
    WorkerLost,
)
from refold.projections.requests import IDLE, PREEMPTED, RUNNING, WAITING
from refold.scheduler.commands import ResetCache
from tests.kit.drive import Drive
from tests.kit.features import (
    close,
    complete_at,
    drafting,
    expire,
    extend,
    judged,
    lose_worker,
    settle,
    steps,
)
from tests.kit.sentences import (
    all_of,
    counters,
    drain,
    ends,
    fill,
    is_live,
    name_of,
    named,
    names,
    nothing_changes,
    opened,
    outputs,
    reset,
    story,
    the,
    token_at,
    victims,
    work,
)

DEPTHS = (1, 2, 4, 8)


def between_turns(prompt: int = 6, max_tokens: int = 3, **changes: object) -> Drive:
    """A session `s` whose first turn has ended, idle with its blocks."""
    drive = opened(**({"num_blocks": 16} | changes))
    drive.submit("s", prompt, max_tokens, resumable=True)
    settle(drive)
    assert named(drive, "s").status == IDLE
    return drive


def where(drive: Drive, name: str) -> list[str]:
    """Every queue that a request is in."""
    queues = drive.state.queues
    places = {"waiting": queues.waiting, "running": queues.running, "idle": queues.idle}
    return [place for place, queue in places.items() if name in names(queue)]


# -- turns ------------------------------------------------------------------------------------------------------------


def test_a_turn_ends_as_a_request_would_and_the_session_keeps_its_blocks() -> None:
    drive = opened(num_blocks=16)
    drive.submit("s", 6, 3, resumable=True)
    events = settle(drive)

    ended = the(SessionTurnEnded, events)
    assert (ended.reason, ended.num_output_tokens, ended.stop_token_id) == ("length", 3, None)
    assert all_of(RequestFinished, drive.records) == []
    assert where(drive, "s") == ["idle"]
    session = named(drive, "s")
    assert len(session.tokens) == 9
    assert counters(drive, "s") == {"computed": 8, "placeholders": 0, "in_flight": 0, "stale": 0, "deliverable": 0}
    assert len(session.block_ids) == 2, "the last token needs no place until it is known what follows"


def test_the_next_chunk_takes_the_place_of_the_last_token_and_only_it_is_computed() -> None:
    drive = between_turns()
    spoken, blocks = list(named(drive, "s").tokens), list(named(drive, "s").block_ids)

    assert story(extend(drive, "s", [11, 12, 13])) == ["SessionExtended"]

    session = named(drive, "s")
    assert list(session.tokens) == [*spoken[:-1], 11, 12, 13]
    assert (session.num_prompt_tokens, session.num_output_tokens) == (11, 0), "what was spoken is prompt now"
    assert (session.status, where(drive, "s")) == (WAITING, ["waiting"])
    events = drive.schedule()
    assert work(drive, events) == {"s": 3}
    assert the(StepScheduled, events).first_positions == [8]
    assert session.block_ids[:2] == blocks
    settle(drive)
    judged(drive)


def test_a_chunk_that_comes_early_waits_for_the_turn_to_end() -> None:
    drive = opened(num_blocks=16, max_in_flight_steps=1)
    drive.submit("s", 6, 2, resumable=True)
    drive.schedule()
    before = list(named(drive, "s").tokens)

    extend(drive, "s", [11, 12], max_tokens=2)
    extend(drive, "s", [13], max_tokens=1)

    assert list(named(drive, "s").tokens) == before
    assert where(drive, "s") == ["running"]
    drive.complete()
    drive.schedule()
    events = drive.complete()
    assert story(events) == ["OutputDelivered", "SessionTurnEnded"]
    assert where(drive, "s") == ["waiting"], "straight into the next turn"
    assert [len(chunk.token_ids) for chunk in named(drive, "s").chunks] == [1], "one chunk a turn"
    settle(drive)
    assert [e.num_output_tokens for e in all_of(SessionTurnEnded, drive.records)] == [2, 2, 1]
    judged(drive)


def test_outputs_are_counted_over_all_turns() -> None:
    drive = between_turns(max_tokens=3)
    extend(drive, "s", [11], max_tokens=2)
    settle(drive)
    extend(drive, "s", [12], max_tokens=2)
    close(drive, "s")
    settle(drive)

    indices = [e.first_output_indices[0] for e in all_of(OutputDelivered, drive.records)]
    assert indices == [0, 1, 2, 3, 4, 5, 6]
    assert ends(drive.records, drive) == {"s": ("length", 7)}
    assert len(outputs(drive)["s"]) == 7
    judged(drive)


def test_each_chunk_brings_its_own_sampling() -> None:
    drive = between_turns(prompt=5, max_tokens=1)
    extend(drive, "s", [1, 2], max_tokens=3, seed=1)
    settle(drive)
    context = len(named(drive, "s").tokens)
    stop = (named(drive, "s").tokens[-1] + 1) % 1000
    extend(drive, "s", [stop], max_tokens=8, seed=2, min_tokens=8, stop_token_ids=(stop,))
    settle(drive)
    assert len(named(drive, "s").tokens) == context - 1 + 1 + 8
    close(drive, "s")
    transcript = judged(drive)
    assert not transcript.unfinished
    assert [e.num_output_tokens for e in all_of(SessionTurnEnded, drive.records)] == [1, 3, 8]


def test_a_stop_token_ends_the_turn_and_is_told() -> None:
    drive = opened(num_blocks=16)
    stop = token_at(drive, "s", 7, prompt=6)
    drive.submit("s", 6, 9, resumable=True, stop_token_ids=(stop,))
    ended = the(SessionTurnEnded, settle(drive))
    assert (ended.reason, ended.num_output_tokens, ended.stop_token_id) == ("stop", 2, stop)


@pytest.mark.parametrize("depth", DEPTHS)
def test_what_is_in_flight_at_the_end_of_a_turn_is_dropped_and_the_next_turn_does_not_wait_for_it(depth: int) -> None:
    drive = opened(num_blocks=16, max_in_flight_steps=depth)
    drive.submit("s", 6, 9, resumable=True, stop_token_ids=(token_at(drive, "s", 6, prompt=6),))
    fill(drive)
    drive.complete()
    assert named(drive, "s").status == IDLE
    assert counters(drive, "s")["stale"] == counters(drive, "s")["in_flight"] == depth - 1
    extend(drive, "s", [11, 12])

    assert work(drive, drive.schedule()) == {"s": 2}

    settle(drive)
    assert sum(len(e.handles) for e in all_of(StaleOutputConsumed, drive.records)) == depth - 1
    assert not any(any(e.delivered) for e in all_of(StaleOutputConsumed, drive.records))
    close(drive, "s")
    assert not judged(drive).unfinished


def test_an_idle_session_takes_no_seat() -> None:
    drive = between_turns(max_num_seqs=1)
    drive.submit("p", 3, 2)
    settle(drive)
    assert not is_live(drive, "p")
    extend(drive, "s", [1])
    settle(drive)
    judged(drive)


def test_a_turn_waits_behind_those_whom_the_policy_prefers() -> None:
    drive = between_turns(max_num_seqs=1, policy="priority")
    extend(drive, "s", [1], max_tokens=1)
    drive.submit("urgent", 3, 1, priority=-5)
    assert list(work(drive, drive.schedule())) == ["urgent"]
    settle(drive)
    assert not is_live(drive, "urgent")


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_session_that_always_has_its_next_chunk_ready_does_not_keep_its_seat(policy: str) -> None:
    """One seat. The session's next turn begins as soon as one ends; who came meanwhile goes first all the same."""
    drive = opened(num_blocks=32, max_num_seqs=1, max_in_flight_steps=1, policy=policy)
    drive.submit("s", 5, 2, resumable=True)
    extend(drive, "s", [1], max_tokens=2)
    drive.schedule()
    drive.submit("p", 5, 2, tenant="other")
    extend(drive, "s", [1], max_tokens=2)
    finished: list[str] = []
    while is_live(drive, "p"):
        drive.complete()
        extend(drive, "s", [2], max_tokens=2)
        finished += work(drive, drive.schedule())
    assert finished == ["s", "p", "p", "s"]
    close(drive, "s")
    settle(drive)
    judged(drive)


def test_a_tenant_pays_for_every_turn() -> None:
    """Under fair share a session's later turns cost what they add: another tenant's request isn't left behind for ever."""
    drive = opened(num_blocks=64, max_num_seqs=1, max_in_flight_steps=1, policy="fair_share")
    drive.submit("s", 4, 4, resumable=True, tenant="chatty")
    settle(drive)
    extend(drive, "s", [1] * 40, max_tokens=4)
    drive.submit("p", 4, 4, tenant="other")
    assert list(work(drive, drive.schedule())) == ["p"]


def test_what_a_session_said_is_found_by_others() -> None:
    drive = between_turns(prompt=6, max_tokens=7)
    spoken = named(drive, "s").tokens[:-1]
    assert len(spoken) == 12
    drive.submit("p", [*spoken, 1], 2)
    assert work(drive, drive.schedule()) == {"p": 1}


def test_nobody_writes_into_a_list_that_is_in_the_journal() -> None:
    drive = opened(num_blocks=16)
    prompt, chunk = [1, 2, 3, 4, 5], [6, 7]
    drive.submit("s", prompt, 3, resumable=True)
    extend(drive, "s", chunk)
    settle(drive)
    close(drive, "s")
    assert all_of(RequestSubmitted, drive.records)[0].prompt_token_ids == [1, 2, 3, 4, 5]
    assert all_of(SessionExtended, drive.records)[0].token_ids == [6, 7]
    assert (prompt, chunk) == ([1, 2, 3, 4, 5], [6, 7])


# -- the rewind -------------------------------------------------------------------------------------------------------


def test_the_block_that_the_last_token_would_fill_is_never_published() -> None:
    drive = between_turns(prompt=4, max_tokens=4)
    session = named(drive, "s")
    spoken, hashes = list(session.tokens), list(session.block_hashes)
    assert (len(spoken), len(hashes)) == (8, 2), "two blocks' tokens are known"
    assert [drive.state.pool.hashes[block] is not None for block in session.block_ids] == [True, False]

    extend(drive, "s", [(spoken[-1] + 1) % 1000])

    assert session.block_hashes[0] == hashes[0]
    assert session.block_hashes[1] != hashes[1], "another token stands there now"
    settle(drive)
    assert hashes[1] not in drive.state.pool.block_by_hash
    drive.submit("p", [*spoken, 1], 1)
    assert work(drive, drive.schedule()) == {"p": 5}, "the first block is found, the second never was"


def test_a_chunk_without_tokens_has_the_last_place_sampled_again() -> None:
    drive = between_turns(prompt=6, max_tokens=2)
    assert len(named(drive, "s").tokens) == 8
    extend(drive, "s", [], max_tokens=2, seed=99)
    assert len(named(drive, "s").tokens) == 7

    events = drive.schedule()

    assert (work(drive, events), the(StepScheduled, events).first_positions) == ({"s": 1}, [6])
    settle(drive)
    close(drive, "s")
    assert not judged(drive).unfinished


def test_if_that_place_is_in_a_published_block_it_is_computed_in_a_block_of_its_own() -> None:
    drive = between_turns(prompt=4, max_tokens=5)
    session = named(drive, "s")
    kept, shared = session.block_ids
    assert all(drive.state.pool.hashes[block] is not None for block in (kept, shared))

    extend(drive, "s", [], max_tokens=2, seed=99)

    assert session.block_ids == [kept]
    events = drive.schedule()
    assert (work(drive, events), the(StepScheduled, events).first_positions) == ({"s": 4}, [4])
    assert session.block_ids[1] != shared
    assert drive.state.pool.hashes[shared] is not None, "what was published stays as it is"
    settle(drive)
    close(drive, "s")
    assert not judged(drive).unfinished


def test_somebody_who_shares_that_block_never_notices() -> None:
    drive = between_turns(prompt=4, max_tokens=5)
    drive.submit("p", [*named(drive, "s").tokens[:8], 1], 6)
    assert work(drive, drive.schedule()) == {"p": 1}
    extend(drive, "s", [], max_tokens=6, seed=99)
    settle(drive)
    extend(drive, "s", [], max_tokens=6, seed=98)
    settle(drive)
    close(drive, "s")
    assert not judged(drive).unfinished


@pytest.mark.parametrize("block_size", [1, 2, 4])
@pytest.mark.parametrize("depth", DEPTHS)
def test_again_and_again_without_a_token(depth: int, block_size: int) -> None:
    drive = between_turns(prompt=3, max_tokens=1, block_size=block_size, max_in_flight_steps=depth)
    for seed in range(12):
        extend(drive, "s", [], max_tokens=1 + seed % 3, seed=seed)
        settle(drive)
    close(drive, "s")
    assert not judged(drive).unfinished
    assert drive.state.pool.num_free == drive.state.pool.num_blocks


@pytest.mark.parametrize("accepted", [0, 1, 2, 4])
@pytest.mark.parametrize("depth", DEPTHS)
def test_a_turn_that_stops_inside_an_accepted_run_goes_back_to_its_stop(depth: int, accepted: int) -> None:
    drive, _ = drafting(4, accepted, max_in_flight_steps=depth, max_num_batched_tokens=64)
    drive.submit("s", 5, 30, resumable=True, stop_token_ids=(token_at(drive, "s", 8, prompt=5),))
    ended = the(SessionTurnEnded, settle(drive))
    assert (ended.reason, ended.num_output_tokens) == ("stop", 4)
    session = named(drive, "s")
    assert (len(session.tokens), session.num_computed_tokens) == (9, 8)
    assert sum(drive.state.pool.hashes[block] is not None for block in session.block_ids) == 2
    extend(drive, "s", [3, 4, 5], max_tokens=7)
    settle(drive)
    close(drive, "s")
    assert not judged(drive).unfinished


# -- the end of a session ---------------------------------------------------------------------------------------------


def test_closed_while_it_runs_the_end_of_its_turn_is_its_end() -> None:
    drive = opened(num_blocks=16)
    drive.submit("s", 6, 3, resumable=True)
    drive.schedule()
    assert story(close(drive, "s")) == ["SessionClosed"]
    events = settle(drive)
    assert all_of(SessionTurnEnded, [events]) == []
    assert ends(drive.records, drive) == {"s": ("length", 3)}
    assert drive.state.is_quiescent


def test_closed_with_chunks_waiting_it_still_takes_all_its_turns() -> None:
    drive = opened(num_blocks=16)
    drive.submit("s", 6, 2, resumable=True)
    drive.schedule()
    extend(drive, "s", [1], max_tokens=2)
    extend(drive, "s", [2], max_tokens=2)
    close(drive, "s")
    settle(drive)
    assert len(all_of(SessionTurnEnded, drive.records)) == 2
    assert ends(drive.records, drive) == {"s": ("length", 6)}
    assert not judged(drive).unfinished


def test_closed_while_it_is_idle_it_has_ended() -> None:
    drive = between_turns(max_tokens=3)
    assert story(close(drive, "s")) == ["SessionClosed", "RequestFinished"]
    assert ends(drive.records, drive) == {"s": ("stop", 3)}
    assert drive.state.is_quiescent
    assert drive.state.pool.num_free == drive.state.pool.num_blocks


def test_closed_while_its_next_turn_waits_it_has_that_turn() -> None:
    drive = between_turns(max_tokens=3)
    extend(drive, "s", [1], max_tokens=2)
    assert story(close(drive, "s")) == ["SessionClosed"]
    settle(drive)
    assert ends(drive.records, drive) == {"s": ("length", 5)}
    assert not judged(drive).unfinished


def test_closed_before_it_ever_ran_it_is_a_plain_request() -> None:
    drive = opened(num_blocks=16)
    drive.submit("s", 6, 3, resumable=True)
    close(drive, "s")
    settle(drive)
    assert ends(drive.records, drive) == {"s": ("length", 3)}
    assert not all_of(SessionTurnEnded, drive.records)


@pytest.mark.parametrize("when", ["closed", "finished", "never live", "a plain request"])
def test_to_close_what_can_not_be_closed_is_to_do_nothing(when: str) -> None:
    drive = opened(num_blocks=16)
    drive.submit("s", 6, 3, resumable=when != "a plain request")
    drive.schedule()
    if when in ("closed", "finished"):
        close(drive, "s")
    if when == "finished":
        settle(drive)
    with nothing_changes(drive):
        assert close(drive, "x" if when == "never live" else "s") == []


def new(drive: Drive) -> None:
    """It has never run."""


def running(drive: Drive) -> None:
    drive.schedule()


def running_with_a_chunk_queued(drive: Drive) -> None:
    drive.schedule()
    extend(drive, "s", [1, 2])


def idle(drive: Drive) -> None:
    settle(drive)


def idle_with_work_in_flight(drive: Drive) -> None:
    fill(drive)
    while named(drive, "s").status != IDLE:
        drive.complete()


def waiting_with_its_blocks(drive: Drive) -> None:
    settle(drive)
    extend(drive, "s", [1, 2])


def waiting_without_blocks(drive: Drive) -> None:
    waiting_with_its_blocks(drive)
    reset(drive)


def preempted(drive: Drive) -> None:
    drive.schedule()
    reset(drive)


def in_its_second_turn(drive: Drive) -> None:
    waiting_with_its_blocks(drive)
    drive.schedule()


PLACES: list[Callable[[Drive], None]] = [
    new,
    running,
    running_with_a_chunk_queued,
    idle,
    idle_with_work_in_flight,
    waiting_with_its_blocks,
    waiting_without_blocks,
    preempted,
    in_its_second_turn,
]


def in_place(place: Callable[[Drive], None]) -> Drive:
    """A session `s` there, in a window of four; its first turn stops at its second token."""
    drive = opened(num_blocks=16, max_in_flight_steps=4)
    drive.submit("s", 6, 9, resumable=True, stop_token_ids=(token_at(drive, "s", 7, prompt=6),))
    place(drive)
    return drive


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_it_may_be_aborted_anywhere_and_leaves_nothing_behind(place: Callable[[Drive], None]) -> None:
    drive = in_place(place)
    given = len(outputs(drive)["s"])

    events = drive.abort("s")

    assert story(events) == ["RequestAborted", "RequestFinished"]
    assert the(RequestAborted, events).cause == "client"
    assert ends(drive.records, drive) == {"s": ("abort", given)}
    assert where(drive, "s") == []
    drain(drive)
    assert len(outputs(drive)["s"]) == given
    assert drive.state.is_quiescent
    assert drive.state.pool.num_free == drive.state.pool.num_blocks
    assert drive.state.requests.sessions == {}


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_its_worker_may_be_lost_anywhere_and_it_goes_on(place: Callable[[Drive], None]) -> None:
    drive = in_place(place)
    before, queue = outputs(drive)["s"], where(drive, "s")

    events = lose_worker(drive)

    session = named(drive, "s")
    assert (session.block_ids, session.num_computed_tokens, session.num_in_flight_tokens) == ([], 0, 0)
    assert where(drive, "s") == (["waiting"] if queue == ["running"] else queue)
    assert (session.handle in the(WorkerLost, events).handles) == (place not in (new, waiting_without_blocks))
    assert outputs(drive)["s"] == before
    settle(drive)
    extend(drive, "s", [5], max_tokens=3)
    settle(drive)
    close(drive, "s")
    assert not judged(drive).unfinished


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_its_cache_may_be_reset_anywhere_and_it_goes_on(place: Callable[[Drive], None]) -> None:
    drive = in_place(place)
    reset(drive)
    session = named(drive, "s")
    assert (session.block_ids, session.num_computed_tokens) == ([], 0)
    settle(drive)
    extend(drive, "s", [5], max_tokens=3)
    settle(drive)
    close(drive, "s")
    assert not judged(drive).unfinished


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_the_engine_may_be_reopened_anywhere_and_it_goes_on(place: Callable[[Drive], None]) -> None:
    drive = in_place(place)
    drive.open()
    assert is_live(drive, "s")
    settle(drive)
    extend(drive, "s", [5], max_tokens=3)
    settle(drive)
    close(drive, "s")
    assert not judged(drive).unfinished


# -- idle for too long ------------------------------------------------------------------------------------------------


def test_a_session_that_was_idle_for_too_long_is_closed() -> None:
    drive = opened(num_blocks=16, max_in_flight_steps=1)
    for name, time_ns in (("s", 100), ("t", 200), ("u", 300)):
        drive.submit(name, 3, 1, resumable=True)
        drive.schedule()
        complete_at(drive, time_ns)
    drive.submit("running", 3, 9, resumable=True)
    drive.schedule()

    assert expire(drive, 99) == []
    events = expire(drive, 200)

    assert story(events) == ["SessionClosed", "RequestFinished"] * 2
    assert [name_of(drive, e.handle) for e in events if isinstance(e, RequestFinished)] == ["s", "t"]
    assert ends(drive.records, drive) == {"s": ("stop", 1), "t": ("stop", 1)}
    assert is_live(drive, "u")
    assert is_live(drive, "running"), "whoever runs is not idle"


def test_idle_time_starts_anew_with_the_end_of_each_turn() -> None:
    drive = opened(num_blocks=16, max_in_flight_steps=1)
    drive.submit("s", 3, 1, resumable=True)
    drive.schedule()
    complete_at(drive, 100)
    extend(drive, "s", [1], max_tokens=1)
    assert expire(drive, 10**18) == [], "it waits for its turn"
    drive.schedule()
    complete_at(drive, 500)
    assert expire(drive, 499) == []
    assert story(expire(drive, 500)) == ["SessionClosed", "RequestFinished"]


def test_it_starts_too_when_the_turn_of_a_preempted_session_ends() -> None:
    drive = preempted_at_the_end_of_its_turn()
    drive.schedule()
    complete_at(drive, 700)
    complete_at(drive, 800)
    assert named(drive, "s").status == IDLE
    assert expire(drive, 799) == []
    assert story(expire(drive, 800)) == ["SessionClosed", "RequestFinished"]


def test_it_goes_on_while_the_worker_is_replaced() -> None:
    drive = opened(num_blocks=16, max_in_flight_steps=1)
    drive.submit("s", 3, 1, resumable=True)
    drive.schedule()
    complete_at(drive, 100)
    lose_worker(drive)
    drive.open()
    assert expire(drive, 99) == []
    assert story(expire(drive, 100)) == ["SessionClosed", "RequestFinished"]


# -- memory -----------------------------------------------------------------------------------------------------------


def test_a_running_request_takes_an_idle_sessions_blocks_before_anybody_is_preempted() -> None:
    drive = between_turns(prompt=7, max_tokens=2, num_blocks=6, max_in_flight_steps=1)
    drive.submit("a", 7)
    drive.submit("b", 7)
    drive.schedule()
    drive.complete()
    drive.schedule()
    drive.complete()
    held = list(named(drive, "s").block_ids)

    events = drive.schedule()

    reclaimed = the(RequestPreempted, events)
    assert (name_of(drive, reclaimed.handle), reclaimed.reason, reclaimed.stale_policy) == (
        "s",
        "session_reclaimed",
        "drop",
    )
    assert name_of(drive, reclaimed.for_handle or 0) == "a"
    assert (reclaimed.needed_blocks, reclaimed.free_blocks, reclaimed.released_block_ids) == (1, 0, held)
    assert work(drive, events) == {"a": 1, "b": 1}
    assert (where(drive, "s"), named(drive, "s").num_computed_tokens) == (["idle"], 0)
    assert named(drive, "s").num_preemptions == 0, "it did not run"
    settle(drive)
    extend(drive, "s", [1], max_tokens=2)
    assert work(drive, drive.schedule()) == {"s": 9}, "all of it is computed again"
    settle(drive)
    judged(drive)


def test_of_the_idle_sessions_the_last_in_order_gives_way_first() -> None:
    drive = opened(num_blocks=7, max_in_flight_steps=1, max_num_seqs=8)
    for name in "st":
        drive.submit(name, 7, 2, resumable=True)
    settle(drive)
    drive.submit("p", 13, 1)
    assert victims(drive, drive.schedule()) == ["t"]
    assert len(named(drive, "s").block_ids) == 2


def test_whoever_comes_in_takes_an_idle_sessions_blocks_and_says_what_it_needed() -> None:
    drive = between_turns(prompt=7, max_tokens=2, num_blocks=4)
    drive.submit("p", 12, 1)
    events = drive.schedule()
    reclaimed = the(RequestPreempted, events)
    assert (name_of(drive, reclaimed.for_handle or 0), reclaimed.needed_blocks, reclaimed.free_blocks) == ("p", 3, 2)
    assert work(drive, events) == {"p": 12}


def test_a_session_without_blocks_has_nothing_to_give() -> None:
    drive = between_turns(prompt=7, max_tokens=2, num_blocks=4)
    reset(drive)
    drive.submit("p", 15, 1)
    assert victims(drive, drive.schedule()) == []
    settle(drive)
    judged(drive)


def holder_behind_a_runner(**changes: object) -> Drive:
    """`a` runs on the only seat; `s` waits for its second turn with two blocks; two are left."""
    drive = between_turns(
        prompt=7, max_tokens=2, **({"num_blocks": 6, "max_num_seqs": 1, "max_in_flight_steps": 1} | changes)
    )
    drive.submit("a", 7, max_tokens=12)
    drive.schedule()
    drive.complete()
    extend(drive, "s", [1], max_tokens=2)
    assert where(drive, "s") == ["waiting"]
    return drive


def test_a_waiting_session_keeps_its_blocks_while_there_are_others() -> None:
    drive = holder_behind_a_runner()
    for _ in range(6):
        assert victims(drive, drive.schedule()) == []
        drive.complete()
    assert len(named(drive, "s").block_ids) == 2


@pytest.mark.parametrize(("first", "second"), ["st", "ts"])
def test_a_waiting_session_takes_the_blocks_of_one_behind_it_and_of_none_before_it(first: str, second: str) -> None:
    drive = opened(num_blocks=8, max_num_seqs=3, max_in_flight_steps=1)
    for name in "st":
        drive.submit(name, 7, 2, resumable=True)
    settle(drive)
    drive.submit("a", 7, 8)
    drive.schedule()
    drive.complete()
    extend(drive, first, [1] * 14, max_tokens=2)
    extend(drive, second, [1] * 14, max_tokens=2)
    assert (drive.state.pool.num_free, where(drive, "s"), where(drive, "t")) == (2, ["waiting"], ["waiting"])

    assert victims(drive, drive.schedule()) == [second]
    assert [r.request_id for r in drive.state.queues.running] == ["a", first]

    settle(drive)
    for name in "st":
        close(drive, name)
    assert not judged(drive).unfinished


def test_a_running_request_takes_them_when_there_are_no_others() -> None:
    drive = holder_behind_a_runner(num_blocks=5)
    settle(drive)
    reclaims = [e for e in all_of(RequestPreempted, drive.records) if e.reason == "session_reclaimed"]
    assert [name_of(drive, e.handle) for e in reclaims] == ["s"]
    assert not [e for e in all_of(RequestPreempted, drive.records) if e.reason == "kv_pressure"]
    close(drive, "s")
    assert not judged(drive).unfinished


def test_waiting_sessions_that_hold_all_the_memory_make_room_for_the_first_of_them() -> None:
    drive = opened(num_blocks=6, max_in_flight_steps=1, max_num_seqs=8)
    for name in "stu":
        drive.submit(name, 7, 2, resumable=True)
    settle(drive)
    assert drive.state.pool.num_free == 0
    for name in "stu":
        extend(drive, name, list(range(4)), max_tokens=3)

    events = drive.schedule()

    assert victims(drive, events) == ["u"]
    assert list(work(drive, events)) == ["s", "t"]
    settle(drive)
    for name in "stu":
        close(drive, name)
    assert not judged(drive).unfinished


@pytest.mark.parametrize("depth", DEPTHS)
def test_nobody_starves_behind_sessions(depth: int) -> None:
    """Four sessions and four plain requests in a pool that holds two of them; chunks keep coming."""
    drive = opened(num_blocks=8, max_num_seqs=4, max_in_flight_steps=depth)
    for i in range(4):
        drive.submit(f"s{i}", 6 + i, 3, resumable=True)
        drive.submit(f"p{i}", 7 + i, 5)
    for turn in range(6):
        settle(drive)
        for i in range(4):
            extend(drive, f"s{i}", [turn] if turn % 2 else [], max_tokens=2 + turn % 2)
    settle(drive)
    assert [name for name in ["p0", "p1", "p2", "p3"] if is_live(drive, name)] == []
    assert len(all_of(SessionTurnEnded, drive.records)) == 4 * 7
    assert {e.reason for e in all_of(RequestPreempted, drive.records)} >= {"session_reclaimed"}
    for i in range(4):
        close(drive, f"s{i}")
    assert not judged(drive).unfinished


def fenced_sessions() -> Drive:
    """`s` and `t` are idle, and three steps that may write their three blocks each are in flight. Two blocks are free."""
    drive = opened(num_blocks=8, max_in_flight_steps=4, max_num_batched_tokens=32)
    for name in "st":
        drive.submit(name, 7, resumable=True, stop_token_ids=(token_at(drive, name, 7, prompt=7),))
    fill(drive)
    drive.complete()
    assert names(drive.state.queues.idle) == ["s", "t"]
    assert (drive.state.pool.num_free, len(drive.orders)) == (2, 3)
    return drive


def test_blocks_that_a_session_gave_up_are_waited_for_while_they_are_fenced() -> None:
    drive = fenced_sessions()
    drive.submit("p", 17, 1)
    events = drive.schedule()
    assert (victims(drive, events), work(drive, events)) == (["t"], {})
    assert (drive.state.pool.num_free, drive.state.pool.num_fenced) == (2, 3)

    for _ in range(3):
        assert drive.schedule() == [], "a fenced session is no reason to reclaim one more"
        drive.complete()

    assert work(drive, drive.schedule()) == {"p": 17}
    assert len(named(drive, "s").block_ids) == 3
    settle(drive)
    for name in "st":
        close(drive, name)
    assert not judged(drive).unfinished


def test_nobody_else_comes_in_for_the_blocks_that_are_waited_for() -> None:
    drive = fenced_sessions()
    drive.submit("p", 17, 1)
    drive.schedule()
    drive.submit("tiny", 1, 1)
    while drive.orders:
        assert drive.schedule() == []
        drive.complete()
    assert list(work(drive, drive.schedule())) == ["p", "tiny"]


# -- preempted sessions -----------------------------------------------------------------------------------------------


def preempted_at_the_end_of_its_turn() -> Drive:
    """`s` will be preempted for `a` in the next plan, with the last two tokens of its turn in flight."""
    drive = opened(num_blocks=4, block_size=4, max_in_flight_steps=3)
    drive.submit("a", 7, 8)
    drive.submit("s", 7, 2, resumable=True)
    drive.schedule()
    drive.schedule()
    return drive


def test_a_stale_token_may_end_the_turn_of_a_preempted_session() -> None:
    drive = preempted_at_the_end_of_its_turn()
    assert victims(drive, drive.schedule()) == ["s"]
    drive.complete()
    assert (named(drive, "s").status, where(drive, "s")) == (PREEMPTED, ["waiting"])

    events = drive.complete()

    assert story(events) == ["OutputDelivered", "StaleOutputConsumed", "SessionTurnEnded"]
    assert where(drive, "s") == ["idle"], "in exactly one queue"
    assert (named(drive, "s").block_ids, named(drive, "s").num_computed_tokens) == ([], 0)
    settle(drive)
    extend(drive, "s", [1, 2])
    settle(drive)
    close(drive, "s")
    assert not judged(drive).unfinished


def test_with_a_chunk_queued_it_goes_on_waiting_for_its_next_turn() -> None:
    drive = preempted_at_the_end_of_its_turn()
    extend(drive, "s", [1, 2], max_tokens=2)
    drive.schedule()
    drive.complete()

    assert "SessionTurnEnded" in story(drive.complete())

    assert (named(drive, "s").status, where(drive, "s")) == (WAITING, ["waiting"])
    assert len(named(drive, "s").tokens) == 8 + 2
    settle(drive)
    close(drive, "s")
    assert not judged(drive).unfinished


def test_closed_while_it_is_preempted_the_stale_token_that_ends_its_turn_ends_it() -> None:
    drive = preempted_at_the_end_of_its_turn()
    drive.schedule()
    assert story(close(drive, "s")) == ["SessionClosed"]
    drive.complete()
    assert "RequestFinished" in story(drive.complete())
    assert (where(drive, "s"), ends(drive.records, drive)) == ([], {"s": ("length", 2)})
    settle(drive)
    assert not judged(drive).unfinished


def stopped_while_preempted() -> Drive:
    """`s` stopped by its first token while preempted for `b`; the step behind it is still in flight."""
    drive = opened(num_blocks=4, max_in_flight_steps=4)
    drive.submit("b", 7, 8)
    drive.submit("s", 7, 9, resumable=True, stop_token_ids=(token_at(drive, "s", 7, prompt=7),))
    drive.schedule()
    drive.schedule()
    assert victims(drive, drive.schedule()) == ["s"]
    assert counters(drive, "s")["deliverable"] == 8
    assert "SessionTurnEnded" in story(drive.complete())
    return drive


def test_what_was_to_be_delivered_beyond_the_end_of_a_turn_is_dropped() -> None:
    drive = stopped_while_preempted()
    assert counters(drive, "s") == {"computed": 0, "placeholders": 0, "in_flight": 1, "stale": 1, "deliverable": 0}
    stale = the(StaleOutputConsumed, drive.complete())
    assert (stale.delivered, stale.counts) == ([False], [1])
    assert len(outputs(drive)["s"]) == 1


@pytest.mark.parametrize("drained", [False, True])
def test_its_next_chunk_may_come_before_or_after_it_has_drained(drained: bool) -> None:
    drive = stopped_while_preempted()
    if drained:
        drain(drive)
    assert where(drive, "s") == ["idle"]
    extend(drive, "s", [1, 2], max_tokens=3)
    assert where(drive, "s") == ["waiting"]
    drive.abort("b")
    settle(drive)
    close(drive, "s")
    assert not judged(drive).unfinished
    assert ends(drive.records, drive)["s"] == ("stop", 4)


def test_a_preempted_session_takes_chunks_and_takes_up_its_turn_where_it_was() -> None:
    drive = under_pressure_with_session()
    extend(drive, "s", [1, 2], max_tokens=2)
    assert named(drive, "s").status == PREEMPTED
    settle(drive)
    assert [e.num_output_tokens for e in all_of(SessionTurnEnded, drive.records)] == [8, 2]
    close(drive, "s")
    assert not judged(drive).unfinished


def under_pressure_with_session() -> Drive:
    """`s` was preempted for `a` in the middle of its turn."""
    drive = opened(num_blocks=5, max_in_flight_steps=3)
    drive.submit("a", 7, 8)
    drive.submit("s", 7, 8, resumable=True)
    while not victims(drive, drive.schedule()):
        if len(drive.orders) == 3:
            drive.complete()
    return drive


# -- reset ------------------------------------------------------------------------------------------------------------


def test_a_reset_that_must_not_disturb_is_refused_while_sessions_hold_blocks() -> None:
    drive = between_turns()
    with nothing_changes(drive), pytest.raises(Rejected, match="0 requests run and 1 sessions hold blocks"):
        drive.do(ResetCache(reset_running=False))
    events = drive.do(ResetCache(reset_running=True))
    assert story(events) == ["RequestPreempted", "CacheReset"]
    assert (the(RequestPreempted, events).reason, where(drive, "s")) == ("session_reclaimed", ["idle"])
    assert story(drive.do(ResetCache(reset_running=False))) == ["CacheReset"], "it holds none now"
    extend(drive, "s", [1], max_tokens=2)
    assert work(drive, drive.schedule()) == {"s": 9}
    settle(drive)
    judged(drive)


# -- refused chunks ---------------------------------------------------------------------------------------------------

REFUSED: list[tuple[str, str, list[int], dict[str, int], str]] = [
    (
        "of nobody",
        "x",
        [1],
        {},
        "session 'x' has ended: it was closed, aborted or idle for too long: open another with",
    ),
    ("of a plain request", "plain", [1], {}, "request 'plain' is not a session: open another with open_session"),
    ("of a closed session", "closed", [1], {}, "session 'closed' is closed, and ends with the turn that it is in"),
    ("of one that has ended", "ended", [1], {}, "session 'ended' has ended"),
    ("with a token of another model", "s", [1, 1000], {}, "token 1000 at index 1"),
    ("with a negative token", "s", [-1], {}, "token -1 at index 0"),
    ("that wants no tokens", "s", [1], {"max_tokens": 0}, "max_tokens is 0"),
    ("with a seed beyond bounds", "s", [1], {"seed": -1}, "seed is -1"),
    ("too long for the model", "s", [1] * 56, {}, "the model takes 64"),
    ("too long for the pool", "s", [1] * 50, {"max_tokens": 60}, "blocks of 4, the pool has 15"),
]


@pytest.mark.parametrize(
    ("name", "chunk", "sampling", "message"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED]
)
def test_a_chunk_is_refused(name: str, chunk: list[int], sampling: dict[str, int], message: str) -> None:
    drive = between_turns(num_blocks=15, max_model_len=64)
    drive.submit("ended", 3, 1)
    settle(drive)
    drive.submit("plain", 3, 3)
    drive.submit("closed", 3, 3, resumable=True)
    close(drive, "closed")
    with nothing_changes(drive), pytest.raises(Rejected, match=message) as refusal:
        extend(drive, name, chunk, **sampling)
    assert "\n" not in str(refusal.value)
    extend(drive, "s", [1, 2])
    settle(drive)
    close(drive, "s")
    assert not judged(drive).unfinished


@pytest.mark.parametrize("num_blocks", [16, 64])
def test_the_longest_chunk_that_is_taken_is_served(num_blocks: int) -> None:
    taken = []
    for length in range(40, 64):
        drive = between_turns(
            prompt=6, max_tokens=3, max_model_len=64, num_blocks=num_blocks, max_num_batched_tokens=64
        )
        try:
            extend(drive, "s", [1] * length, max_tokens=20)
        except Rejected:
            continue
        taken.append(length)
        settle(drive)
        close(drive, "s")
        assert not judged(drive).unfinished
    assert taken == list(range(40, max(taken) + 1))
    assert max(taken) == 64 - 8 - 1, "eight known tokens are kept of nine, and one is generated"


def test_chunks_that_wait_count_against_the_room() -> None:
    drive = opened(num_blocks=64, max_model_len=40)
    drive.submit("s", 6, 8, resumable=True)
    drive.schedule()
    extend(drive, "s", [1] * 10, max_tokens=8)
    with pytest.raises(Rejected, match="its context can come to"):
        extend(drive, "s", [1] * 10, max_tokens=1)
    extend(drive, "s", [1] * 5, max_tokens=30)
    settle(drive)
    close(drive, "s")
    assert not judged(drive).unfinished


def test_chunks_are_facts_of_their_own_and_so_is_the_end_of_input() -> None:
    drive = between_turns()
    events: list[Event] = [*extend(drive, "s", [1]), *close(drive, "s")]
    assert [type(event) for event in events] == [SessionExtended, SessionClosed]
    assert named(drive, "s").status == WAITING
    drive.schedule()
    assert named(drive, "s").status == RUNNING
    assert len(steps(drive)) > 1
