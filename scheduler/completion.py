"""Completion: a step's output becomes facts.

Each entry is matched with the epoch that asked for it. Current: its tokens are delivered. Stale: they are delivered or
dropped by the policy of the bump that made them stale, and no scheduling counter hears of it. A delivered stale token may
finish a preempted request.

A worker is not trusted. An answer in the wrong shape, for the wrong position or with a token that doesn't exist is a
`WorkerLost`: the shell replaces the worker, and its requests compute again.
"""

from itertools import accumulate
from operator import le, sub

from refold.journal.errors import Rejected, WorkerLost
from refold.journal.events import (
    Event,
    FinishReason,
    LogitsRecorded,
    OutputDelivered,
    RequestFinished,
    SessionTurnEnded,
    StaleOutputConsumed,
)
from refold.projections.requests import Request
from refold.projections.steps import InFlightStep
from refold.scheduler.commands import CompleteStep
from refold.scheduler.logprobs import with_logprobs
from refold.scheduler.state import State


class _Delivered:
    """Columns of an `OutputDelivered` in the making."""

    __slots__ = ("accepted", "counts", "first_output_indices", "handles", "token_ids")

    def __init__(self) -> None:
        self.handles: list[int] = []
        self.counts: list[int] = []
        self.token_ids: list[int] = []
        self.first_output_indices: list[int] = []
        self.accepted: list[int] = []


class _Stale(_Delivered):
    """Columns of a `StaleOutputConsumed` in the making."""

    __slots__ = ("delivered", "num_tokens")

    def __init__(self) -> None:
        super().__init__()
        self.num_tokens: list[int] = []
        self.delivered: list[bool] = []


def complete_step(state: State, command: CompleteStep) -> list[Event]:
    """The facts of a step that came back."""
    step = _expected_step(state, command)
    _check_shape(step, command, state.config.vocab_size)
    events = _completed(step, command)
    if state.requests.asking or command.logprobs or command.prompt_logprobs:
        events = with_logprobs(step, command, state.config.vocab_size, events)
    return [_logits_recorded(step, command), *events] if command.digests else events


def _completed(step: InFlightStep, command: CompleteStep) -> list[Event]:
    """The facts of a step whose answer has the right shape."""
    if not (step.stale or command.refused_entries):
        return _complete_decodes(step, command) if step.sampled_positions else _complete_current(step, command)
    delivered, stale = _Delivered(), _Stale()
    ends: list[Event] = []
    offset = 0
    for entry, request in enumerate(step.requests):
        count, policy = command.counts[entry], step.stale.get(entry)
        tokens = command.token_ids[offset : offset + count]
        offset += count
        if count and policy != "drop":
            known = len(request.tokens)
            if command.positions[entry] != known:
                _check_position(request, step, command.positions[entry])
            refused = entry in command.refused_entries
            if refused or known + count >= request.max_total_tokens or not request.stop_ids.isdisjoint(tokens):
                tokens = _kept(ends, request, tokens, command.time_ns, refused=refused)
        columns = delivered if policy is None else stale
        columns.handles.append(request.handle)
        columns.counts.append(len(tokens))
        columns.token_ids += tokens
        columns.accepted.append(count - 1 if count else 0)
        columns.first_output_indices.append(request.next_output_index)
        if policy is not None:
            _add_fate(stale, step.num_tokens[entry], delivered=policy == "deliver" and count > 0)
    return _events(step, delivered, stale, ends)


def _complete_decodes(step: InFlightStep, command: CompleteStep) -> list[Event]:
    """The common case: every entry is current and sampled one token, the position known beforehand. Column by column."""
    requests, positions, token_ids = step.requests, step.sampled_positions, command.token_ids
    if positions != command.positions:
        for request, position in zip(requests, command.positions, strict=True):
            _check_position(request, step, position)
    ending = set(step.last_entries)
    if not step.batch.stop_ids.isdisjoint(token_ids):
        pairs = enumerate(zip(requests, token_ids, strict=True))
        ending.update(entry for entry, (request, token) in pairs if token in request.stop_ids)
    ends: list[Event] = []
    for entry in sorted(ending):
        _kept(ends, requests[entry], [token_ids[entry]], command.time_ns, refused=False)
    delivered = OutputDelivered(
        step=step.step,
        handles=step.handles,
        token_ids=token_ids,
        first_output_indices=_first_indices(step, positions),
    )
    return [delivered, *ends]


def _complete_current(step: InFlightStep, command: CompleteStep) -> list[Event]:
    """Every entry is current, but some are chunks or have drafts."""
    lengths = [len(request.tokens) for request in step.requests]
    if lengths != command.positions:
        for request, position, count in zip(step.requests, command.positions, command.counts, strict=True):
            if count:
                _check_position(request, step, position)
    ends: list[Event] = []
    counts = _counts_kept(step, command, lengths, ends)
    delivered = OutputDelivered(
        step=step.step,
        handles=step.handles,
        token_ids=command.token_ids if counts == command.counts else _cut(command, counts),
        first_output_indices=_first_indices(step, lengths),
        counts=[] if counts.count(1) == len(counts) else counts,
        accepted_drafts=[count - 1 if count else 0 for count in command.counts] if step.num_drafts else [],
    )
    return [delivered, *ends]


def _counts_kept(step: InFlightStep, command: CompleteStep, lengths: list[int], ends: list[Event]) -> list[int]:
    """How many of each entry's tokens are kept; whoever ends with one of them is added to `ends`."""
    returned = set(command.token_ids)
    ending = [
        entry
        for entry, (request, length, count) in enumerate(zip(step.requests, lengths, command.counts, strict=True))
        if length + count >= request.max_total_tokens or not request.stop_ids.isdisjoint(returned)
    ]
    if not ending:
        return command.counts
    counts, offsets = list(command.counts), list(accumulate(command.counts, initial=0))
    for entry in ending:
        tokens = command.token_ids[offsets[entry] : offsets[entry + 1]]
        counts[entry] = len(_kept(ends, step.requests[entry], tokens, command.time_ns, refused=False))
    return counts


def _first_indices(step: InFlightStep, lengths: list[int]) -> list[int]:
    """The output index of each entry's next token, of requests with `lengths` tokens."""
    return list(map(sub, lengths, step.batch.first_output_positions))


def _cut(command: CompleteStep, counts: list[int]) -> list[int]:
    """The tokens that are left of each entry's: its first `counts`."""
    token_ids: list[int] = []
    offset = 0
    for returned, kept in zip(command.counts, counts, strict=True):
        token_ids += command.token_ids[offset : offset + kept]
        offset += returned
    return token_ids


def _logits_recorded(step: InFlightStep, command: CompleteStep) -> LogitsRecorded:
    """Digests of the rows that tokens were chosen from, those included whose tokens aren't told."""
    handles = [handle for handle, count in zip(step.handles, command.counts, strict=True) for _ in range(count)]
    return LogitsRecorded(step=step.step, handles=handles, digests=command.digests)


def _add_fate(stale: _Stale, num_tokens: int, *, delivered: bool) -> None:
    stale.num_tokens.append(num_tokens)
    stale.delivered.append(delivered)
    if not delivered:
        stale.first_output_indices[-1] = -1


def _kept(ends: list[Event], request: Request, tokens: list[int], time_ns: int, *, refused: bool) -> list[int]:
    """The tokens up to the end that they bring, if they bring one: a stop token first, then the limits."""
    for i, token in enumerate(tokens):
        total = len(request.tokens) + i + 1
        if token in request.stop_ids and total > request.min_total_tokens:
            ends.append(_end(request, "stop", i + 1, token, time_ns, refused=refused))
            return tokens[: i + 1]
        if total >= request.max_total_tokens:
            ends.append(_end(request, "length", i + 1, None, time_ns, refused=refused))
            return tokens[: i + 1]
    if refused:
        ends.append(_end(request, "error", len(tokens), None, time_ns, refused=True))
    return tokens


def _end(
    request: Request, reason: FinishReason, num_new: int, stop: int | None, time_ns: int, *, refused: bool
) -> RequestFinished | SessionTurnEnded:
    """The end of the request, or of a session's turn; a refusal by the grammar ends a session too."""
    if refused:
        outputs = request.next_output_index + num_new
        message = f"the grammar {request.grammar!r} refuses the last token"
        return RequestFinished(handle=request.handle, reason="error", num_output_tokens=outputs, message=message)
    if request.chunks or not request.input_closed:
        outputs = request.num_output_tokens + num_new
        return SessionTurnEnded(
            handle=request.handle, reason=reason, num_output_tokens=outputs, stop_token_id=stop, time_ns=time_ns
        )
    outputs = request.next_output_index + num_new
    return RequestFinished(handle=request.handle, reason=reason, num_output_tokens=outputs, stop_token_id=stop)


def _events(step: InFlightStep, delivered: _Delivered, stale: _Stale, ends: list[Event]) -> list[Event]:
    events: list[Event] = []
    if delivered.handles:
        one_each = len(delivered.token_ids) == len(delivered.handles) and 0 not in delivered.counts
        events.append(
            OutputDelivered(
                step=step.step,
                handles=delivered.handles,
                token_ids=delivered.token_ids,
                first_output_indices=delivered.first_output_indices,
                counts=[] if one_each else delivered.counts,
                accepted_drafts=delivered.accepted if step.num_drafts else [],
            )
        )
    if stale.handles:
        events.append(
            StaleOutputConsumed(
                step=step.step,
                handles=stale.handles,
                num_tokens=stale.num_tokens,
                delivered=stale.delivered,
                counts=stale.counts,
                token_ids=stale.token_ids,
                first_output_indices=stale.first_output_indices,
                accepted_drafts=stale.accepted if step.num_drafts else [],
            )
        )
    return [*events, *ends]


def _expected_step(state: State, command: CompleteStep) -> InFlightStep:
    if command.generation != state.worker_generation or not state.worker_alive:
        raise Rejected(
            f"output of step {command.step} comes from worker generation {command.generation}, "
            f"{state.worker_generation} is current: refused"
        )
    if not state.window.in_flight or command.step < state.window.in_flight[0].step:
        raise Rejected(f"output of step {command.step} came twice, or of a step that is not in flight: refused")
    step = state.window.in_flight[0]
    if command.step != step.step:
        raise WorkerLost(f"worker answered step {command.step} before step {step.step}: steps come back in order")
    return step


def _check_shape(step: InFlightStep, command: CompleteStep, vocab_size: int) -> None:
    size = len(step.handles)
    if len(command.counts) != size or len(command.positions) != size:
        raise WorkerLost(
            f"worker answered step {step.step} with {len(command.counts)} counts and {len(command.positions)} positions "
            f"for {size} entries"
        )
    most = [1 + drafts for drafts in step.num_drafts] if step.num_drafts else [1] * size
    for entry in step.chunk_entries:
        most[entry] = 0
    if step.num_drafts:
        right = (
            min(command.counts) >= 0
            and all(map(le, command.counts, most))
            and command.counts.count(0) == len(step.chunk_entries)
        )
    else:
        right = command.counts == most
    if not right or len(command.token_ids) != sum(command.counts):
        raise WorkerLost(
            f"worker answered step {step.step} with counts {command.counts[:20]} and {len(command.token_ids)} tokens; "
            f"at most {most[:20]} were asked for"
        )
    if command.digests and len(command.digests) != len(command.token_ids):
        raise WorkerLost(
            f"worker answered step {step.step} with {len(command.digests)} digests for {len(command.token_ids)} tokens"
        )
    if command.digests and not 0 <= min(command.digests) <= max(command.digests) < 1 << 64:
        raise WorkerLost(f"worker answered step {step.step} with digests that don't fit into 64 bits")
    if command.token_ids and not 0 <= min(command.token_ids) <= max(command.token_ids) < vocab_size:
        raise WorkerLost(
            f"worker sampled tokens {min(command.token_ids)} to {max(command.token_ids)} in step {step.step}; "
            f"the vocabulary has {vocab_size}"
        )


def _check_position(request: Request, step: InFlightStep, position: int) -> None:
    if position != len(request.tokens):
        raise WorkerLost(
            f"worker sampled position {position} of request {request.request_id!r} in step {step.step}; "
            f"position {len(request.tokens)} is next"
        )
