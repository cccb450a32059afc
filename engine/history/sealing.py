"""Sealing: a capsule's records get a chain of their own, so that a store takes them."""

import struct
from collections.abc import Iterable, Iterator

from refold.engine.history.capsule import CapsuleRecord
from refold.journal.codec import encode
from refold.journal.errors import JournalCorrupt
from refold.journal.record import EMPTY_HEAD, Record, head_after, seal


def sealed_records(records: Iterable[CapsuleRecord]) -> Iterator[Record]:
    """The records of a journal that says what the capsule says.

    Raises:
        JournalCorrupt: one can't be a journal's.
    """
    head = EMPTY_HEAD
    for each in records:
        if each.epoch < head.engine_epoch:
            raise JournalCorrupt(
                f"record {head.position} of the capsule is of engine epoch {each.epoch}, the one before of {head.engine_epoch}",
                position=head.position,
                kind="reordered",
            )
        try:
            record = seal(head._replace(engine_epoch=each.epoch), each.time_ns, *encode(each.events, "capsule"))
        except (struct.error, ValueError, TypeError, OverflowError) as error:
            raise JournalCorrupt(
                f"record {head.position} of the capsule can't be a journal's: {error}",
                position=head.position,
                kind="undecodable",
            ) from error
        head = head_after(record)
        yield record
