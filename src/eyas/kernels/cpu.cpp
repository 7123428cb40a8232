// A decoder layer's forward on a CPU: plain C++ with vector types, no library but OpenMP. Compiled for the machine at hand (_build.py).
//
// Weights are read in the form that they are stored in (float32, bfloat16, or int8 with a scale a row) and are widened to float32 in
// registers; everything is worked out in float32. Linear layers are packed in panels of 32 outputs, [panel][input][32].
//
// What every result is made of, and in which order, depends on its own row alone: an output is summed over the inputs one by one, a
// softmax and what it weighs over the visible slots in order. So a token's logits are the same to the last bit whether it is forwarded
// alone, in a tree, or in a batch, and with any number of threads.
//
// Letters as everywhere: R rows, Q new nodes of a row, T nodes in slots, M = R x Q tokens, D hidden, H heads, K key-value heads,
// h width of a head.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <vector>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

using std::int64_t;
typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));

constexpr int LANES = 16, PANEL = 2 * LANES, PAIRS = 24, FEW = 32;  // PAIRS: (query, head) that read a key together
#if defined(__AVX512F__)
constexpr int TILE = 12;  // rows of a tile: 24 sums and 2 weights in 32 registers
#else
constexpr int TILE = 3;
#endif

#if defined(_OPENMP)
#include <omp.h>
static inline int thread_number() { return omp_get_thread_num(); }
#else
static inline int thread_number() { return 0; }
#endif

// ------------------------------------------------------------------------------------------------------------ vectors

static inline Floats load(const float* p) { Floats v; std::memcpy(&v, p, sizeof v); return v; }
static inline void store(float* p, Floats v) { std::memcpy(p, &v, sizeof v); }
static inline Floats all(float x) { return x - Floats{}; }

static inline Floats load(const uint16_t* p) {  // bfloat16
    Halves half;
    std::memcpy(&half, p, sizeof half);
    Ints wide = __builtin_convertvector(half, Ints) << 16;
    return (Floats)wide;
}

static inline Floats load(const int8_t* p) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(__AVX2__)
    __m128i raw = _mm_loadu_si128((const __m128i*)p);
    __m256 low = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(raw));
    __m256 high = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(raw, 8)));
    Floats v;
    std::memcpy(&v, &low, sizeof low);
    std::memcpy((char*)&v + sizeof low, &high, sizeof high);
    return v;
#else
    Floats v;
    for (int i = 0; i < LANES; i++) v[i] = p[i];
    return v;
#endif
}

static inline Floats fma(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    return a * b + c;
#endif
}

static inline float sum(Floats v) {
    for (int step = LANES / 2; step; step /= 2)
        for (int i = 0; i < step; i++) v[i] += v[i + step];
    return v[0];
}

// The sums of 16 vectors, as one.
static inline Floats sums(const Floats* a) {
    Floats b[8], c[4], d[2];
    for (int i = 0; i < 8; i++)
        b[i] = __builtin_shufflevector(a[2 * i], a[2 * i + 1], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
               __builtin_shufflevector(a[2 * i], a[2 * i + 1], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    for (int i = 0; i < 4; i++)
        c[i] = __builtin_shufflevector(b[2 * i], b[2 * i + 1], 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
               __builtin_shufflevector(b[2 * i], b[2 * i + 1], 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    for (int i = 0; i < 2; i++)
        d[i] = __builtin_shufflevector(c[2 * i], c[2 * i + 1], 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29) +
               __builtin_shufflevector(c[2 * i], c[2 * i + 1], 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31);
    return __builtin_shufflevector(d[0], d[1], 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
           __builtin_shufflevector(d[0], d[1], 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
}

// e^x to about 2e-7 of itself; 0 below -87. x = n ln 2 + r, e^r by its series.
static inline Floats exponential(Floats x) {
    x = x > 88.0f ? all(88.0f) : x;
    Ints tiny = x < -87.0f;
    x = tiny ? all(-87.0f) : x;
    Ints n = __builtin_convertvector(x * 1.44269504f + (x < 0.0f ? all(-0.5f) : all(0.5f)), Ints);
    Floats whole = __builtin_convertvector(n, Floats);
    Floats r = x - whole * 0.693359375f - whole * -2.12194440e-4f;
    Floats y = fma(r, all(1.0f / 5040), all(1.0f / 720));
    for (float c : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) y = fma(y, r, all(c));
    y *= (Floats)((n + 127) << 23);
    return tiny ? Floats{} : y;
}

// ------------------------------------------------------------------------------------------------------------ noise

typedef double Doubles __attribute__((vector_size(64)));
typedef int64_t Longs __attribute__((vector_size(64)));
typedef uint64_t Words __attribute__((vector_size(64)));

template <class Word>
static inline Word mix(Word x) {  // SplitMix64's finaliser: sampling.py
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

// log x of normal numbers, to the last digits but one: x = 2^n m with m about 1, log m = 2 artanh((m - 1) / (m + 1)).
static inline Doubles logarithm(Doubles x) {
    Longs bits = (Longs)x, n = (bits >> 52) - 1023;
    Doubles m = (Doubles)((bits & 0xFFFFFFFFFFFFF) | 0x3FF0000000000000);
    Longs large = m > 1.4142135623730951;
    m = large ? m * 0.5 : m;
    n -= large;  // a comparison's truth is -1
    Doubles s = (m - 1.0) / (m + 1.0), t = s * s, y = t * (1.0 / 19) + 1.0 / 17;
    for (double c : {1.0 / 15, 1.0 / 13, 1.0 / 11, 1.0 / 9, 1.0 / 7, 1.0 / 5, 1.0 / 3, 1.0}) y = y * t + c;
    return __builtin_convertvector(n, Doubles) * 0.6931471805599453 + 2.0 * s * y;
}

// ------------------------------------------------------------------------------------------------------------ records, as in __init__.py

enum Kind : int64_t { FLOAT32, BFLOAT16, INT8 };
enum End : int { STORE, ADD, GATE };  // what is done with a linear layer's output: y = it, y += it, y = silu(first half) * second half

struct Matrix {
    const void* data;    // [panel][input][32]; null: there is none
    const float* scale;  // [outputs], or null
    const float* bias;   // [outputs], or null
    int64_t kind, inputs, outputs;  // outputs: a multiple of 32
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

// ------------------------------------------------------------------------------------------------------------ linear layers

static inline Floats silu(Floats x) { return x / (1.0f + exponential(-x)); }

template <int ROWS, class W>
static void tile(const float* x, int64_t ldx, const W* w, int64_t inputs, const float* scale, const float* bias, float* y, int64_t ldy, End end) {
    Floats a[ROWS][2] = {};
    for (int64_t k = 0; k < inputs; k++, w += PANEL) {
        Floats first = load(w), second = load(w + LANES);
        __builtin_prefetch((const char*)w + 4096);
        for (int m = 0; m < ROWS; m++) {
            Floats b = all(x[m * ldx + k]);
            a[m][0] = fma(b, first, a[m][0]);
            a[m][1] = fma(b, second, a[m][1]);
        }
    }
    for (int m = 0; m < ROWS; m++, y += ldy) {
        for (int half = 0; half < 2; half++) {
            if (scale) a[m][half] *= load(scale + half * LANES);
            if (bias) a[m][half] += load(bias + half * LANES);
        }
        if (end == GATE) {
            store(y, silu(a[m][0]) * a[m][1]);
        } else {
            store(y, end == ADD ? load(y) + a[m][0] : a[m][0]);
            store(y + LANES, end == ADD ? load(y + LANES) + a[m][1] : a[m][1]);
        }
    }
}

template <class W, int ROWS>
static void tiles(int64_t rows, const float* x, int64_t ldx, const W* w, int64_t inputs, const float* scale, const float* bias, float* y, int64_t ldy, End end) {
    if constexpr (ROWS > 1)
        if (rows < ROWS) return tiles<W, ROWS - 1>(rows, x, ldx, w, inputs, scale, bias, y, ldy, end);
    tile<ROWS>(x, ldx, w, inputs, scale, bias, y, ldy, end);
}

template <class W>
static void panels(const Matrix& w, const float* x, int64_t ldx, int64_t M, float* y, int64_t ldy, End end) {
    const int64_t count = (M + TILE - 1) / TILE, width = end == GATE ? LANES : PANEL;
#pragma omp for schedule(static)
    for (int64_t n = 0; n < w.outputs / PANEL; n++) {
        const W* panel = (const W*)w.data + n * PANEL * w.inputs;
        const float *scale = w.scale ? w.scale + n * PANEL : nullptr, *bias = w.bias ? w.bias + n * PANEL : nullptr;
        for (int64_t i = 0; i < count; i++) {
            int64_t m = i * M / count, end_m = (i + 1) * M / count;  // tiles of one size, as nearly as can be
            tiles<W, TILE>(end_m - m, x + m * ldx, ldx, panel, w.inputs, scale, bias, y + m * ldy + n * width, ldy, end);
        }
    }
}

// Inside a parallel region, as everything below: y [M, outputs] from x [M, inputs].
static void linear(const Matrix& w, const float* x, int64_t ldx, int64_t M, float* y, int64_t ldy, End end) {
    if (w.kind == INT8) panels<int8_t>(w, x, ldx, M, y, ldy, end);
    else if (w.kind == BFLOAT16) panels<uint16_t>(w, x, ldx, M, y, ldy, end);
    else panels<float>(w, x, ldx, M, y, ldy, end);
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

// ------------------------------------------------------------------------------------------------------------ attention

static inline void rotate(float* x, const float* cosine, const float* sine, int64_t h) {  // both halves of a head
    for (int64_t i = 0; i < h / 2; i++) {
        float a = x[i], b = x[i + h / 2];
        x[i] = a * cosine[i] - b * sine[i];
        x[i + h / 2] = b * cosine[i + h / 2] + a * sine[i + h / 2];
    }
}

// Norm and rotate the queries and keys of a row's new nodes, of one key-value head; keys and values go to their slots.
static void place(const Layer& layer, const Shape& s, const Pass& p, const Slots& c, int64_t r, int64_t k) {
    const int64_t h = s.head_dim, width = (s.heads + 2 * s.kv_heads) * h, sharing = s.heads / s.kv_heads;
    for (int64_t q = 0; q < p.queries; q++) {
        const int64_t m = r * p.queries + q, slot = p.length[r] + p.nodes - p.queries + q, at = r * c.row + k * c.head + slot * c.slot;
        const float *cosine = p.cosine + p.position[m] * h, *sine = p.sine + p.position[m] * h;
        for (int64_t i = 0; i <= sharing; i++) {
            float* x = p.qkv + m * width + (i < sharing ? k * sharing + i : s.heads + k) * h;
            const float* norm = i < sharing ? layer.q_norm : layer.k_norm;
            if (norm) rms_norm(x, norm, h, s.eps, x);
            rotate(x, cosine, sine, h);
            if (i < sharing)
                for (int64_t d = 0; d < h; d++) x[d] *= s.scale;
        }
        std::memcpy(c.keys + at, p.qkv + m * width + (s.heads + k) * h, h * sizeof(float));
        std::memcpy(c.values + at, p.qkv + m * width + (s.heads + s.kv_heads + k) * h, h * sizeof(float));
    }
}

// The scores of a query [h], scaled already, with 16 keys.
template <int CHUNKS>
static inline Floats scores_of(const float* query, const float* const* key) {
    Floats a[LANES];
    for (int j = 0; j < LANES; j++) {
        a[j] = load(query) * load(key[j]);
        for (int d = 1; d < CHUNKS; d++) a[j] = fma(load(query + d * LANES), load(key[j] + d * LANES), a[j]);
    }
    return sums(a);
}

// out [h] += the values, weighed, one after the other.
template <int CHUNKS>
static inline void weigh(const float* weights, const float* const* value, int64_t count, float* out) {
    Floats a[CHUNKS];
    for (int d = 0; d < CHUNKS; d++) a[d] = load(out + d * LANES);
    for (int64_t j = 0; j < count; j++) {
        Floats weight = all(weights[j]);
        for (int d = 0; d < CHUNKS; d++) a[d] = fma(weight, load(value[j] + d * LANES), a[d]);
    }
    for (int d = 0; d < CHUNKS; d++) store(out + d * LANES, a[d]);
}

// Softmax without its division; the sum. What stands behind `count` up to the next 16 becomes 0.
static inline float soften(float* scores, int64_t count) {
    for (int64_t i = count; i % LANES; i++) scores[i] = -INFINITY;
    Floats most = load(scores), total = {};
    for (int64_t i = LANES; i < count; i += LANES) most = load(scores + i) > most ? load(scores + i) : most;
    float top = most[0];
    for (int i = 1; i < LANES; i++) top = most[i] > top ? most[i] : top;
    for (int64_t i = 0; i < count; i += LANES) {
        Floats e = exponential(load(scores + i) - top);
        store(scores + i, e);
        total += e;
    }
    return sum(total);
}

// Some heads that share keys, of some queries of a row: pairs. Keys and values are read 16 slots at a time and serve all pairs while they
// are near. The visible slots of a query, in order: the committed ones, from `begin` on, then nodes.
template <int CHUNKS>
struct Group {
    const Shape& s;
    const Pass& p;
    const float *keys, *values;  // of the row and the key-value head
    const uint8_t* visible;
    int64_t stride, row, first, queries, head, heads, begin;
    float* scores;  // [pair][most]

    int64_t width() const { return (s.heads + 2 * s.kv_heads) * s.head_dim; }
    float* query(int64_t n, int64_t i) const { return p.qkv + (row * p.queries + first + n) * width() + (head + i) * s.head_dim; }
    float* out(int64_t n, int64_t i) const { return p.context + ((row * p.queries + first + n) * s.heads + head + i) * s.head_dim; }
    float* scores_at(int64_t n, int64_t i) const { return scores + (n * heads + i) * p.most; }

    template <class Do>
    void each_committed(const float* from, Do act) const {  // act(place of the first, pointers, how many)
        const float* at[LANES];
        for (int64_t slot = begin; slot < p.length[row]; slot += LANES) {
            int64_t count = p.length[row] - slot < LANES ? p.length[row] - slot : LANES;
            for (int64_t j = 0; j < LANES; j++) at[j] = from + (slot + (j < count ? j : count - 1)) * stride;
            act(slot - begin, at, count);
        }
    }

    template <class Do>
    int64_t each_node(int64_t n, const float* from, Do act) const {  // the same over the nodes that a query sees; all that it sees
        const float* at[LANES];
        const uint8_t* seen = visible + (row * p.queries + first + n) * p.nodes;
        int64_t place = p.length[row] - begin, count = 0;
        for (int64_t t = 0; t < p.nodes; t++) {
            if (seen[t]) at[count++] = from + (p.length[row] + t) * stride;
            if (count == LANES || (t == p.nodes - 1 && count)) {
                for (int64_t j = count; j < LANES; j++) at[j] = at[0];
                act(place, at, count);
                place += count, count = 0;
            }
        }
        return place;
    }

    void run() const {
        const int64_t h = s.head_dim;
        each_committed(keys, [&](int64_t place, const float* const* key, int64_t) {
            for (int64_t n = 0; n < queries; n++)
                for (int64_t i = 0; i < heads; i++) store(scores_at(n, i) + place, scores_of<CHUNKS>(query(n, i), key));
        });
        float totals[PAIRS];
        for (int64_t n = 0; n < queries; n++) {
            int64_t count = each_node(n, keys, [&](int64_t place, const float* const* key, int64_t) {
                for (int64_t i = 0; i < heads; i++) store(scores_at(n, i) + place, scores_of<CHUNKS>(query(n, i), key));
            });
            for (int64_t i = 0; i < heads; i++) {
                totals[n * heads + i] = soften(scores_at(n, i), count);
                std::memset(out(n, i), 0, h * sizeof(float));
            }
        }
        each_committed(values, [&](int64_t place, const float* const* value, int64_t count) {
            for (int64_t n = 0; n < queries; n++)
                for (int64_t i = 0; i < heads; i++) weigh<CHUNKS>(scores_at(n, i) + place, value, count, out(n, i));
        });
        for (int64_t n = 0; n < queries; n++) {
            each_node(n, values, [&](int64_t place, const float* const* value, int64_t count) {
                for (int64_t i = 0; i < heads; i++) weigh<CHUNKS>(scores_at(n, i) + place, value, count, out(n, i));
            });
            for (int64_t i = 0; i < heads; i++)
                for (int64_t d = 0; d < h; d++) out(n, i)[d] /= totals[n * heads + i];
        }
    }
};

template <int CHUNKS>
static void attend(const Layer& layer, const Shape& s, const Pass& p, const Slots& c, int thread) {
    const int64_t sharing = s.heads / s.kv_heads, per_row = p.rows * p.queries;
    // All heads that share keys together, unless that leaves threads without work; a window begins elsewhere for every query.
    const int64_t heads = sharing <= PAIRS && per_row * s.kv_heads >= p.threads ? sharing : 1;
    const int64_t queries = layer.window ? 1 : PAIRS / heads, parts = (p.queries + queries - 1) / queries, sets = s.heads / heads;
    const bool alone = parts == 1 && heads == sharing;  // a unit reads no new key but those that it places itself
    if (!alone) {
#pragma omp for schedule(static)
        for (int64_t i = 0; i < p.rows * s.kv_heads; i++) place(layer, s, p, c, i / s.kv_heads, i % s.kv_heads);
    }
#pragma omp for schedule(static)
    for (int64_t unit = 0; unit < p.rows * parts * sets; unit++) {
        int64_t set = unit % sets, first = unit / sets % parts * queries, r = unit / sets / parts, k = set * heads / sharing;
        int64_t begin = 0;
        if (alone) place(layer, s, p, c, r, k);
        if (layer.window && p.position[r * p.queries + first] >= layer.window) begin = p.position[r * p.queries + first] - layer.window + 1;
        if (begin > p.length[r]) begin = p.length[r];
        const float *keys = c.keys + r * c.row + k * c.head, *values = c.values + r * c.row + k * c.head;
        int64_t count = p.queries - first < queries ? p.queries - first : queries;
        Group<CHUNKS>{s, p, keys, values, layer.window ? p.near : p.visible, c.slot, r, first, count, set * heads, heads, begin, p.scores + thread * PAIRS * p.most}.run();
    }
}

// ------------------------------------------------------------------------------------------------------------ layers

// x [M, D] is read and written; `input` is what attention reads where that is not the norm of x.
static void decoder_layer(const Layer& layer, const Shape& s, const Pass& p, const Slots& c, const float* input, float* x, int thread) {
    const int64_t M = p.rows * p.queries, D = s.hidden, width = (s.heads + 2 * s.kv_heads) * s.head_dim;
    if (!input) {
        input = normed_for(thread, x, layer.norm, M, D, s.eps, p.normed);
    }
    linear(layer.qkv, input, layer.qkv.inputs, M, p.qkv, width, STORE);
    switch (s.head_dim / LANES) {
        case 1: attend<1>(layer, s, p, c, thread); break;
        case 2: attend<2>(layer, s, p, c, thread); break;
        case 4: attend<4>(layer, s, p, c, thread); break;
        case 5: attend<5>(layer, s, p, c, thread); break;
        case 6: attend<6>(layer, s, p, c, thread); break;
        case 8: attend<8>(layer, s, p, c, thread); break;
        case 16: attend<16>(layer, s, p, c, thread); break;
    }
    linear(layer.o, p.context, s.heads * s.head_dim, M, x, D, ADD);
    const float* normed = normed_for(thread, x, layer.mlp_norm, M, D, s.eps, p.normed);
    linear(layer.gate_up, normed, D, M, p.inner, s.inner, GATE);
    linear(layer.down, p.inner, s.inner, M, x, D, ADD);
}

// ------------------------------------------------------------------------------------------------------------ a draft's tree

// EAGLE-2's tree (section 4) from a draft net's layer, all levels in one call; drafters/_grow.py says what is done, in torch, and tests hold
// the two against each other.

struct Net {
    int64_t paired;  // 1: attention reads [norm of embedding, norm of hidden] (EAGLE-3); 0: fc of [embedding, hidden] (EAGLE-1)
    int64_t residual_normed, carries_normed;
    Matrix fc, head;
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
    const bool noisy = noise && temperature > 0;
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
    const float perturbed = noisy ? log_sum(key, padded, plan.sharpness) : 0;
    for (int64_t i = 0; i < count; i++) {
        float own = best[i].chance - (noisy ? noise[best[i].index] : 0), chance = noisy ? plan.sharpness * best[i].chance - perturbed : own;
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

extern "C" {

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
                 int64_t V, float* noise) {
    constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15u;
    for (int64_t row = 0; row < B * N; row++, noise += V) {
        if (greedy[row / N]) {
            std::memset(noise, 0, V * sizeof(float));
            continue;
        }
        const uint64_t key = mix(mix(mix((uint64_t)seed[row / N] + GOLDEN) + (uint64_t)stream) + (uint64_t)(position[row] + 1) * GOLDEN);
        for (int64_t begin = 0; begin < V; begin += 8) {
            const int64_t count = V - begin < 8 ? V - begin : 8;
            Words token = {};
            for (int64_t i = 0; i < count; i++) token[i] = ids ? ids[begin + i] : begin + i;
            Words bits = mix(key + (token + 1) * GOLDEN) >> 12;
            Doubles u = (__builtin_convertvector(bits, Doubles) + 0.5) * 0x1p-52, g = -logarithm(-logarithm(u));
            for (int64_t i = 0; i < count; i++) noise[begin + i] = (float)g[i];
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

// What was accepted since the last tree is read first: `pending` [B, P, D] with the tokens after them [B, P], of which each row has `counts`
// [B] >= 1. `given`: lengths before that, and tables of cosines; its queries, nodes, positions and visible nodes are set here, pass by pass,
// within the room that it comes with (for B x max(P, branch) nodes).
void eyas_grow(const Net* net, const Layer* layer, const Shape* s, const Pass* given, const Slots* slots, const Plan* plan,
               const float* pending, const int64_t* pending_tokens, int64_t P, const int64_t* counts, const int64_t* roots, const Grown* out) {
    const int64_t B = given->rows, D = s->hidden, K = plan->branch < net->vocabulary ? plan->branch : net->vocabulary, M = B * K;
    const int64_t padded = (net->vocabulary + PANEL - 1) / PANEL * PANEL, most = plan->depth * K, width = (net->paired ? 2 : 1) * D;
    std::vector<std::vector<Node>> drafted(B);
    std::vector<std::vector<int64_t>> beams(B);
    std::vector<int64_t> pick(M), tokens(M), position(M);
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
        for (int64_t t = 0; t < P; t++) visible[m * P + t] = t <= m % P;
    }
    p.queries = p.nodes = P, p.position = position.data(), p.visible = p.near = visible.data();
#pragma omp parallel num_threads(p.threads)
    {
        join(*net, *s, pending_tokens, pending, B * P, pair.data(), input.data(), next.data());
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
    }
}
}
