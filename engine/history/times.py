"""Positions by time, found by halving: a few records are read, not the journal."""

from bisect import bisect_left

from refold.journal.errors import JournalCorrupt
from refold.journal.record import Record
from refold.journal.store import DEFAULT_STREAM, JournalReader


def position_of_time(
    reader: JournalReader, time_ns: int, stream: str = DEFAULT_STREAM, length: int | None = None
) -> int:
    """The position of the last record made at or before a time; -1 if there is none. Assumes that the clock went forward.

    `length` is how many records there are, if that is known.

    Raises:
        JournalCorrupt: a record is missing.
    """
    count = reader.head(stream).position if length is None else length
    return bisect_left(range(count), True, key=lambda p: record_at(reader, p, stream).time_ns > time_ns) - 1


def record_at(reader: JournalReader, position: int, stream: str = DEFAULT_STREAM) -> Record:
    """The record at a position.

    Raises:
        JournalCorrupt: it is missing.
    """
    for record in reader.read(stream, position, position + 1):
        return record
    raise JournalCorrupt(f"there is no record {position}; restore a backup", position=position, kind="deleted")
