// Vectors of floats, as wide as the machine has them. Every sum in this library runs in an order that depends on the shapes
// of the model alone, never on how many rows there are, so each row's bits are its own.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#include <immintrin.h>
#define REFOLD_AVX512 1
constexpr int LANES = 16;
#elif defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#define REFOLD_AVX2 1
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

struct BFloat16 {
    uint16_t bits;
};

typedef uint8_t Bytes __attribute__((vector_size(LANES)));

static inline Floats splat(float value) { return value - Floats{}; }

#if defined(REFOLD_AVX512)
constexpr Ints LANE_NUMBERS = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#elif defined(REFOLD_AVX2)
constexpr Ints LANE_NUMBERS = {0, 1, 2, 3, 4, 5, 6, 7};
#else
constexpr Ints LANE_NUMBERS = {0, 1, 2, 3};
#endif

static inline Floats load(const float* from) {
    Floats found;
    std::memcpy(&found, from, sizeof found);
    return found;
}

static inline Floats load(const BFloat16* from) {
    Halves found;
    std::memcpy(&found, from, sizeof found);
    return reinterpret_cast<Floats>(__builtin_convertvector(found, Words) << 16);
}

static inline void store(float* to, Floats value) { std::memcpy(to, &value, sizeof value); }

// To the nearest, ties to even.
static inline void store(BFloat16* to, Floats value) {
    Words bits = reinterpret_cast<Words>(value);
    Halves rounded = __builtin_convertvector((bits + 0x7fff + ((bits >> 16) & 1)) >> 16, Halves);
    std::memcpy(to, &rounded, sizeof rounded);
}

static inline float widened(float value) { return value; }

static inline float widened(BFloat16 value) {
    uint32_t bits = uint32_t(value.bits) << 16;
    float found;
    std::memcpy(&found, &bits, sizeof found);
    return found;
}

static inline void narrow(float* to, float value) { *to = value; }

static inline void narrow(BFloat16* to, float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    to->bits = uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// a * b + c in one rounding where the machine can. Said by name: of two products in one sum, a compiler that chooses which to
// fuse with the addition chooses one here and the other there, and the same row has other bits in other company.
static inline Floats fused(Floats a, Floats b, Floats c) {
#ifdef REFOLD_AVX512
    return reinterpret_cast<Floats>(_mm512_fmadd_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b), reinterpret_cast<__m512>(c)));
#elif defined(REFOLD_AVX2)
    return reinterpret_cast<Floats>(_mm256_fmadd_ps(reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(b), reinterpret_cast<__m256>(c)));
#else
    return a * b + c;
#endif
}

// In a register from here on. AVX-512 has so many that the compiler needs no telling.
static inline void keep([[maybe_unused]] Floats& value) {
#ifdef REFOLD_AVX2
    asm("" : "+x"(value));
#endif
}

static inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }
static inline Floats smaller(Floats a, Floats b) { return a < b ? a : b; }

// Lane by lane, from the first to the last.
static inline float total(Floats value) {
    float sum = value[0];
    for (int lane = 1; lane < LANES; lane++) sum += value[lane];
    return sum;
}

static inline float largest(Floats value) {
    float found = value[0];
    for (int lane = 1; lane < LANES; lane++) found = value[lane] > found ? value[lane] : found;
    return found;
}

// e^x within 2 ulp for -87 <= x <= 88; beyond, the value at the end of that range. 2^n * e^r with |r| <= ln(2) / 2, e^r by
// its Taylor polynomial of degree 7.
static inline Floats exponential(Floats x) {
    x = larger(smaller(x, splat(88.0f)), splat(-87.0f));
    Floats shifted = fused(x, splat(1.44269504f), splat(12582912.0f));  // 1.5 * 2^23: adding it rounds to an integer
    Floats count = shifted - splat(12582912.0f);
    Floats rest = fused(count, splat(-0.693145752f), x);
    rest = fused(count, splat(-1.42860677e-6f), rest);
    Floats power = splat(1.0f / 5040);
    power = fused(power, rest, splat(1.0f / 720));
    power = fused(power, rest, splat(1.0f / 120));
    power = fused(power, rest, splat(1.0f / 24));
    power = fused(power, rest, splat(1.0f / 6));
    power = fused(power, rest, splat(0.5f));
    power = fused(power, rest, splat(1.0f));
    power = fused(power, rest, splat(1.0f));
    Ints exponent = __builtin_convertvector(count, Ints) << 23;
    return reinterpret_cast<Floats>(reinterpret_cast<Ints>(power) + exponent);
}
