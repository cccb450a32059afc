"""The timeline: wherever one seeks, and however one got there, the state is the one that a fold from the beginning has."""

import random

import pytest

from refold.engine.folding import beginning, snapshot_of
from refold.engine.history.checkpoints import Checkpoints
from refold.engine.history.replay import replay
from refold.engine.history.timeline import Timeline
from refold.engine.opening import fold_record
from refold.journal.errors import NotFound
from refold.journal.events import RequestFinished, RequestPreempted
from refold.journal.record import head_after
from refold.journal.stores.memory import MemoryJournal, MemoryStore
from refold.scheduler.state import State, digest
from tests.history.journals import eventful_lives, write_journal
from tests.history.planted_journals import sealed
from tests.history.readers import ListReader
from tests.kit.long_history import long_history


@pytest.fixture(scope="module")
def records():
    return sealed(list(long_history(30_000, 16)))


@pytest.fixture(scope="module")
def digests(records):
    return [digest(place.state) for place in replay(ListReader(records))]


def test_every_way_to_a_position_leads_to_the_same_state(records, digests):
    timeline, rng = Timeline(ListReader(records)), random.Random(5)
    timeline.checkpoints.every = 400
    for _ in range(60):
        position = rng.randrange(len(records))
        assert digest(timeline.seek(position).state) == digests[position]
        assert timeline.position == position
        assert timeline.record == records[position]
    assert len(timeline.checkpoints) > 20


def test_before_the_first_record_there_is_nothing(records):
    timeline = Timeline(ListReader(records)).seek(-1)
    assert timeline.record is None
    assert timeline.events == []
    assert digest(timeline.state) == digest(State())


@pytest.mark.parametrize("position", [-2, 10**9])
def test_a_position_that_is_not_there_is_not_found(records, position):
    with pytest.raises(NotFound, match=f"position {position}"):
        Timeline(ListReader(records)).seek(position)


def test_a_walk_gives_every_record_and_leaves_checkpoints(records, digests):
    timeline = Timeline(ListReader(records))
    timeline.checkpoints.every = 1000
    assert [digest(place.state) for place in timeline] == digests
    reader = timeline.reader
    reader.num_read = 0
    timeline.seek(len(records) // 2)
    assert reader.num_read < len(records) // 10, "a seek after a walk folds from a checkpoint"


def test_forward_and_back_stop_at_the_ends(records):
    timeline = Timeline(ListReader(records))
    assert timeline.forward(3).position == 2
    assert timeline.back(1).position == 1
    assert timeline.back(50).position == -1
    assert timeline.forward(10**9).position == len(records) - 1


def test_a_time_leads_to_the_last_record_made_by_then(records):
    timeline = Timeline(ListReader(records))
    for position in (0, 7, 500, len(records) - 1):
        time_ns = records[position].time_ns
        assert timeline.seek_time(time_ns).position == max(i for i, r in enumerate(records) if r.time_ns <= time_ns)
    assert timeline.position_of_time(records[0].time_ns - 1) == -1


def test_a_step_leads_to_the_record_that_scheduled_it(records):
    timeline = Timeline(ListReader(records))
    for step in (0, 1, 17, 300):
        timeline.seek_step(step)
        assert timeline.state.window.next_step == step + 1
        assert timeline.state.window.in_flight[-1].step == step
    with pytest.raises(NotFound, match="step 999999"):
        timeline.seek_step(999_999)


def test_the_search_for_a_step_reads_few_records(records):
    reader = ListReader(records)
    Timeline(reader).position_of_step(200)
    assert reader.num_read < 200


def test_a_copy_stays_as_it_is(records, digests):
    timeline = Timeline(ListReader(records)).seek(100)
    copy = timeline.copy()
    timeline.seek(400)
    assert digest(copy) == digests[100]


def test_a_diff_names_what_changed_between_two_positions(records):
    timeline = Timeline(ListReader(records))
    finished = next(i for i, r in enumerate(records) if b"RequestFinished" in r.body)
    paths = {difference.path.split(".")[0].split("[")[0] for difference in timeline.diff(finished - 1, finished)}
    assert {"requests", "digest"} <= paths
    assert timeline.diff(50, 50) == []


def test_halving_finds_the_first_position_and_asks_few_states(records):
    timeline, asked = Timeline(ListReader(records)), []

    def many(state):
        asked.append(1)
        return state.requests.next_handle > 40

    found = timeline.first(many)
    assert found == timeline.scan(lambda state: state.requests.next_handle > 40)
    assert len(asked) < 16
    assert timeline.first(lambda state: state.requests.next_handle > 10**9) is None


def test_the_next_event_of_a_request_or_of_a_kind(records):
    timeline = Timeline(ListReader(records))
    assert timeline.next_of("req-3")
    assert any(getattr(event, "request_id", "") == "req-3" for event in timeline.events)
    assert timeline.next_event(RequestPreempted, RequestFinished)
    assert any(isinstance(event, RequestPreempted | RequestFinished) for event in timeline.events)
    before = timeline.position
    assert not timeline.next_of("nobody")
    assert timeline.position == before


def test_checkpoints_have_a_bound(records, monkeypatch):
    monkeypatch.setattr("refold.engine.history.checkpoints.MAX_BYTES", 200_000)
    timeline = Timeline(ListReader(records))
    timeline.checkpoints = Checkpoints(200)
    timeline.warm()
    assert timeline.checkpoints.num_bytes <= 200_000
    assert timeline.checkpoints.every > 200


def test_the_first_seek_uses_a_snapshot_of_the_store(records):
    """It folds from there, and reads next to nothing of what is before."""
    store = MemoryStore(MemoryJournal())
    store.open_replica()
    store.append("main", records)
    folded, head = beginning()
    for record in records[:600]:
        fold_record(folded, record)
        head = head_after(record)
    store.save_snapshot("main", snapshot_of(folded, head))
    timeline = Timeline(store).seek(620)
    assert timeline.position == 620
    assert timeline.checkpoints.positions[0] == 600


def test_a_journal_that_grows_is_as_long_as_it_was_until_one_looks_again(tmp_path):
    lives, _ = eventful_lives()
    write_journal(tmp_path / "j.db", [lives[0]])
    with Timeline.open(str(tmp_path / "j.db")) as timeline:
        assert len(timeline) == len(lives[0])
        from refold.journal.stores import open_store
        from tests.history import journals

        store = open_store(str(tmp_path / "j.db"))
        head = store.open_stream()
        store.append("main", journals.sealed(lives)[head.position :])
        store.close()
        assert len(timeline) == len(lives[0])
        assert timeline.refresh() == len(lives[0]) + len(lives[1])
        timeline.seek(len(timeline) - 1)
