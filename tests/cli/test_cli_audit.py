"""`refold sql` and `refold audit`: any store, three formats, nothing that writes, one line for every mistake."""

import contextlib
import csv
import io
import json
import os
import shutil
import signal
import sqlite3
import time

import pytest

from refold.projections.audit.catalogue import VIEWS
from tests.cli.command import assert_one_line_and_a_hint, finished, process, refold, rows
from tests.history.journals import eventful_lives, write_journal
from tests.kit.audited import asking, path_url, sealed, simulated, write


@pytest.fixture(scope="module")
def journal(tmp_path_factory):
    path = tmp_path_factory.mktemp("audit") / "run.db"
    write_journal(path, eventful_lives()[0])
    return path


@pytest.fixture(params=["sqlite", "segments", "postgresql"])
def any_journal(request, tmp_path, postgres_server):
    url = {"sqlite": path_url(tmp_path), "segments": f"{tmp_path}/journal/"}.get(request.param)
    return write(url or postgres_server.empty(), sealed(simulated(13)))


def refused(*arguments, status=2, **options):
    done = refold(*arguments, **options)
    assert done.exit_code == status, done.stderr
    assert done.stdout == ""
    assert_one_line_and_a_hint(done.stderr)
    return done.stderr


# -- asking -----------------------------------------------------------------------------------------------------------


def test_sql_shows_a_table_json_lines_or_csv(journal):
    statement = "SELECT request_id, num_output_tokens, finish_reason FROM requests ORDER BY handle LIMIT 2"
    table = refold("sql", journal, statement).stdout.splitlines()
    assert table[0].split() == ["request_id", "num_output_tokens", "finish_reason"]
    assert [line.split()[0] for line in table[1:]] == ["req-0", "req-1"]
    objects = rows(refold("sql", journal, statement, "--json").stdout)
    assert objects[0] == {"request_id": "req-0", "num_output_tokens": 10, "finish_reason": "length"}
    cells = list(csv.DictReader(io.StringIO(refold("sql", journal, statement, "--csv").stdout)))
    assert [{**row, "num_output_tokens": str(row["num_output_tokens"])} for row in objects] == cells


def test_a_statement_may_come_from_stdin(journal):
    assert refold("sql", journal, "-", "--csv", stdin="-- how many\nSELECT 1 AS one").stdout == "one\n1\n"


@pytest.mark.parametrize("name", [view.name for view in VIEWS])
def test_every_named_query_and_every_example_runs(name, journal):
    view = next(view for view in VIEWS if view.name == name)
    status = refold("audit", name, journal)
    assert status.exit_code == 0, status.stderr
    assert status.stdout.split("\n")[0].split() == view.shown.split()
    assert refold("sql", journal, view.example, "--json").exit_code == 0
    for column in view.filters:
        flag = {"request_id": "--request", "output_index": "--index"}.get(column, f"--{column}")
        expected = 1 if flag == "--request" else 0
        assert refold("audit", name, journal, flag, "3", "--json").exit_code == expected, column


def test_every_store_gives_the_same_answers(any_journal):
    told = rows(refold("audit", "requests", any_journal, "--json").stdout)
    assert len(told) == 9
    assert refold("audit", "violations", any_journal).exit_code == 0
    assert refold("sql", any_journal, "SELECT COUNT(*) AS num FROM tokens", "--csv").stdout == "num\n48\n"
    assert (
        len(rows(refold("audit", "tokens", any_journal, "--request", told[0]["request_id"], "--json").stdout))
        == told[0]["num_output_tokens"]
    )


def test_what_was_appended_since_is_projected_first_unless_asked_as_is(tmp_path):
    url, records = path_url(tmp_path), sealed(simulated(13))
    write(url, records[:60])
    count = ("sql", url, "SELECT num_records FROM integrity", "--csv")
    assert refold(*count).stdout == "num_records\n60\n"
    write(url, records[60:])
    assert refold(*count, "--as-is").stdout == "num_records\n60\n"
    assert refold(*count).stdout == f"num_records\n{len(records)}\n"


def test_violations_end_with_status_1(tmp_path):
    records = simulated(13)
    url = write(path_url(tmp_path), sealed([*records[:40], records[39], *records[40:]]))
    done = refold("audit", "violations", url)
    assert done.exit_code == 1
    assert "contradiction" in done.stdout
    assert f"`refold verify {url}` says where" in done.stderr


def test_violations_of_another_stream_are_looked_for_there(tmp_path):
    records = simulated(13)
    url = write(path_url(tmp_path), sealed([*records[:40], records[39], *records[40:]]))
    with contextlib.closing(sqlite3.connect(url)) as connection, connection:
        connection.execute("UPDATE journal_streams SET name = 'other'")
    done = refold("audit", "violations", url)
    assert (done.exit_code, f"`refold verify --stream other {url}` says where" in done.stderr) == (1, True), done.stderr


def test_a_damaged_journal_is_asked_up_to_the_damage_with_a_word(tmp_path):
    url = write(path_url(tmp_path), sealed(simulated(13)))
    connection = sqlite3.connect(url)
    connection.execute("UPDATE journal_records SET time_ns = time_ns + 1 WHERE position = 30")
    connection.commit()
    connection.close()
    done = refold("sql", url, "SELECT num_records FROM integrity", "--csv")
    assert (done.exit_code, done.stdout) == (3, "num_records\n30\n")
    assert "record 30" in done.stderr


def test_integrity_sees_damage_to_a_record_that_was_projected_before(tmp_path):
    url = write(path_url(tmp_path), sealed(simulated(13)))
    assert rows(refold("audit", "integrity", url, "--json").stdout)[0]["chain"] == "whole"
    connection = sqlite3.connect(url)
    connection.execute("UPDATE journal_records SET time_ns = time_ns + 1 WHERE position = 30")
    connection.commit()
    connection.close()
    done = refold("audit", "integrity", url, "--json")
    assert done.exit_code == 3
    (row,) = rows(done.stdout)
    assert (row["chain"], row["damage_position"]) == ("damaged", 30)
    assert_one_line_and_a_hint(done.stderr)
    assert f"`refold log --until 29 {url}`" in done.stderr


CUTS = {
    "a tail": (31, "DELETE FROM journal_records WHERE position > 30"),
    "all records": (0, "DELETE FROM journal_records"),
    "a tail that is in another stream": (31, "UPDATE journal_records SET stream_id = 2 WHERE position > 30"),
}


@pytest.mark.parametrize("is_projected", [False, True])
@pytest.mark.parametrize("cut", CUTS)
def test_a_journal_that_lost_its_tail_is_asked_up_to_there_with_a_word(tmp_path, cut, is_projected):
    url = write(path_url(tmp_path), sealed(simulated(13)))
    if is_projected:
        refold("audit", "rebuild", url)
    end, statement = CUTS[cut]
    connection = sqlite3.connect(url)
    connection.execute(statement)
    connection.commit()
    connection.close()
    asked = "SELECT chain, damage_position, num_records FROM integrity"
    for verb in (("audit", "integrity", url), ("sql", url, asked), ("audit", "rebuild", url), ("audit", "follow", url)):
        done = refold(*verb)
        assert done.exit_code == 3
        assert f"{url}: the stream ends at {end}, expected " in done.stderr
        assert "its tail was cut off" in done.stderr
    assert rows(refold("sql", url, asked, "--json").stdout) == [
        {"chain": "damaged", "damage_position": end, "num_records": end}
    ]


@pytest.mark.parametrize("verb", [("audit", "integrity"), ("audit", "rebuild"), ("sql",)])
def test_segments_without_their_mark_are_asked_with_a_word(tmp_path, verb):
    url = write(f"{tmp_path}/journal/", sealed(simulated(13)))
    (tmp_path / "journal" / "main" / "mark").unlink()
    done = refold(*verb, url, *(["SELECT chain FROM integrity"] if verb == ("sql",) else []))
    assert done.exit_code == 0, done.stderr
    assert done.stderr.count("refold: ") == 1
    assert done.stderr.splitlines() == refold("show", url).stderr.splitlines()[:1]


# -- refusing ---------------------------------------------------------------------------------------------------------

WRITES = (
    "DELETE FROM journal_records",
    "WITH x AS (SELECT 1) DELETE FROM journal_records",
    "  /* SELECT */ -- SELECT\n drop view requests",
    "INSERT INTO audit_views VALUES ('a', 'b')",
    "UPDATE audit_requests SET priority = 1",
    "CREATE TABLE x (y integer)",
    "ATTACH DATABASE 'other.db' AS other",
    "PRAGMA user_version = 7",
    "VACUUM INTO 'copy.db'",
    "SET default_transaction_read_only = off",
    "COPY journal_records TO '/tmp/stolen'",
    "EXPLAIN ANALYZE DELETE FROM journal_records",
    "SELECT 1; DELETE FROM journal_records",
    "BEGIN",
    "",
    "nonsense",
    "SELECT nope FROM requests",
)


@pytest.mark.parametrize("statement", WRITES)
def test_a_statement_that_writes_or_is_none_is_refused_in_one_line(statement, journal, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refold("audit", "integrity", journal)
    before = journal.read_bytes()
    if statement.startswith("EXPLAIN"):
        done = refold("sql", journal, statement)
        assert done.exit_code in {0, 2}
    else:
        refused("sql", journal, statement)
    assert journal.read_bytes() == before
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("statement", WRITES)
def test_postgresql_refuses_them_too(statement, postgres_audited):
    refused("sql", postgres_audited, statement, "--as-is")
    with asking(postgres_audited) as ask:
        assert ask("SELECT COUNT(*) FROM journal_records") == [(60,)]


@pytest.fixture(scope="module")
def postgres_audited(postgres_server):
    url = write(postgres_server.empty(), sealed(simulated(13))[:60])
    assert refold("audit", "integrity", url).exit_code == 0
    return url


def test_postgresql_can_not_be_talked_out_of_reading_only(postgres_audited):
    escape = "SELECT set_config('transaction_read_only', 'off', false), COUNT(*) FROM journal_records"
    refused("sql", postgres_audited, escape, "--as-is")


@pytest.mark.parametrize(
    ("arguments", "words", "status"),
    [
        (("sql",), "missing argument", 2),
        (("sql", "no.db", "SELECT 1"), "no journal at", 3),
        (("sql", "memory:", "SELECT 1"), "memory", 3),
        (("audit", "reqests"), "did you mean `refold audit requests`", 2),
        (("audit", "requests", "no.db"), "no journal at", 3),
        (("audit", "follow", "no.db"), "no journal at", 3),
        (("audit", "rebuild", "no.db"), "no journal at", 3),
        (("audit", "steps", "--step", "x"), "step", 2),
        (("sql", "run.db", "SELECT hex(zeroblob(200000000))"), "too big", 2),
        (("audit", "export", "/proc/x", "run.db"), "/proc/x can't be written", 2),
    ],
)
def test_a_mistake_is_one_line(arguments, words, status, journal, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copy(journal, "run.db")
    assert words in refused(*arguments, status=status)


def test_two_formats_at_once_are_refused(journal):
    refused("sql", journal, "SELECT 1", "--json", "--csv")


# -- the read model itself --------------------------------------------------------------------------------------------


def test_list_names_every_view():
    assert [row["name"] for row in rows(refold("audit", "list", "--json").stdout)] == [view.name for view in VIEWS]


def test_rebuild_says_what_it_built(journal):
    assert refold("audit", "rebuild", journal).stdout.startswith("main: ")


def test_follow_projects_what_comes_until_it_is_interrupted(tmp_path):
    url, records = path_url(tmp_path), sealed(simulated(13))
    write(url, records[:40])
    child = process("audit", "follow", "--json", url)
    try:
        assert json.loads(child.stdout.readline())["position"] == 40
        write(url, records[40:])
        deadline = time.monotonic() + 30
        while json.loads(child.stdout.readline())["position"] < len(records):
            assert time.monotonic() < deadline
        os.kill(child.pid, signal.SIGINT)
        assert child.wait(30) == 130
    finally:
        child.kill()
    with asking(url) as ask:
        assert ask("SELECT num_records_behind FROM integrity") == [(0,)]


def test_a_json_row_never_loses_a_column(journal):
    done = refold("sql", journal, "SELECT 1 AS a, 2 AS a", "--json")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "two columns are called 'a'" in done.stderr


def test_export_writes_each_view_as_parquet(journal, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    done = refold("audit", "export", tmp_path / "lake", journal)
    assert done.exit_code == 0
    assert "--view batch_mates writes it too" in done.stderr
    assert not (tmp_path / "lake" / "batch_mates.parquet").exists(), "it's every batch times itself"
    assert refold("audit", "export", tmp_path / "lake", journal, "--view", "batch_mates").stdout.startswith("batch_m")
    for view in VIEWS:
        table = parquet.read_table(tmp_path / "lake" / f"{view.name}.parquet")
        told = rows(refold("sql", journal, f"SELECT * FROM {view.name}", "--json").stdout)
        assert sorted(map(repr, table.to_pylist())) == sorted(map(repr, told)), view.name
    duckdb = pytest.importorskip("duckdb")
    num = duckdb.sql(f"SELECT COUNT(*) FROM '{tmp_path}/lake/tokens.parquet'").fetchall()[0]
    assert num == (len(rows(refold("sql", journal, "SELECT output_index FROM tokens", "--json").stdout)),)


def test_nothing_here_needs_torch_or_for_sqlite_sqlalchemy(journal):
    code = (
        "import sys; from refold.engine.cli.app import app\n"
        f"try: app.main(['audit', 'requests', {str(journal)!r}])\n"
        "except SystemExit: pass\n"
        "print({'torch', 'sqlalchemy', 'alembic', 'pydantic'} & set(sys.modules))"
    )
    import subprocess
    import sys

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"


def test_run_keeps_the_read_model_if_asked_to(tmp_path):
    journal = tmp_path / "run.db"
    for option, num in ((), 0), (("--audit",), 2):
        path = journal.with_name(f"{num}.db")
        done = refold("run", "--model", "simulated", "--journal", path, "--max-tokens", 4, *option, "a", "b")
        assert done.exit_code == 0, done.stderr
        with asking(str(path)) as ask:
            assert ask("SELECT COUNT(*) FROM requests WHERE status = 'finished'") == [(num,)]


def test_an_engine_that_runs_is_asked_while_it_runs(tmp_path):
    """It runs for as long as its stdin is open: until it was seen at three moments, however long that takes."""
    code = (
        "import select, sys\n"
        "from refold import Engine, SamplingParams\n"
        f"with Engine('simulated?vocab=1000&eos=-1&step_ms=5', {path_url(tmp_path)!r}) as engine:\n"
        "    while not select.select([sys.stdin], [], [], 0)[0]:\n"
        "        engine.run([[1, 2, 3]] * 4, SamplingParams(max_tokens=100, seed=1))\n"
    )
    import subprocess
    import sys

    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    try:
        seen, deadline = set(), time.monotonic() + 60
        while len(seen) < 3 and time.monotonic() < deadline:
            status, stdout, _ = finished("sql", path_url(tmp_path), "SELECT COUNT(*) FROM tokens", "--csv")
            if status == 0:
                seen.add(stdout)
        assert len(seen) >= 3
        assert child.stdin is not None
        child.stdin.close()
        assert child.wait(60) == 0
    finally:
        child.kill()
    assert refold("audit", "violations", path_url(tmp_path)).exit_code == 0


@pytest.mark.parametrize("form", [(), ("--csv",), ("--json",)], ids=["table", "csv", "json"])
def test_a_request_that_is_not_there_is_said_to_be_unknown_as_by_other_verbs(journal, form):
    error = refused("audit", "tokens", journal, "--request", "req-99", *form, status=1)
    assert "no request 'req-99' in this journal" in error
    assert "'req-" in error.splitlines()[1]


def test_a_request_of_which_there_is_nothing_to_tell_is_no_unknown_one(journal):
    known = rows(refold("audit", "requests", journal, "--json").stdout)[0]["request_id"]
    result = refold("audit", "step_entries", journal, "--request", known, "--step", "99999")
    assert result.exit_code == 0, result.stderr
    assert len(result.stdout.splitlines()) == 1, "the header"
    assert result.stderr == "(no rows)\n"


def test_a_statement_in_the_journals_place_is_told_the_order(journal):
    error = refused("sql", "SELECT count(*) FROM requests", str(journal))
    assert (
        f"the journal comes first, then the statement: `refold sql {journal} 'SELECT count(*) FROM requests'`" in error
    )
    assert "comes first" not in refused("sql", str(journal), "DROP TABLE requests")
