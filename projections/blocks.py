"""KV blocks: who owns them, which hold a known prefix, which may be taken.

Every block is in exactly one place (law L3):

    owned    reference count >= 1 (`refold.projections.runs` tells how what many share is counted)
    fenced   count 0, but an entry in flight may still write it; free once that step has come back
    blank    count 0, no known content; taken first, the last freed first
    cached   count 0, content known by hash; taken after the blank ones, the longest unused first

Publication of a hash has two phases. When a step that will fill a block with known tokens is scheduled, the hash is
published provisionally: entries of the same or a later step may share the block, because the worker runs steps in order
and writes a step's keys and values before it reads them. When that step comes back, the hash is committed. If the step
never ran, the worker was lost, and all content with it. Only one block carries a hash at a time; a second block with the
same content stays blank.
"""

from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence

from refold.projections.runs import Run, exact_counts


class BlockPool:
    """The pool. Changed by the functions of this module only, which appliers call.

    `counts` are the owners of each block, a run as one of them; `runs`, by their last block. `provisional`: by step in flight,
    the blocks that it writes and that are published already.
    """

    __slots__ = (
        "block_by_hash",
        "block_size",
        "counts",
        "fences",
        "free_blank",
        "free_cached",
        "hashes",
        "num_blocks",
        "num_fenced",
        "provisional",
        "runs",
    )

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.counts = [0] * num_blocks
        self.runs: dict[int, Run] = {}
        self.hashes: list[bytes | None] = [None] * num_blocks
        self.block_by_hash: dict[bytes, int] = {}
        self.free_blank: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks - 1, -1, -1))
        self.free_cached: OrderedDict[int, None] = OrderedDict()
        self.fences: deque[tuple[int, list[int]]] = deque()
        self.num_fenced = 0
        self.provisional: dict[int, set[int]] = {}

    @property
    def num_free(self) -> int:
        """Blocks that may be taken now, cached ones included."""
        return len(self.free_blank) + len(self.free_cached)

    @property
    def ref_counts(self) -> list[int]:
        """How many requests own each block. A list of its own if anything is shared."""
        return exact_counts(self.counts, self.runs.values()) if self.runs else self.counts

    def is_fenced(self, block: int) -> bool:
        """Whether a hashed block is owned by nobody but may still be written: it can be neither taken nor shared."""
        return self.counts[block] == 0 and block not in self.free_cached


def take(pool: BlockPool, block_ids: Sequence[int]) -> list[int]:
    """Own free blocks. Returns those that lost a cached content by it."""
    counts, blank, cached = pool.counts, pool.free_blank, pool.free_cached
    assert not any(map(counts.__getitem__, block_ids)), block_ids
    evicted = [block for block in block_ids if block not in blank] if blank else list(block_ids)
    for block in block_ids if not evicted else set(block_ids).difference(evicted):
        del blank[block]
    for block in evicted:
        del cached[block]
    for block in block_ids:
        counts[block] = 1
    if evicted:
        _unpublish(pool, evicted)
    return evicted


def share(pool: BlockPool, block_ids: list[int]) -> Run | None:
    """Own blocks whose content is known, together with whoever owns them already; returns the run they are held by, if any.

    `block_ids` is kept: nobody may change it.
    """
    if not block_ids:
        return None
    run = pool.runs.get(block_ids[-1])
    if run is not None and run.block_ids == block_ids:
        assert pool.counts[block_ids[-1]], block_ids
        run.num_holders += 1
        return run
    assert all(map(pool.hashes.__getitem__, block_ids)), block_ids
    counts, cached = pool.counts, pool.free_cached
    for block in block_ids:
        count = counts[block]
        if count == 0:
            del cached[block]
        counts[block] = count + 1
    return pool.runs.setdefault(block_ids[-1], Run(block_ids)) if run is None else None


def split(pool: BlockPool, run: Run) -> None:
    """One who holds a run owns its blocks one by one from now on: it is about to give up some of them."""
    if run.num_holders == 1:
        del pool.runs[run.block_ids[-1]]
        return
    run.num_holders -= 1
    for block in run.block_ids:
        pool.counts[block] += 1


def release(pool: BlockPool, block_ids: Sequence[int], fence_step: int | None, run: Run | None = None) -> None:
    """Disown a request's block table, tail first, so that the head of a prefix stays cached longest.

    `fence_step` is the last in-flight step that may still write the blocks, None if there is none. `run` is what the table
    begins with, if it's held as one: its last holder gives up its blocks.
    """
    if run is not None:
        run.num_holders -= 1
        if run.num_holders:
            block_ids = block_ids[len(run.block_ids) :]
        else:
            del pool.runs[run.block_ids[-1]]
    idle: list[int] = []
    counts = pool.counts
    if list(map(counts.__getitem__, block_ids)).count(1) == len(block_ids):  # nobody shares any of them
        for block in block_ids:
            counts[block] = 0
        idle = list(reversed(block_ids))
    for block in reversed(block_ids) if not idle else ():
        count = counts[block] - 1
        counts[block] = count
        if count <= 0:
            assert count == 0, block
            idle.append(block)
    if fence_step is None:
        _set_free(pool, idle)
    elif idle:
        pool.fences.append((fence_step, idle))
        pool.num_fenced += len(idle)


def publish(pool: BlockPool, block_ids: Sequence[int], content_hashes: Sequence[bytes], step: int | None) -> None:
    """Make owned blocks findable by their contents; provisionally until `step` has come back, at once if None.

    Of several with one content the first is found.
    """
    hashes, by_hash = pool.hashes, pool.block_by_hash
    assert all(map(pool.counts.__getitem__, block_ids)), block_ids
    unique = len(content_hashes) == 1 or len(set(content_hashes)) == len(content_hashes)
    if not unique or any(map(hashes.__getitem__, block_ids)) or not by_hash.keys().isdisjoint(content_hashes):
        new: dict[bytes, int] = {}
        for block, content_hash in zip(block_ids, content_hashes, strict=True):
            if hashes[block] is None and content_hash not in by_hash:
                new.setdefault(content_hash, block)
        block_ids, content_hashes = list(new.values()), list(new)
    for block, content_hash in zip(block_ids, content_hashes, strict=True):
        hashes[block] = content_hash
    by_hash.update(zip(content_hashes, block_ids, strict=True))
    if step is not None:
        pool.provisional.setdefault(step, set()).update(block_ids)


def step_came_back(pool: BlockPool, step: int) -> None:
    """Commit what the step wrote, and free what was fenced by it."""
    pool.provisional.pop(step, None)
    if pool.fences:
        _lift_fences(pool, step)


def forget_content(pool: BlockPool) -> None:
    """No block's content is known any more; who owns what stays."""
    for block in pool.free_cached:
        pool.free_blank[block] = None
    pool.free_cached.clear()
    pool.hashes = [None] * pool.num_blocks
    pool.block_by_hash.clear()
    pool.provisional.clear()


def forget_unshared(pool: BlockPool, shared: Mapping[int, bytes], provisional: dict[int, set[int]]) -> None:
    """Know the content of `shared` blocks only (block -> hash), and free blocks in an order that tells nothing of the past."""
    owners = pool.ref_counts
    assert all(owners[block] > 1 for block in shared), shared
    pool.hashes = [shared.get(block) for block in range(pool.num_blocks)]
    pool.block_by_hash = {content_hash: block for block, content_hash in shared.items()}
    assert len(pool.block_by_hash) == len(shared), shared
    pool.provisional = provisional
    free = sorted((*pool.free_blank, *pool.free_cached), reverse=True)
    pool.free_blank = OrderedDict.fromkeys(free)
    pool.free_cached = OrderedDict()


def believe(pool: BlockPool, block: int, content_hash: bytes) -> None:
    """Take the journal's word for what a block holds: tokens were erased, and what followed from them can't be told."""
    known = pool.hashes[block]
    if known == content_hash:
        return
    other = pool.block_by_hash.get(content_hash)
    if other is not None:
        pool.hashes[other] = None
        for written in pool.provisional.values():
            written.discard(other)
        if other in pool.free_cached:
            del pool.free_cached[other]
            pool.free_blank[other] = None
    if known is not None:
        del pool.block_by_hash[known]
    pool.hashes[block] = content_hash
    pool.block_by_hash[content_hash] = block
    if block in pool.free_blank:
        del pool.free_blank[block]
        pool.free_cached[block] = None


def _lift_fences(pool: BlockPool, step: int) -> None:
    kept: deque[tuple[int, list[int]]] = deque()
    for fence, idle in pool.fences:
        if fence > step:
            kept.append((fence, idle))
            continue
        pool.num_fenced -= len(idle)
        _set_free(pool, idle)
    pool.fences = kept


def _set_free(pool: BlockPool, idle: Sequence[int]) -> None:
    blank, cached, hashes = pool.free_blank, pool.free_cached, pool.hashes
    assert not any(map(pool.counts.__getitem__, idle)), idle
    for block in idle:
        (blank if hashes[block] is None else cached)[block] = None


def _unpublish(pool: BlockPool, block_ids: Sequence[int]) -> None:
    hashes, by_hash = pool.hashes, pool.block_by_hash
    for written in pool.provisional.values():
        assert written.isdisjoint(block_ids), block_ids
    for content_hash in map(hashes.__getitem__, block_ids):
        assert content_hash is not None, block_ids
        del by_hash[content_hash]
    for block in block_ids:
        hashes[block] = None
