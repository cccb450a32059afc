"""Is what a journal itself keeps whole? Every record behind its archives is read and checked, for whoever is about to say so.

`refold verify` asks more: also of the archives, and whether the events make sense.
"""

from collections.abc import Callable

from refold.engine.history.replay import unheard
from refold.journal.archives import border_of
from refold.journal.ends import EndInDoubt, check_end
from refold.journal.naming import naming
from refold.journal.own_name import check_own_name
from refold.journal.record import Head
from refold.journal.store import JournalReader
from refold.journal.verify import Chain, Inspected, attestation_of


def check_kept(reader: JournalReader, stream: str, on_record: Callable[[], object] = unheard) -> tuple[Head, Head]:
    """Read the records that a stream keeps, each checked against the one before; the heads where they begin and end.

    They begin behind the archives, which aren't read. `on_record` is called after each.

    Raises:
        JournalCorrupt: one is damaged or gone, or the end isn't vouched for; names the first bad position and the kind.
        JournalError: they can't be read.
    """
    with naming(reader):
        if isinstance(reader, Inspected):
            reader.inspect()
        start = border_of(reader, stream)
        chain = Chain(start, reader.head(stream))
        chain.contents = attestation_of(reader, stream, start.position)
        for _ in chain.follow(reader.read(stream, start.position)):
            on_record()
        chain.settle()
        check_own_name(reader, stream)
        check_end(reader, stream)
    return start, chain.head


def check_all_there_is(reader: JournalReader, stream: str, on_record: Callable[[], object] = unheard) -> Head:
    """As `check_kept`, but a lost mark is no damage: all that is there is whole, and whoever opens the journal is told.

    Returns the head where the records begin that the stream keeps. Raises as `check_kept`.
    """
    try:
        return check_kept(reader, stream, on_record)[0]
    except EndInDoubt as doubt:
        if doubt.kind != "unmarked":
            raise
        return border_of(reader, stream)
