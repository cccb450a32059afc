"""A SQLAlchemy engine for PostgreSQL as the journal needs it, and what the server's errors mean.

Every statement is its own transaction (autocommit); the few that belong together say so. Sessions are set up in one round
trip, by name, so that a server that doesn't know a setting is no obstacle:
- a lock is waited for with a bound, unless the database or the URL has one already;
- a commit has reached the disk when it returns, even where the database's default is `synchronous_commit=off`;
- the isolation is `read committed`: after waiting for somebody, a statement sees what he has done;
- the writer's session is never ended for being idle: it holds the right to write;
- both ends probe a silent connection, so a host that has lost its power has lost its journal within a minute or so.
"""

import os
import shlex
import socket
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from refold.journal.errors import JournalCorrupt, JournalError, NotFound, SchemaTooNew
from refold.journal.stores.database import Fate
from refold.journal.stores.location import NoStore, shown
from refold.journal.stores.postgres_columns import require_columns
from refold.journal.stores.sqlite_file import TABLE_VERSION, rebuilding
from refold.journal.stores.tables import VERSION_TABLE

_CONNECT_ARGS = {
    "client_encoding": "utf8",
    "connect_timeout": "10",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "30000",
}
_SESSION = {
    "default_transaction_isolation": "read committed",
    "idle_session_timeout": "0",
    "enable_seqscan": "off",  # every query of ours has a key; a plan made for an empty table must not say otherwise
    "tcp_keepalives_idle": "30",
    "tcp_keepalives_interval": "10",
    "tcp_keepalives_count": "3",
}
_SET_UP = """
SELECT set_config(s.name, w.setting, false)
FROM pg_catalog.pg_settings AS s JOIN unnest(%s::text[], %s::text[]) AS w (name, setting) ON w.name = s.name
WHERE NOT (s.name = 'synchronous_commit' AND s.setting NOT IN ('off', 'local'))
    AND NOT (s.name = 'lock_timeout' AND s.setting <> '0')
"""
_TABLES_SQL = f"""
SELECT to_regclass('journal_records') IS NOT NULL, to_regclass('journal_streams') IS NOT NULL, to_regclass('{VERSION_TABLE}') IS NOT NULL
"""

_AGAIN = {
    "23505",  # unique violation: the position is taken, perhaps by an attempt of ours
    "40001",  # serialization failure
    "40P01",  # deadlock detected
    "53300",  # too many connections
    "55P03",  # lock not available within lock_timeout
    "57P03",  # starting up, or shutting down
}
_UNKNOWN_CLASSES = ("08", "57P", "40003")
_REMEDIES = {
    "22021": "the database can't hold the text: create it with ENCODING 'UTF8'",
    "25006": "it is read-only: connect to the primary server",
    "28": "check the user and the password in the URL",
    "3D000": "create the database, or name another",
    "3F000": "create the schema, or name another",
    "42501": "give the user the right to use the tables; `refold migrate` needs the right to create them",
    "42P01": "run `refold migrate` on it first",
    "42703": "run `refold migrate` on it first",
    "42P07": "something else has this name there: give the journal a schema of its own, with ?options=-csearch_path%3DSCHEMA",
    "53100": "free disk space on the server, then open the journal again",
    "53200": "the server is out of memory; try again",
    "53300": "the server has too many connections; close some, or raise max_connections",
    "55P03": "another transaction holds the stream's row; pg_locks says whose, close that program and try again",
    "57014": "the server cancelled it (statement_timeout, or an administrator); try again",
    "58": "check the server's disk, then open the journal again",
}
_LOST = "check that the server runs and can be reached, then open the journal again"


def database_url(url: str) -> sa.URL:
    """The URL as SQLAlchemy wants it."""
    try:
        parsed = sa.make_url(url)
    except (sa.exc.ArgumentError, ValueError) as error:
        raise NoStore(f"{shown(url)!r} is no URL of a database: use postgresql://USER@HOST/DATABASE") from error
    return parsed.set(drivername="postgresql+psycopg")


def create_engine(url: str, settings: Mapping[str, str] | None = None, *, autocommit: bool = True) -> sa.Engine:
    """An engine over the database; connections are made on use and may cross threads.

    Raises:
        JournalError: the URL can't be understood, or the driver isn't installed.
    """
    parsed = database_url(url)
    connect_args: dict[str, Any] = {k: v for k, v in _CONNECT_ARGS.items() if k not in parsed.query}
    connect_args["application_name"] = application_name()
    try:
        engine = sa.create_engine(
            parsed,
            connect_args=connect_args,
            isolation_level="AUTOCOMMIT" if autocommit else "READ COMMITTED",
            pool_pre_ping=True,
            pool_reset_on_return=None if autocommit else "rollback",
        )
    except ImportError as error:
        raise JournalError(
            "a PostgreSQL journal needs its driver, which is not installed: pip install 'refold[postgres]'"
        ) from error
    wanted = _SESSION | dict(settings or {})
    sa.event.listen(engine, "connect", lambda raw, _record: _set_up(raw, wanted))
    return engine


def application_name() -> str:
    """How our sessions call themselves in pg_stat_activity: `refold PID HOST`, at most 63 bytes."""
    return f"refold {os.getpid()} {socket.gethostname()}".encode("ascii", "replace")[:63].decode()


def _set_up(raw: Any, settings: Mapping[str, str]) -> None:
    was, raw.autocommit = raw.autocommit, True
    raw.execute(_SET_UP, [list(settings), list(settings.values())])
    raw.autocommit = was


def sqlstate_of(error: BaseException) -> str | None:
    """The server's code for the error; None if it isn't the server's."""
    return getattr(getattr(error, "orig", None), "sqlstate", None)


def fate_of(error: sa.exc.SQLAlchemyError) -> Fate:
    """What an error of the append says about its records."""
    code = sqlstate_of(error)
    if code in _AGAIN:
        return Fate.AGAIN
    if isinstance(error, sa.exc.DBAPIError) and (error.connection_invalidated or code is None):
        return Fate.AGAIN if error.statement is None else Fate.UNKNOWN  # without a statement it failed to connect
    return Fate.UNKNOWN if code is None or code.startswith(_UNKNOWN_CLASSES) else Fate.NOT_IN


def explain(error: sa.exc.SQLAlchemyError, name: str, doing: str) -> JournalError:
    """The journal's error for one of SQLAlchemy's about the database `name`."""
    code = sqlstate_of(error) or ""
    text = " ".join(str(getattr(error, "orig", None) or error).split())
    if code in {"XX001", "XX002"}:
        return JournalCorrupt(f"{name} is damaged ({text}): restore it from a backup", position=0, kind="undecodable")
    remedy = (
        rebuilding(text, name)
        or _REMEDIES.get(code)
        or _REMEDIES.get(code[:2])
        or (_LOST if is_lost(error) else "see the cause")
    )
    return JournalError(f"cannot {doing} {name}: {text}; {remedy}")


def is_lost(error: sa.exc.SQLAlchemyError) -> bool:
    """Whether the connection is gone, or never came about."""
    code = sqlstate_of(error)
    return isinstance(error, sa.exc.DBAPIError) and (
        code is None or error.connection_invalidated or code.startswith(("08", "57P"))
    )


def table_version(connection: sa.Connection, name: str) -> int:
    """The version of the journal's tables; 0 if there are none. Today's, where what says so is gone, and they all are as today's.

    Raises:
        JournalCorrupt: tables of the same names belong to another program, or are of no version that there is.
    """
    has_records, has_streams, has_version = connection.exec_driver_sql(_TABLES_SQL).one()
    if not has_version and not has_records:
        return 0
    versions = _versions(connection) if has_version else []
    if not has_records:
        raise _without_records(name, was_there=has_streams)
    if not versions:
        return _version_untold(connection, name)
    if len(versions) > 1 or not (versions[0].isascii() and versions[0].isdigit()):
        raise JournalCorrupt(
            f"{name} is damaged: its tables are said to be of version {' and '.join(map(ascii, versions))}, which no refold has (this one's "
            f"are of {TABLE_VERSION}, in {VERSION_TABLE}): restore it from a backup",
            position=0,
            kind="undecodable",
        )
    return int(versions[0])


def _without_records(name: str, *, was_there: bool) -> JournalCorrupt:
    if was_there:
        what = "is damaged: its table journal_records is gone; restore it from a backup"
        return JournalCorrupt(f"{name} {what}", position=0, kind="undecodable")
    what = "has tables of another program under the journal's names: name another database or schema"
    return JournalCorrupt(f"{name} {what}", position=0, kind="foreign")


def _versions(connection: sa.Connection) -> list[str]:
    return list(connection.exec_driver_sql(f"SELECT version_num FROM {VERSION_TABLE}").scalars())  # noqa: S608


def _version_untold(connection: sa.Connection, name: str) -> int:
    """Nothing says of which version the tables are: today's, if they are as it makes them."""
    try:
        require_columns(connection, name)
    except JournalCorrupt as error:
        what = f"has tables under the journal's names, no {VERSION_TABLE} that says of which version, and they aren't of this refold's"
        ways = (
            "if it was a journal, restore it from a backup; if it's another program's, name another database or schema"
        )
        raise JournalCorrupt(f"{name} {what}: {ways}", position=0, kind="foreign") from error
    return TABLE_VERSION


def missing_tables(connection: sa.Connection, name: str) -> frozenset[str]:
    """The tables that are gone, or empty where they must not be, of those that records of today's version are read without.

    Raises:
        JournalCorrupt: another table or a column isn't as it was made.
    """
    *_, has_version = connection.exec_driver_sql(_TABLES_SQL).one()
    is_told = has_version and _versions(connection)
    return require_columns(connection, name) | ({VERSION_TABLE} if not is_told else set())


def require_current(connection: sa.Connection, name: str) -> frozenset[str]:
    """Refuse a database without today's tables, or one that can't hold every text. Returns `missing_tables`.

    Raises:
        NotFound: there is no journal.
        SchemaTooNew: a newer refold made it.
        JournalCorrupt: a table or a column isn't as it was made.
        JournalError: it needs a migration.
    """
    version = table_version(connection, name)
    if version == 0:
        raise NotFound(f"no journal in {name}: run `refold migrate {shlex.quote(name)}`, or let an engine create it")
    if not is_current(version, name):
        raise JournalError(f"{name} has the tables of an older refold: run `refold migrate {shlex.quote(name)}` first")
    return missing_tables(connection, name)


def is_current(version: int, name: str) -> bool:
    """Whether these are today's tables.

    Raises:
        SchemaTooNew: a newer refold made them.
    """
    if version > TABLE_VERSION:
        raise SchemaTooNew(
            f"{name} has table version {version}, this refold knows up to {TABLE_VERSION}: use a newer refold"
        )
    return version == TABLE_VERSION


def require_utf8(connection: sa.Connection, name: str) -> None:
    """Refuse a database in another encoding: it can't hold every text.

    Raises:
        JournalError: it has another.
    """
    raw: Any = connection.connection.driver_connection
    encoding = raw.info.parameter_status("server_encoding")
    if encoding != "UTF8":
        raise JournalError(f"{name} is encoded in {encoding}: create the database with ENCODING 'UTF8'")
