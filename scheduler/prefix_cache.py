"""The prefix cache as a plan sees it: which blocks a request that comes in needn't compute.

A block may be shared if it holds the request's next hash: published, or promised by an entry of this very step that will fill
it (the worker writes a step's keys and values before it reads them). Not if this plan gives it away, nor behind a fence.
"""

from bisect import bisect_left
from itertools import repeat, takewhile

from refold.projections.requests import Request
from refold.scheduler.plan_parts import NO_HIT, Hit, Promise
from refold.scheduler.scratch import Plan

_is_block = (0).__le__  # what a look-up answers; -1 where there is none


def prefix_hit(plan: Plan, request: Request) -> Hit:
    """Blocks that hold the longest known prefix, at most all tokens but one: something must be computed to sample from.

    Whoever wants the log-probabilities of its prompt, and has no output yet, computes all of it.
    """
    if request.block_ids or (request.sampling.prompt_logprobs is not None and not request.num_output_tokens):
        return NO_HIT
    known = _known_prefix(plan, request)
    if not known:
        return NO_HIT
    if not plan.free.released and _are_owned(plan, known):
        return Hit(known, [])
    usable = known[: _num_usable(plan, request, known)]
    return Hit(usable, plan.free.idle(usable))


def _known_prefix(plan: Plan, request: Request) -> list[int]:
    """The blocks with the request's hashes, in the pool or promised by this plan, up to the first that isn't there."""
    by_hash = plan.state.pool.block_by_hash
    hashes = request.block_hashes[: (len(request.tokens) - 1) // plan.block_size]
    num_common = _num_common(plan.known_hashes, hashes)
    known = plan.known_blocks[:num_common]
    start = len(known)
    if start < len(hashes) and hashes[start] in by_hash:
        known += takewhile(_is_block, map(by_hash.get, hashes[start:], repeat(-1)))
    plan.known_hashes, plan.known_blocks, plan.num_known_owned = hashes, known, min(plan.num_known_owned, num_common)
    if plan.promises and len(known) < len(hashes) and hashes[len(known)] in plan.promises:
        return _with_promises(plan, hashes, known)
    return known


def _with_promises(plan: Plan, hashes: list[bytes], known: list[int]) -> list[int]:
    """`known` and what follows it, in the pool or promised."""
    by_hash, promise = plan.state.pool.block_by_hash, None
    found = list(known)
    for index in range(len(known), len(hashes)):
        block = by_hash.get(hashes[index])
        if block is None:
            if promise is None or not promise.has(index, hashes[index]):
                promise = plan.promises.get(hashes[index])
            if promise is None:
                break
            block = promise.table[index]
            plan.free.own(block)
        found.append(block)
    return found


def _are_owned(plan: Plan, known: list[int]) -> bool:
    """Whether somebody owns each of the blocks just looked up: then they can be shared at once, and it costs no room."""
    if 0 in map(plan.state.pool.counts.__getitem__, known[plan.num_known_owned :]):
        return False
    plan.num_known_owned = min(len(known), len(plan.known_blocks))
    return True


def _num_common(hashes: list[bytes], others: list[bytes]) -> int:
    """How long a prefix two chains share. A hash covers its parents: where two are equal, so are all before them."""
    if not hashes or not others or hashes[0] != others[0]:
        return 0
    return bisect_left(range(min(len(hashes), len(others))), True, key=lambda i: hashes[i] != others[i])


def _num_usable(plan: Plan, request: Request, known: list[int]) -> int:
    """How many of the known blocks this plan may share: up to the first that it gives away, or that is behind a fence."""
    pool, free = plan.state.pool, plan.free
    for index, (content_hash, block) in enumerate(zip(request.block_hashes, known, strict=False)):
        idle = pool.counts[block] == 0
        if idle and content_hash not in pool.block_by_hash:
            continue  # promised: taken by this very plan, for somebody who is about to write it
        if block in free.released or (idle and (block in free.evicted or pool.is_fenced(block))):
            return index
    return len(known)


def promise(plan: Plan, request: Request, table: list[int], start: int, end: int) -> None:
    """Let later entries of this step share what this one is about to fill with known tokens: blocks `start` to `end`.

    A promise is found by the hash of its first block that nobody has yet, and followed from there. Whoever computes what is
    promised already (its prompt's log-probabilities may take that) promises only what comes after, or is another's.
    """
    hashes, by_hash, promises = request.block_hashes, plan.state.pool.block_by_hash, plan.promises
    end = end if end < len(hashes) else len(hashes)
    while start < end:
        if hashes[start] not in by_hash:
            other = promises.setdefault(hashes[start], Promise(start, end, hashes, table))
            if other.hashes is hashes:
                return
            last = min(end, other.end)
            start = bisect_left(range(last), True, lo=start, key=lambda i: hashes[i] != other.hashes[i])
        else:
            start += 1
