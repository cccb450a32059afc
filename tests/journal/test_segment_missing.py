"""Whole segments are gone. Whoever looks is told how much is lost, and whatever is before it can be read."""

import shutil
from pathlib import Path

import pytest

from refold.journal.ends import check_parts
from refold.journal.errors import JournalCorrupt
from refold.journal.record import Head
from refold.journal.stores.segments.folder import create
from refold.journal.stores.segments.reader import SegmentReader
from refold.journal.stores.segments.store import SegmentStore
from refold.journal.testing import make_records
from refold.journal.verify import verify_stream
from tests.kit.faulty_files import UnsyncedFiles

NUM_RECORDS = 24


def written(root: Path, stream: str = "main", *, sealed: bool = True) -> Head:
    """A journal of one record a group and a few groups a segment; all but the newest are sealed, or none is."""
    create(root)
    store = SegmentStore(root, segment_bytes=700, files=UnsyncedFiles())
    head = store.open_stream(stream)
    for _ in range(NUM_RECORDS):
        (record,) = make_records(head, 1, cause="x" * 40)
        head = store.append(stream, [record])
        if sealed:
            store.maintain(idle=True)
    store.close()
    return head


def segments(root: Path, stream: str = "main") -> list[Path]:
    return sorted(path for path in (root / stream).iterdir() if path.suffix in {".seg", ".sealed"})


def first(path: Path) -> int:
    return int(path.stem)


@pytest.fixture(params=[True, False], ids=["sealed", "not sealed"])
def journal(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    root = tmp_path / "journal"
    written(root, sealed=request.param)
    assert len(segments(root)) > 4
    return root


def damage(root: Path) -> JournalCorrupt:
    with pytest.raises(JournalCorrupt) as caught:
        verify_stream(SegmentReader(root))
    return caught.value


def test_of_a_stream_without_any_everybody_is_told_how_many_records_are_lost(journal: Path) -> None:
    for path in segments(journal):
        path.unlink()
    reader = SegmentReader(journal)
    assert reader.streams() == ["main"], "there was one, its mark says"
    for ask in (reader.head, lambda: next(reader.read()), reader.heads):
        with pytest.raises(JournalCorrupt, match=f"record 0 in .* and those up to {NUM_RECORDS - 1} are lost"):
            ask()
    with pytest.raises(JournalCorrupt, match="are lost"):
        SegmentStore(journal, files=UnsyncedFiles()).open_stream()


def test_of_a_stream_with_a_digest_for_a_name_too(tmp_path: Path) -> None:
    root = tmp_path / "journal"
    written(root, "A Stream")
    (folder,) = (path for path in root.iterdir() if path.is_dir())
    for path in segments(root, folder.name):
        path.unlink()
    with pytest.raises(JournalCorrupt, match="and all after it are not there"):
        SegmentReader(root).streams()


@pytest.mark.parametrize("num", [1, 2])
def test_what_is_before_the_newest_that_is_gone_can_be_read(journal: Path, num: int) -> None:
    gone = segments(journal)[-num:]
    lost = first(gone[0])
    for path in gone:
        path.unlink()
    found = damage(journal)
    assert (found.position, found.kind) == (lost, "truncated")
    assert "lost: the segment that it was acknowledged in is gone" in str(found)
    reader = SegmentReader(journal)
    assert [record.position for record in reader.read(stop=lost)] == list(range(lost))
    assert reader.head().position == NUM_RECORDS, "so many were acknowledged"
    for start in (lost, NUM_RECORDS - 1):
        with pytest.raises(JournalCorrupt, match=f"record {lost} "):
            list(reader.read(start=start))
    with pytest.raises(JournalCorrupt, match=f"record {lost} "):
        SegmentStore(journal, files=UnsyncedFiles()).open_stream()


def test_a_newest_that_had_no_record_yet_is_missed_too(tmp_path: Path) -> None:
    root = tmp_path / "journal"
    written(root)
    store = SegmentStore(root, files=UnsyncedFiles())
    store.open_replica()
    store.compact()
    store.close()
    segments(root)[-1].unlink()
    assert damage(root).kind == "truncated"


def test_a_hole_is_seen_in_the_listing_by_whoever_does_not_read_the_records(journal: Path, tmp_path: Path) -> None:
    check_parts(SegmentReader(journal), "main", NUM_RECORDS)
    for path in segments(journal)[1:-1]:
        following = first(segments(journal)[segments(journal).index(path) + 1])
        copy = tmp_path / "copy"
        shutil.copytree(journal, copy)
        (copy / "main" / path.name).unlink()
        reader = SegmentReader(copy)
        check_parts(reader, "main", first(path))
        for stop in (first(path) + 1, NUM_RECORDS):
            with pytest.raises(JournalCorrupt) as caught:
                check_parts(reader, "main", stop)
            assert (caught.value.position, caught.value.kind) == (first(path), "deleted")
            assert f"the next segment has {following}" in str(caught.value)
        with pytest.raises(JournalCorrupt, match=f"record {first(path)} .* is not there"):
            SegmentStore(copy, files=UnsyncedFiles()).open_stream()
        assert [record.position for record in reader.read(stop=first(path))] == list(range(first(path)))
        shutil.rmtree(copy)


def test_a_first_one_that_is_gone_may_be_archived_and_the_way_to_adopt_it_is_named_as_it_is_typed(
    journal: Path,
) -> None:
    segments(journal)[0].unlink()
    reader = SegmentReader(journal)
    check_parts(reader, "main", NUM_RECORDS)
    with pytest.raises(JournalCorrupt, match=r"record 0 .* see `refold archive --adopt FOLDER`"):
        next(reader.read())
    store = SegmentStore(journal, files=UnsyncedFiles())
    assert store.open_replica().position == NUM_RECORDS
    store.close()


def test_a_newest_one_that_is_gone_is_seen_in_the_listing(journal: Path) -> None:
    segments(journal)[-1].unlink()
    with pytest.raises(JournalCorrupt, match=r"(is|are) lost"):
        check_parts(SegmentReader(journal), "main", NUM_RECORDS)


def test_a_listing_that_was_looked_at_is_not_looked_at_again(journal: Path) -> None:
    reader = SegmentReader(journal)
    check_parts(reader, "main", NUM_RECORDS)
    opened: list[Path] = []

    class Counting(UnsyncedFiles):
        def open(self, path: Path, flags: int) -> int:
            opened.append(path)
            return super().open(path, flags)

    reader._files = Counting()
    check_parts(reader, "main", NUM_RECORDS)
    assert not [path for path in opened if path.suffix in {".seg", ".sealed"}]
