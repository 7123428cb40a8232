// AVX-512: vectors of 16 floats, 32 registers. Dot products of bytes by VNNI where the processor
// has it, else of pairs of 16-bit integers.
#pragma once

#include <immintrin.h>

constexpr int LANES = 16;
constexpr int TILE_ROWS = 12;      // 24 accumulators and 2 weights in 32 registers
constexpr int PREFETCH_LINES = 2;  // cache lines of a panel that a step reads
// (query, head) pairs that read a value of four vectors together: independent sums hide the latency
constexpr int VALUE_PAIRS = 4, VALUE_VECTORS = 16;
typedef float FloatVec __attribute__((vector_size(64)));
typedef int32_t IntVec __attribute__((vector_size(64)));

static inline FloatVec broadcast(float x) { return x - FloatVec{}; }

static inline FloatVec load(const int8_t* p) {
    return (FloatVec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}

static inline FloatVec fma(FloatVec a, FloatVec b, FloatVec c) {
    return (FloatVec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}

static inline FloatVec to_float(IntVec x) { return (FloatVec)_mm512_cvtepi32_ps((__m512i)x); }
static inline IntVec round_to_int(FloatVec x) { return (IntVec)_mm512_cvtps_epi32((__m512)x); }
// LANES numbers in bfloat16
static inline FloatVec load_bfloat16(const uint8_t* p) {
    return (FloatVec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)),
                                       16);
}
#define HAS_HALF
// LANES numbers in float16
static inline FloatVec load_half(const uint8_t* p) {
    return (FloatVec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
}
static inline bool any(IntVec x) { return _mm512_test_epi32_mask((__m512i)x, (__m512i)x); }

// The horizontal sums of 16 vectors, as one vector.
static inline FloatVec horizontal_sums(const FloatVec* a) {
    FloatVec b[8], c[4], d[2];
    for (int i = 0; i < 8; i++)
        b[i] = __builtin_shufflevector(a[2 * i], a[2 * i + 1], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18,
                                       19, 20, 21, 22, 23) +
               __builtin_shufflevector(a[2 * i], a[2 * i + 1], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25,
                                       26, 27, 28, 29, 30, 31);
    for (int i = 0; i < 4; i++)
        c[i] = __builtin_shufflevector(b[2 * i], b[2 * i + 1], 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18,
                                       19, 24, 25, 26, 27) +
               __builtin_shufflevector(b[2 * i], b[2 * i + 1], 4, 5, 6, 7, 12, 13, 14, 15, 20, 21,
                                       22, 23, 28, 29, 30, 31);
    for (int i = 0; i < 2; i++)
        d[i] = __builtin_shufflevector(c[2 * i], c[2 * i + 1], 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20,
                                       21, 24, 25, 28, 29) +
               __builtin_shufflevector(c[2 * i], c[2 * i + 1], 2, 3, 6, 7, 10, 11, 14, 15, 18, 19,
                                       22, 23, 26, 27, 30, 31);
    return __builtin_shufflevector(d[0], d[1], 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26,
                                   28, 30) +
           __builtin_shufflevector(d[0], d[1], 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27,
                                   29, 31);
}

// e^x with a relative error of about 2e-7; 0 below -87. x = n ln 2 + r, and e^r by its series.
static inline FloatVec exp_vec(FloatVec x) {
    const __mmask16 nonzero = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-87.0f), _CMP_NLT_UQ);
    // NaN stays NaN: it is the second operand
    const __m512 capped = _mm512_min_ps(_mm512_set1_ps(88.0f), (__m512)x);
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(capped, _mm512_set1_ps(1.44269504f)),
                                          _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const FloatVec r =
        (FloatVec)_mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f),
                                   _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), capped));
    FloatVec y = fma(r, broadcast(1.0f / 5040), broadcast(1.0f / 720));
    for (float c : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) y = fma(y, r, broadcast(c));
    return (FloatVec)_mm512_maskz_scalef_ps(nonzero, (__m512)y, n);
}

#if defined(__AVX512VNNI__)
#define DOT_OF_BYTES
constexpr int DOT_INPUTS = 4, INT8_ZERO = 128;  // vpdpbusd: unsigned weights, signed x
constexpr int SUM_BLOCK = 0;                    // products that a float tile sums in order; 0: all

static inline IntVec dot_weights(const uint8_t* w) { return (IntVec)_mm512_loadu_si512(w); }
static inline IntVec packed_nibbles(const uint8_t* w) { return (IntVec)_mm512_loadu_si512(w); }
static inline IntVec low_nibbles(IntVec w) { return w & 0x0f0f0f0f; }
static inline IntVec next_nibbles(IntVec w) { return (IntVec)_mm512_srli_epi32((__m512i)w, 4); }
static inline IntVec load_codes(const uint8_t* codes) {
    return (IntVec)_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)codes));
}
static inline IntVec look_up(IntVec codes, IntVec nibbles) {
    return (IntVec)_mm512_shuffle_epi8((__m512i)codes, (__m512i)nibbles);
}

// Compilers spill the accumulators of the intrinsic.
static inline void add_dot(IntVec& a, IntVec w, IntVec x) {
    asm("vpdpbusd %2, %1, %0" : "+v"(a) : "v"(w), "v"(x));
}
#elif defined(__AVX512BW__)
constexpr int DOT_INPUTS = 2, INT8_ZERO = 0;
constexpr int SUM_BLOCK = 128;

static inline IntVec dot_weights(const uint8_t* w) {
    return (IntVec)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)w));
}
static inline IntVec packed_nibbles(const uint8_t* w) {
    return (IntVec)_mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)w));
}
static inline IntVec low_nibbles(IntVec w) { return w & 0x000f000f; }
static inline IntVec next_nibbles(IntVec w) { return (IntVec)_mm512_srli_epi32((__m512i)w, 4); }
static inline IntVec load_codes(const uint8_t* codes) {
    return (IntVec)_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)codes));
}
static inline IntVec look_up(IntVec codes, IntVec nibbles) {  // of 16-bit lanes
    const __m512i low = _mm512_slli_epi16(_mm512_shuffle_epi8((__m512i)codes, (__m512i)nibbles), 8);
    return (IntVec)_mm512_srai_epi16(low, 8);
}
static inline void add_dot(IntVec& a, IntVec w, IntVec x) {
    a += (IntVec)_mm512_madd_epi16((__m512i)w, (__m512i)x);
}

#define SMALL_SUMS
static inline IntVec packed_bytes(const uint8_t* w) { return (IntVec)_mm512_loadu_si512(w); }
// a += products of nibbles (unsigned) and bytes (signed), two in each of its 16-bit lanes
static inline void add_small_dot(IntVec& a, IntVec w, IntVec x) {
    a = (IntVec)_mm512_add_epi16((__m512i)a, _mm512_maddubs_epi16((__m512i)w, (__m512i)x));
}
static inline IntVec pair_sums(IntVec a) {  // of 16-bit lanes
    return (IntVec)_mm512_madd_epi16((__m512i)a, _mm512_set1_epi16(1));
}
#else
#define NO_DOT
constexpr int SUM_BLOCK = 128;
#endif
