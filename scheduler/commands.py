"""Commands: orders to the scheduler, in the imperative.

Time, randomness and identity come in with the command, drawn by the shell. A command that can't be obeyed raises
`Rejected` and changes nothing; one with nothing to do yields no event.
"""

import msgspec

from refold.journal.events import EngineConfig, Media, PauseMode, Sampling
from refold.journal.surprisals import EntrySurprisals


class Command(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """An order."""


class OpenEngine(Command, frozen=True):
    """Start a life of the engine under `config`, on the stream of that name. Nothing may be in flight: lose the old worker first."""

    engine_epoch: int
    refold_version: str
    root_seed: int
    config: EngineConfig
    stream: str = ""


class CloseEngine(Command, frozen=True):
    """End this life of the engine in good order."""

    reason: str


class StartWorker(Command, frozen=True):
    """A worker is ready. Its generation is the last one's plus one."""

    kind: str
    environment: dict[str, str]


class LoseWorker(Command, frozen=True):
    """The worker, its steps in flight and its KV cache are gone. With no worker alive: nothing happened.

    `by_step`: it may have died of the step that it was at, so that the requests in it are under suspicion.
    """

    reason: str
    by_step: bool = False


class SubmitRequest(Command, frozen=True):
    """Queue a request. Rejected if it can never fit, if its id is taken or if its tokens are not the model's."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: Sampling
    arrival_ns: int
    priority: int = 0
    cache_salt: str = ""
    tenant: str = ""
    adapter: str = ""
    media: list[Media] = []
    resumable: bool = False
    grammar: str = ""


class LiftQuarantine(Command, frozen=True):
    """Let the content of a quarantined request be computed again. Rejected if nothing of it is quarantined."""

    request_id: str


class ReadyGrammar(Command, frozen=True):
    """A request's grammar is compiled. Of an id that is not live or waits for none: nothing happens."""

    request_id: str


class ExtendSession(Command, frozen=True):
    """Queue the next chunk of a session's input; it may be empty (go on). Rejected if the session is closed or can't hold it."""

    request_id: str
    token_ids: list[int]
    sampling: Sampling


class CloseSession(Command, frozen=True):
    """A session's input has ended. Of one that is closed or not live: nothing happens."""

    request_id: str


class ExpireSessions(Command, frozen=True):
    """Close the sessions that have been idle since `idle_before_ns` or longer."""

    idle_before_ns: int


class ProposeDrafts(Command, frozen=True):
    """Propose drafts for a request's next step. Of an id that is not live, or with tokens in flight: nothing happens."""

    request_id: str
    token_ids: list[int]


class PauseEngine(Command, frozen=True):
    """Hold scheduling back, see `EnginePaused`."""

    mode: PauseMode = "all"


class ResumeEngine(Command, frozen=True):
    """Let scheduling go on. When nothing is paused: nothing happens."""


class AbortRequest(Command, frozen=True):
    """End a request from outside. Of an id that is not live: nothing happens."""

    request_id: str
    cause: str = "client"


class FailRequest(Command, frozen=True):
    """End a request with reason `error`. Of an id that is not live: nothing happens."""

    request_id: str
    message: str


class ScheduleStep(Command, frozen=True):
    """Plan the next step, if the window has room and there is work."""


class CompleteStep(Command, frozen=True):
    """A step's output came back, in the columns of `refold.gpu.batch.StepOutput`.

    `refused_entries` are entries whose tokens their grammar refuses. `time_ns` starts the idle time of sessions.
    `digests`, parallel to `token_ids` or empty, are recorded as they are.
    """

    step: int
    generation: int
    counts: list[int]
    token_ids: list[int]
    positions: list[int]
    refused_entries: list[int] = []
    time_ns: int = 0
    digests: list[int] = []
    logprobs: list[EntrySurprisals] = []
    prompt_logprobs: list[EntrySurprisals] = []


class RedactContent(Command, frozen=True):
    """Say that the tokens of finished requests were erased, see `ContentRedacted`. Rejected while one of them is not over."""

    handles: list[int]
    positions: list[int]
    content_hashes: list[str]
    reason: str = ""


class ResetCache(Command, frozen=True):
    """Forget every cached block. With `reset_running`, preempt what runs first; without, Rejected if anything runs."""

    reset_running: bool = False


class RecordDigest(Command, frozen=True):
    """Record the digest of the folded state."""
