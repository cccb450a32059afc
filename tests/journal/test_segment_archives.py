"""Segments let their archived records go: reading crosses the border, and a fault at any call harms nothing."""

import contextlib
import errno
import random
from pathlib import Path

import pytest

from refold.journal.archive_file import write_archive
from refold.journal.archives import ArchivingStore, border_of
from refold.journal.errors import JournalError
from refold.journal.stores import open_reader
from refold.journal.stores.segments import folder
from refold.journal.stores.segments.store import SegmentStore
from refold.journal.testing import make_records
from refold.journal.verify import verify_stream
from tests.kit.faulty_files import Crash, Fault, FaultyFiles, UnsyncedFiles
from tests.kit.segment_campaign import let_go

BORDERS = [4, 10, 17, 23, 29]  # inside a group, at the ends of segments, in the one that is being written


def write(root):
    folder.create(root)
    store = SegmentStore(root, segment_bytes=2200, files=UnsyncedFiles())
    head = store.open_stream()
    for number in range(10):
        head = store.append("main", make_records(head, 3))
        if number == 4:
            store.maintain(idle=True)
    store.close()
    return head


def archive(store, place: Path, stop):
    start = border_of(store, "main").position
    store.add_archive("main", write_archive(place / f"{start}-{stop}", "main", store.read("main", start, stop)))


def drop_all(store):
    deleted = 0
    while count := store.drop_archived("main", 5):
        deleted += count
    return deleted


@pytest.fixture
def journal(tmp_path):
    return tmp_path / "journal", write(tmp_path / "journal")


@pytest.mark.parametrize("border", BORDERS)
def test_reading_crosses_the_border_before_and_after_the_records_are_gone(journal, tmp_path, border):
    root, head = journal
    everything = list(open_reader(str(root)).read())
    store = SegmentStore(root, files=UnsyncedFiles())
    assert isinstance(store, ArchivingStore)
    store.open_replica()
    archive(store, tmp_path, border)
    assert list(store.read()) == everything
    assert drop_all(store) == border
    store.compact()
    assert list(store.read()) == everything
    assert list(store.read(start=border - 1, stop=border + 2)) == everything[border - 1 : border + 2]
    assert border_of(store, "main").position == border
    store.close()
    first = min(path.name for path in (root / "main").iterdir() if path.suffix in {".seg", ".sealed"})
    assert int(first.partition(".")[0]) == border
    reader = open_reader(str(root))
    assert verify_stream(reader) == reader.head() == head
    again = SegmentStore(root, files=UnsyncedFiles())
    opened = again.open_stream()
    after = again.append("main", make_records(opened, 4))
    assert verify_stream(again) == after
    archive(again, tmp_path, 32)
    assert drop_all(again) == 32 - border
    assert verify_stream(again) == after
    again.close()


def test_without_the_archive_what_is_left_is_read_and_the_rest_is_named(journal, tmp_path):
    root, _ = journal
    store = SegmentStore(root, files=UnsyncedFiles())
    store.open_replica()
    archive(store, tmp_path, 10)
    drop_all(store)
    store.close()
    (tmp_path / "0-10").unlink()
    reader = open_reader(str(root))
    assert [record.position for record in reader.read(start=10)] == list(range(10, 30))
    with pytest.raises(JournalError, match=r"records 0 to 9 are archived in .*0-10"):
        list(reader.read())


def test_a_damaged_list_of_archives_is_found(journal, tmp_path):
    root, _ = journal
    store = SegmentStore(root, files=UnsyncedFiles())
    store.open_replica()
    archive(store, tmp_path, 10)
    store.close()
    path = root / "main" / "archives"
    data = path.read_bytes()
    for index in range(len(data)):
        path.write_bytes(data[:index] + bytes([data[index] ^ 1]) + data[index + 1 :])
        with pytest.raises(JournalError, match="lists where older records are archived"):
            list(open_reader(str(root)).read())


@pytest.mark.parametrize("fault", [Fault("late crash"), Fault("error", errno.EIO), Fault("torn crash", keep=50)])
@pytest.mark.parametrize("survival", ["none", "some"])
def test_whatever_fails_no_record_is_lost(journal, tmp_path, fault, survival):
    root, head = journal
    everything = list(open_reader(str(root)).read())

    def let_it_go(files):
        store = SegmentStore(root, segment_bytes=2200, files=files)
        try:
            store.open_replica()
            if not store.archives():
                archive(store, tmp_path, 23)
            drop_all(store)
        finally:
            let_go(store)

    images = {path.relative_to(root): path.read_bytes() for path in root.rglob("*") if path.is_file()}
    sound = FaultyFiles(root)
    let_it_go(sound)
    sound.end_process()
    for number in range(0, len(sound.calls), 4):
        FaultyFiles(root).lose_power("none")
        for path in [path for path in root.rglob("*") if path.is_file()]:
            path.unlink()
        for path, data in images.items():
            (root / path).write_bytes(data)
        (tmp_path / "0-23").unlink(missing_ok=True)
        files = FaultyFiles(root)
        files.plan(number, fault)
        with contextlib.suppress(JournalError, Crash):
            let_it_go(files)
        files.lose_power(survival, random.Random(number))
        assert list(open_reader(str(root)).read()) == everything
        let_it_go(UnsyncedFiles())
        reader = open_reader(str(root))
        assert list(reader.read()) == everything
        assert verify_stream(reader) == head
        assert border_of(reader, "main").position == 23
