"""Replay: the state at any position is the state that the engine had there."""

import pytest

from refold.engine.history.portrait import portrait
from refold.engine.history.replay import Contradiction, replay, state_at
from refold.journal.errors import JournalCorrupt, NotFound
from refold.journal.events import RequestFinished
from refold.journal.stores import open_reader
from refold.journal.stores.memory import MemoryStore
from refold.scheduler.fold import fold
from refold.scheduler.state import State, digest
from tests.history.journals import eventful_lives, write_journal
from tests.kit.sameness import slots_of


@pytest.fixture(scope="module")
def journal(tmp_path_factory):
    path = tmp_path_factory.mktemp("replay") / "refold.db"
    lives, drive = eventful_lives()
    write_journal(path, lives)
    return path, [record for life in lives for record in life], drive


def test_the_state_at_every_position_is_the_fold_up_to_there(journal):
    path, records, _ = journal
    reader = open_reader(str(path))
    state = State()
    for position, events in enumerate(records):
        for event in events:
            fold(state, event)
        if position % 7 == 0 or position == len(records) - 1:
            replayed = state_at(reader, position)
            assert replayed.record.position == position
            assert digest(replayed.state) == digest(state)
    reader.close()


def test_without_a_position_the_state_is_that_of_the_head(journal):
    path, records, drive = journal
    replayed = state_at(open_reader(str(path)))
    assert replayed.record.position == len(records) - 1
    assert digest(replayed.state) == digest(drive.state)


@pytest.mark.parametrize("beyond", [0, 1, 10**12])
def test_a_position_beyond_the_last_record_is_not_found(journal, beyond):
    path, records, _ = journal
    with pytest.raises(NotFound, match=f"the last record is at {len(records) - 1}"):
        state_at(open_reader(str(path)), len(records) + beyond)


def test_a_negative_position_is_not_found(journal):
    with pytest.raises(NotFound, match="start at 0"):
        state_at(open_reader(str(journal[0])), -1)


def test_an_empty_stream_has_no_state():
    assert state_at(MemoryStore()) is None
    with pytest.raises(NotFound, match="empty"):
        state_at(MemoryStore(), 0)


def test_an_event_that_does_not_fit_is_a_contradiction_with_its_place(tmp_path):
    lives, _ = eventful_lives()
    lives[0][9] = [*lives[0][9], RequestFinished(handle=1, reason="length", num_output_tokens=99)]
    write_journal(tmp_path / "j.db", lives)
    with pytest.raises(Contradiction, match=r"RequestFinished \(event 1 of record 9\)") as caught:
        list(replay(open_reader(str(tmp_path / "j.db"))))
    assert (caught.value.position, caught.value.index, caught.value.law) == (9, 1, "fold")
    assert state_at(open_reader(str(tmp_path / "j.db")), 8) is not None


def test_replay_stops_at_a_record_whose_chain_is_broken(tmp_path):
    import sqlite3

    lives, _ = eventful_lives()
    write_journal(tmp_path / "j.db", lives)
    with sqlite3.connect(tmp_path / "j.db") as connection:
        connection.execute("UPDATE journal_records SET body = replace(body, 'req-1', 'req-7') WHERE position = 3")
    connection.close()
    with pytest.raises(JournalCorrupt) as caught:
        state_at(open_reader(str(tmp_path / "j.db")), 5)
    assert caught.value.position == 3


def test_a_portrait_holds_every_counter_of_every_live_request(journal):
    path, records, _ = journal
    for position in range(0, len(records), 5):
        state = state_at(open_reader(str(path)), position).state
        seen = portrait(state)
        assert [r["request_id"] for r in seen["requests"]] == [r.request_id for r in state.requests.by_handle.values()]
        for shown, request in zip(seen["requests"], state.requests.by_handle.values(), strict=True):
            counters = (*slots_of(type(request)), "num_in_flight_tokens", "num_sampling_in_flight")
            for counter in (name for name in counters if name.startswith("num_") and name in shown):
                assert shown[counter] == getattr(request, counter)
            assert shown["num_stale_output_tokens"] <= shown["num_in_flight_tokens"]
        pool = seen["pool"]
        places = ("num_owned_blocks", "num_fenced_blocks", "num_blank_blocks", "num_cached_blocks")
        assert sum(pool[place] for place in places) == pool["num_blocks"]
        assert seen["digest"] == digest(state)
