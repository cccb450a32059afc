"""Rows of `journal_records` that are in no stream: of a number that no stream has, or at a position before 0.

No read finds them, so nothing misses them and no hash tells. Either a hand put them in, or it took a stream's row out of
`journal_streams`, and with it the stream's name. Where they begin as a stream begins, with a record that follows nothing, or something
beside them knows the number, a stream was there. One seek for each stream finds them.
"""

from collections.abc import Sequence
from typing import NamedTuple

from refold.journal.beside import DamageBeside

_MOST_NAMED = 5
STRANGERS_SQL = """
WITH RECURSIVE ids (id) AS (
    SELECT min(stream_id) FROM journal_records
    UNION ALL
    SELECT (SELECT min(r.stream_id) FROM journal_records AS r WHERE r.stream_id > ids.id) FROM ids WHERE ids.id IS NOT NULL
), ends (id, first_position, last_position) AS (
    SELECT id, (SELECT min(r.position) FROM journal_records AS r WHERE r.stream_id = ids.id),
        (SELECT max(r.position) FROM journal_records AS r WHERE r.stream_id = ids.id)
    FROM ids WHERE id IS NOT NULL
)
SELECT ends.id, s.name, ends.first_position, ends.last_position
FROM ends LEFT JOIN journal_streams AS s ON s.stream_id = ends.id WHERE s.stream_id IS NULL OR ends.first_position < 0
"""


class Strangers(NamedTuple):
    """Rows of one number: of the stream `name`, some of them before position 0, or of none."""

    stream_id: int
    name: str | None
    first: int
    last: int


def damage_of(rows: Strangers, *, is_stream: bool) -> DamageBeside:
    """What is to be said of them. `is_stream`: they were a stream, whose row is gone."""
    if rows.name is not None:
        what = f"stream {rows.name!r} has rows before position 0, the first at {rows.first}"
        return _inserted(what, rows.first, rows.name)
    which = f"rows of stream number {rows.stream_id}, at positions {rows.first} to {rows.last}, are there"
    if not is_stream:
        return _inserted(f"{which}, and no stream has that number, nor do they begin one", rows.first)
    says = f"{which}, and the row that names the stream is gone from journal_streams (deleted)"
    ways = "restore it from a backup; `refold copy --stream NAME` copies a stream that is there, and docs/reliability.md makes the row anew"
    return DamageBeside(f"{says}: {ways}", kind="deleted")


def emptied(rows: Sequence[Strangers]) -> str:
    """What is to be said where `journal_streams` has no row at all."""
    which = ", ".join(f"{each.first} to {each.last} of stream number {each.stream_id}" for each in rows[:_MOST_NAMED])
    more = f" and of {len(rows) - _MOST_NAMED} more" if len(rows) > _MOST_NAMED else ""
    ways = "restore it from a backup, or make the rows anew as docs/reliability.md says"
    return f"its table of streams is empty, and records {which}{more} are there (deleted); {ways}"


def _inserted(what: str, position: int, stream: str | None = None) -> DamageBeside:
    line = f"{what}: they were put in (inserted); `refold copy` makes a journal without them"
    return DamageBeside(line, kind="inserted", position=position, stream=stream)
