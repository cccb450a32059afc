"""Redactions on their way into a copy: what the source has erased is erased from the copy too, with the record that says so.

Contents that were copied before they were redacted are in the target; so are those that were read before, and come along with their
redaction. What the source has now is what counts: of several redactions of one record, that's what the last one left. Record and
erasure are one transaction of the target, so that no copy has a redaction without its erasure, whenever it's killed.
"""

from collections.abc import Callable, Sequence

from refold.journal.contents import attested_by
from refold.journal.errors import Rejected
from refold.journal.record import Head, Record
from refold.journal.replicas import ReplicaStore
from refold.journal.store import Erased, ErasingStore, JournalReader


def append_copied(
    source: JournalReader,
    target: ReplicaStore,
    stream: str,
    records: Sequence[Record],
    on_erased: Callable[[Erased], None] = lambda _: None,
) -> Head:
    """Append records of the source, and erase what they say was redacted; `on_erased` is called after each such record.

    Raises:
        Rejected: something is to be erased, and the target can't.
        As `append`.
    """
    head, waiting = target.head(stream), list[Record]()
    for record in records:
        if attested_by(record):
            head = _append(target, stream, waiting, head)
            waiting = []
            if contents := _to_erase(source, target, stream, record):
                erased = _erasing(target, record).erase_content(stream, [record], contents)
                on_erased(erased)
                head = erased.head
                continue
        waiting.append(record)
    return _append(target, stream, waiting, head)


def _append(target: ReplicaStore, stream: str, records: Sequence[Record], head: Head) -> Head:
    return target.append(stream, records) if records else head


def _to_erase(source: JournalReader, target: JournalReader, stream: str, redaction: Record) -> dict[int, bytes | None]:
    """What the source has in the place of contents that the target still has as they were, by position."""
    contents: dict[int, bytes | None] = {}
    for position in sorted({position for position, _ in attested_by(redaction) if position < redaction.position}):
        there = next(iter(target.read(stream, position, position + 1)), None)
        for record in source.read(stream, position, position + 1):
            if there is not None and there.content != record.content:
                contents[position] = record.content
    return contents


def _erasing(target: ReplicaStore, redaction: Record) -> ErasingStore:
    if not isinstance(target, ErasingStore):
        raise Rejected(
            f"record {redaction.position} says that content was redacted, which a {type(target).__name__} can't erase: copy to a new "
            "journal, which gets what is left of it"
        )
    return target
