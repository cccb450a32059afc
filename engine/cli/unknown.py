"""A request that the journal doesn't have: the answer is "not found", with ids that it has."""

from collections.abc import Sequence

from refold.engine.cli.console import reading
from refold.engine.cli.failures import NOT_SO, Complaint
from refold.engine.history.plain import listed
from refold.engine.history.relations import Names
from refold.journal.codec import events_among
from refold.journal.events import RequestSubmitted
from refold.journal.store import DEFAULT_STREAM


def unknown_request(request_id: str, similar: Sequence[str]) -> Complaint:
    """The complaint about an id that the journal doesn't have; `similar` are ids that it has."""
    hint = f"it has {listed([repr(s) for s in similar])}" if similar else "it has no request at all"
    return Complaint(f"no request {request_id!r} in this journal", hint, NOT_SO)


def names_in(journal: str, stream: str = DEFAULT_STREAM) -> Names:
    """The ids of all requests of a stream. Reads the journal; for an error, where nobody waits for speed.

    Raises:
        JournalError: it can't be read.
    """
    names = Names()
    with reading(journal, stream) as reader:
        for event in events_among(reader.read(stream), (RequestSubmitted,)):
            if isinstance(event, RequestSubmitted):
                names.observe(event)
    return names
