"""A snapshot of more records than there are proves that some were lost: told by all who look, and kept by the engine, which doesn't open."""

import contextlib
import json
import sqlite3
from pathlib import Path

import psycopg
import pytest

from refold.engine.engine import Engine
from refold.journal.ends import EndInDoubt
from refold.journal.stores import open_reader
from tests.cli.command import assert_one_line_and_a_hint, refold
from tests.journal.test_own_name import records

CUT = 5
"""So many records are taken off the end, with the head that is stored beside them set back."""


@pytest.fixture(params=["sqlite", "postgres"])
def journal(request, tmp_path):
    """A journal with a snapshot of all its records, and its last ones cut off by hand."""
    url = request.getfixturevalue("postgres_url") if request.param == "postgres" else str(tmp_path / "run.db")
    with Engine("simulated", url, snapshot_every_records=8).open() as engine:
        engine.run(["one", "two"])
    return url


@contextlib.contextmanager
def connected(journal):
    """A connection to its tables, as a function that executes one statement and returns its rows."""
    is_server = journal.startswith("postgresql")
    with (
        contextlib.closing(psycopg.connect(journal) if is_server else sqlite3.connect(journal)) as connection,
        connection,
    ):

        def execute(sql, *values):
            cursor = connection.execute(sql.replace("?", "%s") if is_server else sql, values)
            return cursor.fetchall() if cursor.description else []

        yield execute


def cut_off(journal):
    """Take the last records away, as somebody might who has the tables; how many are left."""
    with connected(journal) as execute:
        [(position, digest, epoch)] = execute(
            "SELECT position, hash, engine_epoch FROM journal_records ORDER BY position DESC LIMIT 1 OFFSET ?", CUT
        )
        execute("DELETE FROM journal_records WHERE position > ?", position)
        execute(
            "UPDATE journal_streams SET head_position = ?, head_hash = ?, engine_epoch = ?", position + 1, digest, epoch
        )
    if not journal.startswith("postgresql"):
        Path(f"{journal}.mark").unlink()
    return position + 1


def snapshots(journal):
    with contextlib.closing(open_reader(journal)) as reader:
        return [entry.position for entry in reader.snapshots()]


def test_an_engine_does_not_open_and_the_witness_stays(journal):
    had = len(records(journal, "main"))
    left = cut_off(journal)
    assert left == had - CUT
    for _ in range(2):
        with pytest.raises(EndInDoubt, match=f"ends at {left}, but a snapshot was made of {had} records") as refused:
            Engine("simulated", journal).open()
        assert (refused.value.num_known, refused.value.told_by, refused.value.kind) == (had, "snapshot", "truncated")
    assert snapshots(journal)[-1] == had
    assert len(records(journal, "main")) == left


def test_a_redaction_does_not_write_to_it_and_forget_the_witness(journal):
    left = cut_off(journal)
    told = refold("redact", journal, "run1-1")
    assert told.exit_code == 3
    assert f"ends at {left}, but a snapshot was made of" in told.stderr
    assert len(records(journal, "main")) == left
    assert refold("verify", journal).exit_code == 3


def test_verify_names_the_first_record_that_is_gone_and_the_head(journal):
    had = records(journal, "main")
    left = cut_off(journal)
    told = refold("verify", journal)
    assert told.exit_code == 3
    assert_one_line_and_a_hint(told.stderr)
    assert f"truncated at record {left}" in told.stderr
    assert f"{len(had)}:{had[-1].hash.hex()}" in told.stderr
    [row] = map(json.loads, refold("verify", "--json", journal).stdout.splitlines())
    assert (row["ok"], row["kind"], row["position"]) == (False, "truncated", left)


def test_what_is_left_is_copied_by_whoever_accepts_the_loss_and_goes_on(journal, tmp_path):
    had = len(records(journal, "main"))
    left = cut_off(journal)
    new = str(tmp_path / "new.db")
    assert refold("copy", journal, new).exit_code == 3
    told = refold("copy", "--accept-end", "--json", journal, new)
    assert told.exit_code == 0, told.stderr
    [row] = map(json.loads, told.stdout.splitlines())
    assert (row["num_lost"], row["lost_told_by"]) == (had - left, "snapshot")
    assert refold("verify", new).exit_code == 0
    with Engine("simulated", new).open() as engine:
        engine.run(["three"])


def test_a_snapshot_whose_bytes_were_changed_proves_nothing(journal):
    with connected(journal) as execute:
        execute("UPDATE journal_snapshots SET position = position + 100")
    assert refold("verify", journal).exit_code == 0
    with Engine("simulated", journal).open() as engine:
        engine.run(["three"])
