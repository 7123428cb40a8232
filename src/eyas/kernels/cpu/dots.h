// Tiles of int8 and int4 weights by integer dot products, and x as they read it; part of tiles.h.
#pragma once

// The largest integer whose limbs fit into signed bytes; for three limbs with a margin for
// rounding: 127 * (65536 + 256 + 1) - 127.
template <int LIMBS>
constexpr float largest_quantized = LIMBS == 1   ? 127
                                    : LIMBS == 2 ? 127 * 257
                                                 : 8355584;

#if !defined(NO_DOT)
#if !defined(DIGIT_FROM_LANE)
static inline IntVec load_digit(const int8_t* digit) {  // its four bytes, in every lane
    int32_t bytes;
    std::memcpy(&bytes, digit, sizeof bytes);
    return bytes - IntVec{};
}
#endif

// The scales of groups of inputs (records.h), read one after the other.
struct GroupScales {
    const Scales kind;
    const int64_t zero, bytes;  // bytes of a group's integers
    const IntVec codes;         // the table of nibbles, if there is one
    FloatVec shared[2], shared_min[2];

    GroupScales(const Matrix& w, int64_t bytes)
        : kind(w.scales),
          zero(w.zero),
          bytes(bytes),
          codes(w.codes ? load_codes(w.codes) : IntVec{}) {}

    int64_t own_bytes() const {  // of a group's scales
        return (kind == HALF_MIN ? 4 : kind == SUPER ? 1 : 2) * PANEL;
    }

    // Where the group of input k begins, `size` inputs each; the shared numbers are read on the way.
    const uint8_t* group_of(const uint8_t* panel, int64_t k, int64_t size) {
        const int64_t group = bytes + own_bytes();
        if (kind < SUPER) return panel + k / size * group;
        const int64_t super = (kind == SUPER ? 2 : 4) * PANEL;
        panel += k / SUPER_SIZE * (super + SUPER_SIZE / size * group);
        if (k % SUPER_SIZE == 0) return panel;
        return enter(panel, 0) + k % SUPER_SIZE / size * group;
    }

    // Read the numbers that 256 inputs share, where they begin. Returns where the group does.
    const uint8_t* enter(const uint8_t* at, int64_t k) {
        if (kind < SUPER || k % SUPER_SIZE) return at;
        for (int half = 0; half < 2; half++, at += 2 * LANES) shared[half] = load_half(at);
        if (kind == SUPER_MIN)
            for (int half = 0; half < 2; half++, at += 2 * LANES) shared_min[half] = load_half(at);
        return at;
    }

    // Read a group's scales, and what is added to scale * integer: without a minimum, minus zero *
    // scale. Returns where they end.
    const uint8_t* read(const uint8_t* at, FloatVec (&scale)[2], FloatVec (&least)[2]) const {
        const auto words = [&](auto load_words, const uint8_t* from, FloatVec (&to)[2]) INLINE_LAMBDA {
            to[0] = load_words(from), to[1] = load_words(from + 2 * LANES);
        };
        const auto numbers = [&](const FloatVec* shared, const uint8_t* from, FloatVec (&to)[2])
                                 INLINE_LAMBDA {
            to[0] = shared[0] * load((const int8_t*)from);
            to[1] = shared[1] * load((const int8_t*)from + LANES);
        };
        switch (kind) {
            case HALF: words(load_half, at, scale); break;
            case BFLOAT: words(load_bfloat16, at, scale); break;
            case HALF_MIN: words(load_half, at, scale), words(load_half, at + 2 * PANEL, least); break;
            case SUPER: numbers(shared, at, scale); break;
            case SUPER_MIN:
                numbers(shared, at, scale), numbers(shared_min, at + PANEL, least);
                least[0] = -least[0], least[1] = -least[1];
        }
        if (kind != HALF_MIN && kind != SUPER_MIN)
            least[0] = scale[0] * (float)-zero, least[1] = scale[1] * (float)-zero;
        return at + own_bytes();
    }
};

template <int BITS, GroupForm FORM, int LIMBS>
INLINE IntVec load_integers(const uint8_t* w) {
    if (small_sums<BITS, FORM, LIMBS>) return packed_bytes(w);
    return BITS == 4 ? packed_nibbles(w) : dot_weights(w);
}
template <int BITS, GroupForm FORM, int LIMBS>
INLINE IntVec integers_of(IntVec loaded, IntVec codes) {
    if (BITS == 8) return loaded;
    if (small_sums<BITS, FORM, LIMBS>) return loaded & 0x0f0f0f0f;
    return FORM == TABLE ? look_up(codes, low_nibbles(loaded)) : low_nibbles(loaded);
}

// a += products of `inputs` inputs, N row digits by two vectors of outputs.
template <int N>
__attribute__((always_inline)) static inline void add_dots(IntVec (&a)[N][2], const int8_t*& digits,
                                                           const uint8_t*& w, int64_t inputs,
                                                           Prefetch& prefetch) {
    for (int64_t k = 0; k < inputs; k += DOT_INPUTS, w += DOT_INPUTS * PANEL, digits += 4 * N) {
        const IntVec first = dot_weights(w), second = dot_weights(w + DOT_INPUTS * LANES);
        prefetch.issue();
#pragma GCC unroll 12
        for (int i = 0; i < N; i++) {
            const auto x = load_digit(digits + 4 * i);
            add_dot(a[i][0], first, x);
            add_dot(a[i][1], second, x);
        }
    }
}

#if !defined(DOT_OF_BYTES)
// Weights for dots of pairs, and x in float32.
template <class Act>
INLINE void for_inputs(const Matrix&, const Int8Dot<3>* weights, int64_t begin, int64_t end,
                       Prefetch& prefetch, Act act) {
    const uint8_t* w = (const uint8_t*)weights + begin * PANEL;
    for (int64_t k = begin; k < end; k += 2, w += 2 * PANEL) {
        const IntVec first = dot_weights(w), second = dot_weights(w + PANEL);
        prefetch.issue();
        act(k, to_float((first << 16) >> 16), to_float((second << 16) >> 16));
        act(k + 1, to_float(first >> 16), to_float(second >> 16));
    }
}

template <int BITS, int GROUP, GroupForm FORM, class Act>
INLINE void for_inputs(const Matrix& matrix, const Grouped<BITS, GROUP, FORM, 3>* weights,
                       int64_t begin, int64_t end, Prefetch& prefetch, Act act) {
    constexpr int STEP = 2 * PANEL, STEPS = PanelFormat<Grouped<BITS, GROUP, FORM, 3>>::steps;
    GroupScales scales(matrix, STEPS * STEP);
    const uint8_t* group = scales.group_of((const uint8_t*)weights, begin, GROUP);
    for (int64_t k = begin; k < end;) {
        group = scales.enter(group, k);
        FloatVec scale[2], offset[2];
        const uint8_t* next = scales.read(group + STEPS * STEP, scale, offset);
        for (int step = 0; step < STEPS; step++) {
            IntVec first = load_integers<BITS, FORM, 3>(group + step * STEP),
                   second = load_integers<BITS, FORM, 3>(group + step * STEP + STEP / 2);
            prefetch.issue();
            for (int half = 0; half < 8 / BITS; half++, k += 2) {
                const IntVec left = integers_of<BITS, FORM, 3>(first, scales.codes),
                             right = integers_of<BITS, FORM, 3>(second, scales.codes);
                act(k, fma(to_float((left << 16) >> 16), scale[0], offset[0]),
                    fma(to_float((right << 16) >> 16), scale[1], offset[1]));
                act(k + 1, fma(to_float(left >> 16), scale[0], offset[0]),
                    fma(to_float(right >> 16), scale[1], offset[1]));
                if (BITS == 4) first = next_nibbles(first), second = next_nibbles(second);
            }
        }
        group = next;
    }
}
#endif

template <int ROWS, int LIMBS, std::enable_if_t<digits_of<LIMBS> != 0, int> = 0>
NOINLINE void multiply_tile(const TileInput& in, const Int8Dot<LIMBS>* w, int64_t inputs,
                            Prefetch prefetch, const float* scale, const float* bias, float* y,
                            int64_t ldy, Epilogue epilogue) {
    constexpr int DIGITS = digits_of<LIMBS>, N = ROWS * DIGITS;
    const int8_t* digits = in.digits;
    const uint8_t* weights = (const uint8_t*)w;
    // a copy: accumulators with a variable index would stay in memory throughout
    FloatVec sums[N][2];
    if constexpr (DOT_INPUTS == 4) {
        IntVec a[N][2];
#pragma GCC unroll 12
        for (int i = 0; i < N; i++) a[i][0] = a[i][1] = in.initial[i] - IntVec{};
        add_dots<N>(a, digits, weights, inputs, prefetch);
#pragma GCC unroll 12
        for (int i = 0; i < N; i++) sums[i][0] = to_float(a[i][0]), sums[i][1] = to_float(a[i][1]);
    } else {
        constexpr int64_t BLOCK = 512;  // products of 16 and 8 bits whose sum fits into 32 bits
        IntVec high[N][2] = {}, low[N][2] = {};
        for (int64_t k = 0; k < inputs; k += BLOCK) {
            IntVec a[N][2];
#pragma GCC unroll 12
            for (int i = 0; i < N; i++) a[i][0] = a[i][1] = IntVec{};
            add_dots<N>(a, digits, weights, std::min(BLOCK, inputs - k), prefetch);
#pragma GCC unroll 12
            for (int i = 0; i < N; i++)
                for (int half = 0; half < 2; half++)
                    high[i][half] += a[i][half] >> 16, low[i][half] += a[i][half] & 0xffff;
        }
        for (int i = 0; i < N; i++)
            for (int half = 0; half < 2; half++)
                sums[i][half] =
                    fma(to_float(high[i][half]), broadcast(65536), to_float(low[i][half]));
    }
    for (int m = 0; m < ROWS; m++) {
        FloatVec whole[2] = {};
        for (int half = 0; half < 2; half++) {
            for (int d = DIGITS - 1; d >= 0; d--)
                whole[half] = fma(whole[half], broadcast(256), sums[m * DIGITS + d][half]);
            whole[half] *= in.x_scale[m];
        }
        apply_epilogue(whole[0], whole[1], scale, bias, y + m * ldy, epilogue);
    }
}

template <int ROWS, int BITS, int GROUP, GroupForm FORM, int LIMBS,
          std::enable_if_t<PanelFormat<Grouped<BITS, GROUP, FORM, LIMBS>>::digits != 0, int> = 0>
NOINLINE void multiply_tile(const TileInput& in, const Grouped<BITS, GROUP, FORM, LIMBS>* w,
                            int64_t inputs, Prefetch prefetch, const float*, const float* bias,
                            float* y, int64_t ldy, Epilogue epilogue) {
    typedef PanelFormat<Grouped<BITS, GROUP, FORM, LIMBS>> F;
    constexpr int DIGITS = F::digits, N = ROWS * DIGITS, STEP = F::inputs * PANEL, STEPS = F::steps;
    constexpr bool SMALL = small_sums<BITS, FORM, LIMBS>;
    FloatVec sums[ROWS][2] = {};
    GroupScales scales(*in.matrix, STEPS * STEP);
    const uint8_t* group = (const uint8_t*)w;
    const int8_t* digits = in.digits;
    const int32_t* initial = in.initial;
    for (int64_t k = 0; k < inputs; k += GROUP, initial += N) {
        group = scales.enter(group, k);
        IntVec a[N][2];
#pragma GCC unroll 12
        for (int i = 0; i < N; i++)
            a[i][0] = a[i][1] = (FORM == MIN || SMALL ? 0 : initial[i]) - IntVec{};
        for (int step = 0; step < STEPS; step++) {
            IntVec first = load_integers<BITS, FORM, LIMBS>(group + step * STEP),
                   second = load_integers<BITS, FORM, LIMBS>(group + step * STEP + STEP / 2);
            prefetch.issue();
#pragma GCC unroll 2
            for (int half = 0; half < 8 / BITS; half++, digits += 4 * N) {
                const IntVec left = integers_of<BITS, FORM, LIMBS>(first, scales.codes),
                             right = integers_of<BITS, FORM, LIMBS>(second, scales.codes);
#pragma GCC unroll 12
                for (int i = 0; i < N; i++) {
                    const auto x = load_digit(digits + 4 * i);
                    if constexpr (SMALL) {
                        add_small_dot(a[i][0], left, x);
                        add_small_dot(a[i][1], right, x);
                    } else {
                        add_dot(a[i][0], left, x);
                        add_dot(a[i][1], right, x);
                    }
                }
                if (BITS == 4) first = next_nibbles(first), second = next_nibbles(second);
            }
        }
        if (SMALL)
#pragma GCC unroll 12
            for (int i = 0; i < N; i++)
#pragma GCC unroll 2
                for (int half = 0; half < 2; half++)
                    a[i][half] = pair_sums(a[i][half]) + (FORM == MIN ? 0 : initial[i]);
        FloatVec scale[2], least[2];
        group = scales.read(group + STEPS * STEP, scale, least);
#pragma GCC unroll 6
        for (int m = 0; m < ROWS; m++) {
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++) {
                FloatVec whole = to_float(a[m * DIGITS + DIGITS - 1][half]);
#pragma GCC unroll 2
                for (int d = DIGITS - 2; d >= 0; d--)
                    whole = fma(whole, broadcast(256), to_float(a[m * DIGITS + d][half]));
                sums[m][half] = fma(whole, scale[half], sums[m][half]);
            }
        }
        if constexpr (FORM == MIN)
#pragma GCC unroll 6
            for (int m = 0; m < ROWS; m++) {
                float x = (float)-initial[m * DIGITS + DIGITS - 1];
                for (int d = DIGITS - 2; d >= 0; d--)
                    x = fma(x, 256.0f, (float)-initial[m * DIGITS + d]);
#pragma GCC unroll 2
                for (int half = 0; half < 2; half++)
                    sums[m][half] = fma(broadcast(x), least[half], sums[m][half]);
            }
    }
    FloatVec scaled[ROWS][2];
#pragma GCC unroll 6
    for (int m = 0; m < ROWS; m++)
        scaled[m][0] = sums[m][0] * in.x_scale[m], scaled[m][1] = sums[m][1] * in.x_scale[m];
    for (int m = 0; m < ROWS; m++)
        apply_epilogue(scaled[m][0], scaled[m][1], nullptr, bias, y + m * ldy, epilogue);
}

// Quantise a row [K], K a multiple of LANES, and split it into digits; consecutive steps of
// DOT_INPUTS inputs are `rows` x digits x 4 bytes apart. initial: for each group, what cancels the
// weights' zero point. Values that are not finite make x_scale NaN.
#if defined(__AVX512VNNI__)
template <int LIMBS, int>
static void split_into_digits(const float* x, int64_t K, int64_t group, int zero, int64_t rows,
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
template <int LIMBS, int INPUTS>
static void split_into_digits(const float* x, int64_t K, int64_t group, int zero, int64_t rows,
                              int8_t* digits, float* x_scale, int32_t* initial) {
    constexpr float LARGEST = largest_quantized<LIMBS>;
    constexpr int DIGITS = digits_of<LIMBS, INPUTS>;
    typedef std::conditional_t<INPUTS == 4, int8_t, int16_t> Digit;
    FloatVec largest = broadcast(1e-30f), broken = {};
    for (int64_t k = 0; k < K; k += LANES) {
        const FloatVec value = load(x + k), size = value < 0 ? -value : value;
        largest = size > largest ? size : largest;
        broken = fma(value, FloatVec{}, broken);
    }
    const float top = horizontal_max(largest);
    *x_scale = top / LARGEST + horizontal_sum(broken);
    IntVec sums[DIGITS] = {};
    for (int64_t k = 0; k < K; k += LANES) {
        IntVec rest = round_to_int(load(x + k) * (LARGEST / top));
        for (int d = 0; d < DIGITS; d++) {
            // the last digit keeps the rest
            const IntVec digit = d + 1 < DIGITS ? (rest << 24) >> 24 : rest;
            sums[d] += digit;
            rest = (rest - digit) >> 8;
            Digit narrow[LANES];
            for (int i = 0; i < LANES; i++) narrow[i] = (Digit)digit[i];
            for (int step = 0; step < LANES / INPUTS; step++)
                std::memcpy(digits + ((k / INPUTS + step) * rows * DIGITS + d) * 4,
                            narrow + step * INPUTS, 4);
        }
        if ((k + LANES) % group == 0) {
            for (int d = 0; d < DIGITS; d++) {
                int32_t sum = 0;
                for (int i = 0; i < LANES; i++) sum += sums[d][i];
                initial[d] = -zero * sum;
                sums[d] = IntVec{};
            }
            initial += rows * DIGITS;
        }
    }
}
#endif
#else
template <int ROWS, int LIMBS>
static void multiply_tile(const TileInput&, const Int8Dot<LIMBS>*, int64_t, Prefetch, const float*,
                          const float*, float*, int64_t, Epilogue) {}
template <int ROWS, int BITS, int GROUP, GroupForm FORM, int LIMBS>
static void multiply_tile(const TileInput&, const Grouped<BITS, GROUP, FORM, LIMBS>*, int64_t,
                          Prefetch, const float*, const float*, float*, int64_t, Epilogue) {}
template <int LIMBS, int>
static void split_into_digits(const float*, int64_t, int64_t, int, int64_t, int8_t*, float*,
                              int32_t*) {}
#endif
