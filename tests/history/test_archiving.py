"""Records move to an archive and nothing changes: not what is read, not the chain, not what an engine opens to."""

import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from refold import Engine, SamplingParams, migrations
from refold.engine.folding import beginning, nearest, snapshot_of
from refold.engine.history.archiving import (
    adopt_archives,
    archive_until,
    compact_stream,
    delete_archived,
    open_for_keeping,
    position_at_time,
)
from refold.engine.history.replay import state_at
from refold.engine.opening import fold_journal, fold_on
from refold.journal.archive_file import describe, read_archive, write_archive
from refold.journal.archives import border_of
from refold.journal.errors import JournalCorrupt, JournalError, JournalOwned, Rejected
from refold.journal.record import EMPTY_HEAD, head_after
from refold.journal.stores import open_reader, open_store
from refold.journal.testing import make_records
from refold.journal.verify import verified, verify_stream
from refold.scheduler.state import digest
from tests.cli.command import assert_one_line_and_a_hint, refold, rows
from tests.history.journals import START_NS, TICK_NS, eventful_lives, long_life, sealed, write_journal
from tests.kit.sameness import differences

ROOT = Path(__file__).parents[2]
FORMS = ("zstd", "parquet")
RECORDS = sealed(eventful_lives()[0])


@pytest.fixture(params=["sqlite", "segments", "postgresql"])
def journal(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        write_journal(tmp_path / "journal.db", eventful_lives()[0])
        return str(tmp_path / "journal.db")
    if request.param == "segments":
        url = f"segments:///{tmp_path / 'journal'}"
        migrations.ensure(url)
    else:
        url = request.getfixturevalue("postgres_url")
    store = open_store(url)
    store.open_replica()
    store.append("main", RECORDS)
    store.close()
    return url


@pytest.fixture
def file(tmp_path: Path) -> str:
    write_journal(tmp_path / "journal.db", eventful_lives()[0])
    return str(tmp_path / "journal.db")


def archived(journal: str, stop: int, folder: Path, form: str = "zstd", *, delete: bool = True) -> Path:
    store = open_store(journal)
    open_for_keeping(store, "main")
    archive = archive_until(store, "main", stop, folder, form=form)
    assert archive is not None
    if delete:
        delete_archived(store, "main")
    store.close()
    return Path(archive.path)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("stop", [1, 17, len(RECORDS) - 1])
def test_everything_reads_as_before_across_the_border(journal: str, stop: int, form: str, tmp_path: Path) -> None:
    path = archived(journal, stop, tmp_path / "archive", form)
    assert path.suffix == (".parquet" if form == "parquet" else ".refold-archive")
    reader = open_reader(journal)
    assert list(reader.read()) == RECORDS
    for start, end in ((0, 5), (stop - 1, stop + 1), (stop, stop + 1), (0, stop), (3, 3), (stop, None)):
        assert list(reader.read("main", start, end)) == RECORDS[start:end]
    assert verify_stream(reader) == reader.head()
    assert border_of(reader, "main") == head_after(RECORDS[stop - 1])
    assert list(read_archive(path)) == RECORDS[:stop]
    reader.close()


def test_an_engine_goes_on_behind_the_border_and_the_chain_with_it(journal: str, tmp_path: Path) -> None:
    end = fold_on(open_reader(journal), "main", beginning(), open_reader(journal).head())
    archived(journal, 40, tmp_path / "archive")
    store = open_store(journal)
    head = store.open_stream()
    base, recovery = fold_journal(store, "main", head)
    assert recovery.from_snapshot == 40
    assert differences(end.folded, base.folded) == []
    store.append("main", make_records(head, 3))
    assert verify_stream(store) == store.head()
    store.close()


def test_without_the_archive_an_engine_opens_and_a_reader_says_what_is_missing(journal: str, tmp_path: Path) -> None:
    before = state_at(open_reader(journal))
    path = archived(journal, 40, tmp_path / "archive")
    path.rename(tmp_path / "away")
    reader = open_reader(journal)
    with pytest.raises(
        JournalError, match=r"records 0 to 39 are archived in .*main-000000000000-000000000040"
    ) as caught:
        list(reader.read())
    assert "put the file back" in str(caught.value)
    assert list(reader.read("main", 40)) == RECORDS[40:]
    after = state_at(reader)
    assert before is not None
    assert after is not None
    assert digest(after.state) == digest(before.state)
    assert nearest(reader, "main", reader.head().position).head.position == 40
    with pytest.raises(JournalError, match="archived"):
        state_at(reader, 20)
    (tmp_path / "away").rename(path)
    assert list(reader.read()) == RECORDS


def test_a_file_beside_the_journal_will_do(file: str, tmp_path: Path) -> None:
    path = archived(file, 40, tmp_path / "elsewhere" / "archive")
    path.rename(tmp_path / path.name)
    assert list(open_reader(file).read()) == RECORDS
    (tmp_path / "archive").mkdir()
    (tmp_path / path.name).rename(tmp_path / "archive" / path.name)
    assert list(open_reader(file).read()) == RECORDS


def test_archives_follow_each_other(journal: str, tmp_path: Path) -> None:
    for stop, form in ((10, "zstd"), (25, "parquet"), (26, "zstd"), (60, "zstd")):
        archived(journal, stop, tmp_path / "archive", form)
    reader = open_reader(journal)
    archives = reader.archives()  # type: ignore[attr-defined]
    assert [(a.start, a.stop) for a in archives] == [(0, 10), (10, 25), (25, 26), (26, 60)]
    assert list(reader.read()) == RECORDS
    assert list(reader.read("main", 24, 61)) == RECORDS[24:61]


def test_nothing_new_before_the_border_is_nothing_to_do(file: str, tmp_path: Path) -> None:
    archived(file, 40, tmp_path)
    store = open_store(file)
    open_for_keeping(store, "main")
    assert archive_until(store, "main", 40, tmp_path) is None
    assert archive_until(store, "main", 3, tmp_path) is None
    assert delete_archived(store, "main") == 0
    store.close()


def test_the_last_record_stays(file: str, tmp_path: Path) -> None:
    store = open_store(file)
    open_for_keeping(store, "main")
    for stop in (len(RECORDS), len(RECORDS) + 7):
        with pytest.raises(Rejected, match=f"archive until {len(RECORDS) - 1}"):
            archive_until(store, "main", stop, tmp_path)
    assert archive_until(store, "main", len(RECORDS) - 1, tmp_path) is not None
    delete_archived(store, "main")
    assert store.head() == head_after(RECORDS[-1])
    store.close()
    reopened = open_store(file)
    assert reopened.open_stream().position == len(RECORDS)
    reopened.close()


def test_a_damaged_record_is_not_archived(file: str, tmp_path: Path) -> None:
    with sqlite3.connect(file) as connection:
        connection.execute("UPDATE journal_records SET time_ns = 3 WHERE position = 12")
    store = open_store(file)
    open_for_keeping(store, "main")
    with pytest.raises(JournalCorrupt):
        archive_until(store, "main", 40, tmp_path)
    assert store.archives() == []  # type: ignore[attr-defined]
    store.close()
    assert not [path for path in tmp_path.iterdir() if "archive" in path.name]


def test_another_file_of_that_name_is_left_alone(file: str, tmp_path: Path) -> None:
    other = make_records(EMPTY_HEAD._replace(engine_epoch=1), 40)
    path = tmp_path / "main-000000000000-000000000040.refold-archive"
    write_archive(path, "main", other)
    before = path.read_bytes()
    store = open_store(file)
    open_for_keeping(store, "main")
    with pytest.raises(Rejected, match="holds something else"):
        archive_until(store, "main", 40, tmp_path)
    assert path.read_bytes() == before
    assert store.archives() == []  # type: ignore[attr-defined]
    store.close()


def test_a_live_engine_is_not_archived_from_under(file: str, tmp_path: Path) -> None:
    with Engine("simulated", file), pytest.raises(JournalOwned):
        archived(file, 10, tmp_path)


def test_an_engine_serves_on_an_archived_journal(tmp_path: Path) -> None:
    journal = str(tmp_path / "engine.db")
    for life in range(3):
        with Engine("simulated", journal, snapshot_every_records=16) as engine:
            engine.run(
                [[1, 2]] * 4, SamplingParams(seed=life, max_tokens=20), request_ids=[f"{life}-{i}" for i in range(4)]
            )
            if life:
                assert [c.request_id for c in engine.wait(["0-1"])] == ["0-1"]
        archived(journal, open_reader(journal).head().position - 3, tmp_path / "archive")
    assert refold("verify", journal).exit_code == 0


# -- files ------------------------------------------------------------------------------------------------------------


def test_every_flipped_byte_of_an_archive_is_noticed(tmp_path: Path) -> None:
    records = make_records(EMPTY_HEAD._replace(engine_epoch=1), 30)
    path = tmp_path / "a.refold-archive"
    archive = write_archive(path, "main", records)
    assert archive.num_bytes == path.stat().st_size
    whole = path.read_bytes()
    for index in range(len(whole)):
        path.write_bytes(whole[:index] + bytes([whole[index] ^ 0x20]) + whole[index + 1 :])
        try:
            assert list(read_archive(path)) == records, index
        except JournalError:
            continue
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(JournalError):
            list(read_archive(path))


def test_parquet_is_parquet(tmp_path: Path) -> None:
    from pyarrow import parquet

    records = sealed(eventful_lives()[0])
    path = tmp_path / "a.parquet"
    write_archive(path, "main", records)
    table = parquet.read_table(path)
    assert table.column_names[0] == "position"
    assert table["body"].to_pylist() == [record.body.decode() for record in records]
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(JournalError):
        list(read_archive(path))


def test_a_body_that_parquet_has_lost_is_damage_at_its_record(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    write_archive(path, "main", RECORDS)
    table = parquet.read_table(path)
    bodies = table.column("body").to_pylist()
    bodies[5] = None
    parquet.write_table(table.set_column(4, "body", pa.array(bodies, pa.string())), path)
    with pytest.raises(JournalCorrupt) as caught:
        list(verified(read_archive(path)))
    assert (caught.value.position, caught.value.kind) == (5, "edited")


def test_a_text_in_parquet_that_is_no_text_is_damage(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    write_archive(path, "main", RECORDS)
    table = parquet.read_table(path)
    bodies = [body.encode() for body in table.column("body").to_pylist()]
    bodies[5] = b"\xff" + bodies[5][1:]
    parquet.write_table(table.set_column(4, "body", pa.array(bodies, pa.binary()).view(pa.string())), path)
    with pytest.raises(JournalCorrupt, match="damaged"):
        list(read_archive(path))


def test_erased_and_old_records_are_archived_as_they_are(tmp_path: Path) -> None:
    first, second = sealed(eventful_lives()[0])[2:4]
    odd = [first._replace(content=None), second]
    for name in ("a.refold-archive", "a.parquet"):
        write_archive(tmp_path / name, "main", odd)
        assert list(read_archive(tmp_path / name)) == odd


def test_twelve_bytes_a_token_at_rest(tmp_path: Path) -> None:
    """With few requests at once; with 256, `python benchmarks/snapshots.py` shows less."""
    records = sealed(long_life(300, 32))
    archive = write_archive(tmp_path / "a.refold-archive", "main", records)
    raw = sum(len(r.body) + len(r.content or b"") for r in records)
    assert archive.num_bytes < raw / 3


# -- times, compacting, the command -----------------------------------------------------------------------------------


def test_a_time_is_a_position(file: str) -> None:
    reader = open_reader(file)
    for position in (0, 1, 17, len(RECORDS) - 1):
        assert position_at_time(reader, "main", START_NS + position * TICK_NS) == position
        assert position_at_time(reader, "main", START_NS + position * TICK_NS - 1) == position
    assert position_at_time(reader, "main", 0) == 0
    assert position_at_time(reader, "main", 2**62) == len(RECORDS)


def test_compact_goes_on_where_archive_was_killed_and_shrinks_the_file(tmp_path: Path) -> None:
    path = tmp_path / "long.db"
    write_journal(path, long_life(400))
    head, size = open_reader(str(path)).head(), path.stat().st_size
    archived(str(path), head.position - 10, tmp_path / "archive", delete=False)
    done = refold("compact", "--json", path)
    assert done.exit_code == 0, done.stderr
    (report,) = rows(done.stdout)
    assert report["num_deleted"] == head.position - 10
    assert path.stat().st_size < size / 2
    assert verify_stream(open_reader(str(path))) == head
    assert rows(refold("compact", "--json", path).stdout)[0]["num_deleted"] == 0


def test_compact_keeps_the_border_s_snapshot(file: str, tmp_path: Path) -> None:
    archived(file, 10, tmp_path)
    store = open_store(file)
    open_for_keeping(store, "main")
    for position in (20, 30, 40, 45, 50):
        base = fold_on(store, "main", beginning(), head_after(RECORDS[position - 1]))
        store.save_snapshot("main", snapshot_of(*base))
    compact_stream(store, "main")
    assert 10 in [entry.position for entry in store.snapshots()]
    store.close()


class TestALostList:
    """Where the archives are stands in the journal alone; they themselves prove what they are."""

    @pytest.fixture
    def listless(self, journal: str, tmp_path: Path) -> str:
        for stop in (10, 25, 31):
            archived(journal, stop, tmp_path / "archive")
        if journal.startswith("segments"):
            (tmp_path / "journal" / "main" / "archives").unlink()
        elif journal.endswith(".db"):
            with sqlite3.connect(journal) as connection:
                connection.execute("DELETE FROM journal_archives")
        else:
            pytest.skip("its table is the server's")
        with pytest.raises(JournalCorrupt):
            verify_stream(open_reader(journal))
        return journal

    def test_is_made_anew_of_the_archives(self, listless: str, tmp_path: Path) -> None:
        done = refold("archive", "--adopt", tmp_path / "archive", listless)
        assert done.exit_code == 0, done.stderr
        assert [line.split(" in ")[0] for line in done.stdout.splitlines()] == [
            "adopted records 0 to 9",
            "adopted records 10 to 24",
            "adopted records 25 to 30",
        ]
        assert list(open_reader(listless).read()) == RECORDS
        assert refold("verify", listless).exit_code == 0
        again = refold("archive", "--adopt", tmp_path / "archive", listless)
        assert again.exit_code == 2
        assert "begins with record 31" in again.stderr

    @pytest.mark.parametrize("verb", [("stat",), ("log", "--until", 30), ("log",), ("show",), ("verify",)])
    def test_is_missed_by_readers_which_say_how_to_make_it_anew(self, listless: str, verb: tuple[object, ...]) -> None:
        done = refold(*verb, listless)
        assert (done.exit_code, done.stdout) == (3, "")
        assert " is not there; the " in done.stderr
        assert "`refold archive --adopt" in done.stderr

    def test_goes_on_where_it_was_killed(self, listless: str, tmp_path: Path) -> None:
        store = open_store(listless)
        open_for_keeping(store, "main")
        path = next((tmp_path / "archive").glob("main-000000000000-*"))
        store.add_archive("main", describe(path, 0, head_after(RECORDS[9])))  # type: ignore[attr-defined]
        assert [archive.start for archive in adopt_archives(store, "main", tmp_path / "archive")] == [10, 25]
        store.close()
        assert list(open_reader(listless).read()) == RECORDS

    @pytest.mark.parametrize("which", [0, 1, 2])
    def test_is_not_made_of_archives_with_a_gap_or_of_damaged_ones(
        self, listless: str, tmp_path: Path, which: int
    ) -> None:
        path = sorted((tmp_path / "archive").iterdir())[which]
        original = path.read_bytes()
        path.write_bytes(original[:200] + bytes([original[200] ^ 1]) + original[201:])
        assert refold("archive", "--adopt", tmp_path / "archive", listless).exit_code == 3
        path.unlink()
        assert refold("archive", "--adopt", tmp_path / "archive", listless).exit_code in {2, 3}
        assert border_of(open_reader(listless), "main") == EMPTY_HEAD, "nothing was listed"
        path.write_bytes(original)
        assert refold("archive", "--adopt", tmp_path / "archive", listless).exit_code == 0

    def test_that_was_changed_says_what_to_do(self, tmp_path: Path) -> None:
        url = f"segments:///{tmp_path / 'journal'}"
        migrations.ensure(url)
        store = open_store(url)
        store.open_replica()
        store.append("main", RECORDS)
        store.close()
        archived(url, 10, tmp_path / "archive")
        listed = tmp_path / "journal" / "main" / "archives"
        listed.write_bytes(listed.read_bytes()[:-3] + b"???")
        told = refold("log", url)
        assert told.exit_code == 3
        assert f"{listed} was changed" in told.stderr
        assert f"`refold archive --adopt FOLDER {tmp_path / 'journal'}`" in told.stderr
        listed.unlink()
        assert refold("archive", "--adopt", tmp_path / "archive", url).exit_code == 0
        assert list(open_reader(url).read()) == RECORDS


def test_the_command_archives_or_adopts(file: str, tmp_path: Path) -> None:
    for options in ((), ("--until", 5), ("--to", tmp_path), ("--adopt", tmp_path, "--until", 5)):
        told = refold("archive", *options, file)
        assert told.exit_code == 2
        assert "give --until and --to, or --adopt" in told.stderr


def test_the_command_archives_by_position_date_and_age(file: str, tmp_path: Path) -> None:
    done = refold("archive", "--until", 20, "--to", tmp_path / "a", file)
    assert done.exit_code == 0, done.stderr
    assert "archived records 0 to 19" in done.stdout
    (report,) = rows(refold("archive", "--json", "--until", "2026-09-20T15:00", "--to", tmp_path / "a", file).stdout)
    assert not report["archived"]
    (report,) = rows(refold("archive", "--json", "--until", "1m", "--to", tmp_path / "a", file).stdout)
    assert (report["archived"], report["stop"]) == (True, len(RECORDS) - 1)
    assert list(open_reader(file).read()) == RECORDS
    assert f"records 0 to 19 in {tmp_path / 'a'}" in refold("stat", file).stdout
    done = refold("archive", "--until", "1m", "--to", tmp_path / "a", file)
    assert "nothing to archive" in done.stdout


@pytest.mark.parametrize("until", ["soon", "12x", "-5", "9" * 30, ""])
def test_an_until_that_is_nothing_is_refused(file: str, tmp_path: Path, until: str) -> None:
    done = refold("archive", f"--until={until}", "--to", tmp_path, file)
    assert done.exit_code == 2
    assert_one_line_and_a_hint(done.stderr)


def test_a_folder_of_segments_is_archived_and_compacted(file: str, tmp_path: Path) -> None:
    url = f"segments:///{tmp_path / 'there'}"
    assert refold("copy", file, url).exit_code == 0
    assert refold("archive", "--until", "50", "--to", tmp_path / "archive", url).exit_code == 0
    assert refold("compact", url).exit_code == 0
    assert list(open_reader(url).read()) == RECORDS
    assert refold("verify", url).exit_code == 0


# -- kills ------------------------------------------------------------------------------------------------------------

ARCHIVE = """
import sys
from refold.engine.history import archiving
from refold.engine.cli.app import app
archiving.DELETE_RECORDS = 16
print("begin", flush=True)
app(sys.argv[1:])
"""


@pytest.mark.parametrize("verb", ["archive", "compact"])
def test_killed_at_any_instant_nothing_is_lost(tmp_path: Path, verb: str) -> None:
    path = tmp_path / "long.db"
    write_journal(path, long_life(60))
    records = list(open_reader(str(path)).read())
    stop = len(records) - 5
    if verb == "compact":
        archived(str(path), stop, tmp_path / "archive", delete=False)
    arguments = (
        ["archive", "--until", str(stop), "--to", str(tmp_path / "archive")] if verb == "archive" else ["compact"]
    )
    instants = random.Random(3)
    for _ in range(4):
        child = subprocess.Popen(
            [sys.executable, "-c", ARCHIVE, *arguments, str(path)],
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        )
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(instants.uniform(0.0, 0.5))
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        reader = open_reader(str(path))
        assert list(reader.read()) == records
        reader.close()
    done = refold(*arguments, path)
    assert done.exit_code == 0, done.stderr
    assert list(open_reader(str(path)).read()) == records
    with sqlite3.connect(path) as connection:
        assert connection.execute("SELECT count(*) FROM journal_records").fetchone() == (5,)
    assert refold("verify", path).exit_code == 0


def test_another_journals_archive_of_the_same_name_is_told_and_not_read(tmp_path: Path) -> None:
    paths = []
    for name, lives in (("a", long_life(20)), ("b", long_life(21, width=4))):
        write_journal(tmp_path / f"{name}.db", lives)
        paths.append(archived(str(tmp_path / f"{name}.db"), 20, tmp_path / name))
    paths[0].replace(paths[1])
    told = refold("log", "--until", "10", tmp_path / "b.db")
    assert told.exit_code == 3
    assert told.stdout == ""
    assert f"{paths[1]} is not the archive of this journal's records 0 to 19: record 19 is another one" in told.stderr
    assert_one_line_and_a_hint(told.stderr)
