"""What can be wrong with a journal in spite of which its records are read: told to whoever reads, and refused by whoever would write.

A row that only names a stream's end, a table that only spares work, rows that are of no stream: none of it is what a record's hash
covers. Whoever reads goes on, and says so; `verify` reports it once the records were read. An engine refuses to open the journal, for
it would build on what is damaged. `refold copy` makes a journal of the records without it.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

from refold.journal.errors import JournalCorrupt
from refold.journal.store import JournalReader

HARMLESS = frozenset({"unindexed", "inserted"})
"""Kinds of damage beside the records that leave each record where it is. What else is told here concerns records: `deleted`, `edited`."""


class DamageBeside(JournalCorrupt):
    """Something beside the records isn't as it was written.

    Attributes:
        stream: the only stream that it concerns; None if that isn't known, or if it's all of them.
    """

    def __init__(self, message: str, *, kind: str, position: int = 0, stream: str | None = None) -> None:
        super().__init__(message, position=position, kind=kind)
        self.stream = stream


@runtime_checkable
class TellingBeside(Protocol):
    """A reader that can say at a glance what is wrong beside the records."""

    def beside(self) -> Sequence[DamageBeside]:
        """What is; the worst first, and nothing of a journal as it should be."""
        ...


def damage_beside(reader: JournalReader) -> Sequence[DamageBeside]:
    """What is wrong beside the records of a journal; nothing, where the reader doesn't know."""
    return reader.beside() if isinstance(reader, TellingBeside) else ()


def check_streams_there(reader: JournalReader) -> None:
    """See to it that no stream is gone as a whole, for whoever is about to take all that are there for all.

    Raises:
        DamageBeside: one is; kind `deleted`.
    """
    for damage in damage_beside(reader):
        if damage.kind == "deleted":
            raise damage


def check_harmless(reader: JournalReader) -> None:
    """See to it that nothing is wrong that no record shows, and that leaves each where it is.

    Raises:
        DamageBeside: something is; of a kind in `HARMLESS`.
    """
    for damage in damage_beside(reader):
        if damage.kind in HARMLESS:
            raise damage


def check_row(reader: JournalReader, stream: str) -> None:
    """See to it that a stream has no records behind the end that its row names.

    Raises:
        DamageBeside: it has; kind `edited`.
    """
    for damage in damage_beside(reader):
        if damage.kind == "edited" and damage.stream == stream:
            raise damage


def worst_first(damage: Iterable[DamageBeside]) -> list[DamageBeside]:
    """What concerns records, then what doesn't."""
    return sorted(damage, key=lambda each: each.kind in HARMLESS)
