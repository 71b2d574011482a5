// Matrix products of quantised weights for the CPU: float32 activations and sums, weights decoded as they are read.
//
// y = x W^T for a matrix, and for the experts that tokens have chosen. A task is a chunk of rows of one matrix; threads
// take tasks from a counter. A result is computed by one task, always in the same order, so it does not depend on the
// number of threads. Every function returns 0, or 1 for an argument that it refuses. native.py is the other side.
//
// The rest are small operations of a step, on rows of the cache, streams and logits, which are not worth a graph;
// native_step.py is their other side.
#include "native_lanes.h"
#include "native_sample.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <numeric>
#include <thread>
#include <unistd.h>
#include <vector>

namespace {

// Some rows of one matrix. `kind` is the GGUF type; rows of F32, F16 and BF16 are multiples of 32 here too.
struct Rows {
    int kind;
    const uint8_t* blocks;
    size_t count, width;  // width in weights
};

// 128 KiB of decoded weights stay in a core's second cache, 4 rows of them in its first.
constexpr size_t SLAB_ROWS = 64, SLAB_WIDTH = 512;
constexpr size_t TOKEN_BLOCK = 48;  // tokens that pass over a slab before the next ones do: 96 KiB of x

struct {
    alignas(32) float grid[256][8];
    alignas(32) uint32_t signs[128][8];  // 0, or the sign bit
} IQ2;

float E4M3[256];  // of each code

// How a row is held: packing 0 is floats, 1 and 2 are `fp8_pack` and `fp4_pack` of ops/kv_round.py.
struct Form {
    size_t packing, width, tail, bytes;  // channels, of them rotary; of a row
};

// Row r of sequence b: native_step.py has the same structure, and of the three below.
struct Paged {
    const uint8_t* rows;
    const int32_t* pages;  // [sequences, held]
    size_t held, page_rows;

    const uint8_t* of(size_t b, size_t r, size_t bytes) const {
        return rows + (size_t(pages[b * held + r / page_rows]) * page_rows + r % page_rows) * bytes;
    }
};

struct Attend {
    Form form;
    Paged rows;
    const uint8_t* windows;
    const float *q, *cos, *sin, *sink;
    const int32_t *positions, *chosen;  // chosen [sequences, picks], or null
    size_t sequences, heads, window, most, picks, ratio;
    float eps;
};

constexpr size_t MOST_HEADS = 128;

struct Scores {
    Form form;
    Paged rows;
    const uint8_t* q;
    const float* weight;
    size_t sequences, heads, most;  // heads up to MOST_HEADS
    float scale;
};

struct Compress {
    Form form;
    const float *k, *s, *ape, *norm, *cos, *sin;
    const int32_t* positions;
    size_t sequences, ratio, overlap;  // overlap: groups that a row pools
    float eps;
};

constexpr size_t MOST_STREAMS = 8;

struct Hyper {
    const float* streams;  // [tokens, N, D]
    size_t tokens, N, D;   // N up to MOST_STREAMS
    float hc_eps, norm_eps;
};

using Product = void (*)(const Rows&, const float* const*, size_t, float*, size_t, float*);

namespace plain {
using namespace ::plain;  // its lanes
#include "native_products.h"
#include "native_rows.h"
#include "native_hyper.h"
}  // namespace plain

#ifdef DS4MLX_AVX2
AVX2_BEGIN
namespace avx2 {
using namespace ::avx2;
#include "native_products.h"
#include "native_rows.h"
#include "native_hyper.h"
}  // namespace avx2
AVX2_END
#endif

#ifdef DS4MLX_NEON
namespace neon {
using namespace ::neon;
#include "native_products.h"
#include "native_rows.h"
#include "native_hyper.h"
}  // namespace neon
#endif

struct InstructionSet {
    const char* name;
    Product product;
    decltype(&plain::finish) finish;
    decltype(&plain::attend) attend;
    decltype(&plain::score) score;
    decltype(&plain::compress) compress;
    decltype(&plain::mix_streams) mix_streams;
    decltype(&plain::enter) enter;
};

InstructionSet choose(int simd) {
#if defined(DS4MLX_AVX2)
    if (simd && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return {"AVX2", avx2::product, avx2::finish, avx2::attend, avx2::score, avx2::compress,
                avx2::mix_streams, avx2::enter};
#elif defined(DS4MLX_NEON)
    if (simd) return {"NEON", neon::product, neon::finish, neon::attend, neon::score, neon::compress,
                neon::mix_streams, neon::enter};
#endif
    return {"plain C++", plain::product, plain::finish, plain::attend, plain::score, plain::compress,
                plain::mix_streams, plain::enter};
}

// Threads that outlive a call: starting one takes longer than many a product.
class Pool {
public:
    // task(i) for every i < tasks, on at most `threads` threads with the caller. One call at a time; others wait.
    static void run(size_t threads, size_t tasks, const std::function<void(size_t)>& task) {
        if (threads <= 1 || tasks <= 1) {
            for (size_t i = 0; i < tasks; i++) task(i);
            return;
        }
        static std::mutex one;
        static Pool* pool = nullptr;  // never destroyed: its threads end with the process
        std::lock_guard<std::mutex> lock(one);
        if (!pool || pool->process != getpid()) pool = new Pool;  // a forked child has the object, but no threads
        pool->work(std::min(threads, tasks), tasks, task);
    }

private:
    void work(size_t wanted, size_t count, const std::function<void(size_t)>& f) {
        {
            std::lock_guard<std::mutex> lock(state);
            task = &f, tasks = count, next = 0;
            while (workers + 1 < wanted) std::thread(&Pool::serve, this, workers++).detach();
            invited = wanted - 1, busy = wanted - 1, round++;
        }
        wake.notify_all();
        take();
        std::unique_lock<std::mutex> lock(state);
        done.wait(lock, [&] { return busy == 0; });
    }

    void take() {
        for (size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) (*task)(i);
    }

    void serve(size_t self) {
        std::unique_lock<std::mutex> lock(state);
        for (uint64_t seen = round - 1;;) {
            wake.wait(lock, [&] { return round != seen; });
            seen = round;
            if (self >= invited) continue;
            lock.unlock();
            take();
            lock.lock();
            if (--busy == 0) done.notify_one();
        }
    }

    const pid_t process = getpid();
    std::mutex state;
    std::condition_variable wake, done;
    const std::function<void(size_t)>* task = nullptr;
    std::atomic<size_t> next{0};
    size_t tasks = 0, workers = 0, invited = 0, busy = 0;
    uint64_t round = 0;
};

// Floats of a thread, kept from one task to the next. What they hold is undefined.
template <int use> float* scratch(size_t floats) {
    thread_local std::vector<float> kept;
    if (kept.size() < floats + 16) kept.resize(floats + 16);
    return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(kept.data()) + 63) / 64 * 64);
}

}  // namespace

extern "C" {

// Matrices of one shape, one after the other: native.py has the same structure.
struct Stack {
    int32_t kind;
    const uint8_t* blocks;
    size_t matrices, rows, width, row_bytes;  // width in weights
};

// What runs the products: `simd` 0 asks for the plain C++.
struct Runner {
    int32_t simd, threads;
};

}  // extern "C"

namespace {

Rows rows_of(const Stack& w, size_t matrix, size_t first, size_t count) {
    return {w.kind, w.blocks + (matrix * w.rows + first) * w.row_bytes, count, w.width};
}

// Rows of each of `many` matrices, cut into tasks: at most a slab's, fewer where threads would go without.
struct Chunks {
    size_t rows, each, per_matrix, tasks;

    Chunks(const Runner& with, size_t rows, size_t many) : rows(rows) {
        const size_t fair = rows * many / (4 * size_t(std::max(with.threads, 1))) / 4 * 4;
        each = std::min(std::max(fair, size_t(8)), SLAB_ROWS);
        per_matrix = (rows + each - 1) / each, tasks = per_matrix * many;
    }

    size_t matrix(size_t task) const { return task / per_matrix; }
    size_t first(size_t task) const { return task % per_matrix * each; }
    size_t count(size_t task) const { return std::min(each, rows - first(task)); }
};

constexpr size_t SMALL = 1 << 17;  // multiplications that are done before a thread is awake

template <class Task> void run(const Runner& with, size_t work, size_t tasks, const Task& task) {
    Pool::run(work < SMALL ? 1 : size_t(std::max(with.threads, 1)), tasks, task);
}

// The pairs (token, slot) of each chosen expert; pair t S + s is token t's slot s.
struct Groups {
    std::vector<size_t> pairs, starts;
    bool valid = true;

    Groups(const int32_t* selected, size_t count, size_t experts) : pairs(count) {
        std::iota(pairs.begin(), pairs.end(), size_t(0));
        std::stable_sort(pairs.begin(), pairs.end(), [&](size_t a, size_t b) { return selected[a] < selected[b]; });
        for (size_t i = 0; i < count; i++) {
            const int32_t expert = selected[pairs[i]];
            valid = valid && expert >= 0 && size_t(expert) < experts;
            if (i == 0 || expert != selected[pairs[i - 1]]) starts.push_back(i);
        }
        starts.push_back(count);
    }

    size_t count() const { return starts.size() - 1; }
    size_t size(size_t group) const { return starts[group + 1] - starts[group]; }
    const size_t* of(size_t group) const { return pairs.data() + starts[group]; }
};

}  // namespace

extern "C" {

// Changes with the signatures below, so that native.py can tell an old build from its own.
int ds4mlx_version() { return 3; }

const char* ds4mlx_instructions(int simd) { return choose(simd).name; }

// The IQ2_XXS codebook and sign rows of gguf/dequant.py. To be called before all else.
void ds4mlx_codebook(const int8_t* grid, const int8_t* signs) {
    for (uint32_t code = 0; code < 256; code++) {
        const float size = of_bits((code & 127) << 20) * 0x1p120f;  // exponents differ by 120; right for subnormals too
        E4M3[code] = code & 128 ? -size : size;
    }
    for (size_t i = 0; i < 256 * 8; i++) IQ2.grid[i / 8][i % 8] = grid[i];
    for (size_t i = 0; i < 128 * 8; i++) IQ2.signs[i / 8][i % 8] = signs[i] < 0 ? 1u << 31 : 0;
}

// y[g, t, n] = sum_k x[g, t, k] W[g, n, k] over the G matrices of a stack, f32. Tokens and matrices are as many floats
// apart in x and y as their strides say.
int ds4mlx_matmul(const Runner* with, const Stack* w, size_t tokens, const float* x, size_t x_token, size_t x_matrix,
                  float* y, size_t y_token, size_t y_matrix) {
    const Product product = choose(with->simd).product;
    const Chunks chunks(*with, w->rows, w->matrices);
    run(*with, w->matrices * w->rows * w->width * tokens, chunks.tasks, [&](size_t task) {
        const size_t g = chunks.matrix(task), first = chunks.first(task);
        std::vector<const float*> rows(tokens);
        for (size_t t = 0; t < tokens; t++) rows[t] = x + g * x_matrix + t * x_token;
        product(rows_of(*w, g, first, chunks.count(task)), rows.data(), tokens, y + g * y_matrix + first, y_token,
                scratch<0>(SLAB_ROWS * SLAB_WIDTH));
    });
    return 0;
}

// mid[t, s, f] = weight[t, s] silu(min(g, limit)) clamp(u, -limit, limit), g and u the products of x[t] with gate and
// up of expert selected[t, s]. x [T, K] f32; selected i32 and weight f32 [T, S]; mid [T, S, F] f32, a token's slots
// `token_slots` apart from the next one's.
int ds4mlx_gate_up(const Runner* with, const Stack* gate, const Stack* up, const float* x, size_t tokens, size_t slots,
                   const int32_t* selected, const float* weight, float limit, float* mid, size_t token_slots) {
    const Groups groups(selected, tokens * slots, gate->matrices);
    if (!groups.valid) return 1;
    const Product product = choose(with->simd).product;
    const Chunks chunks(*with, gate->rows, groups.count());
    run(*with, tokens * slots * gate->rows * gate->width * 2, chunks.tasks, [&](size_t task) {
        const size_t group = chunks.matrix(task), first = chunks.first(task), count = chunks.count(task);
        const size_t* pairs = groups.of(group);
        const size_t many = groups.size(group), expert = size_t(selected[pairs[0]]);
        std::vector<const float*> rows(many);
        for (size_t i = 0; i < many; i++) rows[i] = x + pairs[i] / slots * gate->width;
        float *slab = scratch<0>(SLAB_ROWS * SLAB_WIDTH), *g = scratch<1>(many * count), *u = scratch<2>(many * count);
        product(rows_of(*gate, expert, first, count), rows.data(), many, g, count, slab);
        product(rows_of(*up, expert, first, count), rows.data(), many, u, count, slab);
        for (size_t i = 0; i < many; i++) {
            float* out = mid + (pairs[i] / slots * token_slots + pairs[i] % slots) * gate->rows + first;
            for (size_t r = 0; r < count; r++) {
                const float a = std::min(g[i * count + r], limit);
                const float b = std::min(std::max(u[i * count + r], -limit), limit);
                out[r] = weight[pairs[i]] * (a / (1 + std::exp(-a)) * b);
            }
        }
    });
    return 0;
}

// y[t] += sum_s W[selected[t, s]] mid[t, s], experts in ascending order. mid [T, S, K] f32, a token's slots
// `token_slots` apart from the next one's; y [T, N] f32.
int ds4mlx_down(const Runner* with, const Stack* w, const float* mid, size_t token_slots, size_t tokens, size_t slots,
                const int32_t* selected, float* y) {
    const Groups groups(selected, tokens * slots, w->matrices);
    if (!groups.valid) return 1;
    const Product product = choose(with->simd).product;
    const Chunks chunks(*with, w->rows, 1);  // a task takes its rows of all experts, so that it alone writes its sums
    run(*with, tokens * slots * w->rows * w->width, chunks.tasks, [&](size_t task) {
        const size_t first = chunks.first(task), count = chunks.count(task);
        for (size_t group = 0; group < groups.count(); group++) {
            const size_t* pairs = groups.of(group);
            const size_t many = groups.size(group);
            std::vector<const float*> rows(many);
            for (size_t i = 0; i < many; i++)
                rows[i] = mid + (pairs[i] / slots * token_slots + pairs[i] % slots) * w->width;
            float *slab = scratch<0>(SLAB_ROWS * SLAB_WIDTH), *part = scratch<1>(many * count);
            product(rows_of(*w, size_t(selected[pairs[0]]), first, count), rows.data(), many, part, count, slab);
            for (size_t i = 0; i < many; i++)
                for (size_t r = 0; r < count; r++) y[pairs[i] / slots * w->rows + first + r] += part[i * count + r];
        }
    });
    return 0;
}

// Rows of `count` vectors x [count, width]: over their rms times norm, unless that is null, rotated and packed. `each`
// of them share a row of cos and sin; vector i goes to row at[i] of rows.
int ds4mlx_rows(const Runner* with, const Form* form, size_t count, size_t each, const float* x, const float* norm,
                float eps, const float* cos, const float* sin, const int64_t* at, uint8_t* rows) {
    const InstructionSet simd = choose(with->simd);
    constexpr size_t AT_ONCE = 16;
    run(*with, count * form->width * 16, (count + AT_ONCE - 1) / AT_ONCE, [&](size_t task) {
        float* v = scratch<0>(form->width);
        for (size_t i = task * AT_ONCE; i < std::min(count, (task + 1) * AT_ONCE); i++) {
            memcpy(v, x + i * form->width, form->width * sizeof(float));
            const size_t angle = i / each * (form->tail / 2);
            simd.finish(v, *form, norm, eps, cos + angle, sin + angle, rows + size_t(at[i]) * form->bytes);
        }
    });
    return 0;
}

// `attention_step` of ops/attend.py. o [sequences, heads, width].
int ds4mlx_attend(const Runner* with, const Attend* a, float* o) {
    const InstructionSet simd = choose(with->simd);
    constexpr size_t HEADS = 8;
    const size_t D = a->form.width, groups = (a->heads + HEADS - 1) / HEADS;
    const size_t work = a->sequences * a->heads * (a->window + (a->chosen ? a->picks : a->most)) * D * 2;
    run(*with, work, a->sequences * groups, [&](size_t task) {
        const size_t b = task / groups, first = task % groups * HEADS, heads = std::min(HEADS, a->heads - first);
        float* room = scratch<0>((HEADS + 32) * D + HEADS * 34);
        simd.attend(*a, b, first, heads, o + (b * a->heads + first) * D, room);
    });
    return 0;
}

// `index_scores_step` of ops/indexer_topk.py. scores [sequences, most].
int ds4mlx_scores(const Runner* with, const Scores* a, float* scores) {
    if (a->heads > MOST_HEADS) return 1;
    const InstructionSet simd = choose(with->simd);
    constexpr size_t ROWS = 256;
    const size_t chunks = (a->most + ROWS - 1) / ROWS;
    run(*with, a->sequences * a->heads * a->most * a->form.width, a->sequences * chunks, [&](size_t task) {
        const size_t b = task / chunks, first = task % chunks * ROWS;
        float* room = scratch<0>((a->heads + 1) * a->form.width);
        simd.score(*a, b, first, std::min(a->most, first + ROWS), scores + b * a->most, room);
    });
    return 0;
}

// `compress_token` of ops/compress.py, in the frontiers themselves; rows of groups that are not complete stay.
int ds4mlx_compress(const Runner* with, const Compress* a, float* frontiers, uint8_t* rows) {
    const InstructionSet simd = choose(with->simd);
    const size_t columns = a->overlap * a->form.width, ring = 2 * a->overlap * a->ratio * columns;
    for (size_t b = 0; b < a->sequences; b++)
        simd.compress(*a, b, frontiers + b * ring, rows + b * a->form.bytes, scratch<0>(3 * a->form.width));
    return 0;
}

// `hyper_mix` of ops/hyper_mix.py but for the products: after [tokens, N, D], and squares, `stride` floats from one
// token to the next. y [tokens, D], post [tokens, N], m [tokens, N, N]; all null without an update.
int ds4mlx_mix_streams(const Runner* with, const Hyper* a, const float* y, const float* post, const float* m,
                       float* after, float* squares, size_t stride) {
    const InstructionSet simd = choose(with->simd);
    run(*with, a->tokens * a->N * a->N * a->D, a->tokens, [&](size_t t) {
        squares[t * stride] = simd.mix_streams(*a, t, y, post, m, after);
    });
    return 0;
}

// `hyper_enter`, or without post and m `hyper_leave`: x [tokens, D], post [tokens, N], m [tokens, N, N].
int ds4mlx_enter(const Runner* with, const Hyper* a, const float* sums, size_t parts, const float* scale,
                 const float* base, const float* norm, size_t iterations, float* x, float* post, float* m) {
    if (a->N > MOST_STREAMS) return 1;
    const InstructionSet simd = choose(with->simd);
    run(*with, a->tokens * a->N * (a->D + 64 * iterations), a->tokens, [&](size_t t) {
        simd.enter(*a, t, sums, parts, scale, base, norm, iterations, x, post, m);
    });
    return 0;
}

// `sample` of ops/sample.py. logits [rows, count], the parameters and tokens [rows].
int ds4mlx_sample(const Runner* with, const float* logits, size_t rows, size_t count, const float* uniform,
                  const float* temperature, const int32_t* top_k, const float* min_p, const float* top_p,
                  int32_t* tokens) {
    run(*with, rows * count * 16, rows, [&](size_t b) {
        const float* row = logits + b * count;
        tokens[b] = int32_t(sampled(row, count, uniform[b], temperature[b], top_k[b], min_p[b], top_p[b]));
    });
    return 0;
}

}  // extern "C"
