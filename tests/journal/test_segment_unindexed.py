"""The index at the end of a sealed segment is damaged: no record is in it, so all are read, and it's told and mended."""

import contextlib
from pathlib import Path

import pytest

from refold.journal.errors import JournalCorrupt
from refold.journal.stores.segments import compression, sealed
from refold.journal.stores.segments.folder import create
from refold.journal.stores.segments.reader import SegmentReader
from refold.journal.stores.segments.store import SegmentStore
from refold.journal.testing import make_records
from refold.journal.verify import verify_stream
from tests.kit.faulty_files import UnsyncedFiles

SEALED = "00000000000000000000.sealed"
NUM_SEALED, NUM_RECORDS = 12, 14
LAST_LINE_BYTES, PER_BLOCK_BYTES, STOP_BYTES = 25, 28, 48


@pytest.fixture(params=["zlib", "zstd"])
def journal(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Twelve records in a sealed segment of several blocks, and two in the next."""
    codec = compression._zlib() if request.param == "zlib" else compression._zstd()
    if codec is None:
        pytest.skip("no zstd here")
    monkeypatch.setattr(compression, "best_codec", lambda: codec)
    monkeypatch.setattr(sealed, "BLOCK_BYTES", 600)
    root = tmp_path / "journal"
    create(root)
    store = SegmentStore(root, files=UnsyncedFiles())
    head = store.open_stream()
    for _ in range(NUM_SEALED):
        head = store.append("main", make_records(head, 1, cause="x" * 40))
    store.compact()
    store.append("main", make_records(head, NUM_RECORDS - NUM_SEALED))
    store.close()
    return root


def blocks_of(root: Path) -> list[sealed.Block]:
    with contextlib.closing(sealed.SealedSegment(UnsyncedFiles(), root / "main" / SEALED, 0)) as segment:
        assert segment.has_index
        return segment.index.blocks


def index_bytes(root: Path) -> range:
    """Where index and last line are."""
    path, blocks = root / "main" / SEALED, blocks_of(root)
    assert len(blocks) > 2
    size = path.stat().st_size
    begin = size - LAST_LINE_BYTES - STOP_BYTES - PER_BLOCK_BYTES * len(blocks)
    assert begin == blocks[-1].offset + blocks[-1].packed_bytes
    return range(begin, size)


def flip(path: Path, *places: int) -> bytes:
    original = path.read_bytes()
    data = bytearray(original)
    for place in places:
        data[place] ^= 1
    path.write_bytes(data)
    return original


def read(root: Path, start: int = 0) -> tuple[list[int], JournalCorrupt | None]:
    """What can be read from a position on, and what ends that."""
    seen: list[int] = []
    try:
        seen.extend(record.position for record in SegmentReader(root).read(start=start))
    except JournalCorrupt as error:
        return seen, error
    return seen, None


def told_by_verify(root: Path) -> JournalCorrupt:
    with pytest.raises(JournalCorrupt) as caught:
        verify_stream(SegmentReader(root))
    return caught.value


def test_whatever_byte_of_it_is_changed_all_records_are_read_and_verify_says_that_none_is_affected(
    journal: Path,
) -> None:
    path = journal / "main" / SEALED
    for place in index_bytes(journal):
        original = flip(path, place)
        assert read(journal) == (list(range(NUM_RECORDS)), None), f"byte {place}"
        assert read(journal, start=7) == (list(range(7, NUM_RECORDS)), None)
        told = told_by_verify(journal)
        assert (told.kind, told.position) == ("unindexed", 0)
        path.write_bytes(original)


def test_whatever_is_cut_off_of_it(journal: Path) -> None:
    path, original = journal / "main" / SEALED, (journal / "main" / SEALED).read_bytes()
    for end in index_bytes(journal):
        path.write_bytes(original[:end])
        assert read(journal) == (list(range(NUM_RECORDS)), None), f"byte {end}"
        assert told_by_verify(journal).kind == "unindexed"


def test_a_damaged_block_is_no_damaged_index_and_with_both_what_is_before_the_block_is_read(journal: Path) -> None:
    path, blocks, (*_, last) = journal / "main" / SEALED, blocks_of(journal), index_bytes(journal)
    for block in blocks:
        for places in ((block.offset + 9,), (block.offset + 9, last)):
            original = flip(path, *places)
            seen, error = read(journal)
            assert seen == list(range(block.position))
            assert error is not None
            assert (error.kind, error.position) == ("edited", block.position)
            assert told_by_verify(journal).kind == "edited"
            path.write_bytes(original)


def test_a_segment_that_ends_in_a_block_lacks_records_and_not_its_index(journal: Path) -> None:
    path, original, blocks = journal / "main" / SEALED, (journal / "main" / SEALED).read_bytes(), blocks_of(journal)
    for block in blocks[1:]:
        for end in (block.offset, block.offset + block.packed_bytes // 2, block.offset + block.packed_bytes - 1):
            path.write_bytes(original[:end])
            seen, error = read(journal)
            assert seen == list(range(block.position))
            assert error is not None
            assert error.position == block.position
            assert told_by_verify(journal).kind in {"deleted", "edited"}


def test_an_engine_goes_on_and_compacting_mends_it(journal: Path) -> None:
    path = journal / "main" / SEALED
    original = flip(path, index_bytes(journal)[-1])
    store = SegmentStore(journal, files=UnsyncedFiles())
    head = store.open_stream()
    assert head.position == NUM_RECORDS
    store.append("main", make_records(head, 1))
    assert "`refold compact" in str(told_by_verify(journal))
    store.compact()
    store.close()
    assert path.read_bytes() == original
    assert verify_stream(SegmentReader(journal)).position == NUM_RECORDS + 1


def test_compacting_does_not_touch_a_segment_that_lacks_records(journal: Path) -> None:
    path = journal / "main" / SEALED
    flip(path, blocks_of(journal)[1].offset + 9, index_bytes(journal)[-1])
    damaged = path.read_bytes()
    store = SegmentStore(journal, files=UnsyncedFiles())
    with contextlib.suppress(JournalCorrupt):
        store.open_replica()
        store.compact()
    store.close()
    assert path.read_bytes() == damaged


def test_of_a_damaged_index_and_a_lost_mark_the_mark_is_told(journal: Path) -> None:
    """The index is mended only where the end is sure: what is told first must be what can be done first."""
    flip(journal / "main" / SEALED, index_bytes(journal)[0])
    (journal / "main" / "mark").unlink()
    with contextlib.closing(SegmentReader(journal)) as reader, pytest.raises(JournalCorrupt) as caught:
        verify_stream(reader)
    assert caught.value.kind == "unmarked"
