"""The prefix cache as a plan sees it: which blocks a request that comes in needn't compute.

A block may be shared if it holds the request's next hash: published, or promised by an entry of this very step that will fill
it (the worker writes a step's keys and values before it reads them). Not if this plan gives it away, nor behind a fence.
"""

from bisect import bisect_left
from itertools import repeat, takewhile

from refold.projections.requests import Request
from refold.scheduler.free_blocks import NO_HIT, Hit
from refold.scheduler.scratch import Plan

_is_block = (0).__le__  # what a look-up answers; -1 where there is none


def prefix_hit(plan: Plan, request: Request) -> Hit:
    """Blocks that hold the longest known prefix, at most all tokens but one: something must be computed to sample from.

    Whoever wants the log-probabilities of its prompt, and has no output yet, computes all of it.
    """
    if request.block_ids or (request.sampling.prompt_logprobs is not None and not request.num_output_tokens):
        return NO_HIT
    known = _known_prefix(plan, request)
    if not plan.free.released and _are_owned(plan, known):
        return Hit(known, [])
    usable = known[: _num_usable(plan, request, known)]
    return Hit(usable, plan.free.idle(usable))


def _known_prefix(plan: Plan, request: Request) -> list[int]:
    """The blocks with the request's hashes, in the pool or promised by this plan, up to the first that isn't there."""
    by_hash, promised = plan.state.pool.block_by_hash, plan.hashes
    hashes = request.block_hashes[: (len(request.tokens) - 1) // plan.block_size]
    num_common = _num_common(plan.known_hashes, hashes)
    known = plan.known_blocks[:num_common]
    start = len(known)
    if start < len(hashes) and hashes[start] in by_hash:
        known += takewhile(_is_block, map(by_hash.get, hashes[start:], repeat(-1)))
    for content_hash in hashes[len(known) :] if promised else ():
        block = by_hash.get(content_hash, promised.get(content_hash))
        if block is None:
            break
        known.append(block)
    plan.known_hashes, plan.known_blocks, plan.num_known_owned = hashes, known, min(plan.num_known_owned, num_common)
    return known


def _are_owned(plan: Plan, known: list[int]) -> bool:
    """Whether somebody owns each of the blocks just looked up: then they can be shared at once, and it costs no room."""
    if 0 in map(plan.state.pool.ref_counts.__getitem__, known[plan.num_known_owned :]):
        return False
    plan.num_known_owned = len(known)
    return True


def _num_common(hashes: list[bytes], others: list[bytes]) -> int:
    """How long a prefix two chains share. A hash covers its parents: where two are equal, so are all before them."""
    if not hashes or not others or hashes[0] != others[0]:
        return 0
    return bisect_left(range(min(len(hashes), len(others))), True, key=lambda i: hashes[i] != others[i])


def _num_usable(plan: Plan, request: Request, known: list[int]) -> int:
    """How many of the known blocks this plan may share: up to the first that it gives away, or that is behind a fence."""
    pool, free, promised = plan.state.pool, plan.free, plan.hashes
    for index, (content_hash, block) in enumerate(zip(request.block_hashes, known, strict=False)):
        idle = pool.ref_counts[block] == 0
        if idle and promised.get(content_hash) == block:
            continue  # taken by this very plan, for somebody who is about to write it
        if block in free.released or (idle and (block in free.evicted or pool.is_fenced(block))):
            return index
    return len(known)


def promise(plan: Plan, request: Request, table: list[int], start: int, end: int) -> None:
    """Let later entries of this step share what this one is about to fill with known tokens: blocks `start` to `end`."""
    by_hash, promised = plan.state.pool.block_by_hash, plan.hashes
    filled = zip(request.block_hashes[start:end], table[start:end], strict=False)
    new = {content: block for content, block in filled if content not in by_hash and content not in promised}
    if new:
        promised.update(new)
        plan.free.own(new.values())
