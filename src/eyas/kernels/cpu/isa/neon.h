// ARM NEON: vectors of 4 floats, 32 registers. Dot products of bytes where the processor has
// dotprod (ARMv8.2).
#pragma once

#include <arm_neon.h>

constexpr int LANES = 4;
constexpr int TILE_ROWS = 12;  // 24 accumulators, 2 weights and one x in 32 registers
constexpr int PREFETCH_LINES = 1;
constexpr int SUM_BLOCK = 128;
constexpr int VALUE_PAIRS = 4, VALUE_VECTORS = 4;
typedef float FloatVec __attribute__((vector_size(16)));
typedef int32_t IntVec __attribute__((vector_size(16)));

struct Broadcast {  // a number for all lanes; a product reads it from the first one
    float number;
    operator FloatVec() const { return (FloatVec)vdupq_n_f32(number); }
};
static inline Broadcast broadcast(float x) { return {x}; }
static inline FloatVec load(const int8_t* p) {
    int32_t four;
    std::memcpy(&four, p, sizeof four);
    const int16x8_t wide = vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four)));
    return (FloatVec)vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide)));
}
// GCC takes the intrinsic for a call that reads memory: it would store a tile's sums at every step.
static inline FloatVec fma(FloatVec a, FloatVec b, FloatVec c) {
    asm("fmla %0.4s, %1.4s, %2.4s" : "+w"(c) : "w"(a), "w"(b));
    return c;
}
static inline FloatVec fma(Broadcast a, FloatVec b, FloatVec c) {
    asm("fmla %0.4s, %1.4s, %2.s[0]" : "+w"(c) : "w"(b), "w"(a.number));
    return c;
}
static inline FloatVec to_float(IntVec x) { return (FloatVec)vcvtq_f32_s32((int32x4_t)x); }
static inline IntVec round_to_int(FloatVec x) { return (IntVec)vcvtnq_s32_f32((float32x4_t)x); }
// LANES numbers in bfloat16
static inline FloatVec load_bfloat16(const uint8_t* p) {
    return (FloatVec)vshll_n_u16(vreinterpret_u16_u8(vld1_u8(p)), 16);
}
#define HAS_HALF
// LANES numbers in float16
static inline FloatVec load_half(const uint8_t* p) {
    return (FloatVec)vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p)));
}
static inline bool any(IntVec x) { return vmaxvq_u32((uint32x4_t)x); }

// The horizontal sums of 4 vectors, as one vector.
static inline FloatVec horizontal_sums(const FloatVec* a) {
    const float32x4_t first = vpaddq_f32((float32x4_t)a[0], (float32x4_t)a[1]),
                      second = vpaddq_f32((float32x4_t)a[2], (float32x4_t)a[3]);
    return (FloatVec)vpaddq_f32(first, second);
}

// e^x with a relative error of about 2e-7; 0 below -87. x = n ln 2 + r, and e^r by its series.
static inline FloatVec exp_vec(FloatVec x) {
    const float32x4_t in = (float32x4_t)x;
    const uint32x4_t zero = vcltq_f32(in, vdupq_n_f32(-87.0f));
    // NaN stays NaN
    const float32x4_t capped = vmaxq_f32(vminq_f32(in, vdupq_n_f32(88.0f)), vdupq_n_f32(-87.0f));
    const float32x4_t n = vrndnq_f32(vmulq_f32(capped, vdupq_n_f32(1.44269504f)));
    const FloatVec r = (FloatVec)vfmsq_f32(vfmsq_f32(capped, n, vdupq_n_f32(0.693359375f)), n,
                                           vdupq_n_f32(-2.12194440e-4f));
    FloatVec y = fma(r, broadcast(1.0f / 5040), broadcast(1.0f / 720));
    for (float c : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) y = fma(y, r, broadcast(c));
    const int32x4_t exponent = vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127)), 23);
    const float32x4_t scaled = vmulq_f32((float32x4_t)y, vreinterpretq_f32_s32(exponent));
    return (FloatVec)vbslq_f32(zero, vdupq_n_f32(0), scaled);
}

#if defined(__ARM_FEATURE_DOTPROD)
#define DOT_OF_BYTES
constexpr int DOT_INPUTS = 4, INT8_ZERO = 0;  // sdot: signed weights, signed x

static inline IntVec dot_weights(const uint8_t* w) { return (IntVec)vld1q_u8(w); }
static inline IntVec packed_nibbles(const uint8_t* w) { return dot_weights(w); }
static inline IntVec low_nibbles(IntVec w) { return w & 0x0f0f0f0f; }
static inline IntVec next_nibbles(IntVec w) { return (IntVec)vshrq_n_u32((uint32x4_t)w, 4); }
static inline IntVec load_codes(const uint8_t* codes) { return (IntVec)vld1q_u8(codes); }
static inline IntVec look_up(IntVec codes, IntVec nibbles) {
    return (IntVec)vqtbl1q_u8((uint8x16_t)codes, (uint8x16_t)nibbles);
}

#define DIGIT_FROM_LANE
typedef float Digit;  // four bytes in a vector register
static inline Digit load_digit(const int8_t* digit) {
    Digit bytes;
    std::memcpy(&bytes, digit, sizeof bytes);
    return bytes;
}
static inline void add_dot(IntVec& a, IntVec w, Digit x) {
    asm("sdot %0.4s, %1.16b, %2.4b[0]" : "+w"(a) : "w"(w), "w"(x));
}
#else
#define NO_DOT
#endif
