"""The read model's life: rebuilding beside, replaced and damaged journals, segments, redaction, and an engine that keeps it."""

import contextlib
import sqlite3
import threading
import time
from pathlib import Path

import pytest

from refold import Engine, SamplingParams
from refold.engine.audit import place as place_module
from refold.engine.audit.place import catch_up, place_of, writable_place
from refold.engine.redacting import redact_at_rest
from refold.journal.errors import JournalCorrupt, Rejected
from refold.journal.stores import open_reader
from refold.journal.stores.sqlite_marks import mark_file
from refold.journal.stores.sqlite_reader import SqliteReader
from refold.projections.audit.beside import path_beside
from refold.projections.audit.catalogue import VIEWS
from refold.projections.audit.schema import FACTS, bucket_of
from refold.projections.audit.trailing import TrailingProjection
from tests.cli.command import refold
from tests.kit.audited import asking, audited, contents, path_url, project, sealed, simulated, write, writer_of

NAMES = [view.name for view in VIEWS]
TABLES = [table.name for table in FACTS]
LIFE = sealed(simulated(13))
MODEL = "simulated?vocab=1000&eos=-1"


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request, tmp_path, postgres_server):
    return path_url(tmp_path) if request.param == "sqlite" else postgres_server.empty()


# -- rebuilding -------------------------------------------------------------------------------------------------------


def test_a_rebuilt_read_model_shows_the_same(url):
    before = contents(audited(url, LIFE), NAMES)
    project(url, rebuilds=True)
    assert contents(url, NAMES) == before
    with asking(url) as ask:
        assert ask("SELECT projection_id, is_live FROM audit_projections") == [(2, 1)]
        assert ask("SELECT DISTINCT projection_id FROM audit_step_entries") == [(2,)]


def test_who_asks_during_a_rebuild_sees_the_old_one_and_an_interrupted_one_goes_on(url):
    before = contents(audited(url, LIFE), NAMES)
    reader, writer, seen = open_reader(url), writer_of(url), 0
    for batch in TrailingProjection(reader, writer, "main", max_rows=40, rebuilds=True).catch_up():
        if not batch.checkpoint.is_live and batch.checkpoint.position < len(LIFE):
            assert contents(url, NAMES) == before
            seen += 1
            if seen == 3:
                break
    assert seen == 3
    half = writer.shadow("main")
    assert half is not None
    assert 0 < half.position < len(LIFE)
    starts = [b.checkpoint.position for b in TrailingProjection(reader, writer, "main", rebuilds=True).catch_up()]
    assert starts[0] > half.position
    assert writer.live("main").projection_id == half.projection_id
    writer.close()
    reader.close()
    assert contents(url, NAMES) == before


def test_a_read_model_of_an_older_version_is_built_again(url):
    before = contents(audited(url, LIFE), NAMES)
    writer = writer_of(url)
    with writer.transaction():
        writer.execute("UPDATE audit_projections SET version = 0")
        writer.execute("UPDATE audit_requests SET num_output_tokens = 17")
    writer.close()
    project(url)
    assert contents(url, NAMES) == before


def replaced(tmp_path, num_records):
    """A journal of 80 records that was audited, and another of so many records in its place; and what that is in the read model."""
    url = audited(path_url(tmp_path, "first.db"), LIFE[:80])
    other = sealed(simulated(6))[:num_records]
    expected = contents(audited(path_url(tmp_path, "other.db"), other), NAMES)
    connection = sqlite3.connect(url)
    connection.execute("DELETE FROM journal_records")
    connection.execute("DELETE FROM journal_streams")
    connection.commit()
    connection.close()
    mark_file(Path(url)).unlink(missing_ok=True)
    write(url, other)
    return url, expected


def test_a_journal_that_was_replaced_by_another_is_projected_anew(tmp_path):
    url, expected = replaced(tmp_path, 90)
    catch_up(place_of(url))
    assert contents(url, NAMES) == expected


def test_one_that_was_replaced_by_a_shorter_one_has_lost_its_end_until_it_is_rebuilt(tmp_path):
    url, expected = replaced(tmp_path, 40)
    with pytest.raises(JournalCorrupt, match=r"ends at 40, .* made of records up to 80: .* `refold audit rebuild "):
        catch_up(place_of(url))
    catch_up(place_of(url), rebuilds=True)
    assert contents(url, NAMES) == expected


# -- journals that aren't whole ---------------------------------------------------------------------------------------


def test_of_a_damaged_journal_what_comes_before_the_damage_can_be_asked(tmp_path):
    url = write(path_url(tmp_path), LIFE)
    connection = sqlite3.connect(url)
    connection.execute("UPDATE journal_records SET body = replace(body, 'handles', 'handlez') WHERE position = 50")
    connection.commit()
    connection.close()
    (done,) = catch_up(place_of(url))
    assert (done.position, done.damage_position) == (50, 50)
    with asking(url) as ask:
        assert ask("SELECT chain, damage_position, num_records FROM integrity") == [("damaged", 50, 50)]
        assert ask("SELECT rule, position FROM violations") == [("damage", 50)]
        assert ask("SELECT COUNT(*) FROM requests") > [(0,)]
    assert catch_up(place_of(url)) == [done]


class _Watched(SqliteReader):
    """Notes which records are read."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.positions: list[int] = []

    def read(self, stream="main", start=0, stop=None):
        for record in super().read(stream, start, stop):
            self.positions.append(record.position)
            yield record


def changed(url: str, position: int, old: str, new: str) -> None:
    with contextlib.closing(sqlite3.connect(url)) as connection, connection:
        connection.execute(
            "UPDATE journal_records SET body = replace(body, ?, ?) WHERE position = ?", (old, new, position)
        )


def test_a_damaged_journal_that_is_asked_again_is_read_from_the_damage_on(tmp_path):
    url = write(path_url(tmp_path), LIFE)
    changed(url, 50, "handles", "handlez")
    project(url)
    before = contents(url, ["audit_projections", *TABLES])
    reader, writer = _Watched(Path(url)), writer_of(url)
    (batch,) = TrailingProjection(reader, writer, "main").catch_up()
    reader.close()
    writer.close()
    assert (batch.num_records, batch.num_rows, batch.checkpoint.position) == (0, 0, 50)
    assert min(reader.positions) == 49, "the last one projected, to see that it's the same journal"
    assert contents(url, ["audit_projections", *TABLES]) == before


def test_a_damaged_journal_that_is_whole_again_is_projected_on(tmp_path):
    url = write(path_url(tmp_path), LIFE)
    changed(url, 50, "handles", "handlez")
    project(url)
    project(url)
    changed(url, 50, "handlez", "handles")
    project(url)
    (tmp_path / "other").mkdir()
    assert contents(url, TABLES) == contents(audited(path_url(tmp_path / "other"), LIFE), TABLES)


def test_an_event_that_contradicts_those_before_it_is_a_violation_and_the_rest_is_projected(tmp_path):
    records = simulated(13)
    forged = [*records[:40], records[39], *records[40:]]
    (done,) = catch_up(place_of(write(path_url(tmp_path), sealed(forged))))
    assert done.position == len(forged)
    with asking(path_url(tmp_path)) as ask:
        assert ("main", 40) in ask("SELECT stream, position FROM violations")


def test_an_empty_journal_has_views_without_rows(url):
    write(url, [])
    catch_up(place_of(url))
    assert not any(rows for name, rows in contents(url, NAMES).items() if name != "integrity")


# -- where it is ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", [0, 60, 5000, 9000], ids="from byte {}".format)
def test_a_damaged_file_beside_segments_says_that_it_can_be_made_anew_and_is(tmp_path: Path, where: int) -> None:
    url = f"{tmp_path / 'plain'}/"
    with Engine("simulated", url) as engine:
        engine.run(["hello"])
    before = refold("audit", "requests", "--json", url).stdout
    path = path_beside(tmp_path / "plain")
    raw = path.read_bytes()
    path.write_bytes(raw[:where] + b"\xa5" * 3000 + raw[where + 3000 :])
    told = refold("audit", "requests", "--json", url)
    if told.exit_code:
        assert told.exit_code == 3
        assert told.stderr.startswith(f"refold: {path} is the read model of {url}, and is damaged: ")
    for name in (path.name, f"{path.name}-wal", f"{path.name}-shm"):
        path.with_name(name).unlink(missing_ok=True)
    assert refold("audit", "requests", "--json", url).stdout == before
    assert told.exit_code or told.stdout == before, "damage that nobody met"


def test_segments_have_a_file_beside_them(tmp_path):
    url = audited(f"{tmp_path}/journal/", LIFE)
    beside = path_beside(tmp_path / "journal")
    assert beside == tmp_path / "journal.audit.db"
    expected = contents(audited(path_url(tmp_path, "same.db"), LIFE), NAMES)
    assert contents(str(beside), NAMES) == expected
    with pytest.raises(JournalCorrupt, match="another program"):
        open_reader(str(beside))
    catch_up(place_of(url))


def test_a_foreign_file_in_its_place_is_left_alone(tmp_path):
    write(f"{tmp_path}/journal/", LIFE)
    foreign = sqlite3.connect(tmp_path / "journal.audit.db")
    foreign.execute("CREATE TABLE bookmarks (url)")
    foreign.close()
    before = (tmp_path / "journal.audit.db").read_bytes()
    with pytest.raises(JournalCorrupt, match="isn't one: move it away"):
        catch_up(place_of(f"{tmp_path}/journal/"))
    assert (tmp_path / "journal.audit.db").read_bytes() == before


def test_a_journal_that_can_not_be_written_is_projected_into_a_temporary_file(tmp_path, monkeypatch):
    url = write(path_url(tmp_path), LIFE)
    expected = contents(audited(path_url(tmp_path, "same.db"), LIFE), NAMES)
    before = (tmp_path / "journal.db").read_bytes()
    monkeypatch.setattr(place_module, "_can_write", lambda _: False)
    with writable_place(url) as place:
        assert place.is_temporary
        catch_up(place)
        assert contents(str(place.path), NAMES) == expected
    assert not place.path.exists()
    assert (tmp_path / "journal.db").read_bytes() == before


def test_a_catch_up_leaves_no_write_ahead_log_behind(tmp_path):
    url = audited(path_url(tmp_path), LIFE)
    wal = tmp_path / "journal.db-wal"
    assert url
    assert not wal.exists() or wal.stat().st_size == 0


# -- an engine that keeps it ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sqlite", "segments", "postgresql"])
def test_an_engine_keeps_it_up_to_date_while_it_runs(kind, tmp_path, postgres_server):
    url = {"sqlite": path_url(tmp_path), "segments": f"{tmp_path}/journal/"}.get(kind) or postgres_server.empty()
    with Engine(MODEL, url, audit=True, num_blocks=64) as engine:
        engine.run([[1, 2, 3]] * 6, SamplingParams(max_tokens=12, seed=1))
        place, deadline = place_of(url), time.monotonic() + 20
        shown = str(place.path) if place.path else url
        while True:
            with contextlib.suppress(sqlite3.OperationalError), asking(shown) as ask:  # it may not be there yet
                if ask("SELECT COUNT(*) FROM requests WHERE status = 'finished'") == [(6,)]:
                    break
            assert time.monotonic() < deadline
            time.sleep(0.05)
    with asking(shown) as ask:
        assert ask("SELECT fate FROM engine_lives") == [("closed",)]
        assert ask("SELECT num_records_behind, num_violations FROM integrity") == [(0, 0)]
        assert ask("SELECT COUNT(*) FROM tokens") == [(72,)]
    assert "refold-audit" not in {thread.name for thread in threading.enumerate()}


def test_an_audit_of_a_journal_in_memory_is_refused():
    with pytest.raises(Rejected, match="name a journal file or database"):
        Engine(MODEL, audit=True)


# -- redaction --------------------------------------------------------------------------------------------------------

WORD = 741


def said_once(url: str) -> None:
    """Two requests; the tokens of the first are told."""
    with Engine(MODEL, url) as engine:
        engine.run([[WORD] * 5, [3] * 5], SamplingParams(max_tokens=9, seed=4), request_ids=["gone", "kept"])


@pytest.mark.parametrize("kind", ["sqlite", "segments", "postgresql"])
def test_what_is_redacted_is_gone_from_the_read_model_with_the_redaction_itself(kind, tmp_path, postgres_server):
    url = {"sqlite": path_url(tmp_path), "segments": f"{tmp_path}/journal/"}.get(kind) or postgres_server.empty()
    said_once(url)
    place = place_of(url)
    catch_up(place)
    shown = str(place.path) if place.path else url
    tokens = "SELECT COUNT(*), COUNT(token_id) FROM tokens WHERE request_id = '{}'"
    with asking(shown) as ask:
        assert ask(tokens.format("gone")) == [(9, 9)]
    assert (redact_at_rest(url, "gone").left == "") == (kind != "postgresql")
    with asking(shown) as ask:  # nobody has caught up since
        assert ask(tokens.format("gone")) == [(9, 0)]
        assert ask(tokens.format("kept")) == [(9, 9)]
        assert ask("SELECT request_id, is_redacted FROM requests ORDER BY handle") == [("gone", 1), ("kept", 0)]
    catch_up(place)
    now = contents(shown, TABLES)
    project_anew = catch_up(place, rebuilds=True)
    assert project_anew[0].position
    catch_up(place)
    with asking(shown) as ask:
        assert ask(tokens.format("gone")) == [(9, 0)]
        assert ask("SELECT num_redacted_requests, num_violations FROM integrity") == [(1, 0)]
    anew = contents(shown, TABLES)
    assert {name: [row[1:] for row in rows] for name, rows in anew.items()} == {
        name: [row[1:] for row in rows] for name, rows in now.items()
    }


# -- durations --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, 1, 255, 256, 257, 1000, 123_456_789, 10**15 + 17])
def test_a_bucket_is_at_most_one_part_in_128_below(value):
    assert bucket_of(value) <= value
    assert value - bucket_of(value) <= value / 128
    assert bucket_of(bucket_of(value)) == bucket_of(value)
    assert bucket_of(value + 1) >= bucket_of(value)
