"""Exactly once: a projector killed at any statement, overtaken, or resumed at any batch leaves the rows of one that never was."""

import os
import shutil
import signal
import sqlite3
from itertools import pairwise

import pytest

from refold.journal.errors import JournalError
from refold.journal.stores import open_reader
from refold.projections.audit.schema import FACTS
from refold.projections.audit.story import pack, unpack
from refold.projections.audit.trailing import TrailingProjection
from tests.kit.audited import contents, path_url, project, sealed, simulated, write, writer_of

TABLES = [table.name for table in FACTS]
RECORDS = sealed(simulated(13))[:60]


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    url = write(str(tmp_path_factory.mktemp("whole") / "journal.db"), RECORDS)
    project(url, max_rows=10_000)
    return contents(url, TABLES)


def killed_at(url: str, statement: int, max_rows: int) -> bool:
    """Project in a process of its own that is killed when it begins this statement; whether it was (or came to its end)."""
    child = os.fork()
    if child == 0:
        try:
            _project_until(url, statement, max_rows)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def _project_until(url: str, statement: int, max_rows: int) -> None:
    writer, reader, left = writer_of(url), open_reader(url), [statement]

    def count(*_ignored: object) -> None:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    if url.startswith("postgresql"):
        for name in ("execute", "execute_many", "insert_new"):
            setattr(writer, name, _counted(getattr(writer, name), count))
    else:
        writer._connection.set_trace_callback(count)
    for _ in TrailingProjection(reader, writer, "main", max_rows=max_rows).catch_up():
        pass


def _counted(method, count):
    def counted(*arguments, **options):
        count()
        result = method(*arguments, **options)
        count()
        return result

    return counted


def statements_of(url: str, max_rows: int) -> list[str]:
    """What a whole run says to SQLite, a statement for each row."""
    seen: list[str] = []
    writer, reader = writer_of(url), open_reader(url)
    writer._connection.set_trace_callback(seen.append)
    for _ in TrailingProjection(reader, writer, "main", max_rows=max_rows).catch_up():
        pass
    writer.close()
    reader.close()
    return seen


def test_killed_at_every_statement_nothing_is_doubled_or_missed(tmp_path):
    records = RECORDS[:18]
    whole, template = (write(path_url(tmp_path, name), records) for name in ("whole.db", "template.db"))
    seen = statements_of(whole, 12)
    assert seen.count("COMMIT") >= 3
    expected = contents(whole, TABLES)
    for statement in range(1, len(seen) + 1):  # every one of them
        url = path_url(tmp_path, "journal.db")
        shutil.copy(template, url)
        assert killed_at(url, statement, 12), statement
        project(url, max_rows=12)
        assert contents(url, TABLES) == expected, f"killed at statement {statement}, {seen[statement - 1]}"
        for left in tmp_path.glob("journal.db*"):
            left.unlink()


def test_killed_again_and_again_until_it_is_through(tmp_path, expected):
    seen = statements_of(write(path_url(tmp_path, "whole.db"), RECORDS), 25)
    commits = [0, *(number for number, sql in enumerate(seen, 1) if sql == "COMMIT")]
    longest = max(later - earlier for earlier, later in pairwise(commits))
    url, deaths = write(path_url(tmp_path), RECORDS), 0
    while killed_at(url, longest + 8, 25):
        deaths += 1
    assert deaths >= 3
    assert contents(url, TABLES) == expected


def test_killed_on_postgresql_at_every_call(postgres_server, expected):
    url, statement = write(postgres_server.empty(), RECORDS), 1
    while killed_at(url, statement, 60):
        statement += 1
    assert statement > 20
    assert contents(url, TABLES) == expected


@pytest.mark.parametrize("max_rows", [1, 7, 50, 10_000])
def test_the_size_of_batches_makes_no_difference(max_rows, tmp_path, expected):
    url = write(path_url(tmp_path), RECORDS)
    project(url, max_rows=max_rows)
    assert contents(url, TABLES) == expected


def test_one_that_is_opened_anew_for_every_record_makes_the_same_rows(tmp_path, expected):
    url = write(path_url(tmp_path), RECORDS)
    for stop in range(1, len(RECORDS) + 1):
        project(url, stop=stop)
    assert contents(url, TABLES) == expected


def test_a_saved_story_goes_on_as_the_one_that_was_not_saved(tmp_path, expected, monkeypatch):
    monkeypatch.setattr("refold.projections.audit.trailing._SAVE_EVERY_RECORDS", 3)
    url = write(path_url(tmp_path), RECORDS)
    for stop in range(1, len(RECORDS) + 1):
        project(url, stop=stop, max_rows=5)
    assert contents(url, TABLES) == expected
    connection = sqlite3.connect(url)
    ((position, body),) = connection.execute("SELECT state_position, state FROM audit_projections").fetchall()
    connection.close()
    assert position > len(RECORDS) - 6
    assert pack(unpack(body)) == pack(unpack(pack(unpack(body))))


@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_two_that_take_turns_do_not_tread_on_each_other(database, tmp_path, postgres_server, expected):
    url = write(path_url(tmp_path) if database == "sqlite" else postgres_server.empty(), RECORDS)
    writers, reader = [writer_of(url), writer_of(url)], open_reader(url)
    both = [TrailingProjection(reader, writer, "main", max_rows=9) for writer in writers]
    for stop in range(0, len(RECORDS) + 5, 4):
        for projection in both if stop % 8 else reversed(both):
            for _ in projection.catch_up(min(stop, len(RECORDS))):
                break  # leave after one batch
    for projection in both:
        for _ in projection.catch_up():
            pass
    for writer in writers:
        writer.close()
    reader.close()
    assert contents(url, TABLES) == expected


def test_a_batch_names_the_checkpoint_that_it_continues(tmp_path):
    url = write(path_url(tmp_path), RECORDS)
    project(url, stop=10)
    writer = writer_of(url)
    live = writer.live("main")
    assert live is not None
    assert not writer.commit(live._replace(position=9), live._replace(position=11), [])
    assert writer.live("main") == live
    writer.close()


def test_sqlalchemy_is_not_needed_for_sqlite():
    import subprocess
    import sys

    code = "import sys, refold.projections.audit.sqlite_writer, refold.projections.audit.trailing; print('sqlalchemy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize("late", [False, True])
def test_an_error_in_a_batch_costs_nothing_but_the_batch(late, tmp_path, expected):
    """Of a commit that failed, and of one that failed only to say that it hadn't."""
    url = write(path_url(tmp_path), RECORDS)
    writer, reader = writer_of(url), open_reader(url)
    commit, calls = writer.commit, []

    def failing(*arguments):
        calls.append(1)
        if len(calls) % 3:
            return commit(*arguments)
        if late:
            commit(*arguments)
        raise JournalError("the disk is full; free some")

    writer.commit = failing
    trailing, failures = TrailingProjection(reader, writer, "main", max_rows=9), 0
    while True:
        try:
            for _ in trailing.catch_up():
                pass
        except JournalError:
            failures += 1
        else:
            break
    writer.close()
    reader.close()
    assert failures >= 3
    assert contents(url, TABLES) == expected
