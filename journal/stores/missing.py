"""Records that a table should have and hasn't, where no later record shows it: a read that finds nothing says so.

A gap among the records that are read is the verifier's to name. One before all of them may be an archive that nobody lists any more.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from refold.journal.archives import ArchivedReader
from refold.journal.errors import bad_record
from refold.journal.naming import name, place_of_reader
from refold.journal.snapshots import SnapshotReader

_FOREVER = 2**63 - 1
Fetch = Callable[[int, int, int], Sequence[Sequence[Any]]]


class KeepingReader(SnapshotReader, ArchivedReader, Protocol):
    """A reader of a journal that may have snapshots and archives."""


def check_there(reader: KeepingReader, stream: str, fetch: Fetch, start: int, page: Sequence[Sequence[Any]]) -> None:
    """See to it that a first page from position `start` on has that record, unless the stream ends before it.

    Raises:
        JournalCorrupt: it is gone, and the page can't show it or it was archived; kind `deleted`.
    """
    first = page[0][0] if page else _first(fetch, start)
    if first is None or first <= start:
        return
    archives = reader.archives(stream)
    if archives and archives[-1].stop > start:  # it was archived while somebody read
        return
    is_border = any(entry.position == first for entry in reader.snapshots(stream))
    if page and (archives or not is_border):
        return
    is_lost = not archives and _first(fetch, 0) == first
    lost = ", and no list of archives is there: see `refold archive --adopt FOLDER`" if is_lost else ""
    raise name(bad_record(start, "deleted", f"is not there; the next is {first}{lost}"), place_of_reader(reader))


def _first(fetch: Fetch, start: int) -> int | None:
    page = fetch(start, _FOREVER, 1)
    return page[0][0] if page else None
