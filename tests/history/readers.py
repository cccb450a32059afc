"""A journal that is a list of records, and counts how many of them were read."""

from collections.abc import Iterator, Sequence

from refold.journal.record import EMPTY_HEAD, Head, Record, head_after


class ListReader:
    """The reading half of a store."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.records = records
        self.num_read = 0

    def read(self, stream: str = "main", start: int = 0, stop: int | None = None) -> Iterator[Record]:
        for record in self.records[start:stop]:
            self.num_read += 1
            yield record

    def head(self, stream: str = "main") -> Head:
        return head_after(self.records[-1])._replace(position=len(self.records)) if self.records else EMPTY_HEAD

    def close(self) -> None:
        pass
