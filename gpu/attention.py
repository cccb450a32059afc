"""Paged attention in fixed tiles, batch-invariant: a row's bits don't depend on who else is in the step.

Floating-point sums depend on their order, and kernels choose the order by shape. So the shapes here are fixed. The keys of a
request are cut into tiles of 128 positions at fixed boundaries. The query rows of a step are cut into items: one token (of
a decode or a short chunk) or up to 32 tokens of a prefill. Each pair of an item and a tile is one small product of at least
`min_rows` query rows and exactly 128 keys, whose softmax is the tile's own. Tiles of an item are then merged in the order of
positions, each weighted by its share of the whole; a tile that is masked for a row weighs exactly zero, so it changes
nothing that an item of prefill reaches further than the row does. Recomputed positions get the bits they had.

A step's plan is made once and serves all layers. Pairs are ordered by tile, then item, items by falling number of tiles:
those that reach tile t are a prefix, and a merge is a sum of slices.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch

from refold.gpu.kv_cache import TILE_TOKENS, KvCache
from refold.gpu.spec import ModelSpec
from refold.gpu.workspace import Workspace

SHORT_CHUNK_TOKENS = 4
PREFILL_ITEM_TOKENS = 32
MAX_PAIRS_DECODE = 256
MAX_PAIRS_PREFILL = 64
MASKED = -1e30


class Span(NamedTuple):
    """Consecutive rows of one request: `num_tokens` from `first_position`, which are rows `first_row`... of the step."""

    first_row: int
    first_position: int
    num_tokens: int
    block_ids: list[int]


class Item(NamedTuple):
    """Query rows that are attended together: part of a span."""

    rows: list[int]
    positions: list[int]
    num_tiles: int
    block_ids: list[int]


class TileGroup(NamedTuple):
    """Pairs that are computed in one go. I items of T tokens, P pairs, M query rows per pair, H key/value heads."""

    rows: torch.Tensor  # (I * T) rows of the step
    num_items: int
    item_tokens: int
    padded_rows: int  # M
    pair_items: torch.Tensor  # (P) item of each pair
    tile_starts: list[int]  # first pair of tile 0, 1, ..., and P
    unit_planes: torch.Tensor  # (2 * H * P * units per tile)
    mask: torch.Tensor  # (H * P, M, 128), 0 or MASKED


class AttentionPlan(NamedTuple):
    """All groups of a step, and for each row of the step where its result lies in their concatenation."""

    groups: list[TileGroup]
    sources: torch.Tensor


def plan_attention(
    spans: list[Span], cache: KvCache, spec: ModelSpec, *, min_rows: int, dtype: torch.dtype
) -> AttentionPlan:
    """Cut a step's rows into items and groups. `spans` cover the rows 0..n-1 once each."""
    short = [span for span in spans if span.num_tokens <= SHORT_CHUNK_TOKENS]
    long = [span for span in spans if span.num_tokens > SHORT_CHUNK_TOKENS]
    groups: list[TileGroup] = []
    for chosen, tokens, max_pairs in ((short, 1, MAX_PAIRS_DECODE), (long, PREFILL_ITEM_TOKENS, MAX_PAIRS_PREFILL)):
        items = sorted((item for span in chosen for item in _items(span, tokens)), key=lambda item: -item.num_tiles)
        groups += [_group(batch, tokens, cache, spec, min_rows, dtype) for batch in _batches(items, max_pairs)]
    order = torch.cat([group.rows for group in groups])
    sources = torch.empty(sum(span.num_tokens for span in spans), dtype=torch.int64)
    sources[order] = torch.arange(len(order))
    return AttentionPlan(groups, sources)


def _items(span: Span, item_tokens: int) -> Iterator[Item]:
    for start in range(0, span.num_tokens, item_tokens):
        # A last, shorter item repeats its last row: same shape, same bits, no effect.
        offsets = [min(start + index, span.num_tokens - 1) for index in range(item_tokens)]
        positions = [span.first_position + offset for offset in offsets]
        rows = [span.first_row + offset for offset in offsets]
        yield Item(rows, positions, positions[-1] // TILE_TOKENS + 1, span.block_ids)


def _batches(items: list[Item], max_pairs: int) -> Iterator[list[Item]]:
    """Consecutive items with at most `max_pairs` pairs together, or one item that alone has more."""
    batch: list[Item] = []
    pairs = 0
    for item in items:
        if batch and pairs + item.num_tiles > max_pairs:
            yield batch
            batch, pairs = [], 0
        batch.append(item)
        pairs += item.num_tiles
    if batch:
        yield batch


def _group(
    items: list[Item], tokens: int, cache: KvCache, spec: ModelSpec, min_rows: int, dtype: torch.dtype
) -> TileGroup:
    reach = [sum(item.num_tiles > tile for item in items) for tile in range(items[0].num_tiles)]
    tile_starts = [0]
    for count in reach:
        tile_starts.append(tile_starts[-1] + count)
    pair_items = torch.cat([torch.arange(count) for count in reach])
    pair_tiles = torch.repeat_interleave(torch.arange(len(reach)), torch.tensor(reach))
    query_rows = tokens * spec.group
    padded_rows = -(-max(query_rows, min_rows) // min_rows) * min_rows
    return TileGroup(
        rows=torch.tensor([row for item in items for row in item.rows]),
        num_items=len(items),
        item_tokens=tokens,
        padded_rows=padded_rows,
        pair_items=pair_items,
        tile_starts=tile_starts,
        unit_planes=cache.unit_planes(_units(items, cache)[pair_items, pair_tiles]),
        mask=_mask(items, pair_items, pair_tiles, spec, padded_rows, dtype),
    )


def _units(items: list[Item], cache: KvCache) -> torch.Tensor:
    """Which runs of slots make up each item's tiles: (items, tiles, units per tile). Past its blocks, run 0: masked anyway."""
    per_tile, per_block = TILE_TOKENS // cache.unit, cache.block_size // cache.unit
    width = items[0].num_tiles * per_tile
    table = torch.zeros(len(items), width, dtype=torch.int64)
    for index, item in enumerate(items):
        blocks = torch.tensor(item.block_ids[: -(-width // per_block)])
        units = (blocks.unsqueeze(1) * per_block + torch.arange(per_block)).flatten()[:width]
        table[index, : len(units)] = units
    return table.view(len(items), items[0].num_tiles, per_tile)


def _mask(
    items: list[Item],
    pair_items: torch.Tensor,
    pair_tiles: torch.Tensor,
    spec: ModelSpec,
    padded: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """What is added to the scores: a key after the query's own position counts for nothing."""
    positions = torch.tensor([item.positions for item in items]).repeat_interleave(spec.group, dim=1)
    queries = torch.zeros(len(items), padded, dtype=torch.int64)
    queries[:, : positions.shape[1]] = positions
    keys = pair_tiles.unsqueeze(1) * TILE_TOKENS + torch.arange(TILE_TOKENS)
    hidden = keys.unsqueeze(1) > queries[pair_items].unsqueeze(2)
    mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, MASKED)
    return mask.expand(spec.num_kv_heads, *mask.shape).reshape(-1, padded, TILE_TOKENS)


def attend(
    queries: torch.Tensor, layer: int, cache: KvCache, plan: AttentionPlan, workspace: Workspace
) -> torch.Tensor:
    """Causal attention over each row's own request. Queries and result: (rows, kv heads, group, head_dim)."""
    found = workspace.take("found", sum(len(group.rows) for group in plan.groups), *queries.shape[1:])
    start = 0
    for group in plan.groups:
        stop = start + len(group.rows)
        _attend_group(queries, layer, cache, group, workspace, found[start:stop])
        start = stop
    return found.index_select(0, plan.sources)


def _attend_group(
    queries: torch.Tensor, layer: int, cache: KvCache, group: TileGroup, workspace: Workspace, found: torch.Tensor
) -> None:
    """Fill `found` (items * tokens, heads, group, head_dim); the group's other results are scratch."""
    _, heads, width, head_dim = queries.shape
    items, tokens, padded, pairs = group.num_items, group.item_tokens, group.padded_rows, group.tile_starts[-1]
    by_item = workspace.take("queries", heads, items, padded, head_dim)
    chosen = queries.index_select(0, group.rows).view(items, tokens, heads, width, head_dim)
    real = by_item[:, :, : tokens * width].view(heads, items, tokens, width, head_dim)
    real.copy_(chosen.permute(2, 0, 1, 3, 4))
    by_pair = by_item
    if pairs > items:
        by_pair = workspace.take("pair_queries", heads, pairs, padded, head_dim)
        torch.index_select(by_item, 1, group.pair_items, out=by_pair)
    gathered = workspace.take("gathered", group.unit_planes.numel(), cache.unit * head_dim)
    cache.gather(layer, group.unit_planes, gathered)
    keys, values = gathered.view(2, heads * pairs, TILE_TOKENS, head_dim)
    mixed = _tiles(by_pair.view(heads * pairs, padded, head_dim), keys, values, group, workspace)
    result = mixed.view(heads, items, padded, head_dim)[:, :, : tokens * width]
    by_token = result.view(heads, items, tokens, width, head_dim).permute(1, 2, 0, 3, 4)
    found.view(items, tokens, heads, width, head_dim).copy_(by_token)


def _tiles(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, group: TileGroup, workspace: Workspace
) -> torch.Tensor:
    """Attention of each pair within its tile, then merged by item: (heads * items, padded rows, head_dim)."""
    scores = workspace.take("scores", *group.mask.shape)
    torch.baddbmm(group.mask, queries, keys.transpose(1, 2), alpha=queries.shape[2] ** -0.5, out=scores)
    if scores.dtype != torch.float32:
        return _merged_low_precision(scores.float(), values, group)
    shares = workspace.take("shares", *group.mask.shape)
    torch.softmax(scores, -1, out=shares)
    mixed = workspace.take("mixed", *queries.shape)
    torch.bmm(shares, values, out=mixed)
    return _merge(scores, shares, mixed, group)


def _merged_low_precision(scores: torch.Tensor, values: torch.Tensor, group: TileGroup) -> torch.Tensor:
    """Softmax and merge in float32, products in the run's own dtype."""
    shares = torch.softmax(scores, -1)
    mixed = torch.bmm(shares.to(values.dtype), values).float()
    return _merge(scores, shares, mixed, group).to(values.dtype)


def _merge(scores: torch.Tensor, shares: torch.Tensor, mixed: torch.Tensor, group: TileGroup) -> torch.Tensor:
    """Sum an item's tiles in order, each by its part of the softmax over all of them."""
    items, starts = group.num_items, group.tile_starts
    pairs = starts[-1]
    if pairs == items:
        return mixed
    heads, padded, head_dim = mixed.shape[0] // pairs, mixed.shape[1], mixed.shape[2]
    # log of a tile's sum of exponentials: a softmax's largest share is exp(0) / sum
    mass = (scores.amax(-1) - shares.amax(-1).log_()).view(heads, pairs, padded)
    largest = mass[:, :items].clone()
    for start, stop in pairwise(starts[1:]):
        reached = largest[:, : stop - start]
        torch.maximum(reached, mass[:, start:stop], out=reached)
    weights = mass.sub_(largest.index_select(1, group.pair_items)).exp_()
    parts = mixed.view(heads, pairs, padded, head_dim).mul_(weights.unsqueeze(3))
    total, whole = parts[:, :items], weights[:, :items]
    for start, stop in pairwise(starts[1:]):
        total[:, : stop - start] += parts[:, start:stop]
        whole[:, : stop - start] += weights[:, start:stop]
    return total / whole.unsqueeze(3)


def smallest_invariant_query_rows(head_dim: int, dtype: torch.dtype) -> int | None:
    """The least number of query rows at which both products of a pair give a row the same bits as with many rows."""
    for rows in (4, 8, 16):
        if _products_equal(rows, head_dim, dtype):
            return rows
    return None


def _products_equal(rows: int, head_dim: int, dtype: torch.dtype) -> bool:
    generator = torch.Generator().manual_seed(20_240_229)
    pairs = 6
    tiles = torch.randn(2, pairs, TILE_TOKENS, head_dim, generator=generator).to(dtype)
    queries = torch.randn(pairs, 96, head_dim, generator=generator).to(dtype)
    shares = torch.randn(pairs, 96, TILE_TOKENS, generator=generator).softmax(-1).to(dtype)
    for left, right in ((queries, tiles[0].transpose(1, 2)), (shares, tiles[1])):
        full = torch.bmm(left, right)
        for count in {rows, 2 * rows, 3 * rows, 32, 64}:
            for batch in (1, 2, pairs):
                part = torch.bmm(left[:batch, :count].contiguous(), right[:batch])
                if not torch.equal(part, full[:batch, :count]):
                    return False
    return True
