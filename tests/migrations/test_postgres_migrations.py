"""Migrations on PostgreSQL: the same tables, entirely or not at all, by one process at a time."""

import subprocess
import sys
import threading

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata

from refold import migrations
from refold.journal.errors import JournalError, JournalOwned
from refold.journal.record import GENESIS_HASH, chain_hash
from refold.journal.stores import open_reader, postgres_engine
from refold.journal.stores.sql import SqlStore
from refold.journal.stores.tables import metadata
from refold.journal.testing import make_records
from refold.journal.verify import verify_stream
from refold.migrations import postgres, run
from refold.projections.audit.tables import metadata as audit_metadata

DESCRIBED = [metadata, audit_metadata]
TABLES = {"refold_schema", *metadata.tables, *audit_metadata.tables}


@pytest.fixture
def url(postgres_server):
    return postgres_server.empty()


def tables(url):
    engine = postgres_engine.create_engine(url)
    with engine.connect() as connection:
        schema = connection.exec_driver_sql("SELECT current_schema()").scalar_one()
        names = set(sa.inspect(connection).get_table_names(schema))
    engine.dispose()
    return names


def test_a_new_place_gets_its_tables_and_the_second_time_nothing(url):
    assert not migrations.is_current(url)
    assert migrations.current(url) is None
    assert migrations.upgrade(url)
    assert tables(url) == TABLES
    assert migrations.is_current(url)
    assert migrations.current(url) == run.head_revision()
    assert not migrations.upgrade(url)
    assert not migrations.ensure(url)


def test_the_tables_are_those_that_the_code_describes(url):
    migrations.ensure(url)
    engine = postgres_engine.create_engine(url, autocommit=False)
    with engine.connect() as connection:
        assert [repr(difference) for difference in compare_metadata(run.context_of(connection), DESCRIBED)] == []
        texts = "SELECT attrelid::regclass::text, attname FROM pg_attribute WHERE attstorage = 'e' ORDER BY 1, 2"
        assert {tuple(row) for row in connection.exec_driver_sql(texts)} >= {
            ("journal_records", "body"),
            ("journal_records", "content"),
        }
        options = "SELECT reloptions FROM pg_class WHERE oid = 'journal_records'::regclass"
        assert connection.exec_driver_sql(options).scalar_one() == ["toast_tuple_target=8160"]
    engine.dispose()


def test_other_programs_tables_beside_ours_are_left_alone(url, postgres_server):
    with postgres_server.connect(url) as other:
        other.execute("CREATE TABLE alembic_version (version_num text)")
        other.execute("INSERT INTO alembic_version VALUES ('theirs')")
        assert migrations.ensure(url)
        assert other.execute("SELECT version_num FROM alembic_version").fetchall() == [("theirs",)]
    assert tables(url) == TABLES | {"alembic_version"}


def test_a_migration_that_fails_half_way_leaves_no_trace(url, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(postgres.command, "upgrade", _fails_late(postgres.command.upgrade))
        with pytest.raises(JournalError, match="cannot migrate"):
            migrations.upgrade(url)
    assert tables(url) == set()
    assert migrations.upgrade(url)


def _fails_late(upgrade):
    def upgrade_and_fail(config, revision):
        upgrade(config, revision)
        config.attributes["connection"].exec_driver_sql("INSERT INTO journal_records (stream_id) VALUES (1)")

    return upgrade_and_fail


def test_records_survive_an_upgrade_from_the_first_version(url, postgres_server):
    """Written as the first version's engine wrote them: no content, and none in the hash."""
    body = b'[{"type":"RequestAborted","handle":0,"cause":"old"}]'
    migrate_to(url, "0001")
    digest = chain_hash(GENESIS_HASH, 0, 1, 1, 7, body, b"")
    with postgres_server.connect(url) as old:
        old.execute("INSERT INTO journal_streams VALUES (1, 'main', 1, %s, 1)", [digest])
        old.execute("INSERT INTO journal_records VALUES (1, 0, 1, 1, 7, %s, %s)", [body.decode(), digest])
    with pytest.raises(JournalError, match="run `refold migrate"):
        SqlStore(url)
    assert migrations.ensure(url)
    store = SqlStore(url)
    head = store.append("main", make_records(store.open_stream(), 2))
    reader = open_reader(url)
    assert verify_stream(reader) == head
    assert next((record.position, record.schema_version) for record in reader.read()) == (0, 1)
    store.close()


def migrate_to(url, revision, step=postgres.command.upgrade):
    """Bring the tables to a revision, as the refold of its day left them."""
    engine = postgres_engine.create_engine(url, autocommit=False)
    with engine.connect() as connection, connection.begin():
        step(run.config_of(connection), revision)
    engine.dispose()


def tables_bound_to_their_stream(connection):
    sql = (
        "SELECT conrelid::regclass::text FROM pg_constraint WHERE contype = 'f' AND confrelid = %s::regclass ORDER BY 1"
    )
    return [table for (table,) in connection.execute(sql, ["journal_streams"])]


def test_the_key_of_the_records_goes_and_comes_back_with_all_of_them_in_place(url, postgres_server):
    migrate_to(url, "0005")
    with postgres_server.connect(url) as other:
        bound = tables_bound_to_their_stream(other)
        assert bound == ["journal_archives", "journal_records", "journal_snapshots"]
        assert migrations.ensure(url)
        assert tables_bound_to_their_stream(other) == ["journal_archives", "journal_snapshots"]
        store = SqlStore(url)
        head = store.append("main", make_records(store.open_stream(), 3))
        store.close()
        migrate_to(url, "0005", postgres.command.downgrade)
        assert (tables_bound_to_their_stream(other), migrations.current(url)) == (bound, "0005")
    assert migrations.ensure(url)
    store = SqlStore(url)
    assert verify_stream(store) == head
    assert store.append("main", make_records(store.open_stream(), 1)).position == 4
    store.close()


def test_records_without_a_stream_are_in_the_way_of_an_older_refold(url, postgres_server):
    migrations.ensure(url)
    with postgres_server.connect(url) as other:
        other.execute("INSERT INTO journal_records VALUES (7, 0, 1, 1, 7, '[]', '')")
    with pytest.raises(sa.exc.IntegrityError, match="fk_journal_records_stream_id"):
        migrate_to(url, "0005", postgres.command.downgrade)
    assert migrations.is_current(url)


def test_a_live_engines_journal_is_not_migrated_under_it(url, postgres_server):
    migrations.ensure(url)
    store = SqlStore(url)
    store.open_stream()
    with postgres_server.connect(url) as other:
        other.execute("UPDATE refold_schema SET version_num = '0001'")
        with pytest.raises(JournalOwned, match="needs a migration: stop that engine first"):
            migrations.upgrade(url)
        other.execute("UPDATE refold_schema SET version_num = %s", [run.head_revision()])
    store.close()


def test_four_that_migrate_at_once_all_succeed(url):
    answers = []
    threads = [threading.Thread(target=lambda: answers.append(migrations.ensure(url))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answers) == [False, False, False, True]
    assert migrations.is_current(url)


def test_a_revision_that_nobody_knows_is_an_error_with_a_remedy(url, postgres_server):
    migrations.ensure(url)
    with postgres_server.connect(url) as other:
        other.execute("UPDATE refold_schema SET version_num = 'abcd'")
    with pytest.raises(JournalError, match=r"'abcd', which no refold has .*restore it from a backup"):
        migrations.upgrade(url)


def test_the_command_takes_the_url(url):
    done = subprocess.run(
        [sys.executable, "-m", "refold.migrations", "upgrade", url], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "upgraded\n", "")


def test_a_table_of_another_program_under_a_views_name_is_told_with_the_remedy(url, postgres_server):
    with postgres_server.connect(url) as connection:
        connection.execute("CREATE TABLE requests (id integer)")
    with pytest.raises(JournalError, match=r"requests.*already exists.*schema of its own"):
        migrations.upgrade(url)
    assert tables(url) == {"requests"}
