// Products by matrix units (AMX), where the machine has them: sixteen rows by sixteen outputs, 64 bytes deep, with one operation.
//
// What a row of x is taken apart into are rows of their own here: its digits of eight bits, multiplied by quads, or its three parts in
// bfloat16, whose sum it is to within 2^-24 of itself, multiplied by bfloat16 weights. Six of the eight registers hold sums, for both halves
// of a panel, so up to 48 such rows pass a panel together: as many tokens as a tree has nodes cost little more than one, whose weights have
// to be read all the same.
//
// Sums of bytes are whole numbers, the same as in tiles.h to the last bit, so few rows, for which vectors are faster, are left to them.
// Sums of bfloat16 are float32's, each row's for itself and always in this order, so they are made here for any number of rows.
#pragma once

#include "records.h"
#include "tiles.h"

template <class W>
struct Units { static constexpr int parts = 0; };  // rows of units that a row is taken apart into; 0: these weights have none

#if defined(__AMX_INT8__) && defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__AVX512VNNI__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>

// The system hands out the registers' room to processes that ask for it (ARCH_REQ_XCOMP_PERM of XFEATURE_XTILEDATA).
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

// M tokens in groups of equal size, as nearly as can be; the units of all groups have as many rows.
struct Groups {
    int64_t M, parts, count, tokens, units, rows;

    Groups(int64_t M, int64_t parts) : M(M), parts(parts) {
        const int64_t most = 48 / parts;
        count = (M + most - 1) / most, tokens = (M + count - 1) / count;
        units = (tokens * parts + 15) / 16, rows = (tokens * parts + units - 1) / units;
    }
    int64_t first(int64_t group) const { return group * M / count; }
    int64_t bytes(int64_t steps) const { return units * UNIT * steps; }  // of a group
    int64_t at(int64_t row, int64_t step) const { return (step * units + row / rows) * UNIT + row % rows * DEEP; }
};

// Units of a group's rows, [step][unit][row][64 bytes], against a panel: sums [row][32].
template <class W, int UNITS>
static void multiply(const char* x, const char* w, int64_t steps, int64_t rows, void* sums) {
#define EACH_SUM(act) act(0) act(1) act(2) act(3) act(4) act(5)
#define CLEAR(i) _tile_zero(i);
#define PRODUCT(i)                                            \
    if constexpr (i % 3 < UNITS) {                            \
        _tile_loadd(7, x + i % 3 * UNIT, DEEP);               \
        if constexpr (Units<W>::inputs == 64) _tile_dpbsud(i, 7, 6); \
        else _tile_dpbf16ps(i, 7, 6);                         \
    }
#define STORE_SUM(i) \
    if constexpr (i % 3 < UNITS) _tile_stored(i, (char*)sums + i % 3 * rows * 128 + i / 3 * 64, 128);
    EACH_SUM(CLEAR)
    for (; steps; steps--, x += UNITS * UNIT, w += STEP) {
        for (int64_t i = 0; i < STEP; i += 64) __builtin_prefetch(w + NEAR + i);
        _tile_loadd(6, w, 2 * DEEP);
        PRODUCT(0) PRODUCT(1) PRODUCT(2)
        _tile_loadd(6, w + DEEP, 2 * DEEP);
        PRODUCT(3) PRODUCT(4) PRODUCT(5)
    }
    EACH_SUM(STORE_SUM)
#undef EACH_SUM
#undef CLEAR
#undef PRODUCT
#undef STORE_SUM
}

struct alignas(64) Registers {  // their rows and the bytes of each, as _tile_loadconfig reads it
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};

    explicit Registers(int64_t count) {
        for (int i = 0; i < 8; i++) bytes[i] = DEEP, rows[i] = i == 6 ? 16 : count;
    }
};

// The three parts of a row [K] in bfloat16: put(input, part, 16 of them).
template <class Put>
static void take_halves(const float* x, int64_t K, Put put) {
    for (int64_t k = 0; k < K; k += LANES) {
        __m512 rest = (__m512)load(x + k);
        for (int part = 0; part < 3; part++) {
            const __m256i half = (__m256i)_mm512_cvtneps_pbh(rest);
            put(k, part, half);
            rest = _mm512_sub_ps(rest, (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
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

    const char* group(const Groups& groups, int64_t i, int64_t steps) const {
        return (const char*)(((uintptr_t)bytes.data() + DEEP - 1) / DEEP * DEEP) + i * groups.bytes(steps);
    }

    template <class W>
    void fill(const Groups& groups, int64_t i, int64_t m, const float* x, int64_t K) {  // token m, of group i
        constexpr int64_t inputs = Units<W>::inputs, width = DEEP / inputs;
        char* to = (char*)group(groups, i, K / inputs);
        const int64_t row = (m - groups.first(i)) * groups.parts;
        auto put = [&](int64_t k, int part, auto taken) { std::memcpy(to + groups.at(row + part, k / inputs) + k % inputs * width, &taken, sizeof taken); };
        if constexpr (width == 1) take_apart<Units<W>::parts>(x, K, K, Form<W>::zero, &step[m], &start[m * groups.parts], 0, put);
        else take_halves(x, K, put);
    }
};

// As made_ready in tiles.h.
template <class W>
static const UnitRows* made_ready(const float* x, int64_t ldx, const Groups& groups, int64_t K) {
    static thread_local UnitRows own;
    UnitRows* made = &own;
    auto fill = [&](int64_t i) {
        for (int64_t m = groups.first(i); m < groups.first(i + 1); m++) made->fill<W>(groups, i, m, x + m * ldx, K);
    };
    if (groups.M <= FEW) {
        made->fit<W>(groups, K);
        for (int64_t i = 0; i < groups.count; i++) fill(i);
        return made;
    }
#pragma omp single copyprivate(made)
    {
        made = &own;
        made->fit<W>(groups, K);
    }
#pragma omp for schedule(static)
    for (int64_t i = 0; i < groups.count; i++) fill(i);
    return made;
}

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
    const UnitRows* ready = made_ready<W>(x, ldx, groups, w.inputs);
    const Registers registers(groups.rows);
    const int64_t steps = w.inputs / Units<W>::inputs, width = end == GATE ? LANES : PANEL;
    alignas(64) char sums[48 * 128];
    _tile_loadconfig(&registers);
#pragma omp for schedule(static) nowait
    for (int64_t n = 0; n < w.outputs / PANEL; n++) {
        const float *scale = w.scale ? w.scale + n * PANEL : nullptr, *bias = w.bias ? w.bias + n * PANEL : nullptr;
        const char* panel = (const char*)w.data + n * steps * STEP;
        for (int64_t i = 0; i < groups.count; i++) {
            asm volatile("" ::: "memory");  // compilers do not know what units read
            const char* rows = ready->group(groups, i, steps);
            if (groups.units == 1) multiply<W, 1>(rows, panel, steps, groups.rows, sums);
            else if (groups.units == 2) multiply<W, 2>(rows, panel, steps, groups.rows, sums);
            else multiply<W, 3>(rows, panel, steps, groups.rows, sums);
            for (int64_t m = groups.first(i); m < groups.first(i + 1); m++) {
                const char* own = sums + (m - groups.first(i)) * groups.parts * 128;
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
