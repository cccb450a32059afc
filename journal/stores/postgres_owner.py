"""One live writer per stream: an advisory lock of the writer's session, so it ends when the session does.

The lock turns "two engines fight" into an error at open; the engine epoch stays the real fence. So a writer whose connection
was cut goes on without the lock if it can't have it back at once: perhaps the server still waits for the dead session, and
perhaps another engine is just opening the stream, whose epoch will then fence us. It tries again when it has time.

Whoever finds the stream owned is told by whom, and how to free it if that engine is gone: a host that died without a word
keeps its lock until the server has given its connection up, which the probes of `postgres_engine` bound.
"""

from typing import Any

import sqlalchemy as sa

from refold.journal.errors import JournalOwned
from refold.journal.stores.patience import Patience

_PATIENCE_S = 1.0  # a session whose process was killed is gone once the server notices: at once, if it isn't busy

# The lock's two keys are the table's oid, unique in the database and told apart by schema, and the stream.
_KEYS = "'journal_records'::regclass::oid::bigint::bit(32)::int"
_TRY = f"SELECT pg_try_advisory_lock({_KEYS}, %s)"
_HOLDERS = """
SELECT l.objid, a.pid, a.application_name, a.client_addr::text
FROM pg_catalog.pg_locks AS l LEFT JOIN pg_catalog.pg_stat_activity AS a USING (pid)
WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 2 AND l.classid = to_regclass('journal_records')::oid
    AND l.database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = current_database())
"""


def try_lock(connection: sa.Connection, stream_id: int) -> bool:
    """Take the stream's lock for this session, if nobody has it. Only once per session: the server counts."""
    return bool(connection.exec_driver_sql(_TRY, (stream_id,)).scalar())


def lock(connection: sa.Connection, stream_id: int, stream: str, name: str) -> None:
    """Take the stream's lock for this session.

    Raises:
        JournalOwned: a live session has it.
    """
    patience = Patience(_PATIENCE_S)
    while not try_lock(connection, stream_id):
        if not patience.wait():
            raise JournalOwned(_refusal(connection, stream_id, stream, name))


def unlock_all(connection: sa.Connection) -> None:
    """Let the next writer in, now; closing a session takes the server a moment."""
    connection.exec_driver_sql("SELECT pg_advisory_unlock_all()")


def owners(connection: sa.Connection) -> list[tuple[int, int]]:
    """The stream and the process id of every live owner; the process is 0 where it isn't known."""
    return [(row[0], _process_of(row[2])) for row in connection.exec_driver_sql(_HOLDERS)]


def _refusal(connection: sa.Connection, stream_id: int, stream: str, name: str) -> str:
    for row in connection.exec_driver_sql(_HOLDERS):
        if row[0] == stream_id:
            return (
                f"stream {stream!r} of {name} is written by {_say(row)}: stop that engine, or use another stream; if it is "
                f"gone, `SELECT pg_terminate_backend({row[1]})` frees it"
            )
    return f"stream {stream!r} of {name} was taken by another engine just now: stop that engine, or use another stream"


def _say(row: Any) -> str:
    _, session, application, address = row
    process = _process_of(application)
    who = f"process {process} on {application.split()[2]}" if process else f"a session called {application or '?'!r}"
    return f"{who} (server session {session}{f', from {address}' if address else ''})"


def _process_of(application: str | None) -> int:
    words = (application or "").split()
    return int(words[1]) if len(words) == 3 and words[0] == "refold" and words[1].isdigit() else 0
