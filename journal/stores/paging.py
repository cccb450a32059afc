"""Reading a stream from a table, one page of records after the other.

Records never change and positions are dense, so a reader needs no long snapshot: each page is read in a transaction of its own, and
nothing is held that the writer or the database's housekeeping would wait for.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

_PAGE_RECORDS = 256
_FOREVER = 2**63 - 1
_Row = TypeVar("_Row", bound=Sequence[Any])


def in_pages(
    fetch: Callable[[int, int, int], Sequence[_Row]], start: int, stop: int | None
) -> Iterator[Sequence[_Row]]:
    """Rows that begin with their position, of records start <= p < stop: `fetch(start, stop, how many at most)` reads them."""
    end = _FOREVER if stop is None else stop
    while start < end:
        page = fetch(start, end, _PAGE_RECORDS)
        yield page
        if len(page) < _PAGE_RECORDS:
            return
        start = page[-1][0] + 1
