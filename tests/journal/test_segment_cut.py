"""The newest segment is shorter than its mark says: what is before the cut is read, and what is behind it is told as lost."""

import os
import shutil
from pathlib import Path

import pytest

from refold.journal.copying import copy_stream
from refold.journal.ends import EndInDoubt, check_parts
from refold.journal.errors import JournalCorrupt
from refold.journal.stores.memory import MemoryStore
from refold.journal.stores.segments.reader import SegmentReader
from refold.journal.stores.segments.store import SegmentStore
from refold.journal.verify import verify_stream
from tests.journal.test_segment_missing import NUM_RECORDS, first, segments, written
from tests.kit.faulty_files import UnsyncedFiles


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("cut") / "journal"
    written(root)
    return root


@pytest.fixture
def journal(original: Path, tmp_path: Path) -> Path:
    return shutil.copytree(original, tmp_path / "journal")


def cut(journal: Path, size: int) -> SegmentReader:
    os.truncate(segments(journal)[-1], size)
    return SegmentReader(journal)


def test_cut_at_any_byte_all_before_the_cut_is_read_and_the_first_that_is_lost_is_named(journal: Path) -> None:
    newest = segments(journal)[-1]
    size, begin = newest.stat().st_size, first(newest)
    seen = set()
    for end in range(size - 1, -1, -1):
        reader, positions = cut(journal, end), []
        with pytest.raises(EndInDoubt, match="lost") as caught:
            positions.extend(record.position for record in reader.read())
        lost = caught.value.position
        assert positions == list(range(lost))
        assert (caught.value.kind, caught.value.num_known) == ("truncated", NUM_RECORDS)
        assert f"the file has {end} bytes" in str(caught.value)
        seen.add(lost)
    assert seen == set(range(begin, NUM_RECORDS))


def test_a_last_group_that_has_no_record_is_missed_too(journal: Path) -> None:
    store = SegmentStore(journal, files=UnsyncedFiles())
    store.open_stream()
    store.close()
    reader = cut(journal, segments(journal)[-1].stat().st_size - 1)
    with pytest.raises(EndInDoubt, match=f"record {NUM_RECORDS} in .* can't be added"):
        verify_stream(reader)


@pytest.mark.parametrize("num_bytes", [1, 300, 10**9], ids=["by a byte", "by groups", "to nothing"])
def test_whoever_does_not_read_it_all_is_told_the_same(journal: Path, num_bytes: int) -> None:
    size = segments(journal)[-1].stat().st_size
    reader = cut(journal, max(size - num_bytes, 0))
    with pytest.raises(EndInDoubt) as caught:
        verify_stream(reader)
    lost, said = caught.value.position, str(caught.value)
    assert reader.streams() == ["main"]
    assert reader.head().position == NUM_RECORDS, "so many were acknowledged"
    assert [record.position for record in reader.read(stop=lost)] == list(range(lost))
    if lost < NUM_RECORDS:
        for ask in (
            lambda: list(reader.read(start=NUM_RECORDS - 1)),
            lambda: check_parts(SegmentReader(journal), "main", NUM_RECORDS),
        ):
            with pytest.raises(EndInDoubt) as again:
                ask()
            assert str(again.value) == said
    before = {path: path.read_bytes() for path in (journal / "main").iterdir()}
    with pytest.raises(JournalCorrupt) as refused:
        SegmentStore(journal, files=UnsyncedFiles()).open_stream()
    assert str(refused.value) == said
    assert {path: path.read_bytes() for path in (journal / "main").iterdir()} == before


@pytest.mark.parametrize("is_gone", [False, True], ids=["emptied", "gone"])
def test_a_copy_of_what_is_before_is_made_for_whoever_accepts_the_end(journal: Path, is_gone: bool) -> None:
    newest = segments(journal)[-1]
    reader = cut(journal, 0)
    if is_gone:
        newest.unlink()
    target = MemoryStore()
    with pytest.raises(EndInDoubt, match=f"`refold copy --accept-end {journal} NEW`"):
        copy_stream(reader, target, "main")
    target.close()
    target = MemoryStore()
    copied = copy_stream(reader, target, "main", accepts_end=True)
    assert copied.head.position == first(newest)
    assert copied.doubt is not None
    assert copied.doubt.num_known == NUM_RECORDS
    assert verify_stream(target).position == first(newest)


def test_a_segment_that_is_cut_in_the_middle_of_a_journal_is_no_end_to_accept(journal: Path) -> None:
    middle = segments(journal)[-2]
    os.truncate(middle, middle.stat().st_size // 2)
    with pytest.raises(JournalCorrupt) as caught:
        copy_stream(SegmentReader(journal), MemoryStore(), "main", accepts_end=True)
    assert not isinstance(caught.value, EndInDoubt)
