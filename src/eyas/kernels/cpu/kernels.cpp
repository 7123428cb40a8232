// A decoder layer's forward on a CPU: plain C++ with vector types, no library but OpenMP. Compiled for the machine at hand (_build.py).
//
// Weights are read in the form that they are stored in (float32, bfloat16, int8 or int4 with scales), in panels of 32 outputs; everything is
// worked out in float32, or in whole numbers: as exact, or rounded on request, also to bfloat16 (tiles.h).
//
// What every result is made of, and in which order, depends on its own row alone: an output is summed over the inputs in one order, a
// softmax and what it weighs over the visible slots in order. So a token's logits are the same to the last bit whether it is forwarded
// alone, in a tree, or in a batch, and with any number of threads.
//
// Letters as everywhere: R rows, Q new nodes of a row, T nodes in slots, M = R x Q tokens, D hidden, H heads, K key-value heads,
// h width of a head.

#include "grow.h"
#include "noise.h"

extern "C" {

// Whether this machine has a use for int8 weights in quads.
int64_t eyas_quads() { return QUADS_HERE; }

// Whether it adds up products of bfloat16.
int64_t eyas_halves() { return HALVES_HERE; }

// Whether it has matrix units, and the system lets this process use them.
int64_t eyas_units() { return units_here; }

// y [M, outputs] = x [M, inputs] through the matrix.
void eyas_linear(const Matrix* w, const float* x, int64_t M, float* y, int64_t threads) {
#pragma omp parallel num_threads(threads)
    linear(*w, x, w->inputs, M, y, w->outputs, STORE);
}

// x [M, D] through all layers in place. taps: M x D floats for each entry of tapped, which names the layers whose input is kept, ascending.
void eyas_layers(const Layer* layers, int64_t count, const Shape* s, const Pass* p, const Slots* slots, float* x,
                 const int64_t* tapped, int64_t tap_count, float* taps, int64_t tap_stride) {
    const int64_t M = p->rows * p->queries, D = s->hidden;
#pragma omp parallel num_threads(p->threads)
    {
        int thread = thread_number();
        for (int64_t l = 0; l < count; l++) {
            for (int64_t i = 0; i < tap_count; i++)
                if (tapped[i] == l) {
#pragma omp for schedule(static)
                    for (int64_t m = 0; m < M; m++) std::memcpy(taps + m * tap_stride + i * D, x + m * D, D * sizeof(float));
                }
            Slots here = *slots;
            here.keys += l * here.layer;
            here.values += l * here.layer;
            decoder_layer(layers[l], *s, *p, here, nullptr, x, thread);
        }
    }
}

// One layer of a draft net: attention reads `input` [M, inputs of qkv], x [M, D] is the residual stream.
void eyas_draft_layer(const Layer* layer, const Shape* s, const Pass* p, const Slots* slots, const float* input, float* x) {
#pragma omp parallel num_threads(p->threads)
    decoder_layer(*layer, *s, *p, *slots, input, x, thread_number());
}

// y [M, D] = RMS norm of x [M, D] (stride ldy), then, if there is a head, logits [M, outputs] of it.
void eyas_head(const float* x, int64_t M, int64_t D, const float* norm, float eps, float* y, int64_t ldy, const Matrix* head, float* logits, int64_t threads) {
#pragma omp parallel num_threads(threads)
    {
        rms_norms(x, D, norm, M, D, eps, y, ldy);
        if (head) linear(*head, y, ldy, M, logits, head->outputs, STORE);
    }
}

// Gumbel noise [B, N, V] of (seed, stream, position, token), as sampling.py defines it; zero in greedy rows. ids: the tokens, or null: all.
void eyas_gumbel(const int64_t* seed, const uint8_t* greedy, int64_t stream, const int64_t* position, int64_t B, int64_t N, const int64_t* ids,
                 int64_t V, float* noise, int64_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < B * N; row++) {
        if (greedy[row / N]) {
            if (V) std::memset(noise + row * V, 0, V * sizeof(float));
            continue;
        }
        const Bits bits(seed[row / N], stream, position[row]);
        for (int64_t begin = 0; begin < V; begin += 8) {
            const int64_t count = V - begin < 8 ? V - begin : 8;
            Words token = Bits::from(begin);
            if (ids) std::memcpy(&token, ids + begin, count * sizeof(int64_t));
            Doubles g = gumbel(bits.of(token));
            for (int64_t i = 0; i < count; i++) noise[row * V + begin + i] = (float)g[i];
        }
    }
}

// The token drawn at every node [B, N] from its scores [B, N, V]: the largest of score + noise of the position behind the node's, the
// largest score in greedy rows. broken [B]: rows with a score that is not a number.
void eyas_draw(const float* scores, const int64_t* depth, const int64_t* seed, const uint8_t* greedy, int64_t stream, const int64_t* position,
               int64_t B, int64_t N, int64_t V, int64_t* drawn, uint8_t* broken, int64_t threads) {
    if (B) std::memset(broken, 0, B);  // an empty tensor has no address
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < B * N; row++) {
        const int64_t b = row / N;
        const Bits bits(seed[b], stream, position[b] + depth[row] + 1);
        bool bad = false;
        drawn[row] = draw(scores + row * V, V, greedy[b] ? nullptr : &bits, bad);
        if (bad) {
#pragma omp atomic write
            broken[b] = 1;
        }
    }
}

// The path that follows what was drawn at the nodes (verify.py says what is accepted): path and tokens [B, P], past its end -1 and 0; its
// length and the token after it [B]. Returns the number of siblings with one token: there may be none.
int64_t eyas_follow(const int64_t* tokens, const int64_t* parents, const uint8_t* candidates, const int64_t* draws, int64_t B, int64_t N,
                    int64_t P, int64_t* path, int64_t* path_tokens, int64_t* length, int64_t* bonus) {
    int64_t twins = 0;
    for (int64_t b = 0; b < B; b++, tokens += N, parents += N, candidates += N, draws += N, path += P, path_tokens += P) {
        int64_t node = 0, count = 0;
        for (int64_t p = 0; p < P; p++) path[p] = -1, path_tokens[p] = 0;
        for (int64_t n = 0; n < N; n++) {  // a parent comes before its children
            if (!n || (candidates[n] && parents[n] == node && tokens[n] == draws[node])) node = n, path[count] = n, path_tokens[count++] = tokens[n];
            if (n && candidates[n])
                for (int64_t m = 1; m < n; m++) twins += candidates[m] && parents[m] == parents[n] && tokens[m] == tokens[n];
        }
        length[b] = count, bonus[b] = draws[node];
    }
    return twins;
}

// Slots of a cache [E, B, K, slots, h]: the path's nodes go behind the committed ones, root excepted, which stands there already.
void eyas_commit(float* store, int64_t E, int64_t B, int64_t K, int64_t slots, int64_t h, const int64_t* length, const int64_t* path, int64_t P) {
    for (int64_t row = 0; row < E * B * K; row++) {
        const int64_t b = row / K % B;
        float* first = store + (row * slots + length[b]) * h;
        for (int64_t p = 1; p < P && path[b * P + p] >= 0; p++)  // a node stands no earlier than its place on the path
            if (path[b * P + p] != p) std::memcpy(first + p * h, first + path[b * P + p] * h, h * sizeof(float));
    }
}

// What was accepted since the last tree is read first: `pending` [B, P, D, or what is fused] of `accepted` tokens [B, P], of which each row has `counts` [B] >= 1,
// each with the token after it, which is the root after the last. `given`: lengths before that, and tables of cosines; its queries, nodes, positions and visible nodes are set here, pass by pass,
// within the room that it comes with (for B x max(P, branch) nodes).
void eyas_grow(const Net* net, const Layer* layer, const Shape* s, const Pass* given, const Slots* slots, const Plan* plan,
               const float* pending, const int64_t* accepted, int64_t P, const int64_t* counts, const int64_t* roots, const Grown* out) {
    const int64_t B = given->rows, D = s->hidden, K = plan->branch < net->vocabulary ? plan->branch : net->vocabulary, M = B * K;
    const int64_t padded = (net->vocabulary + PANEL - 1) / PANEL * PANEL, most = plan->depth * K, width = (net->paired ? 2 : 1) * D;
    std::vector<std::vector<Node>> drafted(B);
    std::vector<std::vector<int64_t>> beams(B);
    std::vector<int64_t> pick(M), tokens(M), position(M), after(B * P);
    std::vector<uint8_t> visible(M * most), before;
    const int64_t room = std::max(M, B * P);
    std::vector<float> state(room * D), next(room * D), normed(room * D), pair(room * 2 * D), input(room * width), logits(M * padded);
    std::vector<float> keys(given->threads * (padded + LANES));
    std::vector<Guess> best(M * K);
    Plan narrow = *plan;
    narrow.branch = K;
    Pass p = *given;
    std::vector<int64_t> length(p.length, p.length + B);
    position.resize(room), visible.resize(std::max(M * most, B * P * P));
    for (int64_t m = 0; m < B * P; m++) {
        position[m] = length[m / P] + m % P;
        after[m] = m % P + 1 < counts[m / P] ? accepted[m + 1] : roots[m / P];
        for (int64_t t = 0; t < P; t++) visible[m * P + t] = t <= m % P;
    }
    p.queries = p.nodes = P, p.position = position.data(), p.visible = p.near = visible.data();
#pragma omp parallel num_threads(p.threads)
    {
        const float* hidden = pending;
        if (net->fuse.data) {
            linear(net->fuse, pending, net->fuse.inputs, B * P, normed.data(), D, STORE);
            hidden = normed.data();
        }
        join(*net, *s, after.data(), hidden, B * P, pair.data(), input.data(), next.data());
        decoder_layer(*layer, *s, p, *slots, input.data(), next.data(), thread_number());
        if (net->carries_normed) rms_norms(next.data(), D, net->norm, B * P, D, s->eps, next.data(), D);
    }
    for (int64_t b = 0; b < B; b++) {
        std::memcpy(&state[b * D], &next[(b * P + std::max<int64_t>(counts[b], 1) - 1) * D], D * sizeof(float));
        length[b] += counts[b];
    }
    p.length = length.data();
    int64_t Q = 1;  // nodes of a row in this level
    for (int64_t level = 0; level < plan->depth; level++, Q = K) {
        if (level) {  // expand the picked nodes
            before.assign(visible.begin(), visible.end());
            const int64_t T = level * K;
            for (int64_t b = 0; b < B; b++)
                for (int64_t q = 0; q < K; q++) {
                    const int64_t m = b * K + q, parent = pick[m] / K;  // its row among the level before
                    for (int64_t t = 0; t < T; t++)
                        visible[m * T + t] = t < T - K ? before[(b * K + parent) * (T - K) + t] : t - (T - K) == q;
                    position[m] = p.length[b] + level - 1;
                    std::memcpy(&next[m * D], &state[(level == 1 ? b : b * K + parent) * D], D * sizeof(float));
                }
            p.queries = K, p.nodes = T, p.position = position.data(), p.visible = p.near = visible.data();
            state.swap(next);
        }
        const int64_t count = B * Q;
#pragma omp parallel num_threads(p.threads)
        {
            const int thread = thread_number();
            if (level) {
                join(*net, *s, tokens.data(), state.data(), M, pair.data(), input.data(), next.data());
                decoder_layer(*layer, *s, p, *slots, input.data(), next.data(), thread);
                if (net->carries_normed) rms_norms(next.data(), D, net->norm, M, D, s->eps, next.data(), D);
            }
            const float* read = level ? next.data() : state.data();
            if (net->norm && !net->carries_normed) {
                rms_norms(read, D, net->norm, count, D, s->eps, normed.data(), D);
                read = normed.data();
            }
            linear(net->head, read, D, count, logits.data(), padded, STORE);
            const int64_t v = net->vocabulary;
#pragma omp for schedule(static)
            for (int64_t m = 0; m < count; m++) {
                const float* noise = plan->noise ? plan->noise + (m / Q * plan->depth + level) * v : nullptr;
                guess(*net, narrow, &logits[m * padded], noise, plan->temperature[m / Q], &keys[thread * (padded + LANES)], &best[m * K]);
            }
        }
        if (level) state.swap(next);
        for (int64_t b = 0; b < B; b++) {  // what was drafted, and which of it is expanded next
            std::vector<float> order(Q * K);
            const int64_t begin = (int64_t)drafted[b].size();
            for (int64_t q = 0; q < Q; q++) {
                const int64_t parent = level ? beams[b][beams[b].size() - K + q] : -1;
                const float above = level ? drafted[b][parent].value : 0;
                for (int64_t k = 0; k < K; k++) {
                    const Guess& child = best[(b * Q + q) * K + k];
                    const float chance = level && above <= plan->log_stop ? -INFINITY : child.chance;
                    drafted[b].push_back({net->ids ? net->ids[child.index] : child.index, parent, child.own, above + chance});
                    order[q * K + k] = plan->by_confidence ? chance : above + chance;
                }
            }
            std::vector<int64_t> chosen = largest(order.data(), Q * K, K);
            if (!level)
                for (int64_t k = 0; k < K; k++) chosen[k] = k;  // all of them, as they come
            for (int64_t k = 0; k < K; k++) {
                pick[b * K + k] = chosen[k];
                beams[b].push_back(begin + chosen[k]);
                tokens[b * K + k] = drafted[b][begin + chosen[k]].token;
            }
        }
    }
    for (int64_t b = 0; b < B; b++) {
        const int64_t size = (int64_t)drafted[b].size(), wanted = plan->nodes - 1;
        std::vector<int64_t> kept = beams[b];
        if (plan->rerank) {
            std::vector<float> values(size);
            for (int64_t i = 0; i < size; i++) values[i] = drafted[b][i].value;
            kept = largest(values.data(), size, wanted);
        }
        if ((int64_t)kept.size() > wanted) kept.resize(wanted);
        std::sort(kept.begin(), kept.end());
        keep(drafted[b], kept, roots[b], b, (int64_t)kept.size() + 1, *out);
        int64_t* parents = out->drafted_parents + b * (size + 1);
        float* values = out->drafted_values + b * (size + 1);
        parents[0] = -1, values[0] = 0;
        for (int64_t i = 0; i < size; i++) parents[i + 1] = drafted[b][i].parent + 1, values[i + 1] = drafted[b][i].value;
    }
}
}
