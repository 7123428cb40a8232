// AVX-VNNI: dot products of bytes in vectors of 8 integers; the rest is avx2.h.
#pragma once

#define DOT_OF_BYTES
constexpr int DOT_INPUTS = 4, INT8_ZERO = 128;  // vpdpbusd: unsigned weights, signed x

static inline IntVec dot_weights(const uint8_t* w) {
    return (IntVec)_mm256_loadu_si256((const __m256i*)w);
}
static inline IntVec packed_nibbles(const uint8_t* w) { return dot_weights(w); }
static inline IntVec low_nibbles(IntVec w) { return w & 0x0f0f0f0f; }
static inline IntVec next_nibbles(IntVec w) { return (IntVec)_mm256_srli_epi32((__m256i)w, 4); }
static inline IntVec look_up(IntVec codes, IntVec nibbles) {
    return (IntVec)_mm256_shuffle_epi8((__m256i)codes, (__m256i)nibbles);
}

#if defined(EYAS_EMULATE_AVX_VNNI)
// What the instruction computes, for tests on processors without it.
static inline void add_dot(IntVec& a, IntVec w, IntVec x) {
    for (int i = 0; i < LANES; i++)
        for (int shift = 0; shift < 32; shift += 8)
            a[i] += (int32_t)(uint8_t)((uint32_t)w[i] >> shift) * (int8_t)((uint32_t)x[i] >> shift);
}
#else
// Compilers spill the accumulators of the intrinsic.
static inline void add_dot(IntVec& a, IntVec w, IntVec x) {
    asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(a) : "x"(w), "x"(x));
}
#endif
