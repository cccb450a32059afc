"""A request that the journal doesn't have: the answer is "not found", with ids that it has."""

import contextlib
from collections.abc import Sequence

from refold.engine.cli.console import reading, streams_of
from refold.engine.cli.failures import NOT_SO, Complaint, damaged
from refold.engine.history.plain import listed
from refold.engine.history.relations import Names
from refold.journal.codec import events_among
from refold.journal.ends import EndInDoubt, check_end
from refold.journal.errors import JournalError
from refold.journal.events import RequestSubmitted
from refold.journal.store import DEFAULT_STREAM
from refold.journal.verify import verified_part


def unknown_request(request_id: str, similar: Sequence[str], journal: str, stream: str | None = None) -> Complaint:
    """The complaint about an id that a stream, or any of the journal's, doesn't have; `similar` are ids that it has.

    Of one that has lost its end nobody knows which it had: then the complaint is about that.
    """
    if (lost := _lost_end(journal, stream)) is not None:
        error, whose = lost
        return damaged(error, journal, whose)
    hint = f"it has {listed([repr(s) for s in similar])}" if similar else "it has no request at all"
    return Complaint(f"no request {request_id!r} in this journal", hint, NOT_SO)


def _lost_end(journal: str, stream: str | None) -> tuple[EndInDoubt, str] | None:
    """What is known to be lost of it, and of which stream; of one that can't be read, as where its read model alone was asked, nothing is."""
    with contextlib.suppress(JournalError, Complaint), reading(journal, tells_doubt=False) as reader:
        for each in streams_of(reader) if stream is None else [stream]:
            try:
                check_end(reader, each)
            except EndInDoubt as error:
                if error.kind == "truncated":
                    return error, each
    return None


def names_in(journal: str, stream: str = DEFAULT_STREAM) -> Names:
    """The ids of all requests of a stream. Reads and checks the journal; for an error, where nobody waits for speed.

    Raises:
        JournalError: it can't be read, or isn't what was written: then nobody knows which it had.
    """
    names = Names()
    with reading(journal, stream) as reader:
        records = verified_part(reader, stream, expect=reader.head(stream))
        for event in events_among(records, (RequestSubmitted,)):
            if isinstance(event, RequestSubmitted):
                names.observe(event)
    return names
