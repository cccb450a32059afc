"""Whose records are these? The opening of a life names the stream that it was written to.

The chain tells what follows what, and nothing of the name under which a store keeps it: where names were changed or swapped, by hand or
by a backup that was put back under another one, every chain is whole. An engine that was asked for one of them would go on with
another's requests, or begin anew. So whoever begins to read asks the first record, and who finds none under his name asks those of
the other streams.

Journals that were begun before `EngineOpened` told the name say nothing until an engine opens them again.
"""

from collections.abc import Sequence
from itertools import islice

from refold.journal.archives import border_of
from refold.journal.codec import decode
from refold.journal.errors import JournalCorrupt, JournalError
from refold.journal.events import EngineOpened, Event
from refold.journal.feed import HeadsReader
from refold.journal.store import JournalReader

_MAX_ASKED = 256
"""So many streams are asked whether they were begun under a name that isn't there; a store of more is one of many by design."""


def check_name(events: Sequence[Event], position: int, stream: str) -> None:
    """See to it that a record of this stream wasn't written to one of another name. It opens a life with its first event, if it does.

    Raises:
        JournalCorrupt: it was; kind `renamed`.
    """
    told = _name_in(events)
    if told not in {"", stream}:
        raise JournalCorrupt(
            f"record {position} was written to stream {told!a}, and is kept as one of {stream!a} (renamed): names were changed "
            "or swapped, or a backup was put back under another one; give each stream the name that its records tell",
            position=position,
            kind="renamed",
        )


def check_own_name(reader: JournalReader, stream: str) -> None:
    """See to it that the stream was begun under its name, as far as its first record tells; an archive isn't opened for that.

    Raises:
        JournalCorrupt: it wasn't, kind `renamed`; or the record is damaged.
        JournalError: it can't be read.
    """
    check_name(_first_events(reader, stream), 0, stream)


def check_not_renamed(reader: JournalReader, stream: str) -> None:
    """See to it that no stream of another name was begun under this one, which has no record.

    A stream that can't be read is not asked: it's damaged, and somebody else's.

    Raises:
        JournalCorrupt: one was; kind `renamed`.
    """
    if not isinstance(reader, HeadsReader):
        return
    for other in islice((name for name in reader.heads() if name != stream), _MAX_ASKED):
        if _began_as(reader, other) == stream:
            raise JournalCorrupt(
                f"there is no stream {stream!a}, and the records of stream {other!a} were written to it (renamed): give it its name "
                "back, or write to another stream",
                position=0,
                kind="renamed",
            )


def _began_as(reader: JournalReader, stream: str) -> str:
    """The name in its first record; empty if there's none."""
    try:
        return _name_in(_first_events(reader, stream))
    except JournalError:
        return ""


def _name_in(events: Sequence[Event]) -> str:
    opened = events[0] if events else None
    return opened.stream if type(opened) is EngineOpened else ""


def _first_events(reader: JournalReader, stream: str) -> Sequence[Event]:
    """The events of a stream's first record, if it's no archive that has it."""
    if border_of(reader, stream).position:
        return ()
    return [event for record in reader.read(stream, 0, 1) for event in decode(record)]
