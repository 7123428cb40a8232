// Vectors of 16 floats: loads, stores, sums and exponentials, for AVX-512, AVX2 and any other
// processor.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <type_traits>
#include <vector>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

using std::int64_t;
typedef float FloatVec __attribute__((vector_size(64)));
typedef int32_t IntVec __attribute__((vector_size(64)));

constexpr int LANES = 16, PANEL = 2 * LANES;  // PANEL: outputs of a panel of weights
constexpr int MAX_PAIRS = 24;                 // (query, head) pairs that read a key together
constexpr int SMALL_BATCH = 32;  // tokens up to which every thread prepares its own copy of them
#if defined(__AVX512F__)
constexpr int TILE_ROWS = 12;  // 24 accumulators and 2 weights in 32 registers
#else
constexpr int TILE_ROWS = 3;
#endif

#if defined(_OPENMP)
#include <omp.h>
static inline int thread_number() { return omp_get_thread_num(); }
#else
static inline int thread_number() { return 0; }
#endif

static inline FloatVec load(const float* p) {
    FloatVec v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
static inline void store(float* p, FloatVec v) { std::memcpy(p, &v, sizeof v); }
static inline FloatVec broadcast(float x) { return x - FloatVec{}; }

static inline FloatVec load(const int8_t* p) {
#if defined(__AVX512F__)
    return (FloatVec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(__AVX2__)
    __m128i raw = _mm_loadu_si128((const __m128i*)p);
    __m256 low = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(raw));
    __m256 high = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(raw, 8)));
    FloatVec v;
    std::memcpy(&v, &low, sizeof low);
    std::memcpy((char*)&v + sizeof low, &high, sizeof high);
    return v;
#else
    FloatVec v;
    for (int i = 0; i < LANES; i++) v[i] = p[i];
    return v;
#endif
}

static inline FloatVec fma(FloatVec a, FloatVec b, FloatVec c) {
#if defined(__AVX512F__)
    return (FloatVec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    return a * b + c;
#endif
}

static inline float horizontal_sum(FloatVec v) {
    for (int step = LANES / 2; step; step /= 2)
        for (int i = 0; i < step; i++) v[i] += v[i + step];
    return v[0];
}

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
#if defined(__AVX512F__)
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
#else
    x = x > 88.0f ? broadcast(88.0f) : x;
    IntVec tiny = x < -87.0f;
    x = tiny ? broadcast(-87.0f) : x;
    IntVec n = __builtin_convertvector(
        x * 1.44269504f + (x < 0.0f ? broadcast(-0.5f) : broadcast(0.5f)), IntVec);
    FloatVec whole = __builtin_convertvector(n, FloatVec);
    FloatVec r = x - whole * 0.693359375f - whole * -2.12194440e-4f;
    FloatVec y = fma(r, broadcast(1.0f / 5040), broadcast(1.0f / 720));
    for (float c : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) y = fma(y, r, broadcast(c));
    y *= (FloatVec)((n + 127) << 23);
    return tiny ? FloatVec{} : y;
#endif
}
