"""Our stores keep snapshots and can be replicas; how snapshots are thinned, and what becomes of damaged ones."""

import sqlite3

import pytest

from refold import migrations
from refold.journal.record import EMPTY_HEAD, Head
from refold.journal.snapshots import SnapshotReader, kept, make_snapshot, open_body
from refold.journal.store import DEFAULT_STREAM
from refold.journal.stores import open_reader
from refold.journal.stores.memory import MemoryJournal, MemoryStore
from refold.journal.stores.segments.store import SegmentStore
from refold.journal.stores.sql import SqlStore
from refold.journal.testing_extras import (
    ClaimingStoreContract,
    ReplicaStoreContract,
    SnapshotStoreContract,
    snapshot_at,
)


def _sqlite(tmp_path, *, exclusive):
    url = f"sqlite:///{tmp_path / 'journal.db'}"
    migrations.ensure(url)
    return lambda: SqlStore(url, exclusive=exclusive)


def _postgres(url, *, exclusive):
    return lambda: SqlStore(url, exclusive=exclusive)


def _memory():
    journal = MemoryJournal()
    return lambda: MemoryStore(journal)


def _segments(tmp_path, *, exclusive):
    migrations.ensure(f"{tmp_path}/journal/")
    return lambda: SegmentStore(tmp_path / "journal", exclusive=exclusive)


STORES = {
    "memory": lambda request: _memory(),
    "sqlite": lambda request: _sqlite(request.getfixturevalue("tmp_path"), exclusive=True),
    "sqlite by fence alone": lambda request: _sqlite(request.getfixturevalue("tmp_path"), exclusive=False),
    "segments": lambda request: _segments(request.getfixturevalue("tmp_path"), exclusive=True),
    "segments by fence alone": lambda request: _segments(request.getfixturevalue("tmp_path"), exclusive=False),
    "postgresql": lambda request: _postgres(request.getfixturevalue("postgres_url"), exclusive=True),
    "postgresql by fence alone": lambda request: _postgres(request.getfixturevalue("postgres_url"), exclusive=False),
}


@pytest.fixture(params=STORES)
def store_factory(request):
    handles = []
    make = STORES[request.param](request)

    def tracked():
        handles.append(make())
        return handles[-1]

    yield tracked
    for handle in handles:
        handle.close()


class TestSnapshots(SnapshotStoreContract):
    pass


@pytest.mark.parametrize("store_factory", [name for name in STORES if name != "memory"], indirect=True)
class TestClaims(ClaimingStoreContract):
    pass


class TestReplicas(ReplicaStoreContract):
    pass


def test_a_reader_of_a_file_has_its_snapshots(tmp_path):
    store = _sqlite(tmp_path, exclusive=True)()
    store.open_stream()
    store.save_snapshot(DEFAULT_STREAM, snapshot_at(12))
    reader = open_reader(str(tmp_path / "journal.db"))
    assert isinstance(reader, SnapshotReader)
    assert [entry.position for entry in reader.snapshots()] == [12]
    assert reader.load_snapshot(DEFAULT_STREAM, 12) == snapshot_at(12)
    reader.close()
    store.close()


def test_a_body_comes_back_and_its_pieces_are_joined():
    snapshot = make_snapshot(Head(9, bytes(32), 2), "v", "d", [b"one", b"", b"two" * 1000])
    assert open_body(snapshot) == b"one" + b"two" * 1000
    assert snapshot.head == Head(9, bytes(32), 2)
    assert len(snapshot.body) < 200


@pytest.mark.parametrize("field", ["position", "engine_epoch", "hash", "version", "digest", "body", "checksum"])
def test_a_changed_field_is_noticed(field):
    snapshot = make_snapshot(Head(9, bytes(32), 2), "v", "d", [b"content"])
    value = getattr(snapshot, field)
    changed = value + 1 if isinstance(value, int) else value[:-1] + (b"\7" if isinstance(value, bytes) else "\7")
    with pytest.raises(ValueError, match="changed"):
        open_body(snapshot._replace(**{field: changed}))
    with pytest.raises(ValueError, match=r"changed|read"):
        open_body(snapshot._replace(**{field: None}))


def test_a_body_cut_off_at_any_byte_is_noticed():
    snapshot = make_snapshot(EMPTY_HEAD, "v", "d", [bytes(range(256))])
    for length in range(len(snapshot.body)):
        with pytest.raises(ValueError, match="changed"):
            open_body(snapshot._replace(body=snapshot.body[:length]))


def test_a_row_of_another_type_is_refused_by_the_table(tmp_path):
    store = _sqlite(tmp_path, exclusive=True)()
    store.open_stream()
    store.save_snapshot(DEFAULT_STREAM, snapshot_at(1))
    store.close()
    with sqlite3.connect(tmp_path / "journal.db") as connection, pytest.raises(sqlite3.IntegrityError):
        connection.execute("UPDATE journal_snapshots SET position = 'x'")


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_few_are_kept_however_many_there_were(step):
    positions: list[int] = []
    for number in range(1, 3000):
        positions = kept([*positions, number * step])
        assert positions[-1] == number * step
        assert len(positions) <= 2 + (number * step).bit_length()
        assert number < 2 or (number - 1) * step in positions
    assert positions[0] <= 2999 * step // 2


def test_a_few_are_all_kept():
    assert kept([]) == []
    assert kept([5]) == [5]
    assert kept([4096, 8192]) == [4096, 8192]
    assert kept([1, 100, 1000]) == [1, 100, 1000]
