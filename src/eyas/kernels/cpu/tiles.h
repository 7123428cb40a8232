// Products of a few rows of x with a panel: the weights of 32 outputs.
//
// A panel is [input][32] for float and int8_t. bfloat16 stands in pairs of inputs, [input / 2][32][2]: a pair becomes two floats with one
// operation each or, where x is rounded to bfloat16 as well, is multiplied as it stands by a pair of x. Where the machine adds up products
// of bytes (VNNI), int8 stands in quads, [input / 4][32][4], and x is taken apart into digits of eight bits, three unless fewer were asked
// for: sums of whole numbers have no rounding at all, and four inputs are worth one instruction for each digit, where floats take one for
// each input. int4 stands in groups of 32 inputs, each of them 4 x [32][4] bytes, which hold a quad in their lower and the next one in their
// upper halves, and then the 32 outputs' scales in bfloat16.
//
// How exact three digits are: x is taken to within 2^-23 of its row's largest, which is at most sqrt(K) times the root mean square of its K
// numbers, and nothing else is lost. Measured against float64, products lose less than by floats in order (1.3e-7 against 3.5e-7 of
// themselves, K = 384). Where one number of a row is far above the others and its weights are far below theirs, floats lose less.
#pragma once

#include "vectors.h"

enum End : int { STORE, ADD, GATE };  // what is done with a linear layer's output: y = it, y += it, y = silu(first half) * second half

struct Input {  // of a tile, from its first row on
    const float* x;  // [row][ldx]
    int64_t ldx;
    const int8_t* digits;  // or [input / 4][row][digit, the least first][4]; or in bfloat16, [input / 2][row][2]
    const float* step;     // [row] what one is worth
    const int32_t* start;  // [group][row][digit] what their sums begin with; quads are one group
};

struct Ahead {  // what is fetched meanwhile: of the panel that comes next, the part that falls to this tile
    const char* at;
    int64_t step;
    void fetch() {
        __builtin_prefetch(at);
        __builtin_prefetch(at + 64);
        at += step;
    }
};

// A tile is never a part of what calls it: there compilers leave the sums of few rows in memory, which takes twice as long.
#define APART static __attribute__((noinline))

constexpr int64_t GROUP = 32, GROUP_BYTES = GROUP * PANEL / 2 + 2 * PANEL;  // inputs of int4 that share scales

template <int DIGITS>
struct Quad { uint8_t byte; };  // a weight + 128; what it is multiplied by has so many digits

template <int DIGITS>
struct Nibbles { uint8_t byte; };  // two weights + 8, likewise; and scales

struct Half { uint16_t bits; };  // a weight in bfloat16; what it is multiplied by is rounded to that

template <class W>
struct Form {  // width: bytes that a number of x takes; 0: it stays a float
    static constexpr int rows = TILE, digits = 0, width = 0, zero = 0, step = sizeof(W) == 1 ? PANEL : 128;  // step: bytes that are read at once
    static int64_t group(int64_t inputs) { return inputs; }
    static int64_t bytes(int64_t inputs) { return inputs * PANEL * sizeof(W); }  // of a panel
};
template <int DIGITS>
struct Form<Quad<DIGITS>> : Form<uint8_t> {
    static constexpr int rows = 12 / DIGITS, digits = DIGITS, width = DIGITS, zero = 128, step = 128;  // 24 sums, 2 weights and a digit in 32 registers
};
template <>
struct Form<Half> : Form<uint16_t> {
    static constexpr int width = 2;
};
template <int DIGITS>
struct Form<Nibbles<DIGITS>> {
    static constexpr int rows = 12 / (DIGITS + 1), digits = DIGITS, width = DIGITS, zero = 8, step = GROUP_BYTES / 4;  // beside the sums as many floats as a digit has sums
    static int64_t group(int64_t) { return GROUP; }
    static int64_t bytes(int64_t inputs) { return inputs / GROUP * GROUP_BYTES; }
};

constexpr int64_t BLOCK = 128, LEAST = 32, NEAR_ROWS = 3 << 18;  // rows whose x stays near while all panels pass: at most, at least, and their bytes
constexpr int64_t SETS = 512;             // floats after which lines fall on the same places of the nearest cache, which holds few of them
constexpr int64_t NEAR = 4096;            // bytes ahead, of a panel that is read only once

static inline Floats silu(Floats x) { return x / (1.0f + exponential(-x)); }

static inline void finish(Floats first, Floats second, const float* scale, const float* bias, float* y, End end) {
    Floats a[2] = {first, second};
    for (int half = 0; half < 2; half++)  // one operation in every tile: a compiler that joined a product and a sum in some of them would change bits
        a[half] = fma(a[half], scale ? load(scale + half * LANES) : all(1), bias ? load(bias + half * LANES) : Floats{});
    if (end == GATE) {
        store(y, silu(a[0]) * a[1]);
    } else {
        store(y, end == ADD ? load(y) + a[0] : a[0]);
        store(y + LANES, end == ADD ? load(y + LANES) + a[1] : a[1]);
    }
}

template <int ROWS>
static inline void add(Floats (&a)[ROWS][2], Floats first, Floats second, const float* x, int64_t ldx) {
    for (int m = 0; m < ROWS; m++) {
        Floats b = all(x[m * ldx]);
        a[m][0] = fma(b, first, a[m][0]);
        a[m][1] = fma(b, second, a[m][1]);
    }
}

template <int ROWS, class W>
APART void tile(const Input& in, const W* w, int64_t inputs, Ahead ahead, const float* scale, const float* bias, float* y, int64_t ldy, End end) {
    Floats a[ROWS][2] = {};
    for (int64_t k = 0; k < inputs; k++, w += PANEL) {
        ahead.fetch();
        add<ROWS>(a, load(w), load(w + LANES), in.x + k, in.ldx);
    }
    for (int m = 0; m < ROWS; m++) finish(a[m][0], a[m][1], scale, bias, y + m * ldy, end);
}

template <int ROWS>
APART void tile(const Input& in, const uint16_t* w, int64_t inputs, Ahead ahead, const float* scale, const float* bias, float* y, int64_t ldy, End end) {
    Floats a[ROWS][2] = {};
    for (int64_t k = 0; k < inputs; k += 2, w += 2 * PANEL) {
        Ints first, second;
        std::memcpy(&first, w, sizeof first);
        std::memcpy(&second, w + PANEL, sizeof second);
        ahead.fetch();
        add<ROWS>(a, (Floats)(first << 16), (Floats)(second << 16), in.x + k, in.ldx);
        add<ROWS>(a, (Floats)(first & -65536), (Floats)(second & -65536), in.x + k + 1, in.ldx);
    }
    for (int m = 0; m < ROWS; m++) finish(a[m][0], a[m][1], scale, bias, y + m * ldy, end);
}

#if defined(__AVX512VNNI__)
constexpr bool QUADS_HERE = true;

// a + the sums of four products of bytes each: w without a sign, x with one. (Compilers spill the sums when they see an intrinsic.)
static inline void dot(__m512i& a, __m512i w, __m512i x) { asm("vpdpbusd %2, %1, %0" : "+v"(a) : "v"(w), "v"(x)); }

template <int ROWS, int DIGITS>
APART void tile(const Input& in, const Quad<DIGITS>* w, int64_t inputs, Ahead ahead, const float* scale, const float* bias, float* y, int64_t ldy, End end) {
    __m512i a[ROWS * DIGITS][2];
    const int8_t* digits = in.digits;
#pragma GCC unroll 12
    for (int i = 0; i < ROWS * DIGITS; i++) a[i][0] = a[i][1] = _mm512_set1_epi32(in.start[i]);
    for (int64_t k = 0; k < inputs; k += 4, w += 4 * PANEL, digits += 4 * ROWS * DIGITS) {
        __m512i first = _mm512_loadu_si512(w), second = _mm512_loadu_si512(w + 2 * PANEL);
        ahead.fetch();
#pragma GCC unroll 12
        for (int i = 0; i < ROWS * DIGITS; i++) {
            int32_t four;
            std::memcpy(&four, digits + 4 * i, sizeof four);
            __m512i x = _mm512_set1_epi32(four);
            dot(a[i][0], first, x);
            dot(a[i][1], second, x);
        }
    }
    Floats sums[ROWS * DIGITS][2];  // written here alone: sums that are looked up by a variable would stay in memory throughout
#pragma GCC unroll 12
    for (int i = 0; i < ROWS * DIGITS; i++) sums[i][0] = (Floats)_mm512_cvtepi32_ps(a[i][0]), sums[i][1] = (Floats)_mm512_cvtepi32_ps(a[i][1]);
    for (int m = 0; m < ROWS; m++) {
        Floats whole[2] = {};
        for (int half = 0; half < 2; half++) {
            for (int d = DIGITS - 1; d >= 0; d--) whole[half] = fma(whole[half], all(256), sums[m * DIGITS + d][half]);
            whole[half] *= in.step[m];
        }
        finish(whole[0], whole[1], scale, bias, y + m * ldy, end);
    }
}

template <int ROWS, int DIGITS>
APART void tile(const Input& in, const Nibbles<DIGITS>* w, int64_t inputs, Ahead ahead, const float*, const float* bias, float* y, int64_t ldy, End end) {
    Floats sums[ROWS][2] = {};
    const uint8_t* at = (const uint8_t*)w;
    const int8_t* digits = in.digits;
    const int32_t* start = in.start;
    const __m512i low = _mm512_set1_epi32(0x0f0f0f0f);
    for (int64_t k = 0; k < inputs; k += GROUP, at += GROUP_BYTES, start += ROWS * DIGITS) {
        __m512i a[ROWS * DIGITS][2];
#pragma GCC unroll 12
        for (int i = 0; i < ROWS * DIGITS; i++) a[i][0] = a[i][1] = _mm512_set1_epi32(start[i]);
        for (int pair = 0; pair < 4; pair++) {
            __m512i first = _mm512_loadu_si512(at + pair * 128), second = _mm512_loadu_si512(at + pair * 128 + 64);
            ahead.fetch();
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++, digits += 4 * ROWS * DIGITS) {
                const __m512i left = _mm512_and_si512(first, low), right = _mm512_and_si512(second, low);
#pragma GCC unroll 12
                for (int i = 0; i < ROWS * DIGITS; i++) {
                    int32_t four;
                    std::memcpy(&four, digits + 4 * i, sizeof four);
                    __m512i x = _mm512_set1_epi32(four);
                    dot(a[i][0], left, x);
                    dot(a[i][1], right, x);
                }
                first = _mm512_srli_epi32(first, 4), second = _mm512_srli_epi32(second, 4);
            }
        }
        Floats scale[2];
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++)
            scale[half] = (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(at + 512 + half * 32))), 16);
#pragma GCC unroll 6
        for (int m = 0; m < ROWS; m++) {
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++) {
                Floats whole = (Floats)_mm512_cvtepi32_ps(a[m * DIGITS + DIGITS - 1][half]);
#pragma GCC unroll 2
                for (int d = DIGITS - 2; d >= 0; d--) whole = fma(whole, all(256), (Floats)_mm512_cvtepi32_ps(a[m * DIGITS + d][half]));
                sums[m][half] = fma(whole, scale[half], sums[m][half]);
            }
        }
    }
    Floats found[ROWS][2];
#pragma GCC unroll 6
    for (int m = 0; m < ROWS; m++) found[m][0] = sums[m][0] * in.step[m], found[m][1] = sums[m][1] * in.step[m];
    for (int m = 0; m < ROWS; m++) finish(found[m][0], found[m][1], nullptr, bias, y + m * ldy, end);
}

// The largest whose digits are bytes; of three, less by more than rounding adds: 127 * (65536 + 256 + 1) - 127.
template <int DIGITS>
constexpr float most_of = DIGITS == 1 ? 127 : DIGITS == 2 ? 127 * 257 : 8355584;

// The digits of a row [K], K a multiple of 16, every four of them `rows` fours after the last; and of each group what takes `zero` off its
// weights. What is not finite makes `step` NaN.
template <int DIGITS>
static void take_apart(const float* x, int64_t K, int64_t group, int zero, int64_t rows, int8_t* digits, float* step, int32_t* start) {
    constexpr float MOST = most_of<DIGITS>;
    Floats most = all(1e-30f), broken = {};
    for (int64_t k = 0; k < K; k += LANES) {
        most = (Floats)_mm512_max_ps((__m512)most, _mm512_abs_ps((__m512)load(x + k)));
        broken = fma(load(x + k), Floats{}, broken);
    }
    const float top = _mm512_reduce_max_ps((__m512)most);
    *step = top / MOST + sum(broken);
    __m512i sums[DIGITS] = {};
    for (int64_t k = 0; k < K; k += LANES) {
        __m512i rest = _mm512_cvtps_epi32((__m512)(load(x + k) * (MOST / top)));
        for (int d = 0; d < DIGITS; d++) {
            __m128i bytes = _mm512_cvtepi32_epi8(rest);
            __m512i digit = _mm512_cvtepi8_epi32(bytes);
            sums[d] = _mm512_add_epi32(sums[d], digit);
            rest = _mm512_srai_epi32(_mm512_sub_epi32(rest, digit), 8);
            int32_t fours[4];
            _mm_storeu_si128((__m128i*)fours, bytes);
            for (int q = 0; q < 4; q++) std::memcpy(digits + (((k / 4 + q) * rows) * DIGITS + d) * 4, fours + q, 4);
        }
        if ((k + LANES) % group == 0) {
            for (int d = 0; d < DIGITS; d++) start[d] = -zero * _mm512_reduce_add_epi32(sums[d]), sums[d] = _mm512_setzero_si512();
            start += rows * DIGITS;
        }
    }
}
#else
constexpr bool QUADS_HERE = false;

template <int ROWS, int DIGITS>
static void tile(const Input&, const Quad<DIGITS>*, int64_t, Ahead, const float*, const float*, float*, int64_t, End) {}
template <int ROWS, int DIGITS>
static void tile(const Input&, const Nibbles<DIGITS>*, int64_t, Ahead, const float*, const float*, float*, int64_t, End) {}
template <int DIGITS>
static void take_apart(const float*, int64_t, int64_t, int, int64_t, int8_t*, float*, int32_t*) {}
#endif

#if defined(__AVX512BF16__)
constexpr bool HALVES_HERE = true;

template <int ROWS>
APART void tile(const Input& in, const Half* w, int64_t inputs, Ahead ahead, const float* scale, const float* bias, float* y, int64_t ldy, End end) {
    __m512 a[ROWS][2];
    const int8_t* pairs = in.digits;
#pragma GCC unroll 12
    for (int m = 0; m < ROWS; m++) a[m][0] = a[m][1] = _mm512_setzero_ps();
    for (int64_t k = 0; k < inputs; k += 2, w += 2 * PANEL, pairs += 4 * ROWS) {
        const __m512i first = _mm512_loadu_si512(w), second = _mm512_loadu_si512(w + PANEL);
        ahead.fetch();
#pragma GCC unroll 12
        for (int m = 0; m < ROWS; m++) {
            int32_t two;
            std::memcpy(&two, pairs + 4 * m, sizeof two);
            const __m512i x = _mm512_set1_epi32(two);
            asm("vdpbf16ps %2, %1, %0" : "+v"(a[m][0]) : "v"(first), "v"(x));  // as `dot`
            asm("vdpbf16ps %2, %1, %0" : "+v"(a[m][1]) : "v"(second), "v"(x));
        }
    }
    Floats sums[ROWS][2];
#pragma GCC unroll 12
    for (int m = 0; m < ROWS; m++) sums[m][0] = (Floats)a[m][0], sums[m][1] = (Floats)a[m][1];
    for (int m = 0; m < ROWS; m++) finish(sums[m][0], sums[m][1], scale, bias, y + m * ldy, end);
}

// A row [K], K a multiple of 16, in bfloat16, every two of them `rows` twos after the last.
static void round_off(const float* x, int64_t K, int64_t rows, int8_t* pairs) {
    for (int64_t k = 0; k < K; k += LANES) {
        int32_t twos[LANES / 2];
        _mm256_storeu_si256((__m256i*)twos, (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(x + k)));
        for (int i = 0; i < LANES / 2; i++) std::memcpy(pairs + (k / 2 + i) * rows * 4, twos + i, 4);
    }
}
#else
constexpr bool HALVES_HERE = false;

template <int ROWS>
static void tile(const Input&, const Half*, int64_t, Ahead, const float*, const float*, float*, int64_t, End) {}
static void round_off(const float*, int64_t, int64_t, int8_t*) {}
#endif

template <class W, int ROWS>
static void tiles(int64_t rows, const Input& in, const W* w, int64_t inputs, Ahead ahead, const float* scale, const float* bias, float* y, int64_t ldy, End end) {
    if constexpr (ROWS > 1)
        if (rows < ROWS) return tiles<W, ROWS - 1>(rows, in, w, inputs, ahead, scale, bias, y, ldy, end);
    tile<ROWS>(in, w, inputs, ahead, scale, bias, y, ldy, end);
}

// Rows of x as a panel's tiles read them: taken apart, or copied where there are no digits.
struct Rows {
    std::vector<float> copy;  // [row][inputs + LANES]
    std::vector<int8_t> bytes;  // tile by tile
    std::vector<float> step;
    std::vector<int32_t> start;

    template <class F>
    Input from(int64_t m, int64_t K) const {
        if (F::width) return {nullptr, 0, bytes.data() + m * K * F::width, step.data() + m, start.data() + m * F::digits * (K / F::group(K))};
        return {copy.data() + m * (K + LANES), K + LANES, nullptr, nullptr, nullptr};
    }

    template <class F>
    void fit(int64_t M, int64_t K) {
        const int64_t starts = M * F::digits * (K / F::group(K));
        if (!F::width) {
            if ((int64_t)copy.size() < M * (K + LANES)) copy.resize(M * (K + LANES));
            return;
        }
        if ((int64_t)bytes.size() < M * K * F::width) bytes.resize(M * K * F::width);
        if ((int64_t)step.size() < M) step.resize(M);
        if ((int64_t)start.size() < starts) start.resize(starts);
    }

    template <class F>
    void fill(const float* x, int64_t ldx, int64_t M, int64_t K, int64_t tile, int64_t count) {
        const int64_t first = tile * M / count, rows = (tile + 1) * M / count - first, group = F::group(K);
        int8_t* own = bytes.data() + first * K * F::width;
        for (int64_t m = first; m < first + rows; m++) {
            if constexpr (F::digits > 0)
                take_apart<F::digits>(
                    x + m * ldx, K, group, F::zero, rows, own + (m - first) * 4 * F::digits, &step[m], &start[(first * (K / group) + m - first) * F::digits]);
            else if constexpr (F::width > 0) round_off(x + m * ldx, K, rows, own + (m - first) * 4);
            else std::memcpy(copy.data() + m * (K + LANES), x + m * ldx, K * sizeof(float));
        }
    }
};

// M rows made ready in `count` pieces: few by every thread for itself, many by all of them together.
template <class Made, class Fit, class Fill>
static Made* made_ready(int64_t M, int64_t count, Fit fit, Fill fill) {
    static thread_local Made own;
    Made* made = &own;
    if (M <= FEW) {
        fit(*made);
        for (int64_t i = 0; i < count; i++) fill(*made, i);
        return made;
    }
#pragma omp single copyprivate(made)
    {
        made = &own;
        fit(*made);
    }
#pragma omp for schedule(static)
    for (int64_t i = 0; i < count; i++) fill(*made, i);
    return made;
}

// x [M, K] made so for `count` tiles.
template <class F>
static const Rows* rows_of(const float* x, int64_t ldx, int64_t M, int64_t K, int64_t count) {
    return made_ready<Rows>(
        M, count, [&](Rows& made) { made.fit<F>(M, K); }, [&](Rows& made, int64_t i) { made.fill<F>(x, ldx, M, K, i, count); });
}
