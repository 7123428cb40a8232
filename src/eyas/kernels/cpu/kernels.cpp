// Entry points of the CPU kernels: a decoder layer's forward in plain C++ with vector types; no
// library but OpenMP. Compiled for the machine at hand by _build.py.
//
// Weights are read in the format in which they are stored (float32, bfloat16, int8, or int4 with
// scales), in panels of as many outputs as two vectors hold; isa/ has the instruction sets.
// Everything is computed in float32, or exactly in integers, unless rounding was asked for
// (tiles.h).
//
// Every result depends on its own row alone, in content and in the order of its operations: an
// output is summed over the inputs in one order, a softmax and its weighted values over the visible
// slots in order. So a token's logits are the same to the last bit whether it is forwarded alone,
// in a tree or in a batch, and with any number of threads.
//
// Letters as everywhere: R rows, Q new nodes of a row, T nodes in slots, M = R x Q tokens, D hidden
// size, H heads, K key-value heads, h head size.

#include "grow.h"
#include "noise.h"
#include "pack.h"

extern "C" {

// The floats of a vector; a panel of weights has twice as many outputs.
int64_t eyas_lanes() { return LANES; }

// The inputs side by side in matrices for integer dot products; 0: there are none.
int64_t eyas_dot_inputs() { return HAS_DOT ? DOT_INPUTS : 0; }

// What is added to int8 weights in such matrices.
int64_t eyas_int8_zero() { return INT8_ZERO; }

// Whether it has AVX-512 BF16.
int64_t eyas_has_avx512_bf16() { return HAS_AVX512_BF16; }

// Whether it has AMX, and the system lets this process use it.
int64_t eyas_has_amx() { return has_amx; }

// The weights of a block of a type that files in GGUF format have, its bytes in a file and in
// panels, and the form of these (pack.h); 0 where the type is not known or is a plain number.
int64_t eyas_block_type(int64_t type, int64_t* size, int64_t* bytes, int64_t* packed, int64_t* kind,
                        int64_t* scales, int64_t* zero, uint8_t* codes) {
    const BlockType* of = block_type(type);
    if (!of) return 0;
    *size = of->size, *bytes = of->bytes, *packed = of->packed_bytes();
    *kind = of->kind, *scales = of->scales;
    *zero = of->kind >= BYTES32 || of->codes ? INT8_ZERO : of->zero;
    for (int i = 0; of->codes && i < 16; i++) codes[i] = of->codes[i] + INT8_ZERO;
    return of->codes ? 2 : 1;
}

// Stored rows, given by their addresses, as floats [count, inputs].
void eyas_read_rows(int64_t type, const int64_t* rows, int64_t count, int64_t inputs, float* to,
                    int64_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i = 0; i < count; i++)
        read_row(type, (const void*)rows[i], inputs, to + i * inputs);
}

// Pack rows of the matrix `w`, whose data are not there yet, into `panels`.
void eyas_pack(const Matrix* w, int64_t type, const int64_t* rows, uint8_t* panels, float* scale,
               int64_t threads) {
#pragma omp parallel num_threads(threads)
    pack_rows(*w, type, rows, panels, scale);
}

// y [M, outputs] = x [M, inputs] times the matrix.
void eyas_linear(const Matrix* w, const float* x, int64_t M, float* y, int64_t threads) {
#pragma omp parallel num_threads(threads)
    linear(*w, x, w->inputs, M, y, w->outputs, STORE);
}

// x [M, D] through all layers, in place. The inputs of the layers named in `tapped` (ascending) are
// written side by side to the rows of `taps`, `tap_stride` floats apart. caches: by `Layer::store`.
// states: null if all layers have attention.
void eyas_layers(const Layer* layers, int64_t count, const Shape* s, const Pass* p,
                 const KVCache* caches, const States* states, float* x, const int64_t* tapped, int64_t tap_count,
                 float* taps, int64_t tap_stride) {
    const int64_t M = p->tokens(), D = s->hidden;
    std::vector<StatePass> of_states;
    if (states) of_states.emplace_back(*states, *p);
#pragma omp parallel num_threads(p->threads)
    {
        int thread = thread_number();
        for (int64_t l = 0; l < count; l++) {
            for (int64_t i = 0; i < tap_count; i++)
                if (tapped[i] == l) {
#pragma omp for schedule(static)
                    for (int64_t m = 0; m < M; m++)
                        std::memcpy(taps + m * tap_stride + i * D, x + m * D, D * sizeof(float));
                }
            decoder_layer(layers[l], *p, caches[layers[l].store].of_layer(layers[l].place), nullptr, x,
                          thread, of_states.data());
        }
    }
    for (int64_t r = 0; states && r < p->rows; r++) states->pending[states->row[r]] = 0;
}

// The layer of a draft net: attention reads `input` [M, inputs of qkv], x [M, D] is the residual
// stream, in place.
void eyas_draft_layer(const Layer* layer, const Pass* p, const KVCache* slots, const float* input,
                      float* x) {
#pragma omp parallel num_threads(p->threads)
    decoder_layer(*layer, *p, *slots, input, x, thread_number());
}

// y [M, D] (row stride ldy) = norm of x [M, D]; then, if there is a head, its logits [M, outputs].
// bias: of a norm that is centred, or null.
void eyas_head(const float* x, int64_t M, int64_t D, const float* norm, const float* bias,
               int64_t centred, float eps, float* y, int64_t ldy, const Matrix* head, float* logits,
               int64_t threads) {
    const Norm of_x{norm, bias, eps, centred != 0};
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (int64_t m = 0; m < M; m++) of_x(x + m * D, D, y + m * ldy);
        if (head) linear(*head, y, ldy, M, logits, head->outputs, STORE);
    }
}

// x *= factors[0], then x = c * tanh(x / c) with c = factors[1], unless it is 0. count: a multiple of
// LANES.
void eyas_scale(float* x, int64_t count, const float* factors, int64_t threads) {
    const int64_t vectors = count / LANES;
    const float scale = factors[0], softcap = factors[1];
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i = 0; i < vectors; i++) {
        store(x + i * LANES, load(x + i * LANES) * scale);
        if (softcap != 0) cap(x + i * LANES, LANES, softcap);
    }
}

// Gumbel noise [B, N, V] of (seed, stream, position, token), as core/sampling.py defines it; zero
// in greedy rows. ids: the V tokens, or null: 0 .. V - 1.
void eyas_gumbel(const int64_t* seed, const uint8_t* greedy, int64_t stream,
                 const int64_t* position, int64_t B, int64_t N, const int64_t* ids, int64_t V,
                 float* noise, int64_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < B * N; row++) {
        if (greedy[row / N]) {
            if (V) std::memset(noise + row * V, 0, V * sizeof(float));
            continue;
        }
        const TokenNoise key(seed[row / N], stream, position[row]);
        for (int64_t begin = 0; begin < V; begin += WIDE_LANES) {
            const int64_t count = V - begin < WIDE_LANES ? V - begin : WIDE_LANES;
            UInt64Vec token = TokenNoise::tokens_from(begin);
            if (ids) std::memcpy(&token, ids + begin, count * sizeof(int64_t));
            DoubleVec g = gumbel(key.bits(token));
            for (int64_t i = 0; i < count; i++) noise[row * V + begin + i] = (float)g[i];
        }
    }
}

// The token drawn at every acceptable node [B, N] from its scores [B, N, V]: the largest score +
// noise of the position behind the node's; the largest score in greedy rows. Nothing is read at
// other nodes, where it is -1. broken [B]: rows with a NaN score.
void eyas_draw(const float* scores, const int64_t* depth, const uint8_t* acceptable,
               const int64_t* seed, const uint8_t* greedy, int64_t stream, const int64_t* position,
               int64_t B, int64_t N, int64_t V, int64_t* drawn, uint8_t* broken, int64_t threads) {
    if (B) std::memset(broken, 0, B);  // an empty tensor has no address
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < B * N; row++) {
        const int64_t b = row / N;
        drawn[row] = -1;
        if (!acceptable[row]) continue;
        const TokenNoise key(seed[b], stream, position[b] + depth[row] + 1);
        bool is_nan = false;
        drawn[row] = draw(scores + row * V, V, greedy[b] ? nullptr : &key, is_nan);
        if (is_nan) {
#pragma omp atomic write
            broken[b] = 1;
        }
    }
}

// The accepted path: from the root to the child whose token was drawn, and on (core/verify.py).
// Path and its tokens [B, P], behind its end -1 and 0; its length and the bonus token [B]. Returns
// the number of siblings with equal tokens, which must be 0.
int64_t eyas_follow(const int64_t* tokens, const int64_t* parents, const uint8_t* candidates,
                    const int64_t* draws, int64_t B, int64_t N, int64_t P, int64_t* path,
                    int64_t* path_tokens, int64_t* length, int64_t* bonus) {
    int64_t matching_siblings = 0;
    for (int64_t b = 0; b < B;
         b++, tokens += N, parents += N, candidates += N, draws += N, path += P, path_tokens += P) {
        int64_t node = 0, count = 0;
        for (int64_t p = 0; p < P; p++) path[p] = -1, path_tokens[p] = 0;
        for (int64_t n = 0; n < N; n++) {  // parents come before their children
            if (!n || (candidates[n] && parents[n] == node && tokens[n] == draws[node]))
                node = n, path[count] = n, path_tokens[count++] = tokens[n];
            if (n && candidates[n])
                for (int64_t m = 1; m < n; m++)
                    matching_siblings +=
                        candidates[m] && parents[m] == parents[n] && tokens[m] == tokens[n];
        }
        length[b] = count, bonus[b] = draws[node];
    }
    return matching_siblings;
}

// Move the accepted nodes of a cache [E, B, K, slots, bytes] to the slots behind the committed
// ones; the root is there already.
void eyas_commit(char* store, int64_t E, int64_t B, int64_t K, int64_t slots, int64_t bytes,
                 const int64_t* length, const int64_t* path, int64_t P) {
    for (int64_t row = 0; row < E * B * K; row++) {
        const int64_t b = row / K % B;
        char* first = store + (row * slots + length[b]) * bytes;
        for (int64_t p = 1; p < P && path[b * P + p] >= 0;
             p++)  // a node's slot is never before its place on the path
            if (path[b * P + p] != p)
                std::memcpy(first + p * bytes, first + path[b * P + p] * bytes, bytes);
    }
}

// A dynamic tree (grow.h). First the net reads the tokens that were accepted since the last tree.
//
// pending: their features [B, P, D, or the inputs of fuse]; accepted [B, P] their tokens, the first
// counts[b] of each row. Each feature is paired with the next token, the last one with the root.
// base: the committed lengths before that, and the tables of cosines and sines; its queries, nodes,
// positions and masks are set here for each pass, in its work space, which is large enough for B x
// max(P, branch) nodes.
void eyas_grow(const Net* net, const Layer* layers, int64_t layer_count, const Shape* s,
               const Pass* base, const KVCache* slots, const Plan* plan, const float* pending,
               const int64_t* accepted, int64_t P, const int64_t* counts, const int64_t* roots,
               const Grown* out) {
    const int64_t B = base->rows, D = s->hidden,
                  K = plan->branch < net->vocabulary ? plan->branch : net->vocabulary, M = B * K;
    const int64_t padded = (net->vocabulary + PANEL - 1) / PANEL * PANEL,
                  max_nodes = plan->depth * K, width = (net->paired ? 2 : 1) * D;
    std::vector<std::vector<Node>> drafted(B);
    std::vector<std::vector<int64_t>> beams(B);
    std::vector<int64_t> picked(M), tokens(M), position(M), next_token(B * P);
    std::vector<uint8_t> visible(M * max_nodes), before;
    const int64_t capacity = std::max(M, B * P);
    std::vector<float> state(capacity * D), next(capacity * D), normed(capacity * D),
        pair(capacity * 2 * D), input(capacity * width), logits(M * padded);
    std::vector<float> keys(base->threads * (padded + LANES));
    std::vector<Child> best(M * K);
    Plan level_plan = *plan;
    level_plan.branch = K;
    Pass p = *base;
    std::vector<int64_t> length(p.length, p.length + B);
    position.resize(capacity), visible.resize(std::max(M * max_nodes, B * P * P));
    for (int64_t m = 0; m < B * P; m++) {
        position[m] = length[m / P] + m % P;
        next_token[m] = m % P + 1 < counts[m / P] ? accepted[m + 1] : roots[m / P];
        for (int64_t t = 0; t < P; t++) visible[m * P + t] = t <= m % P;
    }
    p.queries = p.nodes = P, p.position = position.data(),
    p.visible = p.visible_in_window = visible.data();
#pragma omp parallel num_threads(p.threads)
    {
        const float* hidden = pending;
        if (net->fuse.data) {
            linear(net->fuse, pending, net->fuse.inputs, B * P, normed.data(), D, STORE);
            hidden = normed.data();
        }
        net_inputs(*net, *s, next_token.data(), hidden, B * P, pair.data(), input.data(),
                   next.data());
        for (int64_t l = 0; l < layer_count; l++)
            decoder_layer(layers[l], p, slots->of_layer(l), l ? nullptr : input.data(), next.data(),
                          thread_number());
        if (net->carries_normed)
            rms_norms(next.data(), D, net->norm, B * P, D, s->eps, next.data(), D);
    }
    for (int64_t b = 0; b < B; b++) {
        std::memcpy(&state[b * D], &next[(b * P + std::max<int64_t>(counts[b], 1) - 1) * D],
                    D * sizeof(float));
        length[b] += counts[b];
    }
    p.length = length.data();
    int64_t Q = 1;  // nodes of a row that are expanded
    for (int64_t level = 0; level < plan->depth; level++, Q = K) {
        if (level) {  // the picked nodes are the next inputs
            before.assign(visible.begin(), visible.end());
            const int64_t T = level * K;
            for (int64_t b = 0; b < B; b++)
                for (int64_t q = 0; q < K; q++) {
                    // its index in the level before
                    const int64_t m = b * K + q, parent = picked[m] / K;
                    for (int64_t t = 0; t < T; t++)
                        visible[m * T + t] =
                            t < T - K ? before[(b * K + parent) * (T - K) + t] : t - (T - K) == q;
                    position[m] = p.length[b] + level - 1;
                    std::memcpy(&next[m * D], &state[(level == 1 ? b : b * K + parent) * D],
                                D * sizeof(float));
                }
            p.queries = K, p.nodes = T, p.position = position.data(),
            p.visible = p.visible_in_window = visible.data();
            state.swap(next);
        }
        const int64_t count = B * Q;
#pragma omp parallel num_threads(p.threads)
        {
            const int thread = thread_number();
            if (level) {
                net_inputs(*net, *s, tokens.data(), state.data(), M, pair.data(), input.data(),
                           next.data());
                for (int64_t l = 0; l < layer_count; l++)
                    decoder_layer(layers[l], p, slots->of_layer(l), l ? nullptr : input.data(),
                                  next.data(), thread);
                if (net->carries_normed)
                    rms_norms(next.data(), D, net->norm, M, D, s->eps, next.data(), D);
            }
            const float* hidden = level ? next.data() : state.data();
            if (net->norm && !net->carries_normed) {
                rms_norms(hidden, D, net->norm, count, D, s->eps, normed.data(), D);
                hidden = normed.data();
            }
            linear(net->head, hidden, D, count, logits.data(), padded, STORE);
            const int64_t v = net->vocabulary;
#pragma omp for schedule(static)
            for (int64_t m = 0; m < count; m++) {
                const float* noise =
                    plan->noise ? plan->noise + (m / Q * plan->depth + level) * v : nullptr;
                best_children(*net, level_plan, &logits[m * padded], noise,
                              plan->temperature[m / Q], &keys[thread * (padded + LANES)],
                              &best[m * K]);
            }
        }
        if (level) state.swap(next);
        for (int64_t b = 0; b < B;
             b++) {  // record the children, and pick those that are expanded next
            std::vector<float> order(Q * K);
            const int64_t begin = (int64_t)drafted[b].size();
            for (int64_t q = 0; q < Q; q++) {
                const int64_t parent = level ? beams[b][beams[b].size() - K + q] : -1;
                const float parent_value = level ? drafted[b][parent].value : 0;
                for (int64_t k = 0; k < K; k++) {
                    const Child& child = best[(b * Q + q) * K + k];
                    const float score =
                        level && parent_value <= plan->log_stop ? -INFINITY : child.score;
                    drafted[b].push_back({net->ids ? net->ids[child.index] : child.index, parent,
                                          child.log_q, parent_value + score});
                    order[q * K + k] = plan->by_confidence ? score : parent_value + score;
                }
            }
            std::vector<int64_t> best_nodes = top_indices(order.data(), Q * K, K);
            // the root's children are all expanded, in order
            if (!level)
                for (int64_t k = 0; k < K; k++) best_nodes[k] = k;
            for (int64_t k = 0; k < K; k++) {
                picked[b * K + k] = best_nodes[k];
                beams[b].push_back(begin + best_nodes[k]);
                tokens[b * K + k] = drafted[b][begin + best_nodes[k]].token;
            }
        }
    }
    for (int64_t b = 0; b < B; b++) {
        const int64_t size = (int64_t)drafted[b].size(), wanted = plan->nodes - 1;
        std::vector<int64_t> kept = beams[b];
        if (plan->rerank) {
            std::vector<float> values(size);
            for (int64_t i = 0; i < size; i++) values[i] = drafted[b][i].value;
            kept = top_indices(values.data(), size, wanted);
        }
        if ((int64_t)kept.size() > wanted) kept.resize(wanted);
        std::sort(kept.begin(), kept.end());
        write_tree(drafted[b], kept, roots[b], b, (int64_t)kept.size() + 1, *out);
        int64_t* parents = out->drafted_parents + b * (size + 1);
        float* values = out->drafted_values + b * (size + 1);
        parents[0] = -1, values[0] = 0;
        for (int64_t i = 0; i < size; i++)
            parents[i + 1] = drafted[b][i].parent + 1, values[i + 1] = drafted[b][i].value;
    }
}
}
