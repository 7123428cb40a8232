// Attention on AMX tiles, over keys and values in bfloat16.
//
// Queries and weights are split into three parts in bfloat16 (amx.h), so products are as exact as
// in float32. Tiles multiply whole blocks of 32 of a query's visible slots, from its first one on,
// and vectors the rest. So the bits of a token do not depend on the others.
#pragma once

#include "amx.h"

// In place of a group whose instructions the processor lacks.
template <int CHUNKS>
struct NoGroup {
    NoGroup(const float* const*, int64_t) {}
    static constexpr bool suits(int64_t) { return false; }
    void score(int64_t, int64_t, float* const*, int64_t, const char* const*) {}
    void add_values(const float* const*, int64_t, int64_t, int64_t, const char* const*, int64_t) {}
    void finish(float* const*) const {}
};

#if defined(HAS_TILES)
// Rows of a 16 x 16 transpose: row(i) says where row i goes, if bit i is set in `wanted`.
template <class Row>
static inline void transpose(const float (*from)[16], Row row, uint32_t wanted = 0xffff) {
    const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    __m512 a[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_ps(from[i]);
#pragma GCC unroll 4
    for (int size = 8; size; size /= 2) {  // of blocks, two of which change places
        const __m512i first = _mm512_mask_add_epi32(
                          lane, _mm512_test_epi32_mask(lane, _mm512_set1_epi32(size)), lane,
                          _mm512_set1_epi32(16 - size)),
                      second = _mm512_add_epi32(first, _mm512_set1_epi32(size));
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++)
            if (!(i & size)) {
                const __m512 upper = a[i], lower = a[i + size];
                a[i] = _mm512_permutex2var_ps(upper, first, lower);
                a[i + size] = _mm512_permutex2var_ps(upper, second, lower);
            }
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++)
        if (wanted >> i & 1) _mm512_storeu_ps(row(i), a[i]);
}

// The tiles of a group of (query, head) pairs, h = CHUNKS x 16.
template <int CHUNKS>
class TileGroup {
    static constexpr int H = CHUNKS * LANES, STEPS = H / 32, PARTS = 3, SLOTS = 32;

    const float* const* query;
    int64_t pairs, rows = 0;  // that the tiles are configured for; 0: they are not used yet
    // [tile of pairs][32 dims][part]: a row for two dims, a column for a pair
    alignas(64) float queries[2][STEPS][PARTS][16][16];
    alignas(64) float out[MAX_PAIRS][H];  // sums of values, dims in the order of `add_values`

    void configure(int64_t wanted) {
        if (rows == wanted) return;
        const TileConfig config(1, rows = wanted);
        asm volatile("" ::"r"(&config) : "memory");  // the compiler does not know that it is read
        _tile_loadconfig(&config);
    }

    // Split the queries when they are first needed: short texts have no block of 32.
    void begin() {
        alignas(64) float parts[PARTS][16][16];
        for (int64_t tile = 0; tile * 16 < pairs; tile++)
            for (int step = 0; step < STEPS; step++) {
                for (int64_t n = 0; n < 16; n++) {  // the last pair fills the tile
                    char* const to[PARTS] = {(char*)parts[0][n], (char*)parts[1][n],
                                             (char*)parts[2][n]};
                    split_into_bf16<PARTS>(query[std::min(tile * 16 + n, pairs - 1)] + step * 32,
                                           32, to, 0);
                }
                for (int part = 0; part < PARTS; part++)
                    transpose(parts[part], [&](int i) { return queries[tile][step][part][i]; });
            }
        std::memset(out, 0, pairs * sizeof out[0]);
    }

    // 32 keys, `stride` bytes apart, times the queries of a tile.
    void multiply_keys(const char* key, int64_t stride, int64_t tile, float (*sums)[16]) const {
        Prefetch ahead{key + 2 * SLOTS * stride, 2 * TILE_ROW_BYTES};
        _tile_zero(0);
        _tile_zero(1);
        for (int step = 0; step < STEPS; step++) {
            _tile_loadd(4, key + step * TILE_ROW_BYTES, stride);
            _tile_loadd(5, key + step * TILE_ROW_BYTES + 16 * stride, stride);
            for (int part = PARTS - 1; part >= 0; part--) {
                for (int i = 0; i < 6; i++) ahead.issue();  // a third of 32 cache lines
                _tile_loadd(6, queries[tile][step][part], TILE_ROW_BYTES);
                _tile_dpbf16ps(0, 4, 6);
                _tile_dpbf16ps(1, 5, 6);
            }
        }
        _tile_stored(0, sums, TILE_ROW_BYTES);
        _tile_stored(1, sums + 16, TILE_ROW_BYTES);
    }

    // sums [row][h], two tiles of them, += weights [step][part] * values [step][tile].
    static void multiply_values(const char (*weight)[PARTS][16][TILE_ROW_BYTES],
                                const char (*values)[CHUNKS][16][TILE_ROW_BYTES], int64_t steps,
                                int tile, float* sums) {
        _tile_loadd(0, sums, H * sizeof(float));
        _tile_loadd(1, sums + LANES, H * sizeof(float));
        for (int64_t step = 0; step < steps; step++)
            for (int part = PARTS - 1; part >= 0; part--) {
                _tile_loadd(7, weight[step][part], TILE_ROW_BYTES);
                _tile_loadd(6, values[step][tile], TILE_ROW_BYTES);
                _tile_dpbf16ps(0, 7, 6);
                _tile_loadd(6, values[step][tile + 1], TILE_ROW_BYTES);
                _tile_dpbf16ps(1, 7, 6);
            }
        _tile_stored(0, sums, H * sizeof(float));
        _tile_stored(1, sums + LANES, H * sizeof(float));
    }

   public:
    TileGroup(const float* const* query, int64_t pairs) : query(query), pairs(pairs) {}

    static bool suits(int64_t type) { return has_amx && H % 32 == 0 && type == BFLOAT16; }

    // The scores of `count` pairs, from `first` on, with 32 keys, from index `place` on.
    void score(int64_t first, int64_t count, float* const* score, int64_t place,
               const char* const* key) {
        alignas(64) char room[SLOTS][H * 2];
        alignas(64) float sums[SLOTS][16];
        const char* keys = key[0];
        int64_t stride = key[1] - keys;
        if (key[SLOTS - 1] - keys != (SLOTS - 1) * stride) {  // not one after the other
            for (int j = 0; j < SLOTS; j++) std::memcpy(room[j], key[j], H * 2);
            keys = room[0], stride = H * 2;
        }
        if (!rows) begin();
        configure(16);
        for (int64_t tile = first / 16; tile * 16 < first + count; tile++) {
            asm volatile("" ::: "memory");  // the compiler does not know what tile loads read
            multiply_keys(keys, stride, tile, sums);
            const int64_t from = std::max<int64_t>(first - tile * 16, 0),
                          end = std::min<int64_t>(first + count - tile * 16, 16);
            for (int half = 0; half < SLOTS; half += 16)
                transpose(
                    sums + half, [&](int i) { return score[tile * 16 + i] + place + half; },
                    (1u << end) - (1u << from));
        }
    }

    // Add the weighted values of 32 or 64 slots for `count` pairs, from `first` on. Slots are
    // interleaved in twos within each eight dims, so of 32 dims the first tile has 0-3, 8-11, 16-19
    // and 24-27, and the second one the others.
    void add_values(const float* const* weights, int64_t first, int64_t count, int64_t place,
                    const char* const* value, int64_t slots) {
        alignas(64) char weight[2][PARTS][16][TILE_ROW_BYTES],
            values[2][CHUNKS][16][TILE_ROW_BYTES];
        for (int64_t j = 0; j < slots; j += 2)
            for (int d = 0; d < CHUNKS; d += 2) {
                const char *even = value[j] + d * 32, *odd = value[j + 1] + d * 32;
                __builtin_prefetch(even + 2 * SLOTS * H * 2);
                __builtin_prefetch(odd + 2 * SLOTS * H * 2);
                const __m512i a = _mm512_loadu_si512(even), b = _mm512_loadu_si512(odd);
                char* to = values[j / SLOTS][d][j % SLOTS / 2];
                _mm512_store_si512(to, _mm512_unpacklo_epi16(a, b));
                _mm512_store_si512(to + TILE_BYTES, _mm512_unpackhi_epi16(a, b));
            }
        const int64_t tiles = (count + 15) / 16, most = (count + tiles - 1) / tiles;
        for (int64_t n = first; n < first + count; n += most) {
            const int64_t wanted = std::min(most, first + count - n);
            for (int64_t i = 0; i < wanted; i++) {
                char* const to[PARTS] = {weight[0][0][i], weight[0][1][i], weight[0][2][i]};
                split_into_bf16<PARTS>(weights[n + i] + place, slots, to, PARTS * TILE_BYTES);
            }
            configure(wanted);
            asm volatile("" ::: "memory");
            for (int d = 0; d < CHUNKS; d += 2)
                multiply_values(weight, values, slots / SLOTS, d, out[n] + d * LANES);
        }
    }

    // Add the sums [h] of each pair to `to`.
    void finish(float* const* to) const {
        if (!rows) return;
        for (int64_t n = 0; n < pairs; n++)
            for (int d = 0; d < H; d += 32) {
                const FloatVec a = load(out[n] + d), b = load(out[n] + d + 16);
                float* at = to[n] + d;
                store(at, load(at) + __builtin_shufflevector(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5,
                                                             6, 7, 20, 21, 22, 23));
                store(at + 16, load(at + 16) + __builtin_shufflevector(a, b, 8, 9, 10, 11, 24, 25, 26,
                                                                       27, 12, 13, 14, 15, 28, 29,
                                                                       30, 31));
            }
        _tile_release();
    }
};
#else
template <int CHUNKS>
using TileGroup = NoGroup<CHUNKS>;
#endif
