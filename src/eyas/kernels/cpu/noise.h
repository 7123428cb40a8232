// Random numbers as core/sampling.py defines them, and draws with them.
#pragma once

#include "vectors.h"

constexpr int WIDE_LANES = LANES / 2;  // numbers of 64 bits in a register
typedef double DoubleVec __attribute__((vector_size(8 * WIDE_LANES)));
typedef int64_t Int64Vec __attribute__((vector_size(8 * WIDE_LANES)));
typedef uint64_t UInt64Vec __attribute__((vector_size(8 * WIDE_LANES)));

template <class Word>
static inline Word splitmix64(Word x) {  // SplitMix64's finaliser
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

// log x of normal numbers, nearly to the last bit: x = 2^n m with m about 1, log m = 2 artanh((m -
// 1) / (m + 1)).
static inline DoubleVec log_vec(DoubleVec x) {
    Int64Vec bits = (Int64Vec)x, n = (bits >> 52) - 1023;
    DoubleVec m = (DoubleVec)((bits & 0xFFFFFFFFFFFFF) | 0x3FF0000000000000);
    Int64Vec large = m > 1.4142135623730951;
    m = large ? m * 0.5 : m;
    n -= large;  // true is -1
    DoubleVec s = (m - 1.0) / (m + 1.0), t = s * s, y = t * (1.0 / 19) + 1.0 / 17;
    for (double c : {1.0 / 15, 1.0 / 13, 1.0 / 11, 1.0 / 9, 1.0 / 7, 1.0 / 5, 1.0 / 3, 1.0})
        y = y * t + c;
    return __builtin_convertvector(n, DoubleVec) * 0.6931471805599453 + 2.0 * s * y;
}

// 52 random bits for each token; u = (bits + 1/2) / 2^52 is the token's uniform number, -log(-log
// u) its Gumbel noise.
struct TokenNoise {
    uint64_t key;

    TokenNoise(int64_t seed, int64_t stream, int64_t position) {
        constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15u;
        key = splitmix64(splitmix64(splitmix64((uint64_t)seed + GOLDEN) + (uint64_t)stream) +
                         (uint64_t)(position + 1) * GOLDEN);
    }

    UInt64Vec bits(UInt64Vec token) const {
        return splitmix64(key + (token + 1) * 0x9E3779B97F4A7C15u) >> 12;
    }
    static UInt64Vec tokens_from(int64_t first) {
        UInt64Vec offset;
        for (int i = 0; i < WIDE_LANES; i++) offset[i] = i;
        return (uint64_t)first + offset;
    }
};

static inline DoubleVec gumbel(UInt64Vec bits) {
    DoubleVec u = (__builtin_convertvector(bits, DoubleVec) + 0.5) * 0x1p-52;
    return -log_vec(-log_vec(u));
}

// 1 - u for the uniform numbers u of LANES tokens.
static inline FloatVec one_minus_uniform(const TokenNoise& noise, const UInt64Vec* token) {
    typedef float Half __attribute__((vector_size(4 * WIDE_LANES)));
    Half half[2];
    for (int i = 0; i < 2; i++) {
        Int64Vec complement = (Int64Vec)(0xFFFFFFFFFFFFFu - noise.bits(token[i]));
        half[i] = __builtin_convertvector(
            (__builtin_convertvector(complement, DoubleVec) + 0.5) * 0x1p-52, Half);
    }
    FloatVec joined;
    std::memcpy(&joined, half, sizeof joined);
    return joined;
}

// The token with the largest score + Gumbel noise, the first of equals; without noise the largest
// score. is_nan: some score is NaN. Nearly all tokens are ruled out without computing their noise:
// it is at most -log(1 - u), less than they need to exceed the best sum so far.
static int64_t draw(const float* scores, int64_t V, const TokenNoise* noise, bool& is_nan) {
    float top = -INFINITY;
    int64_t best = 0;
    bool found_nan = false;
    FloatVec largest = broadcast(-INFINITY);
    IntVec nan = {};
    int64_t v = 0;
    for (; v + LANES <= V; v += LANES) {
        FloatVec x = load(scores + v);
        nan |= x != x;
        largest = x > largest ? x : largest;
    }
    for (int i = 0; i < LANES; i++)
        found_nan |= nan[i] != 0, top = largest[i] > top ? largest[i] : top;
    for (; v < V; v++) found_nan |= scores[v] != scores[v], top = scores[v] > top ? scores[v] : top;
    if (found_nan) {
        is_nan = true;
        return 0;
    }
    while (best < V - 1 && scores[best] != top) best++;
    if (!noise || top == -INFINITY) return best;
    auto perturbed_score = [&](int64_t token) {
        return (scores[token] - top) + (float)gumbel(noise->bits(UInt64Vec{} + (uint64_t)token))[0];
    };
    float lead = perturbed_score(best);
    auto consider = [&](int64_t token) {
        float key = perturbed_score(token);
        if (key > lead || (key == lead && token < best)) lead = key, best = token;
    };
    for (v = 0; v + LANES <= V; v += LANES) {
        FloatVec x = load(scores + v) - top;
        const UInt64Vec token[2] = {TokenNoise::tokens_from(v),
                                    TokenNoise::tokens_from(v + WIDE_LANES)};
        IntVec may_win = one_minus_uniform(*noise, token) <= exp_vec(x - lead) * 1.0001f + 1e-37f;
        if (any(may_win))
            for (int i = 0; i < LANES; i++)
                if (may_win[i] && x[i] > -INFINITY) consider(v + i);
    }
    for (; v < V; v++) consider(v);
    return best;
}
