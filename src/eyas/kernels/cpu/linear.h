// Linear layers and RMS norms.
#pragma once

#include "amx.h"

// tiles of a panel from which on its weights are made floats once, and not in every tile
constexpr int64_t MIN_WIDE_TILES = 3;

// The weights of a panel as floats, [input][PANEL].
template <class W>
static void widen(const Matrix& matrix, const W* w, float* to) {
    Prefetch prefetch{(const char*)w + PREFETCH_BYTES, PanelFormat<W>::read_bytes};
    for_inputs(matrix, w, 0, matrix.inputs, prefetch,
               [&](int64_t k, FloatVec first, FloatVec second) INLINE_LAMBDA {
                   store(to + k * PANEL, first);
                   store(to + k * PANEL + LANES, second);
               });
}

// Multiply M rows of x, in many tiles, by a panel of floats. All tiles use SUM_BLOCK inputs before
// any uses the next, so these weights stay in the L1 cache. Results equal multiply_tile's to the
// last bit, as it sums in the same order.
static void multiply_wide(const float* x, int64_t ldx, const float* w, int64_t inputs, int64_t M,
                          const float* scale, const float* bias, float* y, int64_t ldy,
                          Epilogue epilogue) {
    alignas(64) float sums[MAX_BLOCK_ROWS * PANEL];
    std::memset(sums, 0, M * PANEL * sizeof(float));
    const int64_t tiles = (M + TILE_ROWS - 1) / TILE_ROWS, bytes = SUM_BLOCK * PANEL * sizeof(float);
    for (int64_t k = 0; k < inputs; k += SUM_BLOCK)
        for (int64_t i = 0; i < tiles; i++) {
            const int64_t m = i * M / tiles, rows = (i + 1) * M / tiles - m;
            const char* next = (const char*)(w + (k + SUM_BLOCK) * PANEL) + i * (bytes / tiles);
            add_products_of<TILE_ROWS>(rows, x + m * ldx, ldx, w, k,
                                       std::min<int64_t>(k + SUM_BLOCK, inputs),
                                       {next, 4 * PANEL / tiles}, sums + m * PANEL);
        }
    for (int64_t m = 0; m < M; m++)
        apply_epilogue(load(sums + m * PANEL), load(sums + m * PANEL + LANES), scale, bias,
                       y + m * ldy, epilogue);
}

// x [M, inputs], at most MAX_BLOCK_ROWS rows, through all panels. A panel's tiles have nearly the
// same number of rows.
template <class W>
static void multiply_panels(const Matrix& w, const float* x, int64_t ldx, int64_t M, float* y,
                            int64_t ldy, Epilogue epilogue) {
    using F = PanelFormat<W>;
    if constexpr (AmxFormat<W>::parts > 0)
        if (uses_amx<W>(w.inputs, M)) return multiply_panels_amx<W>(w, x, ldx, M, y, ldy, epilogue);
    constexpr int MOST = F::tile_rows;
    const int64_t tiles = (M + MOST - 1) / MOST, width = panel_width(epilogue);
    const int64_t bytes = w.panel_bytes;
    // rows would evict each other from the L1 cache
    const bool aliased = M > 4 && ldx % CACHE_SET_STRIDE == 0;
    const PreparedRows* prepared =
        F::x_bytes || aliased ? prepared_rows<F>(x, ldx, M, w, tiles) : nullptr;
    static thread_local std::vector<float> widened;
    const bool wide = tiles >= MIN_WIDE_TILES, widens = F::widens && wide;
    if (widens && (int64_t)widened.size() < w.inputs * PANEL) widened.resize(w.inputs * PANEL);
    share(w.outputs / PANEL, M, [&](int64_t n) {
        const char* panel = (const char*)w.data + n * bytes;
        const float *scale = w.scale ? w.scale + n * PANEL : nullptr,
                    *bias = w.bias ? w.bias + n * PANEL : nullptr;
        if constexpr (F::widens)
            if (widens) widen(w, (const W*)panel, widened.data());
        if constexpr (SUM_BLOCK && (F::widens || std::is_same<W, float>::value))
            if (wide) {
                const float* floats = F::widens ? widened.data() : (const float*)panel;
                const float* from = aliased ? prepared->from<F>(0, w).x : x;
                return multiply_wide(from, aliased ? w.inputs + LANES : ldx, floats, w.inputs, M,
                                     scale, bias, y + n * width, ldy, epilogue);
            }
        for (int64_t i = 0; i < tiles; i++) {
            const int64_t m = i * M / tiles, rows = (i + 1) * M / tiles - m;
            const TileInput in = prepared ? prepared->from<F>(m, w)
                                          : TileInput{x + m * ldx, ldx, nullptr, nullptr, nullptr, &w};
            const Prefetch prefetch =
                tiles == 1 ? Prefetch{panel + PREFETCH_BYTES, F::read_bytes}
                           : Prefetch{panel + bytes + i * (bytes / tiles), F::read_bytes / tiles};
            float* to = y + m * ldy + n * width;
            if constexpr (F::widens)
                if (widens) {
                    multiply_rows<float, MOST>(rows, in, widened.data(), w.inputs,
                                               {(const char*)widened.data(), 0}, scale, bias, to,
                                               ldy, epilogue);
                    continue;
                }
            multiply_rows<W, MOST>(rows, in, (const W*)panel, w.inputs, prefetch, scale, bias, to,
                                   ldy, epilogue);
        }
    });
}

template <template <int> class W>
static void multiply_with_limbs(const Matrix& w, const float* x, int64_t ldx, int64_t M, float* y,
                                int64_t ldy, Epilogue epilogue) {
    if (w.limbs == 1) multiply_panels<W<1>>(w, x, ldx, M, y, ldy, epilogue);
    else if (w.limbs == 2) multiply_panels<W<2>>(w, x, ldx, M, y, ldy, epilogue);
    else multiply_panels<W<3>>(w, x, ldx, M, y, ldy, epilogue);
}

// y [M, outputs] from x [M, inputs]. Called inside a parallel region, as everything below.
static void linear(const Matrix& w, const float* x, int64_t ldx, int64_t M, float* y, int64_t ldy,
                   Epilogue epilogue) {
    // of a prepared value, about
    const int64_t x_bytes = w.kind >= INT8_DOT   ? w.limbs
                            : w.kind == BFLOAT16 ? 2 * w.limbs
                                                 : 6;
    const int64_t most =
        std::max(MIN_BLOCK_ROWS, std::min(MAX_BLOCK_ROWS, BLOCK_BYTES / (w.inputs * x_bytes)));
    const int64_t blocks = (M + most - 1) / most;
    for (int64_t i = 0; i < blocks; i++) {
        const int64_t m = i * M / blocks, rows = (i + 1) * M / blocks - m;
        if (w.kind == INT8_DOT)
            multiply_with_limbs<Int8Dot>(w, x + m * ldx, ldx, rows, y + m * ldy, ldy, epilogue);
        else if (w.kind == NIBBLES)
            multiply_with_limbs<Nibbles>(w, x + m * ldx, ldx, rows, y + m * ldy, ldy, epilogue);
        else if (w.kind == NIBBLES_MIN)
            multiply_with_limbs<NibblesMin>(w, x + m * ldx, ldx, rows, y + m * ldy, ldy, epilogue);
        else if (w.kind == CODES)
            multiply_with_limbs<Codes>(w, x + m * ldx, ldx, rows, y + m * ldy, ldy, epilogue);
        else if (w.kind == BYTES32)
            multiply_with_limbs<Bytes32>(w, x + m * ldx, ldx, rows, y + m * ldy, ldy, epilogue);
        else if (w.kind == BYTES32_MIN)
            multiply_with_limbs<Bytes32Min>(w, x + m * ldx, ldx, rows, y + m * ldy, ldy, epilogue);
        else if (w.kind == BYTES16)
            multiply_with_limbs<Bytes16>(w, x + m * ldx, ldx, rows, y + m * ldy, ldy, epilogue);
        else if (w.kind == INT8)
            multiply_panels<int8_t>(w, x + m * ldx, ldx, rows, y + m * ldy, ldy, epilogue);
#if defined(HAS_HALF)
        else if (w.kind == FLOAT16)
            multiply_panels<Float16>(w, x + m * ldx, ldx, rows, y + m * ldy, ldy, epilogue);
#endif
        else if (w.kind == BFLOAT16 && w.limbs == 1)
            multiply_panels<BFloat16Dot>(w, x + m * ldx, ldx, rows, y + m * ldy, ldy, epilogue);
        else if (w.kind == BFLOAT16)
            multiply_panels<uint16_t>(w, x + m * ldx, ldx, rows, y + m * ldy, ldy, epilogue);
        else multiply_panels<float>(w, x + m * ldx, ldx, rows, y + m * ldy, ldy, epilogue);
    }
}

static inline void rms_norm(const float* x, const float* weight, int64_t size, float eps,
                            float* y) {
    FloatVec squares = {};
    for (int64_t i = 0; i < size; i += LANES) squares = fma(load(x + i), load(x + i), squares);
    float factor = 1.0f / std::sqrt(horizontal_sum(squares) / (float)size + eps);
    for (int64_t i = 0; i < size; i += LANES)
        store(y + i, load(weight + i) * (load(x + i) * factor));
}

// LayerNorm: x without its mean, over its standard deviation.
static inline void centred_norm(const float* x, const float* weight, const float* bias, int64_t size,
                                float eps, float* y) {
    FloatVec sum = {}, squares = {};
    for (int64_t i = 0; i < size; i += LANES) sum += load(x + i);
    const float mean = horizontal_sum(sum) / (float)size;
    for (int64_t i = 0; i < size; i += LANES) {
        const FloatVec d = load(x + i) - mean;
        squares = fma(d, d, squares);
    }
    const float factor = 1.0f / std::sqrt(horizontal_sum(squares) / (float)size + eps);
    for (int64_t i = 0; i < size; i += LANES)
        store(y + i, fma(load(weight + i), (load(x + i) - mean) * factor,
                         bias ? load(bias + i) : FloatVec{}));
}

static void rms_norms(const float* x, int64_t ldx, const float* weight, int64_t M, int64_t size,
                      float eps, float* y, int64_t ldy) {
#pragma omp for schedule(static)
    for (int64_t m = 0; m < M; m++) rms_norm(x + m * ldx, weight, size, eps, y + m * ldy);
}

struct Norm {
    const float *weight, *bias;
    float eps;
    bool centred;

    void operator()(const float* x, int64_t size, float* y) const {
        if (centred) centred_norm(x, weight, bias, size, eps, y);
        else rms_norm(x, weight, size, eps, y);
    }
};

// The norms of x [M, D]. Of few tokens every thread computes its own copy, which is faster than
// waiting for the others; y has room for all copies.
static const float* normed_rows(int thread, const float* x, const Norm& norm, int64_t M, int64_t D,
                                float* y) {
    if (M > SMALL_BATCH) {
#pragma omp for schedule(static)
        for (int64_t m = 0; m < M; m++) norm(x + m * D, D, y + m * D);
        return y;
    }
    float* own = y + thread * M * D;
    for (int64_t m = 0; m < M; m++) norm(x + m * D, D, own + m * D);
    return own;
}
