// Vectors of floats as wide as the processor's registers: what is the same for every instruction
// set. isa/ has one file for each, with its width, its tiles and its dot products.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <type_traits>
#include <utility>
#include <vector>

using std::int64_t;

#if defined(__AVX512F__)
#include "isa/avx512.h"
#elif defined(__AVX2__) && defined(__FMA__)
#include "isa/avx2.h"
#elif defined(__ARM_NEON) && defined(__aarch64__)
#include "isa/neon.h"
#else
#include "isa/portable.h"
#endif

constexpr int PANEL = 2 * LANES;  // outputs of a panel of weights
constexpr int MAX_PAIRS = 24;     // (query, head) pairs that read a key together
constexpr int SMALL_BATCH = 32;   // tokens up to which every thread prepares its own copy of them

#if defined(_OPENMP)
#include <omp.h>
static inline int thread_number() { return omp_get_thread_num(); }
#else
static inline int thread_number() { return 0; }
#endif

// Call act(i) for 0 .. count - 1 by all threads of the parallel region. Few tokens are shared
// evenly, which costs least. Of many every thread takes the next unit when it is done with one, as
// units cost differently and a processor's cores are not equally fast.
template <class Act>
static inline void share(int64_t count, int64_t tokens, Act act) {
    if (tokens <= SMALL_BATCH) {
#pragma omp for schedule(static)
        for (int64_t i = 0; i < count; i++) act(i);
    } else {
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < count; i++) act(i);
    }
}

static inline FloatVec load(const float* p) {
    FloatVec v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
static inline void store(float* p, FloatVec v) { std::memcpy(p, &v, sizeof v); }

static inline uint16_t to_bfloat16(float value) {  // to the nearest, even
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if (value != value) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// a * b + c of single numbers, rounded as often as in vectors. Left to themselves, compilers may
// contract a * b + c or not wherever a function is inlined, and bits would depend on the shape of a
// pass.
static inline float fma(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

static inline float horizontal_sum(FloatVec v) {
    for (int step = LANES / 2; step; step /= 2)
        for (int i = 0; i < step; i++) v[i] += v[i + step];
    return v[0];
}

static inline float horizontal_max(FloatVec v) {
    float largest = v[0];
    for (int i = 1; i < LANES; i++) largest = v[i] > largest ? v[i] : largest;
    return largest;
}

// tanh x = (1 - t) / (1 + t), t = exp(-2 |x|); near 0 by its series.
static inline FloatVec tanh_vec(FloatVec x) {
    const FloatVec zero = {}, size = x < zero ? -x : x, t = exp_vec(-2.0f * size), squared = x * x,
                   ratio = (1.0f - t) / (1.0f + t);
    FloatVec series = broadcast(62.0f / 2835);
    for (float c : {-17.0f / 315, 2.0f / 15, -1.0f / 3, 1.0f}) series = fma(series, squared, broadcast(c));
    return size < 0.25f ? x * series : x < zero ? -ratio : ratio;
}
