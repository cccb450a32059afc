"""Sessions: requests whose input comes in chunks.

A session runs like any request until it stops; then its turn has ended, and it waits for the next chunk with its blocks.
Chunks that come early queue up. The next turn starts from all but the last token (which was never computed), whose place
the chunk takes. Whoever needs memory more may take an idle session's blocks: it computes them again when it goes on.
"""

from refold.journal.errors import Rejected
from refold.journal.events import EngineConfig, Event, RequestFinished, SessionClosed, SessionExtended
from refold.projections.requests import IDLE, Request
from refold.scheduler.admission import check_prompt_tokens, check_sampling, num_blocks_at_most
from refold.scheduler.commands import CloseSession, ExpireSessions, ExtendSession
from refold.scheduler.state import State


def extend_session(state: State, command: ExtendSession) -> list[Event]:
    """Queue a chunk."""
    request = state.requests.find_live(command.request_id)
    if request is None or not request.resumable or request.input_closed:
        raise Rejected(f"{_why_not(request, command.request_id)}: open another with open_session")
    check_prompt_tokens(command.request_id, command.token_ids, state.config)
    check_sampling(command.request_id, command.sampling, state.config, resumable=True)
    _check_room(state, request, command)
    return [SessionExtended(handle=request.handle, token_ids=command.token_ids, sampling=command.sampling)]


def _why_not(request: Request | None, request_id: str) -> str:
    """Why a request takes no more input."""
    if request is None:
        return f"session {request_id!r} has ended: it was closed, aborted or idle for too long"
    if request.resumable:
        return f"session {request_id!r} is closed, and ends with the turn that it is in"
    return f"request {request_id!r} is not a session"


def _check_room(state: State, request: Request, command: ExtendSession) -> None:
    """The context that the session comes to, at the most, must fit the model and the pool."""
    config = state.config
    context = context_at_most(request, config) - 1 + len(command.token_ids)
    if context >= config.max_model_len:
        raise Rejected(
            f"session {request.request_id!r}: its context can come to {context} tokens, the model takes "
            f"{config.max_model_len} with at least one generated; start a new session"
        )
    needed = num_blocks_at_most(context, command.sampling.max_tokens, config)
    if needed > config.num_blocks:
        raise Rejected(
            f"session {request.request_id!r}: {context} tokens of context and max_tokens {command.sampling.max_tokens} can "
            f"need {needed} blocks of {config.block_size}, the pool has {config.num_blocks}; start a new session"
        )


def context_at_most(request: Request, config: EngineConfig) -> int:
    """Tokens that a session's context can come to when its turn and all that is queued have ended."""
    turns = turns_at_most(request, config)
    return min(sum(turns[-1]), config.max_model_len) if turns else len(request.tokens)


def turns_at_most(request: Request, config: EngineConfig) -> list[tuple[int, int]]:
    """Tokens of prompt, at the most, and `max_tokens`: of the turn that it is in, if it is in one, and of each that is queued.

    A chunk takes the place of the last token before it.
    """
    turns: list[tuple[int, int]] = []
    context = len(request.tokens)
    if request.status is not IDLE:
        turns.append((request.num_prompt_tokens, request.sampling.max_tokens))
        context = min(sum(turns[-1]), config.max_model_len)
    for chunk in request.chunks:
        turns.append((context - 1 + len(chunk.token_ids), chunk.sampling.max_tokens))
        context = min(sum(turns[-1]), config.max_model_len)
    return turns


def close_session(state: State, command: CloseSession) -> list[Event]:
    """End a session's input; if it is idle, the session has ended too."""
    request = state.requests.find_live(command.request_id)
    if request is None or request.input_closed:
        return []
    return _close(request)


def expire_sessions(state: State, command: ExpireSessions) -> list[Event]:
    """Close what has been idle for too long, in order of admission."""
    late = [
        r
        for r in state.requests.sessions.values()
        if r.status is IDLE and not r.input_closed and r.idle_since_ns <= command.idle_before_ns
    ]
    return [event for request in late for event in _close(request)]


def _close(request: Request) -> list[Event]:
    closed = SessionClosed(handle=request.handle)
    if request.status is not IDLE:
        return [closed]
    outputs = request.next_output_index
    return [closed, RequestFinished(handle=request.handle, reason="stop", num_output_tokens=outputs)]
