"""Counters of requests: what is in flight, what is stale, what is known.

The counters that engineers know by name are views over the window of in-flight steps (`refold.projections.steps`):

    num_in_flight_tokens         = sum of n            over the request's entries in flight
    num_stale_output_tokens      = sum of n            over those of an older epoch
    num_deliverable_stale_tokens = sum of n            over those of an older epoch marked `deliver`
    num_sampling_in_flight       = number              of those of the current epoch that sample
    num_output_placeholders      = sum of (1 + drafts) over those of the current epoch that sample

The hot path can't sum, so what is stored is what a decode changes least: the drafts among the placeholders, the known tokens
computed beside them (of prompts and recomputations), and what is stale. Placeholders follow from what is computed and what is
known: whoever samples computes the last known place or one beyond, each entry in flight one further (with drafts, as many
more), and what comes back makes known what was beyond. The others are sums. Law L2 holds both definitions together. Each is
written in this module only, but for what is computed, which a request forgets when it loses its blocks.

Nothing is ever subtracted from a counter of another epoch: an entry that comes back is matched with the epoch it was scheduled
in, and only entries of the current epoch touch the scheduling counters. So none can go below zero, and none is clamped.
"""

from array import array
from collections import deque
from collections.abc import Iterable, Sequence

from refold.projections.block_hashes import extend_block_hashes
from refold.projections.requests import Request
from refold.projections.steps import InFlightStep


def note_plain(request: Request, block_size: int, num_drafts: int) -> None:
    """Find out anew until which position a decode of a request that runs needs nothing but its token.

    No border of a block and no limit is reached with up to `num_drafts` drafts, no hash is to be published, and no grammar,
    media or draft has a say. Whoever adds a known hash or attaches drafts sets it to 0; who comes in is looked at anew.
    """
    first = request.num_computed_tokens
    if (
        first + 1 < len(request.tokens)
        or request.grammar
        or request.media
        or request.drafts
        or len(request.block_hashes) > request.num_published_blocks
    ):
        request.plain_until = 0
        return
    owned, border = len(request.block_ids) * block_size, (first // block_size + 1) * block_size
    end = owned if owned < border else border
    last = request.max_total_tokens - 1
    request.plain_until = (end if end < last else last) - num_drafts


def schedule(
    step: int,
    entries: Iterable[Request],
    num_tokens: Iterable[int],
    first_positions: Iterable[int],
    samples: Iterable[bool],
    num_drafts: Iterable[int],
) -> None:
    """Count entries that enter the window. `num_computed_tokens` is optimistic: it runs ahead of the worker.

    Attached drafts are used up, however many fitted.
    """
    columns = zip(entries, num_tokens, first_positions, samples, num_drafts, strict=True)
    for request, n, first, sampling, drafts in columns:
        assert request.num_computed_tokens == first, (request.request_id, request.num_computed_tokens, first)
        end = request.num_computed_tokens = first + n
        if sampling:
            request.num_drafts_in_flight += drafts
            request.last_sampling_step = step
            if n != 1 + drafts:
                request.num_prompt_tokens_in_flight += n - 1 - drafts
                assert end >= len(request.tokens), (request.request_id, end)
        else:
            request.num_prompt_tokens_in_flight += n
            assert end < len(request.tokens), (request.request_id, end)
        if request.drafts:
            request.drafts = []


def schedule_decodes(
    step: int, entries: Sequence[Request], first_positions: Sequence[int], ends: Iterable[int]
) -> None:
    """As `schedule`, where each computes one token and samples the next: what nearly every entry is."""
    computed = [request.num_computed_tokens for request in entries]
    assert computed == first_positions, (step, computed, first_positions)
    for request, end in zip(entries, ends, strict=True):
        request.num_computed_tokens = end
        request.last_sampling_step = step


def settle_decodes(step: InFlightStep, token_ids: Sequence[int], block_size: int) -> list[Request]:
    """Count the entries of a step that came back with one more token each: what nearly every step is.

    `block_size` 0 means that nothing is hashed. Returns those whose last full block lies before the token: sampling it took
    that block's keys and values.
    """
    texts, requests = step.batch.texts, step.requests
    assert list(map(len, texts)) == step.sampled_positions, step.step
    assert len(token_ids) == len(texts), (step.step, len(token_ids))
    deque(map(array.append, texts, token_ids), maxlen=0)
    filled: list[Request] = []
    for entry in step.due_entries:
        request, n = requests[entry], step.num_tokens[entry]
        if n != 1:
            _settle_prompt(request, n - 1)
        if block_size:
            over = len(request.tokens) % block_size
            if not over:
                extend_block_hashes(request, block_size)
            if over == 1 or block_size == 1:
                filled.append(request)
    return filled


def _settle_prompt(request: Request, n: int) -> None:
    left = request.num_prompt_tokens_in_flight = request.num_prompt_tokens_in_flight - n
    assert left >= 0, (request.request_id, left)


def settle(
    entries: Iterable[Request],
    num_tokens: Iterable[int],
    num_drafts: Iterable[int],
    counts: Iterable[int],
    token_ids: Sequence[int],
    block_size: int,
) -> list[Request]:
    """Count entries of the current epoch that came back: chunks, and samples with drafts or without.

    What was rejected, or cut off by a stop, was not computed after all. `counts` are the tokens kept of each entry, the one behind the last accepted draft included; 0 for a chunk.
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
        if count <= drafts:
            request.num_computed_tokens -= drafts + 1 - count
        assert 1 <= count <= drafts + 1, (request.request_id, count, drafts)
        left = request.num_drafts_in_flight = request.num_drafts_in_flight - drafts
        tokens = request.tokens
        tokens += runs[offset : offset + count]
        offset += count
        last = len(tokens) - 1
        assert request.num_computed_tokens - last >= left >= 0, (request.request_id, left)
        if block_size:
            over = last % block_size
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
    request.num_drafts_in_flight = 0
    request.num_prompt_tokens_in_flight = 0
    request.drafts = []


def attach_drafts(request: Request, token_ids: list[int]) -> None:
    """The next decode verifies these."""
    request.drafts = token_ids
    request.plain_until = 0


def lose_in_flight(request: Request) -> None:
    """What was in flight will never come back. The placeholders go with what is computed: `forget_computed`."""
    request.num_drafts_in_flight = 0
    request.num_prompt_tokens_in_flight = 0
    request.num_stale_output_tokens = 0
    request.num_deliverable_stale_tokens = 0
