// Products of a few rows of x with one panel of a packed matrix: the weights of 32 outputs.
//
// Layouts of a panel:
//     float32, int8    [input][32]; weights become floats, one multiply-add each
//     bfloat16         [input / 2][32][2], two inputs side by side; a shift or a mask makes floats
//                      of them, or, with x rounded to bfloat16 too, vdpbf16ps multiplies pairs
//     int8 for VNNI    [input / 4][32][4], four inputs side by side for vpdpbusd
//     int4             groups of 32 inputs: 4 x [32][4] bytes, with four inputs in the low nibbles
//                      and the next four in the high ones, then 32 scales in bfloat16
//
// For VNNI and int4, x is quantised per row and split into limbs: 8-bit digits to base 256, three
// of them unless fewer were asked for. The sums of products are integers and have no rounding at
// all; one vpdpbusd handles four inputs of one limb.
//
// Accuracy of three limbs: x is exact to within 2^-23 of its row's largest value, which is at most
// sqrt(K) times the root mean square of its K values, and nothing else is lost. Against float64 the
// relative error is smaller than with floats summed in order (1.3e-7 against 3.5e-7, K = 384).
// Floats are better only where one value of a row is far above the others and its weights far below
// theirs.
#pragma once

#include "vectors.h"

// The last step of a linear layer with output v: y = v; y += v; y = silu(v's first half) * second
// half.
enum Epilogue : int { STORE, ADD, SWIGLU };

struct TileInput {   // the rows of x of a tile: floats, or quantised
    const float* x;  // [row][ldx]
    int64_t ldx;
    // [input / 4][row][limb, the least first][4]; in bfloat16 [input / 2][row][2]
    const int8_t* limbs;
    const float* x_scale;  // [row] value of one unit
    // [group][row][limb] initial sums: minus zero_point * (sum of x); VNNI has one group
    const int32_t* initial;
};

struct Prefetch {  // fetches this tile's share of the panel that is needed next
    const char* address;
    int64_t bytes;  // between two calls
    void issue() {
        __builtin_prefetch(address);
        __builtin_prefetch(address + 64);
        address += bytes;
    }
};

// Tiles are never inlined: compilers would spill the accumulators of small tiles, which takes twice
// as long.
#define NOINLINE static __attribute__((noinline))

constexpr int64_t GROUP_SIZE = 32;  // inputs of int4 that share a scale
constexpr int64_t GROUP_BYTES = GROUP_SIZE * PANEL / 2 + 2 * PANEL;

// Types of weights beside float, int8_t and uint16_t (bfloat16), which multiply x in float32.
// LIMBS: of x.
template <int LIMBS>
struct Int8Vnni {
    uint8_t byte;  // weight + 128
};

template <int LIMBS>
struct Int4 {
    uint8_t byte;  // two weights + 8
};

struct BFloat16Dot {
    uint16_t bits;  // bfloat16, as x is then
};

template <class W>
struct PanelFormat {
    // at most: the accumulators must fit into registers
    static constexpr int tile_rows = TILE_ROWS;
    static constexpr int limbs = 0;
    static constexpr int x_bytes = 0;  // of a prepared value of x; 0: x stays float32
    static constexpr int zero_point = 0;
    static constexpr int read_bytes = sizeof(W) == 1 ? PANEL : 128;  // of the panel, in one step
    static int64_t group_size(int64_t inputs) { return inputs; }
    static int64_t panel_bytes(int64_t inputs) { return inputs * PANEL * sizeof(W); }
};
template <int LIMBS>
struct PanelFormat<Int8Vnni<LIMBS>> : PanelFormat<uint8_t> {
    // 24 accumulators, 2 weights and a limb in 32 registers
    static constexpr int tile_rows = 12 / LIMBS;
    static constexpr int limbs = LIMBS, x_bytes = LIMBS, zero_point = 128, read_bytes = 128;
};
template <>
struct PanelFormat<BFloat16Dot> : PanelFormat<uint16_t> {
    static constexpr int x_bytes = 2;
};
template <int LIMBS>
struct PanelFormat<Int4<LIMBS>> {
    // a row has float accumulators beside those of its limbs
    static constexpr int tile_rows = 12 / (LIMBS + 1);
    static constexpr int limbs = LIMBS, x_bytes = LIMBS, zero_point = 8;
    static constexpr int read_bytes = GROUP_BYTES / 4;
    static int64_t group_size(int64_t) { return GROUP_SIZE; }
    static int64_t panel_bytes(int64_t inputs) { return inputs / GROUP_SIZE * GROUP_BYTES; }
};

// Rows of x that pass all panels together, so that their prepared values stay in the L2 cache.
constexpr int64_t MAX_BLOCK_ROWS = 128, MIN_BLOCK_ROWS = 32, BLOCK_BYTES = 3 << 18;
// floats after which lines fall into the same sets of the L1 cache
constexpr int64_t CACHE_SET_STRIDE = 512;
// distance of prefetches within a panel that is read only once
constexpr int64_t PREFETCH_BYTES = 4096;

static inline FloatVec silu(FloatVec x) { return x / (1.0f + exp_vec(-x)); }

static inline void apply_epilogue(FloatVec first, FloatVec second, const float* scale,
                                  const float* bias, float* y, Epilogue epilogue) {
    FloatVec a[2] = {first, second};
    // explicit fma: compilers that contract a * b + c in some tiles only would change bits
    for (int half = 0; half < 2; half++)
        a[half] = fma(a[half], scale ? load(scale + half * LANES) : broadcast(1),
                      bias ? load(bias + half * LANES) : FloatVec{});
    if (epilogue == SWIGLU) {
        store(y, silu(a[0]) * a[1]);
    } else {
        store(y, epilogue == ADD ? load(y) + a[0] : a[0]);
        store(y + LANES, epilogue == ADD ? load(y + LANES) + a[1] : a[1]);
    }
}

template <int ROWS>
static inline void accumulate(FloatVec (&a)[ROWS][2], FloatVec first, FloatVec second,
                              const float* x, int64_t ldx) {
    for (int m = 0; m < ROWS; m++) {
        FloatVec b = broadcast(x[m * ldx]);
        a[m][0] = fma(b, first, a[m][0]);
        a[m][1] = fma(b, second, a[m][1]);
    }
}

template <int ROWS, class W>
NOINLINE void multiply_tile(const TileInput& in, const W* w, int64_t inputs, Prefetch prefetch,
                            const float* scale, const float* bias, float* y, int64_t ldy,
                            Epilogue epilogue) {
    FloatVec a[ROWS][2] = {};
    for (int64_t k = 0; k < inputs; k++, w += PANEL) {
        prefetch.issue();
        accumulate<ROWS>(a, load(w), load(w + LANES), in.x + k, in.ldx);
    }
    for (int m = 0; m < ROWS; m++)
        apply_epilogue(a[m][0], a[m][1], scale, bias, y + m * ldy, epilogue);
}

template <int ROWS>
NOINLINE void multiply_tile(const TileInput& in, const uint16_t* w, int64_t inputs,
                            Prefetch prefetch, const float* scale, const float* bias, float* y,
                            int64_t ldy, Epilogue epilogue) {
    FloatVec a[ROWS][2] = {};
    for (int64_t k = 0; k < inputs; k += 2, w += 2 * PANEL) {
        IntVec first, second;
        std::memcpy(&first, w, sizeof first);
        std::memcpy(&second, w + PANEL, sizeof second);
        prefetch.issue();
        accumulate<ROWS>(a, (FloatVec)(first << 16), (FloatVec)(second << 16), in.x + k, in.ldx);
        accumulate<ROWS>(a, (FloatVec)(first & -65536), (FloatVec)(second & -65536), in.x + k + 1,
                         in.ldx);
    }
    for (int m = 0; m < ROWS; m++)
        apply_epilogue(a[m][0], a[m][1], scale, bias, y + m * ldy, epilogue);
}

#if defined(__AVX512VNNI__)
constexpr bool HAS_VNNI = true;

// a += the sums of four products of bytes each, w unsigned and x signed. Compilers spill the
// accumulators of the intrinsic.
static inline void dot_bytes(__m512i& a, __m512i w, __m512i x) {
    asm("vpdpbusd %2, %1, %0" : "+v"(a) : "v"(w), "v"(x));
}

template <int ROWS, int LIMBS>
NOINLINE void multiply_tile(const TileInput& in, const Int8Vnni<LIMBS>* w, int64_t inputs,
                            Prefetch prefetch, const float* scale, const float* bias, float* y,
                            int64_t ldy, Epilogue epilogue) {
    __m512i a[ROWS * LIMBS][2];
    const int8_t* limbs = in.limbs;
#pragma GCC unroll 12
    for (int i = 0; i < ROWS * LIMBS; i++) a[i][0] = a[i][1] = _mm512_set1_epi32(in.initial[i]);
    for (int64_t k = 0; k < inputs; k += 4, w += 4 * PANEL, limbs += 4 * ROWS * LIMBS) {
        __m512i first = _mm512_loadu_si512(w), second = _mm512_loadu_si512(w + 2 * PANEL);
        prefetch.issue();
#pragma GCC unroll 12
        for (int i = 0; i < ROWS * LIMBS; i++) {
            int32_t quadruple;
            std::memcpy(&quadruple, limbs + 4 * i, sizeof quadruple);
            __m512i x = _mm512_set1_epi32(quadruple);
            dot_bytes(a[i][0], first, x);
            dot_bytes(a[i][1], second, x);
        }
    }
    // a copy: accumulators with a variable index would stay in memory throughout
    FloatVec sums[ROWS * LIMBS][2];
#pragma GCC unroll 12
    for (int i = 0; i < ROWS * LIMBS; i++)
        sums[i][0] = (FloatVec)_mm512_cvtepi32_ps(a[i][0]),
        sums[i][1] = (FloatVec)_mm512_cvtepi32_ps(a[i][1]);
    for (int m = 0; m < ROWS; m++) {
        FloatVec whole[2] = {};
        for (int half = 0; half < 2; half++) {
            for (int d = LIMBS - 1; d >= 0; d--)
                whole[half] = fma(whole[half], broadcast(256), sums[m * LIMBS + d][half]);
            whole[half] *= in.x_scale[m];
        }
        apply_epilogue(whole[0], whole[1], scale, bias, y + m * ldy, epilogue);
    }
}

template <int ROWS, int LIMBS>
NOINLINE void multiply_tile(const TileInput& in, const Int4<LIMBS>* w, int64_t inputs,
                            Prefetch prefetch, const float*, const float* bias, float* y,
                            int64_t ldy, Epilogue epilogue) {
    FloatVec sums[ROWS][2] = {};
    const uint8_t* group = (const uint8_t*)w;
    const int8_t* limbs = in.limbs;
    const int32_t* initial = in.initial;
    const __m512i low = _mm512_set1_epi32(0x0f0f0f0f);
    for (int64_t k = 0; k < inputs;
         k += GROUP_SIZE, group += GROUP_BYTES, initial += ROWS * LIMBS) {
        __m512i a[ROWS * LIMBS][2];
#pragma GCC unroll 12
        for (int i = 0; i < ROWS * LIMBS; i++) a[i][0] = a[i][1] = _mm512_set1_epi32(initial[i]);
        for (int pair = 0; pair < 4; pair++) {
            __m512i first = _mm512_loadu_si512(group + pair * 128),
                    second = _mm512_loadu_si512(group + pair * 128 + 64);
            prefetch.issue();
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++, limbs += 4 * ROWS * LIMBS) {
                const __m512i left = _mm512_and_si512(first, low),
                              right = _mm512_and_si512(second, low);
#pragma GCC unroll 12
                for (int i = 0; i < ROWS * LIMBS; i++) {
                    int32_t quadruple;
                    std::memcpy(&quadruple, limbs + 4 * i, sizeof quadruple);
                    __m512i x = _mm512_set1_epi32(quadruple);
                    dot_bytes(a[i][0], left, x);
                    dot_bytes(a[i][1], right, x);
                }
                first = _mm512_srli_epi32(first, 4), second = _mm512_srli_epi32(second, 4);
            }
        }
        FloatVec scale[2];
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++)
            scale[half] = (FloatVec)_mm512_slli_epi32(
                _mm512_cvtepu16_epi32(
                    _mm256_loadu_si256((const __m256i*)(group + 512 + half * 32))),
                16);
#pragma GCC unroll 6
        for (int m = 0; m < ROWS; m++) {
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++) {
                FloatVec whole = (FloatVec)_mm512_cvtepi32_ps(a[m * LIMBS + LIMBS - 1][half]);
#pragma GCC unroll 2
                for (int d = LIMBS - 2; d >= 0; d--)
                    whole = fma(whole, broadcast(256),
                                (FloatVec)_mm512_cvtepi32_ps(a[m * LIMBS + d][half]));
                sums[m][half] = fma(whole, scale[half], sums[m][half]);
            }
        }
    }
    FloatVec scaled[ROWS][2];
#pragma GCC unroll 6
    for (int m = 0; m < ROWS; m++)
        scaled[m][0] = sums[m][0] * in.x_scale[m], scaled[m][1] = sums[m][1] * in.x_scale[m];
    for (int m = 0; m < ROWS; m++)
        apply_epilogue(scaled[m][0], scaled[m][1], nullptr, bias, y + m * ldy, epilogue);
}

// The largest integer whose limbs fit into signed bytes; for three limbs with a margin for
// rounding: 127 * (65536 + 256 + 1) - 127.
template <int LIMBS>
constexpr float largest_quantized = LIMBS == 1   ? 127
                                    : LIMBS == 2 ? 127 * 257
                                                 : 8355584;

// Quantise a row [K], K a multiple of 16, and split it into limbs; consecutive quadruples of inputs
// are `rows` quadruples apart. initial: for each group, what cancels the weights' zero point.
// Values that are not finite make x_scale NaN.
template <int LIMBS>
static void split_into_limbs(const float* x, int64_t K, int64_t group, int zero, int64_t rows,
                             int8_t* limbs, float* x_scale, int32_t* initial) {
    constexpr float LARGEST = largest_quantized<LIMBS>;
    FloatVec largest = broadcast(1e-30f), broken = {};
    for (int64_t k = 0; k < K; k += LANES) {
        largest = (FloatVec)_mm512_max_ps((__m512)largest, _mm512_abs_ps((__m512)load(x + k)));
        broken = fma(load(x + k), FloatVec{}, broken);
    }
    const float top = _mm512_reduce_max_ps((__m512)largest);
    *x_scale = top / LARGEST + horizontal_sum(broken);
    __m512i sums[LIMBS] = {};
    for (int64_t k = 0; k < K; k += LANES) {
        __m512i rest = _mm512_cvtps_epi32((__m512)(load(x + k) * (LARGEST / top)));
        for (int d = 0; d < LIMBS; d++) {
            __m128i bytes = _mm512_cvtepi32_epi8(rest);
            __m512i limb = _mm512_cvtepi8_epi32(bytes);
            sums[d] = _mm512_add_epi32(sums[d], limb);
            rest = _mm512_srai_epi32(_mm512_sub_epi32(rest, limb), 8);
            int32_t quadruples[4];
            _mm_storeu_si128((__m128i*)quadruples, bytes);
            for (int q = 0; q < 4; q++)
                std::memcpy(limbs + (((k / 4 + q) * rows) * LIMBS + d) * 4, quadruples + q, 4);
        }
        if ((k + LANES) % group == 0) {
            for (int d = 0; d < LIMBS; d++)
                initial[d] = -zero * _mm512_reduce_add_epi32(sums[d]),
                sums[d] = _mm512_setzero_si512();
            initial += rows * LIMBS;
        }
    }
}
#else
constexpr bool HAS_VNNI = false;

template <int ROWS, int LIMBS>
static void multiply_tile(const TileInput&, const Int8Vnni<LIMBS>*, int64_t, Prefetch, const float*,
                          const float*, float*, int64_t, Epilogue) {}
template <int ROWS, int LIMBS>
static void multiply_tile(const TileInput&, const Int4<LIMBS>*, int64_t, Prefetch, const float*,
                          const float*, float*, int64_t, Epilogue) {}
template <int LIMBS>
static void split_into_limbs(const float*, int64_t, int64_t, int, int64_t, int8_t*, float*,
                             int32_t*) {}
#endif

#if defined(__AVX512BF16__)
constexpr bool HAS_AVX512_BF16 = true;

template <int ROWS>
NOINLINE void multiply_tile(const TileInput& in, const BFloat16Dot* w, int64_t inputs,
                            Prefetch prefetch, const float* scale, const float* bias, float* y,
                            int64_t ldy, Epilogue epilogue) {
    __m512 a[ROWS][2];
    const int8_t* pairs = in.limbs;
#pragma GCC unroll 12
    for (int m = 0; m < ROWS; m++) a[m][0] = a[m][1] = _mm512_setzero_ps();
    for (int64_t k = 0; k < inputs; k += 2, w += 2 * PANEL, pairs += 4 * ROWS) {
        const __m512i first = _mm512_loadu_si512(w), second = _mm512_loadu_si512(w + PANEL);
        prefetch.issue();
#pragma GCC unroll 12
        for (int m = 0; m < ROWS; m++) {
            int32_t pair;
            std::memcpy(&pair, pairs + 4 * m, sizeof pair);
            const __m512i x = _mm512_set1_epi32(pair);
            asm("vdpbf16ps %2, %1, %0" : "+v"(a[m][0]) : "v"(first), "v"(x));  // see dot_bytes
            asm("vdpbf16ps %2, %1, %0" : "+v"(a[m][1]) : "v"(second), "v"(x));
        }
    }
    FloatVec sums[ROWS][2];
#pragma GCC unroll 12
    for (int m = 0; m < ROWS; m++) sums[m][0] = (FloatVec)a[m][0], sums[m][1] = (FloatVec)a[m][1];
    for (int m = 0; m < ROWS; m++)
        apply_epilogue(sums[m][0], sums[m][1], scale, bias, y + m * ldy, epilogue);
}

// Round a row [K], K a multiple of 16, to bfloat16; consecutive pairs of inputs are `rows` pairs
// apart.
static void round_to_bf16(const float* x, int64_t K, int64_t rows, int8_t* pairs) {
    for (int64_t k = 0; k < K; k += LANES) {
        int32_t rounded[LANES / 2];
        _mm256_storeu_si256((__m256i*)rounded, (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(x + k)));
        for (int i = 0; i < LANES / 2; i++)
            std::memcpy(pairs + (k / 2 + i) * rows * 4, rounded + i, 4);
    }
}
#else
constexpr bool HAS_AVX512_BF16 = false;

template <int ROWS>
static void multiply_tile(const TileInput&, const BFloat16Dot*, int64_t, Prefetch, const float*,
                          const float*, float*, int64_t, Epilogue) {}
static void round_to_bf16(const float*, int64_t, int64_t, int8_t*) {}
#endif

// The tile with as many rows as there are, 1 to ROWS.
template <class W, int ROWS>
static void multiply_rows(int64_t rows, const TileInput& in, const W* w, int64_t inputs,
                          Prefetch prefetch, const float* scale, const float* bias, float* y,
                          int64_t ldy, Epilogue epilogue) {
    if constexpr (ROWS > 1)
        if (rows < ROWS)
            return multiply_rows<W, ROWS - 1>(rows, in, w, inputs, prefetch, scale, bias, y, ldy,
                                              epilogue);
    multiply_tile<ROWS>(in, w, inputs, prefetch, scale, bias, y, ldy, epilogue);
}

// Rows of x as the tiles read them: quantised, or copied where they stay floats.
struct PreparedRows {
    std::vector<float> copy;    // [row][inputs + LANES]
    std::vector<int8_t> bytes;  // tile by tile
    std::vector<float> x_scale;
    std::vector<int32_t> initial;

    template <class F>
    TileInput from(int64_t m, int64_t K) const {  // from row m on
        if (F::x_bytes)
            return {nullptr, 0, bytes.data() + m * K * F::x_bytes, x_scale.data() + m,
                    initial.data() + m * F::limbs * (K / F::group_size(K))};
        return {copy.data() + m * (K + LANES), K + LANES, nullptr, nullptr, nullptr};
    }

    template <class F>
    void reserve(int64_t M, int64_t K) {
        const int64_t sums = M * F::limbs * (K / F::group_size(K));
        if (!F::x_bytes) {
            if ((int64_t)copy.size() < M * (K + LANES)) copy.resize(M * (K + LANES));
            return;
        }
        if ((int64_t)bytes.size() < M * K * F::x_bytes) bytes.resize(M * K * F::x_bytes);
        if ((int64_t)x_scale.size() < M) x_scale.resize(M);
        if ((int64_t)initial.size() < sums) initial.resize(sums);
    }

    template <class F>
    void fill(const float* x, int64_t ldx, int64_t M, int64_t K, int64_t tile, int64_t tiles) {
        const int64_t first = tile * M / tiles, rows = (tile + 1) * M / tiles - first,
                      group = F::group_size(K);
        int8_t* to = bytes.data() + first * K * F::x_bytes;
        for (int64_t m = first; m < first + rows; m++) {
            if constexpr (F::limbs > 0)
                split_into_limbs<F::limbs>(x + m * ldx, K, group, F::zero_point, rows,
                                           to + (m - first) * 4 * F::limbs, &x_scale[m],
                                           &initial[(first * (K / group) + m - first) * F::limbs]);
            else if constexpr (F::x_bytes > 0)
                round_to_bf16(x + m * ldx, K, rows, to + (m - first) * 4);
            else std::memcpy(copy.data() + m * (K + LANES), x + m * ldx, K * sizeof(float));
        }
    }
};

// Prepare M rows in `count` parts. Of few rows every thread makes its own copy, which is faster
// than waiting for the others; many rows are shared work.
template <class Prepared, class Reserve, class Fill>
static Prepared* prepare_rows(int64_t M, int64_t count, Reserve reserve, Fill fill) {
    static thread_local Prepared own;
    Prepared* prepared = &own;
    if (M <= SMALL_BATCH) {
        reserve(*prepared);
        for (int64_t i = 0; i < count; i++) fill(*prepared, i);
        return prepared;
    }
#pragma omp single copyprivate(prepared)
    {
        prepared = &own;
        reserve(*prepared);
    }
#pragma omp for schedule(static)
    for (int64_t i = 0; i < count; i++) fill(*prepared, i);
    return prepared;
}

// x [M, K], prepared for `tiles` tiles.
template <class F>
static const PreparedRows* prepared_rows(const float* x, int64_t ldx, int64_t M, int64_t K,
                                         int64_t tiles) {
    return prepare_rows<PreparedRows>(
        M, tiles, [&](PreparedRows& rows) { rows.reserve<F>(M, K); },
        [&](PreparedRows& rows, int64_t i) { rows.fill<F>(x, ldx, M, K, i, tiles); });
}
