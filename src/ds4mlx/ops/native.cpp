// Matrix products of quantised weights for the CPU: float32 activations and sums, weights decoded as they are read.
//
// y = x W^T for a matrix, and for the experts that tokens have chosen. A task is a chunk of rows of one matrix; threads
// take tasks from a counter. A result is computed by one task, always in the same order, so it does not depend on the
// number of threads. Every function returns 0, or 1 for an argument that it refuses. native.py is the other side.
#include "native_lanes.h"

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

using Product = void (*)(const Rows&, const float* const*, size_t, float*, size_t, float*);

namespace plain {
using namespace ::plain;  // its lanes
#include "native_products.h"
}  // namespace plain

#ifdef DS4MLX_AVX2
AVX2_BEGIN
namespace avx2 {
using namespace ::avx2;
#include "native_products.h"
}  // namespace avx2
AVX2_END
#endif

#ifdef DS4MLX_NEON
namespace neon {
using namespace ::neon;
#include "native_products.h"
}  // namespace neon
#endif

struct InstructionSet {
    const char* name;
    Product product;
};

InstructionSet choose(int simd) {
#if defined(DS4MLX_AVX2)
    if (simd && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return {"AVX2", avx2::product};
#elif defined(DS4MLX_NEON)
    if (simd) return {"NEON", neon::product};
#endif
    return {"plain C++", plain::product};
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
int ds4mlx_version() { return 2; }

const char* ds4mlx_instructions(int simd) { return choose(simd).name; }

// The IQ2_XXS codebook and sign rows of gguf/dequant.py. To be called before any product.
void ds4mlx_codebook(const int8_t* grid, const int8_t* signs) {
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

}  // extern "C"
