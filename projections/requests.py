"""Requests and their counters.

The counters that engineers know by name are views over the window of in-flight steps (`refold.projections.steps`):

    num_in_flight_tokens         = sum of n            over the request's entries in flight
    num_stale_output_tokens      = sum of n            over those of an older epoch
    num_deliverable_stale_tokens = sum of n            over those of an older epoch marked `deliver`
    num_sampling_in_flight       = number              of those of the current epoch that sample
    num_output_placeholders      = sum of (1 + drafts) over those of the current epoch that sample

They are kept incrementally, because the hot path can't sum, and law L2 holds both definitions together. Each is written
in this module only. Nothing is ever subtracted from a counter of another epoch: an entry that comes back is matched with
the epoch it was scheduled in, and only entries of the current epoch touch the scheduling counters. So none can go below
zero, and none is clamped.
"""

import hashlib
import struct
from collections import deque
from collections.abc import Iterable, Sequence
from functools import lru_cache

from refold.journal.events import EngineConfig, FinishReason, RequestSubmitted, Sampling

WAITING, RUNNING, PREEMPTED, FINISHED = "waiting", "running", "preempted", "finished"

REMEMBERED_FINISHED_IDS = 65_536
"""How many finished requests still hold their client id against reuse. Bounded, so that an engine can run for ever."""


class Request:
    """One request, live or finished with entries still in flight. Changed by appliers only."""

    __slots__ = (
        "arrival_ns",
        "block_hashes",
        "block_ids",
        "cache_salt",
        "epoch",
        "finish_reason",
        "handle",
        "max_total_tokens",
        "min_total_tokens",
        "num_computed_tokens",
        "num_deliverable_stale_tokens",
        "num_in_flight_tokens",
        "num_output_placeholders",
        "num_preemptions",
        "num_prompt_tokens",
        "num_published_blocks",
        "num_sampling_in_flight",
        "num_stale_output_tokens",
        "priority",
        "queue_key",
        "request_id",
        "sampling",
        "status",
        "stop_ids",
        "tokens",
    )

    def __init__(self, event: RequestSubmitted, config: EngineConfig) -> None:
        self.handle = event.handle
        self.request_id = event.request_id
        self.sampling: Sampling = event.sampling
        self.arrival_ns = event.arrival_ns
        self.priority = event.priority
        self.cache_salt = event.cache_salt
        self.tokens = list(event.prompt_token_ids)
        self.num_prompt_tokens = len(self.tokens)
        self.queue_key: tuple[int, int] = (0, self.handle)
        self.status = WAITING
        self.finish_reason: FinishReason | None = None
        self.epoch = 0
        self.num_computed_tokens = 0
        self.num_output_placeholders = 0
        self.num_sampling_in_flight = 0
        self.num_in_flight_tokens = 0
        self.num_stale_output_tokens = 0
        self.num_deliverable_stale_tokens = 0
        self.num_preemptions = 0
        self.block_ids: list[int] = []
        self.num_published_blocks = 0
        self.block_hashes: list[bytes] = []
        self.max_total_tokens = 0
        self.min_total_tokens = 0
        self.stop_ids: frozenset[int] = frozenset()
        configure(self, config)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.num_prompt_tokens


class RequestTable:
    """All requests that the engine still has to do with, by handle, in order of admission."""

    __slots__ = ("by_handle", "finished_ids", "handle_by_id", "next_handle")

    def __init__(self) -> None:
        self.by_handle: dict[int, Request] = {}
        self.handle_by_id: dict[str, int] = {}
        self.finished_ids: deque[str] = deque()
        self.next_handle = 1

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
    request.block_hashes = []
    if config.enable_prefix_caching:
        extend_block_hashes(request, config.block_size)


def submit(table: RequestTable, event: RequestSubmitted, config: EngineConfig) -> Request:
    """Add a request."""
    assert event.handle == table.next_handle, (event.handle, table.next_handle)
    request = Request(event, config)
    table.by_handle[event.handle] = request
    table.handle_by_id[event.request_id] = event.handle
    table.next_handle += 1
    return request


def schedule(entries: Sequence[Request], num_tokens: Sequence[int], sampling: Iterable[Request]) -> None:
    """Count entries that enter the window. `num_computed_tokens` is optimistic: it runs ahead of the worker."""
    for request, n in zip(entries, num_tokens, strict=True):
        request.num_computed_tokens += n
        request.num_in_flight_tokens += n
    for request in sampling:
        request.num_output_placeholders += 1
        request.num_sampling_in_flight += 1


def settle_current(entries: Sequence[Request], num_tokens: Iterable[int], sampling: Iterable[Request]) -> None:
    """Count entries of the current epoch that came back."""
    for request, n in zip(entries, num_tokens, strict=True):
        request.num_in_flight_tokens -= n
        assert request.num_in_flight_tokens >= request.num_stale_output_tokens, request.request_id
    for request in sampling:
        request.num_output_placeholders -= 1
        request.num_sampling_in_flight -= 1
        assert request.num_output_placeholders >= 0, request.request_id


def settle_stale(request: Request, n: int, deliverable: bool) -> None:
    """Count an entry of an older epoch that came back: it touches no scheduling counter, whatever its tokens do."""
    request.num_in_flight_tokens -= n
    request.num_stale_output_tokens -= n
    if deliverable:
        request.num_deliverable_stale_tokens -= n
    assert request.num_in_flight_tokens >= request.num_stale_output_tokens >= request.num_deliverable_stale_tokens >= 0


def append_tokens(entries: Iterable[Request], token_ids: Iterable[int], block_size: int) -> None:
    """One more known token for each. `block_size` 0 means that nothing is hashed."""
    for request, token in zip(entries, token_ids, strict=True):
        tokens = request.tokens
        tokens.append(token)
        if block_size and not len(tokens) % block_size:
            extend_block_hashes(request, block_size)


def raise_epoch(request: Request, num_deliverable_stale_tokens: int) -> None:
    """What is in flight stops being current. Assignment, not addition: what was stale already is in flight still."""
    request.epoch += 1
    request.num_stale_output_tokens = request.num_in_flight_tokens
    request.num_deliverable_stale_tokens = num_deliverable_stale_tokens
    request.num_output_placeholders = 0
    request.num_sampling_in_flight = 0


def forget_computed(request: Request) -> list[int]:
    """Give up everything computed, and return the blocks that held it."""
    released, request.block_ids = request.block_ids, []
    request.num_computed_tokens = 0
    request.num_published_blocks = 0
    return released


def lose_in_flight(request: Request) -> None:
    """What was in flight will never come back."""
    request.num_in_flight_tokens = 0
    request.num_stale_output_tokens = 0
    request.num_deliverable_stale_tokens = 0


def finish(table: RequestTable, request: Request, reason: FinishReason) -> None:
    """The request has ended. It stays in the table until its entries in flight have come back."""
    assert request.status is not FINISHED, request.request_id
    request.status = FINISHED
    request.finish_reason = reason
    table.finished_ids.append(request.request_id)
    if len(table.finished_ids) > REMEMBERED_FINISHED_IDS:
        del table.handle_by_id[table.finished_ids.popleft()]
    forget_if_drained(table, request)


def forget_if_drained(table: RequestTable, request: Request) -> None:
    """Drop a finished request that nothing in flight names any more."""
    if request.status is FINISHED and request.num_in_flight_tokens == 0:
        del table.by_handle[request.handle]


@lru_cache(maxsize=8)
def _block_layout(block_size: int) -> struct.Struct:
    return struct.Struct(f"<{block_size}q")


def extend_block_hashes(request: Request, block_size: int) -> None:
    """Hash every full block of known tokens: each hash covers its parent's, so equal hashes mean equal prefixes.

    SHA-256, cut to 16 bytes: a fixed algorithm, so that a journal folds alike on any machine, and one that a tenant can't
    collide on purpose. The salt separates tenants from block 0 on.
    """
    hashes, layout = request.block_hashes, _block_layout(block_size)
    for i in range(len(hashes), len(request.tokens) // block_size):
        parent = hashes[i - 1] if i else root_hash(request.cache_salt)
        hashes.append(block_hash(parent, layout.pack(*request.tokens[i * block_size : (i + 1) * block_size])))


def block_hash(parent: bytes, packed_tokens: bytes) -> bytes:
    """The chain hash of a block that follows one with hash `parent`."""
    return hashlib.sha256(parent + packed_tokens).digest()[:16]


def root_hash(cache_salt: str) -> bytes:
    """The parent of every first block under a salt."""
    return hashlib.sha256(b"refold block 1\x00" + cache_salt.encode()).digest()[:16]
