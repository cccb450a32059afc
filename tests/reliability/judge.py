"""After each fault: what was acknowledged is there, nothing is there twice, and what is there is the history.

A campaign counts into a `Tally`. Three of its numbers must be 0 whatever happens; the others say what has been tried, and
that the campaign wasn't idle.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from refold.journal.errors import JournalError, JournalOwned
from refold.journal.record import Head
from refold.journal.store import JournalStore
from refold.journal.stores import open_reader, open_store
from tests.reliability.drivers import Place
from tests.reliability.history import NUM_RECORDS, WrongState, check_says_the_history, next_records

UNSEEN = Head(0, bytes(32), 0)


@dataclass
class Tally:
    """What one campaign on one store has seen."""

    row: str
    store: str
    cycles: int = 0
    wrong_state: int = 0
    lost: int = 0
    duplicates: int = 0
    seen: Counter[str] = field(default_factory=Counter)
    sites: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def is_clean(self) -> bool:
        return not (self.wrong_state or self.lost or self.duplicates)

    def blame(self, what: str, error: object) -> None:
        """Count a failure of the kind `wrong_state`, `lost` or `duplicates`, and keep the first few as examples."""
        setattr(self, what, getattr(self, what) + 1)
        if len(self.examples) < 20:
            self.examples.append(f"{what}: {error}")

    def add(self, part: "Tally") -> None:
        """Count in what a part of the same campaign has seen."""
        self.cycles += part.cycles
        self.wrong_state += part.wrong_state
        self.lost += part.lost
        self.duplicates += part.duplicates
        self.seen.update(part.seen)
        self.sites.update(part.sites)
        self.examples = (self.examples + part.examples)[:20]

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "seen": dict(sorted(self.seen.items())), "sites": dict(sorted(self.sites.items()))}


def judge(tally: Tally, place: Place, acknowledged: int, remembered: Head = UNSEEN, what: str = "") -> Head:
    """Reopen for reading: whole, the history, all that was acknowledged; returns the head (`remembered` if it failed)."""
    try:
        reader = open_reader(place.url)
        try:
            head = check_says_the_history(reader, place.stream, remembered)
        finally:
            reader.close()
    except (WrongState, AssertionError) as error:
        tally.blame("duplicates" if "at place" in str(error) else "wrong_state", f"{what}: {error}")
        return remembered
    except JournalError as error:
        tally.blame("lost", f"{what}: the journal isn't whole any more: {error}")
        return remembered
    if head.position < acknowledged:
        tally.blame("lost", f"{what}: {acknowledged} records were acknowledged, {head.position} are there")
    return head


def goes_on(tally: Tally, place: Place, acknowledged: int, what: str = "") -> Head:
    """Take the journal over as the next engine would, append to it, and judge it again."""
    try:
        store = open_store(place.url)
        try:
            head = continued(store, place.stream, acknowledged)
        finally:
            store.close()
    except JournalOwned:
        raise
    except (JournalError, AssertionError) as error:
        tally.blame("lost", f"{what}: the next engine can't go on: {error}")
        return UNSEEN
    return judge(tally, place, head.position, head, f"{what}, after going on")


def continued(store: JournalStore, stream: str, acknowledged: int) -> Head:
    """Open the stream and append what comes next in the history."""
    head = store.open_stream(stream)
    assert head.position >= acknowledged, f"{acknowledged} records were acknowledged, {head.position} are there"
    if head.position < NUM_RECORDS:
        head = store.append(stream, next_records(head, 2))
    return head
