"""The outbox: what each client may have, from durable records only.

A trailing projection. The scheduler's state says what was decided; the outbox says what is safe to say aloud, so it is fed
a record only once that record can no longer be lost. Per request it keeps the output tokens in the order of their index
and how the request ended. Law L5 is asserted here, at the last door: indices are 0, 1, 2, ... without gap or repeat,
across preemption, cache reset and restart.

Finished requests stay for a client that comes back late, up to a bound; the oldest are forgotten first.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any, NamedTuple

from refold.journal.events import (
    ContentRedacted,
    Event,
    FinishReason,
    LogprobsDelivered,
    OutputDelivered,
    PromptLogprobsDelivered,
    RequestFinished,
    RequestSubmitted,
    SessionExtended,
    SessionTurnEnded,
    StaleOutputConsumed,
)
from refold.journal.surprisals import numbers_per_token

MAX_FINISHED = 10_000
_MAX_COLUMNS = 32


class TurnEnd(NamedTuple):
    """Where a session's turn ended: `stop` is the output index behind its last token."""

    stop: int
    reason: FinishReason
    stop_token_id: int | None


_by_stop = attrgetter("stop")
_handle, _token_ids, _finish_reason = attrgetter("handle"), attrgetter("token_ids"), attrgetter("finish_reason")


class Output:
    """What is durable of one request. Written by the outbox only; `finish_reason` is set last.

    Of a session, `num_turns` counts the inputs that it got, and `turn_ends` are the ends of those that are over; the last turn
    of a session that is closed meanwhile ends with the request, and isn't among them. `is_redacted`: its tokens were erased.

    `surprisals` holds the numbers of output tokens by index, where somebody asked, and `prompt_surprisals` those of the prompt,
    from its second token on; None until they are there. `prompt_token_ids` is kept only to tell which tokens these are.
    """

    __slots__ = (
        "finish_reason",
        "handle",
        "is_redacted",
        "is_session",
        "message",
        "num_prompt_tokens",
        "num_turns",
        "prompt_surprisals",
        "prompt_token_ids",
        "request_id",
        "stop_token_id",
        "surprisals",
        "token_ids",
        "turn_ends",
    )

    def __init__(self, event: RequestSubmitted) -> None:
        self.handle = event.handle
        self.request_id = event.request_id
        self.num_prompt_tokens = len(event.prompt_token_ids)
        self.token_ids: list[int] = []
        self.stop_token_id: int | None = None
        self.message = ""
        self.finish_reason: FinishReason | None = None
        self.is_session = event.resumable
        self.is_redacted = False
        self.num_turns = 1
        self.turn_ends: list[TurnEnd] = []
        self.surprisals: dict[int, list[int]] = {}
        self.prompt_surprisals: list[list[int]] | None = None
        asks = event.sampling.prompt_logprobs is not None
        self.prompt_token_ids: list[int] = list(event.prompt_token_ids) if asks else []

    def turn_of(self, index: int) -> int:
        """The number of the turn that output index `index` belongs to, or will."""
        return bisect_right(self.turn_ends, index, key=_by_stop)

    def start_of(self, turn: int) -> int:
        """The output index of the first token of turn number `turn`."""
        return self.turn_ends[turn - 1].stop if turn else 0


class Columns:
    """Tokens of steps that had the same requests, which are yet to be handed out: a column for each step.

    A token at a time costs five times as much as many of them behind each other. `handles` is empty where nothing is kept;
    `indices` are the output indices that the next column must have.
    """

    __slots__ = ("handles", "indices", "texts", "tokens")

    def __init__(self) -> None:
        self.handles: list[int] = []
        self.indices: list[int] = []
        self.texts: list[list[int]] = []
        self.tokens: list[list[int]] = []

    def has_room_for(self, event: OutputDelivered) -> bool:
        """Whether its tokens are the next column."""
        return (
            event.handles == self.handles
            and event.first_output_indices == self.indices
            and len(event.token_ids) == len(self.texts)
            and len(self.tokens) < _MAX_COLUMNS
        )

    def add(self, token_ids: list[int]) -> None:
        """The next column."""
        self.tokens.append(token_ids)
        self.indices = [index + 1 for index in self.indices]

    def hand_out(self) -> None:
        """To each request its tokens; nothing is kept then."""
        for text, row in zip(self.texts, zip(*self.tokens, strict=True), strict=True):
            text.extend(row)
        self.handles, self.indices, self.texts, self.tokens = [], [], [], []


class Outbox:
    """The outputs of every unfinished request and of the last `max_finished` finished ones.

    What `absorb` has kept is handed out before anybody looks: `by_handle` and `by_id` are always up to date, and an output that
    one has got from them is as old as the look.
    """

    __slots__ = ("_by_handle", "_by_id", "_columns", "_finished", "_max_finished")

    def __init__(self, max_finished: int = MAX_FINISHED) -> None:
        assert max_finished >= 0, max_finished
        self._by_handle: dict[int, Output] = {}
        self._by_id: dict[str, Output] = {}
        self._columns = Columns()
        self._finished: deque[Output] = deque()
        self._max_finished = max_finished

    @property
    def by_handle(self) -> dict[int, Output]:
        """Handle -> output, in order of admission."""
        if self._columns.handles:
            self._columns.hand_out()
        return self._by_handle

    @property
    def by_id(self) -> dict[str, Output]:
        """A client's id -> the output of the last request that had it."""
        if self._columns.handles:
            self._columns.hand_out()
        return self._by_id

    def observe(self, event: Event) -> list[Output]:
        """Fold one durable event; returns the outputs that changed. Most events change none."""
        observer = _OBSERVERS.get(type(event))
        return [] if observer is None else observer(self, event)

    def observe_all(self, events: Iterable[Event]) -> dict[int, Output]:
        """Fold durable events in order; returns the outputs that changed, by handle."""
        changed: dict[int, Output] = {}
        for event in events:
            observer = _OBSERVERS.get(type(event))
            if observer is not None:
                outputs = observer(self, event)
                changed.update(zip(map(_handle, outputs), outputs, strict=True))
        return changed

    def absorb(self, events: Iterable[Event]) -> None:
        """Fold durable events in order, where nobody waits for an output: the tokens of a steady decode are kept by columns."""
        for event in events:
            observer = _OBSERVERS.get(type(event))
            if observer is Outbox._delivered and not event.counts:  # type: ignore[attr-defined]
                self._keep(event)  # type: ignore[arg-type]
            elif observer is not None:
                observer(self, event)

    def _keep(self, event: OutputDelivered) -> None:
        """A column more, behind those of the same requests; where it isn't that, it is the first, if it fits their outputs."""
        if not self._columns.has_room_for(event):
            outputs = self._expecting(event.handles, event.first_output_indices, event.token_ids)
            self._columns.handles, self._columns.indices = event.handles, event.first_output_indices
            self._columns.texts = list(map(_token_ids, outputs))
        self._columns.add(event.token_ids)

    def _submitted(self, event: RequestSubmitted) -> list[Output]:
        assert event.handle not in self.by_handle, event.handle
        output = self.by_handle[event.handle] = self.by_id[event.request_id] = Output(event)
        return [output]

    def _delivered(self, event: OutputDelivered) -> list[Output]:
        if not event.counts:
            return self._append_each(event.handles, event.first_output_indices, event.token_ids)
        assert sum(event.counts) == len(event.token_ids), event.step
        changed, offset = [], 0
        for handle, count, index in zip(event.handles, event.counts, event.first_output_indices, strict=True):
            if count:
                changed.append(self._append(handle, index, event.token_ids[offset : offset + count]))
                offset += count
        return changed

    def _stale_consumed(self, event: StaleOutputConsumed) -> list[Output]:
        changed, offset = [], 0
        columns = zip(event.handles, event.counts, event.first_output_indices, event.delivered, strict=True)
        for handle, count, index, delivered in columns:
            if delivered and count:
                changed.append(self._append(handle, index, event.token_ids[offset : offset + count]))
            offset += count
        return changed

    def _logprobs(self, event: LogprobsDelivered) -> list[Output]:
        start = 0
        columns = zip(event.handles, event.first_output_indices, event.counts, event.num_top, strict=True)
        for handle, first, count, num_top in columns:
            size = numbers_per_token(num_top)
            stop = start + count * size
            told = _by_token(event.surprisals[start:stop], size)
            self.by_handle[handle].surprisals |= zip(range(first, first + count), told, strict=False)
            start = stop
        return []

    def _prompt_logprobs(self, event: PromptLogprobsDelivered) -> list[Output]:
        output = self.by_handle[event.handle]
        output.prompt_surprisals = _by_token(event.surprisals, numbers_per_token(event.num_top))
        return [output]

    def _append_each(self, handles: list[int], indices: list[int], token_ids: list[int]) -> list[Output]:
        """`_append` of one token to each, for the steady decode, where it is most of what delivery costs: column by column."""
        outputs = self._expecting(handles, indices, token_ids)
        deque(map(list.append, map(_token_ids, outputs), token_ids), maxlen=0)
        return outputs

    def _expecting(self, handles: list[int], indices: list[int], token_ids: list[int]) -> list[Output]:
        """The outputs that get one token each, after it is known that each is at the index that its token has."""
        outputs = list(map(self.by_handle.__getitem__, handles))
        if [len(output.token_ids) for output in outputs] != indices or any(map(_finish_reason, outputs)):
            for output, index in zip(outputs, indices, strict=True):
                self._append(output.handle, index, [])  # names the first that is wrong
        assert len(token_ids) == len(set(handles)) == len(outputs), (len(handles), len(token_ids))
        return outputs

    def _append(self, handle: int, index: int, token_ids: list[int]) -> Output:
        output = self.by_handle[handle]
        assert output.finish_reason is None, f"a token for {output.request_id!r} after its end"
        assert index == len(output.token_ids), f"{output.request_id!r}: index {index}, expected {len(output.token_ids)}"
        output.token_ids += token_ids
        return output

    def _session_extended(self, event: SessionExtended) -> list[Output]:
        self.by_handle[event.handle].num_turns += 1
        return []

    def _turn_ended(self, event: SessionTurnEnded) -> list[Output]:
        output = self.by_handle[event.handle]
        stop = len(output.token_ids)
        assert event.num_output_tokens == stop - output.start_of(len(output.turn_ends)), (output.request_id, stop)
        output.turn_ends.append(TurnEnd(stop, event.reason, event.stop_token_id))
        return [output]

    def _request_finished(self, event: RequestFinished) -> list[Output]:
        output = self.by_handle[event.handle]
        assert output.finish_reason is None, f"{output.request_id!r} finished twice"
        assert event.num_output_tokens == len(output.token_ids), (output.request_id, event.num_output_tokens)
        output.stop_token_id = event.stop_token_id
        output.message = event.message
        output.finish_reason = event.reason
        self._finished.append(output)
        if len(self._finished) > self._max_finished:
            self._forget(self._finished.popleft())
        return [output]

    def _redacted(self, event: ContentRedacted) -> list[Output]:
        outputs = [self.by_handle[handle] for handle in event.handles if handle in self.by_handle]
        for output in outputs:
            assert output.finish_reason is not None, f"{output.request_id!r} is redacted before its end"
            output.is_redacted = True
            output.token_ids = []
            output.surprisals, output.prompt_surprisals, output.prompt_token_ids = {}, None, []
        return outputs

    def _forget(self, output: Output) -> None:
        del self.by_handle[output.handle]
        if self.by_id.get(output.request_id) is output:
            del self.by_id[output.request_id]


def _by_token(numbers: list[int], size: int) -> list[list[int]]:
    return [numbers[start : start + size] for start in range(0, len(numbers), size)]


_OBSERVERS: dict[type[Event], Callable[[Outbox, Any], list[Output]]] = {
    RequestSubmitted: Outbox._submitted,  # noqa: SLF001 - the table of this module's own methods
    OutputDelivered: Outbox._delivered,  # noqa: SLF001
    StaleOutputConsumed: Outbox._stale_consumed,  # noqa: SLF001
    LogprobsDelivered: Outbox._logprobs,  # noqa: SLF001
    PromptLogprobsDelivered: Outbox._prompt_logprobs,  # noqa: SLF001
    SessionExtended: Outbox._session_extended,  # noqa: SLF001
    SessionTurnEnded: Outbox._turn_ended,  # noqa: SLF001
    RequestFinished: Outbox._request_finished,  # noqa: SLF001
    ContentRedacted: Outbox._redacted,  # noqa: SLF001
}
