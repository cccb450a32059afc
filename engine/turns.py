"""A turn: one command, from decision to effect.

Append before apply: if the append fails, nothing has happened. If the fold fails after it, the state is of no use any more.
"""

import time

from refold.engine.delivery import Trail
from refold.engine.messages import Ask, one_line, violation
from refold.engine.worker_seat import WorkerSeat
from refold.journal.errors import RefoldError
from refold.journal.events import Event, OutputDelivered, RequestFinished, SessionTurnEnded, StaleOutputConsumed
from refold.journal.writer import JournalWriter
from refold.projections.totals import Totals
from refold.scheduler.commands import CloseEngine, Command, RecordDigest
from refold.scheduler.decide import decide
from refold.scheduler.fold import fold_all
from refold.scheduler.state import State

_TOLD = (RequestFinished, SessionTurnEnded)


def is_awaited(event: Event) -> bool:
    """Whether a client gets something once the event is on disk."""
    if type(event) is OutputDelivered:
        return bool(event.token_ids)
    if type(event) is StaleOutputConsumed:
        return any(event.delivered)
    return type(event) in _TOLD


class FoldBroken(Exception):
    """What was recorded can't be folded: no command may be tried on this state any more. `found` says why."""

    def __init__(self, where: str, error: Exception) -> None:
        super().__init__(where)
        self.found = violation(where, error)


class Turns:
    """Takes turns, one after the other. Used by the engine's thread only, once that has started.

    Attributes:
        records_since_digest: records since the last recorded digest.
    """

    __slots__ = ("_seat", "_state", "_totals", "_trail", "_writer", "records_since_digest")

    def __init__(self, state: State, totals: Totals, seat: WorkerSeat, trail: Trail) -> None:
        self._writer: JournalWriter | None = None
        self.records_since_digest = 0
        self._state = state
        self._totals = totals
        self._seat = seat
        self._trail = trail

    def begin(self, writer: JournalWriter) -> None:
        """From now on there is a journal."""
        self._writer = writer

    @property
    def writer(self) -> JournalWriter:
        """The journal's."""
        assert self._writer is not None, "start the engine first"
        return self._writer

    def take(self, command: Command, ask: Ask | None = None) -> int | None:
        """Obey one command; returns the position of its record, None if there was nothing to do.

        Raises:
            Rejected, WorkerLost: the command can't be obeyed; nothing has happened.
            JournalError: the record can't be written.
            FoldBroken: it is written, and can't be folded.
        """
        events = decide(self._state, command)
        if not events:
            return None
        contents = None if ask is None else ask.contents()
        is_patient = ask is None or ask.is_patient
        in_haste = not is_patient or (self._trail.is_synced and any(map(is_awaited, events)))
        position = self.writer.append(events, time.time_ns(), contents, is_awaited=in_haste)
        try:
            fold_all(self._state, events)
            self._totals.observe_all(events)
            for event in events:
                self._seat.observe(self._state, event)
            self._trail.add(position, events, ask)
        except Exception as error:
            raise FoldBroken(f"record {position} ({type(command).__name__})", error) from error
        self.records_since_digest = 0 if isinstance(command, RecordDigest) else self.records_since_digest + 1
        return position

    def take_lawful(self, command: Command) -> int | None:
        """A turn in which an exception of `decide` is a broken law: the journal is closed in order, and the engine stops."""
        try:
            return self.take(command)
        except (RefoldError, FoldBroken):
            raise
        except Exception as error:
            found = violation(type(command).__name__, error)
            self.take(CloseEngine(reason=one_line(found)))
            raise found from error
