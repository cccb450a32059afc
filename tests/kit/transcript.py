"""The transcript: what each request must be given, token by token, from its seed alone."""

from refold.gpu.simulated import simulated_token
from refold.journal.events import (
    EngineConfig,
    EngineOpened,
    Event,
    OutputDelivered,
    RequestFinished,
    RequestSubmitted,
    Sampling,
    SessionExtended,
    SessionTurnEnded,
    StaleOutputConsumed,
)

_TELLING = (
    OutputDelivered,
    StaleOutputConsumed,
    RequestSubmitted,
    SessionExtended,
    SessionTurnEnded,
    RequestFinished,
    EngineOpened,
)


class WrongOutput(AssertionError):
    """A client was given what is not its own. The message starts with the rule's name."""


def must(holds: object, rule: str, handle: int, what: str) -> None:
    if not holds:
        raise WrongOutput(f"{rule}: handle {handle} {what}")


class _Client:
    """A request as its client knows it."""

    __slots__ = ("context", "is_idle", "queued", "sampling", "turn_start")

    def __init__(self, event: RequestSubmitted) -> None:
        self.sampling: Sampling = event.sampling
        self.context = list(event.prompt_token_ids)
        self.turn_start = len(self.context)
        self.queued: list[SessionExtended] = []
        self.is_idle = False


class Transcript:
    """Follows a journal's events in order and raises `WrongOutput` at the first that gives somebody the wrong thing."""

    def __init__(self) -> None:
        self.config: EngineConfig | None = None
        self.clients: dict[int, _Client] = {}
        self.unfinished: set[int] = set()

    def observe(self, event: Event) -> None:
        """Check what one event gives to whom, and why it ends."""
        if type(event) not in _TELLING:
            return
        match event:
            case OutputDelivered():
                counts = event.counts or [1] * len(event.handles)
                self._give(event.handles, counts, [True] * len(counts), event.token_ids)
            case StaleOutputConsumed():
                self._give(event.handles, event.counts, event.delivered, event.token_ids)
            case RequestSubmitted():
                self.clients[event.handle] = _Client(event)
                self.unfinished.add(event.handle)
            case SessionExtended():
                client = self.clients[event.handle]
                client.queued.append(event)
                _begin(client)
            case SessionTurnEnded():
                client = self.clients[event.handle]
                self._check_end(event.handle, event.reason)
                client.is_idle = True
                _begin(client)
            case RequestFinished():
                self.unfinished.remove(event.handle)
                if not self.clients[event.handle].is_idle:
                    self._check_end(event.handle, event.reason)
            case EngineOpened():
                self.config = event.config

    def _give(self, handles: list[int], counts: list[int], delivered: list[bool], token_ids: list[int]) -> None:
        tokens = iter(token_ids)
        for handle, count, is_delivered in zip(handles, counts, delivered, strict=True):
            for _ in range(count):
                token = next(tokens)
                if is_delivered:
                    self._check_token(handle, token)
                    self.clients[handle].context.append(token)

    def _check_token(self, handle: int, token: int) -> None:
        assert self.config is not None
        client = self.clients[handle]
        position = len(client.context)
        must(not self._ends(client), "end", handle, f"got position {position} after its natural end")
        expected = simulated_token(client.sampling, position, client.turn_start, self.config)
        must(token == expected, "token", handle, f"got {token} at position {position}, {expected} is its own")

    def _ends(self, client: _Client) -> str:
        """The reason that the last token brings, if it ends the turn."""
        assert self.config is not None
        context, sampling = client.context, client.sampling
        outputs = len(context) - client.turn_start
        if outputs > sampling.min_tokens and (
            context[-1] in sampling.stop_token_ids
            or (not sampling.ignore_eos and context[-1] in self.config.eos_token_ids)
        ):
            return "stop"
        return "length" if outputs == sampling.max_tokens or len(context) == self.config.max_model_len else ""

    def _check_end(self, handle: int, reason: str) -> None:
        natural = self._ends(self.clients[handle])
        if reason in ("error", "capacity") and natural:
            return  # refused by its grammar at its very end; or its end under the configuration of a new life
        due = reason if reason in ("stop", "length") else ""
        must(natural == due, "end", handle, f"ended by {reason!r}, {natural or 'no end'!r} was due")


def _begin(client: _Client) -> None:
    if client.is_idle and client.queued:
        chunk = client.queued.pop(0)
        client.is_idle = False
        client.sampling = chunk.sampling
        client.context[-1:] = chunk.token_ids
        client.turn_start = len(client.context)
