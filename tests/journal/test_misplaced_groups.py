"""Groups of records that were moved about in segment files: whoever reads and whoever opens names the same place and kind."""

import contextlib
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from refold.journal.errors import JournalCorrupt
from refold.journal.record import seal
from refold.journal.stores.segments import compression, sealed
from refold.journal.stores.segments.folder import create
from refold.journal.stores.segments.frames import (
    GROUP_HEADER_BYTES,
    pack_group,
    pack_group_header,
    pack_segment_header,
    unpack_group,
    unpack_records,
    unpack_segment_header,
)
from refold.journal.stores.segments.reader import SegmentReader
from refold.journal.stores.segments.sealed import SealedSegment
from refold.journal.stores.segments.store import SegmentStore
from refold.journal.testing import make_records
from refold.journal.verify import read_verified, verified, verify_stream
from tests.kit.faulty_files import UnsyncedFiles

GROUPS = (2, 3, 1, 1, 4, 2, 3, 1)
STARTS = [sum(GROUPS[:number]) for number in range(len(GROUPS) + 1)]
END = STARTS[-1]

Group = bytes


def write(root: Path, groups: tuple[int, ...] = GROUPS, *, cause: str = "", lives: int = 1, is_sealed: bool = False):
    """A journal; each life appends these groups, and all in the last segment, or all but one record in a sealed one."""
    create(root)
    for _ in range(lives):
        store = SegmentStore(root, files=UnsyncedFiles())
        head = store.open_stream()
        for count in groups:
            head = store.append("main", make_records(head, count, cause=cause))
        if is_sealed:
            store.compact()
            store.append("main", make_records(head, 1))
        store.close()


def segment(root: Path) -> Path:
    """The first one."""
    return min(path for path in (root / "main").iterdir() if path.suffix in {".seg", ".sealed"})


def groups_of(path: Path) -> list[Group]:
    """The groups with records."""
    if path.suffix == ".sealed":
        source = SealedSegment(UnsyncedFiles(), path, int(path.stem))
        found = [(group, pack_group_header(group) + body) for group, body in source.groups(0)]
        source.close()
    else:
        data, found = path.read_bytes(), []
        offset = unpack_segment_header(data).size
        while (group := unpack_group(data, offset, offset)) is not None:
            found.append((group, data[group.start : group.end]))
            offset = group.end
    return [raw for group, raw in found if group.num_records]


def put(path: Path, groups: list[Group]) -> None:
    """Let a segment have exactly these groups behind the one that began its first life; all checksums agree."""
    old = path.read_bytes()
    header = unpack_segment_header(old)
    data = pack_group(header.head.position, 1, ()) + b"".join(groups)
    begin = pack_segment_header(header.stream, header.head)
    if path.suffix == ".seg":
        path.write_bytes(begin + data)
        return
    source = SealedSegment(UnsyncedFiles(), path, int(path.stem))
    stop = source.stop
    source.close()
    codec = compression.best_codec()
    packed = codec.pack(data)
    block = sealed.Block(header.head.position, len(begin), len(packed), len(data), zlib.crc32(packed))
    index = sealed._BLOCK.pack(*block) + sealed._STOP.pack(stop.position, stop.engine_epoch, stop.hash)
    end = sealed._END.pack(len(begin) + len(packed), 1, zlib.crc32(index), codec.number)
    path.write_bytes(begin + packed + index + end + sealed._CRC.pack(zlib.crc32(end)) + sealed._END_MAGIC)


def header_of(group: Group):
    return unpack_group(group, 0, 0)


def last_record(group: Group):
    return list(unpack_records(header_of(group), group[GROUP_HEADER_BYTES:]))[-1]


def told_by(ask: Callable[[], object]) -> tuple[int, str]:
    with pytest.raises(JournalCorrupt) as caught:
        ask()
    assert f"record {caught.value.position} " in str(caught.value)
    assert f"({caught.value.kind})" in str(caught.value)
    return caught.value.position, caught.value.kind


def damage(root: Path) -> tuple[int, str]:
    """Where a journal is damaged, and how: whoever reads it and whoever opens it say the same, and what is before can be read."""
    before = {path: path.read_bytes() for path in (root / "main").iterdir()}

    def taken_over() -> None:
        """As an engine does it: nothing of the journal is changed before all of it was read."""
        with contextlib.closing(SegmentStore(root, files=UnsyncedFiles())) as store:
            store.claim_stream()
            head = store.head()
            for _ in verified(store.read(stop=head.position), expect=head, is_whole=False):
                pass
            store.open_stream()

    told = told_by(lambda: verify_stream(SegmentReader(root)))
    assert told_by(taken_over) == told
    assert {path: path.read_bytes() for path in (root / "main").iterdir()} == before, "damage stays as it is"
    seen: list[int] = []
    with pytest.raises(JournalCorrupt):
        seen += (record.position for record in read_verified(SegmentReader(root)))
    reader = SegmentReader(root)
    assert [record.position for record in reader.read(stop=told[0])] == list(range(told[0]))
    return told


@pytest.fixture(params=[False, True], ids=["written", "sealed"])
def journal(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    root = tmp_path / "journal"
    write(root, is_sealed=request.param)
    return root


@pytest.mark.parametrize("number", range(len(GROUPS)))
def test_a_group_that_lies_there_twice_was_put_in_behind_the_first(journal: Path, number: int) -> None:
    groups = groups_of(segment(journal))
    put(segment(journal), [*groups[: number + 1], *groups[number:]])
    assert damage(journal) == (STARTS[number + 1], "inserted")


@pytest.mark.parametrize("number", [1, 4, 6])
def test_a_group_that_lies_there_again_later_was_put_in_there(journal: Path, number: int) -> None:
    groups = groups_of(segment(journal))
    put(segment(journal), [*groups[: number + 2], groups[number], *groups[number + 2 :]])
    assert damage(journal) == (STARTS[number + 2], "inserted")


@pytest.mark.parametrize(("low", "high"), [(0, 1), (2, 3), (1, 6), (6, 7), (0, 7)])
def test_two_groups_that_changed_places_are_reordered(journal: Path, low: int, high: int) -> None:
    groups = groups_of(segment(journal))
    groups[low], groups[high] = groups[high], groups[low]
    put(segment(journal), groups)
    assert damage(journal) == (STARTS[low], "reordered")


@pytest.mark.parametrize(("source", "target"), [(1, 5), (5, 1), (7, 0), (0, 7)])
def test_a_group_that_was_moved_is_reordered(journal: Path, source: int, target: int) -> None:
    groups = groups_of(segment(journal))
    groups.insert(target, groups.pop(source))
    put(segment(journal), groups)
    assert damage(journal) == (STARTS[min(source, target)], "reordered")


@pytest.mark.parametrize(("number", "count"), [(0, 1), (3, 1), (2, 4)])
def test_groups_that_are_gone_are_deleted(journal: Path, number: int, count: int) -> None:
    groups = groups_of(segment(journal))
    del groups[number : number + count]
    put(segment(journal), groups)
    assert damage(journal) == (STARTS[number], "deleted")


@pytest.mark.parametrize("number", [0, 3, 7])
def test_a_group_of_another_journal_was_put_in(journal: Path, tmp_path: Path, number: int) -> None:
    write(tmp_path / "other", (5, 1, 2), cause="other")
    stranger = groups_of(segment(tmp_path / "other"))[2]
    groups = groups_of(segment(journal))
    put(segment(journal), [*groups[:number], stranger, *groups[number:]])
    assert damage(journal) == (STARTS[number], "inserted")


@pytest.mark.parametrize("number", [1, 3, 6])
def test_a_group_that_was_made_up_for_a_place_was_put_in_there(journal: Path, tmp_path: Path, number: int) -> None:
    """Its position fits, and the one after it doesn't any more."""
    groups = groups_of(segment(journal))
    write(tmp_path / "other", (STARTS[number], 3), cause="other")
    stranger = groups_of(segment(tmp_path / "other"))[1]
    assert header_of(stranger).position == STARTS[number]
    put(segment(journal), [*groups[:number], stranger, *groups[number:]])
    assert damage(journal) == (STARTS[number], "inserted")


def test_a_group_in_another_ones_place_is_edited_where_it_begins(journal: Path, tmp_path: Path) -> None:
    groups = groups_of(segment(journal))
    write(tmp_path / "other", GROUPS, cause="other, and longer")
    groups[3] = groups_of(segment(tmp_path / "other"))[3]
    put(segment(journal), groups)
    assert damage(journal) == (STARTS[3], "edited")


def test_a_group_of_the_next_segment_at_the_end_of_the_one_before_was_put_in(tmp_path: Path) -> None:
    root = tmp_path / "journal"
    create(root)
    store = SegmentStore(root, segment_bytes=1, files=UnsyncedFiles())
    head = store.open_stream()
    for _ in range(3):
        head = store.append("main", make_records(head, 2))
    store.close()
    first, second, _ = sorted((root / "main").glob("*.seg"))
    put(first, [*groups_of(first), *groups_of(second)])
    assert damage(root) == (4, "inserted")


class TestBehindTheEnd:
    """All that was acknowledged is whole, and behind it lies a group that doesn't belong there."""

    @pytest.fixture
    def journal(self, tmp_path: Path) -> Path:
        root = tmp_path / "journal"
        write(root, lives=2)
        return root

    def appended(self, root: Path, group: Group) -> tuple[int, str]:
        path = segment(root)
        path.write_bytes(path.read_bytes().rstrip(b"\0") + group)
        return damage(root)

    def test_the_last_group_was_put_in_if_it_is_there_twice(self, journal: Path) -> None:
        assert self.appended(journal, groups_of(segment(journal))[-1]) == (2 * END, "inserted")

    def test_so_was_an_older_one(self, journal: Path) -> None:
        assert self.appended(journal, groups_of(segment(journal))[1]) == (2 * END, "inserted")

    def test_one_of_a_later_position_too(self, journal: Path, tmp_path: Path) -> None:
        write(tmp_path / "other", (2 * END + 4, 1), cause="other")
        assert self.appended(journal, groups_of(segment(tmp_path / "other"))[1]) == (2 * END, "inserted")

    def test_one_of_an_older_engine_is_reordered(self, journal: Path) -> None:
        last = groups_of(segment(journal))[-1]
        head = last_record(last)
        late = seal(SegmentReader(journal).head()._replace(engine_epoch=1), 0, b"[]")
        assert head.engine_epoch == 2
        assert self.appended(journal, pack_group(late.position, 1, [late])) == (2 * END, "reordered")

    def test_so_is_an_older_engine_that_takes_the_stream_over(self, journal: Path) -> None:
        assert self.appended(journal, pack_group(2 * END, 1, ())) == (2 * END, "reordered")


class TestOneGroup:
    """A journal whose records were all written at once, as a copy's are."""

    @pytest.fixture
    def journal(self, tmp_path: Path) -> Path:
        root = tmp_path / "journal"
        write(root, (END,))
        return root

    @pytest.mark.parametrize("position", [0, 1, END // 2, END - 1])
    def test_a_flipped_bit_is_told_at_its_record_by_all(self, journal: Path, position: int) -> None:
        path = segment(journal)
        data = bytearray(path.read_bytes())
        data[data.index(b'"handle":%d' % position) + 1] ^= 1
        path.write_bytes(data)
        assert damage(journal) == (position, "edited")

    def test_whoever_begins_in_the_middle_is_told_the_same_record(self, journal: Path) -> None:
        path = segment(journal)
        data = bytearray(path.read_bytes())
        data[data.index(b'"handle":9') + 1] ^= 1
        path.write_bytes(data)
        reader, seen = SegmentReader(journal), []
        with pytest.raises(JournalCorrupt, match="record 9 "):
            seen += (record.position for record in reader.read(start=4))
        assert [record.position for record in reader.read(start=4, stop=9)] == [4, 5, 6, 7, 8]


def test_the_file_of_another_journal_is_told_where_its_groups_lie_across_the_acknowledged_end(tmp_path: Path) -> None:
    write(tmp_path / "a", GROUPS)
    write(tmp_path / "b", (*GROUPS, 1), cause="b")
    shutil.copy(segment(tmp_path / "b"), segment(tmp_path / "a"))
    position, kind = damage(tmp_path / "a")
    assert kind == "edited"
    assert 0 < position <= END


def of_epoch(group: Group, epoch: int) -> Group:
    """The same group, saying another engine epoch; its checksum agrees."""
    return pack_group_header(header_of(group)._replace(engine_epoch=epoch)) + group[GROUP_HEADER_BYTES:]


@pytest.mark.parametrize("number", range(len(GROUPS)))
@pytest.mark.parametrize("epoch", [0, 2, 1 << 40])
def test_a_group_that_says_another_engine_epoch_than_its_records_is_edited(
    journal: Path, number: int, epoch: int
) -> None:
    groups = groups_of(segment(journal))
    groups[number] = of_epoch(groups[number], epoch)
    put(segment(journal), groups)
    position, kind = damage(journal)
    assert (kind, position) == ("edited", STARTS[number + 1] - 1)


def test_an_engine_epoch_that_begins_with_another_number_is_told_where_that_shows(tmp_path: Path) -> None:
    root = tmp_path / "journal"
    write(root, (2, 1), lives=2)
    data = segment(root).read_bytes()
    begun = pack_group(3, 2, ())
    assert data.count(begun) == 1
    segment(root).write_bytes(data.replace(begun, pack_group(3, 7, ())))
    assert damage(root) == (3, "edited")


def test_the_last_engine_epoch_is_known_by_the_mark_too(tmp_path: Path) -> None:
    root = tmp_path / "journal"
    write(root, (2, 1))
    write_nothing = SegmentStore(root, files=UnsyncedFiles())
    write_nothing.open_stream()
    write_nothing.close()
    data = segment(root).read_bytes()
    begun = pack_group(3, 2, ())
    assert data.count(begun) == 1
    segment(root).write_bytes(data.replace(begun, pack_group(3, 7, ())))
    assert damage(root) == (2, "edited")
