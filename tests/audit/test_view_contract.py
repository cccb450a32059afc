"""The views are a contract: columns, their order and types on both databases, the list in the database, and how they are found."""

import re
import sqlite3
from pathlib import Path

import pytest
import sqlalchemy as sa

from refold.engine.audit.export import type_of
from refold.journal.stores import postgres_engine
from refold.projections.audit.catalogue import VIEWS, meaning
from refold.projections.audit.columns import MEANINGS
from refold.projections.audit.schema import TABLES
from tests.kit.audited import asking, audited, path_url, sealed, simulated
from tests.project.tree import ROOT

NAMES = [view.name for view in VIEWS]


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    return audited(path_url(tmp_path_factory.mktemp("views")), sealed(simulated(13)))


@pytest.fixture(scope="module")
def connection(url):
    connection = sqlite3.connect(f"file:{url}?mode=ro", uri=True)
    yield connection
    connection.close()


@pytest.fixture(scope="module")
def postgres(postgres_server):
    url = audited(postgres_server.empty(), sealed(simulated(13)))
    engine = postgres_engine.create_engine(url)
    with engine.connect() as connection:
        yield connection
    engine.dispose()


def columns(connection, view):
    return [column[0] for column in connection.execute(f"SELECT * FROM {view}").description]


@pytest.mark.parametrize("view", VIEWS, ids=NAMES)
def test_every_column_is_explained_and_nothing_else(view, connection):
    found = columns(connection, view.name)
    assert all(meaning(view.name, column) for column in found)
    assert {*view.own, *view.shown.split(), *view.filters} <= set(found)


def test_no_explanation_outlives_its_column(connection):
    assert MEANINGS.keys() <= {column for view in NAMES for column in columns(connection, view)}


@pytest.mark.parametrize("view", NAMES)
def test_both_databases_have_the_same_columns_of_the_same_kinds(view, connection, postgres):
    found = sa.inspect(postgres).get_columns(view)
    assert [column["name"] for column in found] == columns(connection, view)
    kinds = {"BIGINT": "int64", "INTEGER": "int64", "TEXT": "string", "DOUBLE PRECISION": "float64"}
    assert {c["name"]: kinds[str(c["type"])] for c in found} == {c["name"]: type_of(c["name"]) for c in found}


def test_no_column_goes_away_within_a_major_version(connection):
    """The page of the reference is in the commit: a column that was there in a released version must still be."""
    page = (ROOT / "docs" / "reference" / "audit.md").read_text(encoding="utf-8")
    for section in page.split("\n### ")[1:]:
        name = section.partition("\n")[0]
        assert columns(connection, name) == re.findall(r"^\| `(\w+)` \|", section, flags=re.MULTILINE), name


def test_the_database_says_what_its_views_are_for(connection):
    listed = dict(connection.execute("SELECT name, question FROM audit_views").fetchall())
    assert listed == {view.name: view.question for view in VIEWS}


def test_the_page_check_of_sqlite_looks_at_all_pages(tmp_path):
    """See the migration: a view that SQLite finds first would make it a check of one table."""
    url = audited(path_url(tmp_path), sealed(simulated(6))[:30])
    connection = sqlite3.connect(url)
    connection.execute("CREATE TABLE gone (x)")
    connection.execute("INSERT INTO gone VALUES (zeroblob(30000))")
    connection.commit()
    connection.execute("DROP TABLE gone")
    connection.commit()
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    connection.close()
    with Path(url).open("r+b") as file:
        head = file.read(100)
        page_bytes, trunk = int.from_bytes(head[16:18], "big"), int.from_bytes(head[32:36], "big")
        file.seek((trunk - 1) * page_bytes + 7)
        (count,) = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([count ^ 1]))
    connection = sqlite3.connect(f"file:{url}?mode=ro", uri=True)
    assert connection.execute("PRAGMA integrity_check(1)").fetchone() != ("ok",)
    connection.close()


# -- plans ------------------------------------------------------------------------------------------------------------

SMALL = {"audit_projections", "audit_lives", "audit_workers", "audit_violations", "audit_speculation", "audit_tenants"}


def plan_of(connection, sql, parameters):
    return [row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {sql}", parameters)]


def full_scans(connection, view, plan):
    """Tables of which the plan reads every row, or every row of a projection, small ones apart."""
    (text,) = connection.execute("SELECT sql FROM sqlite_master WHERE name = ?", (view,)).fetchone()
    tables = {alias: name for name, alias in re.findall(r"(audit_\w+) AS (\w+)", text)}
    found = []
    for line in plan:
        scanned = re.match(r"SCAN (\w+)", line)
        searched = re.match(r"SEARCH (\w+) USING .*\(projection_id=\?\)", line)
        alias = (scanned or searched)[1] if scanned or searched else None
        if alias in tables and tables[alias] not in SMALL:
            found.append(line)
    return found


ALREADY_NARROWED = {
    ("batch_mates", "output_index"),  # goes with a request
    ("durations", "kind"),  # goes with a minute
    ("request_events", "step"),
    ("tenants_by_minute", "tenant"),
}
NARROWED = [(view, column) for view in VIEWS for column in view.filters if (view.name, column) not in ALREADY_NARROWED]
ONE = pytest.mark.parametrize(("view", "column"), NARROWED, ids=[f"{view.name}-{column}" for view, column in NARROWED])


@ONE
def test_what_is_narrowed_to_one_is_found_by_an_index(view, column, connection):
    sql = f"SELECT * FROM {view.name} WHERE {column} = ? ORDER BY {view.order}"
    assert full_scans(connection, view.name, plan_of(connection, sql, (3,))) == []


def test_a_full_scan_is_found(connection):
    plan = plan_of(connection, "SELECT * FROM tokens WHERE token_id = 3", ())
    assert full_scans(connection, "tokens", plan)


TEXTS = {"request_id", "tenant"}
SHIFTED = {"handle", "step", "position", "minute", "engine_epoch", "generation", "draft_position"}
NUM_COPIES = 30


@pytest.fixture(scope="module")
def long_postgres(postgres_server):
    """A read model with so many rows that reading one by its key is worth it, as PostgreSQL sees it: a life, again and again."""
    url = audited(postgres_server.empty(), sealed(simulated(13)))
    engine = postgres_engine.create_engine(url)
    with engine.begin() as connection:
        for table in TABLES[1:-1]:
            columns = ", ".join(table.names)
            copied = ", ".join(
                f"{name} + k * 1000000" if name in SHIFTED else f"{name} || '-' || k" if name in TEXTS else name
                for name in table.names
            )
            connection.exec_driver_sql(
                f"INSERT INTO {table.name} ({columns}) SELECT {copied} FROM {table.name}, generate_series(1, {NUM_COPIES}) AS k"
            )
    with engine.connect() as connection:
        connection.execution_options(isolation_level="AUTOCOMMIT").exec_driver_sql("ANALYZE")
    with engine.connect() as connection:
        yield connection
    engine.dispose()


def full_scans_on_postgresql(postgres, sql):
    """Tables that PostgreSQL reads whole, or a whole projection of, though it was told to rather not."""
    for kind in ("seqscan", "hashjoin", "mergejoin"):
        postgres.exec_driver_sql(f"SET LOCAL enable_{kind} = off")
    (((plan, *_),),) = postgres.exec_driver_sql(f"EXPLAIN (FORMAT JSON) {sql}").all()
    found, left = [], [plan["Plan"]]
    while left:
        node = left.pop()
        left += node.get("Plans", [])
        table, condition = node.get("Relation Name", node.get("Index Name", "")), node.get("Index Cond", "")
        reads = node["Node Type"] in {"Seq Scan", "Index Scan", "Index Only Scan", "Bitmap Index Scan"}
        narrows = re.search(r"\((?!projection_id )\w+ (=|<|>)", condition)
        if reads and not narrows and not any(small in table for small in SMALL):
            found.append(f"{node['Node Type']} of {table} by {condition or 'nothing'}")
    return found


@ONE
def test_what_is_narrowed_to_one_is_found_by_an_index_on_postgresql(view, column, long_postgres):
    kinds = {c["name"]: str(c["type"]) for c in sa.inspect(long_postgres).get_columns(view.name)}
    value = "'3'" if kinds[column] == "TEXT" else "3"
    sql = f"SELECT * FROM {view.name} WHERE {column} = {value} ORDER BY {view.order}"
    assert full_scans_on_postgresql(long_postgres, sql) == []


def test_a_full_scan_is_found_on_postgresql(long_postgres):
    assert full_scans_on_postgresql(long_postgres, "SELECT * FROM tokens WHERE token_id = 3")


def test_a_projection_is_not_looked_up_for_each_row(connection):
    """Its row has a large blob in it, which SQLite reads to compare the key: a million times, if it's looked up last."""
    for view in ("tokens", "violations"):
        plan = plan_of(connection, f"SELECT COUNT(*) FROM {view}", ())
        assert not [line for line in plan if line.startswith("SEARCH p ")], view


def test_every_table_begins_with_its_projection_and_has_no_second_copy(connection):
    for table in TABLES[:-1]:
        assert table.names[0] == "projection_id"
        (sql,) = connection.execute("SELECT sql FROM sqlite_master WHERE name = ?", (table.name,)).fetchone()
        assert "WITHOUT ROWID" in sql
        assert "STRICT" in sql


def test_percentiles_are_those_of_the_durations_themselves(url):
    with asking(url) as ask:
        durations = sorted(row[0] for row in ask("SELECT total_ns FROM requests WHERE total_ns IS NOT NULL"))
        ((num, p50, p95, largest),) = ask(
            "SELECT SUM(num), MAX(p50_ns), MAX(p95_ns), MAX(max_ns) FROM durations WHERE kind = 'total'"
        )
    assert num == len(durations)
    for share, bucket in ((50, p50), (95, p95), (100, largest)):
        exact = durations[-(-share * len(durations) // 100) - 1]
        assert bucket <= exact <= bucket * 129 / 128 + 1
