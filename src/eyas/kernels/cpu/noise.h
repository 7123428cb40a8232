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
