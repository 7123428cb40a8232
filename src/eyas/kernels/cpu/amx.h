// Products on AMX tiles, where the machine has them: 16 rows by 16 outputs, 64 bytes of inputs
// deep, with one instruction.
//
// A row of x is split into parts, which are tile rows of their own: its limbs, multiplied by int8
// weights; or three numbers in bfloat16 whose sum it is to within 2^-24 of itself (between 1e-33
// and 3.39e38), multiplied by bfloat16 weights; where x is rounded, the first of these alone. Up to
// 48 tile rows pass a panel together, and further ones while it is in the cache: as many tokens as
// a tree has nodes cost little more than one, whose weights have to be read all the same.
//
// Integer sums are those of tiles.h to the last bit, so one or two tokens, for which vectors are
// faster, are left to them. Sums of bfloat16 products are float32, each row's for itself and always
// in this order, so AMX computes them for any number of rows.
#pragma once

#include "records.h"
#include "tiles.h"

template <class W>
struct AmxFormat {
    static constexpr int parts = 0;
};  // tile rows of a row of x; 0: AMX does not multiply these weights

#if defined(__AMX_INT8__) && defined(__AMX_BF16__) && defined(__AVX512BF16__) && \
    defined(__AVX512VNNI__) && defined(__AVX512VBMI__) && defined(__linux__)
#define HAS_TILES
#include <sys/syscall.h>
#include <unistd.h>

// Linux grants the tile registers' state to processes that ask for it: ARCH_REQ_XCOMP_PERM of
// XFEATURE_XTILEDATA.
static const bool has_amx = syscall(SYS_arch_prctl, 0x1023, 18) == 0;

constexpr int64_t TILE_ROW_BYTES = 64, TILE_BYTES = 16 * TILE_ROW_BYTES;
// of a panel: one step multiplies 64 bytes of inputs with its 32 outputs
constexpr int64_t STEP_BYTES = 2 * TILE_BYTES;

template <int LIMBS>
struct AmxFormat<Int8Dot<LIMBS>> {
    static constexpr int parts = LIMBS;
    static constexpr int min_rows = 9;  // tile rows from which on AMX is faster than vectors
    static constexpr int inputs = 64;   // of a step
};
template <>
struct AmxFormat<uint16_t> {
    static constexpr int parts = 3, min_rows = 0, inputs = 32;
};
template <>
struct AmxFormat<BFloat16Dot> {
    static constexpr int parts = 1, min_rows = 0, inputs = 32;
};

// of a panel, 16 KB, which several groups read one after the other
constexpr int64_t CACHED_STEPS = 8;

// How a group prefetches its share of the next part of the panel, 16 pairs of cache lines a step:
// during its own steps and, where its sums are combined afterwards, the rest during that, so that
// memory never idles.
struct PrefetchPlan {
    int64_t in_step, in_token = 0;  // pairs of cache lines
    PrefetchPlan(int64_t steps, int64_t groups, int64_t tokens)
        : in_step((tokens ? 12 : 15 + groups) / groups) {
        if (tokens) in_token = (steps * 16 / groups - steps * in_step + tokens - 1) / tokens;
    }
};

// M tokens in groups of nearly equal size; the tiles of all groups have the same number of rows.
struct TokenGroups {
    int64_t M, parts, count, tokens, tiles, rows;

    TokenGroups(int64_t M, int64_t parts) : M(M), parts(parts) {
        // three tiles in one or two groups; two in more groups, which load less
        const int64_t most = (M * parts <= 96 ? 48 : 32) / parts;
        count = (M + most - 1) / most, tokens = (M + count - 1) / count;
        tiles = (tokens * parts + 15) / 16, rows = (tokens * parts + tiles - 1) / tiles;
    }
    int64_t first(int64_t group) const { return group * M / count; }
    int64_t bytes(int64_t steps) const { return tiles * TILE_BYTES * steps; }  // of a group
};

// A group's tiles, [step][tile][row][64 bytes], times some steps of a panel; sums [row][32] begin
// at zero or continue.
template <class W, int TILES>
static void multiply_tiles(const char* x, const char* w, int64_t steps, Prefetch& prefetch,
                           int64_t prefetches, int64_t rows, bool begins, char* sums) {
#define PRODUCT(i, rows, outputs)                                             \
    if constexpr (AmxFormat<W>::inputs == 64) _tile_dpbsud(i, rows, outputs); \
    else _tile_dpbf16ps(i, rows, outputs);
#define EACH_SUM(act) act(0) act(1) act(2) act(3) act(4) act(5)
#define CLEAR(i) _tile_zero(i);
#define LOAD_SUM(i) \
    if constexpr (i / 2 < TILES) _tile_loadd(i, sums + i / 2 * rows * 128 + i % 2 * 64, 128);
#define STORE_SUM(i) \
    if constexpr (i / 2 < TILES) _tile_stored(i, sums + i / 2 * rows * 128 + i % 2 * 64, 128);
    if (begins) {
        EACH_SUM(CLEAR)
    } else {
        EACH_SUM(LOAD_SUM)
    }
    for (; steps; steps--, x += TILES * TILE_BYTES, w += STEP_BYTES) {
        for (int64_t i = 0; i < prefetches; i++) prefetch.issue();
        _tile_loadd(6, w, 2 * TILE_ROW_BYTES);
        _tile_loadd(7, x, TILE_ROW_BYTES);
        PRODUCT(0, 7, 6)
        if constexpr (TILES == 2) {
            _tile_loadd(4, w + TILE_ROW_BYTES, 2 * TILE_ROW_BYTES);
            PRODUCT(1, 7, 4)
            _tile_loadd(5, x + TILE_BYTES, TILE_ROW_BYTES);
            PRODUCT(2, 5, 6)
            PRODUCT(3, 5, 4)
        }
        if constexpr (TILES == 3) {  // six sums leave two registers for the factors
            _tile_loadd(7, x + TILE_BYTES, TILE_ROW_BYTES);
            PRODUCT(2, 7, 6)
            _tile_loadd(7, x + 2 * TILE_BYTES, TILE_ROW_BYTES);
            PRODUCT(4, 7, 6)
        }
        if constexpr (TILES != 2) {
            _tile_loadd(6, w + TILE_ROW_BYTES, 2 * TILE_ROW_BYTES);
            if constexpr (TILES == 3) {
                PRODUCT(5, 7, 6)
                _tile_loadd(7, x + TILE_BYTES, TILE_ROW_BYTES);
                PRODUCT(3, 7, 6)
                _tile_loadd(7, x, TILE_ROW_BYTES);
            }
            PRODUCT(1, 7, 6)
        }
    }
    EACH_SUM(STORE_SUM)
#undef EACH_SUM
#undef CLEAR
#undef LOAD_SUM
#undef STORE_SUM
#undef PRODUCT
}

// rows and row bytes of the eight tile registers, as _tile_loadconfig reads them
struct alignas(64) TileConfig {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};

    TileConfig(int64_t tiles, int64_t count) {
        // weights have 16 rows, sums and x have `count`
        for (int i = 0; i < 8; i++)
            bytes[i] = TILE_ROW_BYTES, rows[i] = i == 6 || (tiles == 2 && i == 4) ? 16 : count;
    }
};

// split_into_limbs of tiles.h for a row [K], K a multiple of 64: each limb's bytes go to a place of
// their own, 64 bytes a step, with steps `stride` bytes apart.
template <int LIMBS>
static void split_into_limbs_amx(const float* x, int64_t K, float* x_scale, int32_t* initial,
                                 char* const* to, int64_t stride) {
    constexpr float LARGEST = largest_quantized<LIMBS>;
    // of the absolute values' bits, as integers: NaN and infinity are above all others
    __m512i largest = _mm512_setzero_si512();
    for (int64_t k = 0; k < K; k += LANES)
        largest = _mm512_max_epi32(
            largest, _mm512_and_si512(_mm512_loadu_si512(x + k), _mm512_set1_epi32(0x7fffffff)));
    const int32_t bits = _mm512_reduce_max_epi32(largest);
    float top;
    std::memcpy(&top, &bits, sizeof top);
    top = top > 1e-30f ? top : 1e-30f;
    *x_scale = bits < 0x7f800000 ? top / LARGEST : NAN;
    // Each limb is moved up by 128, so that none is negative and limb d is byte d of the integer.
    const __m512i up = _mm512_set1_epi32(LIMBS == 1   ? 0x80
                                         : LIMBS == 2 ? 0x8080
                                                      : 0x808080),
                  sign = _mm512_set1_epi8(-128), ones = _mm512_set1_epi8(1);
    const __m512 scale = _mm512_set1_ps(LARGEST / top);
    alignas(64) static constexpr uint8_t EVERY_FOURTH[64] = {
        0,  4,  8,  12, 16, 20, 24, 28, 32, 36,  40,  44,  48,  52,  56,  60,
        64, 68, 72, 76, 80, 84, 88, 92, 96, 100, 104, 108, 112, 116, 120, 124};
    __m512i sums[LIMBS] = {};
    for (int64_t k = 0, at = 0; k < K; k += 4 * LANES, at += stride) {
        __m512i whole[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++)
            whole[i] = _mm512_add_epi32(
                _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + k + i * LANES), scale)), up);
#pragma GCC unroll 3
        for (int d = 0; d < LIMBS; d++) {
            const __m512i index =
                _mm512_add_epi8(_mm512_load_si512(EVERY_FOURTH), _mm512_set1_epi8(d));
            const __m512i low = _mm512_permutex2var_epi8(whole[0], index, whole[1]),
                          high = _mm512_permutex2var_epi8(whole[2], index, whole[3]);
            const __m512i limb =
                _mm512_xor_si512(_mm512_inserti64x4(low, _mm512_castsi512_si256(high), 1), sign);
            add_dot((IntVec&)sums[d], (IntVec)ones, (IntVec)limb);
            _mm512_storeu_si512(to[d] + at, limb);
        }
    }
    for (int d = 0; d < LIMBS; d++)
        initial[d] = -INT8_ZERO * _mm512_reduce_add_epi32(sums[d]);
}

// The bfloat16 parts of a row [K], K a multiple of 32.
template <int PARTS>
static void split_into_bf16(const float* x, int64_t K, char* const* to, int64_t stride) {
    for (int64_t k = 0, at = 0; k < K; k += 2 * LANES, at += stride) {
        __m512 first = _mm512_loadu_ps(x + k), second = _mm512_loadu_ps(x + k + LANES);
#pragma GCC unroll 3
        for (int part = 0; part < PARTS; part++) {
            const __m256i low = (__m256i)_mm512_cvtneps_pbh(first),
                          high = (__m256i)_mm512_cvtneps_pbh(second);
            _mm512_storeu_si512(to[part] + at,
                                _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));
            first = _mm512_sub_ps(first, (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(low), 16));
            second =
                _mm512_sub_ps(second, (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16));
        }
    }
}

// Rows of x as AMX tiles read them, group by group.
struct AmxRows {
    std::vector<char> bytes;
    std::vector<float> x_scale;    // [token]
    std::vector<int32_t> initial;  // [token][limb]

    template <class W>
    void reserve(const TokenGroups& groups, int64_t K) {
        const int64_t size = groups.count * groups.bytes(K / AmxFormat<W>::inputs) + TILE_ROW_BYTES;
        if ((int64_t)bytes.size() < size) bytes.resize(size);
        if ((int64_t)x_scale.size() < groups.M) x_scale.resize(groups.M);
        if ((int64_t)initial.size() < groups.M * groups.parts)
            initial.resize(groups.M * groups.parts);
    }

    char* group(const TokenGroups& groups, int64_t i, int64_t steps) {
        return (char*)(((uintptr_t)bytes.data() + TILE_ROW_BYTES - 1) / TILE_ROW_BYTES *
                       TILE_ROW_BYTES) +
               i * groups.bytes(steps);
    }

    template <class W>
    void fill(const TokenGroups& groups, int64_t i, const float* x, int64_t ldx, int64_t K) {
        constexpr int parts = AmxFormat<W>::parts;
        char* tile = group(groups, i, K / AmxFormat<W>::inputs);
        for (int64_t m = groups.first(i), row = 0; m < groups.first(i + 1); m++) {
            char* to[parts];
            for (int part = 0; part < parts; part++, row++)
                to[part] =
                    tile + row / groups.rows * TILE_BYTES + row % groups.rows * TILE_ROW_BYTES;
            if constexpr (AmxFormat<W>::inputs == 64)
                split_into_limbs_amx<parts>(x + m * ldx, K, &x_scale[m], &initial[m * parts], to,
                                            groups.tiles * TILE_BYTES);
            else split_into_bf16<parts>(x + m * ldx, K, to, groups.tiles * TILE_BYTES);
        }
    }
};

// A token's outputs from the sums of its parts.
template <class W>
static inline FloatVec combine_parts(const char* sums, const AmxRows& x, int64_t m) {
    constexpr int parts = AmxFormat<W>::parts;
    FloatVec total = {};
    if constexpr (AmxFormat<W>::inputs == 64) {
        for (int d = parts - 1; d >= 0; d--) {
            const __m512i sum = _mm512_add_epi32(_mm512_loadu_si512(sums + d * 128),
                                                 _mm512_set1_epi32(x.initial[m * parts + d]));
            total = fma(total, broadcast(256), (FloatVec)_mm512_cvtepi32_ps(sum));
        }
        return total * x.x_scale[m];
    } else {
        for (int part = parts - 1; part >= 0; part--)
            total += load((const float*)(sums + part * 128));
        return total;
    }
}

// multiply_panels of linear.h, on AMX tiles.
template <class W>
static void multiply_panels_amx(const Matrix& w, const float* x, int64_t ldx, int64_t M, float* y,
                                int64_t ldy, Epilogue epilogue) {
    const TokenGroups groups(M, AmxFormat<W>::parts);
    AmxRows* prepared = prepare_rows<AmxRows>(
        M, groups.count, [&](AmxRows& rows) { rows.reserve<W>(groups, w.inputs); },
        [&](AmxRows& rows, int64_t i) { rows.fill<W>(groups, i, x, ldx, w.inputs); });
    const TileConfig config(groups.tiles, groups.rows);
    const int64_t steps = w.inputs / AmxFormat<W>::inputs,
                  width = panel_width(epilogue);
    // Several groups read a part of the panel while it is in the L1 cache, and prefetch the next
    // part meanwhile.
    const int64_t part = groups.count < 3 ? steps : std::min(steps, CACHED_STEPS),
                  room = groups.tiles * groups.rows * 128;
    // prefetched a short way ahead only: the caches are small
    const bool long_panel = groups.count == 1 && groups.tiles < 3 && steps > 8;
    const PrefetchPlan plan(part, groups.count, part == steps && !long_panel ? groups.tokens : 0);
    alignas(64) char sums[(MAX_BLOCK_ROWS + 16) * 3 * 128];
    // the compiler does not know that it is read: all of it is written now
    asm volatile("" ::"r"(&config) : "memory");
    _tile_loadconfig(&config);
#pragma omp for schedule(static) nowait
    for (int64_t n = 0; n < w.outputs / PANEL; n++) {
        const float *scale = w.scale ? w.scale + n * PANEL : nullptr,
                    *bias = w.bias ? w.bias + n * PANEL : nullptr;
        const char* panel = (const char*)w.data + n * steps * STEP_BYTES;
        for (int64_t begin = 0; begin < steps; begin += part)
            for (int64_t i = 0; i < groups.count; i++) {
                asm volatile("" ::: "memory");  // the compiler does not know what tile loads read
                const int64_t count = std::min(part, steps - begin);
                const char *rows = prepared->group(groups, i, steps) +
                                   begin * groups.tiles * TILE_BYTES,
                           *at = panel + begin * STEP_BYTES;
                Prefetch prefetch{
                    long_panel ? at + PREFETCH_BYTES
                               : at + count * STEP_BYTES + i * (count * STEP_BYTES / groups.count),
                    128};
                if (groups.tiles == 1)
                    multiply_tiles<W, 1>(rows, at, count, prefetch, plan.in_step, groups.rows,
                                         !begin, sums + i * room);
                else if (groups.tiles == 2)
                    multiply_tiles<W, 2>(rows, at, count, prefetch, plan.in_step, groups.rows,
                                         !begin, sums + i * room);
                else
                    multiply_tiles<W, 3>(rows, at, count, prefetch, plan.in_step, groups.rows,
                                         !begin, sums + i * room);
                if (begin + count < steps) continue;
                for (int64_t m = groups.first(i); m < groups.first(i + 1); m++) {
                    for (int64_t f = 0; f < plan.in_token; f++) prefetch.issue();
                    const char* token_sums =
                        sums + i * room + (m - groups.first(i)) * groups.parts * 128;
                    apply_epilogue(combine_parts<W>(token_sums, *prepared, m),
                                   combine_parts<W>(token_sums + 64, *prepared, m), scale, bias,
                                   y + m * ldy + n * width, epilogue);
                }
            }
    }
    _tile_release();
#pragma omp barrier
}

template <class W>
static bool uses_amx(int64_t inputs, int64_t M) {
    return has_amx && inputs % AmxFormat<W>::inputs == 0 &&
           M * AmxFormat<W>::parts >= AmxFormat<W>::min_rows;
}
#else
static const bool has_amx = false;

template <class W>
static bool uses_amx(int64_t, int64_t) {
    return false;
}
template <class W>
static void multiply_panels_amx(const Matrix&, const float*, int64_t, int64_t, float*, int64_t,
                                Epilogue) {}
#endif
