// Causal attention over pages, one token and one key/value head at a time. A query goes through its keys in tiles of TILE
// positions, from position 0, with a running maximum and sum; nothing in that depends on the other rows of the step.
//
// Memory of a layer's keys: head, block, dimension, offset in the block; of its values: head, block, offset, dimension.
#pragma once
#include "vectors.h"

constexpr int TILE_VECTORS = 4;
constexpr int TILE = TILE_VECTORS * LANES;
constexpr int ITEM_TOKENS = 16;
constexpr int MAX_QUERIES = LANES == 8 ? 2 : 4;

// Some tokens of one request, the rows `first_row`... of the step; `blocks` is the request's block table.
struct AttentionItem {
    int first_row, first_position, num_tokens;
    const int32_t* blocks;
};

struct AttentionShape {
    int heads, kv_heads, head_dim, block_size;
    size_t plane;  // numbers per head and kind in a layer: num_blocks * block_size * head_dim
};

// What one thread needs, floats: two tiles, and for each query of an item its output, its sums and its maximum.
static inline size_t attention_scratch_floats(const AttentionShape& shape) {
    size_t queries = size_t(ITEM_TOKENS) * (shape.heads / shape.kv_heads);
    return 2 * size_t(TILE) * shape.head_dim + queries * (shape.head_dim + LANES + 1);
}

// A tile, wherever it lies: LANES keys of each part as `stride` apart dimensions, LANES values as rows.
template <typename Number>
struct Tile {
    const Number *keys[TILE_VECTORS], *values[TILE_VECTORS];
    int stride;
};

// The tile as it lies in its blocks, which hold a multiple of LANES positions. Parts behind the last position are part 0 again.
template <typename Number>
static Tile<Number> tile_in_place(const AttentionShape& shape, const Number* keys, const Number* values, const int32_t* blocks, int first, int last) {
    Tile<Number> tile;
    tile.stride = shape.block_size;
    for (int part = 0; part < TILE_VECTORS; part++) {
        const int position = first + part * LANES < last ? first + part * LANES : first;
        const int offset = position % shape.block_size;
        const size_t block = size_t(blocks[position / shape.block_size]) * shape.block_size * shape.head_dim;
        tile.keys[part] = keys + block + offset;
        tile.values[part] = values + block + size_t(offset) * shape.head_dim;
    }
    return tile;
}

// The tile as floats in `scratch`: keys (head_dim, TILE), values (TILE, head_dim). What lies behind `last` is garbage, or
// another request's; nobody sees it.
template <typename Number>
static Tile<float> widened_tile(const AttentionShape& shape, const Number* keys, const Number* values, const int32_t* blocks, int first, int last, float* scratch) {
    const int size = shape.block_size, dims = shape.head_dim, count = last - first < TILE ? last - first : TILE;
    float *wide_keys = scratch, *wide_values = scratch + TILE * dims;
    for (int done = 0, run; done < count; done += run) {
        const int position = first + done, offset = position % size;
        run = size - offset < TILE - done ? size - offset : TILE - done;
        const size_t block = size_t(blocks[position / size]) * size * dims;
        const Number *key = keys + block + offset, *value = values + block + size_t(offset) * dims;
        for (int dim = 0; dim < dims; dim++) {
            int at = 0;
            for (; at + LANES <= run; at += LANES) store(wide_keys + dim * TILE + done + at, load(key + dim * size + at));
            for (; at < run; at++) wide_keys[dim * TILE + done + at] = widened(key[dim * size + at]);
        }
        for (int at = 0; at < run * dims; at += LANES) store(wide_values + done * dims + at, load(value + at));
    }
    Tile<float> tile;
    tile.stride = TILE;
    for (int part = 0; part < TILE_VECTORS; part++) {
        tile.keys[part] = wide_keys + part * LANES;
        tile.values[part] = wide_values + part * LANES * dims;
    }
    return tile;
}

// Ask memory for a tile: blocks lie anywhere, so the processor can't guess where the next one is.
template <typename Number>
static void expect_tile(const AttentionShape& shape, const Number* keys, const Number* values, const int32_t* blocks, int first, int last) {
    const int size = shape.block_size, stop = last - first < TILE ? last : first + TILE;
    const size_t numbers = size_t(size) * shape.head_dim;
    for (int block = first / size; block * size < stop; block++) {
        const size_t start = size_t(blocks[block]) * numbers;
        for (size_t at = 0; at < numbers; at += 64 / sizeof(Number)) {
            __builtin_prefetch(keys + start + at);
            __builtin_prefetch(values + start + at);
        }
    }
}

// Queries of one token, scaled already, against a tile. Each has `dims` outputs, LANES partial sums and a running maximum.
struct Queries {
    const float* rows;
    float *outputs, *sums, *maxima;
    int dims;
};

template <int COUNT, typename Number>
static void score_tile(const Queries& queries, const Tile<Number>& tile, Floats (*scores)[TILE_VECTORS]) {
    Floats found[COUNT][TILE_VECTORS] = {};
    for (int dim = 0; dim < queries.dims; dim++) {
#pragma GCC unroll 4
        for (int part = 0; part < TILE_VECTORS; part++) {
            Floats key = load(tile.keys[part] + size_t(dim) * tile.stride);
#pragma GCC unroll 4
            for (int query = 0; query < COUNT; query++)
                found[query][part] = fused(splat(queries.rows[query * queries.dims + dim]), key, found[query][part]);
        }
    }
    std::memcpy(scores, found, sizeof found);
}

// A query's weights in a tile of which it sees `visible` keys; what it had so far shrinks to the new maximum.
static void soften(const Queries& queries, int query, Floats* scores, int visible, float* weights) {
    Floats best = splat(-1e30f);
#pragma GCC unroll 4
    for (int part = 0; part < TILE_VECTORS; part++) {
        Ints hidden = LANE_NUMBERS + part * LANES >= visible;
        scores[part] = hidden ? splat(-1e30f) : scores[part];
        best = larger(best, scores[part]);
    }
    float maximum = largest(best);
    if (maximum < queries.maxima[query]) maximum = queries.maxima[query];
    Floats shrink = exponential(splat(queries.maxima[query] - maximum));
    Floats sum = {};
#pragma GCC unroll 4
    for (int part = 0; part < TILE_VECTORS; part++) {
        Ints hidden = LANE_NUMBERS + part * LANES >= visible;
        Floats weight = exponential(scores[part] - splat(maximum));
        weight = hidden ? Floats{} : weight;
        store(weights + part * LANES, weight);
        sum = sum + weight;
    }
    queries.maxima[query] = maximum;
    float* sums = queries.sums + query * LANES;
    store(sums, fused(load(sums), shrink, sum));
    float* outputs = queries.outputs + query * queries.dims;
    for (int dim = 0; dim < queries.dims; dim += LANES) store(outputs + dim, load(outputs + dim) * shrink);
}

template <int COUNT, int PARTS, typename Number>
static void add_values(const Queries& queries, int dim, int visible, const Tile<Number>& tile, const float (*weights)[TILE]) {
    Floats found[COUNT][PARTS];
#pragma GCC unroll 4
    for (int query = 0; query < COUNT; query++)
#pragma GCC unroll 4
        for (int part = 0; part < PARTS; part++)
            found[query][part] = load(queries.outputs + query * queries.dims + dim + part * LANES);
    for (int at = 0; at < visible; at++) {
        const Number* row = tile.values[at / LANES] + size_t(at % LANES) * queries.dims + dim;
#pragma GCC unroll 4
        for (int part = 0; part < PARTS; part++) {
            Floats value = load(row + part * LANES);
#pragma GCC unroll 4
            for (int query = 0; query < COUNT; query++)
                found[query][part] = fused(splat(weights[query][at]), value, found[query][part]);
        }
    }
#pragma GCC unroll 4
    for (int query = 0; query < COUNT; query++)
#pragma GCC unroll 4
        for (int part = 0; part < PARTS; part++)
            store(queries.outputs + query * queries.dims + dim + part * LANES, found[query][part]);
}

template <int COUNT, typename Number>
static void attend_tile(const Queries& queries, int visible, const Tile<Number>& tile) {
    Floats scores[COUNT][TILE_VECTORS];
    float weights[COUNT][TILE];
    score_tile<COUNT>(queries, tile, scores);
#pragma GCC unroll 4
    for (int query = 0; query < COUNT; query++) soften(queries, query, scores[query], visible, weights[query]);
    int dim = 0;
    for (; dim + 4 * LANES <= queries.dims; dim += 4 * LANES) add_values<COUNT, 4>(queries, dim, visible, tile, weights);
    for (; dim < queries.dims; dim += LANES) add_values<COUNT, 1>(queries, dim, visible, tile, weights);
}

template <typename Number>
static void attend_token(const Queries& queries, int group, int visible, const Tile<Number>& tile) {
    for (int query = 0, count; query < group; query += count) {
        count = group - query < MAX_QUERIES ? group - query : MAX_QUERIES;
        Queries some = {queries.rows + query * queries.dims, queries.outputs + query * queries.dims, queries.sums + query * LANES, queries.maxima + query, queries.dims};
        switch (count) {
            case 1: attend_tile<1>(some, visible, tile); break;
            case 2: attend_tile<2>(some, visible, tile); break;
            case 3: attend_tile<3>(some, visible, tile); break;
            case 4: attend_tile<4>(some, visible, tile); break;
        }
    }
}

// What an item's queries have found so far, in scratch.
struct Found {
    float *outputs, *sums, *maxima;
};

template <typename Number>
static void attend_tokens(const AttentionShape& shape, const AttentionItem& item, int first, const Tile<Number>& tile, const float* queries, int stride, const Found& found) {
    const int group = shape.heads / shape.kv_heads, width = group * shape.head_dim;
    for (int token = 0; token < item.num_tokens; token++) {
        const int visible = item.first_position + token + 1 - first;
        if (visible <= 0) continue;
        Queries mine = {queries + size_t(token) * stride, found.outputs + token * width, found.sums + token * group * LANES, found.maxima + token * group, shape.head_dim};
        attend_token(mine, group, visible < TILE ? visible : TILE, tile);
    }
}

// All tokens of an item, one key/value head: `queries` and `outputs` are rows of `stride` and `output_stride` numbers, the
// first is the item's first, at this head's first query. Few tokens read the tile where it lies, many widen it once: the same
// sums of the same numbers.
template <typename Number, typename Output>
static void attend_item(const AttentionShape& shape, const AttentionItem& item, const Number* keys, const Number* values, const float* queries, int stride, Output* outputs, int output_stride, float* scratch) {
    const int dims = shape.head_dim, group = shape.heads / shape.kv_heads, width = group * dims, count = item.num_tokens * group;
    const bool in_place = shape.block_size % LANES == 0 && (item.num_tokens <= 2 || sizeof(Number) == sizeof(float));
    float* after_tile = scratch + 2 * TILE * dims;
    Found found = {after_tile, after_tile + ITEM_TOKENS * width, after_tile + ITEM_TOKENS * (width + group * LANES)};
    std::memset(found.outputs, 0, sizeof(float) * item.num_tokens * width);
    std::memset(found.sums, 0, sizeof(float) * count * LANES);
    for (int query = 0; query < count; query++) found.maxima[query] = -1e30f;
    const int last = item.first_position + item.num_tokens;
    expect_tile(shape, keys, values, item.blocks, 0, last);
    for (int first = 0; first < last; first += TILE) {
        if (first + TILE < last) expect_tile(shape, keys, values, item.blocks, first + TILE, last);
        if (in_place) attend_tokens(shape, item, first, tile_in_place(shape, keys, values, item.blocks, first, last), queries, stride, found);
        else attend_tokens(shape, item, first, widened_tile(shape, keys, values, item.blocks, first, last, scratch), queries, stride, found);
    }
    for (int query = 0; query < count; query++) {
        Floats whole = splat(1.0f / total(load(found.sums + query * LANES)));
        Output* to = outputs + size_t(query / group) * output_stride + (query % group) * dims;
        for (int dim = 0; dim < dims; dim += LANES) store(to + dim, load(found.outputs + query * dims + dim) * whole);
    }
}
