// Layers with recurrent state instead of attention: gated delta nets (Qwen3.5) and short convolutions
// (LFM2).
//
// A head's state S [key_dim][value_dim] becomes, at each token,
//
//     S' = decay * S + k (x) delta,    delta = beta * (v - decay * S^T k),    output = S'^T q
//
// A row's state is stored after its committed tokens. Of an uncommitted node only its factors (k,
// delta, decay) and what its convolution read are stored, which are a hundredth of a state. A state
// at a node is made of the committed state and the factors of the node's ancestors, in order. Each
// update is computed by the same operations wherever it happens, so a token has the same bits in a
// prompt, a chain and a tree. Once a path is accepted, the next pass applies its factors to the
// committed state (`States::pending`).
#pragma once

#include "linear.h"

// Two values that stand in the place of a buffer's number
constexpr int64_t COMMITTED = -1, NONE = -2;
constexpr int64_t MAX_TAPS = 8;               // of a convolution
// independent sums hide the latency; as many as registers hold
constexpr int64_t STATE_SUMS = LANES == 16 ? 4 : 2;

// The order in which one row's nodes read their states, and where these are.
struct Walk {
    std::vector<int64_t> nodes;     // ancestors of new nodes, and these; parents first
    std::vector<int64_t> parent;    // [T]; COMMITTED: the committed state; NONE: not in the walk
    std::vector<int64_t> from, to;  // [T]: COMMITTED or a buffer; to NONE: nobody reads the state
    int64_t buffers = 0;

    Walk(const Pass& p, const States& states, int64_t r) {
        const int64_t T = p.nodes, old = T - p.queries;
        parent.assign(T, NONE), from.assign(T, COMMITTED), to.assign(T, COMMITTED);
        for (int64_t q = 0; q < p.count(r); q++) {
            const uint8_t* visible = p.visible + (r * p.queries + q) * T;
            for (int64_t n = old + q; n >= 0 && parent[n] == NONE; n = parent[n]) {
                parent[n] = n - 1;  // the node before it on its path
                while (parent[n] >= 0 && !visible[parent[n]]) parent[n]--;
            }
        }
        std::vector<int64_t> last_child(T, NONE), free;
        for (int64_t n = 0; n < T; n++) {
            if (parent[n] == NONE) continue;
            nodes.push_back(n);
            if (parent[n] >= 0) last_child[parent[n]] = n;
        }
        if (states.commits) return;  // a chain, all in the place of the committed state
        for (int64_t n : nodes) {
            if (parent[n] >= 0) from[n] = to[parent[n]];
            if (parent[n] >= 0 && last_child[parent[n]] == n) free.push_back(from[n]);
            to[n] = NONE;
            if (last_child[n] == NONE) continue;
            if (free.empty()) free.push_back(buffers++);
            to[n] = free.back();
            free.pop_back();
        }
    }
};

// The states of one row in one layer, as a pass reads and writes them.
struct RowState {
    const StateLayer& layer;
    const Shape& s;
    const Pass& p;
    const States& states;
    const Walk& walk;
    int64_t r;
    float *window, *state, *nodes;  // window [taps - 1][channels]: what the convolution read last
    int64_t pending;
    const int64_t* path;

    RowState(const Layer& of, const Shape& s, const Pass& p, const States& states,
             const Walk& walk, int64_t r)
        : layer(of.state), s(s), p(p), states(states), walk(walk), r(r) {
        const int64_t row = states.row[r];
        window = states.state + row * states.state_row + of.place * states.state_layer;
        state = window + (layer.taps - 1) * layer.channels;
        nodes = states.nodes + row * states.node_row + of.place * states.node_layer;
        pending = states.pending[row];
        path = states.path + row * states.longest_path;
    }

    int64_t old() const { return p.nodes - p.queries; }
    int64_t count() const { return p.count(r); }
    float* projected(int64_t q) const { return p.qkv + (p.first(r) + q) * s.stride; }
    // A node's record: what its convolution read, then k, delta and decay of all heads.
    float* record(int64_t node) const { return nodes + node * states.node; }
    const float* conv_input(int64_t node) const {
        if (node < 0) return window + (layer.taps - 1 + node) * layer.channels;
        return node < old() ? record(node) : projected(node - old());
    }

    // The window moves over the pending nodes.
    void move_window(int64_t begin, int64_t channels) const {
        const int64_t kept = layer.taps - 1;
        for (int64_t i = 0; i < kept && pending; i++) {
            const int64_t at = i + pending - kept;
            const float* from = at < 0 ? window + (kept + at) * layer.channels : record(path[at]);
            std::memmove(window + i * layer.channels + begin, from + begin, channels * sizeof(float));
        }
    }

    // Channels of the new nodes become their convolutions, in place. A node's inputs are its own and
    // its ancestors', so the last node begins.
    void convolve(int64_t begin, int64_t channels) const {
        const int64_t kept = layer.taps - 1;
        static thread_local std::vector<float> last;  // inputs of a chain
        move_window(begin, channels);
        if (states.commits) {
            last.resize(kept * channels);
            for (int64_t i = 0; i < kept; i++)
                std::memcpy(&last[i * channels], conv_input(count() + i - kept) + begin,
                            channels * sizeof(float));
        }
        for (int64_t q = count() - 1; q >= 0; q--) {
            const float* taps[MAX_TAPS];
            for (int64_t j = kept, n = old() + q; j >= 0; j--) {
                taps[j] = conv_input(n) + begin;
                n = n < 0 ? n - 1 : walk.parent[n];
            }
            float* x = projected(q) + begin;
            if (!states.commits)
                std::memcpy(record(old() + q) + begin, x, channels * sizeof(float));
            for (int64_t c = 0; c < channels; c += LANES) {
                FloatVec sum = layer.conv_bias ? load(layer.conv_bias + begin + c) : FloatVec{};
                for (int64_t j = 0; j <= kept; j++)
                    sum = fma(load(layer.conv + j * layer.channels + begin + c), load(taps[j] + c), sum);
                store(x + c, layer.value_heads ? sum / (1.0f + exp_vec(-sum)) : sum);
            }
        }
        for (int64_t i = 0; i < kept && states.commits; i++)
            std::memcpy(window + i * layer.channels + begin, &last[i * channels],
                        channels * sizeof(float));
    }
};

// S^T k and S^T q of PANEL columns of a state.
NOINLINE void read_state(const float* state, int64_t rows, const float* k, const float* q,
                         FloatVec* by_key, FloatVec* by_query) {
    FloatVec a[STATE_SUMS][2] = {}, b[STATE_SUMS][2] = {};
    for (int64_t i = 0; i < rows; i += STATE_SUMS)
#pragma GCC unroll 4
        for (int part = 0; part < STATE_SUMS; part++) {
            const FloatVec key = broadcast(k[i + part]), query = broadcast(q[i + part]);
#pragma GCC unroll 2
            for (int v = 0; v < 2; v++) {
                const FloatVec x = load(state + (i + part) * PANEL + v * LANES);
                a[part][v] = fma(key, x, a[part][v]);
                b[part][v] = fma(query, x, b[part][v]);
            }
        }
    for (int v = 0; v < 2; v++) {
        by_key[v] = by_query[v] = FloatVec{};
        for (int part = 0; part < STATE_SUMS; part++)
            by_key[v] += a[part][v], by_query[v] += b[part][v];
    }
}

// to = decay * from + k (x) delta, for PANEL columns of a state. Both may be one place.
NOINLINE void update_state(const float* from, int64_t rows, float decay, const float* k,
                           const float* delta, float* to) {
    const FloatVec first = load(delta), second = load(delta + LANES), factor = broadcast(decay);
    for (int64_t i = 0; i < rows; i++) {
        const FloatVec key = broadcast(k[i]);
        store(to + i * PANEL, fma(key, first, factor * load(from + i * PANEL)));
        store(to + i * PANEL + LANES, fma(key, second, factor * load(from + i * PANEL + LANES)));
    }
}

static inline float dot(const float* x, const float* y, int64_t size) {
    FloatVec sum = {};
    for (int64_t i = 0; i < size; i += LANES) sum = fma(load(x + i), load(y + i), sum);
    return horizontal_sum(sum);
}

static inline void multiply(float* x, int64_t size, float factor) {
    for (int64_t i = 0; i < size; i += LANES) store(x + i, load(x + i) * factor);
}

// A gated delta net, for one row and the value heads that share a key head. What the projections
// wrote for a token: q and k of all key heads, v and z of all value heads, b and a of these.
struct DeltaHeads {
    const RowState& row;
    int64_t key_head;
    const StateLayer& l = row.layer;
    int64_t keys = l.key_heads * l.key_dim, values = l.value_heads * l.value_dim;
    int64_t group = l.value_heads / l.key_heads;
    int64_t q_at = key_head * l.key_dim, k_at = keys + q_at;

    int64_t v_at(int64_t head) const { return 2 * keys + head * l.value_dim; }
    // places in a node's record
    int64_t key_at() const { return l.channels + q_at; }
    int64_t delta_at(int64_t head) const { return l.channels + keys + head * l.value_dim; }
    int64_t decay_at(int64_t head) const { return l.channels + keys + values + head; }

    void run() const {
        static thread_local std::vector<float> products;  // of q and k of each new node
        const int64_t count = row.count(), first = key_head * group;
        row.convolve(q_at, l.key_dim);
        row.convolve(k_at, l.key_dim);
        row.convolve(v_at(first), group * l.value_dim);
        products.resize(count);
        for (int64_t n = 0; n < count; n++) {
            float *q = row.projected(n) + q_at, *k = row.projected(n) + k_at;
            const float scale = 1.0f / std::sqrt((float)l.key_dim);
            multiply(q, l.key_dim, scale / std::sqrt(dot(q, q, l.key_dim) + 1e-6f));
            multiply(k, l.key_dim, 1.0f / std::sqrt(dot(k, k, l.key_dim) + 1e-6f));
            products[n] = dot(q, k, l.key_dim);
        }
        for (int64_t head = first; head < first + group; head++) run_head(head, products.data());
        if (row.states.commits) return;
        for (int64_t n = 0; n < count; n++)
            std::memcpy(row.record(row.old() + n) + key_at(), row.projected(n) + k_at,
                        l.key_dim * sizeof(float));
    }

    void run_head(int64_t head, const float* products) const {
        static thread_local std::vector<float> buffers, decays, betas;
        const int64_t count = row.count(), size = l.key_dim * PANEL;
        buffers.resize(std::max<int64_t>(row.walk.buffers, 1) * size);
        decays.resize(count), betas.resize(count);
        for (int64_t n = 0; n < count; n++) {
            const float *b = row.projected(n) + l.channels + values + head, *a = b + l.value_heads;
            const float step = *a + l.step_bias[head];
            const float softplus = step > 20 ? step : std::log1p(std::exp(step));
            decays[n] = std::exp(l.rate[head] * softplus);
            betas[n] = 1.0f / (1.0f + std::exp(-*b));
        }
        for (int64_t column = 0; column < l.value_dim; column += PANEL) {
            float* state = row.state + head * l.value_dim * l.key_dim + column * l.key_dim;
            const auto place = [&](int64_t at) {
                return at == COMMITTED ? state : buffers.data() + at * size;
            };
            const auto update_by = [&](const float* record, const float* from, float* to) {
                update_state(from, l.key_dim, record[decay_at(head)], record + key_at(),
                             record + delta_at(head) + column, to);
            };
            for (int64_t i = 0; i < row.pending; i++)
                update_by(row.record(row.path[i]), state, state);
            for (int64_t node : row.walk.nodes) {
                const float* from = place(row.walk.from[node]);
                const int64_t n = node - row.old(), to = row.walk.to[node];
                if (n < 0) {
                    update_by(row.record(node), from, place(to));
                    continue;
                }
                float* projected = row.projected(n);
                float *v = projected + v_at(head) + column, delta[PANEL];
                FloatVec by_key[2], by_query[2];
                const FloatVec decay = broadcast(decays[n]), product = broadcast(products[n]);
                read_state(from, l.key_dim, projected + k_at, projected + q_at, by_key, by_query);
                for (int i = 0; i < 2; i++) {
                    const FloatVec change =
                        fma(-decay, by_key[i], load(v + i * LANES)) * betas[n];
                    store(delta + i * LANES, change);
                    store(v + i * LANES, fma(product, change, decay * by_query[i]));
                }
                if (!row.states.commits)
                    std::memcpy(row.record(node) + delta_at(head) + column, delta, sizeof delta);
                if (to != NONE)
                    update_state(from, l.key_dim, decays[n], projected + k_at, delta, place(to));
            }
        }
        const int64_t place = l.tiled ? head % group * l.key_heads + key_head : head;
        for (int64_t n = 0; n < count; n++) {
            if (!row.states.commits) row.record(row.old() + n)[decay_at(head)] = decays[n];
            const float *x = row.projected(n) + v_at(head), *z = x + values;
            float* out = row.p.context + (row.p.first(row.r) + n) * values + place * l.value_dim;
            rms_norm(x, l.norm, l.value_dim, row.s.eps, out);
            for (int64_t i = 0; i < l.value_dim; i += LANES) {
                const FloatVec gate = load(z + i);
                store(out + i, load(out + i) * (gate / (1.0f + exp_vec(-gate))));
            }
        }
    }
};

// A short convolution, for one row and some channels. The projections wrote B, C and x of a token;
// the output is C * convolution(B * x).
static void short_convolution(const RowState& row, int64_t begin, int64_t channels) {
    const int64_t D = row.layer.channels;
    for (int64_t n = 0; n < row.count(); n++) {
        float* b = row.projected(n) + begin;
        for (int64_t c = 0; c < channels; c += LANES) store(b + c, load(b + c) * load(b + 2 * D + c));
    }
    row.convolve(begin, channels);
    for (int64_t n = 0; n < row.count(); n++) {
        const float* x = row.projected(n) + begin;
        float* out = row.p.context + (row.p.first(row.r) + n) * D + begin;
        for (int64_t c = 0; c < channels; c += LANES) store(out + c, load(x + c) * load(x + D + c));
    }
}

// The layers with states of a pass.
struct StatePass {
    const States& states;
    std::vector<Walk> walks;  // of each row

    StatePass(const States& states, const Pass& p) : states(states) {
        for (int64_t r = 0; r < p.rows; r++) walks.emplace_back(p, states, r);
    }

    // p.context [M, inputs of o] from the projections in p.qkv, which it changes.
    void run(const Layer& layer, const Shape& s, const Pass& p) const {
        constexpr int64_t WIDTH = 8 * PANEL;  // channels of a unit of work
        const StateLayer& l = layer.state;
        const int64_t parts = l.value_heads ? l.key_heads : (l.channels + WIDTH - 1) / WIDTH;
        share(p.rows * parts, p.tokens(), [&](int64_t i) {
            const RowState row(layer, s, p, states, walks[i / parts], i / parts);
            const int64_t part = i % parts, begin = part * WIDTH;
            if (l.value_heads) DeltaHeads{row, part}.run();
            else short_convolution(row, begin, std::min(WIDTH, l.channels - begin));
        });
    }
};
