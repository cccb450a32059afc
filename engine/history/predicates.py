"""Predicates over the state: in SQL, in Python, or a law.

SQL runs on an SQLite database in memory that holds the state as tables; a query is true if its first row's first column is.

    requests   one row a live request: request_id, handle, status, epoch, num_computed_tokens, num_blocks, ...
    window     one row a step in flight: step, num_requests, num_tokens, num_stale
    pool       one row: num_blocks, num_blank_blocks, num_cached_blocks, num_owned_blocks, ...
    engine     one row: engine_epoch, is_open, paused, worker_generation, worker_alive, num_running, num_waiting, next_step

Python is an expression with `state`, `requests` (a list), `running`, `waiting`, `pool` and `window`, or a function of the state in a
file, `FILE.py:NAME`. It is the caller's own code, and runs as such; SQL can only read.
"""

import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from refold.engine.history.portrait import pool_portrait, request_portrait
from refold.journal.errors import InvariantViolation, Rejected
from refold.projections.requests import Request
from refold.scheduler.laws import LAWS, check_state
from refold.scheduler.state import State

Predicate = Callable[[State], object]
STATE_LAWS = ("L2", "L3", "L4", "L6", "L7", "L8", "L9", "L10", "L13")
_PATIENCE_OPCODES = 200_000
_MAX_VALUE_BYTES = 16 << 20
_ALLOWED = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}


class Named(NamedTuple):
    """A predicate, and how its author wrote it."""

    text: str
    holds: Predicate


def python_predicate(text: str) -> Named:
    """A predicate from Python: an expression, or `FILE.py:NAME`.

    Raises:
        Rejected: it can't be compiled, or there is no such function.
    """
    path, _, name = text.rpartition(":")
    if path.endswith(".py") and name.isidentifier():
        return Named(text, _function(path, name))
    try:
        code = compile(text, "<predicate>", "eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise Rejected(f"predicate {text[:80]!r} is no Python expression: {error}") from error

    def holds(state: State) -> object:
        scope = {
            "state": state,
            "requests": state.requests.live(),
            "running": state.queues.running,
            "waiting": state.queues.waiting,
            "pool": state.pool,
            "window": state.window.in_flight,
        }
        return _asked(text, lambda: eval(code, scope))  # noqa: S307 - the caller's own expression, from the command line

    return Named(text, holds)


def _function(path: str, name: str) -> Predicate:
    try:
        source = Path(path).read_text(encoding="utf-8")
        scope: dict[str, Any] = {"__name__": "predicate", "__file__": path}
        exec(compile(source, path, "exec"), scope)  # noqa: S102 - the caller's own file, named on the command line
    except (OSError, SyntaxError, ValueError) as error:
        raise Rejected(f"{path} can't be used for predicates: {error}") from error
    found = scope.get(name)
    if not callable(found):
        raise Rejected(f"{path} has no function {name!r}")
    return lambda state: _asked(f"{path}:{name}", lambda: found(state))


def _asked(text: str, ask: Callable[[], object]) -> object:
    try:
        return ask()
    except Exception as error:
        raise Rejected(f"predicate {text[:80]!r} fails: {type(error).__name__}: {error}") from error


def sql_predicate(text: str) -> Named:
    """A predicate from a SELECT.

    Raises:
        Rejected: it isn't one statement that only reads, or doesn't fit the tables.
    """
    tables = _Tables()
    tables.ask(text, State())
    return Named(text, lambda state: tables.ask(text, state))


def law_predicate(law: str) -> Named:
    """True where a law of the state is broken.

    Raises:
        Rejected: there is no such law, or it needs the whole history (`refold verify` looks at those).
    """
    if law not in STATE_LAWS:
        known = f"the laws of a state are {', '.join(STATE_LAWS)}"
        why = "needs the whole history: `refold verify` judges it" if law in (*LAWS, "L12") else "is no law"
        raise Rejected(f"{law[:20]!r} {why}; {known}")

    def holds(state: State) -> bool:
        try:
            check_state(state)
        except InvariantViolation as error:
            return str(error).startswith(f"{law} ")
        return False

    return Named(law, holds)


class _Tables:
    """The state in an SQLite database that can only be read by whoever asks."""

    def __init__(self) -> None:
        self._db = sqlite3.connect(":memory:", isolation_level=None)
        self._db.execute("PRAGMA trusted_schema = OFF")
        self._db.set_progress_handler(lambda: 0, _PATIENCE_OPCODES)  # lets Ctrl-C in during a query without end
        self._db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_VALUE_BYTES)
        self._columns = {name: list(rows[0]) for name, rows in _rows(_example()).items()}
        for name, columns in self._columns.items():
            self._db.execute(f"CREATE TABLE {name} ({', '.join(columns)})")
        self._insert = {
            name: f"INSERT INTO {name} VALUES ({', '.join('?' * len(columns))})"  # noqa: S608 - our own names
            for name, columns in self._columns.items()
        }

    def ask(self, sql: str, state: State) -> bool:
        """Whether the query's first row's first column is true."""
        self._fill(state)
        self._db.set_authorizer(_only_reads)
        try:
            cursor = self._db.execute(sql)
            row = cursor.fetchone()
        except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
            if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_INTERRUPT:
                raise KeyboardInterrupt from error
            raise Rejected(
                f"SQL predicate {sql[:80]!r}: {error}; one SELECT over requests, window, pool, engine"
            ) from error
        finally:
            self._db.set_authorizer(None)
        if cursor.description is None:
            raise Rejected(f"SQL predicate {sql[:80]!r} asks nothing: give one SELECT")
        return row is not None and bool(row[0])

    def _fill(self, state: State) -> None:
        self._db.execute("BEGIN")
        for name, rows in _rows(state).items():
            self._db.execute(f"DELETE FROM {name}")  # noqa: S608 - our own names
            self._db.executemany(self._insert[name], [list(row.values()) for row in rows])
        self._db.execute("COMMIT")


def _only_reads(action: int, *_: object) -> int:
    return sqlite3.SQLITE_OK if action in _ALLOWED else sqlite3.SQLITE_DENY


def _rows(state: State) -> dict[str, list[dict[str, Any]]]:
    queues = state.queues
    return {
        "requests": [_request_row(request) for request in state.requests.by_handle.values()],
        "window": [
            {
                "step": step.step,
                "num_requests": len(step.handles),
                "num_tokens": sum(step.num_tokens),
                "num_stale": len(step.stale),
            }
            for step in state.window.in_flight
        ],
        "pool": [pool_portrait(state)],
        "engine": [
            {
                "engine_epoch": state.engine_epoch,
                "is_open": state.is_open,
                "paused": state.paused,
                "worker_generation": state.worker_generation,
                "worker_alive": state.worker_alive,
                "num_running": len(queues.running),
                "num_waiting": len(queues.waiting),
                "next_step": state.window.next_step,
            }
        ],
    }


def _request_row(request: Request) -> dict[str, Any]:
    row = request_portrait(request)
    del row["block_ids"]
    return row


def _example() -> State:
    """A state with one of everything, for the names of the columns."""
    from refold.engine.history.example import example_state  # noqa: PLC0415 - only for the names

    return example_state()


def all_true(predicates: Sequence[Named], state: State) -> Named | None:
    """The first predicate that doesn't hold; None if they all do."""
    return next((each for each in predicates if not each.holds(state)), None)
