// Products of a few rows of x with one panel of a packed matrix: the weights of PANEL outputs,
// which are two vectors.
//
// Layouts of a panel, with P = PANEL and d = DOT_INPUTS:
//     float32, int8    [input][P]; weights become floats, one multiply-add each
//     bfloat16         [input / 2][P][2], two inputs side by side; a shift or a mask makes floats
//                      of them, or, with x rounded to bfloat16 too, vdpbf16ps multiplies pairs
//     int8 for dots    [input / d][P][d], d inputs side by side for an integer dot product
//     in groups        of 32 or 16 inputs, whose weights are scale * (integer - zero), or scale *
//                      integer + minimum: integers as int8 for dots, or of 4 bits, [P][d] bytes with
//                      d inputs in the low nibbles and the next d in the high ones; then the
//                      group's scales (records.h). What files in GGUF format hold, and int4.
//
// For these and int8 for dots, x is quantised per row to integers of 8, 16 or 24 bits (1, 2 or 3 limbs), and
// split into digits that one dot product takes. The sums of products are integers and have no
// rounding at all.
//     d = 4    dots of bytes: a limb is a digit to base 256
//     d = 2    dots of 16-bit integers: 8 and 16 bits are one digit. 512 products of 16 by 8 bits
//              fit into 32 bits; after so many, sums move to wider ones. 24 bits would take two
//              digits and more time than floats, so x stays float32 and weights become floats.
//
// Accuracy of three limbs: x is exact to within 2^-23 of its row's largest value, which is at most
// sqrt(K) times the root mean square of its K values, and nothing else is lost. Against float64 the
// relative error is smaller than with floats summed in order (1.3e-7 against 3.5e-7, K = 384).
// Floats are better only where one value of a row is far above the others and its weights far below
// theirs.
#pragma once

#include "records.h"

// The last step of a linear layer with output v: y = v; y += v; y = silu or gelu of v's first half *
// second half; y = gelu(v); y = relu(v) squared; y = clamped_swiglu of both halves. gelu by tanh.
enum Epilogue : int64_t { STORE, ADD, SWIGLU, GEGLU, GELU, RELU2, CLAMPED_SWIGLU };

// the outputs that a panel's results fill
static inline int panel_width(Epilogue epilogue) {
    return epilogue == SWIGLU || epilogue == GEGLU || epilogue == CLAMPED_SWIGLU ? LANES : PANEL;
}

struct TileInput {   // the rows of x of a tile: floats, or quantised
    const float* x;  // [row][ldx]
    int64_t ldx;
    // 4 bytes each: [input / d][row][digit, the least first]; in bfloat16 [input / 2][row]
    const int8_t* digits;
    const float* x_scale;  // [row] value of one unit
    // [group][row][digit] initial sums: minus zero * (sum of x); int8 has one group. Of groups with
    // a minimum, minus the sum of x
    const int32_t* initial;
    const Matrix* matrix;
};

struct Prefetch {  // fetches this tile's share of the panel that is needed next
    const char* address;
    int64_t bytes;  // between two calls
    void issue() {
        for (int line = 0; line < PREFETCH_LINES; line++) __builtin_prefetch(address + line * 64);
        address += bytes;
    }
};

// Tiles are never inlined: compilers would spill the accumulators of small tiles, which takes twice
// as long.
#define NOINLINE static __attribute__((noinline))
#define INLINE static inline __attribute__((always_inline))
#define INLINE_LAMBDA __attribute__((always_inline))

constexpr int64_t SUPER_SIZE = 256;  // inputs that share numbers in float16

// Types of weights beside float, int8_t and uint16_t (bfloat16), which multiply x in float32.
// LIMBS: of x.
template <int LIMBS>
struct Int8Dot {
    uint8_t byte;  // weight + INT8_ZERO
};

// Weights in groups of GROUP inputs, in integers of BITS; with a table, nibbles stand for its
// integers.
enum GroupForm { PLAIN, TABLE, MIN };
template <int BITS, int GROUP, GroupForm FORM, int LIMBS>
struct Grouped {
    uint8_t byte;
};
template <int LIMBS>
using Nibbles = Grouped<4, 32, PLAIN, LIMBS>;
template <int LIMBS>
using NibblesMin = Grouped<4, 32, MIN, LIMBS>;
template <int LIMBS>
using Codes = Grouped<4, 32, TABLE, LIMBS>;
template <int LIMBS>
using Bytes32 = Grouped<8, 32, PLAIN, LIMBS>;
template <int LIMBS>
using Bytes32Min = Grouped<8, 32, MIN, LIMBS>;
template <int LIMBS>
using Bytes16 = Grouped<8, 16, PLAIN, LIMBS>;

struct Float16 {
    uint16_t bits;
};

struct BFloat16Dot {
    uint16_t bits;  // bfloat16, as x is then
};

#if defined(NO_DOT)
constexpr bool HAS_DOT = false;
constexpr int DOT_INPUTS = 4, INT8_ZERO = 0;
#else
constexpr bool HAS_DOT = true;
#endif
// digits of x that a dot product of so many inputs takes; none: x stays float32
template <int LIMBS, int INPUTS = DOT_INPUTS>
constexpr int digits_of = INPUTS == 4 ? LIMBS
                          : LIMBS < 3 ? 1
                                      : 0;

// Whether products of nibbles and bytes are summed in 16 bits, which hold 32 of them: four inputs at
// a time where other weights take two (add_small_dot). Two limbs of x are as fast as one number of
// 16 bits.
#if defined(SMALL_SUMS)
template <int BITS, GroupForm FORM, int LIMBS>
constexpr bool small_sums = BITS == 4 && FORM != TABLE && LIMBS != 2;
#else
template <int BITS, GroupForm FORM, int LIMBS>
constexpr bool small_sums = false;
static inline IntVec packed_bytes(const uint8_t*) { return IntVec{}; }
static inline void add_small_dot(IntVec&, IntVec, IntVec) {}
static inline IntVec pair_sums(IntVec a) { return a; }
#endif

template <class W>
struct PanelFormat {
    // at most: the accumulators must fit into registers
    static constexpr int tile_rows = TILE_ROWS;
    static constexpr int digits = 0, limbs = 0, inputs = DOT_INPUTS;
    static constexpr int x_bytes = 0;      // of a prepared value of x; 0: x stays float32
    static constexpr bool widens = false;  // weights become floats, and that takes time
    // of the panel, in one step
    static constexpr int read_bytes = sizeof(W) == 1 ? PANEL : 4 * PANEL;
    static int64_t group_size(int64_t inputs) { return inputs; }
};
template <int LIMBS>
struct PanelFormat<Int8Dot<LIMBS>> : PanelFormat<uint8_t> {
    static constexpr int digits = digits_of<LIMBS>, limbs = LIMBS;
    static constexpr int tile_rows = TILE_ROWS / std::max(digits, 1);
    static constexpr int x_bytes = 4 * digits / DOT_INPUTS;
    static constexpr int read_bytes = DOT_INPUTS * PANEL;
    static constexpr bool widens = digits == 0;
};
template <>
struct PanelFormat<Float16> : PanelFormat<uint16_t> {
    static constexpr int read_bytes = 2 * PANEL;
};
template <>
struct PanelFormat<BFloat16Dot> : PanelFormat<uint16_t> {
    static constexpr int x_bytes = 2;
};
template <int BITS, int GROUP, GroupForm FORM, int LIMBS>
struct PanelFormat<Grouped<BITS, GROUP, FORM, LIMBS>> {
    static constexpr int inputs = small_sums<BITS, FORM, LIMBS> ? 4 : DOT_INPUTS;  // of a dot product
    static constexpr int digits = digits_of<LIMBS, inputs>, limbs = LIMBS;
    // a row has float accumulators beside those of its digits; with small sums, which take long,
    // they need no registers of their own
    static constexpr int tile_rows = TILE_ROWS / (small_sums<BITS, FORM, LIMBS> ? digits : digits + 1),
                         x_bytes = 4 * digits / inputs;
    static constexpr int steps = GROUP * BITS / 8 / inputs;  // of a group
    static constexpr int read_bytes = inputs * PANEL + 2 * PANEL / steps;  // with two bytes of scales
    static constexpr bool widens = digits == 0;
    static int64_t group_size(int64_t) { return GROUP; }
};

// Rows of x that pass all panels together, so that their prepared values stay in the L2 cache.
constexpr int64_t MAX_BLOCK_ROWS = 128, MIN_BLOCK_ROWS = 32, BLOCK_BYTES = 3 << 18;
// floats after which lines fall into the same sets of the L1 cache
constexpr int64_t CACHE_SET_STRIDE = 512;
// distance of prefetches within a panel that is read only once
constexpr int64_t PREFETCH_BYTES = 4096;

static inline FloatVec silu(FloatVec x) { return x / (1.0f + exp_vec(-x)); }

// (1 + tanh u) / 2 = 1 / (1 + exp(-2 u)), u = sqrt(2 / pi) (x + 0.044715 x^3)
static inline FloatVec gelu(FloatVec x) {
    const FloatVec cubic = x * x * x;
    return x / (1.0f + exp_vec(-1.5957691216057308f * fma(broadcast(0.044715f), cubic, x)));
}

// gpt-oss's: at most 7 pass; (up + 1) * gate * sigmoid(1.702 * gate). NaN stays NaN.
static inline FloatVec clamped_swiglu(FloatVec gate, FloatVec up) {
    const FloatVec limit = broadcast(7);
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : up;
    up = up < -limit ? -limit : up;
    return (up + 1.0f) * (gate / (1.0f + exp_vec(-1.702f * gate)));
}

static inline void apply_epilogue(FloatVec first, FloatVec second, const float* scale,
                                  const float* bias, float* y, Epilogue epilogue) {
    FloatVec a[2] = {first, second};
    // explicit fma: compilers that contract a * b + c in some tiles only would change bits
    for (int half = 0; half < 2; half++)
        a[half] = fma(a[half], scale ? load(scale + half * LANES) : broadcast(1),
                      bias ? load(bias + half * LANES) : FloatVec{});
    if (epilogue == SWIGLU) {
        store(y, silu(a[0]) * a[1]);
    } else if (epilogue == GEGLU) {
        store(y, gelu(a[0]) * a[1]);
    } else if (epilogue == CLAMPED_SWIGLU) {
        store(y, clamped_swiglu(a[0], a[1]));
    } else if (epilogue >= GELU) {
        for (int half = 0; half < 2; half++) {
            const FloatVec zero = {}, positive = a[half] > zero ? a[half] : zero;
            store(y + half * LANES, epilogue == GELU ? gelu(a[half]) : positive * positive);
        }
    } else {
        store(y, epilogue == ADD ? load(y) + a[0] : a[0]);
        store(y + LANES, epilogue == ADD ? load(y + LANES) + a[1] : a[1]);
    }
}

template <int ROWS>
static inline void accumulate(FloatVec (&a)[ROWS][2], FloatVec first, FloatVec second,
                              const float* x, int64_t ldx) {
    for (int m = 0; m < ROWS; m++) {
        const auto b = broadcast(x[m * ldx]);
        a[m][0] = fma(b, first, a[m][0]);
        a[m][1] = fma(b, second, a[m][1]);
    }
}

// Call act(k, the weights of input k as two vectors) for inputs from `begin` to `end`.
template <class W, class Act>
INLINE void for_inputs(const Matrix&, const W* w, int64_t begin, int64_t end, Prefetch& prefetch, Act act) {
    w += begin * PANEL;
    for (int64_t k = begin; k < end; k++, w += PANEL) {
        prefetch.issue();
        act(k, load(w), load(w + LANES));
    }
}

template <class Act>
INLINE void for_inputs(const Matrix&, const uint16_t* w, int64_t begin, int64_t end,
                       Prefetch& prefetch, Act act) {
    w += begin * PANEL;
    for (int64_t k = begin; k < end; k += 2, w += 2 * PANEL) {
        IntVec first, second;
        std::memcpy(&first, w, sizeof first);
        std::memcpy(&second, w + PANEL, sizeof second);
        prefetch.issue();
        act(k, (FloatVec)(first << 16), (FloatVec)(second << 16));
        act(k + 1, (FloatVec)(first & -65536), (FloatVec)(second & -65536));
    }
}

#if defined(HAS_HALF)
template <class Act>
INLINE void for_inputs(const Matrix&, const Float16* w, int64_t begin, int64_t end,
                       Prefetch& prefetch, Act act) {
    const uint8_t* at = (const uint8_t*)w + begin * 2 * PANEL;
    for (int64_t k = begin; k < end; k++, at += 2 * PANEL) {
        prefetch.issue();
        act(k, load_half(at), load_half(at + 2 * LANES));
    }
}
#endif

#include "dots.h"

// A tile of weights that become floats. Where SUM_BLOCK is set, so many products are summed in
// order and their sums in order again, which rounds less: over K products an error of about
// sqrt(SUM_BLOCK + K / SUM_BLOCK) units in place of sqrt(K).
template <int ROWS, class W>
NOINLINE void multiply_tile(const TileInput& in, const W* w, int64_t inputs, Prefetch prefetch,
                            const float* scale, const float* bias, float* y, int64_t ldy,
                            Epilogue epilogue) {
    FloatVec a[ROWS][2] = {};
    const auto add = [&](int64_t k, FloatVec first, FloatVec second)
                         INLINE_LAMBDA { accumulate<ROWS>(a, first, second, in.x + k, in.ldx); };
    if constexpr (!SUM_BLOCK) {
        for_inputs(*in.matrix, w, 0, inputs, prefetch, add);
    } else {
        FloatVec total[ROWS][2] = {};
        for (int64_t k = 0; k < inputs; k += SUM_BLOCK) {
            for_inputs(*in.matrix, w, k, std::min<int64_t>(k + SUM_BLOCK, inputs), prefetch, add);
            for (int m = 0; m < ROWS; m++)
                for (int half = 0; half < 2; half++)
                    total[m][half] += a[m][half], a[m][half] = FloatVec{};
        }
        for (int m = 0; m < ROWS; m++)
            for (int half = 0; half < 2; half++) a[m][half] = total[m][half];
    }
    for (int m = 0; m < ROWS; m++)
        apply_epilogue(a[m][0], a[m][1], scale, bias, y + m * ldy, epilogue);
}

// Add a tile's products of the inputs from `begin` to `end`, at most SUM_BLOCK, to `sums`
// [row][PANEL], as multiply_tile does.
template <int ROWS>
NOINLINE void add_products(const float* x, int64_t ldx, const float* w, int64_t begin, int64_t end,
                           Prefetch prefetch, float* sums) {
    FloatVec a[ROWS][2] = {};
    for_inputs(Matrix(), w, begin, end, prefetch,
               [&](int64_t k, FloatVec first, FloatVec second) INLINE_LAMBDA {
                   accumulate<ROWS>(a, first, second, x + k, ldx);
               });
    for (int m = 0; m < ROWS; m++, sums += PANEL) {
        store(sums, load(sums) + a[m][0]);
        store(sums + LANES, load(sums + LANES) + a[m][1]);
    }
}

// add_products with as many rows as there are, 1 to ROWS.
template <int ROWS>
static void add_products_of(int64_t rows, const float* x, int64_t ldx, const float* w,
                            int64_t begin, int64_t end, Prefetch prefetch, float* sums) {
    if constexpr (ROWS > 1)
        if (rows < ROWS)
            return add_products_of<ROWS - 1>(rows, x, ldx, w, begin, end, prefetch, sums);
    add_products<ROWS>(x, ldx, w, begin, end, prefetch, sums);
}

#if defined(__AVX512BF16__)
constexpr bool HAS_AVX512_BF16 = true;

template <int ROWS>
NOINLINE void multiply_tile(const TileInput& in, const BFloat16Dot* w, int64_t inputs,
                            Prefetch prefetch, const float* scale, const float* bias, float* y,
                            int64_t ldy, Epilogue epilogue) {
    __m512 a[ROWS][2];
    const int8_t* pairs = in.digits;
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
            asm("vdpbf16ps %2, %1, %0" : "+v"(a[m][0]) : "v"(first), "v"(x));  // see add_dot
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
    TileInput from(int64_t m, const Matrix& w) const {  // from row m on
        const int64_t K = w.inputs;
        if (F::x_bytes)
            return {nullptr, 0, bytes.data() + m * K * F::x_bytes, x_scale.data() + m,
                    initial.data() + m * F::digits * (K / F::group_size(K)), &w};
        return {copy.data() + m * (K + LANES), K + LANES, nullptr, nullptr, nullptr, &w};
    }

    template <class F>
    void reserve(int64_t M, int64_t K) {
        const int64_t sums = M * F::digits * (K / F::group_size(K));
        if (!F::x_bytes) {
            if ((int64_t)copy.size() < M * (K + LANES)) copy.resize(M * (K + LANES));
            return;
        }
        if ((int64_t)bytes.size() < M * K * F::x_bytes) bytes.resize(M * K * F::x_bytes);
        if ((int64_t)x_scale.size() < M) x_scale.resize(M);
        if ((int64_t)initial.size() < sums) initial.resize(sums);
    }

    template <class F>
    void fill(const float* x, int64_t ldx, int64_t M, const Matrix& w, int64_t tile,
              int64_t tiles) {
        const int64_t K = w.inputs, zero = w.has_min() ? 1 : w.zero, first = tile * M / tiles, rows = (tile + 1) * M / tiles - first,
                      group = F::group_size(K);
        int8_t* to = bytes.data() + first * K * F::x_bytes;
        for (int64_t m = first; m < first + rows; m++) {
            if constexpr (F::digits > 0)
                split_into_digits<F::limbs, F::inputs>(
                    x + m * ldx, K, group, zero, rows, to + (m - first) * 4 * F::digits,
                    &x_scale[m], &initial[(first * (K / group) + m - first) * F::digits]);
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

// x [M, K], prepared for `tiles` tiles of a matrix.
template <class F>
static const PreparedRows* prepared_rows(const float* x, int64_t ldx, int64_t M, const Matrix& w,
                                         int64_t tiles) {
    return prepare_rows<PreparedRows>(
        M, tiles, [&](PreparedRows& rows) { rows.reserve<F>(M, w.inputs); },
        [&](PreparedRows& rows, int64_t i) { rows.fill<F>(x, ldx, M, w, i, tiles); });
}
