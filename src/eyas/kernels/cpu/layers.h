// Attention over a KV cache, and whole decoder layers.
#pragma once

#include "dot_attention.h"
#include "states.h"

// RoPE of the first r floats of a head, in LLaMA's layout of halves
static inline void apply_rotary(float* x, const float* cosine, const float* sine, int64_t r) {
    for (int64_t i = 0; i < r / 2; i++) {
        float a = x[i], b = x[i + r / 2];
        x[i] = fma(a, cosine[i], -(b * sine[i]));
        x[i + r / 2] = fma(b, cosine[i + r / 2], a * sine[i + r / 2]);
    }
}

// x becomes softcap * tanh(x / softcap)
static inline void cap(float* x, int64_t count, float softcap) {
    for (int64_t i = 0; i < count; i += LANES)
        store(x + i, softcap * tanh_vec(load(x + i) / softcap));
}

// x *= sigmoid(gate)
static inline void apply_gates(const float* gate, int64_t count, float* x) {
    for (int64_t i = 0; i < count; i += LANES)
        store(x + i, load(x + i) / (1.0f + exp_vec(-load(gate + i))));
}

// Keys or values [h] of a head as the cache has them, rounded to its type. Of numbers that are not finite
// the scale is NaN.
static inline void write_slot(char* to, int64_t type, const float* x, int64_t h) {
    if (type == FLOAT32) {
        std::memcpy(to, x, h * sizeof(float));
    } else if (type == BFLOAT16) {
        for (int64_t d = 0; d < h; d++) {
            const uint16_t number = to_bfloat16(x[d]);
            std::memcpy(to + 2 * d, &number, sizeof number);
        }
    } else {
        FloatVec sizes = broadcast(1e-30f), broken = {};
        for (int64_t d = 0; d < h; d += LANES) {
            const FloatVec value = load(x + d), size = value < 0 ? -value : value;
            sizes = size > sizes ? size : sizes;
            broken = fma(value, FloatVec{}, broken);
        }
        const float largest = horizontal_max(sizes), nothing = horizontal_sum(broken),
                    scale = largest / 127 + nothing, factor = nothing == 0 ? 127 / largest : 0;
        for (int64_t d = 0; d < h; d++)
            to[d] = (char)(nothing == 0 ? (int)std::nearbyint(x[d] * factor) : 0);
        std::memcpy(to + h, &scale, sizeof scale);
    }
}

// LANES numbers of a slot as floats, from number d on; of INT8 without their scale.
template <int64_t TYPE>
INLINE FloatVec load_slot(const char* slot, int64_t d) {
    if (TYPE == FLOAT32) return load((const float*)slot + d);
    if (TYPE == BFLOAT16) return load_bfloat16((const uint8_t*)slot + 2 * d);
    return load((const int8_t*)slot + d);
}

// Slots of a cache as floats: where they are, or widened; up to a multiple of LANES.
template <int CHUNKS>
struct Widened {
    const float* const* at;
    const float* rows[4 * LANES];
    alignas(64) float room[4 * LANES][CHUNKS * LANES];

    template <int64_t TYPE>
    void fill(const char* const* from, int64_t count) {
        at = rows;
        for (int64_t j = 0; j < (count + LANES - 1) / LANES * LANES; j++) {
            const FloatVec scale = broadcast(TYPE == INT8 ? slot_scale(from[j], CHUNKS * LANES) : 1);
            rows[j] = room[j];
#pragma GCC unroll 16
            for (int d = 0; d < CHUNKS * LANES; d += LANES) {
                const FloatVec x = load_slot<TYPE>(from[j], d);
                store(room[j] + d, TYPE == INT8 ? x * scale : x);
            }
        }
    }

    Widened(const char* const* from, int64_t count, int64_t type) : at((const float* const*)from) {
        if (type == BFLOAT16) fill<BFLOAT16>(from, count);
        if (type == INT8) fill<INT8>(from, count);
    }
};

// For one row's new nodes and one key-value head: norm and rotate queries and keys, and store keys
// and values in the cache.
static void store_keys_values(const Layer& layer, const Shape& s, const Pass& p, const KVCache& c,
                              int64_t r, int64_t k) {
    const int64_t h = s.head_dim, stride = s.stride, group_heads = s.heads / s.kv_heads,
                  key = s.keys() + k * h, value = key + s.kv_heads * h;
    for (int64_t q = 0; q < p.count(r); q++) {
        const int64_t m = p.first(r) + q, slot = p.length[r] + p.nodes - p.queries + q,
                      offset = c.row[r] + k * c.head + slot * c.slot,
                      angle = layer.rope * p.table + p.position[r * p.queries + q] * p.angles;
        for (int64_t i = 0; i < group_heads + !layer.borrows; i++) {
            float* x = p.qkv + m * stride + (i < group_heads ? (k * group_heads + i) * h : key);
            const float* norm = i < group_heads ? layer.q_norm : layer.k_norm;
            if (norm && s.head_norm == BEFORE_ROPE) rms_norm(x, norm, h, s.eps, x);
            const int64_t at = angle + (i < group_heads && s.query_table ? p.table : 0);
            if (layer.rope >= 0) apply_rotary(x, p.cosine + at, p.sine + at, s.rotary);
            if (norm && s.head_norm == AFTER_ROPE) rms_norm(x, norm, h, s.eps, x);
            if (i < group_heads)
                for (int64_t d = 0; d < h; d++) x[d] *= s.scale;
        }
        if (layer.borrows) continue;
        float* values = p.qkv + m * stride + value;
        if (layer.v_norm) rms_norm(values, layer.v_norm, h, s.eps, values);
        write_slot(c.keys + offset, c.type, p.qkv + m * stride + key, h);
        write_slot(c.values + offset, c.type, values, h);
    }
}

// The scores of COUNT queries [h], already scaled, with LANES / COUNT keys: all of the first query,
// then all of the second.
template <int CHUNKS, int COUNT>
NOINLINE FloatVec dot_products(const float* const* query, const float* const* key) {
    constexpr int KEYS = LANES / COUNT;
    FloatVec a[LANES];
#pragma GCC unroll 16
    for (int j = 0; j < KEYS; j++) {
#pragma GCC unroll 16
        for (int d = 0; d < CHUNKS; d++) {
            FloatVec part = load(key[j] + d * LANES);
#pragma GCC unroll 2
            for (int i = 0; i < COUNT; i++) {
                FloatVec& product = a[i * KEYS + j];
                product =
                    d ? fma(load(query[i] + d * LANES), part, product) : load(query[i]) * part;
            }
        }
    }
    return horizontal_sums(a);
}

// out [COUNT][h] += the weighted values, in order; CHUNKS vectors from the float `begin` on.
template <int CHUNKS, int COUNT>
NOINLINE void accumulate_values(const float* const* weights, int64_t place,
                                const float* const* value, int64_t count, float* const* out,
                                int64_t begin) {
    FloatVec a[COUNT][CHUNKS];
#pragma GCC unroll 16
    for (int i = 0; i < COUNT; i++)
#pragma GCC unroll 16
        for (int d = 0; d < CHUNKS; d++) a[i][d] = load(out[i] + begin + d * LANES);
    for (int64_t j = 0; j < count; j++) {
        FloatVec weight[COUNT];
#pragma GCC unroll 16
        for (int i = 0; i < COUNT; i++) weight[i] = broadcast(weights[i][place + j]);
#pragma GCC unroll 16
        for (int d = 0; d < CHUNKS; d++) {
            FloatVec part = load(value[j] + begin + d * LANES);
#pragma GCC unroll 16
            for (int i = 0; i < COUNT; i++) a[i][d] = fma(weight[i], part, a[i][d]);
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < COUNT; i++)
#pragma GCC unroll 16
        for (int d = 0; d < CHUNKS; d++) store(out[i] + begin + d * LANES, a[i][d]);
}

// Softmax without its division: scores become exp(score - max), zero behind `count` up to the next
// multiple of LANES. Returns their sum, with the sink's; -INFINITY: there is none.
static inline float exp_inplace(float* scores, int64_t count, float sink) {
    for (int64_t i = count; i % LANES; i++) scores[i] = -INFINITY;
    FloatVec largest = load(scores), total = {};
    for (int64_t i = LANES; i < count; i += LANES)
        largest = load(scores + i) > largest ? load(scores + i) : largest;
    float top = horizontal_max(largest);
    top = sink > top ? sink : top;
    for (int64_t i = 0; i < count; i += LANES) {
        FloatVec e = exp_vec(load(scores + i) - top);
        store(scores + i, e);
        total += e;
    }
    return horizontal_sum(total) + exp_vec(broadcast(sink - top))[0];
}

// Attention of some queries of a row, for some heads that share keys: (query, head) pairs. Keys and
// values are read a few slots at a time and serve all pairs while they are in the cache.
//
// A query's visible slots, in order: the committed ones from `begin` on, then its nodes. The
// leading slots that all queries see (most of a prompt) are shared: those before `shared`. The
// others are read for each query.
template <int CHUNKS>
struct QueryGroup {
    const Shape& s;
    const Pass& p;
    const float* sinks;         // of all heads, or null
    const char *keys, *values;  // of the row and the key-value head
    int64_t type;
    const uint8_t* visible;
    int64_t stride, row, first, queries, head, heads, begin, shared;
    float* scores;  // [pair][score_stride]

    const uint8_t* visible_to(int64_t n) const {
        return visible + (row * p.queries + first + n) * p.nodes;
    }

    bool tiled() const { return TileGroup<CHUNKS>::suits(type); }
    bool dotted() const { return DotGroup<CHUNKS>::suits(type); }
    bool panelled() const { return !tiled() && PanelGroup<CHUNKS>::suits(type); }

    // a multiple of what is read at once from `begin` on; the rest is read with the other slots
    int64_t shared_slots() const {
        int64_t nodes = p.nodes;
        for (int64_t n = 0; n < queries; n++)
            if (const void* hidden = std::memchr(visible_to(n), 0, nodes))
                nodes = (const uint8_t*)hidden - visible_to(n);
        const int64_t unit = type == FLOAT32 ? LANES : 2 * LANES;
        return begin + (p.length[row] + nodes - begin) / unit * unit;
    }

    // act(index of the first score, pointers to keys or values, how many), at most BLOCK at a time
    template <int BLOCK, class Do>
    void for_shared_slots(const char* from, Do act) const {
        const char* at[BLOCK];
        for (int64_t slot = begin; slot < shared; slot += BLOCK) {
            const int64_t count = std::min<int64_t>(BLOCK, shared - slot);
            for (int64_t j = 0; j < count; j++) at[j] = from + (slot + j) * stride;
            act(slot - begin, at, count);
        }
    }

    // The same for the other slots that query n sees. Returns how many slots it sees in all.
    template <class Do>
    int64_t for_other_slots(int64_t n, const char* from, Do act) const {
        const char* at[2 * LANES];
        const uint8_t* visible_nodes = visible_to(n);
        int64_t place = shared - begin, count = 0;
        auto pass = [&] {
            for (int64_t j = count; j < 2 * LANES; j++) at[j] = at[0];
            act(place, at, count);
            place += count, count = 0;
        };
        auto add = [&](int64_t slot) {
            at[count++] = from + slot * stride;
            if (count == 2 * LANES) pass();
        };
        for (int64_t slot = shared; slot < p.length[row]; slot++) add(slot);
        for (int64_t t = std::max<int64_t>(shared - p.length[row], 0); t < p.nodes; t++) {
            if (uint64_t eight;
                t + 8 <= p.nodes && (std::memcpy(&eight, visible_nodes + t, 8), !eight)) {
                t += 7;
                continue;
            }
            if (visible_nodes[t]) add(p.length[row] + t);
        }
        if (count) pass();
        return place;
    }

    // The scores of `pairs` queries with LANES keys, from index `place` on. Two queries read a key
    // together where registers suffice.
    static void score(const float* const* query, float* const* score, int64_t pairs, int64_t place,
                      const float* const* key) {
        constexpr int TOGETHER = CHUNKS <= 4 || LANES < 16 ? 2 : 1, KEYS = LANES / TOGETHER;
        int64_t n = 0;
        for (; n + TOGETHER <= pairs; n += TOGETHER)
            for (int first = 0; first < LANES; first += KEYS) {
                FloatVec products = dot_products<CHUNKS, TOGETHER>(query + n, key + first);
                for (int i = 0; i < TOGETHER; i++)
                    std::memcpy(score[n + i] + place + first, (float*)&products + i * KEYS,
                                KEYS * sizeof(float));
            }
        for (; n < pairs; n++) store(score[n] + place, dot_products<CHUNKS, 1>(query + n, key));
    }

    // out += weights * values for `pairs` queries. Some of them read a value together: independent
    // sums hide the latency.
    static void add_values(const float* const* weights, int64_t pairs, int64_t place,
                           const float* const* value, int64_t count, float* const* out) {
        constexpr int PART = CHUNKS <= VALUE_VECTORS       ? CHUNKS
                             : CHUNKS % VALUE_VECTORS == 0 ? VALUE_VECTORS
                                                           : VALUE_VECTORS / 2;
        constexpr int TOGETHER = PART <= 4 ? VALUE_PAIRS : PART <= 8 ? 2 : 1;
        for (int64_t begin = 0; begin < CHUNKS * LANES; begin += PART * LANES) {
            int64_t n = 0;
            for (; n + TOGETHER <= pairs; n += TOGETHER)
                accumulate_values<PART, TOGETHER>(weights + n, place, value, count, out + n, begin);
            if (TOGETHER > 2 && n + TOGETHER - 1 == pairs) {
                accumulate_values<PART, TOGETHER - 1>(weights + n, place, value, count, out + n,
                                                      begin);
                n = pairs;
            }
            for (; n < pairs; n++)
                accumulate_values<PART, 1>(weights + n, place, value, count, out + n, begin);
        }
    }

    void run() {
        shared = shared_slots();
        const int64_t h = s.head_dim, pairs = queries * heads, stride = s.stride;
        const float* query[MAX_PAIRS];
        float *scores_at[MAX_PAIRS], *out[MAX_PAIRS], totals[MAX_PAIRS];
        for (int64_t n = 0; n < pairs; n++) {
            const int64_t m = p.first(row) + first + n / heads, i = head + n % heads;
            query[n] = p.qkv + m * stride + i * h;
            scores_at[n] = scores + n * p.score_stride;
            out[n] = p.context + (m * s.heads + i) * h;
            std::memset(out[n], 0, h * sizeof(float));
        }
        TileGroup<CHUNKS> tiles(query, pairs);
        DotGroup<CHUNKS> dots(query, pairs);
        PanelGroup<CHUNKS> panels(query, pairs);
        const auto score_keys = [&](int64_t from, int64_t pairs, int64_t place,
                                    const char* const* key, int64_t count) {
            if (tiled() && count == 2 * LANES)
                return tiles.score(from, pairs, scores_at, place, key);
            if (dotted()) return dots.score(from, pairs, scores_at, place, key);
            if (panelled()) return panels.score(from, pairs, scores_at, place, key);
            const Widened<CHUNKS> keys(key, count, type);
            for (int64_t i = 0; i < count; i += LANES)
                score(query + from, scores_at + from, pairs, place + i, keys.at + i);
        };
        for_shared_slots<2 * LANES>(
            keys, [&](int64_t place, const char* const* key, int64_t count) {
                score_keys(0, pairs, place, key, count);
            });
        for (int64_t n = 0; n < queries; n++) {
            const int64_t from = n * heads;
            int64_t count = for_other_slots(
                n, keys, [&](int64_t place, const char* const* key, int64_t count) {
                    score_keys(from, heads, place, key, count);
                });
            for (int64_t i = from; i < from + heads; i++) {
                if (s.softcap != 0) cap(scores_at[i], count, s.softcap);
                const float sink = sinks ? sinks[head + i - from] : -INFINITY;
                totals[i] = exp_inplace(scores_at[i], count, sink);
            }
        }
        const auto add = [&](int64_t from, int64_t pairs, int64_t place, const char* const* value,
                             int64_t count) {
            if (tiled() && count % (2 * LANES) == 0)
                return tiles.add_values(scores_at, from, pairs, place, value, count);
            if (dotted()) return dots.add_values(scores_at, from, pairs, place, value, count);
            const Widened<CHUNKS> values(value, count, type);
            add_values(scores_at + from, pairs, place, values.at, count, out + from);
        };
        for_shared_slots<4 * LANES>(
            values, [&](int64_t place, const char* const* value, int64_t count) {
                add(0, pairs, place, value, count);
            });
        for (int64_t n = 0; n < queries; n++)
            for_other_slots(
                n, values, [&](int64_t place, const char* const* value, int64_t count) {
                    add(n * heads, heads, place, value, count);
                });
        if (tiled()) tiles.finish(out);
        if (dotted()) dots.finish(out);
        for (int64_t n = 0; n < pairs; n++) {
            for (int64_t d = 0; d < h; d++) out[n][d] /= totals[n];
            if (s.gated) apply_gates(query[n] + s.heads * h, h, out[n]);
        }
    }
};

template <int CHUNKS>
static void attend(const Layer& layer, const Shape& s, const Pass& p, const KVCache& c,
                   int thread) {
    const int64_t group_heads = s.heads / s.kv_heads;
    // All heads that share keys are one unit of work, unless that leaves threads idle. With a
    // window every query begins at another slot, so it is a unit of its own.
    const int64_t heads =
        group_heads <= MAX_PAIRS && p.tokens() * s.kv_heads >= p.threads ? group_heads : 1;
    const int64_t most = layer.window ? 1 : MAX_PAIRS / heads,
                  parts = (p.queries + most - 1) / most, head_sets = s.heads / heads;
    // each unit reads only those new keys that it stores itself
    const bool exclusive = parts == 1 && heads == group_heads;
    if (!exclusive) {
#pragma omp for schedule(static)
        for (int64_t i = 0; i < p.rows * s.kv_heads; i++)
            store_keys_values(layer, s, p, c, i / s.kv_heads, i % s.kv_heads);
    }
    const int64_t units = p.rows * parts * head_sets;
    share(units, p.tokens(), [&](int64_t i) {
        const int64_t unit = units - 1 - i;  // the last queries see most, so they begin
        const int64_t head_set = unit % head_sets, part = unit / head_sets % parts,
                      r = unit / head_sets / parts, k = head_set * heads / group_heads;
        const int64_t first = part * p.count(r) / parts,
                      count = (part + 1) * p.count(r) / parts - first;
        int64_t begin = 0;
        if (exclusive) store_keys_values(layer, s, p, c, r, k);
        if (!count) return;
        if (layer.window && p.position[r * p.queries + first] >= layer.window)
            begin = p.position[r * p.queries + first] - layer.window + 1;
        if (begin > p.length[r]) begin = p.length[r];
        const char *keys = c.keys + c.row[r] + k * c.head,
                   *values = c.values + c.row[r] + k * c.head;
        QueryGroup<CHUNKS>{s,
                           p,
                           layer.sinks,
                           keys,
                           values,
                           c.type,
                           layer.window ? p.visible_in_window : p.visible,
                           c.slot,
                           r,
                           first,
                           count,
                           head_set * heads,
                           heads,
                           begin,
                           0,
                           p.scores + thread * MAX_PAIRS * p.score_stride}
            .run();
    });
}

// x += residual * the norm of y, both [M, D]; y is overwritten
static void add_branch(const float* norm, const Shape& s, int64_t M, float* y, float* x) {
    const int64_t D = s.hidden;
    const Norm of_branch{norm, nullptr, s.eps, false};
#pragma omp for schedule(static)
    for (int64_t m = 0; m < M; m++) {
        float *from = y + m * D, *to = x + m * D;
        if (norm) of_branch(from, D, from);
        for (int64_t i = 0; i < D; i += LANES)
            store(to + i, fma(broadcast(s.residual), load(from + i), load(to + i)));
    }
}

// The experts of a token, ascending, and their weights, from the router's scores, which it changes.
static void choose_experts(const Experts& e, float* score, int64_t* chosen, float* weight) {
    float largest = score[0], total = e.bias ? 1e-6f : 0;
    for (int64_t i = 1; i < e.count; i++) largest = std::max(largest, score[i]);
    for (int64_t i = 0; e.bias && i < e.count; i++) score[i] = 1.0f / (1.0f + std::exp(-score[i]));
    const auto rank = [&](int64_t i) { return e.bias ? score[i] + e.bias[i] : score[i]; };
    const auto part = [&](int64_t i) { return e.bias ? score[i] : std::exp(score[i] - largest); };
    for (int64_t j = 0; j < e.top; j++) {
        int64_t best = -1;
        for (int64_t i = 0; i < e.count; i++)
            if ((best < 0 || rank(i) > rank(best)) && std::find(chosen, chosen + j, i) == chosen + j)
                best = i;
        chosen[j] = best;
    }
    std::sort(chosen, chosen + e.top);
    for (int64_t j = 0; j < e.top; j++) weight[j] = part(chosen[j]);
    if (e.normed)
        for (int64_t j = 0; j < e.top; j++) total += weight[j];
    else if (e.bias) total = 1;
    else
        for (int64_t i = 0; i < e.count; i++) total += part(i);
    for (int64_t j = 0; j < e.top; j++) {
        weight[j] /= total;
        if (e.factors) weight[j] *= e.factors[chosen[j]];
    }
}

// y [M, D] = the experts' outputs for input [M, D], or for a norm of x, weighted. Experts are summed in
// ascending order, so a token's sum does not depend on the other tokens.
static void mix_experts(const Experts& e, const Shape& s, const Pass& p, const float* x,
                        const float* input, int thread, float* y) {
    const int64_t M = p.tokens(), D = s.hidden;
    const Norm before{e.norm, nullptr, s.eps, false}, of_router{e.router_norm, nullptr, s.eps, false};
    if (e.norm) input = normed_rows(thread, x, of_router, M, D, p.normed);
    float *gathered = p.routed, *out = gathered + M * D, *score = out + M * D,
          *weight = score + M * e.router.outputs;
    int64_t *chosen = p.routes, *order = chosen + M * e.top, *begin = order + M * e.top;
    linear(e.router, input, D, M, score, e.router.outputs, STORE);
    if (e.norm) input = normed_rows(thread, x, before, M, D, p.normed);
#pragma omp for schedule(static)
    for (int64_t m = 0; m < M; m++) {
        choose_experts(e, score + m * e.router.outputs, chosen + m * e.top, weight + m * e.top);
        std::memset(y + m * D, 0, D * sizeof(float));
    }
#pragma omp single
    {  // the places of `chosen` that name expert i: order[begin[i]] to order[begin[i + 1] - 1]
        std::fill(begin, begin + e.count + 1, 0);
        for (int64_t i = 0; i < M * e.top; i++) begin[chosen[i] + 1]++;
        for (int64_t i = 0; i < e.count; i++) begin[i + 1] += begin[i];
        for (int64_t i = M * e.top - 1; i >= 0; i--) order[--begin[chosen[i] + 1]] = i;
        for (int64_t i = 0; i < e.count; i++) begin[i] = begin[i + 1];
        begin[e.count] = M * e.top;
    }
    for (int64_t i = 0; i < e.count; i++) {
        const int64_t* places = order + begin[i];
        const int64_t count = begin[i + 1] - begin[i];
        if (!count) continue;
#pragma omp for schedule(static)
        for (int64_t n = 0; n < count; n++)
            std::memcpy(gathered + n * D, input + places[n] / e.top * D, D * sizeof(float));
        linear(e.gate_up[i], gathered, D, count, p.inner, s.inner, (Epilogue)s.activation);
        linear(e.down[i], p.inner, s.inner, count, out, D, STORE);
#pragma omp for schedule(static)
        for (int64_t n = 0; n < count; n++) {
            float* sum = y + places[n] / e.top * D;
            for (int64_t d = 0; d < D; d += LANES)
                store(sum + d, fma(broadcast(weight[places[n]]), load(out + n * D + d), load(sum + d)));
        }
    }
}

// y [M, D] += the output of the expert that all tokens x [M, D] share.
static void add_shared_expert(const Layer& layer, const Shape& s, const Pass& p, const float* x,
                              float* y) {
    const int64_t M = p.tokens(), D = s.hidden, width = layer.shared_down.inputs;
    float* out = p.routed;
    linear(layer.shared_gate_up, x, D, M, p.inner, width, (Epilogue)s.activation);
    linear(layer.shared_down, p.inner, width, M, out, D, STORE);
#pragma omp for schedule(static)
    for (int64_t m = 0; m < M; m++) {
        const float score = dot(x + m * D, layer.shared_gate, D);
        const FloatVec weight = broadcast(1.0f / (1.0f + std::exp(-score)));
        for (int64_t d = 0; d < D; d += LANES)
            store(y + m * D + d, fma(weight, load(out + m * D + d), load(y + m * D + d)));
    }
}

// Where a dense MLP beside experts leaves its outputs [M, D].
static float* dense_outputs(const Experts& e, const Shape& s, const Pass& p) {
    return p.routed + p.tokens() * (2 * s.hidden + e.top + e.router.outputs);
}

// y [M, D], of experts, becomes the sum of its norm and the norm of the dense MLP's outputs.
static void add_dense(const Experts& e, const Shape& s, const Pass& p, float* y) {
    const int64_t M = p.tokens(), D = s.hidden;
    float* dense = dense_outputs(e, s, p);
#pragma omp for schedule(static)
    for (int64_t m = 0; m < M; m++) {
        float *to = y + m * D, *from = dense + m * D;
        rms_norm(to, e.output_norm, D, s.eps, to);
        rms_norm(from, e.dense_norm, D, s.eps, from);
        for (int64_t d = 0; d < D; d += LANES) store(to + d, load(to + d) + load(from + d));
    }
}

// x [M, D] += what the layer makes of the tokens' own numbers.
static void add_token_input(const TokenInput& of_layer, const Shape& s, const Pass& p, float* x) {
    const int64_t M = p.tokens(), D = s.hidden, width = of_layer.projection.inputs;
    linear(of_layer.gate, x, D, M, p.inner, width, GELU);
#pragma omp for schedule(static)
    for (int64_t m = 0; m < M; m++) {
        const float* numbers = p.inputs + m * p.token_inputs + of_layer.begin;
        float* gated = p.inner + m * width;
        for (int64_t i = 0; i < width; i += LANES) store(gated + i, load(gated + i) * load(numbers + i));
    }
    linear(of_layer.projection, p.inner, width, M, p.branch, D, STORE);
    add_branch(of_layer.norm, s, M, p.branch, x);
}

// p.context [M, H h] from the projections in p.qkv, which it changes.
static void run_attention(const Layer& layer, const Shape& s, const Pass& p, const KVCache& c,
                          int thread) {
    if (layer.q_norm && s.head_norm == WHOLE) {
        const int64_t k = s.keys(), width = s.kv_heads * s.head_dim;
#pragma omp for schedule(static)
        for (int64_t m = 0; m < p.tokens(); m++) {
            float* row = p.qkv + m * s.stride;
            rms_norm(row, layer.q_norm, k, s.eps, row);
            rms_norm(row + k, layer.k_norm, width, s.eps, row + k);
        }
    }
    switch (s.head_dim) {
        case 16: attend<16 / LANES>(layer, s, p, c, thread); break;
        case 32: attend<32 / LANES>(layer, s, p, c, thread); break;
        case 64: attend<64 / LANES>(layer, s, p, c, thread); break;
        case 80: attend<80 / LANES>(layer, s, p, c, thread); break;
        case 96: attend<96 / LANES>(layer, s, p, c, thread); break;
        case 128: attend<128 / LANES>(layer, s, p, c, thread); break;
        case 256: attend<256 / LANES>(layer, s, p, c, thread); break;
        case 512: attend<512 / LANES>(layer, s, p, c, thread); break;
    }
}

// A decoder layer on the residual stream x [M, D], in place. input: what attention reads instead of
// the norm of x, or null.
static void decoder_layer(const Layer& layer, const Pass& p, const KVCache& c, const float* input,
                          float* x, int thread, const StatePass* states = nullptr) {
    const Shape& s = layer.shape;
    const int64_t M = p.tokens(), D = s.hidden;
    const Norm before{layer.norm, layer.norm_bias, s.eps, s.centred != 0},
        before_mlp{layer.mlp_norm, layer.mlp_norm_bias, s.eps, s.centred != 0};
    if (!input) input = layer.norm ? normed_rows(thread, x, before, M, D, p.normed) : x;
    linear(layer.qkv, input, layer.qkv.inputs, M, p.qkv, s.stride, STORE);
    float *k = p.qkv + layer.qkv.outputs, *v = k + layer.k.outputs;
    if (layer.k.data) linear(layer.k, input, D, M, k, s.stride, STORE);
    if (layer.v.data) linear(layer.v, input, D, M, v, s.stride, STORE);
    if (layer.state.taps) states->run(layer, s, p);
    else run_attention(layer, s, p, c, thread);
    if (s.adds_plainly(layer.attention_norm)) {
        linear(layer.o, p.context, layer.o.inputs, M, x, D, ADD);
    } else {
        linear(layer.o, p.context, layer.o.inputs, M, p.branch, D, STORE);
        add_branch(layer.attention_norm, s, M, p.branch, x);
    }
    if (!s.parallel) input = layer.mlp_norm ? normed_rows(thread, x, before_mlp, M, D, p.normed) : x;
    const bool plain = !layer.experts && s.adds_plainly(layer.output_norm);
    if (layer.gate_up.data) {
        float* y = plain ? x : layer.experts ? dense_outputs(*layer.experts, s, p) : p.branch;
        linear(layer.gate_up, input, D, M, p.inner, s.inner, (Epilogue)s.activation);
        linear(layer.down, p.inner, s.inner, M, y, D, plain ? ADD : STORE);
    }
    if (layer.experts) {
        mix_experts(*layer.experts, s, p, x, input, thread, p.branch);
        if (layer.shared_gate) add_shared_expert(layer, s, p, input, p.branch);
        if (layer.gate_up.data) add_dense(*layer.experts, s, p, p.branch);
    }
    if (!plain) add_branch(layer.output_norm, s, M, p.branch, x);
    if (layer.input.gate.data) add_token_input(layer.input, s, p, x);
    if (layer.factor == 1) return;
#pragma omp for schedule(static)
    for (int64_t i = 0; i < M * D; i++) x[i] *= layer.factor;
}
