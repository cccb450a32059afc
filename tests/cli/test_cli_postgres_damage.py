"""What a hand at the tables of a PostgreSQL journal can do to it: every verb says what is wrong, and none leads in a circle."""

import pytest

from refold.journal.testing import make_records
from tests.cli.command import assert_one_line_and_a_hint, refold

RUN = ("run", "--model", "simulated", "hello", "--journal")
VERBS = (("stat",), ("verify",), ("log",), ("migrate",), RUN)
CHANGED = {
    "journal_records.position": "text",
    "journal_records.time_ns": "numeric",
    "journal_records.body": "jsonb",
    "journal_records.hash": "text",
    "journal_streams.head_position": "text",
    "journal_streams.head_hash": "text",
    "journal_snapshots.position": "numeric",
}


@pytest.fixture
def journal(postgres_url: str) -> str:
    assert refold(*RUN, postgres_url).exit_code == 0
    return postgres_url


@pytest.mark.parametrize("column", CHANGED)
def test_a_column_of_another_type_is_damage(journal: str, postgres_server, column: str) -> None:
    table, _, name = column.partition(".")
    with postgres_server.connect(journal) as admin:
        admin.execute(f"ALTER TABLE {table} ALTER {name} TYPE {CHANGED[column]} USING {name}::text::{CHANGED[column]}")
    for verb in VERBS:
        result = refold(*verb, journal)
        assert result.exit_code == 3, (verb, result.stderr)
        assert f"its column {column} has the type {CHANGED[column]}, not " in result.stderr, verb
        assert_one_line_and_a_hint(result.stderr)


@pytest.mark.parametrize("table", ["journal_streams", "journal_snapshots", "journal_archives"])
def test_a_table_that_was_dropped_is_damage_and_no_migration_mends_it(
    journal: str, postgres_server, table: str
) -> None:
    with postgres_server.connect(journal) as admin:
        admin.execute(f"DROP TABLE {table} CASCADE")
    for verb in VERBS:
        result = refold(*verb, journal)
        assert result.exit_code == 3, (verb, result.stderr)
        assert f"its table {table} is gone" in result.stderr, verb
        assert "refold migrate" not in result.stderr, verb


def test_a_version_that_no_refold_has_is_said_to_be_one_by_every_verb(journal: str, postgres_server) -> None:
    with postgres_server.connect(journal) as admin:
        admin.execute("UPDATE refold_schema SET version_num = 'zzz'")
    for verb in VERBS:
        result = refold(*verb, journal)
        assert result.exit_code == 3, (verb, result.stderr)
        assert "its tables are said to be of version 'zzz', which no refold has" in result.stderr, verb
        assert "refold migrate" not in result.stderr, verb


def test_records_that_have_lost_their_stream_are_noticed_beside_another_stream(journal: str, postgres_server) -> None:
    from refold.journal.stores import open_store

    store = open_store(journal)
    store.append("other", make_records(store.open_stream("other"), 3))
    store.close()
    with postgres_server.connect(journal) as admin:
        admin.execute("DELETE FROM journal_streams WHERE name = 'other'")
    for verb in (("stat",), ("verify",), ("migrate",), ("compact",), ("audit", "integrity"), RUN):
        result = refold(*verb, journal)
        assert result.exit_code == 3, (verb, result.stderr)
        assert "it has records, and its table of streams has not the stream that they are of" in result.stderr, verb
