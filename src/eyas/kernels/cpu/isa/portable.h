// Any other processor: vectors of 4 floats by the compiler's own vector types, and no integer dot
// products.
#pragma once

constexpr int LANES = 4;
constexpr int TILE_ROWS = 6;  // 12 accumulators in 16 registers
constexpr int PREFETCH_LINES = 1;
constexpr int SUM_BLOCK = 128;
constexpr int VALUE_PAIRS = 2, VALUE_VECTORS = 4;
typedef float FloatVec __attribute__((vector_size(16)));
typedef int32_t IntVec __attribute__((vector_size(16)));

struct Broadcast {  // a type of its own, as in neon.h: code that compiles here compiles there
    float number;
    operator FloatVec() const { return FloatVec{number, number, number, number}; }
};
static inline Broadcast broadcast(float x) { return {x}; }
static inline FloatVec load(const int8_t* p) {
    return FloatVec{(float)p[0], (float)p[1], (float)p[2], (float)p[3]};
}
static inline FloatVec fma(FloatVec a, FloatVec b, FloatVec c) { return a * b + c; }
static inline FloatVec to_float(IntVec x) { return __builtin_convertvector(x, FloatVec); }
static inline FloatVec load_bfloat16(const uint8_t* p) {
    uint16_t x[LANES];
    std::memcpy(x, p, sizeof x);
    return (FloatVec)(IntVec{x[0], x[1], x[2], x[3]} << 16);
}
static inline bool any(IntVec x) { return x[0] | x[1] | x[2] | x[3]; }

// The horizontal sums of 4 vectors, as one vector.
static inline FloatVec horizontal_sums(const FloatVec* a) {
    const FloatVec b[2] = {__builtin_shufflevector(a[0], a[1], 0, 1, 4, 5) +
                               __builtin_shufflevector(a[0], a[1], 2, 3, 6, 7),
                           __builtin_shufflevector(a[2], a[3], 0, 1, 4, 5) +
                               __builtin_shufflevector(a[2], a[3], 2, 3, 6, 7)};
    return __builtin_shufflevector(b[0], b[1], 0, 2, 4, 6) +
           __builtin_shufflevector(b[0], b[1], 1, 3, 5, 7);
}

// e^x with a relative error of about 2e-7; 0 below -87. x = n ln 2 + r, and e^r by its series.
static inline FloatVec exp_vec(FloatVec x) {
    x = x > 88.0f ? FloatVec(broadcast(88.0f)) : x;
    IntVec tiny = x < -87.0f;
    x = tiny ? FloatVec(broadcast(-87.0f)) : x;
    IntVec n = __builtin_convertvector(
        x * 1.44269504f + (x < 0.0f ? FloatVec(broadcast(-0.5f)) : FloatVec(broadcast(0.5f))), IntVec);
    FloatVec whole = to_float(n);
    FloatVec r = x - whole * 0.693359375f - whole * -2.12194440e-4f;
    FloatVec y = fma(r, broadcast(1.0f / 5040), broadcast(1.0f / 720));
    for (float c : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) y = fma(y, r, broadcast(c));
    y *= (FloatVec)((n + 127) << 23);
    return tiny ? FloatVec{} : y;
}

#define NO_DOT
