"""Requests.

What a request is, how it begins, ends and takes its turns. Its counters: `refold.projections.counters`.
"""

from array import array
from collections import deque
from functools import lru_cache

from refold.journal.events import EngineConfig, FinishReason, RequestSubmitted, Sampling, SessionExtended
from refold.projections.block_hashes import extend_block_hashes
from refold.projections.runs import Run

WAITING, RUNNING, PREEMPTED, IDLE, FINISHED = "waiting", "running", "preempted", "idle", "finished"

REMEMBERED_FINISHED_IDS = 65_536
"""How many finished requests still hold their client id against reuse. Bounded, so that an engine can run for ever."""


class Progress:
    """What a step reads or writes of a request that decodes. A base class's slots come first in memory: two cache lines, not seven."""

    __slots__ = (
        "block_hashes",
        "block_ids",
        "epoch",
        "first_output_position",
        "handle",
        "last_sampling_step",
        "max_total_tokens",
        "num_computed_tokens",
        "num_prompt_tokens_in_flight",
        "num_published_blocks",
        "plain_until",
        "stop_ids",
        "tokens",
    )


class Request(Progress):
    """One request, live or finished with entries still in flight. Changed by appliers only.

    `first_output_position` is where output 0 would be if all outputs, of all turns, had come in one row: an output's index is
    its position less this.
    `num_prompt_tokens_in_flight` and `num_drafts_in_flight` are of the current epoch: known tokens that are computed beside the
    placeholders, and drafts, which are placeholders too.
    `run`: the first blocks of `block_ids`, if they are held as one (`refold.projections.runs`).
    `plain_until`: a decode that starts before this position needs nothing but its token (`note_plain`). Never a promise that
    isn't kept; 0, which promises nothing, is always right.
    """

    __slots__ = (
        "adapter",
        "arrival_ns",
        "cache_salt",
        "chunks",
        "drafts",
        "finish_reason",
        "grammar",
        "idle_since_ns",
        "input_closed",
        "media",
        "media_held",
        "min_total_tokens",
        "num_deliverable_stale_tokens",
        "num_drafts_in_flight",
        "num_earlier_outputs",
        "num_preemptions",
        "num_prompt_tokens",
        "num_stale_output_tokens",
        "priority",
        "queue_key",
        "request_id",
        "resumable",
        "run",
        "sampling",
        "status",
        "tenant",
        "waits_for_grammar",
    )

    def __init__(self, event: RequestSubmitted, config: EngineConfig) -> None:
        self.handle = event.handle
        self.request_id = event.request_id
        self.sampling: Sampling = event.sampling
        self.arrival_ns = event.arrival_ns
        self.priority = event.priority
        self.cache_salt = event.cache_salt
        self.tenant = event.tenant
        self.adapter = event.adapter
        self.media = event.media
        self.media_held: set[int] = set()
        self.grammar = event.grammar
        self.waits_for_grammar = bool(event.grammar)
        self.resumable = event.resumable
        self.chunks: deque[SessionExtended] = deque()
        self.input_closed = not event.resumable
        self.idle_since_ns = 0
        self.drafts: list[int] = []
        self.last_sampling_step = -1
        self.num_earlier_outputs = 0
        self.tokens = array("q", event.prompt_token_ids)
        self.num_prompt_tokens = len(self.tokens)
        self.first_output_position = self.num_prompt_tokens
        self.queue_key: tuple[int, int] = (0, self.handle)
        self.status = WAITING
        self.finish_reason: FinishReason | None = None
        self.epoch = 0
        self.num_computed_tokens = 0
        self.num_drafts_in_flight = 0
        self.num_prompt_tokens_in_flight = 0
        self.num_stale_output_tokens = 0
        self.num_deliverable_stale_tokens = 0
        self.num_preemptions = 0
        self.block_ids: list[int] = []
        self.run: Run | None = None
        self.num_published_blocks = 0
        self.block_hashes: list[bytes] = []
        self.plain_until = 0
        self.max_total_tokens = 0
        self.min_total_tokens = 0
        self.stop_ids: frozenset[int] = frozenset()
        configure(self, config)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far; of a session, in this turn."""
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def next_output_index(self) -> int:
        """The index of the next output, counted over all turns."""
        return len(self.tokens) - self.first_output_position

    @property
    def num_output_placeholders(self) -> int:
        """Places for tokens to come: computed, or about to be, beyond the last known token (`refold.projections.counters`)."""
        ahead = self.num_computed_tokens + 1 - len(self.tokens)
        return ahead if ahead > 0 else 0

    @property
    def num_sampling_in_flight(self) -> int:
        """Entries of the current epoch in flight that sample."""
        return self.num_output_placeholders - self.num_drafts_in_flight

    @property
    def num_in_flight_tokens(self) -> int:
        """Tokens in flight, stale ones included."""
        ahead = self.num_computed_tokens + 1 - len(self.tokens)
        known = self.num_prompt_tokens_in_flight + self.num_stale_output_tokens
        return known + ahead if ahead > 0 else known

    @property
    def next_position(self) -> int:
        """The first position that is certain not to be rolled back: all before it are computed, or in flight and known."""
        return self.num_computed_tokens - self.num_output_placeholders


class RequestTable:
    """All requests that the engine still has to do with, by handle, in order of admission; `sessions` are the live sessions.

    `asking` are those that want log-probabilities.
    """

    __slots__ = ("asking", "by_handle", "finished_ids", "handle_by_id", "next_handle", "sessions")

    def __init__(self) -> None:
        self.by_handle: dict[int, Request] = {}
        self.handle_by_id: dict[str, int] = {}
        self.finished_ids: deque[str] = deque()
        self.next_handle = 1
        self.sessions: dict[int, Request] = {}
        self.asking: set[int] = set()

    def live(self) -> list[Request]:
        """Requests that have not finished, in order of admission."""
        return [r for r in self.by_handle.values() if r.status is not FINISHED]

    def find_live(self, request_id: str) -> Request | None:
        """The live request of a client id, if there is one."""
        request = self.by_handle.get(self.handle_by_id.get(request_id, -1))
        return None if request is None or request.status is FINISHED else request


def configure(request: Request, config: EngineConfig) -> None:
    """Derive what depends on the engine's configuration: limits, stop tokens, block hashes."""
    sampling, prompt = request.sampling, request.num_prompt_tokens
    request.max_total_tokens = min(prompt + sampling.max_tokens, config.max_model_len)
    request.min_total_tokens = prompt + sampling.min_tokens
    eos = () if sampling.ignore_eos else config.eos_token_ids
    request.stop_ids = _one_set(frozenset((*sampling.stop_token_ids, *eos)))
    if config.enable_prefix_caching:
        extend_block_hashes(request, config.block_size)


@lru_cache(maxsize=1024)
def _one_set(stop_ids: frozenset[int]) -> frozenset[int]:
    """One object for equal sets: a step asks all its requests at once, and most have the same."""
    return stop_ids


def reconfigure(request: Request, config: EngineConfig) -> None:
    """As `configure`, for a configuration that may cut blocks in another way."""
    request.block_hashes = []
    configure(request, config)


def submit(table: RequestTable, event: RequestSubmitted, config: EngineConfig) -> Request:
    """Add a request."""
    assert event.handle == table.next_handle, (event.handle, table.next_handle)
    request = Request(event, config)
    table.by_handle[event.handle] = request
    table.handle_by_id[event.request_id] = event.handle
    table.next_handle += 1
    if event.resumable:
        table.sessions[event.handle] = request
    return request


def forget_computed(request: Request) -> list[int]:
    """Give up everything computed, and return the blocks that held it."""
    released, request.block_ids = request.block_ids, []
    request.run = None
    request.num_computed_tokens = 0
    request.num_published_blocks = 0
    return released


def end_turn(request: Request, time_ns: int) -> None:
    """A session's turn has ended: go back to what can't be rolled back, and keep the blocks. After the epoch has risen."""
    request.num_computed_tokens = request.next_position
    assert 0 <= request.num_computed_tokens < len(request.tokens), (request.request_id, request.num_computed_tokens)
    request.idle_since_ns = time_ns


def begin_turn(request: Request, chunk: SessionExtended, config: EngineConfig) -> list[int]:
    """Apply a chunk of input: the last token goes, outputs become prompt, the chunk follows. Returns blocks let go.

    If that leaves nothing to compute, the last place is computed again, in a block of its own: a published one stays as
    it is.
    """
    request.num_earlier_outputs = request.next_output_index
    del request.tokens[-1]
    assert len(request.tokens) >= request.num_computed_tokens, request.request_id
    del request.block_hashes[len(request.tokens) // config.block_size :]
    request.tokens.extend(chunk.token_ids)
    request.num_prompt_tokens = len(request.tokens)
    request.first_output_position = request.num_prompt_tokens - request.num_earlier_outputs
    request.sampling = chunk.sampling
    configure(request, config)
    released: list[int] = []
    if request.num_computed_tokens == len(request.tokens):
        request.num_computed_tokens -= 1
        last = request.num_computed_tokens // config.block_size
        if last < request.num_published_blocks:
            request.num_computed_tokens = last * config.block_size
            released, request.block_ids = request.block_ids[last:], request.block_ids[:last]
            request.num_published_blocks = last
    return released


def finish(table: RequestTable, request: Request, reason: FinishReason) -> None:
    """The request has ended. It stays in the table until its entries in flight have come back."""
    assert request.status is not FINISHED, request.request_id
    request.status = FINISHED
    request.finish_reason = reason
    table.sessions.pop(request.handle, None)
    table.finished_ids.append(request.request_id)
    if len(table.finished_ids) > REMEMBERED_FINISHED_IDS:
        del table.handle_by_id[table.finished_ids.popleft()]
    forget_if_drained(table, request)


def forget_if_drained(table: RequestTable, request: Request) -> None:
    """Drop a finished request that nothing in flight names any more."""
    if request.status is FINISHED and request.num_in_flight_tokens == 0:
        del table.by_handle[request.handle]
        table.asking.discard(request.handle)
