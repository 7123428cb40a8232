// Random numbers as sampling.py defines them.
#pragma once

#include "vectors.h"

typedef double Doubles __attribute__((vector_size(64)));
typedef int64_t Longs __attribute__((vector_size(64)));
typedef uint64_t Words __attribute__((vector_size(64)));

template <class Word>
static inline Word mix(Word x) {  // SplitMix64's finaliser: sampling.py
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

// log x of normal numbers, to the last digits but one: x = 2^n m with m about 1, log m = 2 artanh((m - 1) / (m + 1)).
static inline Doubles logarithm(Doubles x) {
    Longs bits = (Longs)x, n = (bits >> 52) - 1023;
    Doubles m = (Doubles)((bits & 0xFFFFFFFFFFFFF) | 0x3FF0000000000000);
    Longs large = m > 1.4142135623730951;
    m = large ? m * 0.5 : m;
    n -= large;  // a comparison's truth is -1
    Doubles s = (m - 1.0) / (m + 1.0), t = s * s, y = t * (1.0 / 19) + 1.0 / 17;
    for (double c : {1.0 / 15, 1.0 / 13, 1.0 / 11, 1.0 / 9, 1.0 / 7, 1.0 / 5, 1.0 / 3, 1.0}) y = y * t + c;
    return __builtin_convertvector(n, Doubles) * 0.6931471805599453 + 2.0 * s * y;
}

static inline bool any(Ints x) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)x, (__m512i)x);
#else
    int32_t found = 0;
    for (int i = 0; i < LANES; i++) found |= x[i];
    return found;
#endif
}

// Words of 52 random bits, a token each; u = (bits + 1/2) / 2^52 is the token's uniform number, Gumbel noise is -log(-log u).
struct Bits {
    uint64_t key;

    Bits(int64_t seed, int64_t stream, int64_t position) {
        constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15u;
        key = mix(mix(mix((uint64_t)seed + GOLDEN) + (uint64_t)stream) + (uint64_t)(position + 1) * GOLDEN);
    }

    Words of(Words token) const { return mix(key + (token + 1) * 0x9E3779B97F4A7C15u) >> 12; }
    static Words from(int64_t first) { return (uint64_t)first + Words{0, 1, 2, 3, 4, 5, 6, 7}; }
};

static inline Doubles gumbel(Words bits) {
    Doubles u = (__builtin_convertvector(bits, Doubles) + 0.5) * 0x1p-52;
    return -logarithm(-logarithm(u));
}

// What is missing to 1 of the uniform numbers of 16 tokens.
static inline Floats missing(const Bits& bits, const Words* token) {
    typedef float Eight __attribute__((vector_size(32)));
    Eight half[2];
    for (int i = 0; i < 2; i++) {
        Longs rest = (Longs)(0xFFFFFFFFFFFFFu - bits.of(token[i]));
        half[i] = __builtin_convertvector((__builtin_convertvector(rest, Doubles) + 0.5) * 0x1p-52, Eight);
    }
    Floats all;
    std::memcpy(&all, half, sizeof all);
    return all;
}

// The token with the largest score + noise, the first of equals; `broken`: a score is not a number. Nearly all tokens are ruled out without
// their noise, which is at most -log of what is missing to 1: they would need more to pass the best that was found.
static int64_t draw(const float* scores, int64_t V, const Bits* bits, bool& broken) {
    float top = -INFINITY;
    int64_t best = 0;
    bool bad = false;
    Floats most = all(-INFINITY);
    Ints odd = {};
    int64_t v = 0;
    for (; v + LANES <= V; v += LANES) {
        Floats x = load(scores + v);
        odd |= x != x;
        most = x > most ? x : most;
    }
    for (int i = 0; i < LANES; i++) bad |= odd[i] != 0, top = most[i] > top ? most[i] : top;
    for (; v < V; v++) bad |= scores[v] != scores[v], top = scores[v] > top ? scores[v] : top;
    if (bad) {
        broken = true;
        return 0;
    }
    while (best < V - 1 && scores[best] != top) best++;
    if (!bits || top == -INFINITY) return best;
    auto perturbed = [&](int64_t token) { return (scores[token] - top) + (float)gumbel(bits->of(Words{} + (uint64_t)token))[0]; };
    float lead = perturbed(best);
    auto consider = [&](int64_t token) {
        float key = perturbed(token);
        if (key > lead || (key == lead && token < best)) lead = key, best = token;
    };
    for (v = 0; v + LANES <= V; v += LANES) {
        Floats x = load(scores + v) - top;
        const Words token[2] = {Bits::from(v), Bits::from(v + 8)};
        Ints may = missing(*bits, token) <= exponential(x - lead) * 1.0001f + 1e-37f;
        if (any(may))
            for (int i = 0; i < LANES; i++)
                if (may[i] && x[i] > -INFINITY) consider(v + i);
    }
    for (; v < V; v++) consider(v);
    return best;
}
