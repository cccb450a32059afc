"""Delivery: from the outbox to whoever waits for it.

The engine's thread folds durable records into the outbox and rings the readers of what changed. It never waits for one: a
reader holds a cursor, not a queue, and takes whatever lies beyond it when it gets there. So a slow reader costs nothing,
tokens merge instead of piling up, and none can be lost or change places.

A ring is a callback that must return at once. One that fails loses its reader, and nobody else hears of it.
"""

import asyncio
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from refold.engine.logs import get_logger
from refold.engine.messages import Ask
from refold.journal.errors import RefoldError
from refold.journal.events import Event, FinishReason
from refold.projections.outbox import Outbox, Output, TurnEnd


class Reader:
    """One client's place in one request's output."""

    __slots__ = ("_ring", "_rung", "cursor", "output")

    def __init__(self, output: Output, cursor: int, ring: Callable[["Reader"], None]) -> None:
        """As if it had been rung: there may be something already, so it looks before it waits."""
        self.output = output
        self.cursor = cursor
        self._ring = ring
        self._rung = True

    def ring(self) -> None:
        """Tell the client, once until it has looked. Called with the delivery's lock held."""
        if not self._rung:
            self._rung = True
            self._ring(self)

    def answer(self) -> None:
        """The client looks. Called with the delivery's lock held."""
        self._rung = False


class Chunk:
    """What a reader found: tokens from output index `index` on, of one turn, and the end if this is it.

    `turn_reason` is set if this ends a session's turn, `finish_reason` if it ends the request; it can do both. `surprisals` are
    the numbers of these tokens, `prompt_surprisals` those of the prompt, beside the first token; None where nobody asked.
    """

    __slots__ = (
        "finish_reason",
        "index",
        "message",
        "prompt_surprisals",
        "stop_token_id",
        "surprisals",
        "token_ids",
        "turn_reason",
    )

    def __init__(
        self, index: int, token_ids: list[int], output: Output, turn: TurnEnd | None, *, is_last: bool
    ) -> None:
        self.index = index
        self.token_ids = token_ids
        self.turn_reason: FinishReason | None = None if turn is None else turn.reason
        self.finish_reason: FinishReason | None = output.finish_reason if is_last else None
        self.message = output.message if is_last else ""
        stop, told = index + len(token_ids), output.surprisals
        has_all = bool(told) and bool(token_ids) and all(each in told for each in range(index, stop))
        self.surprisals = [told[each] for each in range(index, stop)] if has_all else None
        self.prompt_surprisals = output.prompt_surprisals if index == 0 and token_ids else None
        ended = turn or (output if is_last else None)
        self.stop_token_id = None if ended is None else ended.stop_token_id


class Delivery:
    """The outbox, its readers, and the lock between the engine's thread and theirs.

    Attributes:
        outbox: for others only once the engine's thread has ended.
    """

    def __init__(self, outbox: Outbox, position: int = 0) -> None:
        """`outbox`: a fold of the records before `position`."""
        self.outbox = outbox
        self._position = position
        self._lock = threading.Lock()
        self._moved = threading.Condition(self._lock)
        self._readers: dict[int, list[Reader]] = {}
        self._failure: RefoldError | None = None

    def deliver(self, position: int, events: Iterable[Event]) -> None:
        """Fold the events of the record at `position`, which is durable, and ring the readers of what changed."""
        with self._lock:
            for handle in self.outbox.observe_all(events):
                for reader in tuple(self._readers.get(handle, ())):
                    self._ring(reader)
            self._position = position + 1
            self._moved.notify_all()

    def fail(self, cause: RefoldError) -> None:
        """The engine has stopped: every reader gets what is there, then the cause."""
        with self._lock:
            self._failure = self._failure or cause
            for reader in [reader for readers in self._readers.values() for reader in readers]:
                self._ring(reader)
            self._moved.notify_all()

    def reach(self, position: int) -> None:
        """Wait until the outbox has every record before `position`; never in the engine's thread, which brings them.

        Raises:
            RefoldError: it never will, because the engine has stopped.
        """
        with self._lock:
            self._moved.wait_for(lambda: self._position >= position or self._failure is not None)
            if self._position < position and self._failure is not None:
                raise self._failure.with_traceback(None)

    def find(self, request_id: str) -> Output | None:
        """The output of a request, if the outbox still has it."""
        with self._lock:
            return self.outbox.by_id.get(request_id)

    def unfinished(self, *, sessions: bool) -> list[str]:
        """The ids of requests that have not ended, in order of admission; of the sessions, or of all others."""
        with self._lock:
            live = [o for o in self.outbox.by_handle.values() if o.finish_reason is None]
        return [o.request_id for o in live if o.is_session == sessions]

    def attach(self, output: Output, cursor: int, ring: Callable[[Reader], None]) -> Reader:
        """A reader from output index `cursor` on. It isn't rung before it has looked, which it does at once."""
        reader = Reader(output, cursor, ring)
        with self._lock:
            self._readers.setdefault(output.handle, []).append(reader)
        return reader

    def detach(self, reader: Reader) -> None:
        """The reader has seen enough. Idempotent."""
        with self._lock:
            self._drop(reader)

    def take(self, reader: Reader) -> Chunk | None:
        """What lies beyond the reader's cursor; None if there is nothing yet.

        Raises:
            RefoldError: there is nothing more to come, because the engine has stopped.
        """
        with self._lock:
            reader.answer()
            output, start = reader.output, reader.cursor
            turn = _turn_end_after(output, start)
            token_ids = output.token_ids[start:] if turn is None else output.token_ids[start : turn.stop]
            goes_on = turn is not None and turn.stop < len(output.token_ids)
            is_last = output.finish_reason is not None and not goes_on
            if token_ids or is_last:
                reader.cursor += len(token_ids)
                if goes_on or (self._failure is not None and not is_last):
                    self._ring(reader)  # one ring told of these tokens and of what follows, which needs one of its own
                return Chunk(start, token_ids, output, turn, is_last=is_last)
            if self._failure is not None:
                raise self._failure.with_traceback(None)
            return None

    def prior(self, output: Output, index: int) -> list[int]:
        """The output tokens before index `index`, of the same turn."""
        with self._lock:
            return output.token_ids[output.start_of(output.turn_of(index)) : index]

    def has_turn(self, output: Output, index: int) -> bool:
        """Whether output index `index` belongs to a turn that the session has input for."""
        with self._lock:
            return output.turn_of(index) < output.num_turns

    def _ring(self, reader: Reader) -> None:
        try:
            reader.ring()
        except Exception as error:  # noqa: BLE001 - a client's trouble is that client's alone
            get_logger(request=reader.output.request_id).warning("reader_lost", error=repr(error))
            self._drop(reader)

    def _drop(self, reader: Reader) -> None:
        readers = self._readers.get(reader.output.handle, [])
        if reader in readers:
            readers.remove(reader)
        if not readers:
            self._readers.pop(reader.output.handle, None)


def _turn_end_after(output: Output, index: int) -> TurnEnd | None:
    """The end of the turn that output index `index` belongs to, if it is over."""
    if not output.turn_ends:
        return None
    turn = output.turn_of(index)
    return output.turn_ends[turn] if turn < len(output.turn_ends) else None


class _Record(NamedTuple):
    position: int
    events: list[Event]
    ask: Ask | None


class Trail:
    """Records on their way to the disk, each with the client that waits for it. Used by the engine's thread only.

    Records that have arrived are delivered, then their clients get their replies. Not `synced`, a record counts as arrived at once.

    Attributes:
        is_synced: whether anybody waits for the disk.
    """

    def __init__(self, delivery: Delivery, *, is_synced: bool) -> None:
        self._delivery = delivery
        self.is_synced = is_synced
        self._records: deque[_Record] = deque()

    def add(self, position: int, events: list[Event], ask: Ask | None) -> None:
        """A record was queued for the disk."""
        self._records.append(_Record(position, events, ask))
        if not self.is_synced:
            self.became_durable(position + 1)

    def became_durable(self, position: int) -> None:
        """Every record before `position` has arrived. Replies come last: whoever gets one finds what has arrived with it."""
        records, asks = self._records, list[Ask]()
        try:
            while records and records[0].position < position:
                self._delivery.deliver(records[0].position, records[0].events)
                if (ask := records.popleft().ask) is not None:
                    asks.append(ask)
        finally:
            for ask in asks:
                self.reply(ask)

    def reply(self, ask: Ask) -> None:
        """Tell a client that its command was obeyed."""
        ask.reply.set_result(None if ask.request_id is None else self._delivery.find(ask.request_id))

    def asks(self) -> list[Ask]:
        """The clients that still wait."""
        return [record.ask for record in self._records if record.ask is not None]


class LoopBell:
    """Wakes the readers of one event loop, with one call into the loop for all that changed at once."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._rung: list[asyncio.Event] = []

    def ring(self, event: asyncio.Event) -> None:
        """Set `event` in its loop; from any thread."""
        with self._lock:
            self._rung.append(event)
            if len(self._rung) > 1:
                return
        self._loop.call_soon_threadsafe(self._answer)

    def _answer(self) -> None:
        with self._lock:
            rung, self._rung = self._rung, []
        for event in rung:
            event.set()


_bells: "weakref.WeakValueDictionary[int, LoopBell]" = weakref.WeakValueDictionary()
_bells_lock = threading.Lock()


def bell_of_running_loop() -> LoopBell:
    """The bell of this thread's event loop. It lives as long as someone holds it, and its loop with it."""
    loop = asyncio.get_running_loop()
    with _bells_lock:
        bell = _bells.get(id(loop))
        if bell is None:
            bell = _bells[id(loop)] = LoopBell(loop)
        return bell
