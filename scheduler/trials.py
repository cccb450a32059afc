"""Trials: finding the request that kills the worker, by bisecting those that were there when it died.

A worker may die for reasons of its own, so once is an accident: everybody goes on. Whoever was in the last step of a second
worker without a token in between is tried. Of the most suspect, half run, and nobody else does. They get their tokens and are
cleared, and then the other half is tried; or the worker dies again, and they are more suspect than the others. So a batch of
n takes at most log2(n) + 2 restarts until a request was alone with a dying worker for the second time: it is found out, ends
with an error that says so, and its content is quarantined. The others are what they were, a few preemptions later.

Whether it was the request or the device shows when somebody else gets a token. So after a verdict those above suspicion run
first, and an engine where request after request is found out and nobody gets a token in between gives up.

The whole state of a search is a count for each request (`refold.projections.suspicion`), so a trial survives the engine.
"""

import hashlib
from collections.abc import Sequence

import msgspec

from refold.journal.events import Event, Media, RequestFinished, RequestQuarantined
from refold.projections.requests import FINISHED, PREEMPTED, RUNNING, Request
from refold.scheduler.state import State

LOSSES_TO_TRY = 2
"""Workers lost with a request, without a token in between, before it is tried."""

LOSSES_TO_CONVICT = 3
LOSSES_ALONE_TO_CONVICT = 2
"""The least numbers of workers lost with a request, and with it alone."""


def on_trial(state: State) -> frozenset[int] | None:
    """The handles that alone may run now; None if nobody is tried."""
    num_losses, by_handle = state.suspicion.num_losses, state.requests.by_handle
    if not num_losses:
        return None
    suspects = {
        handle: losses
        for handle, losses in num_losses.items()
        if losses >= LOSSES_TO_TRY and by_handle[handle].status in (RUNNING, PREEMPTED)
    }
    if not suspects:
        return None
    if state.suspicion.is_unproved and (others := _above_suspicion(state)):
        return others
    most = max(suspects.values())
    worst = sorted(handle for handle, losses in suspects.items() if losses == most)
    return frozenset(worst[: max(1, len(worst) // 2)])


def _above_suspicion(state: State) -> frozenset[int]:
    """Who has run and no worker died with: whoever can show whether the device works at all."""
    num_losses = state.suspicion.num_losses
    return frozenset(
        r.handle
        for queue in (state.queues.running, state.queues.waiting)
        for r in queue
        if r.status in (RUNNING, PREEMPTED) and r.handle not in num_losses
    )


def suspects_of_loss(state: State) -> list[int]:
    """The live requests of the step that a worker is at: the oldest in flight."""
    if not state.window.in_flight:
        return []
    return [r.handle for r in state.window.in_flight[0].requests if r.status is not FINISHED]


def verdict(state: State, suspects: Sequence[int]) -> list[Event]:
    """What the loss of a worker with these suspects proves: nothing, or that a request is what kills it.

    It must have been alone in the step: whoever has ended meanwhile is suspected no more, and may have been the one.
    """
    if not suspects or len(state.window.in_flight[0].requests) != 1:
        return []
    request = state.requests.by_handle[suspects[0]]
    losses = state.suspicion.num_losses.get(request.handle, 0) + 1
    if losses < LOSSES_TO_CONVICT or state.suspicion.num_alone.get(request.handle, 0) + 1 < LOSSES_ALONE_TO_CONVICT:
        return []
    found = RequestQuarantined(handle=request.handle, content_digest=content_of(request), num_lost_workers=losses)
    ended = RequestFinished(
        handle=request.handle,
        reason="error",
        num_output_tokens=request.next_output_index,
        message=f"{losses} workers were lost with it, the last of them with it alone: its content is quarantined",
    )
    return [found, ended]


def content_of(request: Request) -> str:
    """The content digest of a request's input: of a session, all up to its present turn."""
    return content_digest(request.tokens[: request.num_prompt_tokens].tolist(), request.adapter, request.media)


def content_digest(prompt_token_ids: Sequence[int], adapter: str, media: Sequence[Media]) -> str:
    """SHA-256 (hex) of what a request asks to be computed. How it is sampled doesn't count."""
    return hashlib.sha256(msgspec.json.encode([prompt_token_ids, adapter, media])).hexdigest()
