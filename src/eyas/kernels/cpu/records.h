// The structures that Python passes, mirrored in _records.py.
#pragma once

#include "vectors.h"

// From NIBBLES on there are scales for groups of inputs (tiles.h); with _MIN, minima, too.
enum Kind : int64_t {
    FLOAT32,
    BFLOAT16,
    FLOAT16,
    INT8,
    INT8_DOT,
    NIBBLES,
    NIBBLES_MIN,
    CODES,
    BYTES32,
    BYTES32_MIN,
    BYTES16
};

// How a group's scales are stored, P outputs side by side. SUPER: numbers of 8 bits for each group,
// which multiply numbers in float16 that 256 inputs share; these come before the first of them.
enum Scales : int64_t { HALF, BFLOAT, HALF_MIN, SUPER, SUPER_MIN };

struct Matrix {
    const void* data;    // panels in the layouts of tiles.h; null: no matrix
    const float* scale;  // [outputs], or null
    const float* bias;   // [outputs], or null
    int64_t kind;
    int64_t limbs;  // of x for dots of integers; for BFLOAT16 its parts, 1 (rounded) or 3
    int64_t inputs, outputs;  // outputs: padded to a multiple of PANEL
    Scales scales;         // of kinds with groups
    int64_t zero;          // stored for a weight of 0; unused by kinds with minima
    int64_t panel_bytes;
    const uint8_t* codes;  // [16]: the integers of nibbles, INT8_ZERO added; null: nibbles are integers

    bool has_min() const { return kind == NIBBLES_MIN || kind == BYTES32_MIN; }
};

// The experts of an MLP. A token goes through the `top` of them that the router scores highest.
struct Experts {
    Matrix router;
    const Matrix *gate_up, *down;  // [count]
    int64_t count, top;
    int64_t normed;  // a token's weights sum to 1; otherwise they are probabilities among all experts
    const float* bias;  // the weights are sigmoids, and those with this bias choose the experts; null: softmax
    // Of experts beside a dense MLP, which all read x (Gemma 4); null: there is no dense MLP. Norms of
    // what the experts read, of what the router reads, and of the outputs of experts and dense MLP;
    // the factor of each expert's weight
    const float *norm, *router_norm, *output_norm, *dense_norm, *factors;
};

// A layer with recurrent state instead of attention (states.h): a gated delta net, or, without heads,
// a short convolution alone.
struct StateLayer {
    int64_t key_heads, value_heads, key_dim, value_dim;
    int64_t channels, taps;  // of the convolution; with 0 taps the layer has attention instead
    const float* conv;       // [taps][channels], the oldest input first
    const float* conv_bias;  // [channels], or null
    // of value heads: the decay is exp(rate * softplus(a + step_bias)); the norm's weight
    const float *rate, *step_bias, *norm;
    int64_t tiled;  // o has the first value heads of all key heads first, then the second ones
};

// Where queries and keys are normed: each head before or after it is rotated, or all heads as one.
enum HeadNorm : int64_t { BEFORE_ROPE, AFTER_ROPE, WHOLE };

struct Shape {
    int64_t hidden, heads, kv_heads, head_dim, inner;
    float eps;       // of the norms
    float scale;     // of the attention scores
    float softcap;   // scores become softcap * tanh(scores / softcap); 0: they stay
    float residual;  // factor of what attention and MLP add to x
    int64_t rotary;  // leading floats of a head that RoPE rotates
    int64_t activation;  // of the MLP: an Epilogue (tiles.h)
    int64_t centred;     // norms subtract the mean
    int64_t parallel;    // the MLP reads what attention reads, not the sum
    HeadNorm head_norm;
    int64_t query_table;  // queries have a table of angles of their own, after the layer's
    int64_t gated;   // what attention gathers is multiplied by the sigmoids of gates, which lie behind the queries
    int64_t stride;  // floats from one token's projections to the next one's: whole panels

    // what attention and MLP add is normed or scaled first
    bool adds_plainly(const float* norm) const { return !norm && residual == 1; }

    // Where the projections of a token have its keys.
    int64_t keys() const { return (gated ? 2 : 1) * heads * head_dim; }
};

// Numbers that each token has for each layer, beside x (Gemma 4's per-layer embeddings). To x the layer
// adds the norm of their projection. They are multiplied by gates, gelu(gate * x), first.
struct TokenInput {
    Matrix gate, projection;  // gate without data: there are none
    const float* norm;
    int64_t begin;  // where the layer's numbers begin among a token's
};

struct Layer {
    Shape shape;
    // gate_up: panels hold LANES gates, then the LANES ups beside them; of an MLP without gates its
    // first matrix
    Matrix qkv, o, gate_up, down;
    Matrix k, v;  // what a file has in other types than qkv, whose outputs theirs follow; without data: nothing
    const float *norm, *mlp_norm, *q_norm, *k_norm;  // weights of norms; null: no norm
    int64_t window;  // visible positions, the query's own included; 0: all
    const float *norm_bias, *mlp_norm_bias;         // of norms that are centred; null: none
    const float *attention_norm, *output_norm;      // of what attention and MLP add to x; null: none
    int64_t rope;                                   // its table of angles; -1: it does not rotate
    const Experts* experts;                         // instead of gate_up and down; null: none
    const float* sinks;  // [heads]: scores of nothing, in the sum of a softmax alone; null: none
    StateLayer state;                               // instead of attention
    int64_t store;  // number of the cache that has its keys and values
    int64_t place;  // among the layers of that cache, or among those with state
    int64_t borrows;      // its keys and values are those that an earlier layer has stored at this place
    const float* v_norm;  // [head_dim]: weight of the norm of values; null: no norm
    // The shared expert reads every token, in addition to the token's own experts. Its output is
    // multiplied by the sigmoid of x * shared_gate [hidden]. null: there is no shared expert
    Matrix shared_gate_up, shared_down;
    const float* shared_gate;
    TokenInput input;
    float factor;  // of what the layer returns
};

struct KVCache {
    char *keys, *values;        // of layer 0; [layer, row, K, slot, h]
    const int64_t* row;         // [R]: where each row of the pass begins, in bytes
    int64_t layer, head, slot;  // strides in bytes
    int64_t type;               // of the numbers: FLOAT32, BFLOAT16, or INT8 with a scale after them

    KVCache of_layer(int64_t number) const {
        KVCache other = *this;
        other.keys += number * layer, other.values += number * layer;
        return other;
    }
};

// The states of layers without attention (states.h), of all rows of a session. Strides in floats.
struct States {
    float* state;            // [row, layer, ...] after the committed tokens that are not pending
    float* nodes;            // [row, layer, node, ...] records of uncommitted nodes
    const int64_t* path;     // [row, longest_path] nodes that were accepted
    int64_t* pending;        // [row] how many of these the state lacks; the pass adds them, and sets 0
    const int64_t* row;      // [R]: the rows of the pass
    int64_t state_row, state_layer, node_row, node_layer, node, longest_path;
    int64_t commits;  // the new nodes are a prompt's: the state goes on behind them, and none is kept
};

struct Pass {
    int64_t rows, queries, nodes;  // R, Q, T
    // [R + 1]: where each row's tokens begin in x, if rows have fewer than Q new nodes; else null
    const int64_t* begin;
    const int64_t* length;         // [R] committed slots, all visible
    const int64_t* position;       // [R, Q]
    // [R, Q, T]: visible nodes among those behind the committed slots; the new nodes are the last Q
    const uint8_t* visible;
    const uint8_t* visible_in_window;  // [R, Q, T]: the same for layers with a window
    const float *cosine, *sine;        // [table, position, angles]
    int64_t table, angles;             // floats of a table, and of a position
    const float* inputs;               // [M, token_inputs]: the numbers of `TokenInput`, or null
    int64_t token_inputs;
    int64_t
        score_stride;  // floats of a query's scores: at least 2 vectors more than its visible slots
    // Work space for max(M, threads x min(M, SMALL_BATCH)) x D; M x stride; M x the inputs of o; M x inner;
    // threads x MAX_PAIRS x score_stride; and M x D floats. With experts, M (3 D + top + outputs of
    // the router) floats, and 2 M top + count + 1 integers.
    float *normed, *qkv, *context, *inner, *scores, *branch, *routed;
    int64_t* routes;
    int64_t threads;

    int64_t first(int64_t row) const { return begin ? begin[row] : row * queries; }
    int64_t count(int64_t row) const { return first(row + 1) - first(row); }  // its new nodes
    int64_t tokens() const { return first(rows); }                             // M
};
