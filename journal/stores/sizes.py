"""How much room a journal takes, without reading it."""

from pathlib import Path
from typing import NamedTuple

from refold.journal.errors import JournalError
from refold.journal.stores.location import Location, locate


class Sizes(NamedTuple):
    """Bytes of a whole store, all its streams: `live` where an engine writes, `sealed` where nothing changes any more."""

    live: int
    sealed: int = 0

    @property
    def all(self) -> int:
        """Both."""
        return self.live + self.sealed


def sizes_of(url: str) -> Sizes:
    """The room that the store at `url` takes; archives that lie elsewhere are not in it.

    Raises:
        JournalError: it can't be looked at.
    """
    location = locate(url)
    try:
        return _SIZES[location.kind](location)
    except OSError as error:
        raise JournalError(
            f"cannot look at {location.path}: {error.strerror}; check the file and its folder"
        ) from error


def _sqlite(location: Location) -> Sizes:
    assert location.path is not None
    beside = (location.path.with_name(location.path.name + suffix) for suffix in ("", "-wal"))
    return Sizes(sum(_file(path) for path in beside))


def _segments(location: Location) -> Sizes:
    assert location.path is not None
    files = [path for path in location.path.rglob("*") if path.is_file()]
    sealed = sum(_file(path) for path in files if path.suffix == ".sealed")
    return Sizes(sum(_file(path) for path in files) - sealed, sealed)


def _postgresql(location: Location) -> Sizes:
    from refold.journal.stores.postgres import open_database  # noqa: PLC0415
    from refold.journal.stores.tables import metadata  # noqa: PLC0415

    database = open_database(location.url, busy_timeout_s=5.0, patience_s=0.0, read_only=True)
    try:
        tables = ", ".join(f"to_regclass('{name}')" for name in metadata.tables)
        sql = f"SELECT sum(pg_total_relation_size(t)) FROM unnest(ARRAY[{tables}]) AS t"  # noqa: S608 - our own names
        return Sizes(int(database.query(sql, ())[0][0] or 0))
    finally:
        database.close()


def _memory(location: Location) -> Sizes:
    raise JournalError(f"{location.url!r} takes no room that could be looked at: name a journal file")


def _file(path: Path) -> int:
    """Its bytes; 0 if it is gone, or was never there."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


_SIZES = {"sqlite": _sqlite, "segments": _segments, "postgresql": _postgresql, "memory": _memory}
