// Attention over a cache, and whole decoder layers.
#pragma once

#include "linear.h"

static inline void rotate(float* x, const float* cosine, const float* sine, int64_t h) {  // both halves of a head
    for (int64_t i = 0; i < h / 2; i++) {
        float a = x[i], b = x[i + h / 2];
        x[i] = a * cosine[i] - b * sine[i];
        x[i + h / 2] = b * cosine[i + h / 2] + a * sine[i + h / 2];
    }
}

// Norm and rotate the queries and keys of a row's new nodes, of one key-value head; keys and values go to their slots.
static void place(const Layer& layer, const Shape& s, const Pass& p, const Slots& c, int64_t r, int64_t k) {
    const int64_t h = s.head_dim, width = (s.heads + 2 * s.kv_heads) * h, sharing = s.heads / s.kv_heads;
    for (int64_t q = 0; q < p.queries; q++) {
        const int64_t m = r * p.queries + q, slot = p.length[r] + p.nodes - p.queries + q, at = r * c.row + k * c.head + slot * c.slot;
        const float *cosine = p.cosine + p.position[m] * h, *sine = p.sine + p.position[m] * h;
        for (int64_t i = 0; i <= sharing; i++) {
            float* x = p.qkv + m * width + (i < sharing ? k * sharing + i : s.heads + k) * h;
            const float* norm = i < sharing ? layer.q_norm : layer.k_norm;
            if (norm) rms_norm(x, norm, h, s.eps, x);
            rotate(x, cosine, sine, h);
            if (i < sharing)
                for (int64_t d = 0; d < h; d++) x[d] *= s.scale;
        }
        std::memcpy(c.keys + at, p.qkv + m * width + (s.heads + k) * h, h * sizeof(float));
        std::memcpy(c.values + at, p.qkv + m * width + (s.heads + s.kv_heads + k) * h, h * sizeof(float));
    }
}

// The scores of COUNT queries [h], scaled already, with 16 / COUNT keys: those of the first, then those of the second.
template <int CHUNKS, int COUNT>
static inline Floats scores_of(const float* const* query, const float* const* key) {
    constexpr int KEYS = LANES / COUNT;
    Floats a[LANES];
#pragma GCC unroll 16
    for (int j = 0; j < KEYS; j++) {
#pragma GCC unroll 16
        for (int d = 0; d < CHUNKS; d++) {
            Floats part = load(key[j] + d * LANES);
#pragma GCC unroll 2
            for (int i = 0; i < COUNT; i++) {
                Floats& sum = a[i * KEYS + j];
                sum = d ? fma(load(query[i] + d * LANES), part, sum) : load(query[i]) * part;
            }
        }
    }
    return sums(a);
}

// out [COUNT][h] += the values, weighed, one after the other.
template <int CHUNKS, int COUNT>
static inline void weigh(const float* const* weights, int64_t place, const float* const* value, int64_t count, float* const* out) {
    Floats a[COUNT][CHUNKS];
#pragma GCC unroll 16
    for (int i = 0; i < COUNT; i++)
#pragma GCC unroll 16
        for (int d = 0; d < CHUNKS; d++) a[i][d] = load(out[i] + d * LANES);
    for (int64_t j = 0; j < count; j++) {
        Floats weight[COUNT];
#pragma GCC unroll 16
        for (int i = 0; i < COUNT; i++) weight[i] = all(weights[i][place + j]);
#pragma GCC unroll 16
        for (int d = 0; d < CHUNKS; d++) {
            Floats part = load(value[j] + d * LANES);
#pragma GCC unroll 16
            for (int i = 0; i < COUNT; i++) a[i][d] = fma(weight[i], part, a[i][d]);
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < COUNT; i++)
#pragma GCC unroll 16
        for (int d = 0; d < CHUNKS; d++) store(out[i] + d * LANES, a[i][d]);
}

// Softmax without its division; the sum. What stands behind `count` up to the next 16 becomes 0.
static inline float soften(float* scores, int64_t count) {
    for (int64_t i = count; i % LANES; i++) scores[i] = -INFINITY;
    Floats most = load(scores), total = {};
    for (int64_t i = LANES; i < count; i += LANES) most = load(scores + i) > most ? load(scores + i) : most;
    float top = most[0];
    for (int i = 1; i < LANES; i++) top = most[i] > top ? most[i] : top;
    for (int64_t i = 0; i < count; i += LANES) {
        Floats e = exponential(load(scores + i) - top);
        store(scores + i, e);
        total += e;
    }
    return sum(total);
}

// Some heads that share keys, of some queries of a row: pairs. Keys and values are read 16 slots at a time and serve all pairs while they
// are near. The visible slots of a query, in order: the committed ones, from `begin` on, then nodes. Of these the first ones that all of the
// queries see (most of a prompt) are read like committed ones: the first `shared` slots of the row.
template <int CHUNKS>
struct Group {
    const Shape& s;
    const Pass& p;
    const float *keys, *values;  // of the row and the key-value head
    const uint8_t* visible;
    int64_t stride, row, first, queries, head, heads, begin, shared;
    float* scores;  // [pair][most]

    const uint8_t* seen_by(int64_t n) const { return visible + (row * p.queries + first + n) * p.nodes; }

    int64_t shared_slots() const {  // whole sixteens from `begin` on: a rest is read along with the other nodes
        int64_t most = p.nodes;
        for (int64_t n = 0; n < queries; n++)
            if (const void* hidden = std::memchr(seen_by(n), 0, most)) most = (const uint8_t*)hidden - seen_by(n);
        return begin + (p.length[row] + most - begin) / LANES * LANES;
    }

    int64_t width() const { return (s.heads + 2 * s.kv_heads) * s.head_dim; }
    template <class Do>
    void each_shared(const float* from, Do act) const {  // act(place of the first, pointers, how many)
        const float* at[LANES];
        for (int64_t slot = begin; slot < shared; slot += LANES) {
            for (int64_t j = 0; j < LANES; j++) at[j] = from + (slot + j) * stride;
            act(slot - begin, at, LANES);
        }
    }

    template <class Do>
    int64_t each_node(int64_t n, const float* from, Do act) const {  // the same over the other slots that a query sees; all that it sees
        const float* at[LANES];
        const uint8_t* seen = seen_by(n);
        int64_t place = shared - begin, count = 0;
        auto pass = [&] {
            for (int64_t j = count; j < LANES; j++) at[j] = at[0];
            act(place, at, count);
            place += count, count = 0;
        };
        for (int64_t slot = shared; slot < p.length[row]; slot++) at[count++] = from + slot * stride;
        for (int64_t t = std::max<int64_t>(shared - p.length[row], 0); t < p.nodes; t++) {
            if (uint64_t eight; t + 8 <= p.nodes && (std::memcpy(&eight, seen + t, 8), !eight)) {
                t += 7;
                continue;
            }
            if (seen[t]) at[count++] = from + (p.length[row] + t) * stride;
            if (count == LANES) pass();
        }
        if (count) pass();
        return place;
    }

    // The scores of `pairs` queries with 16 keys, to `place`: two queries read a key together where registers hold both.
    static void score(const float* const* query, float* const* score, int64_t pairs, int64_t place, const float* const* key) {
        constexpr int TOGETHER = CHUNKS <= 4 ? 2 : 1, KEYS = LANES / TOGETHER;
        int64_t n = 0;
        for (; n + TOGETHER <= pairs; n += TOGETHER)
            for (int first = 0; first < LANES; first += KEYS) {
                Floats found = scores_of<CHUNKS, TOGETHER>(query + n, key + first);
                for (int i = 0; i < TOGETHER; i++) std::memcpy(score[n + i] + place + first, (float*)&found + i * KEYS, KEYS * sizeof(float));
            }
        for (; n < pairs; n++) store(score[n] + place, scores_of<CHUNKS, 1>(query + n, key));
    }

    // The outputs of `pairs` queries += `count` values: four of them read a value together, for long sums do not wait for each other.
    static void add(const float* const* weights, int64_t pairs, int64_t place, const float* const* value, int64_t count, float* const* out) {
        constexpr int TOGETHER = CHUNKS <= 4 ? 4 : CHUNKS <= 8 ? 2 : 1;
        int64_t n = 0;
        for (; n + TOGETHER <= pairs; n += TOGETHER) weigh<CHUNKS, TOGETHER>(weights + n, place, value, count, out + n);
        if (n + 3 == pairs && CHUNKS <= 4) weigh<CHUNKS, 3>(weights + n, place, value, count, out + n), n = pairs;
        for (; n < pairs; n++) weigh<CHUNKS, 1>(weights + n, place, value, count, out + n);
    }

    void run() {
        shared = shared_slots();
        const int64_t h = s.head_dim, pairs = queries * heads, width = (s.heads + 2 * s.kv_heads) * h;
        const float* query[PAIRS];
        float *scores_at[PAIRS], *out[PAIRS], totals[PAIRS];
        for (int64_t n = 0; n < pairs; n++) {
            const int64_t m = row * p.queries + first + n / heads, i = head + n % heads;
            query[n] = p.qkv + m * width + i * h;
            scores_at[n] = scores + n * p.most;
            out[n] = p.context + (m * s.heads + i) * h;
            std::memset(out[n], 0, h * sizeof(float));
        }
        each_shared(keys, [&](int64_t place, const float* const* key, int64_t) { score(query, scores_at, pairs, place, key); });
        for (int64_t n = 0; n < queries; n++) {
            const int64_t from = n * heads;
            int64_t count = each_node(n, keys, [&](int64_t place, const float* const* key, int64_t) { score(query + from, scores_at + from, heads, place, key); });
            for (int64_t i = from; i < from + heads; i++) totals[i] = soften(scores_at[i], count);
        }
        each_shared(values, [&](int64_t place, const float* const* value, int64_t count) { add(scores_at, pairs, place, value, count, out); });
        for (int64_t n = 0; n < queries; n++)
            each_node(n, values, [&](int64_t place, const float* const* value, int64_t count) { add(scores_at + n * heads, heads, place, value, count, out + n * heads); });
        for (int64_t n = 0; n < pairs; n++)
            for (int64_t d = 0; d < h; d++) out[n][d] /= totals[n];
    }
};

template <int CHUNKS>
static void attend(const Layer& layer, const Shape& s, const Pass& p, const Slots& c, int thread) {
    const int64_t sharing = s.heads / s.kv_heads, per_row = p.rows * p.queries;
    // All heads that share keys together, unless that leaves threads without work; a window begins elsewhere for every query.
    const int64_t heads = sharing <= PAIRS && per_row * s.kv_heads >= p.threads ? sharing : 1;
    const int64_t most = layer.window ? 1 : PAIRS / heads, parts = (p.queries + most - 1) / most, sets = s.heads / heads;
    const bool alone = parts == 1 && heads == sharing;  // a unit reads no new key but those that it places itself
    if (!alone) {
#pragma omp for schedule(static)
        for (int64_t i = 0; i < p.rows * s.kv_heads; i++) place(layer, s, p, c, i / s.kv_heads, i % s.kv_heads);
    }
#pragma omp for schedule(static)
    for (int64_t unit = 0; unit < p.rows * parts * sets; unit++) {
        const int64_t set = unit % sets, part = unit / sets % parts, r = unit / sets / parts, k = set * heads / sharing;
        const int64_t first = part * p.queries / parts, count = (part + 1) * p.queries / parts - first;
        int64_t begin = 0;
        if (alone) place(layer, s, p, c, r, k);
        if (layer.window && p.position[r * p.queries + first] >= layer.window) begin = p.position[r * p.queries + first] - layer.window + 1;
        if (begin > p.length[r]) begin = p.length[r];
        const float *keys = c.keys + r * c.row + k * c.head, *values = c.values + r * c.row + k * c.head;
        Group<CHUNKS>{s, p, keys, values, layer.window ? p.near : p.visible, c.slot, r, first, count, set * heads, heads, begin, 0, p.scores + thread * PAIRS * p.most}.run();
    }
}

// x [M, D] is read and written; `input` is what attention reads where that is not the norm of x.
static void decoder_layer(const Layer& layer, const Shape& s, const Pass& p, const Slots& c, const float* input, float* x, int thread) {
    const int64_t M = p.rows * p.queries, D = s.hidden, width = (s.heads + 2 * s.kv_heads) * s.head_dim;
    if (!input) {
        input = normed_for(thread, x, layer.norm, M, D, s.eps, p.normed);
    }
    linear(layer.qkv, input, layer.qkv.inputs, M, p.qkv, width, STORE);
    switch (s.head_dim / LANES) {
        case 1: attend<1>(layer, s, p, c, thread); break;
        case 2: attend<2>(layer, s, p, c, thread); break;
        case 4: attend<4>(layer, s, p, c, thread); break;
        case 5: attend<5>(layer, s, p, c, thread); break;
        case 6: attend<6>(layer, s, p, c, thread); break;
        case 8: attend<8>(layer, s, p, c, thread); break;
        case 16: attend<16>(layer, s, p, c, thread); break;
    }
    linear(layer.o, p.context, s.heads * s.head_dim, M, x, D, ADD);
    const float* normed = normed_for(thread, x, layer.mlp_norm, M, D, s.eps, p.normed);
    linear(layer.gate_up, normed, D, M, p.inner, s.inner, GATE);
    linear(layer.down, p.inner, s.inner, M, x, D, ADD);
}
