"""A stream's name is in its records: names that were changed or swapped, by hand or by a backup in the wrong place, are noticed."""

import sqlite3
from pathlib import Path

import psycopg
import pytest

from refold.engine.engine import Engine
from refold.engine.history.verify import verify_journal
from refold.engine.redacting import redact_at_rest
from refold.journal.codec import decode
from refold.journal.errors import JournalCorrupt
from refold.journal.events import EngineOpened
from refold.journal.stores import open_reader
from tests.cli.command import refold
from tests.history.journals import long_life, write_journal

STORES = ("sqlite", "segments", "postgres")


@pytest.fixture(params=STORES)
def journal(request, tmp_path):
    """Two streams that engines wrote, one of them in two lives."""
    kind = request.param
    url = (
        request.getfixturevalue("postgres_url")
        if kind == "postgres"
        else str(tmp_path / f"two{'.db' if kind == 'sqlite' else '/'}")
    )
    for stream, num_lives in (("main", 2), ("other", 1)):
        for life in range(num_lives):
            run(url, stream, f"{stream}-{life}")
    return url


def run(url, stream, request_id):
    with Engine("simulated", url, stream=stream).open() as engine:
        engine.run([request_id], request_ids=[f"{request_id}-id"])


def rename(journal, names):
    """Give each of these streams, all at once, another name."""
    for step in ({old: f"{new}.tmp" for old, new in names.items()}, {f"{new}.tmp": new for new in names.values()}):
        for old, new in step.items():
            if journal.startswith("postgresql"):
                with psycopg.connect(journal) as connection:
                    connection.execute("UPDATE journal_streams SET name = %s WHERE name = %s", (new, old))
            elif Path(journal).is_dir():
                (Path(journal) / old).rename(Path(journal) / new)
            else:
                with sqlite3.connect(journal) as connection:
                    connection.execute("UPDATE journal_streams SET name = ? WHERE name = ?", (new, old))


def records(journal, stream):
    reader = open_reader(journal)
    try:
        return list(reader.read(stream))
    finally:
        reader.close()


def verified(journal, stream):
    reader = open_reader(journal)
    try:
        return verify_journal(reader, stream)
    finally:
        reader.close()


def test_each_life_tells_the_stream_that_it_was_written_to(journal):
    for stream, num_lives in (("main", 2), ("other", 1)):
        opened = [
            event for record in records(journal, stream) for event in decode(record) if isinstance(event, EngineOpened)
        ]
        assert [event.stream for event in opened] == [stream] * num_lives
        verified(journal, stream)


def test_swapped_names_are_noticed_by_whoever_verifies_and_by_an_engine_which_writes_nothing(journal):
    rename(journal, {"main": "other", "other": "main"})
    kept = {stream: records(journal, stream) for stream in ("main", "other")}
    for stream, writer in (("main", "other"), ("other", "main")):
        with pytest.raises(
            JournalCorrupt, match=f"was written to stream '{writer}', and is kept as one of '{stream}'"
        ) as refused:
            verified(journal, stream)
        assert (refused.value.kind, refused.value.position) == ("renamed", 0)
        with pytest.raises(JournalCorrupt, match="renamed"):
            run(journal, stream, "late")
    assert kept == {stream: records(journal, stream) for stream in ("main", "other")}


def test_nothing_is_redacted_in_a_stream_under_anothers_name(journal):
    rename(journal, {"main": "other", "other": "main"})
    kept = records(journal, "other")
    with pytest.raises(JournalCorrupt, match="renamed"):
        redact_at_rest(journal, "main-0-id", stream="other")
    assert kept == records(journal, "other")


def test_a_stream_under_another_name_is_noticed_by_the_engine_that_would_begin_it_anew(journal):
    rename(journal, {"main": "mian"})
    with pytest.raises(JournalCorrupt, match="the records of stream 'mian' were written to it") as refused:
        run(journal, "main", "late")
    assert refused.value.kind == "renamed"
    with pytest.raises(JournalCorrupt, match="was written to stream 'main', and is kept as one of 'mian'"):
        verified(journal, "mian")
    told = refold("verify", journal)
    assert (told.exit_code, "renamed at record 0 of stream 'mian'" in told.stderr) == (3, True)
    rename(journal, {"mian": "main"})
    run(journal, "main", "late")
    verified(journal, "main")


def test_another_stream_may_begin_beside_those_that_have_their_names(journal):
    run(journal, "third", "early")
    verified(journal, "third")


def test_a_stream_whose_records_tell_no_name_goes_by_any(tmp_path):
    url = str(tmp_path / "old.db")
    write_journal(url, long_life(3), stream="other")
    rename(url, {"other": "main"})
    verified(url, "main")
    run(url, "main", "late")
    rename(url, {"main": "other"})
    with pytest.raises(JournalCorrupt, match="renamed"):
        verified(url, "other")


def test_verify_names_the_stream_and_says_that_nothing_is_lost(journal):
    rename(journal, {"main": "other", "other": "main"})
    told = refold("verify", journal)
    assert told.exit_code == 3
    assert told.stderr.startswith("refold: renamed at record 0: ")
    assert "hint: nothing is lost, and nothing is written until the names are right" in told.stderr
    assert refold("run", "--model", "simulated", "--journal", journal, "one").exit_code == 3


def test_a_renamed_stream_beside_the_one_that_is_verified_is_named(tmp_path):
    url = str(tmp_path / "three.db")
    for stream in ("main", "a", "b"):
        run(url, stream, "one")
    rename(url, {"a": "b", "b": "a"})
    told = refold("verify", url)
    assert told.exit_code == 3
    assert "renamed at record 0 of stream 'a'" in told.stderr
