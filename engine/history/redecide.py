"""Re-deciding: would today's code have decided what the journal says? Law L12.

For each record, the command that led to it is recalled, `decide` is asked again on the state before it, and the answer is
compared with the record. The state is that of the recorded events, so the first difference is not followed by differences
that are only its consequences.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from refold.engine.history.causes import Cause, cause_of_decision
from refold.engine.history.differences import Difference, event_differences
from refold.engine.history.recall import Forgotten, command_of
from refold.engine.history.replay import replay, unheard
from refold.journal.events import Event
from refold.journal.record import Record
from refold.journal.store import DEFAULT_STREAM, JournalReader
from refold.scheduler.commands import Command, ScheduleStep
from refold.scheduler.decide import decide
from refold.scheduler.state import State


class Divergence(NamedTuple):
    """A record that today's code would not have made. `decided` is what it would have; `error` if it refuses."""

    position: int
    command: Command
    recorded: Sequence[Event]
    decided: Sequence[Event]
    cause: Cause
    error: str = ""

    @property
    def differences(self) -> list[Difference]:
        """What isn't alike: `left` is recorded, `right` decided."""
        return event_differences(self.recorded, self.decided)

    @property
    def words(self) -> str:
        """One line: the command, and the first thing that differs."""
        order = type(self.command).__name__
        if self.error:
            return f"{order} was obeyed, today it is refused: {self.error}"
        first = self.differences[0].words("recorded", "decided today") if self.differences else "in nothing told"
        why = f"; {self.cause.words}" if self.cause.words else ""
        return f"{order} would be decided otherwise: {first}{why}"


class Decider:
    """Asks `decide` again, record after record. `num_decided` and `num_forgotten` count the records.

    What a step schedules depends on which prefixes are cached, and so on the tokens of everybody before. Where some of these were erased
    since (`State.unknown`), a step that comes out otherwise is no divergence: nobody can tell any more.
    """

    def __init__(self) -> None:
        self.num_decided = 0
        self.num_forgotten = 0

    def check(self, state: State, record: Record, events: Sequence[Event]) -> Divergence | None:
        """Decide one record again; `state` is the one before it."""
        try:
            command = command_of(events, state)
        except Forgotten:
            self.num_forgotten += 1
            return None
        divergence = self._asked(state, record, command, events)
        if divergence is not None and state.unknown and isinstance(command, ScheduleStep):
            self.num_forgotten += 1
            return None
        self.num_decided += 1
        return divergence

    def _asked(self, state: State, record: Record, command: Command, events: Sequence[Event]) -> Divergence | None:
        try:
            decided = decide(state, command)
        except Exception as error:  # noqa: BLE001 - whatever it raises today, it didn't when this was recorded
            message = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            cause = cause_of_decision(events, [], state, command)
            return Divergence(record.position, command, events, [], cause, message)
        if decided == events:
            return None
        cause = cause_of_decision(events, decided, state, command)
        return Divergence(record.position, command, events, decided, cause)


def first_divergence(
    reader: JournalReader, stream: str = DEFAULT_STREAM, on_record: Callable[[], object] = unheard
) -> Divergence | None:
    """The first record that today's code would not have made; None if it would have made them all.

    Raises:
        JournalCorrupt, Contradiction: as `replay`.
    """
    return next(divergences(reader, stream, on_record), None)


def divergences(
    reader: JournalReader, stream: str = DEFAULT_STREAM, on_record: Callable[[], object] = unheard
) -> Iterator[Divergence]:
    """Every record that today's code would not have made.

    Raises:
        JournalCorrupt, Contradiction: as `replay`.
    """
    decider, found = Decider(), list[Divergence]()

    def judge(record: Record, events: Sequence[Event], state: State) -> None:
        divergence = decider.check(state, record, events)
        if divergence is not None:
            found.append(divergence)

    for _ in replay(reader, stream, expect=reader.head(stream), before=judge):
        on_record()
        yield from found
        found.clear()
