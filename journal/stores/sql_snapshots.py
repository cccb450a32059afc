"""Snapshots and archives in SQL: their statements. `SqlStore` runs them in its own transactions."""

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from refold.journal.archives import Archive
from refold.journal.snapshots import Snapshot
from refold.journal.stores.tables import journal_archives, journal_records, journal_snapshots, journal_streams

_A, _R, _S, _H = journal_archives.c, journal_records.c, journal_snapshots.c, journal_streams.c


def snapshots_of(stream: str) -> sa.Select[tuple[int, int]]:
    """Position and size of a stream's snapshots."""
    query = sa.select(_S.position, sa.func.length(_S.body)).join(journal_streams).where(_H.name == stream)
    return query.order_by(_S.position)


def snapshot_at(stream: str, position: int) -> sa.Select[Any]:
    """The snapshot at a position."""
    columns = [_S[name] for name in Snapshot._fields]
    return sa.select(*columns).join(journal_streams).where(_H.name == stream, _S.position == position)


def archives_of(stream: str) -> sa.Select[Any]:
    """A stream's archives, in order."""
    columns = [_A[name] for name in Archive._fields]
    return sa.select(*columns).join(journal_streams).where(_H.name == stream).order_by(_A.start)


def is_owner(connection: sa.Connection, stream_id: int, engine_epoch: int) -> bool:
    """Whether the stream is still in this epoch. Locks its row until the transaction ends."""
    mine = sa.select(_H.stream_id).where(_H.stream_id == stream_id, _H.engine_epoch == engine_epoch)
    return connection.execute(mine.with_for_update()).first() is not None


def save_snapshot(connection: sa.Connection, stream_id: int, snapshot: Snapshot) -> None:
    """Insert it, in the place of one at the same position."""
    drop_snapshots(connection, stream_id, [snapshot.position])
    connection.execute(sa.insert(journal_snapshots).values(stream_id=stream_id, **snapshot._asdict()))


def drop_snapshots(connection: sa.Connection, stream_id: int, positions: Sequence[int]) -> None:
    """Delete those at these positions."""
    connection.execute(sa.delete(journal_snapshots).where(_S.stream_id == stream_id, _S.position.in_(positions)))


def drop_all_snapshots(connection: sa.Connection, stream_id: int) -> None:
    """Delete a stream's snapshots."""
    connection.execute(sa.delete(journal_snapshots).where(_S.stream_id == stream_id))


def raise_epoch(connection: sa.Connection, stream_id: int, epoch: int) -> None:
    """Put the stream into a later engine epoch: that of the records that are copied next."""
    connection.execute(sa.update(journal_streams).where(_H.stream_id == stream_id).values(engine_epoch=epoch))


def add_archive(connection: sa.Connection, stream_id: int, archive: Archive) -> None:
    """Insert the border."""
    connection.execute(sa.insert(journal_archives).values(stream_id=stream_id, **archive._asdict()))


def first_position(connection: sa.Connection, stream_id: int) -> int | None:
    """Of the oldest record that is in the table; None if none is."""
    return connection.execute(sa.select(sa.func.min(_R.position)).where(_R.stream_id == stream_id)).scalar()


def drop_archived(connection: sa.Connection, stream_id: int, limit: int) -> int:
    """Delete the oldest records before the border; how many."""
    border = connection.execute(sa.select(sa.func.max(_A.stop)).where(_A.stream_id == stream_id)).scalar()
    first = first_position(connection, stream_id)
    if border is None or first is None or first >= border:
        return 0
    stop = min(first + limit, border)
    return connection.execute(sa.delete(journal_records).where(_R.stream_id == stream_id, _R.position < stop)).rowcount
