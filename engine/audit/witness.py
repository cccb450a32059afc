"""What the read model beside segments knows of a stream that is gone.

It's made of the journal and is never trusted over it. But a stream that has no record, of which a read model has projected hundreds,
is no new one: somebody has lost it, and the next engine would begin it anew over what little is left. It's told, and refused, until
the journal is back, or the read model is moved away. (A SQLite journal has its `.mark` for that.)
"""

import contextlib
import shlex
import sqlite3
from pathlib import Path

from refold.journal.errors import JournalCorrupt, JournalError
from refold.journal.store import JournalReader
from refold.journal.stores import open_reader
from refold.journal.stores.location import locate
from refold.journal.stores.segments.folder import look_at
from refold.journal.stores.sqlite_file import connect_readonly
from refold.projections.audit import beside

_KNOWN = "SELECT stream, position, head_hash FROM audit_projections WHERE is_live = 1 AND position > 0 ORDER BY stream"


def check_nothing_lost(journal: str, stream: str | None = None, reader: JournalReader | None = None) -> None:
    """See to it that no stream of a journal of segments, or not this one, is empty that its read model knows records of.

    Raises:
        JournalCorrupt: one is; kind `truncated`.
        JournalError: the journal can't be read.
    """
    location = locate(journal)
    if location.kind != "segments" or location.path is None:
        return
    model = beside.path_beside(location.path)
    known = [each for each in known_beside(journal) if stream in {None, each[0]}]
    there = _positions(journal, location.path, [each[0] for each in known], reader) if known else {}
    for name, position, head_hash in known:
        if not there.get(name):
            raise _lost(location.path, model, name, position, head_hash)


def known_beside(journal: str) -> list[tuple[str, int, str]]:
    """The streams that the read model beside segments shows, how many records it has of them, and the hash of the last.

    None of a journal of another kind, or if it's damaged or not there.
    """
    location = locate(journal)
    model = None if location.kind != "segments" or location.path is None else beside.path_beside(location.path)
    return _known(model) if model is not None and model.is_file() else []


def _known(model: Path) -> list[tuple[str, int, str]]:
    with contextlib.suppress(sqlite3.Error, JournalError):
        has_wal = model.with_name(f"{model.name}-wal").exists()
        connection = connect_readonly(model, immutable=not has_wal)  # which leaves no files beside it
        try:
            return connection.execute(_KNOWN).fetchall()
        finally:
            connection.close()
    return []


def _positions(journal: str, path: Path, streams: list[str], reader: JournalReader | None) -> dict[str, int]:
    if reader is not None:
        return {stream: reader.head(stream).position for stream in streams}
    if look_at(path) != "journal":
        return {}
    reader = open_reader(journal)
    try:
        return _positions(journal, path, streams, reader)
    finally:
        reader.close()


def _lost(path: Path, model: Path, stream: str, position: int, head_hash: str) -> JournalCorrupt:
    error = JournalCorrupt(
        f"{path} has no record of stream {stream!r}, but its read model {model} was made of {position}, up to head "
        f"{position}:{head_hash}: they are lost (truncated); restore a backup, or, to begin a new journal, move the read model "
        f"away: `mv {shlex.quote(str(model))} ELSEWHERE`",
        position=0,
        kind="truncated",
    )
    error.place = str(path)
    return error
