"""What a hand at the tables of a PostgreSQL journal can do to it: every verb says what is wrong, and none leads in a circle."""

import pytest

from refold.journal.testing import make_records
from tests.cli.command import assert_one_line_and_a_hint, refold

RUN = ("run", "--model", "simulated", "hello", "--journal")
VERBS = (("stat",), ("verify",), ("log",), ("migrate",), RUN)
COLUMNS = "engine_epoch, schema_version, time_ns, body, hash, content, content_hash"
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


@pytest.mark.parametrize("table", ["journal_streams", "journal_records"])
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


# What a hand did to what no record is in, and what is said of it, and the kind.
BESIDE = {
    "DROP TABLE journal_snapshots": ("its table journal_snapshots is gone", "unindexed"),
    "DROP TABLE journal_archives": ("its table journal_archives is gone", "unindexed"),
    "DROP TABLE refold_schema": ("its table refold_schema is gone", "unindexed"),
    "DELETE FROM refold_schema": ("its table refold_schema is gone, or empty", "unindexed"),
    "UPDATE journal_streams SET engine_epoch = 0": (
        "engine epoch 0, and its last record was written in 1",
        "unindexed",
    ),
    f"UPDATE journal_streams SET engine_epoch = {2**63 - 1}": (
        f"engine epoch {2**63 - 1}, which no engine has reached",
        "unindexed",
    ),
    f"INSERT INTO journal_records SELECT stream_id, -5, {COLUMNS} FROM journal_records WHERE position = 3": (
        "stream 'main' has rows before position 0, the first at -5",
        "inserted",
    ),
    f"INSERT INTO journal_records SELECT 77, 12, {COLUMNS} FROM journal_records WHERE position = 3": (
        "rows of stream number 77, at positions 12 to 12, are there, and no stream has that number",
        "inserted",
    ),
}


@pytest.mark.parametrize("statement", BESIDE)
def test_what_no_record_is_in_is_told_and_records_are_read_and_copied(
    journal: str, postgres_server, tmp_path, statement: str
) -> None:
    words, kind = BESIDE[statement]
    with postgres_server.connect(journal) as admin:
        admin.execute(statement)
    for verb in (("verify",), RUN, ("migrate",)):
        result = refold(*verb, journal)
        assert result.exit_code == 3, (verb, result.stderr)
        assert words in result.stderr, verb
        assert "makes a " in result.stderr.splitlines()[1], "the hint has the way out"
        assert_one_line_and_a_hint(result.stderr)
    assert refold("verify", journal).stderr.startswith(f"refold: {kind} at record ")
    for verb in (("log", "-n", "1"), ("request", "run1-1"), ("copy",)):
        result = refold(*verb, journal, *[tmp_path / "new.db"][: verb[0] == "copy"])
        assert result.exit_code == 0, (verb, result.stderr)
        assert words in result.stderr, verb
    for verb in (("verify",), RUN):
        assert refold(*verb, tmp_path / "new.db").exit_code == 0


def test_a_row_that_names_another_record_than_is_there_is_told_by_verify_and_by_an_engine(
    journal: str, postgres_server, tmp_path
) -> None:
    """The row lags behind by design, so one that is behind is no damage; one with a hash that no record has is."""
    with postgres_server.connect(journal) as admin:
        admin.execute("UPDATE journal_streams SET head_position = 100")
    for verb in (("verify",), RUN):
        result = refold(*verb, journal)
        assert result.exit_code == 3, (verb, result.stderr)
        assert "100" in result.stderr
    assert refold("copy", journal, tmp_path / "refused.db").exit_code == 3
    assert refold("copy", "--accept-end", journal, tmp_path / "new.db").exit_code == 0
    assert "99 records" in refold("verify", tmp_path / "new.db").stdout
    with postgres_server.connect(journal) as admin:
        admin.execute("UPDATE journal_streams SET head_hash = (SELECT hash FROM journal_records WHERE position = 99)")
    for verb in (("verify",), RUN):
        assert refold(*verb, journal).exit_code == 0, verb


def test_tables_of_another_program_are_said_to_be_no_journals_of_this_version(journal: str, postgres_server) -> None:
    with postgres_server.connect(journal) as admin:
        admin.execute("DROP TABLE refold_schema")
        admin.execute("ALTER TABLE journal_records DROP COLUMN body CASCADE")
    for verb in VERBS:
        result = refold(*verb, journal)
        assert result.exit_code == 3, (verb, result.stderr)
        assert "no refold_schema that says of which version" in result.stderr, verb


def test_a_version_that_no_refold_has_is_said_to_be_one_by_every_verb(journal: str, postgres_server) -> None:
    with postgres_server.connect(journal) as admin:
        admin.execute("UPDATE refold_schema SET version_num = 'zzz'")
    for verb in VERBS:
        result = refold(*verb, journal)
        assert result.exit_code == 3, (verb, result.stderr)
        assert "its tables are said to be of version 'zzz', which no refold has" in result.stderr, verb
        assert "refold migrate" not in result.stderr, verb


def test_records_that_have_lost_their_stream_are_noticed_beside_another_stream(
    journal: str, postgres_server, tmp_path
) -> None:
    from refold.journal.stores import open_store

    store = open_store(journal)
    store.append("other", make_records(store.open_stream("other"), 3))
    store.close()
    with postgres_server.connect(journal) as admin:
        admin.execute("DELETE FROM journal_streams WHERE name = 'other'")
    for verb in (("stat",), ("verify",), ("migrate",), ("compact",), ("audit", "integrity"), RUN):
        result = refold(*verb, journal)
        assert result.exit_code == 3, (verb, result.stderr)
        assert "at positions 0 to 2, are there, and the row that names the stream is gone" in result.stderr, verb
    assert refold("copy", "--stream", "main", journal, tmp_path / "main.db").exit_code == 0
    with postgres_server.connect(journal) as admin:
        admin.execute("UPDATE journal_streams SET name = 'third' WHERE name = 'main'")
    assert refold("copy", "--stream", "third", journal, tmp_path / "third.db").exit_code == 0
