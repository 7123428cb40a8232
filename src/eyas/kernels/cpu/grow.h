// A draft's dynamic tree: EAGLE-2, section 4.
#pragma once

#include "layers.h"

// All levels of a tree in one call. drafters/_grow.py is the reference in torch, which tests
// compare with this.

struct Net {
    // 1: attention reads [norm of embedding, norm of hidden] (EAGLE-3); 0: fc of [embedding,
    // hidden] (EAGLE-1), with norms of both and of the result where they are there (MTP)
    int64_t paired;
    int64_t residual_normed, carries_normed;
    // fuse: target features -> hidden state; without data: the features are the hidden state
    Matrix fuse, fc, head;
    // input_norm: behind fc; norm: before the head; each norm may be null
    const float *embeddings, *embed_norm, *hidden_norm, *input_norm, *norm;
    const int64_t* ids;  // the target's ids of the draft vocabulary; null: both are the same
    int64_t vocabulary;  // of the draft
};

struct Plan {
    int64_t depth, branch, nodes, by_confidence, rerank;
    float log_stop, inverse_temperature;
    const float* noise;        // [B, depth, vocabulary] Gumbel noise of the target's draws, or null
    const float* temperature;  // [B]; 0: greedy
};

struct Grown {  // [B, N] each, N nodes with the root; mask [B, N, N]
    int64_t *tokens, *parents, *depths;
    float *scores, *values;
    uint8_t *candidates, *mask;
    int64_t* drafted_parents;  // [B, X] each: everything that was drafted, the root first
    float* drafted_values;
};

struct Child {
    int64_t index;  // in the draft vocabulary
    float log_q;
    float score;  // log of the confidence that the target draws it
};

// log of the sum of exp(factor x); x is padded to a multiple of 16 with -inf
static float log_sum_exp(const float* x, int64_t count, float factor) {
    FloatVec largest = load(x), total = {};
    for (int64_t i = LANES; i < count; i += LANES)
        largest = load(x + i) > largest ? load(x + i) : largest;
    float top = largest[0];
    for (int i = 1; i < LANES; i++) top = largest[i] > top ? largest[i] : top;
    for (int64_t i = 0; i < count; i += LANES) total += exp_vec((load(x + i) - top) * factor);
    return top * factor + std::log(horizontal_sum(total));
}

// The best children of one node from its logits. key: work space for the perturbed log
// probabilities.
static void best_children(const Net& net, const Plan& plan, const float* logits, const float* noise,
                          float temperature, float* key, Child* best) {
    const int64_t v = net.vocabulary, padded = (v + LANES - 1) / LANES * LANES;
    const float scale = temperature > 0 && plan.noise ? temperature : 1;
    const bool noisy = noise && temperature > 0,
               scaled = temperature > 0 ? noisy : plan.inverse_temperature != 1;
    for (int64_t j = 0; j < padded; j++) key[j] = j < v ? logits[j] / scale : -INFINITY;
    const float log_total = log_sum_exp(key, padded, 1);
    for (int64_t j = 0; j < v; j++) key[j] = (key[j] - log_total) + (noisy ? noise[j] : 0);
    int64_t count = 0;
    for (int64_t j = 0; j < v; j++) {  // in descending order; of equals the first
        if (count == plan.branch && !(key[j] > best[count - 1].score)) continue;
        int64_t at = count < plan.branch ? count++ : count - 1;
        for (; at > 0 && key[j] > best[at - 1].score; at--) best[at] = best[at - 1];
        best[at] = {j, 0, key[j]};
    }
    const float normaliser = scaled ? log_sum_exp(key, padded, plan.inverse_temperature) : 0;
    for (int64_t i = 0; i < count; i++) {
        float log_q = best[i].score - (noisy ? noise[best[i].index] : 0),
              score = scaled ? plan.inverse_temperature * best[i].score - normaliser : log_q;
        best[i].log_q = log_q < 0 ? log_q : 0;
        best[i].score = score < 0 ? score : 0;
    }
}

// The input of attention and the residual stream x, for nodes with these tokens and their parents'
// hidden states.
static void net_inputs(const Net& net, const Shape& s, const int64_t* tokens, const float* hidden,
                       int64_t M, float* pair, float* input, float* x) {
    const int64_t D = s.hidden;
#pragma omp for schedule(static)
    for (int64_t m = 0; m < M; m++) {
        const float *embedding = net.embeddings + tokens[m] * D, *state = hidden + m * D;
        float* both = (net.paired ? input : pair) + m * 2 * D;
        if (net.embed_norm) {
            rms_norm(embedding, net.embed_norm, D, s.eps, both);
            rms_norm(state, net.hidden_norm, D, s.eps, both + D);
        } else {
            std::memcpy(both, embedding, D * sizeof(float));
            std::memcpy(both + D, state, D * sizeof(float));
        }
        if (net.paired)
            std::memcpy(x + m * D, net.residual_normed ? both + D : state, D * sizeof(float));
    }
    if (net.paired) return;
    linear(net.fc, pair, 2 * D, M, x, D, STORE);
    if (net.input_norm) {
        rms_norms(x, D, net.input_norm, M, D, s.eps, input, D);
        return;
    }
#pragma omp for schedule(static)
    for (int64_t m = 0; m < M; m++) std::memcpy(input + m * D, x + m * D, D * sizeof(float));
}

// The indices of the `count` largest, in descending order; of equals the first.
static std::vector<int64_t> top_indices(const float* x, int64_t size, int64_t count) {
    std::vector<int64_t> order(size);
    for (int64_t i = 0; i < size; i++) order[i] = i;
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return x[a] > x[b]; });
    order.resize(count < size ? count : size);
    return order;
}

struct Node {
    int64_t token, parent;  // parent: index among all drafted nodes, -1: the root
    float log_q, value;     // value: the sum of scores from the root on
};

// Write the tree of one row: the root and the `kept` ones of all drafted nodes.
static void write_tree(const std::vector<Node>& drafted, const std::vector<int64_t>& kept,
                       int64_t root, int64_t row, int64_t N, const Grown& out) {
    std::vector<int64_t> place(drafted.size(), 0);
    for (int64_t n = 0; n < N; n++) {
        const Node* node = n ? &drafted[kept[n - 1]] : nullptr;
        const int64_t at = row * N + n,
                      parent = node ? (node->parent < 0 ? 0 : place[node->parent]) : -1;
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
        out.scores[at] = node ? node->log_q : 0;
        out.values[at] = node ? node->value : 0;
        out.candidates[at] = !node || (node->value > -INFINITY && out.candidates[row * N + parent]);
    }
}
