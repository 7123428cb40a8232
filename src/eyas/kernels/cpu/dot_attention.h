// Attention by integer dot products, over keys and values of 8 bits.
//
// A slot has h integers and one number in float32 by which they are multiplied. Queries are rounded to
// 16 bits, as rows of linear layers are, and so are the weights of a softmax, whose largest is 1.
// Products are summed in integers over a head's numbers, or over a block of a query's visible slots,
// counted from its first one. So the bits of a token do not depend on the others.
#pragma once

#include "amx_attention.h"

// The number by which the integers [h] of a slot are multiplied.
static inline float slot_scale(const char* slot, int64_t h) {
    float scale;
    std::memcpy(&scale, slot + h, sizeof scale);
    return scale;
}

// Let blocks of SIZE lanes change places between two vectors: the second ones of `a`, the first of `b`.
template <int SIZE, int... LANE>
INLINE void exchange(FloatVec& a, FloatVec& b, std::integer_sequence<int, LANE...>) {
    const FloatVec first =
        __builtin_shufflevector(a, b, (LANE & SIZE ? LANE - SIZE + LANES : LANE)...);
    b = __builtin_shufflevector(a, b, (LANE & SIZE ? LANE + LANES : LANE + SIZE)...);
    a = first;
}

// Rows become columns, of LANES vectors.
template <int SIZE = LANES / 2>
INLINE void transpose(FloatVec* rows) {
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++)
        if (!(i & SIZE))
            exchange<SIZE>(rows[i], rows[i + SIZE], std::make_integer_sequence<int, LANES>());
    if constexpr (SIZE > 1) transpose<SIZE / 2>(rows);
}

// The numbers of 2 * LANES slots, BYTES of each, side by side: put(number of a word of 4 bytes, half, the
// words of this half of the slots). ahead: how many bytes later memory is fetched; 0: it is not.
template <int BYTES, int AHEAD, class Put>
INLINE void pack_slots(const char* const* slot, Put put) {
    for (int half = 0; half < 2; half++, slot += LANES)
#pragma GCC unroll 2
        for (int64_t at = 0; at < BYTES; at += sizeof(FloatVec)) {
            FloatVec words[LANES];
#pragma GCC unroll 16
            for (int j = 0; j < LANES; j++) {
                words[j] = load((const float*)(slot[j] + at));
                if (AHEAD) __builtin_prefetch(slot[j] + at + AHEAD);
            }
            transpose(words);
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) put(at / 4 + i, half, words[i]);
        }
}

// The scores of a group of (query, head) pairs with keys in bfloat16, by the tiles of linear layers: keys
// become a panel, so no sums within vectors are needed.
template <int CHUNKS>
class PanelGroup {
    static constexpr int H = CHUNKS * LANES;
    const float* const* query;
    const int64_t pairs;
    bool begun = false;
    alignas(64) float x[MAX_PAIRS][H];
    alignas(64) uint16_t panel[PANEL * H];

   public:
    PanelGroup(const float* const* query, int64_t pairs) : query(query), pairs(pairs) {}

    static bool suits(int64_t type) { return CHUNKS % 2 == 0 && type == BFLOAT16; }

    // As in DotGroup.
    void score(int64_t first, int64_t count, float* const* score, int64_t place,
               const char* const* key) {
        for (int64_t n = 0; !begun && n < pairs; n++) std::memcpy(x[n], query[n], sizeof x[n]);
        begun = true;
        pack_slots<CHUNKS % 2 ? 0 : 2 * H, 0>(
            key, [&](int64_t word, int half, FloatVec two) INLINE_LAMBDA {
                store((float*)panel + word * PANEL + half * LANES, two);
            });
        const Matrix none{};
        for (int64_t n = first; n < first + count; n += TILE_ROWS)
            multiply_rows<uint16_t, TILE_ROWS>(
                std::min<int64_t>(TILE_ROWS, first + count - n),
                {x[n], H, nullptr, nullptr, nullptr, &none}, panel, H, {(const char*)panel, 0},
                nullptr, nullptr, score[n] + place, count > 1 ? score[first + 1] - score[first] : 0,
                STORE);
    }
};

#if defined(__AVX2__)
typedef uint8_t ByteVec __attribute__((vector_size(4 * LANES)));
typedef int16_t ShortVec __attribute__((vector_size(4 * LANES)));
typedef uint8_t FewBytes __attribute__((vector_size(LANES)));
typedef int16_t FewShorts __attribute__((vector_size(2 * LANES)));

// The LANES shorts of a vector at even places, or at odd ones.
template <int ODD, int... LANE>
INLINE FewShorts every_second(ShortVec x, std::integer_sequence<int, LANE...>) {
    return __builtin_shufflevector(x, x, (2 * LANE + ODD)...);
}

// Numbers of `a` and `b` by turns, within 16 bytes: of the first eight bytes, or of the others.
template <class Vec, int SECOND, int... I>
INLINE Vec interleaved(Vec a, Vec b, std::integer_sequence<int, I...>) {
    constexpr int N = sizeof...(I), BLOCK = N / (LANES / 4);
    return __builtin_shufflevector(
        a, b, (I / BLOCK * BLOCK + SECOND * (BLOCK / 2) + I % BLOCK / 2 + (I % 2 ? N : 0))...);
}
template <class Vec, int SECOND>
INLINE Vec interleaved(ByteVec a, ByteVec b) {
    return interleaved<Vec, SECOND>((Vec)a, (Vec)b,
                                    std::make_integer_sequence<int, sizeof(Vec) / sizeof(Vec{}[0])>());
}

// The dot products of a group of (query, head) pairs, h = CHUNKS x LANES.
template <int CHUNKS, bool SUITS = CHUNKS % 4 == 0>
struct DotGroup : NoGroup<CHUNKS> {
    using NoGroup<CHUNKS>::NoGroup;
};

template <int CHUNKS>
class DotGroup<CHUNKS, true> {
    static constexpr bool BYTES = DOT_INPUTS == 4;  // products of bytes, else of 16-bit integers
    static constexpr int H = CHUNKS * LANES, LIMBS = 2, DIGITS = digits_of<LIMBS>, SLOTS = 2 * LANES,
                         WIDTH = 4 * LANES, ROWS = PanelFormat<Int8Dot<LIMBS>>::tile_rows;
    // slots are no whole cache lines, and processors do not fetch them early enough by themselves
    static constexpr int AHEAD = 3 * SLOTS * (H + sizeof(float));
    static constexpr float LARGEST = BYTES ? 65535 : 32767;  // of the weights as integers

    const float* const* query;
    const int64_t pairs;
    bool begun = false;
    alignas(64) int8_t digits[MAX_PAIRS * H * 2];  // of queries, tile by tile
    float x_scale[MAX_PAIRS];
    int32_t initial[MAX_PAIRS * DIGITS];
    // of softmax weights; the least first
    alignas(64) uint8_t weights[MAX_PAIRS][DIGITS][SLOTS * 2 / DIGITS];
    // keys as a panel of linear layers; values [PANEL dims][step of slots][two vectors]
    alignas(64) uint8_t panel[SLOTS * H];
    alignas(64) float out[MAX_PAIRS][H];  // sums of values; dims in the order of `add_values`

    int64_t tile_rows(int64_t first) const { return std::min<int64_t>(ROWS, pairs - first); }

    void begin() {
        for (int64_t n = 0; n < pairs; n++) {
            const int64_t first = n / ROWS * ROWS;
            split_into_digits<LIMBS, DOT_INPUTS>(
                query[n], H, H, INT8_ZERO, tile_rows(first),
                digits + first * H * 2 + (n - first) * DIGITS * 4, x_scale + n, initial + n * DIGITS);
        }
        std::memset(out, 0, pairs * sizeof out[0]);
        begun = true;
    }

    void pack_keys(const char* const* key) {
        pack_slots<H, AHEAD>(key, [&](int64_t word, int half, FloatVec four) INLINE_LAMBDA {
            uint8_t* to = panel + word * 4 * SLOTS + half * LANES * DOT_INPUTS;
            if constexpr (BYTES) {
                store((float*)to, (FloatVec)((ByteVec)four ^ (uint8_t)INT8_ZERO));
            } else {
                constexpr auto lanes = std::make_integer_sequence<int, LANES>();
                const FewShorts twos[2] = {every_second<0>((ShortVec)four, lanes),
                                           every_second<1>((ShortVec)four, lanes)};
                std::memcpy(to, twos, sizeof twos[0]);
                std::memcpy(to + 2 * SLOTS, twos + 1, sizeof twos[1]);
            }
        });
    }

    // Slots side by side as a dot product takes them. Of each 16 dims a vector has 4 or 8 (GROUP).
    void pack_values(const char* const* value, int64_t slots) {
        for (int64_t j = 0; j < slots; j += DOT_INPUTS)
            for (int d = 0; d < H; d += WIDTH) {
                ByteVec x[DOT_INPUTS];
                for (int i = 0; i < DOT_INPUTS; i++) {
                    std::memcpy(x + i, value[j + i] + d, WIDTH);
                    __builtin_prefetch(value[j + i] + d + AHEAD);
                }
                uint8_t *first = panel + d * SLOTS + j * PANEL, *second = first + PANEL * SLOTS;
                const ByteVec low = interleaved<ByteVec, 0>(x[0], x[1]),
                              high = interleaved<ByteVec, 1>(x[0], x[1]);
                if constexpr (!BYTES) {
                    std::memcpy(first, &low, WIDTH), std::memcpy(second, &high, WIDTH);
                } else {
                    const ByteVec more = interleaved<ByteVec, 0>(x[2], x[3]),
                                  most = interleaved<ByteVec, 1>(x[2], x[3]);
                    const ShortVec all[4] = {
                        interleaved<ShortVec, 0>(low, more), interleaved<ShortVec, 1>(low, more),
                        interleaved<ShortVec, 0>(high, most), interleaved<ShortVec, 1>(high, most)};
                    std::memcpy(first, all, 2 * WIDTH), std::memcpy(second, all + 2, 2 * WIDTH);
                }
            }
    }

    // Round softmax weights times `factor` to integers, and split them into digits.
    void round_weights(const float* weight, const float* factor, int64_t slots, int64_t n) {
        for (int64_t j = 0; j < slots; j += LANES) {
            const IntVec x = round_to_int(load(weight + j) * load(factor + j));
            if constexpr (BYTES) {
                const FewBytes low = __builtin_convertvector(x & 255, FewBytes),
                               high = __builtin_convertvector(x >> 8 & 255, FewBytes);
                std::memcpy(weights[n][0] + j, &low, LANES);
                std::memcpy(weights[n][1] + j, &high, LANES);
            } else {
                const FewShorts all = __builtin_convertvector(x, FewShorts);
                std::memcpy(weights[n][0] + 2 * j, &all, 2 * LANES);
            }
        }
    }

    // to [R][H], PANEL dims of them, += scale * weights * values.
    template <int R>
    NOINLINE void add_products(const uint8_t (*weight)[DIGITS][SLOTS * 2 / DIGITS],
                                      const uint8_t* values, int64_t slots, float scale, float* to) {
        constexpr int N = R * DIGITS;
        IntVec a[N][2];
#pragma GCC unroll 12
        for (int i = 0; i < N; i++) a[i][0] = a[i][1] = IntVec{};
        for (int64_t at = 0; at < 4 * slots / DOT_INPUTS; at += 4, values += DOT_INPUTS * PANEL) {
            const IntVec first = dot_weights(values), second = dot_weights(values + DOT_INPUTS * LANES);
#pragma GCC unroll 12
            for (int i = 0; i < N; i++) {
                const auto x = load_digit((const int8_t*)weight[i / DIGITS][i % DIGITS] + at);
                // of bytes the first operand has no sign
                if (BYTES) add_dot(a[i][0], x, first), add_dot(a[i][1], x, second);
                else add_dot(a[i][0], first, x), add_dot(a[i][1], second, x);
            }
        }
#pragma GCC unroll 12
        for (int m = 0; m < R; m++)
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++) {  // unrolled, or accumulators would stay in memory
                IntVec sum = a[m * DIGITS][half];
                if (BYTES) sum += a[m * DIGITS + DIGITS - 1][half] << 8;
                float* at = to + m * H + half * LANES;
                store(at, fma(to_float(sum), broadcast(scale), load(at)));
            }
    }

    template <int R>
    static void add_products_of(int64_t rows, const uint8_t (*weight)[DIGITS][SLOTS * 2 / DIGITS],
                                const uint8_t* values, int64_t slots, float scale, float* to) {
        if constexpr (R > 1)
            if (rows < R) return add_products_of<R - 1>(rows, weight, values, slots, scale, to);
        add_products<R>(weight, values, slots, scale, to);
    }

   public:
    DotGroup(const float* const* query, int64_t pairs) : query(query), pairs(pairs) {}

    static bool suits(int64_t type) { return type == INT8; }

    // The scores of `count` pairs, from `first` on, with SLOTS keys, from index `place` on.
    void score(int64_t first, int64_t count, float* const* score, int64_t place,
               const char* const* key) {
        alignas(64) float scale[SLOTS], some[ROWS][SLOTS];
        if (!begun) begin();
        pack_keys(key);
        for (int j = 0; j < SLOTS; j++) scale[j] = slot_scale(key[j], H);
        const Matrix none{};
        for (int64_t n = first / ROWS * ROWS; n < first + count; n += ROWS) {
            const int64_t rows = tile_rows(n), from = std::max(first, n),
                          end = std::min(first + count, n + rows);
            const bool whole = end - from == rows;
            const TileInput in{nullptr, 0, digits + n * H * 2, x_scale + n, initial + n * DIGITS, &none};
            float* to = whole ? score[n] + place : some[0];
            const int64_t ldy = !whole ? SLOTS : rows > 1 ? score[n + 1] - score[n] : 0;
            multiply_rows<Int8Dot<LIMBS>, ROWS>(rows, in, (const Int8Dot<LIMBS>*)panel, H,
                                                {(const char*)panel, 0}, scale, nullptr, to, ldy, STORE);
            for (int64_t i = from; !whole && i < end; i++)
                std::memcpy(score[i] + place, some[i - n], sizeof some[0]);
        }
    }

    // Add the weighted values of some slots for `count` pairs, from `first` on. A block's largest scale
    // counts for all its slots, and weights are multiplied by the others' shares of it.
    void add_values(const float* const* weight, int64_t first, int64_t count, int64_t place,
                    const char* const* value, int64_t slots) {
        for (int64_t begin = 0; begin < slots; begin += SLOTS) {
            const int64_t used = std::min<int64_t>(SLOTS, slots - begin),
                          padded = (used + LANES - 1) / LANES * LANES;
            alignas(64) float factor[SLOTS];
            for (int64_t j = 0; j < SLOTS; j++)
                factor[j] = j < used ? slot_scale(value[begin + j], H) : 0;
            FloatVec most = broadcast(1e-30f), broken = {};
            for (int j = 0; j < SLOTS; j += LANES) {
                const FloatVec scale = load(factor + j);
                most = scale > most ? scale : most;
                broken = fma(scale, FloatVec{}, broken);
            }
            const float largest = horizontal_max(most),
                        scale = largest / LARGEST + horizontal_sum(broken);
            for (int j = 0; j < SLOTS; j += LANES)
                store(factor + j, load(factor + j) * (LARGEST / largest));
            pack_values(value + begin, padded);
            for (int64_t n = first; n < first + count; n++)
                round_weights(weight[n] + place + begin, factor, padded, n);
            for (int d = 0; d < H; d += PANEL)
                for (int64_t n = first; n < first + count; n += ROWS)
                    add_products_of<ROWS>(std::min<int64_t>(ROWS, first + count - n), weights + n,
                                          panel + d * SLOTS, padded, scale, out[n] + d);
        }
    }

    // Write the sums [h] of each pair to `to`.
    void finish(float* const* to) const {
        constexpr int GROUP = BYTES ? 4 : 8, SPAN = WIDTH * GROUP / 16;
        for (int64_t n = 0; begun && n < pairs; n++)
            for (int d = 0; d < H; d += GROUP) {
                const int vector = d % WIDTH / SPAN, lane = d % SPAN;
                std::memcpy(to[n] + d / WIDTH * WIDTH + lane / GROUP * 16 + vector * GROUP, out[n] + d,
                            GROUP * sizeof(float));
            }
    }
};
#else
template <int CHUNKS>
using DotGroup = NoGroup<CHUNKS>;
#endif
