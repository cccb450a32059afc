"""Requests and their counters.

The counters that engineers know by name are views over the window of in-flight steps (`refold.projections.steps`):

    num_in_flight_tokens         = sum of n            over the request's entries in flight
    num_stale_output_tokens      = sum of n            over those of an older epoch
    num_deliverable_stale_tokens = sum of n            over those of an older epoch marked `deliver`
    num_sampling_in_flight       = number              of those of the current epoch that sample
    num_output_placeholders      = sum of (1 + drafts) over those of the current epoch that sample

They are kept incrementally, because the hot path can't sum, and law L2 holds both definitions together. What is stored is what
a decode changes least: placeholders, the drafts among them, the known tokens computed beside them (of prompts and
recomputations), and what is stale; the other two counters are sums of these. Each is written in this module only.
Nothing is ever subtracted from a counter of another epoch: an entry that comes back is matched with
the epoch it was scheduled in, and only entries of the current epoch touch the scheduling counters. So none can go below
zero, and none is clamped.
"""

import hashlib
import sys
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import compress

from refold.journal.events import EngineConfig, FinishReason, Media, RequestSubmitted, Sampling, SessionExtended

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
        "num_output_placeholders",
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
        self.num_output_placeholders = 0
        self.num_drafts_in_flight = 0
        self.num_prompt_tokens_in_flight = 0
        self.num_stale_output_tokens = 0
        self.num_deliverable_stale_tokens = 0
        self.num_preemptions = 0
        self.block_ids: list[int] = []
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
    def num_sampling_in_flight(self) -> int:
        """Entries of the current epoch in flight that sample."""
        return self.num_output_placeholders - self.num_drafts_in_flight

    @property
    def num_in_flight_tokens(self) -> int:
        """Tokens in flight, stale ones included."""
        return self.num_output_placeholders + self.num_prompt_tokens_in_flight + self.num_stale_output_tokens

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
    request.stop_ids = frozenset((*sampling.stop_token_ids, *eos))
    if config.enable_prefix_caching:
        extend_block_hashes(request, config.block_size)


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


def schedule(
    step: int,
    entries: Iterable[Request],
    num_tokens: Iterable[int],
    first_positions: Iterable[int],
    samples: Iterable[bool],
) -> None:
    """Count entries that enter the window. `num_computed_tokens` is optimistic: it runs ahead of the worker."""
    for request, n, first, sampling in zip(entries, num_tokens, first_positions, samples, strict=True):
        assert request.num_computed_tokens == first, (request.request_id, request.num_computed_tokens, first)
        request.num_computed_tokens = first + n
        if sampling:
            request.num_output_placeholders += 1
            request.last_sampling_step = step
            if n != 1:
                request.num_prompt_tokens_in_flight += n - 1
        else:
            request.num_prompt_tokens_in_flight += n


def schedule_decodes(step: int, entries: Iterable[Request], first_positions: Iterable[int]) -> None:
    """As `schedule`, where each computes one token and samples the next: what nearly every entry is."""
    for request, first in zip(entries, first_positions, strict=True):
        assert request.num_computed_tokens == first, (request.request_id, request.num_computed_tokens, first)
        request.num_computed_tokens = first + 1
        request.num_output_placeholders += 1
        request.last_sampling_step = step


def schedule_drafts(entries: Iterable[Request], num_drafts: Iterable[int]) -> None:
    """Count the drafts among them, which were taken for known tokens. Attached drafts are used up, however many fitted."""
    for request, drafts in zip(entries, num_drafts, strict=True):
        if drafts:
            request.num_output_placeholders += drafts
            request.num_drafts_in_flight += drafts
            request.num_prompt_tokens_in_flight -= drafts
        if request.drafts:
            request.drafts = []


def note_plain(request: Request, block_size: int, num_drafts: int) -> None:
    """Find out anew until which position a decode of a request that runs needs nothing but its token.

    No block and no limit is reached with up to `num_drafts` drafts, no hash is to be published, and no grammar, media or
    draft has a say. Whoever adds a known hash, attaches drafts or takes blocks away sets it to 0.
    """
    certain = len(request.tokens) + request.num_output_placeholders
    if (
        certain - request.num_computed_tokens != 1
        or request.grammar
        or request.media
        or request.drafts
        or len(request.block_hashes) > request.num_published_blocks
    ):
        request.plain_until = 0
        return
    request.plain_until = min(len(request.block_ids) * block_size, request.max_total_tokens - 1) - num_drafts


def settle_decodes(
    entries: Sequence[Request], num_tokens: Sequence[int], token_ids: Iterable[int], block_size: int
) -> list[Request]:
    """Count entries of the current epoch that came back with one more token each: what nearly every step is.

    `block_size` 0 means that nothing is hashed. Returns those whose last full block lies before the token: sampling it took
    that block's keys and values. One pass for counters and tokens, here and below: reaching a request costs more than
    what is done to it.
    """
    _settle_prompts(entries, num_tokens)
    filled: list[Request] = []
    for request, token in zip(entries, token_ids, strict=True):
        placeholders = request.num_output_placeholders = request.num_output_placeholders - 1
        assert placeholders >= 0, request.request_id
        tokens = request.tokens
        tokens.append(token)
        if block_size and (over := len(tokens) % block_size) < 2:
            if not over:
                extend_block_hashes(request, block_size)
            if over or block_size == 1:
                filled.append(request)
    return filled


def _settle_prompts(entries: Sequence[Request], num_tokens: Sequence[int]) -> None:
    """What entries that sampled have computed beside the token: of those who came in with the step, which are its last."""
    end = len(num_tokens)
    while end and num_tokens[end - 1] != 1:
        end -= 1
        _settle_prompt(entries[end], num_tokens[end] - 1)
    if num_tokens[:end].count(1) < end:
        for request, n in zip(entries[:end], num_tokens[:end], strict=True):
            _settle_prompt(request, n - 1)


def _settle_prompt(request: Request, n: int) -> None:
    left = request.num_prompt_tokens_in_flight = request.num_prompt_tokens_in_flight - n
    assert left >= 0, (request.request_id, left)


def settle_chunks(
    entries: Sequence[Request],
    num_tokens: Sequence[int],
    counts: Sequence[int],
    token_ids: Iterable[int],
    block_size: int,
) -> list[Request]:
    """As `settle_decodes`, with chunks among them: their `counts` are 0, and they bring nothing."""
    for request, n, count in zip(entries, num_tokens, counts, strict=True):
        if not count:
            _settle_prompt(request, n)
    sampled = list(compress(num_tokens, counts))
    return settle_decodes(list(compress(entries, counts)), sampled, token_ids, block_size)


def settle_drafts(
    entries: Iterable[Request],
    num_tokens: Iterable[int],
    num_drafts: Iterable[int],
    counts: Iterable[int],
    token_ids: Sequence[int],
    block_size: int,
) -> list[Request]:
    """As `settle_decodes`, with drafts: what was rejected, or cut off by a stop, was not computed after all.

    `counts` are the tokens kept of each entry, the one behind the last accepted draft included; 0 for a chunk.
    """
    filled: list[Request] = []
    runs, offset = array("q", token_ids), 0
    for request, n, drafts, count in zip(entries, num_tokens, num_drafts, counts, strict=True):
        if not count:
            assert not drafts, request.request_id
            _settle_prompt(request, n)
            continue
        if n != drafts + 1:
            _settle_prompt(request, n - drafts - 1)
        rejected = drafts + 1 - count
        assert 0 <= rejected <= drafts, (request.request_id, count, drafts)
        request.num_computed_tokens -= rejected
        request.num_drafts_in_flight -= drafts
        placeholders = request.num_output_placeholders = request.num_output_placeholders - drafts - 1
        assert placeholders >= 0, request.request_id
        tokens = request.tokens
        tokens += runs[offset : offset + count]
        offset += count
        if block_size:
            over = (len(tokens) - 1) % block_size
            if over < count:
                filled.append(request)
            if over + 1 < count or over + 1 == block_size:
                extend_block_hashes(request, block_size)
    assert offset == len(token_ids), (offset, len(token_ids))
    return filled


def settle_stale(request: Request, n: int, deliverable: bool) -> None:
    """Count an entry of an older epoch that came back: it touches no scheduling counter, whatever its tokens do."""
    request.num_stale_output_tokens -= n
    if deliverable:
        request.num_deliverable_stale_tokens -= n
    assert request.num_stale_output_tokens >= request.num_deliverable_stale_tokens >= 0, request.request_id


def append_stale(request: Request, token_ids: Iterable[int], block_size: int) -> None:
    """Known tokens that came back stale; `block_size` as above."""
    request.tokens.extend(token_ids)
    if block_size:
        extend_block_hashes(request, block_size)


def raise_epoch(request: Request, num_deliverable_stale_tokens: int) -> None:
    """What is in flight stops being current. Assignment, not addition: what was stale already is in flight still."""
    request.epoch += 1
    request.num_stale_output_tokens = request.num_in_flight_tokens
    request.num_deliverable_stale_tokens = num_deliverable_stale_tokens
    request.num_output_placeholders = 0
    request.num_drafts_in_flight = 0
    request.num_prompt_tokens_in_flight = 0
    request.drafts = []


def attach_drafts(request: Request, token_ids: list[int]) -> None:
    """The next decode verifies these."""
    request.drafts = token_ids
    request.plain_until = 0


def forget_computed(request: Request) -> list[int]:
    """Give up everything computed, and return the blocks that held it."""
    released, request.block_ids = request.block_ids, []
    request.num_computed_tokens = 0
    request.num_published_blocks = 0
    return released


def end_turn(request: Request, time_ns: int) -> None:
    """A session's turn has ended: go back to what can't be rolled back, and keep the blocks. Before the epoch rises."""
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


def lose_in_flight(request: Request) -> None:
    """What was in flight will never come back."""
    request.num_output_placeholders = 0
    request.num_drafts_in_flight = 0
    request.num_prompt_tokens_in_flight = 0
    request.num_stale_output_tokens = 0
    request.num_deliverable_stale_tokens = 0


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


def extend_block_hashes(request: Request, block_size: int) -> None:
    """Hash every full block of known tokens: each hash covers its parent's, so equal hashes mean equal prefixes.

    SHA-256, cut to 16 bytes: a fixed algorithm, so that a journal folds alike on any machine, and one that a tenant can't
    collide on purpose. The salt separates tenants from block 0 on.
    """
    request.plain_until = 0  # a known hash is to be published
    hashes, tokens = request.block_hashes, request.tokens
    for i in range(len(hashes), len(tokens) // block_size):
        start = i * block_size
        parent = hashes[-1] if i else root_hash(request.cache_salt, request.adapter)
        media = media_identity(request.media, start, block_size) if request.media else b""
        hashes.append(block_hash(parent, pack_tokens(tokens[start : start + block_size]), media))


def pack_tokens(tokens: "array[int]") -> bytes:
    """Tokens as bytes, alike on every machine: 8 each, the lowest first."""
    if sys.byteorder == "big":
        tokens = tokens[:]
        tokens.byteswap()
    return tokens.tobytes()


def block_hash(parent: bytes, packed_tokens: bytes, media: bytes = b"") -> bytes:
    """The chain hash of a block that follows one with hash `parent`."""
    return hashlib.sha256(parent + packed_tokens + media).digest()[:16]


def root_hash(cache_salt: str, adapter: str = "") -> bytes:
    """The parent of every first block under a salt and an adapter."""
    return hashlib.sha256(f"refold block 1\x00{adapter}\x00{cache_salt}".encode()).digest()[:16]


def media_identity(media: Iterable[Media], start: int, block_size: int) -> bytes:
    """Which media a block holds, and where in it: the tokens of two pictures are the same placeholders."""
    inside = [m for m in media if m.start < start + block_size and m.start + m.num_tokens > start]
    return "".join(f"\x00{m.digest}@{m.start - start}+{m.num_tokens}" for m in inside).encode()
