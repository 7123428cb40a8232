// Weights as files hold them, row by row, and their packing into panels. Rows are given by their
// addresses, so that several matrices, a permutation or a gated pair become one matrix without a
// copy.
#pragma once

#include "tiles.h"

// Types of stored rows, by their numbers in files of GGUF format. MXFP4_PAIRS is gpt-oss's in
// safetensors: a row is two addresses, of its nibbles and of their scales.
enum Stored : int64_t {
    F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q4_K = 12, Q5_K = 13,
    Q6_K = 14, IQ4_NL = 20, IQ4_XS = 23, BF16 = 30, MXFP4 = 39,
    MXFP4_PAIRS = 1039
};

static const int8_t NONLINEAR[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                     1,    13,   25,  38,  53,  69,  89,  113};
static const int8_t FLOAT4[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

static inline float half_to_float(uint16_t half) {
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7fff;
    uint32_t bits = sign | (rest << 13) + 0x38000000;
    if (rest >= 0x7c00) bits = sign | 0x7f800000 | (rest & 0x3ff) << 13;
    float value;
    if (rest < 0x400) {
        value = (float)rest * 0x1p-24f;
        std::memcpy(&bits, &value, 4), bits |= sign;
    }
    std::memcpy(&value, &bits, 4);
    return value;
}

static inline float bfloat16_to_float(uint16_t number) {
    const uint32_t bits = (uint32_t)number << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

static inline uint16_t read_16(const uint8_t* at) {
    uint16_t value;
    std::memcpy(&value, at, 2);
    return value;
}

// A block of quantised weights, taken apart: weight i is scale * (integer - zero), or scale *
// integer + minimum.
struct Block {
    uint8_t integer[256];  // nibbles, or signed bytes
    uint16_t scale, least;  // float16 or bfloat16
    int8_t number[16], least_number[16];  // of the groups, with SUPER and SUPER_MIN
};

// A type of blocks.
struct BlockType {
    int64_t size, bytes, group;  // weights and bytes of a block, weights of a group
    Kind kind;
    Scales scales;
    int64_t zero;                      // the nibble of a weight of 0
    const int8_t* codes;

    bool has_min() const { return scales == HALF_MIN || scales == SUPER_MIN; }
    // of an output in panels, for a group: its integers, and its scales
    int64_t integer_bytes() const { return kind <= CODES ? group / 2 : group; }
    int64_t scale_bytes() const { return (scales >= SUPER ? 1 : 2) * (has_min() ? 2 : 1); }
    // the numbers in float16 that a block's groups share; and all of a block
    int64_t shared_bytes() const { return scales < SUPER ? 0 : has_min() ? 4 : 2; }
    int64_t packed_bytes() const {
        return shared_bytes() + size / group * (integer_bytes() + scale_bytes());
    }
};

static const BlockType* block_type(int64_t type) {
    static const BlockType q4_0{32, 18, 32, NIBBLES, HALF, 8, nullptr},
        q4_1{32, 20, 32, NIBBLES_MIN, HALF_MIN, 0, nullptr},
        q5_0{32, 22, 32, BYTES32, HALF, 0, nullptr}, q5_1{32, 24, 32, BYTES32_MIN, HALF_MIN, 0, nullptr},
        q8_0{32, 34, 32, BYTES32, HALF, 0, nullptr},
        q4_k{256, 144, 32, NIBBLES_MIN, SUPER_MIN, 0, nullptr},
        q5_k{256, 176, 32, BYTES32_MIN, SUPER_MIN, 0, nullptr},
        q6_k{256, 210, 16, BYTES16, SUPER, 0, nullptr},
        iq4_nl{32, 18, 32, CODES, HALF, 0, NONLINEAR},
        iq4_xs{256, 136, 32, CODES, SUPER, 0, NONLINEAR},
        mxfp4{32, 17, 32, CODES, BFLOAT, 0, FLOAT4};
    switch (type) {
        case Q4_0: return &q4_0;
        case Q4_1: return &q4_1;
        case Q5_0: return &q5_0;
        case Q5_1: return &q5_1;
        case Q8_0: return &q8_0;
        case Q4_K: return &q4_k;
        case Q5_K: return &q5_k;
        case Q6_K: return &q6_k;
        case IQ4_NL: return &iq4_nl;
        case IQ4_XS: return &iq4_xs;
        case MXFP4:
        case MXFP4_PAIRS: return &mxfp4;
    }
    return nullptr;
}

// 16 bytes: the low nibbles come first, then the high ones.
static inline void split_nibbles(const uint8_t* from, int count, uint8_t* to) {
    for (int i = 0; i < count; i++) to[i] = from[i] & 15, to[i + count] = from[i] >> 4;
}

// The 6-bit scales and minima of Q4_K and Q5_K.
static inline void split_scales(const uint8_t* from, Block& block) {
    for (int j = 0; j < 4; j++) {
        block.number[j] = from[j] & 63, block.least_number[j] = from[j + 4] & 63;
        block.number[j + 4] = (from[j + 8] & 15) | from[j] >> 6 << 4;
        block.least_number[j + 4] = from[j + 8] >> 4 | from[j + 4] >> 6 << 4;
    }
}

// 2^(exponent - 128) in bfloat16: half of MXFP4's scale, as its codes are doubled.
static inline uint16_t half_scale(int exponent) {
    return exponent >= 2 ? (exponent - 1) << 7 : 0x20 << exponent;
}

static void take_apart(int64_t type, const uint8_t* from, Block& block) {
    uint8_t* to = block.integer;
    block.scale = read_16(from);
    switch (type) {
        case Q4_0:
        case IQ4_NL: split_nibbles(from + 2, 16, to); break;
        case MXFP4: block.scale = half_scale(from[0]), split_nibbles(from + 1, 16, to); break;
        case Q4_1: block.least = read_16(from + 2), split_nibbles(from + 4, 16, to); break;
        case Q5_0:
        case Q5_1: {
            const bool has_min = type == Q5_1;
            uint32_t high;
            if (has_min) block.least = read_16(from + 2);
            from += has_min ? 4 : 2;
            std::memcpy(&high, from, 4);
            split_nibbles(from + 4, 16, to);
            for (int i = 0; i < 32; i++) to[i] = (to[i] | (high >> i & 1) << 4) - (has_min ? 0 : 16);
            break;
        }
        case Q8_0: std::memcpy(to, from + 2, 32); break;
        case Q4_K:
            block.least = read_16(from + 2), split_scales(from + 4, block);
            for (int j = 0; j < 4; j++) split_nibbles(from + 16 + 32 * j, 32, to + 64 * j);
            break;
        case Q5_K:
            block.least = read_16(from + 2), split_scales(from + 4, block);
            for (int j = 0; j < 4; j++) split_nibbles(from + 48 + 32 * j, 32, to + 64 * j);
            for (int i = 0; i < 256; i++) to[i] |= (from[16 + i % 32] >> i / 32 & 1) << 4;
            break;
        case Q6_K:
            for (int n = 0; n < 2; n++)
                for (int i = 0; i < 32; i++) {
                    const uint8_t *low = from + 64 * n, high = from[128 + 32 * n + i];
                    uint8_t* at = to + 128 * n + i;
                    at[0] = ((low[i] & 15) | (high & 3) << 4) - 32;
                    at[32] = ((low[i + 32] & 15) | (high >> 2 & 3) << 4) - 32;
                    at[64] = (low[i] >> 4 | (high >> 4 & 3) << 4) - 32;
                    at[96] = (low[i + 32] >> 4 | high >> 6 << 4) - 32;
                }
            std::memcpy(block.number, from + 192, 16);
            block.scale = read_16(from + 208);
            break;
        case IQ4_XS: {
            const uint16_t high = read_16(from + 2);
            for (int j = 0; j < 8; j++) {
                block.number[j] =
                    ((from[4 + j / 2] >> 4 * (j % 2) & 15) | (high >> 2 * j & 3) << 4) - 32;
                split_nibbles(from + 8 + 16 * j, 16, to + 32 * j);
            }
            break;
        }
    }
}

// The blocks of a row, one after the other.
struct BlockRow {
    int64_t type;
    const uint8_t *from, *scales;

    BlockRow(int64_t type, const void* row) : type(type), from((const uint8_t*)row), scales(nullptr) {
        if (type != MXFP4_PAIRS) return;
        from = ((const uint8_t* const*)row)[0];
        scales = ((const uint8_t* const*)row)[1];
    }

    void next(Block& block) {
        if (!scales) {
            take_apart(type, from, block), from += block_type(type)->bytes;
            return;
        }
        block.scale = half_scale(*scales++);
        for (int i = 0; i < 32; i++) block.integer[i] = from[i / 2] >> i % 2 * 4 & 15;
        from += 16;
    }
};

// A row of `count` weights as floats.
static void read_row(int64_t type, const void* row, int64_t count, float* to) {
    const uint8_t* from = (const uint8_t*)row;
    if (type == F32) {
        std::memcpy(to, from, count * sizeof(float));
    } else if (type == F16) {
        for (int64_t i = 0; i < count; i++) to[i] = half_to_float(read_16(from + 2 * i));
    } else if (type == BF16) {
        for (int64_t i = 0; i < count; i++) to[i] = bfloat16_to_float(read_16(from + 2 * i));
    } else {
        const BlockType& of = *block_type(type);
        Block block;
        BlockRow blocks(type, row);
        for (int64_t k = 0; k < count; k += of.size) {
            blocks.next(block);
            int8_t integer[256];
            if (of.codes)
                for (int64_t i = 0; i < of.size; i++) integer[i] = of.codes[block.integer[i]];
            else
                for (int64_t i = 0; i < of.size; i++) integer[i] = block.integer[i] - of.zero;
            const float shared = of.scales == BFLOAT ? bfloat16_to_float(block.scale)
                                                     : half_to_float(block.scale);
            for (int64_t g = 0; g < of.size / of.group; g++) {
                float scale = shared, least = 0;
                if (of.scales >= SUPER) scale *= block.number[g];
                if (of.scales == HALF_MIN) least = half_to_float(block.least);
                if (of.scales == SUPER_MIN)
                    least = -half_to_float(block.least) * block.least_number[g];
                for (int64_t i = g * of.group; i < (g + 1) * of.group; i++)
                    to[k + i] = scale * integer[i] + least;
            }
        }
    }
}

#if !defined(NO_DOT)
// Store the integers of a group of output j, `inputs` of them side by side: bytes, or two nibbles in
// a byte.
static inline void store_group(const uint8_t* integer, int64_t group, bool nibbles, int64_t inputs,
                               int64_t j, uint8_t* to) {
    for (int64_t k = 0; k < group; k += inputs * (nibbles ? 2 : 1), to += inputs * PANEL)
        for (int64_t i = 0; i < inputs; i++)
            to[j * inputs + i] =
                nibbles ? integer[k + i] | integer[k + inputs + i] << 4 : integer[k + i];
}

// A panel of grouped weights from rows of the same form.
static void pack_blocks(int64_t type, const int64_t* rows, int64_t inputs, int64_t together,
                        uint8_t* panel) {
    const BlockType& of = *block_type(type);
    const bool nibbles = of.kind <= CODES, super = of.scales >= SUPER, has_min = of.has_min();
    const int64_t integers = of.integer_bytes() * PANEL,
                  group_bytes = integers + of.scale_bytes() * PANEL,
                  shared_bytes = of.shared_bytes() * PANEL, block_bytes = of.packed_bytes() * PANEL;
    Block block;
    for (int64_t j = 0; j < PANEL; j++) {
        const bool is_there = rows[j] != 0;
        BlockRow blocks(is_there ? type : F32, (const void*)rows[j]);
        uint8_t* to = panel;
        for (int64_t k = 0; k < inputs; k += of.size, to += block_bytes) {
            if (is_there) blocks.next(block);
            else std::memset(&block, 0, sizeof block);
            if (!nibbles && !has_min)
                for (int64_t i = 0; i < of.size; i++) block.integer[i] += INT8_ZERO;
            const auto put = [&](uint8_t* at, uint16_t number) { std::memcpy(at + 2 * j, &number, 2); };
            if (super) put(to, block.scale);
            if (super && has_min) put(to + 2 * PANEL, block.least);
            uint8_t* group = to + shared_bytes;
            for (int64_t g = 0; g < of.size / of.group; g++, group += group_bytes) {
                store_group(block.integer + g * of.group, of.group, nibbles, together, j, group);
                uint8_t* scales = group + integers;
                if (super) {
                    scales[j] = block.number[g];
                    if (has_min) scales[PANEL + j] = block.least_number[g];
                } else {
                    put(scales, block.scale);
                    if (has_min) put(scales + 2 * PANEL, block.least);
                }
            }
        }
    }
}

// Shares of the largest weight of a group of int4 that are tried for its scale, of the one without
// clipping; the least squared error is taken.
static constexpr float CLIPPING[] = {1, 0.95, 0.9, 0.85, 0.8, 0.75};

// A panel of int4: nibbles plus 8, and scales in bfloat16.
static void pack_int4(const float* w, int64_t inputs, int64_t together, uint8_t* panel) {
    constexpr int64_t GROUP = 32;
    for (int64_t k = 0; k < inputs; k += GROUP, panel += GROUP / 2 * PANEL + 2 * PANEL)
        for (int64_t j = 0; j < PANEL; j++) {
            const float* x = w + j * inputs + k;
            float largest = 0, broken = 0;  // signed: -8 exists, 8 does not
            for (int64_t i = 0; i < GROUP; i++) {
                largest = std::fabs(x[i]) > std::fabs(largest) ? x[i] : largest;
                broken += x[i] * 0;
            }
            float least = INFINITY;
            uint16_t best = to_bfloat16(broken);
            uint8_t integer[GROUP], tried[GROUP];
            std::memset(integer, 8, GROUP);
            for (float share : CLIPPING) {
                const uint16_t rounded = to_bfloat16(largest / -8 * share);
                const float scale = bfloat16_to_float(rounded), inverse = scale ? scale : 1;
                float error = 0;
                for (int64_t i = 0; i < GROUP; i++) {
                    float q = std::nearbyint(x[i] / inverse);
                    q = q < -8 ? -8 : q > 7 ? 7 : q;
                    const float off = q * scale - x[i];
                    error += off * off, tried[i] = (uint8_t)(int)(q + 8);
                }
                if (error < least)
                    least = error, best = rounded, std::memcpy(integer, tried, GROUP);
            }
            store_group(integer, GROUP, true, together, j, panel);
            std::memcpy(panel + GROUP / 2 * PANEL + 2 * j, &best, 2);
        }
}
#else
static void pack_blocks(int64_t, const int64_t*, int64_t, int64_t, uint8_t*) {}
static void pack_int4(const float*, int64_t, int64_t, uint8_t*) {}
#endif

// A panel of int8 for dots or for floats; the scales of its outputs.
static void pack_int8(const float* w, int64_t inputs, bool dots, uint8_t* panel, float* scale) {
    for (int64_t j = 0; j < PANEL; j++) {
        const float* x = w + j * inputs;
        float largest = 1e-30f;
        for (int64_t k = 0; k < inputs; k++)
            largest = std::fabs(x[k]) > largest || x[k] != x[k] ? std::fabs(x[k]) : largest;
        scale[j] = largest / 127;
        const int64_t together = dots ? DOT_INPUTS : 1, zero = dots ? INT8_ZERO : 0;
        for (int64_t k = 0; k < inputs; k++)
            panel[(k / together * PANEL + j) * together + k % together] =
                (uint8_t)((int64_t)std::nearbyint(x[k] / scale[j]) + zero);
    }
}

// Pack `outputs` rows (null: zeros) into panels of a kind; scale [outputs] of INT8 and INT8_DOT.
static void pack_rows(const Matrix& w, int64_t type, const int64_t* rows, uint8_t* panels,
                      float* scale) {
    const int64_t K = w.inputs;
    const bool grouped = w.kind > INT8_DOT;
    const BlockType* of = block_type(type);  // whose form the matrix has, unless it is rounded
    const bool own = grouped && of && of->kind == w.kind && of->scales == w.scales;
    // inputs side by side
    const int64_t together = w.kind != NIBBLES && w.kind != NIBBLES_MIN ? DOT_INPUTS
                             : w.limbs == 2                              ? PanelFormat<Nibbles<2>>::inputs
                                                                         : PanelFormat<Nibbles<3>>::inputs;
#pragma omp for schedule(dynamic)
    for (int64_t n = 0; n < w.outputs / PANEL; n++) {
        uint8_t* panel = panels + n * w.panel_bytes;
        if (own) {
            pack_blocks(type, rows + n * PANEL, K, together, panel);
            continue;
        }
        static thread_local std::vector<float> floats;
        floats.assign(PANEL * K, 0);
        for (int64_t j = 0; j < PANEL; j++)
            if (rows[n * PANEL + j])
                read_row(type, (const void*)rows[n * PANEL + j], K, &floats[j * K]);
        const float* x = floats.data();
        if (grouped) {
            pack_int4(x, K, together, panel);
        } else if (w.kind == INT8 || w.kind == INT8_DOT) {
            pack_int8(x, K, w.kind == INT8_DOT, panel, scale + n * PANEL);
        } else if (w.kind == BFLOAT16) {
            for (int64_t j = 0; j < PANEL; j++)
                for (int64_t k = 0; k < K; k++) {
                    const uint16_t number = to_bfloat16(x[j * K + k]);
                    std::memcpy(panel + ((k / 2 * PANEL + j) * 2 + k % 2) * 2, &number, 2);
                }
        } else if (w.kind == FLOAT16) {
            for (int64_t j = 0; j < PANEL; j++)
                for (int64_t k = 0; rows[n * PANEL + j] && k < K; k++)
                    std::memcpy(panel + (k * PANEL + j) * 2, (const uint16_t*)rows[n * PANEL + j] + k, 2);
        } else {
            float* to = (float*)panel;
            for (int64_t j = 0; j < PANEL; j++)
                for (int64_t k = 0; k < K; k++) to[k * PANEL + j] = x[j * K + k];
        }
    }
}
