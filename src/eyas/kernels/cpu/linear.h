// Records, as in _records.py; linear layers and norms.
#pragma once

#include "tiles.h"

enum Kind : int64_t { FLOAT32, BFLOAT16, INT8, QUADS, INT4 };

struct Matrix {
    const void* data;    // panels, as tiles.h says; null: there is none
    const float* scale;  // [outputs], or null
    const float* bias;   // [outputs], or null
    int64_t kind, digits, inputs, outputs;  // digits: of what QUADS and INT4 are multiplied by; outputs: a multiple of 32
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

// x [M, inputs] of at most BLOCK rows through all panels. The tiles of a panel are of one size, as nearly as can be.
template <class W>
static void panels(const Matrix& w, const float* x, int64_t ldx, int64_t M, float* y, int64_t ldy, End end) {
    using F = Form<W>;
    constexpr int MOST = F::rows;
    const int64_t count = (M + MOST - 1) / MOST, width = end == GATE ? LANES : PANEL;
    const int64_t bytes = F::bytes(w.inputs);
    const bool crowded = M > 4 && ldx % SETS == 0;  // rows that would push each other out
    const Rows* ready = F::digits || crowded ? made_ready<F>(x, ldx, M, w.inputs, count) : nullptr;
#pragma omp for schedule(static)
    for (int64_t n = 0; n < w.outputs / PANEL; n++) {
        const char* panel = (const char*)w.data + n * bytes;
        const float *scale = w.scale ? w.scale + n * PANEL : nullptr, *bias = w.bias ? w.bias + n * PANEL : nullptr;
        for (int64_t i = 0; i < count; i++) {
            const int64_t m = i * M / count, rows = (i + 1) * M / count - m;
            const Input in = ready ? ready->from<F>(m, w.inputs) : Input{x + m * ldx, ldx, nullptr, nullptr, nullptr};
            const Ahead ahead = count == 1 ? Ahead{panel + NEAR, F::step} : Ahead{panel + bytes + i * (bytes / count), F::step / count};
            tiles<W, MOST>(rows, in, (const W*)panel, w.inputs, ahead, scale, bias, y + m * ldy + n * width, ldy, end);
        }
    }
}

template <template <int> class W>
static void by_digits(const Matrix& w, const float* x, int64_t ldx, int64_t M, float* y, int64_t ldy, End end) {
    if (w.digits == 1) panels<W<1>>(w, x, ldx, M, y, ldy, end);
    else if (w.digits == 2) panels<W<2>>(w, x, ldx, M, y, ldy, end);
    else panels<W<3>>(w, x, ldx, M, y, ldy, end);
}

// Inside a parallel region, as everything below: y [M, outputs] from x [M, inputs].
static void linear(const Matrix& w, const float* x, int64_t ldx, int64_t M, float* y, int64_t ldy, End end) {
    const int64_t blocks = (M + BLOCK - 1) / BLOCK;
    for (int64_t i = 0; i < blocks; i++) {
        const int64_t m = i * M / blocks, rows = (i + 1) * M / blocks - m;
        if (w.kind == QUADS) by_digits<Quad>(w, x + m * ldx, ldx, rows, y + m * ldy, ldy, end);
        else if (w.kind == INT4) by_digits<Nibbles>(w, x + m * ldx, ldx, rows, y + m * ldy, ldy, end);
        else if (w.kind == INT8) panels<int8_t>(w, x + m * ldx, ldx, rows, y + m * ldy, ldy, end);
        else if (w.kind == BFLOAT16) panels<uint16_t>(w, x + m * ldx, ldx, rows, y + m * ldy, ldy, end);
        else panels<float>(w, x + m * ldx, ldx, rows, y + m * ldy, ldy, end);
    }
}

static inline void rms_norm(const float* x, const float* weight, int64_t size, float eps, float* y) {
    Floats squares = {};
    for (int64_t i = 0; i < size; i += LANES) squares = fma(load(x + i), load(x + i), squares);
    float factor = 1.0f / std::sqrt(sum(squares) / (float)size + eps);
    for (int64_t i = 0; i < size; i += LANES) store(y + i, load(weight + i) * (load(x + i) * factor));
}

static void rms_norms(const float* x, int64_t ldx, const float* weight, int64_t M, int64_t size, float eps, float* y, int64_t ldy) {
#pragma omp for schedule(static)
    for (int64_t m = 0; m < M; m++) rms_norm(x + m * ldx, weight, size, eps, y + m * ldy);
}

// The norms of x [M, D]: of a few tokens by every thread for itself, as waiting for each other would take longer; y has room for that.
static const float* normed_for(int thread, const float* x, const float* weight, int64_t M, int64_t D, float eps, float* y) {
    if (M > FEW) {
        rms_norms(x, D, weight, M, D, eps, y, D);
        return y;
    }
    float* mine = y + thread * M * D;
    for (int64_t m = 0; m < M; m++) rms_norm(x + m * D, weight, D, eps, mine + m * D);
    return mine;
}
