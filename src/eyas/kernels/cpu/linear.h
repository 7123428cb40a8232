// Linear layers and norms.
#pragma once

#include "units.h"

// x [M, inputs] of at most BLOCK rows through all panels. The tiles of a panel are of one size, as nearly as can be.
template <class W>
static void panels(const Matrix& w, const float* x, int64_t ldx, int64_t M, float* y, int64_t ldy, End end) {
    using F = Form<W>;
    if constexpr (Units<W>::parts > 0)
        if (by_units<W>(w.inputs, M)) return unit_panels<W>(w, x, ldx, M, y, ldy, end);
    constexpr int MOST = F::rows;
    const int64_t count = (M + MOST - 1) / MOST, width = end == GATE ? LANES : PANEL;
    const int64_t bytes = F::bytes(w.inputs);
    const bool crowded = M > 4 && ldx % SETS == 0;  // rows that would push each other out
    const Rows* ready = F::width || crowded ? rows_of<F>(x, ldx, M, w.inputs, count) : nullptr;
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
    const int64_t width = w.kind == QUADS || w.kind == INT4 ? w.digits : w.kind == BFLOAT16 ? 2 * w.digits : 6;  // bytes of a number of x, or nearly
    const int64_t most = std::max(LEAST, std::min(BLOCK, NEAR_ROWS / (w.inputs * width)));
    const int64_t blocks = (M + most - 1) / most;
    for (int64_t i = 0; i < blocks; i++) {
        const int64_t m = i * M / blocks, rows = (i + 1) * M / blocks - m;
        if (w.kind == QUADS) by_digits<Quad>(w, x + m * ldx, ldx, rows, y + m * ldy, ldy, end);
        else if (w.kind == INT4) by_digits<Nibbles>(w, x + m * ldx, ldx, rows, y + m * ldy, ldy, end);
        else if (w.kind == INT8) panels<int8_t>(w, x + m * ldx, ldx, rows, y + m * ldy, ldy, end);
        else if (w.kind == BFLOAT16 && w.digits == 1) panels<Half>(w, x + m * ldx, ldx, rows, y + m * ldy, ldy, end);
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
