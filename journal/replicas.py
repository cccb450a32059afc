"""Replicas: a stream that is a copy, record for record, of one that an engine wrote elsewhere.

An engine's records are all of the one engine epoch that opening gave it. A copy's are whatever they were, so a stream can also
be opened as a replica: its epoch isn't raised, and `append` takes records that were sealed by others, each checked to
continue the chain, none of an older epoch than the one before. Position, epoch, time and hash stay what they are.

A replica that is complete is a journal like any other: whoever opens it next as an engine gets the next epoch.
"""

from typing import Protocol, runtime_checkable

from refold.journal.record import Head
from refold.journal.store import DEFAULT_STREAM, JournalStore


@runtime_checkable
class ReplicaStore(JournalStore, Protocol):
    """A store that also takes records made elsewhere."""

    def open_replica(self, stream: str = DEFAULT_STREAM) -> Head:
        """Take the stream over for copying: the head as it is. From here on, `append` here takes records of any epoch.

        The stream may have records already; the caller sees to it that they are the same ones.

        Raises:
            JournalOwned: a live engine holds the stream.
        """
        ...
