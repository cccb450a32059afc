"""What makes a SQLite file one of our journals, and what its errors mean. Standard library only: this is the fast path.

A journal carries our `application_id` in its header and its table version in `user_version`. `look_at` tells an absent, an
empty, a foreign and a journal file apart without writing a byte, so that nothing of anyone else's is ever touched.

Facts of SQLite that this package stands on:
- A reader in WAL mode needs the `-shm` file. `mode=ro` creates or repairs it where the folder is writable, so it reads a
  live journal and one whose engine was killed. In a read-only folder a file without a WAL is read as immutable.
- Versions before 3.51.3 can corrupt a WAL when two connections checkpoint and commit at once. So exactly one connection
  ever checkpoints, the writer's, and every other one sets `wal_autocheckpoint=0`.
- A page's checksum is nowhere in the file. Records carry their own (the chain); the table of streams, which says that there
  are any, has its index beside it, and the two are compared on opening.
- Header fields may still be in the WAL only: they're read through a connection, never from the raw file.
"""

import contextlib
import os
import re
import shlex
import sqlite3
from pathlib import Path
from typing import Literal, NamedTuple
from urllib.parse import quote

from refold.journal.errors import JournalCorrupt, JournalError, NotFound, SchemaTooNew
from refold.journal.stores.no_file import NoFile, check_is_file
from refold.journal.stores.room import room_at
from refold.journal.stores.sqlite_marks import check_gone, marks_of
from refold.journal.stores.strangers import STRANGERS_SQL, Strangers, emptied

APPLICATION_ID = 0x5245464F  # "REFO"
TABLE_VERSION = 6  # the number of the newest migration
BUSY_TIMEOUT_S = 5.0

_OUR_TABLES = {"journal_streams", "journal_records"}
_READ_TABLES = ("journal_streams", "journal_records", "journal_archives")
_ORPHANED_SQL = "SELECT EXISTS (SELECT 1 FROM journal_records) AND NOT EXISTS (SELECT 1 FROM journal_streams)"
_NO_READ_MODEL = re.compile(r'no such table: (?:main\.)?audit_|relation "audit_\w+" does not exist')
_REMEDIES = {
    sqlite3.SQLITE_BUSY: "another program holds its lock; close that program and try again",
    sqlite3.SQLITE_LOCKED: "another program holds its lock; close that program and try again",
    sqlite3.SQLITE_PERM: "give this user the right to read and write the file and its folder",
    sqlite3.SQLITE_READONLY: "give this user the right to write the file and its folder",
    sqlite3.SQLITE_IOERR: "check the disk and its free space, then open the journal again",
    sqlite3.SQLITE_FULL: "free disk space, then open the journal again",
    sqlite3.SQLITE_CANTOPEN: "check that the folder exists and that this user may write to it",
}


class FileState(NamedTuple):
    """What lies at a path: `version` is the table version of a journal, 0 otherwise."""

    kind: Literal["absent", "empty", "journal"]
    version: int


def explain(error: Exception, path: Path, doing: str, position: int = 0) -> JournalError:
    """The journal's error for an error of SQLite at `path`, with the remedy. `position` is where a reader had got to."""
    if isinstance(error, UnicodeDecodeError):  # SQLite's message quotes the damaged text
        return _damaged(path, repr(error.object[:80]), position)
    code = getattr(error, "sqlite_errorcode", None)
    primary = code & 0xFF if isinstance(code, int) else None
    if primary == sqlite3.SQLITE_NOTADB:
        return JournalCorrupt(f"{path} is not a SQLite file: name another journal file", position=0, kind="foreign")
    if primary == sqlite3.SQLITE_CORRUPT:
        return _damaged(path, str(error), position)
    if primary == sqlite3.SQLITE_CANTOPEN and _is_unreadable(path):
        return JournalError(
            f"cannot read {path}: it is there, and this user has no right to read it; give it that right"
        )
    remedy = _REMEDIES.get(primary, "see the cause") if primary is not None else "see the cause"
    remedy = rebuilding(str(error), str(path)) or remedy
    room = room_at(path) if primary in {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR} else ""
    return JournalError(f"cannot {doing} {path}: {error}{room}; {remedy}")


def rebuilding(complaint: str, journal: str) -> str:
    """What a database complains of that misses a table of the read model, which redactions write to, is mended by; else nothing."""
    if not _NO_READ_MODEL.search(complaint):
        return ""
    return f"it is of the read model: `refold audit rebuild {shlex.quote(journal)}` makes it anew, of the records"


def _is_unreadable(path: Path) -> bool:
    """Whether the file is there and isn't this user's to read. Asked without opening it: closing it would drop SQLite's locks."""
    with contextlib.suppress(OSError):
        return path.exists() and not os.access(path, os.R_OK)
    return False


def _damaged(path: Path, how: str, position: int = 0) -> JournalCorrupt:
    return JournalCorrupt(
        f"{path} is damaged at or after record {position} ({how}): restore it from a backup",
        position=position,
        kind="undecodable",
    )


def check_streams(connection: sqlite3.Connection, path: Path) -> None:
    """The table of streams and its index say the same, and it isn't empty where records are: else a stream can seem not to be there.

    Some 70 µs.

    Raises:
        JournalCorrupt: they don't.
        sqlite3.Error, UnicodeDecodeError: SQLite can't read them.
    """
    _require_ok(connection, path, "PRAGMA integrity_check(journal_streams)")
    check_not_orphaned(connection, path)


def check_not_orphaned(connection: sqlite3.Connection, path: Path) -> None:
    """The table of streams isn't empty where records are. Whoever writes asks it too, or he would begin a stream that is there.

    Raises:
        JournalCorrupt: there are records, and no stream that they are of.
    """
    if connection.execute(_ORPHANED_SQL).fetchone()[0]:
        what = emptied([Strangers(*row) for row in connection.execute(STRANGERS_SQL)])
        raise JournalCorrupt(f"{path} is damaged: {what}", position=0, kind="deleted")


def check_pages(connection: sqlite3.Connection, path: Path) -> None:
    """Every page of the file is in its place, those that no record is on too. Some 1 ms per MB.

    Raises:
        JournalCorrupt: a page isn't; kind `unindexed` if it's of no table that a reader of records needs.
        sqlite3.Error, UnicodeDecodeError: SQLite can't read it.
    """
    if (found := _found_by(connection, "PRAGMA integrity_check(1)")) == "ok":
        return
    there = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
    if any(
        _found_by(connection, f"PRAGMA integrity_check({table})") != "ok" for table in there.intersection(_READ_TABLES)
    ):
        raise _damaged(path, found)
    copying = f"`refold copy {shlex.quote(str(path))} NEW` makes a whole journal of the records"
    raise JournalCorrupt(
        f"{path} is damaged where no record is ({found}; unindexed): {copying}", position=0, kind="unindexed"
    )


def _require_ok(connection: sqlite3.Connection, path: Path, check: str) -> None:
    if (found := _found_by(connection, check)) != "ok":
        raise _damaged(path, found)


def _found_by(connection: sqlite3.Connection, check: str) -> str:
    (found,) = connection.execute(check).fetchone()
    return " ".join(found.split())[:200]


def look_at(path: Path) -> FileState:
    """Tell what lies at `path`. Writes nothing.

    Raises:
        JournalCorrupt: something that isn't a journal of ours (kind `foreign`), or a damaged file.
        JournalError: it can't be read.
    """
    try:
        if not path.exists():
            return FileState("absent", 0)
        _check_are_files(path)
    except OSError as error:
        raise JournalError(f"cannot look at {path}: {error.strerror}; name another journal file") from error
    _check_not_emptied(path)
    # Where nobody has it open, read it as immutable: a foreign file in WAL mode gets no `-shm` beside it.
    connection = _connected(path, immutable=not (has_wal(path) or _beside(path, "-shm").exists()))
    try:
        application_id, version, tables = _fingerprint(connection)
    except (sqlite3.Error, UnicodeDecodeError) as error:
        raise explain(error, path, "read") from error
    finally:
        connection.close()
    return _classify(path, application_id, version, tables)


def _check_are_files(path: Path) -> None:
    """What SQLite opens are files, if they are there: it would wait for whoever writes to a pipe.

    Raises:
        JournalCorrupt: the journal isn't one (kind `foreign`).
        JournalError: one beside it isn't.
    """
    try:
        check_is_file(path)
    except NoFile as error:
        raise _foreign(path, error.what) from error
    try:
        for suffix in ("-wal", "-shm", "-journal"):
            check_is_file(_beside(Path(os.path.realpath(path)), suffix))
    except NoFile as error:
        raise JournalError(f"{error.line}, and put back what was there, if you have it") from error


def _check_not_emptied(path: Path) -> None:
    """A file without a byte never had one. To be asked before SQLite opens it: SQLite deletes the WAL beside an empty file.

    Raises:
        JournalCorrupt: a WAL or a mark beside it says that it had.
    """
    if not _is_empty(path):
        return
    acknowledged = max((position for position, _ in marks_of(path).values()), default=0)
    told = f"records up to {acknowledged} were acknowledged" if acknowledged else "its -wal beside it is not"
    # Asked again last: of a journal that is made meanwhile, the file is written before its WAL and its mark are.
    if (acknowledged or has_wal(path)) and _is_empty(path):
        raise JournalCorrupt(f"{path} is empty, and {told}: restore it from a backup", position=0, kind="undecodable")


def _is_empty(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return path.stat().st_size == 0
    return False


def _fingerprint(connection: sqlite3.Connection) -> tuple[int, int, set[str]]:
    (application_id,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    # Both were set by the transaction that made the tables. To ask for these takes SQLite 1.5 ms: it parses every view.
    if (application_id, version) == (APPLICATION_ID, TABLE_VERSION):
        return application_id, version, _OUR_TABLES
    return application_id, version, {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}


def _classify(path: Path, application_id: int, version: int, tables: set[str]) -> FileState:
    # A journal that went through `.dump` has lost its application_id; its tables still tell.
    if application_id not in {0, APPLICATION_ID}:
        raise _foreign(path, f"belongs to another program (application_id {application_id:#x})")
    if tables >= _OUR_TABLES:
        return FileState("journal", version if application_id == APPLICATION_ID else 0)
    if tables:
        raise _foreign(path, f"is a SQLite file of another program (it has {sorted(tables)[0]!r})")
    return FileState("empty", 0)


def _foreign(path: Path, what: str) -> JournalCorrupt:
    return JournalCorrupt(f"{path} {what}: name another journal file", position=0, kind="foreign")


def schema_is_current(path: Path) -> bool:
    """Whether the file is a journal with today's tables. Costs well under a millisecond.

    Raises:
        SchemaTooNew: a newer refold made it.
        JournalCorrupt: it isn't ours.
    """
    return _is_current(path, look_at(path))


def require_current(path: Path) -> None:
    """Refuse a file that isn't a journal with today's tables.

    Raises:
        NotFound: there is no journal.
        SchemaTooNew: a newer refold made it.
        JournalCorrupt: it isn't ours, or it's gone, and its mark is there.
        JournalError: it needs a migration.
    """
    state = look_at(path)
    marks = marks_of(path) if state.kind == "absent" else {}
    if marks and not path.exists():  # asked again last, as in `_check_not_emptied`
        check_gone(path, marks)
    if state.kind != "journal":
        raise NotFound(f"no journal at {path}: name an existing journal, or let an engine create it")
    if not _is_current(path, state):
        raise JournalError(
            f"{path} has the tables of an older refold: run `refold migrate {shlex.quote(str(path))}` first"
        )


def _is_current(path: Path, state: FileState) -> bool:
    if state.version > TABLE_VERSION:
        raise SchemaTooNew(
            f"{path} has table version {state.version}, this refold knows up to {TABLE_VERSION}: use a newer refold"
        )
    return state.kind == "journal" and state.version == TABLE_VERSION


def lossy_text(raw: bytes) -> str:
    """Text as a damaged file may hold it: it must reach the verifier, not end in the driver's error."""
    return raw.decode("utf-8", "replace")


def connect_readonly(path: Path, *, immutable: bool = False) -> sqlite3.Connection:
    """A connection that can't write, on a live journal, a killed engine's, or one in a read-only folder.

    Raises:
        JournalError: the file can't be opened, or SQLite can't read what tables it has.
    """
    connection = _connected(path, immutable=immutable)
    try:
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except (sqlite3.Error, UnicodeDecodeError) as error:
        connection.close()
        raise explain(error, path, "open") from error
    return connection


def _connected(path: Path, *, immutable: bool) -> sqlite3.Connection:
    uri = f"file:{quote(str(path))}?mode=ro"
    try:
        return _open(uri + "&immutable=1" * immutable)
    except (sqlite3.Error, UnicodeDecodeError) as error:
        # A read-only folder can't get the `-shm` file; without a WAL there's nothing in it that we'd miss.
        if immutable or not _is_cantopen(error) or not path.is_file() or has_wal(path):
            raise explain(error, path, "open") from error
    return _connected(path, immutable=True)


def _open(uri: str) -> sqlite3.Connection:
    connection = sqlite3.connect(uri, uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
    connection.text_factory = lossy_text
    try:
        for pragma in (
            "query_only=1",
            "wal_autocheckpoint=0",
            "mmap_size=0",
            "application_id",
        ):  # the last one reads the file
            connection.execute(f"PRAGMA {pragma}").fetchall()
    except (sqlite3.Error, UnicodeDecodeError):
        connection.close()
        raise
    return connection


def _is_cantopen(error: Exception) -> bool:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return code in {sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY}


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def has_wal(path: Path) -> bool:
    """Whether there's anything in the WAL beside a file; of a link, beside what it leads to, as SQLite has it.

    Asked once: whoever closes the journal last removes it, between two questions too.
    """
    with contextlib.suppress(OSError):
        return _beside(Path(os.path.realpath(path)), "-wal").stat().st_size > 0
    return False
