"""What is asked of a SQLite journal before anybody may write to it, on a connection that can't.

Whoever can write changes the files as soon as he closes them: SQLite folds the WAL into the file then. A damaged WAL is evidence,
and what a restorer has of records that were acknowledged; so a journal that is refused is never opened for writing.
"""

import contextlib
import sqlite3
from pathlib import Path

from refold.journal.record import Head
from refold.journal.stores.guards import check_tail
from refold.journal.stores.sqlite_beside import beside
from refold.journal.stores.sqlite_file import check_not_orphaned, connect_readonly, explain
from refold.journal.stores.sqlite_marks import check_marks, marks_of
from refold.journal.stores.sqlite_reader import ENDS_SQL, HEAD_SQL

_TAIL_SQL = """
SELECT r.position, r.engine_epoch, r.hash FROM journal_records AS r JOIN journal_streams AS s ON s.stream_id = r.stream_id
WHERE s.name = ? ORDER BY r.position DESC LIMIT 1
"""


def check_takeable(path: Path, stream: str) -> None:
    """See to it that no stream ends before its mark, and that this one ends with the record that its head names.

    Raises:
        JournalCorrupt: one does, or it doesn't; or something beside the records isn't as it was made.
        JournalError: the file can't be read.
    """
    marks = marks_of(path)  # before the heads, which may move on
    with contextlib.closing(connect_readonly(path)) as connection:
        try:
            connection.execute("BEGIN")  # head and tail as of one moment
            check_not_orphaned(connection, path)
            ends = {key: (at, digest) for key, at, digest in connection.execute(ENDS_SQL)}
            damage = beside(lambda sql, parameters: connection.execute(sql, parameters).fetchall(), path)
            head = connection.execute(HEAD_SQL, (stream,)).fetchone()
            tail = connection.execute(_TAIL_SQL, (stream,)).fetchone()
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise explain(error, path, "read") from error
    if damage:
        raise damage[0]
    check_marks(path, marks, ends)
    if head is not None:
        check_tail(stream, Head._make(head), tail)
