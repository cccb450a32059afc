"""Contracts of what a store may offer beside the port: snapshots, claims, being a replica. Used like `refold.journal.testing`.

from refold.journal.testing_extras import ClaimingStoreContract, ReplicaStoreContract, SnapshotStoreContract

class TestMySnapshots(SnapshotStoreContract):
    @pytest.fixture
    def store_factory(self, tmp_path): ...
"""

# ruff: noqa: D102 - a test here is called what it says

import contextlib
from collections.abc import Callable

import pytest

from refold.journal.codec import encode
from refold.journal.errors import Fenced, JournalError, JournalOwned, PositionConflict
from refold.journal.events import RequestAborted
from refold.journal.record import EMPTY_HEAD, GENESIS_HASH, Head, Record, head_after
from refold.journal.replicas import ReplicaStore
from refold.journal.snapshots import Snapshot, SnapshotEntry, SnapshotReader, SnapshotStore, make_snapshot
from refold.journal.store import DEFAULT_STREAM, ClaimingStore, JournalStore
from refold.journal.testing import make_records
from refold.journal.verify import verify_stream

StoreFactory = Callable[[], JournalStore]


def snapshot_at(position: int, filling: bytes = b"state") -> Snapshot:
    """A snapshot of nothing in particular."""
    return make_snapshot(Head(position, bytes([position % 251]) * 32, 1), "version", "digest", [filling, b"\0\xff"])


class SnapshotStoreContract:
    """Subclass this with a fixture `store_factory`, as for `JournalStoreContract`."""

    def opened(self, store_factory: StoreFactory) -> SnapshotStore:
        store = store_factory()
        assert isinstance(store, SnapshotStore)
        assert isinstance(store, SnapshotReader)
        store.open_stream()
        return store

    def test_a_new_stream_has_no_snapshot(self, store_factory: StoreFactory) -> None:
        store = self.opened(store_factory)
        assert store.snapshots() == []
        assert store.snapshots("never opened") == []
        assert store.load_snapshot(DEFAULT_STREAM, 0) is None

    def test_a_snapshot_comes_back_as_it_was(self, store_factory: StoreFactory) -> None:
        store = self.opened(store_factory)
        large = snapshot_at(7, bytes(range(256)) * 20_000)
        store.save_snapshot(DEFAULT_STREAM, large)
        assert store.load_snapshot(DEFAULT_STREAM, 7) == large
        assert store.load_snapshot(DEFAULT_STREAM, 6) is None
        assert store.load_snapshot("other", 7) is None

    def test_snapshots_are_listed_by_position(self, store_factory: StoreFactory) -> None:
        store = self.opened(store_factory)
        made = [snapshot_at(position) for position in (300, 2, 41)]
        for snapshot in made:
            store.save_snapshot(DEFAULT_STREAM, snapshot)
        listed = store.snapshots()
        assert [entry.position for entry in listed] == [2, 41, 300]
        assert all(entry == SnapshotEntry(entry.position, entry.num_bytes) for entry in listed)
        assert all(entry.num_bytes > 0 for entry in listed)

    def test_a_second_snapshot_at_a_position_takes_the_place_of_the_first(self, store_factory: StoreFactory) -> None:
        store = self.opened(store_factory)
        store.save_snapshot(DEFAULT_STREAM, snapshot_at(5, b"old"))
        store.save_snapshot(DEFAULT_STREAM, snapshot_at(5, b"new"))
        assert store.load_snapshot(DEFAULT_STREAM, 5) == snapshot_at(5, b"new")
        assert len(store.snapshots()) == 1

    def test_dropped_snapshots_are_gone(self, store_factory: StoreFactory) -> None:
        store = self.opened(store_factory)
        for position in (1, 2, 3):
            store.save_snapshot(DEFAULT_STREAM, snapshot_at(position))
        store.drop_snapshots(DEFAULT_STREAM, [1, 3, 99])
        store.drop_snapshots(DEFAULT_STREAM, [])
        assert [entry.position for entry in store.snapshots()] == [2]

    def test_snapshots_change_nothing_about_records(self, store_factory: StoreFactory) -> None:
        store = store_factory()
        head = store.append(DEFAULT_STREAM, make_records(store.open_stream(), 3))
        assert isinstance(store, SnapshotStore)
        store.save_snapshot(DEFAULT_STREAM, snapshot_at(3))
        store.drop_snapshots(DEFAULT_STREAM, [3])
        assert store.head() == head
        assert store.append(DEFAULT_STREAM, make_records(head, 2)).position == 5
        assert verify_stream(store) == store.head()

    def test_only_an_open_stream_keeps_snapshots(self, store_factory: StoreFactory) -> None:
        store = self.opened(store_factory)
        with pytest.raises(JournalError, match="open_stream"):
            store.save_snapshot("other", snapshot_at(1))
        with pytest.raises(JournalError, match="open_stream"):
            store.drop_snapshots("other", [1])

    def test_another_handle_reads_them_and_a_fenced_one_keeps_none(self, store_factory: StoreFactory) -> None:
        first, second = self.opened(store_factory), store_factory()
        first.save_snapshot(DEFAULT_STREAM, snapshot_at(1))
        assert isinstance(second, SnapshotStore)
        assert second.load_snapshot(DEFAULT_STREAM, 1) == snapshot_at(1)
        try:
            second.open_stream()
        except JournalOwned:
            return
        with pytest.raises(Fenced):
            first.save_snapshot(DEFAULT_STREAM, snapshot_at(2))
        assert [entry.position for entry in second.snapshots()] == [1]


class ClaimingStoreContract:
    """Subclass this with a fixture `store_factory`, as for `JournalStoreContract`."""

    def left_behind(self, store_factory: StoreFactory) -> tuple[Head, list[Record]]:
        """What an engine has written and closed."""
        store = store_factory()
        head = store.append(DEFAULT_STREAM, make_records(store.open_stream(), 3))
        store.close()
        return head, make_records(EMPTY_HEAD._replace(engine_epoch=head.engine_epoch), 3)

    def claimed(self, store_factory: StoreFactory) -> ClaimingStore:
        store = store_factory()
        assert isinstance(store, ClaimingStore)
        assert store.claim_stream() is True
        return store

    def test_a_claim_changes_nothing(self, store_factory: StoreFactory) -> None:
        head, records = self.left_behind(store_factory)
        for _ in range(2):
            store = self.claimed(store_factory)
            assert (store.head(), list(store.read())) == (head, records)
            store.close()
        assert (store_factory().head(), list(store_factory().read())) == (head, records)

    def test_nothing_can_be_claimed_and_stays_nothing(self, store_factory: StoreFactory) -> None:
        store = self.claimed(store_factory)
        assert (store.head(), list(store.read())) == (EMPTY_HEAD, [])
        store.close()
        assert store_factory().head() == EMPTY_HEAD

    def test_what_is_claimed_is_read_and_then_opened(self, store_factory: StoreFactory) -> None:
        head, _ = self.left_behind(store_factory)
        store = self.claimed(store_factory)
        assert verify_stream(store) == head
        opened = store.open_stream()
        assert opened == head._replace(engine_epoch=head.engine_epoch + 1)
        assert verify_stream(store)[:2] == opened[:2]
        assert store.append(DEFAULT_STREAM, make_records(opened, 2)).position == head.position + 2

    def test_a_claim_ends_with_its_handle(self, store_factory: StoreFactory) -> None:
        head, _ = self.left_behind(store_factory)
        self.claimed(store_factory).close()
        assert store_factory().open_stream().engine_epoch == head.engine_epoch + 1

    def test_whoever_is_kept_out_by_a_claim_changes_nothing(self, store_factory: StoreFactory) -> None:
        head, _ = self.left_behind(store_factory)
        store, other = self.claimed(store_factory), store_factory()
        assert isinstance(other, ClaimingStore)
        try:
            other.claim_stream()
        except JournalOwned:
            with pytest.raises(JournalOwned):
                other.open_stream()
        assert store.open_stream() == head._replace(engine_epoch=head.engine_epoch + 1)

    def test_an_engine_that_lives_isnt_disturbed(self, store_factory: StoreFactory) -> None:
        engine, other = store_factory(), store_factory()
        head = engine.append(DEFAULT_STREAM, make_records(engine.open_stream(), 2))
        assert isinstance(other, ClaimingStore)
        with contextlib.suppress(JournalOwned):
            other.claim_stream()
        other.close()
        assert engine.append(DEFAULT_STREAM, make_records(head, 1)).engine_epoch == head.engine_epoch
        assert verify_stream(engine) == engine.head()


def lives(*counts: int) -> list[Record]:
    """Records of several lives of an engine, `counts` of them each."""
    records: list[Record] = []
    head = EMPTY_HEAD
    for life, count in enumerate(counts, 1):
        records += make_records(head._replace(engine_epoch=2 * life), count, cause=f"life {life}")
        head = head_after(records[-1])
    return records


class ReplicaStoreContract:
    """Subclass this with a fixture `store_factory`, as for `JournalStoreContract`."""

    def replica(self, store_factory: StoreFactory) -> tuple[ReplicaStore, Head]:
        store = store_factory()
        assert isinstance(store, ReplicaStore)
        return store, store.open_replica()

    def test_opening_a_replica_raises_no_epoch(self, store_factory: StoreFactory) -> None:
        store, head = self.replica(store_factory)
        assert head == EMPTY_HEAD == store.open_replica()
        assert store.append(DEFAULT_STREAM, lives(3)).engine_epoch == 2
        assert store.open_replica().engine_epoch == 2 == store.head().engine_epoch

    def test_records_of_several_lives_are_kept_as_they_are(self, store_factory: StoreFactory) -> None:
        store, _ = self.replica(store_factory)
        records = lives(3, 1, 4)
        store.append(DEFAULT_STREAM, records[:2])
        store.append(DEFAULT_STREAM, records[2:])
        assert list(store.read()) == records
        assert store.head() == head_after(records[-1]) == verify_stream(store)

    def test_copying_goes_on_where_it_stopped(self, store_factory: StoreFactory) -> None:
        records = lives(3, 1, 4)
        store, _ = self.replica(store_factory)
        store.append(DEFAULT_STREAM, records[:5])
        store.close()
        store, head = self.replica(store_factory)
        assert head == head_after(records[4])
        store.append(DEFAULT_STREAM, records[5:])
        assert list(store.read()) == records

    def test_an_engine_opens_a_replica_in_the_next_epoch(self, store_factory: StoreFactory) -> None:
        store, _ = self.replica(store_factory)
        records = lives(2, 2)
        after = store.append(DEFAULT_STREAM, records)
        opened = store.open_stream()
        assert opened == Head(4, after.hash, after.engine_epoch + 1)
        head = store.append(DEFAULT_STREAM, make_records(opened, 1))
        assert verify_stream(store) == head
        with pytest.raises(Fenced):
            store.append(DEFAULT_STREAM, make_records(Head(5, head.hash, 1), 1))

    def test_every_record_is_checked(self, store_factory: StoreFactory) -> None:
        store, _ = self.replica(store_factory)
        records = lives(4)
        forged = records[2]._replace(body=encode([RequestAborted(handle=9, cause="forged")]).body)
        with pytest.raises(PositionConflict):
            store.append(DEFAULT_STREAM, [*records[:2], forged, records[3]])
        with pytest.raises(PositionConflict):
            store.append(DEFAULT_STREAM, [records[0], *records[2:]])
        with pytest.raises(PositionConflict):
            store.append(DEFAULT_STREAM, records[1:])
        assert list(store.read()) == []
        assert store.head() == Head(0, GENESIS_HASH, 0)

    def test_epochs_never_fall(self, store_factory: StoreFactory) -> None:
        store, _ = self.replica(store_factory)
        new = make_records(EMPTY_HEAD._replace(engine_epoch=5), 1)
        old = make_records(head_after(new[0])._replace(engine_epoch=4), 1)
        with pytest.raises(Fenced):
            store.append(DEFAULT_STREAM, [*new, *old])
        store.append(DEFAULT_STREAM, new)
        with pytest.raises(Fenced):
            store.append(DEFAULT_STREAM, old)

    def test_of_an_engine_and_a_copy_one_is_refused(self, store_factory: StoreFactory) -> None:
        engine, copy = store_factory(), store_factory()
        head = engine.append(DEFAULT_STREAM, make_records(engine.open_stream(), 2))
        assert isinstance(copy, ReplicaStore)
        try:
            seen = copy.open_replica()
        except JournalOwned:
            return
        assert seen == head
        try:
            engine.append(DEFAULT_STREAM, make_records(head, 1))
        except (PositionConflict, Fenced):
            copy.append(DEFAULT_STREAM, make_records(head, 2, cause="another"))
        else:
            with pytest.raises((PositionConflict, Fenced)):
                copy.append(DEFAULT_STREAM, make_records(head, 2, cause="another"))
        assert verify_stream(engine) == engine.head()
