"""The journal read again, for whoever asks whether it is whole: a read model knows only what its records were when it was made."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from refold.engine.audit.ask import Answer
from refold.engine.audit.place import streams_of
from refold.engine.history.kept import check_all_there_is
from refold.journal.errors import JournalCorrupt
from refold.journal.store import JournalReader


class Reread(NamedTuple):
    """What reading a stream again has come to: how many records are archived and weren't read, and what is wrong, or None."""

    num_archived: int
    damage: JournalCorrupt | None


def read_again(reader: JournalReader, on_record: Callable[[], object]) -> dict[str, Reread]:
    """Every record that the journal itself keeps, checked against the one before; what came of it, by stream.

    A lost mark is no damage here: all that is there is whole, and whoever opens the journal is told.

    Raises:
        JournalError: it can't be read.
    """
    return {stream: _read_stream(reader, stream, on_record) for stream in streams_of(reader)}


def _read_stream(reader: JournalReader, stream: str, on_record: Callable[[], object]) -> Reread:
    try:
        return Reread(check_all_there_is(reader, stream, on_record).position, None)
    except JournalCorrupt as error:
        return Reread(0, error)


def as_it_is(answer: Answer, found: Mapping[str, Reread]) -> tuple[Answer, JournalCorrupt | None]:
    """The rows of the view `integrity` with the damage that was found now, and the first of it that the read model didn't know."""
    rows, news = [], None
    for row in answer.rows:
        facts = dict(zip(answer.columns, row, strict=True))
        damage = found[facts["stream"]].damage if facts["stream"] in found else None
        if damage is not None and facts["chain"] == "whole":
            known = {"chain": "damaged", "damage": str(damage), "damage_position": damage.position}
            facts |= {column: value for column, value in known.items() if column in facts}
            news = news or damage
        rows.append(tuple(facts.values()))
    return answer._replace(rows=iter(rows)), news
