"""Predicates in SQL, in Python, and as laws."""

import pytest

from refold.engine.history.example import example_state
from refold.engine.history.predicates import law_predicate, python_predicate, sql_predicate
from refold.journal.errors import Rejected
from refold.scheduler.state import State


@pytest.mark.parametrize(
    ("sql", "holds"),
    [
        ("select 1", True),
        ("select 0", False),
        ("select num_in_flight_tokens = 1 from requests where request_id = 'r'", True),
        ("select count(*) > 1 from requests", False),
        ("select num_requests = 1 and num_tokens = 1 from window where step = 0", True),
        ("select num_owned_blocks = 1 and num_blocks = 2 from pool", True),
        ("select is_open and num_running = 1 from engine", True),
        ("select 1 from requests where request_id = 'nobody'", False),
        ("with r as (select * from requests) select count(*) from r", True),
    ],
)
def test_sql_sees_the_state(sql, holds):
    assert bool(sql_predicate(sql).holds(example_state())) is holds


def test_sql_on_nothing_at_all():
    assert not sql_predicate("select count(*) from requests").holds(State())


@pytest.mark.parametrize(
    "sql",
    [
        "delete from requests",
        "insert into pool values (1)",
        "attach database '/tmp/x.db' as x",
        "create table t (x)",
        "pragma journal_mode = wal",
        "select 1; select 2",
        "select load_extension('x')",
        "select * from sqlite_master where writefile('x', 'y')",
        "vacuum into '/tmp/refold-out.db'",
        "",
        "select",
        "select x from requests",
        "select 1 \0",
    ],
)
def test_sql_that_writes_or_is_none_is_refused(sql):
    with pytest.raises(Rejected, match="SQL predicate"):
        sql_predicate(sql)


def test_python_sees_the_state():
    state = example_state()
    assert python_predicate("len(running) == 1 and pool.num_free == 1").holds(state)
    assert python_predicate("state.window.in_flight[0].step == 0").holds(state)
    assert not python_predicate("any(r.num_preemptions for r in requests)").holds(state)


@pytest.mark.parametrize("text", ["", "1 +", "import os", "\0", "x" * 5 + "(" * 300])
def test_python_that_is_no_expression_is_refused(text):
    with pytest.raises(Rejected, match="no Python expression"):
        python_predicate(text)


def test_python_that_fails_says_how():
    with pytest.raises(Rejected, match="fails: NameError"):
        python_predicate("nothing_like_that").holds(example_state())


def test_a_function_in_a_file(tmp_path):
    file = tmp_path / "checks.py"
    file.write_text("def busy(state):\n    return bool(state.queues.running)\n")
    assert python_predicate(f"{file}:busy").holds(example_state())
    with pytest.raises(Rejected, match="no function 'idle'"):
        python_predicate(f"{file}:idle")
    with pytest.raises(Rejected, match="can't be used"):
        python_predicate(f"{tmp_path / 'none.py'}:busy")


def test_a_law_holds_where_it_is_broken():
    state = example_state()
    assert not law_predicate("L2").holds(state)
    state.queues.running[0].num_prompt_tokens_in_flight += 1
    assert law_predicate("L2").holds(state)
    assert not law_predicate("L3").holds(state)


@pytest.mark.parametrize("law", ["L1", "L12", "L99", "x"])
def test_a_law_that_no_state_can_tell_is_refused(law):
    with pytest.raises(Rejected, match="laws of a state are"):
        law_predicate(law)
