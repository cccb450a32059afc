"""A file system that fails at any call, a disk that loses what wasn't synced: nothing acknowledged is lost, and nothing is there twice."""

import errno
import random

import pytest

from refold.journal.errors import JournalCorrupt, JournalError
from refold.journal.stores.segments import folder
from refold.journal.stores.segments.reader import SegmentReader
from refold.journal.stores.segments.store import SegmentStore
from refold.journal.testing import make_records
from refold.journal.verify import read_verified
from tests.kit import segment_campaign as campaign
from tests.kit.faulty_files import Crash, Fault, FaultyFiles, UnsyncedFiles


@pytest.fixture
def root(tmp_path):
    root = tmp_path / "journal"
    folder.create(root)
    return root


def test_no_call_may_fail_in_a_way_that_hurts():
    outcomes = [campaign.run(case) for case in campaign.cases(stride=41, first=7)]
    assert len(outcomes) > 200
    assert {outcome.told for outcome in outcomes} == {"ok", "JournalError", "Crash"}


def test_the_campaign_notices_a_store_that_does_not_sync(monkeypatch):
    monkeypatch.setattr(
        FaultyFiles, "fdatasync", lambda self, fd: self._do("fdatasync", self._fd_path(fd), lambda: None)
    )
    last = campaign.num_calls() - 1
    with pytest.raises(AssertionError):
        campaign.run(campaign.Case(last, "crash before", "none"))


def test_the_campaign_notices_a_store_that_does_not_sync_its_folders(monkeypatch):
    monkeypatch.setattr(FaultyFiles, "fsync_dir", lambda self, path: self._do("fsync_dir", path, lambda: None))
    with pytest.raises(AssertionError):
        campaign.run(campaign.Case(campaign.num_calls() - 1, "crash before", "none"))


def sync_of_an_append(root, files):
    """Open, append two records, and let the sync of three more fail; the number of that call."""
    store = SegmentStore(root, files=files)
    head = store.append("main", make_records(store.open_stream(), 2))
    number = len(files.calls) + 2  # a look at the place, a write, then the sync
    return store, head, number


def test_a_failed_sync_is_not_repeated_and_its_group_is_cut_off(root):
    files = FaultyFiles(root)
    store, head, number = sync_of_an_append(root, files)
    files.plan(number, Fault("error", errno.EIO))
    with pytest.raises(JournalError, match="check the disk"):
        store.append("main", make_records(head, 3))
    failed, *after = files.calls[number:]
    assert failed.name == "fdatasync"
    assert [call.name for call in after[:4]] == ["close", "open", "truncate", "fdatasync"], "a new handle, then the cut"
    assert store.head() == head
    with pytest.raises(JournalError, match="open_stream"):
        store.append("main", make_records(head, 3))
    assert store.open_stream().position == 2
    store.close()


def test_what_a_failed_sync_left_in_the_cache_is_written_again_before_it_counts(root):
    """The sync fails, the cut fails: the cache shows a whole group that the disk hasn't got, and calls it clean."""
    files = FaultyFiles(root)
    store, head, number = sync_of_an_append(root, files)
    files.plan(number, Fault("error", errno.EIO, lasts=True))
    records = make_records(head, 3)
    with pytest.raises(JournalError, match="records 2 to 4 may be in; open the journal again to find out"):
        store.append("main", records)
    campaign.let_go(store)
    files.restart()
    again = SegmentStore(root, files=files)
    head = again.open_stream()
    assert head.position == 5
    assert list(again.read())[2:] == records
    campaign.let_go(again)
    files.lose_power("none")
    assert list(read_verified(SegmentReader(root)))[2:] == records


def test_a_group_on_disk_whose_mark_could_not_move_is_found_by_the_next_owner(root):
    files = FaultyFiles(root)
    store, head, number = sync_of_an_append(root, files)
    files.plan(number + 1, Fault("error", errno.EIO))
    with pytest.raises(JournalError, match="records 2 to 4 are on disk, but not acknowledged"):
        store.append("main", make_records(head, 3))
    assert store.head().position == 5, "the head tells"
    assert store.open_stream().position == 5
    store.close()


def test_a_full_disk_stops_the_writer_and_frees_it_again(root):
    files = FaultyFiles(root)
    store, head, number = sync_of_an_append(root, files)
    files.plan(number - 1, Fault("torn", errno.ENOSPC, keep=60))
    with pytest.raises(
        JournalError, match=r"No space left on device \([0-9,]+ bytes free in .*main\); free disk space"
    ):
        store.append("main", make_records(head, 3))
    assert store.head() == head
    head = store.open_stream()
    assert store.append("main", make_records(head, 3)).position == 5
    store.close()


def test_a_disk_that_lies_about_syncs_is_found_out_or_leaves_a_true_prefix(root, tmp_path):
    found_out = 0
    for seed in range(40):
        base = tmp_path / str(seed)
        base.mkdir()
        folder.create(base / "journal")
        files, told, choose = FaultyFiles(base / "journal", lies=True), campaign.Told([], []), random.Random(seed)
        files.plan(choose.randrange(campaign.num_calls()), Fault("late crash"))
        with pytest.raises(Crash):
            campaign.play(base / "journal", files, told)
        files.lose_power("some", choose)
        written = [record for group in told.tried for record in group]
        try:
            store = SegmentStore(base / "journal", files=UnsyncedFiles())
            store.open_stream()
            seen = list(read_verified(store))
            store.close()
        except JournalCorrupt:
            found_out += 1
            continue
        assert seen == written[: len(seen)]
    assert found_out > 10


def test_a_file_that_cannot_be_read_is_an_error_not_an_end(root):
    store = SegmentStore(root, files=UnsyncedFiles())
    store.append("main", make_records(store.open_stream(), 50))
    store.close()
    sound = FaultyFiles(root)
    assert len(list(read_verified(SegmentReader(root, sound)))) == 50
    for number in range(len(sound.calls)):
        files = FaultyFiles(root)
        files.plan(number, Fault("error", errno.EIO))
        if sound.calls[number].name == "close":
            continue
        with pytest.raises(JournalError, match="check the disk"):
            list(read_verified(SegmentReader(root, files)))
