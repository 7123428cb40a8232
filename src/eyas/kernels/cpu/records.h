// What is handed over, as in _records.py.
#pragma once

#include "vectors.h"

enum Kind : int64_t { FLOAT32, BFLOAT16, INT8, QUADS, INT4 };

struct Matrix {
    const void* data;    // panels, as tiles.h says; null: there is none
    const float* scale;  // [outputs], or null
    const float* bias;   // [outputs], or null
    int64_t kind, digits, inputs, outputs;  // digits: that x is taken apart into for QUADS and INT4, and parts for BFLOAT16; outputs: a multiple of 32
};

struct Layer {
    Matrix qkv, o, gate_up, down;  // gate_up: panels hold 16 gates, then the 16 ups beside them
    const float *norm, *mlp_norm, *q_norm, *k_norm;  // RMS norms; null: there is none
    int64_t window;  // positions that it sees, the query's own included; 0: all
};

struct Shape {
    int64_t hidden, heads, kv_heads, head_dim, inner;
    float eps, scale;  // of the norms; of the scores
};

struct Slots {  // a cache, or the rows of it that this pass concerns
    float *keys, *values;  // of layer 0, row 0; [.., R, K, slot, h]
    int64_t layer, row, head, slot;  // strides, in floats
};

struct Pass {
    int64_t rows, queries, nodes;  // R, Q, T
    const int64_t* length;         // [R] committed slots, all of them visible
    const int64_t* position;       // [R, Q]
    const uint8_t* visible;        // [R, Q, T]: which of the nodes behind the committed slots; the new nodes are the last Q
    const uint8_t* near;           // the same for layers with a window
    const float *cosine, *sine;    // [position, h]
    int64_t most;                  // more than the slots that a query may see, by 32 or more
    float *normed, *qkv, *context, *inner, *scores;  // room for (M, and threads x min(M, FEW)) D, M x ((H + 2K) h, H h, inner), and threads x PAIRS x most
    int64_t threads;
};
