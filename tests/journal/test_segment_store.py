"""What segments have that the contract can't ask: rotation, sealing, an index, compression, live readers, folders and names."""

import os
import subprocess
import threading

import pytest

from refold import migrations
from refold.journal.errors import Fenced, JournalCorrupt, JournalError, JournalOwned, NotFound, SchemaTooNew
from refold.journal.record import EMPTY_HEAD, Head, head_after
from refold.journal.stores import engine_owner, open_reader, open_store
from refold.journal.stores.segments import compression, folder, sealed
from refold.journal.stores.segments.reader import SegmentReader
from refold.journal.stores.segments.store import SegmentStore
from refold.journal.testing import make_records
from refold.journal.verify import read_verified, verify_stream
from tests.kit.faulty_files import FaultyFiles, UnsyncedFiles

WITHOUT_SYNCS = UnsyncedFiles()


@pytest.fixture
def root(tmp_path):
    root = tmp_path / "journal"
    folder.create(root)
    return root


def names(root, stream="main"):
    return sorted(path.name for path in (root / stream).iterdir())


def fill(store, head, num_groups, count=10):
    for _ in range(num_groups):
        head = store.append("main", make_records(head, count))
    return head


class TestRotationAndSealing:
    def test_a_segment_that_is_full_is_followed_by_the_next(self, root):
        store = SegmentStore(root, segment_bytes=2000, files=WITHOUT_SYNCS)
        head = fill(store, store.open_stream(), 3)
        segments = [name for name in names(root) if name != "mark"]
        assert segments == ["00000000000000000000.seg", "00000000000000000010.seg", "00000000000000000020.seg"]
        assert verify_stream(store) == head
        store.close()

    def test_maintenance_seals_what_is_closed_and_an_idle_one_all_of_it(self, root, monkeypatch):
        monkeypatch.setattr(sealed, "BLOCK_BYTES", 1000)
        store = SegmentStore(root, segment_bytes=2000, files=WITHOUT_SYNCS)
        head = fill(store, store.open_stream(), 12, count=3)
        store.maintain()
        assert "00000000000000000000.sealed.new" in names(root)
        store.maintain(idle=True)
        kinds = [name.partition(".")[2] for name in names(root) if name != "mark"]
        assert kinds == ["sealed", "sealed", "sealed", "seg"]
        assert verify_stream(store) == head
        store.close()

    def test_who_never_maintains_is_maintained(self, root):
        store = SegmentStore(root, segment_bytes=1000, files=WITHOUT_SYNCS)
        fill(store, store.open_stream(), 40)
        unsealed = [name for name in names(root) if name.endswith(".seg")]
        assert len(unsealed) <= 6
        store.close()

    def test_any_range_is_read_across_the_borders(self, root, monkeypatch):
        monkeypatch.setattr(sealed, "BLOCK_BYTES", 1500)
        store = SegmentStore(root, segment_bytes=6000, files=WITHOUT_SYNCS)
        head = store.open_stream()
        for count in (1, 7, 2, 30, 1, 1, 25, 3, 40, 10):
            head = store.append("main", make_records(head, count))
            if count == 30:
                store.maintain(idle=True)
                head = store.open_stream()
        store.maintain(idle=True)
        kinds = {name.partition(".")[2] for name in names(root)}
        assert kinds >= {"sealed", "seg"}
        everything = list(store.read())
        assert [record.position for record in everything] == list(range(120))
        for start in range(0, 122, 3):
            for stop in (start, start + 1, start + 20, None):
                assert list(store.read(start=start, stop=stop)) == everything[start:stop]
        store.close()

    def test_a_position_in_a_sealed_segment_is_found_by_its_index(self, root, monkeypatch):
        monkeypatch.setattr(sealed, "BLOCK_BYTES", 4000)
        store = SegmentStore(root, files=WITHOUT_SYNCS)
        fill(store, store.open_stream(), 200)
        store.compact()
        store.close()
        (segment,) = [name for name in names(root) if name.endswith("sealed")]
        size = (root / "main" / segment).stat().st_size
        files, read = FaultyFiles(root), []
        files.rule = lambda call: read.append(call) if call.name == "pread" and call.path.name == segment else None
        reader = SegmentReader(root, files)
        assert [record.position for record in reader.read(start=1500, stop=1501)] == [1500]
        assert len(read) == 4, "header, last line, index, one block"
        assert size > 30_000

    def test_compacting_seals_what_was_being_written(self, root):
        store = SegmentStore(root, files=WITHOUT_SYNCS)
        head = fill(store, store.open_stream(), 3)
        before = list(store.read())
        store.compact()
        store.compact()
        assert [n.partition(".")[2] for n in names(root) if n != "mark"] == ["sealed", "seg"]
        assert list(store.read()) == before
        head = fill(store, head, 1)
        store.close()
        again = SegmentStore(root, files=WITHOUT_SYNCS)
        assert again.open_stream() == Head(40, head.hash, 2)
        again.close()
        with pytest.raises(JournalError):
            again.compact()

    def test_a_damaged_segment_is_not_sealed(self, root):
        store = SegmentStore(root, segment_bytes=2000, files=WITHOUT_SYNCS)
        head = fill(store, store.open_stream(), 2)
        path = root / "main" / "00000000000000000000.seg"
        data = path.read_bytes()
        path.write_bytes(data.replace(b'"handle":3', b'"handle":4'))
        store.maintain(idle=True)
        assert path.exists()
        assert fill(store, head, 1).position == 30, "the writer goes on"
        with pytest.raises(JournalCorrupt) as caught:
            list(read_verified(store))
        assert caught.value.position == 3
        store.close()

    def test_what_a_crash_leaves_of_sealing_is_removed(self, root):
        store = SegmentStore(root, segment_bytes=2000, files=WITHOUT_SYNCS)
        head = fill(store, store.open_stream(), 2)
        original = (root / "main" / "00000000000000000000.seg").read_bytes()
        store.maintain(idle=True)
        (root / "main" / "00000000000000000000.seg").write_bytes(original)
        (root / "main" / "00000000000000000010.sealed.new").write_bytes(b"half")
        assert verify_stream(open_reader(str(root))) == head
        store.open_stream()
        assert names(root) == ["00000000000000000000.sealed", "00000000000000000010.seg", "mark"]
        store.close()

    def test_a_clean_close_gives_back_the_laid_out_space(self, root):
        store = SegmentStore(root, files=WITHOUT_SYNCS)
        fill(store, store.open_stream(), 1)
        path = root / "main" / "00000000000000000000.seg"
        laid_out = path.stat().st_size
        store.close()
        assert path.stat().st_size < 4000 < laid_out


class TestCompression:
    @pytest.fixture
    def sealed_with_zlib(self, root, monkeypatch):
        with monkeypatch.context() as without:
            without.setattr(compression, "_zstd", lambda: None)
            store = SegmentStore(root, files=WITHOUT_SYNCS)
            head = fill(store, store.open_stream(), 5)
            store.compact()
            store.close()
        return head

    def test_without_zstd_it_is_zlib_and_with_it_that_is_read_too(self, root, sealed_with_zlib):
        assert verify_stream(open_reader(str(root))) == sealed_with_zlib
        (path,) = (root / "main").glob("*.sealed")
        assert sealed.SealedSegment(WITHOUT_SYNCS, path, 0).index.codec == compression.ZLIB

    def test_zstd_where_this_python_has_none_says_what_to_install(self, root, monkeypatch):
        pytest.importorskip("zstandard")
        store = SegmentStore(root, files=WITHOUT_SYNCS)
        fill(store, store.open_stream(), 5)
        store.compact()
        store.close()
        monkeypatch.setattr(compression, "_zstd", lambda: None)
        with pytest.raises(JournalError, match=r"pip install 'refold\[zstd\]'"):
            verify_stream(open_reader(str(root)))

    def test_a_codec_of_the_future_is_refused(self):
        with pytest.raises(JournalError, match="use a newer one"):
            compression.codec(9)

    @pytest.mark.parametrize("make", [compression._zlib, compression._zstd_of_package, compression._zstd_of_python])
    def test_a_codec_gives_back_what_it_took_and_says_when_it_can_not(self, make):
        codec = make()
        if codec is None:
            pytest.skip("not in this Python")
        data = os.urandom(1000) + bytes(1000)
        assert codec.unpack(codec.pack(data), len(data)) == data
        with pytest.raises(compression.BadBlock):
            codec.unpack(codec.pack(data)[:-30], len(data))


class TestReadingWhileItIsWritten:
    def test_a_reader_beside_a_writer_sees_whole_groups_and_a_growing_prefix(self, root):
        store = SegmentStore(root, segment_bytes=20_000, files=WITHOUT_SYNCS)
        head, stop, failures, counts = store.open_stream(), threading.Event(), [], []

        def read_on():
            reader = open_reader(str(root))
            try:
                while not stop.is_set():
                    records = list(read_verified(reader))
                    assert len(records) % 7 == 0, "half a group"
                    counts.append(len(records))
            except Exception as error:  # noqa: BLE001 - for the test's own thread to raise
                failures.append(error)

        threads = [threading.Thread(target=read_on) for _ in range(2)]
        for thread in threads:
            thread.start()
        for _ in range(250):
            head = store.append("main", make_records(head, 7))
            store.maintain()
        stop.set()
        for thread in threads:
            thread.join()
        assert not failures
        assert max(counts) > min(counts), "nothing was read meanwhile: the test proved nothing"
        assert any(name.endswith(".sealed") for name in names(root))
        store.close()

    def test_what_is_not_acknowledged_is_not_shown_while_its_owner_lives(self, root):
        files = FaultyFiles(root)
        store = SegmentStore(root, files=files)
        head = store.append("main", make_records(store.open_stream(), 2))
        reader, seen = open_reader(str(root)), []

        def look(call):
            if call.name == "fdatasync":
                seen.append(reader.head().position)

        files.rule = look
        store.append("main", make_records(head, 3))
        assert seen == [2]
        assert reader.head().position == 5
        store.close()

    def test_a_reader_writes_nothing_and_needs_no_right_to(self, root):
        store = SegmentStore(root, segment_bytes=2000, files=WITHOUT_SYNCS)
        head = fill(store, store.open_stream(), 4)
        store.maintain(idle=True)
        store.close()
        files = FaultyFiles(root)
        reader = SegmentReader(root, files)
        assert verify_stream(reader) == head
        assert reader.streams() == ["main"]
        reader.close()
        assert {call.name for call in files.calls} <= {"open", "close", "pread", "size", "listdir"}
        with pytest.raises(JournalError, match="closed"):
            reader.head()


class TestTwoWriters:
    def test_a_writer_that_lost_the_stream_destroys_nothing_when_it_closes(self, root):
        first, second = (SegmentStore(root, exclusive=False, files=WITHOUT_SYNCS) for _ in range(2))
        head = first.append("main", make_records(first.open_stream(), 2))
        taken = second.append("main", make_records(second.open_stream(), 3))
        with pytest.raises(Fenced):
            first.append("main", make_records(head, 1))
        first.close()
        assert verify_stream(second) == taken
        second.close()
        assert verify_stream(open_reader(str(root))) == taken

    def test_it_stays_fenced_after_the_other_has_rotated_and_sealed(self, root):
        first, second = (SegmentStore(root, exclusive=False, segment_bytes=900, files=WITHOUT_SYNCS) for _ in range(2))
        head = first.append("main", make_records(first.open_stream(), 2))
        fill(second, second.open_stream(), 4)
        second.maintain(idle=True)
        assert "00000000000000000000.sealed" in names(root)
        with pytest.raises(Fenced, match="engine epoch 2 now"):
            first.append("main", make_records(head, 1))
        first.close()
        assert verify_stream(second).position == 42
        second.close()

    def test_an_append_that_stands_still_half_way_keeps_others_out(self, root, monkeypatch):
        monkeypatch.setattr("refold.journal.stores.segments.log._PATIENCE_S", 0.05)
        first, second = (SegmentStore(root, exclusive=False, files=WITHOUT_SYNCS) for _ in range(2))
        first.open_stream()
        with first._logs["main"].fence(), pytest.raises(JournalOwned, match="another program has been writing"):
            second.open_stream()
        assert second.open_stream().engine_epoch == 2

    def test_a_child_does_not_keep_the_fence_of_a_parent(self, root):
        store = SegmentStore(root, exclusive=False, files=WITHOUT_SYNCS)
        store.open_stream()
        read, write = os.pipe()
        with store._logs["main"].fence():
            child = os.fork()
            if child == 0:
                os.write(write, b"%d" % store._logs["main"]._mark_fd)
                os._exit(0)
            os.waitpid(child, 0)
        assert os.read(read, 10) == b"-1"
        os.close(read)
        os.close(write)


class TestFolders:
    def test_the_url_leads_to_it(self, tmp_path):
        for url in (f"segments:///{tmp_path}/a", f"{tmp_path}/b/"):
            assert migrations.ensure(url)
            assert not migrations.ensure(url)
            assert migrations.current(url) == "segments 1"
            store = open_store(url)
            assert isinstance(store, SegmentStore)
            head = store.open_stream()
            assert engine_owner(url) == os.getpid()
            reader = open_reader(url.rstrip("/"))
            assert reader.head() == head
            store.close()
            assert engine_owner(url) is None

    def test_a_folder_of_something_else_is_left_alone(self, tmp_path):
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "thesis.txt").write_text("mine")
        for way in (open_reader, open_store, migrations.ensure):
            with pytest.raises(JournalCorrupt, match=r"something else \(it has 'thesis.txt'\)") as caught:
                way(f"{tmp_path}/other")
            assert caught.value.kind == "foreign"
        (tmp_path / "file").write_text("mine")
        with pytest.raises(JournalCorrupt, match="not a folder"):
            open_reader(f"{tmp_path}/file/")

    def test_an_absent_journal_is_not_found_and_an_empty_folder_becomes_one(self, tmp_path):
        for way in (open_reader, open_store):
            with pytest.raises(NotFound, match="no journal"):
                way(f"{tmp_path}/absent/")
        (tmp_path / "empty").mkdir()
        with pytest.raises(NotFound):
            open_reader(f"{tmp_path}/empty")
        assert migrations.ensure(f"{tmp_path}/empty")
        with pytest.raises(JournalError, match="make that first"):
            migrations.ensure(f"{tmp_path}/no/such/")

    def test_a_format_of_the_future_is_refused(self, root):
        (root / folder.MARKER).write_bytes(b"refold segments 2\n")
        for way in (open_reader, open_store, migrations.ensure):
            with pytest.raises(SchemaTooNew, match="version 2"):
                way(str(root))

    def test_any_stream_has_a_folder_of_its_own(self, root):
        store = SegmentStore(root, files=WITHOUT_SYNCS)
        wanted = ["main", "Main", "a/b", "..", "ü" * 200, "x" * 64, "x" * 65, "=", "a.b"]
        for number, stream in enumerate(wanted):
            store.append(stream, make_records(store.open_stream(stream), number + 1))
        assert store.streams() == SegmentReader(root).streams() == sorted(wanted)
        assert [store.head(stream).position for stream in wanted] == list(range(1, len(wanted) + 1))
        assert len({path.name.lower() for path in root.iterdir()}) == len(wanted) + 2
        store.close()

    def test_a_stream_whose_beginning_was_interrupted_begins_again(self, root):
        store = SegmentStore(root, files=WITHOUT_SYNCS)
        store.open_stream()
        store.close()
        header = (root / "main" / "00000000000000000000.seg").read_bytes()[:68]
        for content in ({}, {"00000000000000000000.seg": header}, {"00000000000000000000.seg.new": b"ha"}):
            for path in (root / "main").iterdir():
                path.unlink()
            for name, data in content.items():
                (root / "main" / name).write_bytes(data)
            assert open_reader(str(root)).head() == EMPTY_HEAD
            store = SegmentStore(root, files=WITHOUT_SYNCS)
            assert store.open_stream() == Head(0, EMPTY_HEAD.hash, 1)
            store.close()

    @pytest.mark.parametrize("lost", [True, False])
    def test_a_marker_that_is_lost_or_changed_is_made_anew_as_the_message_says(self, root, lost):
        store = SegmentStore(root, files=WITHOUT_SYNCS)
        head = fill(store, store.open_stream(), 1)
        store.close()
        (root / "SEGMENTS").write_bytes(b"refold segm\0\0\0\0s 1\n")
        if lost:
            (root / "SEGMENTS").unlink()
        for way in (lambda: open_reader(str(root)), lambda: migrations.ensure(f"segments:///{root}")):
            with pytest.raises(JournalError, match="SEGMENTS") as caught:
                way()
        subprocess.run(["sh", "-c", str(caught.value).split("`")[1]], check=True)
        assert open_reader(str(root)).head() == head

    def test_a_lost_mark_is_not_a_new_stream(self, root):
        store = SegmentStore(root, files=WITHOUT_SYNCS)
        fill(store, store.open_stream(), 1)
        store.close()
        (root / "main" / "mark").unlink()
        for way in (open_reader(str(root)).check_end, SegmentStore(root).open_stream):
            with pytest.raises(JournalCorrupt, match="mark is gone"):
                way()


def test_records_of_every_schema_and_erased_content_are_kept(root):
    store = SegmentStore(root, files=WITHOUT_SYNCS)
    head = store.open_stream()
    (plain,) = make_records(head, 1)
    old = plain._replace(schema_version=1, content=b"", content_hash=b"")
    erased = plain._replace(position=1, content=None)
    from refold.journal.stores.segments.frames import is_whole, pack_group, unpack_group, unpack_records

    frame = pack_group(0, head.engine_epoch, [old, erased])
    group = unpack_group(frame, 0, 0)
    assert is_whole(group, frame[group.payload_start :])
    assert list(unpack_records(group, frame[group.payload_start :])) == [old, erased]
    assert head_after(old).position == 1
    store.close()
