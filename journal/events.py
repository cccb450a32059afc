"""The vocabulary: every fact that an engine can record.

An event is a fact in the past tense. It stores outcomes (block ids, tokens, finish reasons), never recipes, so that a
journal folds under a newer policy or allocator. Facts about a whole step are columnar: lists with one place per entry, in
batch order. Facts that are rare are one event each. Fields that hold their default are not written.

Inside, a request is an integer handle, given at admission in journal order and never reused. A client's `request_id`
appears once, in `RequestSubmitted`. Every token of output is accounted for by exactly one of `OutputDelivered`, `StaleOutputConsumed` and `WorkerLost`
(law L1): each names entries of an in-flight step, and each entry is named exactly once.
"""

from typing import Literal

import msgspec

from refold.journal.settings import EngineConfig as EngineConfig
from refold.journal.settings import Policy as Policy
from refold.journal.settings import Sampling as Sampling
from refold.journal.settings import Speculation as Speculation

SCHEMA_VERSION = 3

StalePolicy = Literal["deliver", "drop"]
FinishReason = Literal["stop", "length", "abort", "error", "capacity"]
PreemptReason = Literal["kv_pressure", "cache_reset", "session_reclaimed", "isolated"]
PauseMode = Literal["new", "all", "drain"]


class Event(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A fact. Subclasses are tagged by their class name in the field `type`."""


class EngineOpened(Event, frozen=True, tag=True):
    """An engine took the journal's stream of that name over. Every life of an engine starts with one."""

    engine_epoch: int
    refold_version: str
    root_seed: int
    config: EngineConfig
    stream: str = ""


class EngineClosed(Event, frozen=True, tag=True):
    """An engine left in good order. A life without one ended in a crash."""

    engine_epoch: int
    reason: str


class WorkerStarted(Event, frozen=True, tag=True):
    """A worker is ready for its first step. `environment` is what its numbers depend on (device, versions, threads)."""

    generation: int
    kind: str
    environment: dict[str, str]


class WorkerLost(Event, frozen=True, tag=True):
    """A worker is gone, and with it every step in flight and every block's content.

    `handles` had work in flight or blocks: they compute again, in their next epoch. `suspects` were in the step it died of.
    """

    generation: int
    reason: str
    steps: list[int]
    handles: list[int]
    suspects: list[int] = []


class Media(msgspec.Struct, frozen=True, gc=False, kw_only=True, forbid_unknown_fields=True):
    """A multimodal input: `num_tokens` places from `start` on in the prompt, filled by the encoder's output for `digest`."""

    digest: str
    start: int
    num_tokens: int


class RequestSubmitted(Event, frozen=True, tag=True):
    """A request was admitted to the queue.

    `tenant` counts under `fair_share`. `adapter`, `cache_salt` and `media` belong to the identity of its cached blocks.
    `resumable`: a streaming-input session. `grammar`: its output is constrained; it waits until the grammar is ready.
    """

    handle: int
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


class GrammarReady(Event, frozen=True, tag=True):
    """A request's grammar is compiled: it may be scheduled."""

    handle: int


class SessionExtended(Event, frozen=True, tag=True):
    """The next chunk of a session's input. Applied at once if the session is idle, else when its turn has ended."""

    handle: int
    token_ids: list[int]
    sampling: Sampling


class SessionClosed(Event, frozen=True, tag=True):
    """A session's input has ended: the end of the last turn is the end of the request."""

    handle: int


class SessionTurnEnded(Event, frozen=True, tag=True):
    """A session's turn has ended as a request would (`reason`, `stop_token_id`), but the session lives on.

    Its blocks stay. What is in flight is dropped. The turn's last token, never computed, leaves the context when the next
    chunk comes; it was delivered all the same. `num_output_tokens` counts this turn.
    """

    handle: int
    reason: FinishReason
    num_output_tokens: int
    time_ns: int = 0
    stop_token_id: int | None = None


class Admission(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A request that enters the running batch with this step.

    `entry` is its index in the step's columns, `epoch` the epoch it runs in, `hit_block_ids` the cached blocks that it
    shares: the first `len(hit_block_ids) * block_size` tokens are not computed again. A session that kept its blocks comes
    in with them and hits nothing.
    """

    entry: int
    epoch: int
    hit_block_ids: list[int] = []


class BlockAllocation(msgspec.Struct, frozen=True, gc=False, kw_only=True, forbid_unknown_fields=True):
    """Blocks newly owned by the request of entry `entry`, appended to its block table in this order."""

    entry: int
    block_ids: list[int]


class Drafts(msgspec.Struct, frozen=True, gc=False, kw_only=True, forbid_unknown_fields=True):
    """Draft tokens of the scheduler's for an entry to verify."""

    entry: int
    token_ids: list[int]


class EncoderInput(msgspec.Struct, frozen=True, gc=False, kw_only=True, forbid_unknown_fields=True):
    """The entry's request needs its media item number `media`; `computed`: this step runs the encoder for it."""

    entry: int
    media: int
    computed: bool


class StepScheduled(Event, frozen=True, tag=True):
    """The work order of one step.

    Columns, one place per entry: `handles`; `num_tokens` to compute; `first_positions`, the position of the first of them.
    `chunk_entries` are the entries (by index) that end before the request's last known position and so sample nothing;
    every other entry samples. `evicted_block_ids` lost their cached content to the allocations of this step.

    With speculation, `num_drafts` (a column, empty if all are 0) says how many of an entry's tokens are drafts to verify:
    the last ones. Their ids are in `drafts`, or the worker's own where they aren't. Positions are as if every draft in
    flight were accepted. `encoder_evictions` are digests dropped from the encoder cache before the step runs.
    """

    step: int
    handles: list[int]
    num_tokens: list[int]
    first_positions: list[int]
    chunk_entries: list[int] = []
    admissions: list[Admission] = []
    allocations: list[BlockAllocation] = []
    evicted_block_ids: list[int] = []
    num_drafts: list[int] = []
    drafts: list[Drafts] = []
    encoder_inputs: list[EncoderInput] = []
    encoder_evictions: list[str] = []


class DraftsProposed(Event, frozen=True, tag=True):
    """Someone outside the scheduler (a grammar's drafter, say) proposes tokens for a request's next step."""

    handle: int
    token_ids: list[int]


class RequestPreempted(Event, frozen=True, tag=True):
    """A running request lost its blocks and its place, and will recompute.

    Its epoch rises: `num_stale_output_tokens` scheduled tokens of its entries in flight are stale from now on and are
    treated by `stale_policy` when they return (an entry already marked `drop` stays so). `for_handle` is the request that
    needed `needed_blocks` while `free_blocks` were free; a request may be preempted for itself.
    """

    handle: int
    reason: PreemptReason
    stale_policy: StalePolicy
    released_block_ids: list[int]
    num_computed_tokens: int
    num_stale_output_tokens: int
    for_handle: int | None = None
    needed_blocks: int = 0
    free_blocks: int = 0


class OutputDelivered(Event, frozen=True, tag=True):
    """The current entries of step `step` came back.

    Columns, one place per entry: `handles`; `first_output_indices`, the output index of the entry's first token.
    `token_ids` is flat. `counts` says how many of them belong to each entry; empty means one each (an entry that samples
    nothing has count 0). `accepted_drafts` (empty if the step had no drafts) counts what the verification accepted; after
    a stop inside an accepted run, `counts` is smaller: what follows the stop is not output.
    """

    step: int
    handles: list[int]
    token_ids: list[int]
    first_output_indices: list[int]
    counts: list[int] = []
    accepted_drafts: list[int] = []


class StaleOutputConsumed(Event, frozen=True, tag=True):
    """The stale entries of step `step` came back: their epoch is over.

    Columns, one place per entry: `handles`; `num_tokens` scheduled, which leave the stale counter; `delivered`, whether
    the tokens were handed out (policy `deliver`) or thrown away (`drop`); `first_output_indices` of what was delivered
    (-1 where nothing was); `counts` and the flat `token_ids` that came back, thrown away ones included.
    """

    step: int
    handles: list[int]
    num_tokens: list[int]
    delivered: list[bool]
    counts: list[int]
    token_ids: list[int]
    first_output_indices: list[int]
    accepted_drafts: list[int] = []


class LogprobsDelivered(Event, frozen=True, tag=True):
    """What the worker thought of tokens that it sampled in step `step`, of the requests that want to know.

    In the record of the `OutputDelivered` or `StaleOutputConsumed` that hands the tokens out, and of exactly those tokens.
    Columns, one place per entry: `handles`; `first_output_indices`; `counts` of tokens; `num_top`, how many of the likeliest
    are told beside each. `surprisals` is flat. Per token: the rank of the chosen one (1 is the likeliest), its surprisal, and
    of each of the likeliest, the best first, its id and its surprisal. A surprisal is -1 times the log-probability by the
    model's own logits, before anything of `Sampling`, in millionths of a nat: an integer, alike wherever it is read. An
    erased number reads as -1, and all of them as no number at all.
    """

    step: int
    handles: list[int]
    first_output_indices: list[int]
    counts: list[int]
    num_top: list[int]
    surprisals: list[int]


class PromptLogprobsDelivered(Event, frozen=True, tag=True):
    """What the model thought of a request's prompt: of its tokens 1 to `count`, each after those before it.

    In the record that hands out the request's first token. `num_top` and `surprisals` as in `LogprobsDelivered`.
    """

    handle: int
    count: int
    num_top: int
    surprisals: list[int]


class LogitsRecorded(Event, frozen=True, tag=True):
    """What the logits of step `step` hashed to, where the configuration asks for it (`record_logits`).

    Columns, one place per row of logits that a token was chosen from, in the order of the step's entries: `handles`, whose row,
    and `digests`, an integer of 64 bits, never negative. An entry that samples has a row, and one more for each draft that
    was accepted, also where the tokens behind an end aren't told. In the record in which the step comes back, before the rest.
    """

    step: int
    handles: list[int]
    digests: list[int]


class RequestQuarantined(Event, frozen=True, tag=True):
    """A request is what kills workers: `num_lost_workers` died with it since its last token, the last with it alone.

    Its input, of which `content_digest` is the SHA-256, is rejected from now on. The digest is erased with the input.
    """

    handle: int
    content_digest: str
    num_lost_workers: int


class QuarantineLifted(Event, frozen=True, tag=True):
    """Someone let the content of a quarantined request be computed again."""

    handle: int


class RequestFinished(Event, frozen=True, tag=True):
    """A request has ended; nothing is delivered to it after this. `stop_token_id` is the token that ended it."""

    handle: int
    reason: FinishReason
    num_output_tokens: int
    stop_token_id: int | None = None
    message: str = ""


class RequestAborted(Event, frozen=True, tag=True):
    """Someone outside ended a request. Always followed by its `RequestFinished`."""

    handle: int
    cause: str


class CacheReset(Event, frozen=True, tag=True):
    """Every cached block was forgotten. Running requests were preempted first, under the `drop` policy."""

    reset_running: bool


class EnginePaused(Event, frozen=True, tag=True):
    """Scheduling is held back. `new`: nobody comes in who never ran; `all`: no step at all; `drain`: as `new`, and submissions are refused."""

    mode: PauseMode


class EngineResumed(Event, frozen=True, tag=True):
    """Scheduling goes on."""


class ContentRedacted(Event, frozen=True, tag=True):
    """What was said to these finished requests, and by them, was erased on someone's order.

    Columns, one place per record that lost some of its content: `positions`, and `content_hashes`, the SHA-256 of what is left of it.
    What the state had learned of the erased tokens goes as well: of the cached blocks, only those that live requests share stay
    known. Digests that were recorded of states with erased tokens in them are erased too.
    """

    handles: list[int]
    positions: list[int]
    content_hashes: list[str]
    reason: str = ""


class StateDigest(Event, frozen=True, tag=True):
    """What the folded state hashed to just before this event. Replay checks itself against it (law L11)."""

    digest: str


AnyEvent = (
    EngineOpened
    | EngineClosed
    | WorkerStarted
    | WorkerLost
    | RequestSubmitted
    | GrammarReady
    | SessionExtended
    | SessionClosed
    | SessionTurnEnded
    | StepScheduled
    | DraftsProposed
    | RequestPreempted
    | OutputDelivered
    | StaleOutputConsumed
    | LogprobsDelivered
    | PromptLogprobsDelivered
    | LogitsRecorded
    | RequestQuarantined
    | QuarantineLifted
    | RequestFinished
    | RequestAborted
    | CacheReset
    | EnginePaused
    | EngineResumed
    | ContentRedacted
    | StateDigest
)
EVENT_TYPES: tuple[type[Event], ...] = AnyEvent.__args__
