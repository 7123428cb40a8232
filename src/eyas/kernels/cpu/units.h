// Products by matrix units (AMX), where the machine has them: sixteen rows by sixteen outputs, 64 bytes deep, with one operation.
//
// What a row of x is taken apart into are rows of their own here: its digits of eight bits, multiplied by quads, or its three parts in
// bfloat16, whose sum it is to within 2^-24 of itself (what is below 1e-33 or above 3.39e38 apart), multiplied by bfloat16 weights; where x
// is rounded, the first part alone. Up to 48 such rows pass a panel together, and further ones while it is near: as many tokens as a tree
// has nodes cost little more than one, whose weights have to be read all the same.
//
// Sums of bytes are whole numbers, the same as in tiles.h to the last bit, so one or two tokens, for which vectors are faster, are left to them.
// Sums of bfloat16 are float32's, each row's for itself and always in this order, so they are made here for any number of rows.
#pragma once

#include "records.h"
#include "tiles.h"

template <class W>
struct Units { static constexpr int parts = 0; };  // rows of units that a row is taken apart into; 0: these weights have none

#if defined(__AMX_INT8__) && defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__AVX512VNNI__) && defined(__AVX512VBMI__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>

// Linux hands out the registers' room to processes that ask for it (ARCH_REQ_XCOMP_PERM of XFEATURE_XTILEDATA).
static const bool units_here = syscall(SYS_arch_prctl, 0x1023, 18) == 0;

constexpr int64_t DEEP = 64, UNIT = 16 * DEEP, STEP = 2 * UNIT;  // bytes: of a row in a unit, of a unit, of a panel that a step reads

template <int DIGITS>
struct Units<Quad<DIGITS>> {
    static constexpr int parts = DIGITS, least = 9, inputs = 64;  // rows of units from which on they are faster than vectors; inputs of a step
};
template <>
struct Units<uint16_t> {
    static constexpr int parts = 3, least = 0, inputs = 32;
};
template <>
struct Units<Half> {
    static constexpr int parts = 1, least = 0, inputs = 32;
};

constexpr int64_t PART = 8;  // steps of a panel that several groups read one after the other: 16 KB

// Of what comes next, of which a step reads 16 pairs of lines, a group fetches its share: in its steps, or, where its sums are put together
// then, the rest meanwhile, so that memory never waits.
struct Share {
    int64_t in_step, in_token = 0;  // pairs
    Share(int64_t steps, int64_t groups, int64_t tokens) : in_step((tokens ? 12 : 15 + groups) / groups) {
        if (tokens) in_token = (steps * 16 / groups - steps * in_step + tokens - 1) / tokens;
    }
};

// M tokens in groups of equal size, as nearly as can be; the units of all groups have as many rows.
struct Groups {
    int64_t M, parts, count, tokens, units, rows;

    Groups(int64_t M, int64_t parts) : M(M), parts(parts) {
        const int64_t most = (M * parts <= 96 ? 48 : 32) / parts;  // three units in one or two groups; in more two: they load less
        count = (M + most - 1) / most, tokens = (M + count - 1) / count;
        units = (tokens * parts + 15) / 16, rows = (tokens * parts + units - 1) / units;
    }
    int64_t first(int64_t group) const { return group * M / count; }
    int64_t bytes(int64_t steps) const { return units * UNIT * steps; }  // of a group
};

// Units of a group's rows, [step][unit][row][64 bytes], against some steps of a panel: sums [row][32], which begin at zero or go on.
template <class W, int UNITS>
static void multiply(const char* x, const char* w, int64_t steps, Ahead& ahead, int64_t fetched, int64_t rows, bool begins, char* sums) {
#define PRODUCT(i, rows, outputs)                                         \
    if constexpr (Units<W>::inputs == 64) _tile_dpbsud(i, rows, outputs); \
    else _tile_dpbf16ps(i, rows, outputs);
#define EACH_SUM(act) act(0) act(1) act(2) act(3) act(4) act(5)
#define CLEAR(i) _tile_zero(i);
#define LOAD_SUM(i) \
    if constexpr (i / 2 < UNITS) _tile_loadd(i, sums + i / 2 * rows * 128 + i % 2 * 64, 128);
#define STORE_SUM(i) \
    if constexpr (i / 2 < UNITS) _tile_stored(i, sums + i / 2 * rows * 128 + i % 2 * 64, 128);
    if (begins) {
        EACH_SUM(CLEAR)
    } else {
        EACH_SUM(LOAD_SUM)
    }
    for (; steps; steps--, x += UNITS * UNIT, w += STEP) {
        for (int64_t i = 0; i < fetched; i++) ahead.fetch();
        _tile_loadd(6, w, 2 * DEEP);
        _tile_loadd(7, x, DEEP);
        PRODUCT(0, 7, 6)
        if constexpr (UNITS == 2) {
            _tile_loadd(4, w + DEEP, 2 * DEEP);
            PRODUCT(1, 7, 4)
            _tile_loadd(5, x + UNIT, DEEP);
            PRODUCT(2, 5, 6)
            PRODUCT(3, 5, 4)
        }
        if constexpr (UNITS == 3) {  // six sums leave two registers for what is multiplied
            _tile_loadd(7, x + UNIT, DEEP);
            PRODUCT(2, 7, 6)
            _tile_loadd(7, x + 2 * UNIT, DEEP);
            PRODUCT(4, 7, 6)
        }
        if constexpr (UNITS != 2) {
            _tile_loadd(6, w + DEEP, 2 * DEEP);
            if constexpr (UNITS == 3) {
                PRODUCT(5, 7, 6)
                _tile_loadd(7, x + UNIT, DEEP);
                PRODUCT(3, 7, 6)
                _tile_loadd(7, x, DEEP);
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

struct alignas(64) Registers {  // their rows and the bytes of each, as _tile_loadconfig reads it
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};

    Registers(int64_t units, int64_t count) {
        for (int i = 0; i < 8; i++) bytes[i] = DEEP, rows[i] = i == 6 || (units == 2 && i == 4) ? 16 : count;  // which hold weights, and which sums or rows
    }
};

// The digits of a row [K], K a multiple of 64, as take_apart in tiles.h finds them: 64 of each to its own place, steps `stride` apart; and
// what takes their zero off the weights.
template <int DIGITS>
static void take_digits(const float* x, int64_t K, float* step, int32_t* start, char* const* to, int64_t stride) {
    constexpr float MOST = most_of<DIGITS>;
    __m512i largest = _mm512_setzero_si512();  // of the numbers' sizes as whole numbers, among which what is not finite is above all others
    for (int64_t k = 0; k < K; k += LANES) largest = _mm512_max_epi32(largest, _mm512_and_si512(_mm512_loadu_si512(x + k), _mm512_set1_epi32(0x7fffffff)));
    const int32_t bits = _mm512_reduce_max_epi32(largest);
    float top;
    std::memcpy(&top, &bits, sizeof top);
    top = top > 1e-30f ? top : 1e-30f;
    *step = bits < 0x7f800000 ? top / MOST : NAN;
    // All digits are moved up by 128, so that none is below zero and each is a byte of the whole.
    const __m512i up = _mm512_set1_epi32(DIGITS == 1 ? 0x80 : DIGITS == 2 ? 0x8080 : 0x808080), sign = _mm512_set1_epi8(-128), ones = _mm512_set1_epi8(1);
    const __m512 scale = _mm512_set1_ps(MOST / top);
    alignas(64) static constexpr uint8_t EVERY_FOURTH[64] = {0,   4,   8,   12,  16,  20,  24,  28,  32,  36,  40,  44,  48,  52,  56,  60,
                                                             64,  68,  72,  76,  80,  84,  88,  92,  96,  100, 104, 108, 112, 116, 120, 124};
    __m512i sums[DIGITS] = {};
    for (int64_t k = 0, at = 0; k < K; k += 4 * LANES, at += stride) {
        __m512i whole[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) whole[i] = _mm512_add_epi32(_mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + k + i * LANES), scale)), up);
#pragma GCC unroll 3
        for (int d = 0; d < DIGITS; d++) {
            const __m512i index = _mm512_add_epi8(_mm512_load_si512(EVERY_FOURTH), _mm512_set1_epi8(d));
            const __m512i low = _mm512_permutex2var_epi8(whole[0], index, whole[1]), high = _mm512_permutex2var_epi8(whole[2], index, whole[3]);
            const __m512i digit = _mm512_xor_si512(_mm512_inserti64x4(low, _mm512_castsi512_si256(high), 1), sign);
            dot(sums[d], ones, digit);
            _mm512_storeu_si512(to[d] + at, digit);
        }
    }
    for (int d = 0; d < DIGITS; d++) start[d] = -Form<Quad<DIGITS>>::zero * _mm512_reduce_add_epi32(sums[d]);
}

// The parts of a row [K] in bfloat16, K a multiple of 32.
template <int PARTS>
static void take_halves(const float* x, int64_t K, char* const* to, int64_t stride) {
    for (int64_t k = 0, at = 0; k < K; k += 2 * LANES, at += stride) {
        __m512 first = _mm512_loadu_ps(x + k), second = _mm512_loadu_ps(x + k + LANES);
#pragma GCC unroll 3
        for (int part = 0; part < PARTS; part++) {
            const __m256i low = (__m256i)_mm512_cvtneps_pbh(first), high = (__m256i)_mm512_cvtneps_pbh(second);
            _mm512_storeu_si512(to[part] + at, _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));
            first = _mm512_sub_ps(first, (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(low), 16));
            second = _mm512_sub_ps(second, (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16));
        }
    }
}

// Rows of x as units read them, group by group.
struct UnitRows {
    std::vector<char> bytes;
    std::vector<float> step;     // [token], as in Input
    std::vector<int32_t> start;  // [token][digit]

    template <class W>
    void fit(const Groups& groups, int64_t K) {
        const int64_t wanted = groups.count * groups.bytes(K / Units<W>::inputs) + DEEP;
        if ((int64_t)bytes.size() < wanted) bytes.resize(wanted);
        if ((int64_t)step.size() < groups.M) step.resize(groups.M);
        if ((int64_t)start.size() < groups.M * groups.parts) start.resize(groups.M * groups.parts);
    }

    char* group(const Groups& groups, int64_t i, int64_t steps) {
        return (char*)(((uintptr_t)bytes.data() + DEEP - 1) / DEEP * DEEP) + i * groups.bytes(steps);
    }

    template <class W>
    void fill(const Groups& groups, int64_t i, const float* x, int64_t ldx, int64_t K) {
        constexpr int parts = Units<W>::parts;
        char* own = group(groups, i, K / Units<W>::inputs);
        for (int64_t m = groups.first(i), row = 0; m < groups.first(i + 1); m++) {
            char* to[parts];
            for (int part = 0; part < parts; part++, row++) to[part] = own + row / groups.rows * UNIT + row % groups.rows * DEEP;
            if constexpr (Units<W>::inputs == 64) take_digits<parts>(x + m * ldx, K, &step[m], &start[m * parts], to, groups.units * UNIT);
            else take_halves<parts>(x + m * ldx, K, to, groups.units * UNIT);
        }
    }
};

// The output of a row from the sums of its parts.
template <class W>
static inline Floats put_together(const char* sums, const UnitRows& x, int64_t m) {
    constexpr int parts = Units<W>::parts;
    Floats whole = {};
    if constexpr (Units<W>::inputs == 64) {
        for (int d = parts - 1; d >= 0; d--) {
            const __m512i sum = _mm512_add_epi32(_mm512_loadu_si512(sums + d * 128), _mm512_set1_epi32(x.start[m * parts + d]));
            whole = fma(whole, all(256), (Floats)_mm512_cvtepi32_ps(sum));
        }
        return whole * x.step[m];
    } else {
        for (int part = parts - 1; part >= 0; part--) whole += load((const float*)(sums + part * 128));
        return whole;
    }
}

// As `panels` in linear.h.
template <class W>
static void unit_panels(const Matrix& w, const float* x, int64_t ldx, int64_t M, float* y, int64_t ldy, End end) {
    const Groups groups(M, Units<W>::parts);
    UnitRows* ready = made_ready<UnitRows>(
        M, groups.count, [&](UnitRows& made) { made.fit<W>(groups, w.inputs); },
        [&](UnitRows& made, int64_t i) { made.fill<W>(groups, i, x, ldx, w.inputs); });
    const Registers registers(groups.units, groups.rows);
    const int64_t steps = w.inputs / Units<W>::inputs, width = end == GATE ? LANES : PANEL;
    // Further groups read a part of the panel while it is in the nearest cache, and the next part is fetched meanwhile.
    const int64_t part = groups.count < 3 ? steps : std::min(steps, PART), room = groups.units * groups.rows * 128;
    const bool brief = groups.count == 1 && groups.units < 3 && steps > 8;  // of a long panel only what comes next is fetched: the caches are small
    const Share share(part, groups.count, part == steps && !brief ? groups.tokens : 0);
    alignas(64) char sums[(BLOCK + 16) * 3 * 128];
    asm volatile("" ::"r"(&registers) : "memory");  // all of it is written by now, whatever a compiler believes is read
    _tile_loadconfig(&registers);
#pragma omp for schedule(static) nowait
    for (int64_t n = 0; n < w.outputs / PANEL; n++) {
        const float *scale = w.scale ? w.scale + n * PANEL : nullptr, *bias = w.bias ? w.bias + n * PANEL : nullptr;
        const char* panel = (const char*)w.data + n * steps * STEP;
        for (int64_t begin = 0; begin < steps; begin += part)
            for (int64_t i = 0; i < groups.count; i++) {
                asm volatile("" ::: "memory");  // compilers do not know what units read
                const int64_t count = std::min(part, steps - begin);
                const char *rows = ready->group(groups, i, steps) + begin * groups.units * UNIT, *at = panel + begin * STEP;
                Ahead ahead{brief ? at + NEAR : at + count * STEP + i * (count * STEP / groups.count), 128};
                if (groups.units == 1) multiply<W, 1>(rows, at, count, ahead, share.in_step, groups.rows, !begin, sums + i * room);
                else if (groups.units == 2) multiply<W, 2>(rows, at, count, ahead, share.in_step, groups.rows, !begin, sums + i * room);
                else multiply<W, 3>(rows, at, count, ahead, share.in_step, groups.rows, !begin, sums + i * room);
                if (begin + count < steps) continue;
                for (int64_t m = groups.first(i); m < groups.first(i + 1); m++) {
                    for (int64_t f = 0; f < share.in_token; f++) ahead.fetch();
                    const char* own = sums + i * room + (m - groups.first(i)) * groups.parts * 128;
                    finish(put_together<W>(own, *ready, m), put_together<W>(own + 64, *ready, m), scale, bias, y + m * ldy + n * width, end);
                }
            }
    }
    _tile_release();
#pragma omp barrier
}

template <class W>
static bool by_units(int64_t inputs, int64_t M) { return units_here && inputs % Units<W>::inputs == 0 && M * Units<W>::parts >= Units<W>::least; }
#else
static const bool units_here = false;

template <class W>
static bool by_units(int64_t, int64_t) { return false; }
template <class W>
static void unit_panels(const Matrix&, const float*, int64_t, int64_t, float*, int64_t, End) {}
#endif
