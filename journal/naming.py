"""Which journal an error is about: whoever has several must be told.

A record's error names the record; it's raised where nobody knows of what journal. Whoever has the reader names it on the way out.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar, runtime_checkable

from refold.journal.errors import InvariantViolation, JournalCorrupt, RefoldError

E = TypeVar("E", bound=RefoldError)


@runtime_checkable
class Placed(Protocol):
    """A reader or store that knows where its journal is."""

    @property
    def place(self) -> str:
        """As messages call it: its path, or its URL without a password."""
        ...


def place_of_reader(reader: object) -> str:
    """Where the journal of a reader or store is; of what kind it is, if it can't tell."""
    return reader.place if isinstance(reader, Placed) else f"a {type(reader).__name__}"


@contextmanager
def naming(reader: object) -> Iterator[None]:
    """Whatever is wrong with the journal here is said of the journal of this reader or store."""
    try:
        yield
    except (JournalCorrupt, InvariantViolation) as error:
        name(error, place_of_reader(reader))
        raise


def name(error: E, place: str) -> E:
    """The same error, which says where the journal is, unless it did so before."""
    if not error.place:
        error.place = place
        if place not in str(error):
            error.args = (f"{place}: {error}", *error.args[1:])
    return error
