"""The laws: what holds after every event, whatever happened.

`check_state` looks at one state. The laws that need a memory (each entry resolved once, each output delivered once, each
block's content computed) are in `refold.scheduler.lawbook`.

A broken law is a bug of ours (`InvariantViolation`), never the fault of an input.
"""

from collections import Counter

from refold.journal.errors import InvariantViolation
from refold.projections.blocks import BlockPool
from refold.projections.encoder import EncoderCache
from refold.projections.requests import FINISHED, IDLE, PREEMPTED, RUNNING, WAITING, Request
from refold.scheduler.state import State

LAWS: dict[str, str] = {
    "L1": "each entry of a step is resolved exactly once (delivered, stale-consumed or lost), steps in order",
    "L2": "the counters equal the sums over the window; 0 <= stale <= in flight; placeholders >= 0",
    "L3": "owned + fenced + blank + cached = all blocks; reference counts equal owners; a shared block is full and hashed",
    "L4": "a block's hash is the chain hash of the tokens computed into it",
    "L5": "output indices of a request are 0, 1, 2, ... without gap or repeat",
    "L6": "every live request is in exactly one queue, the one of its status, and the queues are in order",
    "L7": "who doesn't run has no placeholders, no drafts and, but for sessions between turns, nothing computed and no blocks",
    "L8": "token budget, sequence limit and model length hold; every entry has at least one token",
    "L9": "a request finishes once; after that only stale output names it",
    "L10": "with nothing live and nothing in flight, every block is free",
    "L11": "the recorded digest equals the digest of the fold",
    "L13": "the encoder cache holds what it counts, and only what nobody needs is evictable",
    "L14": "only live requests are under suspicion",
    "L15": "who is said to decode plainly needs no block and no limit, and has nothing to publish or to verify",
    "L16": "with a prefix cache, every full block of a live request's known tokens has its hash",
}


def broken(law: str, message: str) -> InvariantViolation:
    """The violation of a law, ready to be raised."""
    return InvariantViolation(f"{law} broken ({LAWS[law]}): {message}")


def check_state(state: State) -> None:
    """L2, L3, L6, L7, L8 (limits), L10, L13, L14, L15 and L16 on one state.

    Raises:
        InvariantViolation: a law is broken; the message names it.
    """
    sums = _sums_in_flight(state)
    num_queued = _check_queues(state)
    num_live, holders = _check_requests(state, sums)
    if num_queued != num_live:
        raise broken("L6", f"{num_queued} requests are queued, {num_live} live")
    _check_blocks(state)
    cache = state.encoder
    if holders or cache.sizes or cache.users or cache.evictable or cache.used:
        _check_encoder(cache, holders)
    if state.suspicion.num_losses:
        _check_suspicion(state)
    if state.is_quiescent:
        free = state.pool.num_free
        if free != state.pool.num_blocks:
            raise broken("L10", f"{free} of {state.pool.num_blocks} blocks free")


def _check_requests(state: State, sums: dict[int, list[int]]) -> tuple[int, list[Request]]:
    """Counters are the sums over the window, and each request is as its status says. Returns how many live, and who holds media."""
    num_live, holders = 0, []
    config, hashed_block_size = state.opened_config, state.pool.block_size
    if config is None or not config.enable_prefix_caching:
        hashed_block_size = 0
    for handle, r in state.requests.by_handle.items():
        placeholders, stale, drafts = r.num_output_placeholders, r.num_stale_output_tokens, r.num_drafts_in_flight
        in_flight = r.num_in_flight_tokens
        kept = [in_flight, stale, r.num_deliverable_stale_tokens, placeholders, placeholders - drafts]
        if kept != sums.get(handle, _NOTHING):
            raise broken("L2", f"{r.request_id}: {kept} kept, {sums.get(handle, _NOTHING)} summed")
        if r.media_held:
            holders.append(r)
        known, status = len(r.tokens), r.status
        if status is RUNNING:
            if not r.num_computed_tokens <= known + placeholders <= r.max_total_tokens <= state.config.max_model_len:
                raise broken("L8", f"{r.request_id} overruns")
            if r.num_computed_tokens < r.plain_until and not _is_plain(r, state):
                raise broken(
                    "L15", f"{r.request_id} at {r.num_computed_tokens} is said to be plain until {r.plain_until}"
                )
        elif placeholders or drafts or r.drafts or not _may_hold(r):
            raise broken("L7", f"{r.request_id} is {r.status} with {r.num_computed_tokens} computed tokens")
        elif status is FINISHED:
            if not in_flight:
                raise broken("L9", f"{r.request_id} finished, drained and still kept")
            continue
        num_live += 1
        if hashed_block_size and len(r.block_hashes) != known // hashed_block_size:
            raise broken("L16", f"{r.request_id}: {len(r.block_hashes)} hashes of {known} tokens")
    return num_live, holders


_NOTHING = [0, 0, 0, 0, 0]


def _sums_in_flight(state: State) -> dict[int, list[int]]:
    """By handle: tokens in flight, stale ones, those of them to be delivered, placeholders, samples."""
    by_handle = state.requests.by_handle
    sums: dict[int, list[int]] = {}
    for step in state.window.in_flight:
        stale, chunks, num_drafts = step.stale, step.chunk_entries, step.num_drafts
        for entry, (handle, n, epoch) in enumerate(zip(step.handles, step.num_tokens, step.epochs, strict=True)):
            request = by_handle.get(handle)
            if request is None:
                raise broken("L1", f"step {step.step} in flight names unknown handle {handle}")
            is_stale = epoch < request.epoch
            if is_stale != (entry in stale):
                raise broken("L2", f"{request.request_id} in step {step.step}: the stale mark contradicts the epoch")
            if step.delivered and not is_stale:
                continue
            row = sums.get(handle)
            if row is None:
                row = sums[handle] = [0, 0, 0, 0, 0]
            row[0] += n
            if is_stale:
                row[1] += n
                row[2] += n * (stale[entry] == "deliver")
            elif entry not in chunks:
                row[3] += 1 + num_drafts[entry] if num_drafts else 1
                row[4] += 1
    return sums


def _check_blocks(state: State) -> None:
    """Every block is in one place, and its owners are as many as are counted."""
    pool, tables, has_runs = state.pool, [], bool(state.pool.runs)
    for request in state.requests.by_handle.values():
        tables += request.block_ids
        has_runs = has_runs or request.run is not None
    owned, fenced = set(tables), [block for _, idle in pool.fences for block in idle] if pool.fences else []
    if pool.num_fenced != len(fenced):
        raise broken("L3", f"{pool.num_fenced} counted fenced, {len(fenced)} are")
    blank, cached = list(pool.free_blank), list(pool.free_cached)
    unowned = fenced + blank + cached
    if not len(owned) + len(unowned) == len(owned.union(unowned)) == pool.num_blocks:
        raise broken("L3", f"a block is in no place, or in two: fenced {fenced}, owned {sorted(owned)}")
    counts = pool.ref_counts
    if counts.count(0) != len(unowned):
        raise broken("L3", f"{sorted(unowned)} have no owner, reference counts {counts}")
    if len(owned) != len(tables):
        _check_shared(pool, tables)
    elif list(map(counts.__getitem__, tables)).count(1) != len(tables):
        raise broken("L3", f"{sorted(owned)} have one owner each, reference counts {counts}")
    if has_runs:
        _check_runs(state)
    _check_hashes(pool, blank, cached)


def _check_shared(pool: BlockPool, tables: list[int]) -> None:
    """Of each block that has several owners: the count is right, and its content is known."""
    owners, counts = Counter(tables), pool.ref_counts
    if any(counts[block] != count for block, count in owners.items()):
        raise broken("L3", f"owners {dict(owners)}, reference counts {counts}")
    bare = [block for block, count in owners.items() if count > 1 and pool.hashes[block] is None]
    if bare:
        raise broken("L3", f"blocks {bare} are shared and not hashed")


def _check_runs(state: State) -> None:
    """Whoever holds a run begins with its blocks, and the holders are as many as are counted."""
    held: dict[int, int] = {}
    for request in state.requests.by_handle.values():
        if request.run is not None:
            run, last = request.run, request.run.block_ids[-1]
            if request.block_ids[: len(run.block_ids)] != run.block_ids or state.pool.runs.get(last) is not run:
                raise broken("L3", f"{request.request_id} holds a run that it doesn't begin with")
            held[last] = held.get(last, 0) + 1
    if held != {last: run.num_holders for last, run in state.pool.runs.items()}:
        raise broken("L3", f"runs are held by {held}, counted {[r.num_holders for r in state.pool.runs.values()]}")


def _check_hashes(pool: BlockPool, blank: list[int], cached: list[int]) -> None:
    """Each hash finds the block that carries it, and free blocks are in the list that their content says."""
    found, num_hashed = pool.block_by_hash, pool.num_blocks - pool.hashes.count(None)
    if len(found) != num_hashed:
        raise broken("L4", f"{len(found)} hashes found, {num_hashed} blocks hashed")
    if not found and not cached:
        return
    if list(map(pool.hashes.__getitem__, found.values())) != list(found):
        raise broken("L4", "a hash finds a block that doesn't carry it")
    hashed = set(found.values())
    if not hashed.isdisjoint(blank) or not hashed.issuperset(cached):
        raise broken(
            "L3", f"a free block is in the wrong list: blank {blank}, cached {cached}, hashed {sorted(hashed)}"
        )


_STATUSES = {
    "running": frozenset((RUNNING,)),
    "waiting": frozenset((WAITING, PREEMPTED)),
    "idle": frozenset((IDLE,)),
}


def _check_queues(state: State) -> int:
    """Who is in a queue belongs there, and each queue is in order. Returns how many are in one."""
    by_handle, queues, num_queued = state.requests.by_handle, state.queues, 0
    for name, queue in (("running", queues.running), ("waiting", queues.waiting), ("idle", queues.idle)):
        if not queue:
            continue
        last, statuses = None, _STATUSES[name]
        for r in queue:
            key = r.queue_key
            if r.status not in statuses:
                raise broken("L6", f"{r.request_id} is {r.status} and in {name}")
            if last is not None and key <= last:
                raise broken("L6", f"{name} is out of order at {r.request_id}")
            if by_handle.get(r.handle) is not r:
                raise broken("L6", f"{r.request_id} is in {name} and not in the table")
            last = key
        num_queued += len(queue)
    limit = state.config.max_num_seqs if state.was_opened else 0
    if len(queues.running) > limit:
        raise broken("L8", f"{len(queues.running)} running, limit {limit}")
    return num_queued


def _is_plain(r: Request, state: State) -> bool:
    """Whether a request's next decode needs nothing but its token, with as many drafts as it may have."""
    end = r.num_computed_tokens + 1 + state.max_drafts
    has_room = end <= len(r.block_ids) * state.pool.block_size and end < r.max_total_tokens
    has_say = r.grammar or r.media or r.drafts or len(r.block_hashes) > r.num_published_blocks
    return has_room and not has_say and len(r.tokens) + r.num_output_placeholders == r.num_computed_tokens + 1


def _may_hold(r: Request) -> bool:
    """Whether what a request that doesn't run has computed and owns is what it may."""
    if r.block_ids:
        return r.resumable and r.status in (WAITING, IDLE) and r.num_computed_tokens <= len(r.tokens)
    return r.num_computed_tokens == 0 and not r.media_held


def _check_suspicion(state: State) -> None:
    for handle, losses in state.suspicion.num_losses.items():
        request = state.requests.by_handle.get(handle)
        if request is None or request.status is FINISHED or losses < 1:
            raise broken("L14", f"handle {handle} is suspected for {losses} lost workers")


def _check_encoder(cache: EncoderCache, holders: list[Request]) -> None:
    if cache.used != sum(cache.sizes.values()) or cache.used > cache.capacity:
        raise broken("L13", f"{cache.used} of {cache.capacity} embeddings counted, {sum(cache.sizes.values())} held")
    users: dict[str, set[int]] = {digest: set() for digest in cache.sizes}
    for r in holders:
        for index in r.media_held:
            users.setdefault(r.media[index].digest, set()).add(r.handle)
    if users != cache.users:
        raise broken("L13", f"encoder entries used by {cache.users}, requests hold {users}")
    unused = {digest for digest, handles in users.items() if not handles}
    if cache.evictable.keys() != unused:
        raise broken("L13", f"evictable {sorted(cache.evictable)}, unused {sorted(unused)}")
