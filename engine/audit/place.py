"""Where the read model of a journal is, and bringing it up to date.

A journal in SQLite or PostgreSQL has it in its own database, a journal of segments in a SQLite file beside it. A journal that this
user can't write gets one in a temporary file, which is gone afterwards: to ask is possible wherever reading is.
"""

import os
import shlex
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from refold import migrations
from refold.engine.audit.witness import check_nothing_lost
from refold.engine.history.plain import listed
from refold.journal.ends import EndInDoubt, check_end, check_parts
from refold.journal.errors import JournalCorrupt, JournalError, NotFound
from refold.journal.store import JournalReader
from refold.journal.stores import open_reader
from refold.journal.stores.location import NoStore, file_path, locate, shown
from refold.journal.stores.no_file import NoFile, check_is_file
from refold.journal.verify import Inspected
from refold.projections.audit import beside
from refold.projections.audit.parts import lost_tables, lost_views
from refold.projections.audit.trailing import Batch, TrailingProjection
from refold.projections.audit.writer import AuditWriter, Checkpoint


class Place(NamedTuple):
    """Where a read model is.

    Attributes:
        journal: URL of the journal.
        path: of a SQLite file, or None.
        url: of a PostgreSQL database, or None.
        is_own_file: nothing but the read model is in the file.
        is_temporary: it's gone when we are.
    """

    journal: str
    path: Path | None
    url: str | None
    is_own_file: bool = False
    is_temporary: bool = False


def place_of(journal: str) -> Place:
    """Where the read model of a journal belongs.

    Raises:
        JournalError: the journal is in another process's memory, or nowhere; or what has the read model's name is no file.
    """
    location = locate(journal)
    if location.kind == "postgresql":
        return Place(journal, None, location.url)
    if location.kind == "memory":
        raise NoStore("a memory: journal can't be asked by SQL: give the engine a journal file or database")
    path = file_path(location)
    if location.kind == "sqlite":
        return Place(journal, path, None)
    model = beside.path_beside(path)
    try:
        check_is_file(model)
    except NoFile as error:
        raise JournalError(error.line) from error
    return Place(journal, model, None, is_own_file=True)


@contextmanager
def writable_place(journal: str) -> Iterator[Place]:
    """`place_of`, or a temporary one where this user can't write, or nobody should: see `_check_end_in`."""
    place = place_of(journal)
    if place.path is None or (_can_write(place.path) and not _is_cut(place)):
        yield place
        return
    with tempfile.TemporaryDirectory(prefix="refold-audit-") as folder:
        yield Place(journal, Path(folder) / "audit.db", None, is_own_file=True, is_temporary=True)


def _is_cut(place: Place) -> bool:
    try:
        _check_end_in(place)
    except EndInDoubt:
        return True
    except NotFound:  # whoever asks is told
        pass
    return False


def _check_end_in(place: Place) -> None:
    """A journal's own file that ends before what was acknowledged stays as it is: to write to it would fold its damaged WAL into it.

    Raises:
        EndInDoubt: it does.
        JournalError: it can't be read.
    """
    if place.path is None or place.is_own_file:
        return
    reader = open_reader(place.journal)
    try:
        for stream in streams_of(reader):
            check_end(reader, stream)
    finally:
        reader.close()


def _can_write(path: Path) -> bool:
    return os.access(path.parent, os.W_OK) and (not path.exists() or os.access(path, os.W_OK))


@contextmanager
def derived(place: Place) -> Iterator[None]:
    """Damage to a read model is no damage to the journal: it can be made anew, or, in the journal's own file, a copy of the journal can.

    Raises:
        JournalError: the file is damaged; says so.
    """
    try:
        yield
    except JournalCorrupt as error:
        if not place.is_own_file and (damage := _damage_beside(place)) is not None:
            raise damage from error
        is_a_strangers = error.kind == "foreign" and error.__cause__ is None
        if not place.is_own_file or is_a_strangers or str(place.path) not in str(error):
            raise
        raise JournalError(
            f"{place.path} is the read model of {shown(place.journal)}, and is damaged: it holds nothing that the journal doesn't; "
            f"move it away, with {place.path}-wal and {place.path}-shm, and the next `refold audit` makes it anew"
        ) from error


def _damage_beside(place: Place) -> JournalCorrupt | None:
    """What is wrong with a journal's own file, if it's where no record is."""
    try:
        reader = open_reader(place.journal)
    except JournalError:
        return None
    try:
        if isinstance(reader, Inspected):
            reader.inspect()
    except JournalCorrupt as error:
        return error if error.kind == "unindexed" else None
    finally:
        reader.close()
    return None


def open_writer(place: Place, *, mends: bool = False) -> AuditWriter:
    """A writer at a place; a file of its own is made if it isn't there. With `mends`, tables and views that are gone are made anew.

    Raises:
        JournalError: it can't be, or mustn't: see `_check_end_in`. Or a table is gone.
    """
    _check_end_in(place)
    writer = _connected(place)
    try:
        there = writer.parts()
    except BaseException:
        writer.close()
        raise
    tables, views = lost_tables(there), lost_views(there)
    if not tables and not (mends and views):  # to write, no view is needed
        return writer
    writer.close()
    if not mends:
        raise lost_parts(place, tables)
    migrations.mend_read_model(place.path, place.url)
    return _connected(place)


def lost_parts(place: Place, names: Sequence[str]) -> JournalError:
    """The error of a read model some of whose tables or views are gone."""
    whose = shown(place.journal)
    return JournalError(
        f"{whose} has lost {listed(names)} of its read model, which holds nothing that the records don't: "
        f"`refold audit rebuild {shlex.quote(whose)}` makes it anew"
    )


def _connected(place: Place) -> AuditWriter:
    if place.path is None:
        from refold.projections.audit.postgres_writer import PostgresAuditWriter  # noqa: PLC0415

        assert place.url is not None
        return PostgresAuditWriter(place.url)
    from refold.projections.audit.sqlite_writer import SqliteAuditWriter  # noqa: PLC0415

    if place.is_own_file:
        migrations.ensure_read_model(place.path)
    return SqliteAuditWriter(place.path)


Watch = Callable[[], None]


def catch_up(
    place: Place,
    *,
    rebuilds: bool = False,
    on_start: Callable[[int], None] | None = None,
    on_record: Watch | None = None,
) -> list[Checkpoint]:
    """Project every stream of the journal up to its head; where each is then.

    Args:
        place: of the read model.
        rebuilds: build it anew, beside the one that is shown.
        on_start: told how many records there are to read.
        on_record: called after each.

    Raises:
        JournalCorrupt: a stream is gone that the read model knows records of.
        JournalError: the journal can't be read or the read model not written. Damage in the journal is no error: see the checkpoints.
    """
    check_nothing_lost(place.journal)  # else the read model would be made anew, of nothing
    with derived(place):
        return _caught_up(place, rebuilds=rebuilds, on_start=on_start, on_record=on_record)


def _caught_up(
    place: Place, *, rebuilds: bool, on_start: Callable[[int], None] | None, on_record: Watch | None
) -> list[Checkpoint]:
    reader = open_reader(place.journal)
    try:
        writer = open_writer(place, mends=rebuilds)
        try:
            return _catch_up_all(place, reader, writer, rebuilds=rebuilds, on_start=on_start, on_record=on_record)
        finally:
            reader.close()  # first: then the writer's connection may be the last one, and folds the WAL
            writer.close()
    finally:
        reader.close()


def _catch_up_all(
    place: Place,
    reader: JournalReader,
    writer: AuditWriter,
    *,
    rebuilds: bool,
    on_start: Callable[[int], None] | None,
    on_record: Watch | None,
) -> list[Checkpoint]:
    streams = list(dict.fromkeys([*streams_of(reader), *writer.live_streams()]))
    for stream in streams:
        keep_what_is_lost(place, reader, writer, stream, accepts_end=rebuilds)
    if on_start is not None:
        on_start(sum(_num_behind(reader, writer, stream, rebuilds=rebuilds) for stream in streams))
    for stream in streams:
        for _ in TrailingProjection(reader, writer, stream, rebuilds=rebuilds).catch_up(on_record=on_record):
            pass
    return [found for stream in streams if (found := writer.live(stream)) is not None]


def keep_what_is_lost(
    place: Place, reader: JournalReader, writer: AuditWriter, stream: str, *, accepts_end: bool = False
) -> None:
    """A read model of records of which a part is missing now isn't made anew: it's what is left of them.

    With `accepts_end` it is, if nothing but itself tells that records behind the stream's end are missing.

    Raises:
        JournalCorrupt: it would be.
    """
    if (live := writer.live(stream)) is None:
        return
    try:
        check_parts(reader, stream, live.position)
        if (end := reader.head(stream).position) < live.position:
            check_end(reader, stream)
            if not accepts_end:
                raise _ends_before(place, end, live.position)
    except JournalCorrupt as error:
        what = f"the read model has {live.position} records, and is left as it is: --as-is asks it"
        kept = JournalCorrupt(f"{error}; {what}", position=error.position, kind=error.kind)
        kept.place = error.place or getattr(reader, "place", "")
        raise kept from error


def _ends_before(place: Place, end: int, num_known: int) -> JournalCorrupt:
    journal = shown(place.journal)
    return JournalCorrupt(
        f"{journal} ends at {end}, but its read model was made of records up to {num_known}: its end was lost or an older copy took "
        f"its place; restore a newer one, or, to go on from there, `refold audit rebuild {shlex.quote(journal)}`",
        position=end,
        kind="truncated",
    )


def _num_behind(reader: JournalReader, writer: AuditWriter, stream: str, *, rebuilds: bool) -> int:
    live = writer.live(stream)
    start = 0 if live is None or rebuilds else live.position
    return abs(reader.head(stream).position - start)


def streams_of(reader: JournalReader) -> list[str]:
    """The journal's streams."""
    known = getattr(reader, "streams", None)
    return known() if known is not None else ["main"]


def follow(place: Place, on_batch: Callable[[Batch], None], pause: Callable[[], None]) -> None:
    """Project what there is, and then what comes, until `pause`, called whenever there's nothing to do, raises."""
    with derived(place):
        _follow(place, on_batch, pause)


def _follow(place: Place, on_batch: Callable[[Batch], None], pause: Callable[[], None]) -> None:
    reader = open_reader(place.journal)
    try:
        writer = open_writer(place)
        try:
            trailing: dict[str, TrailingProjection] = {}
            while True:
                for stream in streams_of(reader):
                    if stream not in trailing:
                        keep_what_is_lost(place, reader, writer, stream)
                    known = trailing.setdefault(stream, TrailingProjection(reader, writer, stream, max_rows=4_000))
                    for batch in known.catch_up():
                        on_batch(batch)
                pause()
        finally:
            reader.close()
            writer.close()
    finally:
        reader.close()


def forget_beside(journal: str) -> str:
    """Something was redacted in a journal: a read model in a file of its own must forget it too. The others have.

    Returns where it may still be, and why; empty if it's gone.
    """
    location = locate(journal)
    if location.kind != "segments":
        return ""
    place = place_of(journal)
    if place.path is None or not place.path.exists():
        return ""
    try:
        catch_up(place)
    except JournalError as error:
        return f"{place.path}, the read model: {error}"
    return ""
