// rows @ weight.T with weights packed in panels of COLUMNS outputs. A row's output is one chain of fused additions over the
// inputs in their order, whatever the number of rows: only how many rows share a loaded weight depends on it.
#pragma once
#include <cmath>
#include <cstdlib>

#include "vectors.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

constexpr int COLUMNS = 2 * LANES;
constexpr int MAX_BLOCK_ROWS = LANES == 16 ? 12 : LANES == 8 ? 6 : 4;
constexpr int CHUNK_ROWS = 10 * MAX_BLOCK_ROWS;

// Zeroed memory on a huge page's border. Null if there is none.
static inline void* aligned_memory(size_t bytes) {
    size_t border = bytes >= (size_t(1) << 21) ? size_t(1) << 21 : 64;
    size_t rounded = (bytes + border - 1) / border * border;
    void* found = std::aligned_alloc(border, rounded);
    if (!found) return nullptr;
#if defined(__linux__)
    if (border > 64) madvise(found, rounded, MADV_HUGEPAGE);
#endif
    std::memset(found, 0, rounded);
    return found;
}

// Where the weight of an input and a column lies in a panel. bfloat16 comes in pairs of inputs, as one 32-bit lane.
static inline size_t place(const float*, int input, int column) { return size_t(input) * COLUMNS + column; }
static inline size_t place(const BFloat16*, int input, int column) {
    return size_t(input / 2) * 2 * COLUMNS + 2 * column + input % 2;
}

// A weight's numbers; what its rows of inputs are; how many inputs lie together.
struct Int8 {
    int8_t value;
};

static inline size_t place(const Int8*, int input, int column) {
    return size_t(input / 4) * 4 * COLUMNS + 4 * column + input % 4;
}

// What rows are made of: float, unless the machine multiplies narrower numbers faster.
template <typename Weight> struct InputOf { typedef float Type; };
template <> struct InputOf<Int8> { typedef uint8_t Type; };
#if defined(REFOLD_AVX512) && (defined(__AVX512BF16__) || defined(REFOLD_EMULATE_DOT))
#define REFOLD_DOT 1
template <> struct InputOf<BFloat16> { typedef BFloat16 Type; };
#endif

// Rows of inputs. Those of bytes are q + 128 with q = round(x / scale), -127..127, and each row has its own scale.
template <typename Input>
struct Rows {
    Input* data = nullptr;
    float* scales = nullptr;
    int inputs = 0;

    Input* row(int number) const { return data + size_t(number) * inputs; }
};

// One weight, (outputs, inputs); the number of inputs is a multiple of 4. Of bytes: each output has its own scale, and
// `offsets` holds what the 128 in its rows' inputs add up to.
template <typename Weight>
struct Packed {
    Weight* data = nullptr;
    float* scales = nullptr;
    int32_t* offsets = nullptr;
    int outputs = 0, inputs = 0;

    ~Packed() {
        std::free(data);
        std::free(scales);
        std::free(offsets);
    }
    int panels() const { return (outputs + COLUMNS - 1) / COLUMNS; }
    const Weight* panel(int number) const { return data + size_t(number) * COLUMNS * inputs; }

    // Interleaved: the outputs are two halves, and a panel takes LANES of each.
    bool pack(const float* weight, int num_outputs, int num_inputs, bool interleaved) {
        outputs = num_outputs;
        inputs = num_inputs;
        size_t columns = size_t(panels()) * COLUMNS;
        data = static_cast<Weight*>(aligned_memory(sizeof(Weight) * columns * inputs));
        scales = static_cast<float*>(aligned_memory(sizeof(float) * columns));
        offsets = static_cast<int32_t*>(aligned_memory(sizeof(int32_t) * columns));
        if (!data || !scales || !offsets) return false;
        for (size_t column = 0; column < columns; column++) {
            size_t output = column;
            int within = column % COLUMNS;
            if (interleaved) output = (within / LANES) * size_t(outputs / 2) + column / COLUMNS * LANES + within % LANES;
            if (output < size_t(outputs)) pack_column(weight + output * inputs, data + column / COLUMNS * COLUMNS * inputs, column);
        }
        return true;
    }

  private:
    void pack_column(const float* from, Weight* to, size_t column) {
        if constexpr (sizeof(Weight) == 1) {
            float most = 0;
            for (int input = 0; input < inputs; input++) most = std::fabs(from[input]) > most ? std::fabs(from[input]) : most;
            scales[column] = most / 127;
            for (int input = 0; input < inputs; input++) {
                int value = most > 0 ? int(std::nearbyint(from[input] / scales[column])) : 0;
                to[place(to, input, column % COLUMNS)].value = int8_t(value);
                offsets[column] += 128 * value;
            }
        } else {
            for (int input = 0; input < inputs; input++) narrow(to + place(to, input, column % COLUMNS), from[input]);
        }
    }
};

// One row to bytes.
static inline void quantise(const float* from, int inputs, uint8_t* to, float* scale) {
    Floats most = {}, nothing = {};
    for (int at = 0; at < inputs; at += LANES) {
        most = larger(most, larger(load(from + at), -load(from + at)));
        nothing = fused(load(from + at), Floats{}, nothing);
    }
    float step = largest(most) / 127;
    *scale = step + total(nothing);  // NaN, if a number is none: bytes couldn't tell
    Floats inverse = splat(step > 0 ? 1.0f / step : 0.0f);
    for (int at = 0; at < inputs; at += LANES) {
        Floats shifted = fused(load(from + at), inverse, splat(12582912.0f + 128.0f));  // rounds to an integer, plus 128
        Bytes bytes = __builtin_convertvector(reinterpret_cast<Words>(shifted) & 0xff, Bytes);
        std::memcpy(to + at, &bytes, sizeof bytes);
    }
}

// A panel's weights of two inputs, for LANES columns: `vector` is 0 or 1.
static inline void load_pair(const BFloat16* from, int vector, Floats& first, Floats& second) {
    Words both;
    std::memcpy(&both, from + 2 * LANES * vector, sizeof both);
    first = reinterpret_cast<Floats>(both << 16);
    second = reinterpret_cast<Floats>(both & 0xffff0000u);
}

static inline void load_pair(const float* from, int vector, Floats& first, Floats& second) {
    first = load(from + LANES * vector);
    second = load(from + COLUMNS + LANES * vector);
}

// ROWS rows times one panel into `tile` (ROWS, COLUMNS).
template <int ROWS, typename Weight>
static void multiply_block(const Rows<float>& operand, int first, const Packed<Weight>& weight, int number, float* tile) {
    const int inputs = weight.inputs;
    const float* rows = operand.row(first);
    const Weight* panel = weight.panel(number);
    Floats sums[ROWS][2] = {};
    for (int input = 0; input < inputs; input += 2, panel += 2 * COLUMNS) {
        Floats first[2], second[2];
        load_pair(panel, 0, first[0], second[0]);
        load_pair(panel, 1, first[1], second[1]);
        if (ROWS <= 4) __builtin_prefetch(panel + 16 * COLUMNS);
        if (ROWS <= 4) __builtin_prefetch(panel + 17 * COLUMNS);
        // Left to itself, the compiler reads float weights again for every row.
        if (sizeof(Weight) == sizeof(float)) keep(first[0]), keep(first[1]);
#pragma GCC unroll 16
        for (int row = 0; row < ROWS; row++) {
            Floats value = splat(rows[size_t(row) * inputs + input]);
            sums[row][0] = fused(value, first[0], sums[row][0]);
            sums[row][1] = fused(value, first[1], sums[row][1]);
        }
        if (sizeof(Weight) == sizeof(float)) keep(second[0]), keep(second[1]);
#pragma GCC unroll 16
        for (int row = 0; row < ROWS; row++) {
            Floats value = splat(rows[size_t(row) * inputs + input + 1]);
            sums[row][0] = fused(value, second[0], sums[row][0]);
            sums[row][1] = fused(value, second[1], sums[row][1]);
        }
    }
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; row++) {
        store(tile + row * COLUMNS, sums[row][0]);
        store(tile + row * COLUMNS + LANES, sums[row][1]);
    }
}

#ifdef REFOLD_DOT
// Products of pairs of bfloat16, added to floats.
static inline Floats dot(Floats sum, uint32_t pair, const BFloat16* panel) {
#ifdef REFOLD_EMULATE_DOT
    Floats first, second;
    load_pair(panel, 0, first, second);
    BFloat16 low = {uint16_t(pair & 0xffff)}, high = {uint16_t(pair >> 16)};
    return fused(splat(widened(low)), first, fused(splat(widened(high)), second, sum));
#else
    __m512i weights;
    std::memcpy(&weights, panel, sizeof weights);
    return reinterpret_cast<Floats>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(sum), reinterpret_cast<__m512bh>(_mm512_set1_epi32(int(pair))), reinterpret_cast<__m512bh>(weights)));
#endif
}

template <int ROWS>
static void multiply_block(const Rows<BFloat16>& operand, int first, const Packed<BFloat16>& weight, int number, float* tile) {
    Floats sums[ROWS][2] = {};
    const BFloat16 *rows = operand.row(first), *panel = weight.panel(number);
    for (int input = 0; input < weight.inputs; input += 2, panel += 2 * COLUMNS) {
        if (ROWS <= 4) __builtin_prefetch(panel + 16 * COLUMNS);
        if (ROWS <= 4) __builtin_prefetch(panel + 17 * COLUMNS);
#pragma GCC unroll 16
        for (int row = 0; row < ROWS; row++) {
            uint32_t pair;
            std::memcpy(&pair, rows + size_t(row) * weight.inputs + input, sizeof pair);
            sums[row][0] = dot(sums[row][0], pair, panel);
            sums[row][1] = dot(sums[row][1], pair, panel + COLUMNS);
        }
    }
    for (int row = 0; row < ROWS; row++) {
        store(tile + row * COLUMNS, sums[row][0]);
        store(tile + row * COLUMNS + LANES, sums[row][1]);
    }
}
#endif

// Sums of four products of bytes each: exact.
static inline Ints dot(Ints sum, uint32_t four, const Int8* panel) {
#if defined(REFOLD_AVX512) && defined(__AVX512VNNI__)
    __m512i weights;
    std::memcpy(&weights, panel, sizeof weights);
    return reinterpret_cast<Ints>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sum), _mm512_set1_epi32(int(four)), weights));
#else
    for (int lane = 0; lane < LANES; lane++)
        for (int at = 0; at < 4; at++) sum[lane] += int32_t((four >> (8 * at)) & 0xff) * panel[4 * lane + at].value;
    return sum;
#endif
}

template <int ROWS>
static void multiply_block(const Rows<uint8_t>& operand, int first, const Packed<Int8>& weight, int number, float* tile) {
    Ints sums[ROWS][2] = {};
    const uint8_t* rows = operand.row(first);
    const Int8* panel = weight.panel(number);
    for (int input = 0; input < weight.inputs; input += 4, panel += 4 * COLUMNS) {
        if (ROWS <= 4) __builtin_prefetch(panel + 32 * COLUMNS);
        if (ROWS <= 4) __builtin_prefetch(panel + 34 * COLUMNS);
#pragma GCC unroll 16
        for (int row = 0; row < ROWS; row++) {
            uint32_t four;
            std::memcpy(&four, rows + size_t(row) * weight.inputs + input, sizeof four);
            sums[row][0] = dot(sums[row][0], four, panel);
            sums[row][1] = dot(sums[row][1], four, panel + 2 * COLUMNS);
        }
    }
    for (int row = 0; row < ROWS; row++)
        for (int half = 0; half < 2; half++) {
            size_t column = size_t(number) * COLUMNS + half * LANES;
            Ints offset;
            std::memcpy(&offset, weight.offsets + column, sizeof offset);
            Floats scale = load(weight.scales + column) * splat(operand.scales[first + row]);
            store(tile + row * COLUMNS + half * LANES, __builtin_convertvector(sums[row][half] - offset, Floats) * scale);
        }
}

template <typename Input, typename Weight>
static void multiply(int count, const Rows<Input>& rows, int first, const Packed<Weight>& weight, int number, float* tile) {
    switch (count) {
        case 1: return multiply_block<1>(rows, first, weight, number, tile);
        case 2: return multiply_block<2>(rows, first, weight, number, tile);
        case 3: return multiply_block<3>(rows, first, weight, number, tile);
        case 4: return multiply_block<4>(rows, first, weight, number, tile);
        case 5: return multiply_block<5>(rows, first, weight, number, tile);
        case 6: return multiply_block<6>(rows, first, weight, number, tile);
        case 7: return multiply_block<7>(rows, first, weight, number, tile);
        case 8: return multiply_block<8>(rows, first, weight, number, tile);
        case 9: return multiply_block<9>(rows, first, weight, number, tile);
        case 10: return multiply_block<10>(rows, first, weight, number, tile);
        case 11: return multiply_block<11>(rows, first, weight, number, tile);
        case 12: return multiply_block<12>(rows, first, weight, number, tile);
    }
}
