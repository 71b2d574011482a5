// The next token of each row of logits: a block a row. Weights are whole numbers, 2^40 for the best token, so that
// their sums are exact in any order; the token that a sum falls on is found digit by digit of the logits' bits, best
// first.
#include "lanes.cuh"

#define THREADS 1024
#define ONE 1099511627776.0f  // 2^40

DEVICE u32 ordered(float v) {  // as the floats are ordered, -0 equal to 0
    u32 bits = __float_as_uint(v + 0.f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

DEVICE float unordered(u32 key) { return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key); }

// A token's place among the others: of equal keys the lower id comes first.
struct Place {
    u32 key;
    int id;
    DEVICE bool holds(u32 other, int at) const { return other > key || (other == key && at <= id); }
};

struct Shared {
    u64 counts[256], base, sums[LANES];
    u32 prefix, low, high;
    int id;
    float floats[LANES];
};

// Those tokens of a row that can matter: all, or a list of keys and ids.
struct Row {
    const float* logits;
    const u32* keys;  // null: all of the logits
    const int* ids;
    int count;
    u32 low, high;    // keys lie between these
    float best, temperature;
    bool counting;    // tokens, not their weights
    Place last;       // the worst token that takes part

    DEVICE u32 key(int i) const { return keys ? keys[i] : ordered(logits[i]); }
    DEVICE int id(int i) const { return keys ? ids[i] : i; }
    DEVICE float share(u32 key) const {  // of the best token's weight
        float x = unordered(key), gap = x == best ? 0.f : x - best;
        return expf(gap / temperature);
    }

    DEVICE u64 weight(u32 key) const { return counting ? 1 : (u64)(share(key) * ONE); }
};

DEVICE u64 block_total(u64 v, Shared& shared) {
    for (int mask = LANES / 2; mask; mask /= 2) v += lane_xor(v, mask);
    __syncthreads();
    if (lane_id() == 0) shared.sums[group_id()] = v;
    __syncthreads();
    u64 sum = 0;
    for (int g = 0; g < THREADS / LANES; ++g) sum += shared.sums[g];
    return sum;
}

// The tokens that take part and whose share is at least `least` and not nothing, as a list; the sums of their weights
// and of those of all that take part.
DEVICE void gather(Row& row, float least, u32* keys, int* ids, u64& listed, u64& all, Shared& shared) {
    u64 mine = 0, every = 0;
    u32 low = ~0u, high = 0;
    if (threadIdx.x == 0) shared.id = 0, shared.low = ~0u, shared.high = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < V; i += THREADS) {
        u32 key = ordered(row.logits[i]);
        if (!row.last.holds(key, i)) continue;
        float share = row.share(key);
        u64 weight = (u64)(share * ONE);
        every += weight;
        if (!weight || share < least) continue;
        mine += weight;
        int at = atomicAdd(&shared.id, 1);
        keys[at] = key, ids[at] = i;
        low = min(low, key), high = max(high, key);
    }
    low = lanes_min(low), high = lanes_max(high);
    if (lane_id() == 0) atomicMin(&shared.low, low), atomicMax(&shared.high, high);
    listed = block_total(mine, shared), all = block_total(every, shared);
    row.keys = keys, row.ids = ids, row.count = shared.id, row.low = shared.low, row.high = shared.high;
    __syncthreads();
}

// The token at which the sum of weights, best first, passes `target`, which is below the sum of all; `sum` with it.
// Keys are taken from the least one on, eight bits at a time from the highest that differs.
DEVICE Place pass(const Row& row, u64 target, u64& sum, Shared& shared) {
    if (threadIdx.x == 0) shared.prefix = 0, shared.base = 0;
    for (int above = 32 - __clz((row.high - row.low) | 1); above;) {  // bits from `above` on are known
        int shift = max(above - 8, 0);
        __syncthreads();
        for (int i = threadIdx.x; i < 256; i += THREADS) shared.counts[i] = 0;
        u32 held = shared.prefix;
        __syncthreads();
        for (int i = threadIdx.x; i < row.count; i += THREADS) {
            u32 key = row.key(i), from = key - row.low;
            if ((above < 32 && from >> above != held >> above) || !row.last.holds(key, row.id(i))) continue;
            u64 weight = row.weight(key);
            if (weight) atomicAdd(&shared.counts[from >> shift & ((1 << (above - shift)) - 1)], weight);
        }
        __syncthreads();
        if (group_id() == 0) {  // lane l has digits 255 - 8 l ... downwards
            u64 mine = 0, base = shared.base;
            for (int i = 0; i < 8; ++i) mine += shared.counts[255 - 8 * lane_id() - i];
            u64 before = mine;
            for (int by = 1; by < LANES; by *= 2) {
                u64 other = lane_up(before, by);
                if (lane_id() >= by) before += other;
            }
            before += base - mine;
            if (before <= target && target < before + mine) {
                int digit = 255 - 8 * lane_id();
                while (before + shared.counts[digit] <= target) before += shared.counts[digit--];
                shared.base = before, shared.prefix = held | (u32)digit << shift;
            }
        }
        above = shift;
    }
    __syncthreads();
    // Of equal logits all weigh the same: the one wanted is so many before it.
    Place place = {row.low + shared.prefix, 0};
    u64 each = row.weight(place.key), before = each ? (target - shared.base) / each : 0;
    sum = shared.base + (before + 1) * each;
    if (row.keys && !before) {  // the first of them
        if (threadIdx.x == 0) shared.id = V;
        __syncthreads();
        for (int i = threadIdx.x; i < row.count; i += THREADS)
            if (row.keys[i] == place.key) atomicMin(&shared.id, row.ids[i]);
    } else {
        int run = (V + THREADS - 1) / THREADS, begin = min((int)threadIdx.x * run, V), end = min(begin + run, V);
        u64 same = 0;
        for (int i = begin; i < end; ++i) same += ordered(row.logits[i]) == place.key;
        u64 upto = same;
        for (int by = 1; by < LANES; by *= 2) {
            u64 other = lane_up(upto, by);
            if (lane_id() >= by) upto += other;
        }
        if (lane_id() == LANES - 1) shared.sums[group_id()] = upto;
        __syncthreads();
        upto -= same;
        for (int g = 0; g < group_id(); ++g) upto += shared.sums[g];
        for (int i = begin; i < end; ++i)
            if (ordered(row.logits[i]) == place.key && upto++ == before) shared.id = i;
    }
    __syncthreads();
    place.id = shared.id;
    __syncthreads();
    return place;
}

// logits f32 [B, V], -inf where forbidden, plain [B, V] as the model gave them. settings f32 [B, 4]: uniform,
// temperature, min_p, top_p; top_k [B]. token [B]; report [B, 2]: log-probability in the plain distribution, the
// adjusted logit. next [B], if not null, gets the token too: the input of the following step. keys, ids [B, V]: to work
// in.
KERNEL __launch_bounds__(THREADS) void sample(const float* logits, const float* plain, const float* settings,
                                              const int* top_k, int* token, float* report, int* next, u32* keys,
                                              int* ids) {
    TAKE_TURN();
    __shared__ Shared shared;
    int b = blockIdx.x, at = V;
    logits += (size_t)b * V, plain += (size_t)b * V, settings += 4 * b;
    float uniform = settings[0], temperature = settings[1], min_p = settings[2], top_p = settings[3];
    float best = -INFINITE, most = -INFINITE, sum = 0;
#pragma unroll 4
    for (int i = threadIdx.x; i < V; i += THREADS) {
        float x = logits[i], y = plain[i];
        if (x > best) best = x, at = i;
        float next = fmaxf(most, y);
        if (next > most) sum *= expf(most - next), most = next;
        sum += y == -INFINITE ? 0.f : expf(y - most);  // what is not a number stays none
    }
    float mine = best, last = most;
    best = block_max(best, shared.floats), most = block_max(most, shared.floats);
    if (threadIdx.x == 0) shared.id = V;
    __syncthreads();
    if (mine == best && at < V) atomicMin(&shared.id, at);
    sum = block_sum(last > -INFINITE ? sum * expf(last - most) : 0.f, shared.floats);
    Place choice = {0, min(shared.id, V - 1)};
    __syncthreads();
    if (temperature > 0 && top_p > 0) {
        Row row = {logits, 0, 0, V, 0, ~0u, best, fminf(fmaxf(temperature, 1e-30f), 1e30f), false, {0, V}};
        u64 passed, kept, all;
        int k = top_k[b];
        if (k > 0 && k < V) {
            row.counting = true;
            row.last = pass(row, k - 1, passed, shared);
            row.counting = false;
        }
        gather(row, min_p, keys + (size_t)b * V, ids + (size_t)b * V, kept, all, shared);
        if (top_p < 1) {
            u64 enough = max((u64)((float)all * top_p), (u64)1);
            if (enough <= kept) {  // else the least share decides
                pass(row, enough - 1, passed, shared);
                kept = passed;
            }
        }
        u64 target = min((u64)((float)kept * uniform), kept - 1);
        choice = pass(row, target, passed, shared);
    }
    if (threadIdx.x == 0) {
        token[b] = choice.id;
        report[2 * b] = plain[choice.id] - most - logf(sum), report[2 * b + 1] = logits[choice.id];
        if (next) next[b] = choice.id;
    }
}
