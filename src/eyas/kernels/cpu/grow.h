// A draft's dynamic tree.
#pragma once

#include "layers.h"

// EAGLE-2's tree (section 4) from a draft net's layer, all levels in one call; drafters/_grow.py says what is done, in torch, and tests hold
// the two against each other.

struct Net {
    int64_t paired;  // 1: attention reads [norm of embedding, norm of hidden] (EAGLE-3); 0: fc of [embedding, hidden] (EAGLE-1)
    int64_t residual_normed, carries_normed;
    Matrix fuse, fc, head;  // fuse: of the target's features, whose outputs are the hidden that is read; without data: they are it
    const float *embeddings, *embed_norm, *hidden_norm, *norm;  // norm: before the head, or null
    const int64_t* ids;  // the target's ids of the draft vocabulary; null: the same
    int64_t vocabulary;  // of the head
};

struct Plan {
    int64_t depth, branch, nodes, by_confidence, rerank;
    float log_stop, sharpness;
    const float* noise;        // [B, depth, vocabulary] that the target will draw with, or null
    const float* temperature;  // [B]; 0: greedy
};

struct Grown {  // [B, N] each, N nodes with the root; mask [B, N, N]
    int64_t *tokens, *parents, *depths;
    float *scores, *values;
    uint8_t *candidates, *mask;
    int64_t* drafted_parents;  // [B, X] each: everything that was drafted, the root first
    float* drafted_values;
};

struct Guess {  // a child: its place in the draft vocabulary, log q, and how likely the target draws it
    int64_t index;
    float own, chance;
};

static float log_sum(const float* x, int64_t count, float factor) {  // log of the sum of e^(factor x); x is filled up to 16 with -inf
    Floats most = load(x), total = {};
    for (int64_t i = LANES; i < count; i += LANES) most = load(x + i) > most ? load(x + i) : most;
    float top = most[0];
    for (int i = 1; i < LANES; i++) top = most[i] > top ? most[i] : top;
    for (int64_t i = 0; i < count; i += LANES) total += exponential((load(x + i) - top) * factor);
    return top * factor + std::log(sum(total));
}

// The best children of one node from its logits; `key` is room for them with noise.
static void guess(const Net& net, const Plan& plan, const float* logits, const float* noise, float temperature, float* key, Guess* best) {
    const int64_t v = net.vocabulary, padded = (v + LANES - 1) / LANES * LANES;
    const float scale = temperature > 0 && plan.noise ? temperature : 1;
    const bool noisy = noise && temperature > 0, sharpened = temperature > 0 ? noisy : plan.sharpness != 1;
    for (int64_t j = 0; j < padded; j++) key[j] = j < v ? logits[j] / scale : -INFINITY;
    const float whole = log_sum(key, padded, 1);
    for (int64_t j = 0; j < v; j++) key[j] = (key[j] - whole) + (noisy ? noise[j] : 0);
    int64_t count = 0;
    for (int64_t j = 0; j < v; j++) {  // the largest first; of equals the first
        if (count == plan.branch && !(key[j] > best[count - 1].chance)) continue;
        int64_t at = count < plan.branch ? count++ : count - 1;
        for (; at > 0 && key[j] > best[at - 1].chance; at--) best[at] = best[at - 1];
        best[at] = {j, 0, key[j]};
    }
    const float perturbed = sharpened ? log_sum(key, padded, plan.sharpness) : 0;
    for (int64_t i = 0; i < count; i++) {
        float own = best[i].chance - (noisy ? noise[best[i].index] : 0), chance = sharpened ? plan.sharpness * best[i].chance - perturbed : own;
        best[i].own = own < 0 ? own : 0;
        best[i].chance = chance < 0 ? chance : 0;
    }
}

// What attention reads, and the residual stream, of nodes with these tokens and their parents' hidden.
static void join(const Net& net, const Shape& s, const int64_t* tokens, const float* hidden, int64_t M, float* pair, float* input, float* x) {
    const int64_t D = s.hidden;
#pragma omp for schedule(static)
    for (int64_t m = 0; m < M; m++) {
        const float *embedding = net.embeddings + tokens[m] * D, *state = hidden + m * D;
        float* both = (net.paired ? input : pair) + m * 2 * D;
        if (net.paired) {
            rms_norm(embedding, net.embed_norm, D, s.eps, both);
            rms_norm(state, net.hidden_norm, D, s.eps, both + D);
            std::memcpy(x + m * D, net.residual_normed ? both + D : state, D * sizeof(float));
        } else {
            std::memcpy(both, embedding, D * sizeof(float));
            std::memcpy(both + D, state, D * sizeof(float));
        }
    }
    if (net.paired) return;
    linear(net.fc, pair, 2 * D, M, x, D, STORE);
#pragma omp for schedule(static)
    for (int64_t m = 0; m < M; m++) std::memcpy(input + m * D, x + m * D, D * sizeof(float));
}

// The places of the `count` largest, in their order; of equals the first.
static std::vector<int64_t> largest(const float* x, int64_t size, int64_t count) {
    std::vector<int64_t> order(size);
    for (int64_t i = 0; i < size; i++) order[i] = i;
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return x[a] > x[b]; });
    order.resize(count < size ? count : size);
    return order;
}

struct Node {
    int64_t token, parent;  // parent: its place among everything drafted, -1: the root
    float own, value;
};

// The tree of one row from everything that was drafted.
static void keep(const std::vector<Node>& drafted, const std::vector<int64_t>& kept, int64_t root, int64_t row, int64_t N, const Grown& out) {
    std::vector<int64_t> place(drafted.size(), 0);
    for (int64_t n = 0; n < N; n++) {
        const Node* node = n ? &drafted[kept[n - 1]] : nullptr;
        const int64_t at = row * N + n, parent = node ? (node->parent < 0 ? 0 : place[node->parent]) : -1;
        uint8_t* mask = out.mask + at * N;
        if (node) {
            place[kept[n - 1]] = n;
            std::memcpy(mask, out.mask + (row * N + parent) * N, N);
        } else {
            std::memset(mask, 0, N);
        }
        mask[n] = 1;
        out.tokens[at] = node ? node->token : root;
        out.parents[at] = parent;
        out.depths[at] = node ? out.depths[row * N + parent] + 1 : 0;
        out.scores[at] = node ? node->own : 0;
        out.values[at] = node ? node->value : 0;
        out.candidates[at] = !node || (node->value > -INFINITY && out.candidates[row * N + parent]);
    }
}
