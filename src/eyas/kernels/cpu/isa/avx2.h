// AVX2 and FMA: vectors of 8 floats, 16 registers. Dot products of pairs of 16-bit integers, or
// those of avx_vnni.h.
#pragma once

#include <immintrin.h>

constexpr int LANES = 8;
constexpr int TILE_ROWS = 6;       // 12 accumulators, 2 weights and one x in 16 registers
constexpr int PREFETCH_LINES = 1;  // cache lines of a panel that a step reads
constexpr int SUM_BLOCK = 128;     // products that a float tile sums in order; 0: all
// (query, head) pairs that read a value together, and the vectors of it that they read at a time
constexpr int VALUE_PAIRS = 3, VALUE_VECTORS = 4;
typedef float FloatVec __attribute__((vector_size(32)));
typedef int32_t IntVec __attribute__((vector_size(32)));

static inline FloatVec broadcast(float x) { return (FloatVec)_mm256_set1_ps(x); }

static inline FloatVec load(const int8_t* p) {
    return (FloatVec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}

static inline FloatVec fma(FloatVec a, FloatVec b, FloatVec c) {
    return (FloatVec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}

static inline FloatVec to_float(IntVec x) { return (FloatVec)_mm256_cvtepi32_ps((__m256i)x); }
static inline IntVec round_to_int(FloatVec x) { return (IntVec)_mm256_cvtps_epi32((__m256)x); }
// LANES numbers in bfloat16
static inline FloatVec load_bfloat16(const uint8_t* p) {
    return (FloatVec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)),
                                       16);
}
#define HAS_HALF
// LANES numbers in float16
static inline FloatVec load_half(const uint8_t* p) {
    return (FloatVec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
}
static inline IntVec load_codes(const uint8_t* codes) {
    return (IntVec)_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)codes));
}
static inline bool any(IntVec x) { return !_mm256_testz_si256((__m256i)x, (__m256i)x); }

// The horizontal sums of 8 vectors, as one vector.
static inline FloatVec horizontal_sums(const FloatVec* a) {
    __m256 pairs[4], quads[2];
    for (int i = 0; i < 4; i++) pairs[i] = _mm256_hadd_ps((__m256)a[2 * i], (__m256)a[2 * i + 1]);
    for (int i = 0; i < 2; i++) quads[i] = _mm256_hadd_ps(pairs[2 * i], pairs[2 * i + 1]);
    return (FloatVec)_mm256_add_ps(_mm256_permute2f128_ps(quads[0], quads[1], 0x20),
                                   _mm256_permute2f128_ps(quads[0], quads[1], 0x31));
}

// e^x with a relative error of about 2e-7; 0 below -87. x = n ln 2 + r, and e^r by its series.
static inline FloatVec exp_vec(FloatVec x) {
    const __m256 in = (__m256)x;
    const __m256 nonzero = _mm256_cmp_ps(in, _mm256_set1_ps(-87.0f), _CMP_NLT_UQ);
    // NaN stays NaN: it is the second operand
    const __m256 capped =
        _mm256_max_ps(_mm256_set1_ps(-87.0f), _mm256_min_ps(_mm256_set1_ps(88.0f), in));
    const __m256 n = _mm256_round_ps(_mm256_mul_ps(capped, _mm256_set1_ps(1.44269504f)),
                                     _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const FloatVec r =
        (FloatVec)_mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f),
                                   _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), capped));
    FloatVec y = fma(r, broadcast(1.0f / 5040), broadcast(1.0f / 720));
    for (float c : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) y = fma(y, r, broadcast(c));
    const __m256i exponent =
        _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return (FloatVec)_mm256_and_ps(_mm256_mul_ps((__m256)y, _mm256_castsi256_ps(exponent)),
                                   nonzero);
}

#if defined(__AVXVNNI__) || defined(EYAS_EMULATE_AVX_VNNI)
#include "avx_vnni.h"
#else
// vpmaddubsw, which multiplies bytes, saturates, but for nibbles; vpmaddwd is exact.
constexpr int DOT_INPUTS = 2, INT8_ZERO = 0;

static inline IntVec dot_weights(const uint8_t* w) {
    return (IntVec)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)w));
}
static inline IntVec packed_nibbles(const uint8_t* w) {
    return (IntVec)_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)w));
}
static inline IntVec low_nibbles(IntVec w) { return w & 0x000f000f; }
static inline IntVec next_nibbles(IntVec w) { return (IntVec)_mm256_srli_epi32((__m256i)w, 4); }
static inline IntVec look_up(IntVec codes, IntVec nibbles) {  // of 16-bit lanes
    const __m256i low = _mm256_slli_epi16(_mm256_shuffle_epi8((__m256i)codes, (__m256i)nibbles), 8);
    return (IntVec)_mm256_srai_epi16(low, 8);
}
static inline void add_dot(IntVec& a, IntVec w, IntVec x) {
    a += (IntVec)_mm256_madd_epi16((__m256i)w, (__m256i)x);
}

#define SMALL_SUMS
static inline IntVec packed_bytes(const uint8_t* w) { return (IntVec)_mm256_loadu_si256((const __m256i*)w); }
// a += products of nibbles (unsigned) and bytes (signed), two in each of its 16-bit lanes
static inline void add_small_dot(IntVec& a, IntVec w, IntVec x) {
    a = (IntVec)_mm256_add_epi16((__m256i)a, _mm256_maddubs_epi16((__m256i)w, (__m256i)x));
}
static inline IntVec pair_sums(IntVec a) {  // of 16-bit lanes
    return (IntVec)_mm256_madd_epi16((__m256i)a, _mm256_set1_epi16(1));
}
#endif
