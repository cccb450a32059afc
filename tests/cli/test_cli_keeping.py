"""The verbs that keep a journal: `stat` and `copy`."""

import contextlib
import json
import signal
import sqlite3
from pathlib import Path

import pytest

from refold.engine.cli.stat import in_bytes
from refold.engine.engine import Engine
from refold.engine.folding import fold_version
from refold.engine.history.statistics import NS_PER_S, statistics
from refold.journal import copying
from refold.journal.archive_file import write_archive
from refold.journal.record import head_after
from refold.journal.stores import open_reader, open_store
from refold.journal.testing import make_records
from refold.journal.verify import verify_stream
from refold.projections.totals import Totals
from tests.cli.command import assert_one_line_and_a_hint, finished, process, refold, rows
from tests.engine.test_snapshots import kept_at
from tests.history.journals import START_NS, TICK_NS, eventful_lives, write_journal
from tests.kit.engines import eventually
from tests.kit.sameness import slots_of


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    path = tmp_path / "journal.db"
    write_journal(path, eventful_lives()[0])
    return path


# -- stat -------------------------------------------------------------------------------------------------------------


def test_stat_tells_a_journal_in_numbers(journal: Path) -> None:
    done = refold("stat", journal)
    assert done.exit_code == 0
    head = open_reader(str(journal)).head()
    for word in (
        f"{head.position} records",
        "opened for writing 2 times",
        "7, 7 finished",
        "none",
        "per generated token",
    ):
        assert word in done.stdout, word


def test_stat_tells_what_a_day_brings_of_a_journal_that_spans_an_hour_and_not_of_a_moment(
    journal: Path, tmp_path: Path
) -> None:
    assert "growth    too early to tell: the records span " in refold("stat", journal).stdout
    (moment,) = rows(refold("stat", "--json", journal).stdout)
    assert (moment["growth_bytes_per_day"], moment["growth_records_per_day"]) == (None, None)
    tick_ns = 3600 * NS_PER_S // (moment["num_records"] - 1) + 1
    write_journal(tmp_path / "hour.db", eventful_lives()[0], tick_ns)
    (hour,) = rows(refold("stat", "--json", tmp_path / "hour.db").stdout)
    assert hour["growth_records_per_day"] == pytest.approx(24 * hour["num_records"], rel=1e-3)
    assert hour["growth_bytes_per_day"] == pytest.approx(24 * hour["bytes"]["live"], rel=1e-3)
    assert " a day, if it goes on as it did" in refold("stat", tmp_path / "hour.db").stdout


def test_stat_counts_lives_of_engines_and_not_what_else_opened_the_journal(journal: Path, tmp_path: Path) -> None:
    assert refold("redact", journal, "req-1").exit_code == 0
    assert refold("archive", "--until", "10", "--to", tmp_path / "old", journal).exit_code == 0
    said = refold("stat", journal).stdout
    assert "opened for writing 3 times" in said
    assert " lives" not in said
    assert "2 lives" in refold("stat", "--events", journal).stdout


def test_stat_as_json_is_what_the_journal_holds(journal: Path) -> None:
    (report,) = rows(refold("stat", "--json", "--events", journal).stdout)
    reader = open_reader(str(journal))
    records = list(reader.read())
    assert report["num_records"] == len(records)
    assert report["head"] == f"{len(records)}:{records[-1].hash.hex()}"
    assert (report["oldest_ns"], report["newest_ns"]) == (START_NS, START_NS + TICK_NS * (len(records) - 1))
    assert report["engine_epoch"] == 2
    assert report["bytes"]["live"] == journal.stat().st_size
    assert report["totals"]["requests"] == 7
    assert sum(kind["num_bytes"] for kind in report["events"].values()) > 1000
    assert report["events"]["RequestSubmitted"]["num_events"] == 7
    tokens = report["totals"]["tokens"]
    assert report["bytes_per_generated_token"] == round(journal.stat().st_size / tokens, 2)


def test_stat_reads_little_when_there_is_a_snapshot(journal: Path) -> None:
    whole = statistics(open_reader(str(journal)))
    kept_at(str(journal), 30)
    read = []
    found = statistics(open_reader(str(journal)), on_record=lambda: read.append(1))
    assert whole is not None
    assert found is not None
    assert len(read) == found.head.position - 30
    assert {n: getattr(found.totals, n) for n in slots_of(Totals)} == {
        n: getattr(whole.totals, n) for n in slots_of(Totals)
    }
    assert [entry.position for entry in found.snapshots] == [30]
    assert "at 30" in refold("stat", journal).stdout
    assert fold_version()


@pytest.mark.parametrize("damage", ["UPDATE journal_records SET time_ns = time_ns + 1", "DELETE FROM journal_records"])
@pytest.mark.parametrize("position", [0, 10, 35])
def test_stat_names_a_damaged_record_among_those_that_it_reads(journal: Path, damage: str, position: int) -> None:
    kept_at(str(journal), 30)
    with contextlib.closing(sqlite3.connect(journal)) as connection, connection:
        connection.execute(f"{damage} WHERE position = ?", (position,))
    for options in ((), ("--events",)):
        done = refold("stat", *options, journal)
        if position == 10 and not options:  # the snapshot spares it
            assert done.exit_code == 0, done.stderr
        else:
            assert (done.exit_code, done.stdout) == (3, "")
            assert f"record {position} " in done.stderr


@pytest.mark.parametrize("kind", ["segments", "postgresql"])
def test_stat_of_other_stores(journal: Path, tmp_path: Path, kind: str, request: pytest.FixtureRequest) -> None:
    url = f"segments:///{tmp_path / 'there'}" if kind == "segments" else request.getfixturevalue("postgres_url")
    assert refold("copy", journal, url).exit_code == 0
    (ours,), (theirs,) = (rows(refold("stat", "--json", "--events", which).stdout) for which in (journal, url))
    assert theirs["bytes"]["live"] > 0
    for key in ("num_records", "head", "totals", "events", "oldest_ns", "newest_ns"):
        assert ours[key] == theirs[key], key


def test_stat_of_an_empty_and_of_no_journal(tmp_path: Path) -> None:
    assert refold("migrate", tmp_path / "new.db").exit_code == 0
    done = refold("stat", tmp_path / "new.db")
    assert done.exit_code == 0
    assert "empty" in done.stdout
    (report,) = rows(refold("stat", "--json", tmp_path / "new.db").stdout)
    assert report["num_records"] == 0
    done = refold("stat", tmp_path / "absent.db")
    assert done.exit_code == 3
    assert_one_line_and_a_hint(done.stderr)


@pytest.mark.parametrize(
    ("number", "words"),
    [(0, "0 B"), (999, "999 B"), (12_345, "12.3 kB"), (4_560_000, "4.56 MB"), (7 * 10**15, "7e+03 TB")],
)
def test_bytes_in_words(number: int, words: str) -> None:
    assert in_bytes(number) == words


# -- copy -------------------------------------------------------------------------------------------------------------


def test_copy_says_what_it_did_and_the_copy_is_a_journal(journal: Path, tmp_path: Path) -> None:
    target = tmp_path / "copy.db"
    done = refold("copy", journal, target)
    assert done.exit_code == 0, done.stderr
    head = open_reader(str(journal)).head()
    assert f"copied {head.position} records" in done.stdout
    assert f"{head.position}:{head.hash.hex()}" in done.stdout
    assert list(open_reader(str(target)).read()) == list(open_reader(str(journal)).read())
    assert refold("verify", target).exit_code == 0
    (again,) = rows(refold("copy", "--json", journal, target).stdout)
    assert (again["num_copied"], again["num_records"]) == (0, head.position)


def test_copy_takes_the_newest_snapshot_along(journal: Path, tmp_path: Path) -> None:
    kept_at(str(journal), 30)
    (report,) = rows(refold("copy", "--json", journal, tmp_path / "copy.db").stdout)
    assert report["snapshot"] == 30
    assert [entry.position for entry in open_reader(str(tmp_path / "copy.db")).snapshots()] == [30]  # type: ignore[attr-defined]


def test_copy_takes_all_streams_or_one(tmp_path: Path) -> None:
    source = tmp_path / "many.db"
    assert refold("migrate", source).exit_code == 0
    store = open_store(str(source))
    for name in ("a", "b"):
        store.append(name, make_records(store.open_stream(name), 3, cause=name))
    store.close()
    assert len(rows(refold("copy", "--json", source, tmp_path / "all.db").stdout)) == 2
    assert open_reader(str(tmp_path / "all.db")).streams() == ["a", "b"]  # type: ignore[attr-defined]
    assert refold("copy", "--stream", "b", source, tmp_path / "one.db").exit_code == 0
    assert open_reader(str(tmp_path / "one.db")).streams() == ["b"]  # type: ignore[attr-defined]
    done = refold("copy", "--stream", "c", source, tmp_path / "none.db")
    assert done.exit_code == 2
    assert_one_line_and_a_hint(done.stderr)


def test_copy_refuses_itself_memory_what_is_foreign_and_what_differs(journal: Path, tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "foreign.db") as connection:
        connection.execute("CREATE TABLE theirs (x)")
    other = tmp_path / "other.db"
    write_journal(other, [eventful_lives()[0][0][:5]], tick_ns=7)
    for target, status in ((journal, 2), ("memory:", 2), (tmp_path / "foreign.db", 3), (other, 2)):
        before = other.read_bytes()
        done = refold("copy", journal, target)
        assert done.exit_code == status, (target, done.stderr)
        assert_one_line_and_a_hint(done.stderr)
        assert other.read_bytes() == before or target != other
    (tmp_path / "link.db").symlink_to(journal)
    assert refold("copy", journal, tmp_path / "link.db").exit_code == 2


def test_copy_refuses_a_target_that_an_engine_owns(journal: Path, tmp_path: Path) -> None:
    target = tmp_path / "live.db"
    assert refold("migrate", target).exit_code == 0
    engine = open_store(str(target))
    engine.open_stream()
    done = refold("copy", journal, target)
    assert done.exit_code == 5
    assert_one_line_and_a_hint(done.stderr)
    engine.close()


def changed(journal: Path, position: int) -> None:
    with sqlite3.connect(journal) as connection:
        connection.execute("UPDATE journal_records SET body = replace(body, '1', '7') WHERE position = ?", (position,))


@pytest.mark.parametrize("target", ["copy.db", "copy/"])
def test_a_copy_of_what_has_no_sound_record_leaves_no_target_behind(journal: Path, tmp_path: Path, target: str) -> None:
    changed(journal, 0)
    there = sorted(path.name for path in tmp_path.iterdir())
    done = refold("copy", journal, f"{tmp_path}/{target}")
    assert done.exit_code == 3
    assert_one_line_and_a_hint(done.stderr)
    assert sorted(path.name for path in tmp_path.iterdir()) == there


def test_what_is_before_damage_is_copied_to_the_last_record(journal: Path, tmp_path: Path) -> None:
    changed(journal, 5)
    done = refold("copy", journal, tmp_path / "copy.db")
    assert done.exit_code == 3
    assert_one_line_and_a_hint(done.stderr)
    assert open_reader(str(tmp_path / "copy.db")).head().position == 5


def test_a_target_that_could_take_no_record_is_said_to_be_there_and_empty(journal: Path, tmp_path: Path) -> None:
    target = tmp_path / "copy"
    target.mkdir()
    (target / "SEGMENTS").write_bytes(b"refold segments 1\n")
    (target / "main").write_bytes(b"in the way")
    done = refold("copy", journal, target)
    assert done.exit_code == 3
    assert_one_line_and_a_hint(done.stderr)
    assert f"{target} has no record yet: the same command goes on; remove it" in done.stderr


def test_copy_follows_what_an_engine_appends(tmp_path: Path) -> None:
    source, target = str(tmp_path / "live.db"), str(tmp_path / "copy.db")
    assert refold("migrate", source).exit_code == 0
    assert refold("migrate", target).exit_code == 0
    store = open_store(source)
    head = store.append("main", make_records(store.open_stream(), 5))
    child = process("copy", "--follow", "--json", source, target)
    reader = open_reader(target)
    eventually(lambda: reader.head().position == 5, 30)
    for _ in range(3):
        head = store.append("main", make_records(head, 4))
        eventually(lambda: reader.head() == head, 30)  # noqa: B023
    child.send_signal(signal.SIGINT)
    stdout, stderr = child.communicate(timeout=30)
    assert child.returncode == 0, stderr
    assert json.loads(stdout)["num_records"] == 5
    assert b"copied up to 17" in stderr
    assert verify_stream(reader) == head
    store.close()


def test_copy_and_stat_load_no_model(journal: Path, tmp_path: Path) -> None:
    status, stdout, stderr = finished("copy", str(journal), str(tmp_path / "c.db"))
    assert (status, stderr) == (0, "")
    assert "verified" in stdout


def test_a_redacted_journal_is_copied_as_it_is_even_half_way(journal: Path, tmp_path: Path) -> None:
    assert refold("redact", journal, "req-1").exit_code == 0
    target = tmp_path / "copy.db"
    records = list(open_reader(str(journal)).read())
    assert any(record.content is None for record in records)
    store = open_store(str(target)) if refold("migrate", target).exit_code == 0 else None
    assert store is not None
    copying.copy_on(open_reader(str(journal)), store, "main", store.open_replica(), head_after(records[50]))  # type: ignore[attr-defined,arg-type]
    store.close()
    assert refold("copy", journal, target).exit_code == 0
    assert list(open_reader(str(target)).read()) == records
    assert refold("verify", target).exit_code == 0


def test_a_redacted_journal_is_archived_as_it_is(journal: Path, tmp_path: Path) -> None:
    assert refold("redact", journal, "req-1").exit_code == 0
    records = list(open_reader(str(journal)).read())
    for stop in (50, len(records) - 1):
        assert refold("archive", "--until", stop, "--to", tmp_path / "archive", journal).exit_code == 0
    assert list(open_reader(str(journal)).read()) == records
    assert refold("verify", journal).exit_code == 0


@pytest.mark.parametrize("loss", ["gone", "changed"])
def test_compact_deletes_nothing_that_no_archive_has(tmp_path: Path, loss: str) -> None:
    """An archiver was killed between the border and the deletion, and then its file was lost."""
    for url in (str(tmp_path / "j.db"), f"{tmp_path}/j/"):
        with Engine("simulated", url, snapshot_every_records=8).open() as engine:
            engine.run(["one", "two"])
        store = open_store(url)
        store.open_replica()  # type: ignore[attr-defined]
        records = list(store.read())
        file = tmp_path / f"archive-{url.endswith('/')}"
        store.add_archive("main", write_archive(file, "main", iter(records[:20])))  # type: ignore[attr-defined]
        store.close()
        there = file.read_bytes()
        file.write_bytes(there[:-1] + b"x") if loss == "changed" else file.unlink()
        told = refold("compact", url)
        assert told.exit_code == 3
        assert ("isn't there" if loss == "gone" else "isn't what was written") in told.stderr
        file.write_bytes(there)
        assert refold("compact", url).exit_code == 0
        assert list(open_reader(url).read()) == records
