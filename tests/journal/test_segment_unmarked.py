"""A stream that has lost its mark: what is whole can be read and copied, nobody writes to it, and nobody is left to believe in its end."""

import os
import shutil
from pathlib import Path

import pytest

from refold import migrations
from refold.journal.copying import copy_stream
from refold.journal.errors import JournalCorrupt, JournalError
from refold.journal.record import EMPTY_HEAD
from refold.journal.stores import open_reader, open_store
from refold.journal.stores.segments.folder import create
from refold.journal.stores.segments.reader import SegmentReader
from refold.journal.stores.segments.snapshot_files import pack_snapshot, snapshot_name
from refold.journal.stores.segments.store import SegmentStore
from refold.journal.testing import make_records
from refold.journal.testing_extras import snapshot_at
from refold.journal.verify import read_verified, verify_stream
from tests.kit.faulty_files import Fault, FaultyFiles, UnsyncedFiles

GROUPS = (1, 2, 3, 1, 4)
NUM_RECORDS = sum(GROUPS)

WAYS = {
    "it is gone": lambda mark: mark.unlink(),
    "it is empty": lambda mark: mark.write_bytes(b""),
    "it is zeros": lambda mark: mark.write_bytes(bytes(1024)),
    "both of its slots are damaged": lambda mark: mark.write_bytes(
        mark.read_bytes()[:20] + b"?" + mark.read_bytes()[21:530] + b"?" + mark.read_bytes()[531:]
    ),
    "a folder took its place": lambda mark: (mark.unlink(), mark.mkdir()),
    "another file took its place": lambda mark: mark.write_bytes(b"{}\n" * 400),
}


def opened(root: Path) -> SegmentStore:
    return SegmentStore(root, files=UnsyncedFiles())


def written(root: Path, *, segment_bytes: int = 64 << 20) -> list[tuple[int, int]]:
    """A closed journal; where each group ends in the newest segment, and how many records there are then."""
    create(root)
    store, ends = SegmentStore(root, segment_bytes=segment_bytes, files=UnsyncedFiles()), []
    head = store.open_stream()
    for count in GROUPS:
        head = store.append("main", make_records(head, count, cause="x" * 40))
        ends.append((store._logs["main"].end, head.position))
    store.close()
    return ends


def contents(root: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def doubt(root: Path) -> str:
    with pytest.raises(JournalCorrupt) as caught:
        SegmentReader(root).check_end()
    assert caught.value.kind == "unmarked"
    return str(caught.value)


@pytest.fixture(params=[64 << 20, 400], ids=["one segment", "several segments"])
def journal(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    root = tmp_path / "journal"
    written(root, segment_bytes=request.param)
    return root


@pytest.fixture(params=WAYS.values(), ids=WAYS.keys())
def unmarked(request: pytest.FixtureRequest, journal: Path) -> Path:
    request.param(journal / "main" / "mark")
    return journal


class TestOfAJournalThatIsWhole:
    def test_everything_can_be_read(self, unmarked: Path) -> None:
        reader = open_reader(str(unmarked))
        assert [record.position for record in reader.read()] == list(range(NUM_RECORDS))
        assert [record.position for record in reader.read(start=5, stop=8)] == [5, 6, 7]
        assert reader.head().position == NUM_RECORDS
        assert reader.streams() == ["main"]  # type: ignore[attr-defined]

    def test_whoever_verifies_it_gets_all_records_and_then_an_error(self, unmarked: Path) -> None:
        seen = []
        with pytest.raises(JournalCorrupt) as caught:
            seen.extend(read_verified(open_reader(str(unmarked))))
        assert len(seen) == NUM_RECORDS
        assert (caught.value.kind, caught.value.position) == ("unmarked", NUM_RECORDS)

    def test_nobody_writes_to_it_and_the_refusal_says_what_is_whole_and_names_the_way_out(self, unmarked: Path) -> None:
        before, head = contents(unmarked), open_reader(str(unmarked)).head()
        for opening in (SegmentStore.open_stream, SegmentStore.open_replica):
            store = opened(unmarked)
            with pytest.raises(JournalCorrupt) as caught:
                opening(store)
            store.close()
            said = str(caught.value)
            assert said.startswith(f"{unmarked}/main/mark ")
            assert f"whole up to record {NUM_RECORDS - 1}, head {NUM_RECORDS}:{head.hash.hex()}" in said
            assert f"`refold copy --accept-end {unmarked} NEW`" in said
        (unmarked / "owner.lock").unlink(missing_ok=True)
        before.pop(str(unmarked / "owner.lock"), None)
        assert contents(unmarked) == before, "not a byte of the journal was changed"

    def test_it_is_copied_only_by_somebody_who_accepts_its_end(self, unmarked: Path, tmp_path: Path) -> None:
        original = contents(unmarked)
        url = f"segments:///{tmp_path / 'new'}"
        migrations.ensure(url)
        source, target = open_reader(str(unmarked)), open_store(url)
        with pytest.raises(JournalCorrupt, match="--accept-end"):
            copy_stream(source, target, "main")  # type: ignore[arg-type]
        assert target.head() == EMPTY_HEAD
        copied = copy_stream(source, target, "main", accepts_end=True)  # type: ignore[arg-type]
        target.close()
        assert copied.head.position == NUM_RECORDS
        assert verify_stream(open_reader(url)).position == NUM_RECORDS
        store = open_store(url)
        store.append("main", make_records(store.open_stream(), 1))
        store.close()
        assert contents(unmarked) == original

    def test_a_sound_journal_is_copied_without_being_asked(self, journal: Path, tmp_path: Path) -> None:
        url = f"segments:///{tmp_path / 'new'}"
        migrations.ensure(url)
        target = open_store(url)
        assert copy_stream(open_reader(str(journal)), target, "main").head.position == NUM_RECORDS  # type: ignore[arg-type]
        target.close()


class TestOfAJournalThatIsNot:
    """The mark is gone, and with it something else: that is what it was there to tell."""

    @pytest.fixture
    def cut(self, tmp_path: Path) -> tuple[Path, Path, bytes, list[tuple[int, int]]]:
        root = tmp_path / "journal"
        ends = written(root)
        path = root / "main" / "00000000000000000000.seg"
        (root / "main" / "mark").unlink()
        return root, path, path.read_bytes(), ends

    def test_a_log_that_was_cut_between_two_groups_is_never_taken_for_one_that_ends_there(self, cut) -> None:
        root, path, original, ends = cut
        for end, num_records in ends:
            path.write_bytes(original[:end])
            assert len(list(SegmentReader(root).read())) == num_records
            assert f"up to record {num_records - 1}, " in doubt(root)
            with pytest.raises(JournalCorrupt):
                opened(root).open_stream()

    def test_a_snapshot_of_more_records_proves_that_some_are_gone(self, cut) -> None:
        root, path, original, ends = cut
        (root / "main" / "mark").write_bytes(b"")
        path.write_bytes(original[: ends[2][0]])
        assert "are gone;" not in doubt(root)
        (root / "main" / snapshot_name(9)).write_bytes(pack_snapshot(snapshot_at(9)))
        (root / "main" / snapshot_name(12)).write_bytes(b"\xf5RSS, and no more")
        (root / "main" / snapshot_name(99)).write_bytes(pack_snapshot(snapshot_at(9)))
        assert "; records 6 to 8 were there when a snapshot was made, and are gone;" in doubt(root), (
            "a new name proves nothing"
        )

    def test_a_stream_that_was_cut_back_to_nothing_is_no_new_one_as_long_as_a_snapshot_knows_better(self, cut) -> None:
        root, path, original, _ = cut
        header = len(original) - len(original[original.index(b"\xf5RG\xfe") :])
        path.write_bytes(original[:header])
        assert SegmentReader(root).head() == EMPTY_HEAD, "as an engine leaves it that is killed before the mark is made"
        (root / "main" / snapshot_name(9)).write_bytes(pack_snapshot(snapshot_at(9)))
        assert "no whole record is left of it; records 0 to 8 were there" in doubt(root)
        with pytest.raises(JournalCorrupt):
            opened(root).open_stream()

    @pytest.mark.parametrize("filling", [0, 70_000])
    def test_a_last_group_that_is_there_in_part_is_not_read_and_told(self, cut, filling: int) -> None:
        root, path, original, ends = cut
        (begin, before), (end, _) = ends[-2:]
        for at in range(begin + 1, end, 7):
            path.write_bytes(original[:at] + bytes(filling))
            assert len(list(SegmentReader(root).read())) == before
            assert f"record {before}, or of a group that begins with it, only a part is there" in doubt(root)

    def test_before_a_changed_group_everything_is_read_and_the_change_is_told(self, cut) -> None:
        root, path, original, ends = cut
        for number, (end, _) in enumerate(ends):
            before = ends[number - 1][1] if number else 0
            path.write_bytes(original[: end - 5] + bytes([original[end - 5] ^ 1]) + original[end - 4 :])
            assert [record.position for record in SegmentReader(root).read()] == list(range(before))
            assert f"; record {before} in {path} " in doubt(root)

    def test_a_segment_that_is_gone_or_damaged_ends_what_is_whole(self, tmp_path: Path) -> None:
        root = tmp_path / "journal"
        written(root, segment_bytes=400)
        (root / "main" / "mark").unlink()
        names = sorted(path.name for path in (root / "main").iterdir())
        assert len(names) > 2
        copy = tmp_path / "copy"
        for name in names[1:]:
            first = int(name.split(".")[0])
            for damage in (Path.unlink, lambda path: path.write_bytes(b"?" + path.read_bytes()[1:])):
                shutil.copytree(root, copy)
                damage(copy / "main" / name)
                assert len(list(SegmentReader(copy).read())) == first
                assert f"up to record {first - 1}, " in doubt(copy)
                shutil.rmtree(copy)


def test_a_reader_sees_what_an_engine_writes_whose_mark_somebody_removed(tmp_path: Path) -> None:
    root = tmp_path / "journal"
    create(root)
    store = opened(root)
    head = store.append("main", make_records(store.open_stream(), 2))
    (root / "main" / "mark").unlink()
    store.append("main", make_records(head, 3))
    assert len(list(SegmentReader(root).read())) == 5
    doubt(root)
    store.close()
    with pytest.raises(JournalCorrupt, match="mark is gone"):
        opened(root).open_stream()


def test_an_engine_that_lives_mends_a_damaged_mark_with_its_next_append(tmp_path: Path) -> None:
    root = tmp_path / "journal"
    create(root)
    store = opened(root)
    head = store.append("main", make_records(store.open_stream(), 2))
    os.truncate(root / "main" / "mark", 0)
    doubt(root)
    store.append("main", make_records(head, 3))
    SegmentReader(root).check_end()
    assert verify_stream(SegmentReader(root)).position == 5
    store.close()


def test_a_mark_that_may_not_be_read_is_no_lost_one(tmp_path: Path) -> None:
    root = tmp_path / "journal"
    written(root)
    files = FaultyFiles(root)
    files.rule = lambda call: Fault("error") if call.path.name == "mark" else None
    with pytest.raises(JournalError, match="check the disk"):
        SegmentReader(root, files).head()
