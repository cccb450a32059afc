"""Whatever is done to the files of a journal: a torn tail that nobody was told of is cut, and nothing else ever is."""

import contextlib
import os
import shutil

import pytest

from refold import migrations
from refold.journal.errors import JournalCorrupt, JournalError
from refold.journal.record import Head
from refold.journal.stores import open_reader
from refold.journal.stores.segments.store import SegmentStore
from refold.journal.testing import make_records
from refold.journal.verify import read_verified
from tests.kit.faulty_files import UnsyncedFiles

GROUPS = (1, 2)
LIVE = "00000000000000000000.seg"
SEALED = "00000000000000000000.sealed"


def opened(root):
    return SegmentStore(root, files=UnsyncedFiles())


def write(root, *, sealed):
    """A small journal: three records in two groups; then, if it's to be sealed, one more in the next segment."""
    migrations.ensure(f"segments:///{root}")
    store = opened(root)
    head = store.open_stream()
    for count in GROUPS:
        head = store.append("main", make_records(head, count))
    if sealed:
        store.compact()
        head = store.append("main", make_records(head, 1))
    store.close()
    return head


def contents(root):
    """All that a reader gets: the records, checked, and the head."""
    reader = open_reader(str(root))
    try:
        return list(read_verified(reader)), reader.head()
    finally:
        reader.close()


@pytest.fixture(params=[False, True], ids=["live", "sealed"])
def journal(request, tmp_path):
    root = tmp_path / "journal"
    write(root, sealed=request.param)
    return root


def records(root):
    """The records, checked, up to a head that is there."""
    reader = open_reader(str(root))
    try:
        return list(read_verified(reader))
    finally:
        reader.close()


@contextlib.contextmanager
def flipping(path):
    """A function that flips a bit of the file in place, and back at the next call."""
    fd, original, flipped = os.open(path, os.O_RDWR), path.read_bytes(), []

    def flip(index, bit):
        for before in flipped:
            os.pwrite(fd, original[before : before + 1], before)
        os.pwrite(fd, bytes([original[index] ^ 1 << bit]), index)
        flipped[:] = [index]

    yield flip
    os.close(fd)
    path.write_bytes(original)


def files_of(root):
    return sorted(path for path in root.rglob("*") if path.is_file() and path.stat().st_size)


def test_every_flipped_bit_is_found_or_changes_nothing(journal):
    good, harmless = records(journal), set()
    for path in files_of(journal):
        with flipping(path) as flip:
            for index in range(path.stat().st_size):
                for bit in range(8) if path.name != "mark" else [index % 8]:
                    flip(index, bit)
                    try:
                        seen = records(journal)
                    except JournalError:
                        continue
                    assert seen == good, f"bit {bit} of byte {index} of {path.name}: read otherwise, and nothing said"
                    harmless.add(path.name)
    assert harmless == {"mark"}, "only the mark, which is kept twice, may be damaged without a word"


def test_every_flipped_bit_is_found_by_the_next_owner_too(journal, tmp_path):
    good = contents(journal)
    for path in files_of(journal):
        original = path.read_bytes()
        for index in range(0, len(original), 3):
            copy = tmp_path / "copy"
            shutil.copytree(journal, copy)
            bit = 1 << (index % 8)
            copied = copy / path.relative_to(journal)
            copied.write_bytes(original[:index] + bytes([original[index] ^ bit]) + original[index + 1 :])
            try:
                store = opened(copy)
                store.open_stream()
                store.close()
                assert contents(copy)[0] == good[0], f"byte {index} of {path.name}"
            except JournalError:
                pass
            shutil.rmtree(copy)


@pytest.mark.parametrize("name", [LIVE, SEALED])
def test_the_first_bad_record_is_named(tmp_path, name):
    root = tmp_path / "journal"
    write(root, sealed=name == SEALED)
    path = root / "main" / name
    original = path.read_bytes()
    if name == SEALED:
        path.write_bytes(original[:100] + b"\xff" + original[101:])
        with pytest.raises(JournalCorrupt, match="damaged block"):
            contents(root)
        return
    for position in range(3):
        at = original.index(b'"handle":%d' % position)
        path.write_bytes(original[:at] + b"X" + original[at + 1 :])
        seen = []
        with pytest.raises(JournalCorrupt) as caught:
            seen.extend(record.position for record in read_verified(open_reader(str(root))))
        assert (caught.value.position, caught.value.kind) == (position, "edited")
        assert seen == list(range(position))


def test_a_file_cut_off_at_any_byte_is_found(journal):
    good = contents(journal)
    for path in files_of(journal):
        original = path.read_bytes()
        for size in range(len(original)):
            path.write_bytes(original[:size])
            if path.name == "mark":
                try:
                    assert contents(journal) == good
                except JournalError:
                    assert size < 1024
                continue
            with pytest.raises(JournalError):
                contents(journal)
        path.write_bytes(original)


def test_a_file_that_is_gone_is_found(journal):
    for path in files_of(journal):
        original = path.read_bytes()
        path.unlink()
        with pytest.raises((JournalError, ValueError)):
            contents(journal)
        path.write_bytes(original)


class TestTornTail:
    """The last group isn't whole, and the mark says that nobody was told of it, or that somebody was."""

    @pytest.fixture
    def torn(self, tmp_path):
        """The journal, where its last group begins and ends, and the bytes of its mark before that group."""
        root = tmp_path / "journal"
        migrations.ensure(f"segments:///{root}")
        store = opened(root)
        head = store.open_stream()
        head = store.append("main", make_records(head, 2))
        path, mark = root / "main" / LIVE, root / "main" / "mark"
        begin, mark_before = store._logs["main"].end, mark.read_bytes()
        store.append("main", make_records(head, 4, cause="x" * 60))
        end = store._logs["main"].end
        store.close()
        return root, path, begin, end, mark_before

    @pytest.mark.parametrize("rest", ["nothing", "zeros", "laid out"])
    def test_at_any_byte_it_is_cut_if_nobody_was_told(self, torn, rest):
        root, path, begin, end, mark_before = torn
        original = path.read_bytes()
        kept = contents(root)[0][:2]
        for cut in range(begin, end):
            filling = {"nothing": 0, "zeros": end - cut, "laid out": end + 70_000 - cut}[rest]
            path.write_bytes(original[:cut] + bytes(filling))
            (root / "main" / "mark").write_bytes(mark_before)
            if cut % 16 == 0:
                assert contents(root)[0] == kept
            store = opened(root)
            head = store.open_stream()
            assert head.position == 2
            assert list(store.read()) == kept
            if cut % 16 == 0:
                head = store.append("main", make_records(head, 1))
                assert list(read_verified(store)) == list(store.read())
                assert head.position == 3
            store.close()

    @pytest.mark.parametrize("rest", ["nothing", "zeros"])
    def test_at_any_byte_it_is_damage_if_somebody_was_told(self, torn, rest):
        root, path, begin, end, _ = torn
        original = path.read_bytes()
        for cut in range(begin, end):
            damaged = original[:cut] + bytes(end - cut if rest == "zeros" else 0)
            path.write_bytes(damaged)
            with pytest.raises(JournalCorrupt):
                contents(root)
            with pytest.raises(JournalCorrupt) as caught:
                opened(root).open_stream()
            assert 2 <= caught.value.position <= 5
            assert path.read_bytes() == damaged, "damage is never cut off"

    def test_a_lost_sector_in_its_middle_is_torn_too(self, torn):
        root, path, begin, end, mark_before = torn
        original = path.read_bytes()
        sector = -(-begin // 512) * 512
        assert sector + 512 < end
        path.write_bytes(original[:sector] + bytes(512) + original[sector + 512 :])
        (root / "main" / "mark").write_bytes(mark_before)
        store = opened(root)
        assert store.open_stream().position == 2
        store.close()

    def test_a_flipped_bit_is_damage_though_nobody_was_told(self, torn):
        root, path, begin, end, mark_before = torn
        original = path.read_bytes()
        (root / "main" / "mark").write_bytes(mark_before)
        for index in range(begin, end):
            damaged = original[:index] + bytes([original[index] ^ 1 << index % 8]) + original[index + 1 :]
            path.write_bytes(damaged)
            with pytest.raises(JournalCorrupt):
                opened(root).open_stream()
            assert path.read_bytes() == damaged, "damage is never cut off"

    def test_a_group_with_a_successor_is_damage_whatever_the_mark_says(self, torn):
        root, path, begin, end, mark_before = torn
        store = opened(root)
        head = store.open_stream()
        store.append("main", make_records(head, 1))
        store.close()
        original = path.read_bytes()
        for cut in range(begin, end, 13):
            path.write_bytes(original[:cut] + bytes(end - cut) + original[end:])
            (root / "main" / "mark").write_bytes(mark_before)
            with pytest.raises(JournalCorrupt, match="follows it"):
                opened(root).open_stream()

    def test_a_whole_group_above_the_mark_counts(self, torn):
        root, _, _, _, mark_before = torn
        before = contents(root)
        (root / "main" / "mark").write_bytes(mark_before)
        assert contents(root) == before
        store = opened(root)
        assert store.open_stream() == Head(6, before[1].hash, 2)
        assert list(store.read()) == before[0]
        store.close()


def test_a_segment_in_anothers_place_is_found(tmp_path):
    for name in ("a", "b"):
        write(tmp_path / name, sealed=True)
    (tmp_path / "a" / "main" / SEALED).rename(tmp_path / "a" / "main" / "00000000000000000001.sealed")
    with pytest.raises(JournalCorrupt) as caught:
        contents(tmp_path / "a")
    assert (caught.value.position, caught.value.kind) == (0, "deleted")
    (tmp_path / "b" / "main" / "00000000000000000003.seg").rename(tmp_path / "b" / "main" / "00000000000000000009.seg")
    with pytest.raises(JournalCorrupt):
        contents(tmp_path / "b")
