// The next token of each row of logits: a cluster of CLUSTER blocks looks through a row, each at its part. Weights are
// whole numbers, 2^40 for the best token, so that their sums are exact in any order; the token that a sum falls on is
// found among those of one bin, digit by digit of the logits' bits, best first.
#include "cluster.cuh"

#define THREADS 1024
#define ONE 1099511627776.0f  // 2^40
#define COPIES 8              // of sums by digit: few groups of lanes then wait for one another

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
    u64 counts[COPIES][256], base, sums[LANES];
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
    DEVICE float share_of(float x) const {  // of the best token's weight
        float gap = x == best ? 0.f : x - best;
        return expf(gap / temperature);
    }

    DEVICE float share(u32 key) const { return share_of(unordered(key)); }

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
    for (int first = threadIdx.x - lane_id(); first < V; first += THREADS) {
        int i = first + lane_id();
        u32 key = i < V ? ordered(row.logits[i]) : 0;
        float share = i < V && row.last.holds(key, i) ? row.share(key) : 0.f;
        u64 weight = (u64)(share * ONE);
        every += weight;
        bool wanted = weight && share >= least;
        u32 where = lanes_where(wanted);
        if (!where) continue;
        int at = lane_id() ? 0 : atomicAdd(&shared.id, __popc(where));
        at = lane_get(at, 0) + __popc(where & ((1u << lane_id()) - 1));
        if (!wanted) continue;
        mine += weight;
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
        for (int i = threadIdx.x; i < 256 * COPIES; i += THREADS) shared.counts[i / 256][i % 256] = 0;
        u32 held = shared.prefix;
        __syncthreads();
        for (int i = threadIdx.x; i < row.count; i += THREADS) {
            u32 key = row.key(i), from = key - row.low;
            if ((above < 32 && from >> above != held >> above) || !row.last.holds(key, row.id(i))) continue;
            u64 weight = row.weight(key);
            int digit = from >> shift & ((1 << (above - shift)) - 1);
            if (weight) atomicAdd(&shared.counts[group_id() % COPIES][digit], weight);
        }
        __syncthreads();
        if (threadIdx.x < 256)
            for (int c = 1; c < COPIES; ++c) shared.counts[0][threadIdx.x] += shared.counts[c][threadIdx.x];
        __syncthreads();
        if (group_id() == 0) {  // lane l has digits 255 - 8 l ... downwards
            u64 mine = 0, base = shared.base;
            for (int i = 0; i < 8; ++i) mine += shared.counts[0][255 - 8 * lane_id() - i];
            u64 before = mine;
            for (int by = 1; by < LANES; by *= 2) {
                u64 other = lane_up(before, by);
                if (lane_id() >= by) before += other;
            }
            before += base - mine;
            if (before <= target && target < before + mine) {
                int digit = 255 - 8 * lane_id();
                while (before + shared.counts[0][digit] <= target) before += shared.counts[0][digit--];
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

// What a block finds in its part of a row: the best, the first token that has it, and of the plain distribution the
// largest logit with the sum of exponentials below it.
struct Found {
    float best, most, sum;
    int at;

    DEVICE void join(const Found& other) {
        if (other.best > best || (other.best == best && other.at < at)) best = other.best, at = other.at;
        float next = fmaxf(most, other.most);
        if (next == -INFINITE) return;
        sum = (most == -INFINITE ? 0.f : sum * expf(most - next))
            + (other.most == -INFINITE ? 0.f : other.sum * expf(other.most - next));
        most = next;
    }
};

DEVICE Found find(const float* logits, const float* plain, int begin, int end, Shared& shared) {
    Found found = {-INFINITE, -INFINITE, 0, V};
#pragma unroll 4
    for (int i = begin + threadIdx.x; i < end; i += THREADS) {
        float x = logits[i], y = plain[i];
        if (x > found.best) found.best = x, found.at = i;
        float next = fmaxf(found.most, y);
        if (next > found.most) found.sum *= expf(found.most - next), found.most = next;
        found.sum += y == -INFINITE ? 0.f : expf(y - found.most);  // what is not a number stays none
    }
    float best = block_max(found.best, shared.floats), most = block_max(found.most, shared.floats);
    if (threadIdx.x == 0) shared.id = V;
    __syncthreads();
    if (found.best == best && found.at < V) atomicMin(&shared.id, found.at);
    float mine = found.most > -INFINITE ? found.sum * expf(found.most - most) : 0.f;
    float sum = block_sum(found.sum == found.sum ? mine : found.sum, shared.floats);
    return Found{best, most, sum, shared.id};
}

#if CLUSTER > 1
#define BINS 32     // by how far a logit is below the best, up to where its weight is nothing
#define PART ((V + CLUSTER - 1) / CLUSTER)
#define PER ((PART + THREADS - 1) / THREADS)

DEVICE u64 joined(const float* pair) { return __float_as_uint(pair[0]) | (u64)__float_as_uint(pair[1]) << 32; }

DEVICE float2 parted(u64 v) { return make_float2(__uint_as_float((u32)v), __uint_as_float((u32)(v >> 32))); }

// A token drawn by all blocks of a cluster, each with a part of the row in registers: sums by bin tell in which bin the
// token lies, whose tokens the first block then looks through.
struct Draw {
    Mailbox<CLUSTER, 2 * (BINS + 1)> sums;      // by bin, and of those that share at least min_p
    Mailbox<CLUSTER, 1> counts[2];
    Mailbox<1, 2> kept;
    u64 upto[BINS + 1];                         // sums of the bins before
    u32 bins[THREADS / LANES][2][BINS];         // of a group of lanes, low and high bits of weights

    DEVICE void open() { sums.open(), counts[0].open(), counts[1].open(), kept.open(); }

    static DEVICE int bin(const Row& row, float x) {
        float at = (x == row.best ? 0.f : row.best - x) / row.temperature * (BINS / 28.f);
        return at < BINS - 1 ? (int)at : BINS - 1;
    }

    // Fills `upto`; the sum of those that share at least `least`.
    DEVICE u64 add_up(const Row& row, const float (&x)[PER], float least, int rank, Shared& shared) {
        int tid = threadIdx.x;
        u64 mine = 0;
        for (int i = tid; i < (int)(sizeof(bins) / 4); i += THREADS) (&bins[0][0][0])[i] = 0;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < PER; ++i) {
            float share = row.share_of(x[i]);
            u64 weight = (u64)(share * ONE);
            if (!weight) continue;
            if (share >= least) mine += weight;
            u32* to = bins[group_id()][0] + bin(row, x[i]);
            atomicAdd(to, (u32)weight & 0xfffffu), atomicAdd(to + BINS, (u32)(weight >> 20));
        }
        mine = block_total(mine, shared);
        if (tid <= BINS) {
            for (int g = 0; g < THREADS / LANES && tid < BINS; ++g) {
                if (g == 0) mine = 0;
                mine += bins[g][0][tid] + ((u64)bins[g][1][tid] << 20);
            }
            for (int r = 0; r < CLUSTER; ++r) sums.arrivals.post(r, &sums.values[rank][2 * tid], parted(mine));
        }
        sums.wait();
        u64 listed = 0;
        for (int r = 0; r < CLUSTER; ++r) listed += joined(&sums.values[r][2 * BINS]);
        if (tid < BINS) {
            u64 v = 0;
            for (int r = 0; r < CLUSTER; ++r) v += joined(&sums.values[r][2 * tid]);
            for (int by = 1; by < LANES; by *= 2) {
                u64 other = lane_up(v, by);
                if (tid >= by) v += other;
            }
            upto[tid + 1] = v;
            if (tid == 0) upto[0] = 0;
        }
        __syncthreads();
        return listed;
    }

    // For the first block what `pass` gives, of all tokens of the row.
    DEVICE Place look(Row row, const float (&x)[PER], u64 target, int rank, Mailbox<CLUSTER, 1>& mail, u32* keys,
                      int* ids, u64& sum, Shared& shared) {
        int j = 0, own = 0, tid = threadIdx.x;
        while (j < BINS - 1 && upto[j + 1] <= target) ++j;
        u32 in = 0;
#pragma unroll
        for (int i = 0; i < PER; ++i)
            if (bin(row, x[i]) == j && (u64)(row.share_of(x[i]) * ONE)) in |= 1u << i;
        own = __popc(in);
        int upper = own;
        for (int by = 1; by < LANES; by *= 2) {
            int other = lane_up(upper, by);
            if (lane_id() >= by) upper += other;
        }
        if (tid == 0) shared.id = 0, shared.low = ~0u, shared.high = 0;
        __syncthreads();
        int at = lane_id() == LANES - 1 ? atomicAdd(&shared.id, upper) : 0;
        at = lane_get(at, LANES - 1) + upper - own;
        __syncthreads();
        if (tid < CLUSTER) mail.post(tid, rank, 0, __int_as_float(shared.id));
        mail.wait();
        int total = 0;
        for (int r = 0; r < CLUSTER; ++r) {
            int count = __float_as_int(mail.values[r][0]);
            at += r < rank ? count : 0, total += count;
        }
        u32 low = ~0u, high = 0;
#pragma unroll
        for (int i = 0; i < PER; ++i)
            if (in >> i & 1) keys[at] = ordered(x[i]), ids[at++] = rank * PART + i * THREADS + tid;
        cluster_share();
        Place place = {0, V - 1};
        if (rank) return place;
        for (int i = tid; i < total; i += THREADS) low = min(low, keys[i]), high = max(high, keys[i]);
        low = lanes_min(low), high = lanes_max(high);
        if (lane_id() == 0) atomicMin(&shared.low, low), atomicMax(&shared.high, high);
        __syncthreads();
        row.keys = keys, row.ids = ids, row.count = total, row.low = shared.low, row.high = shared.high;
        place = pass(row, target - upto[j], sum, shared);
        sum += upto[j];
        return place;
    }

    DEVICE Place operator()(const Row& row, float uniform, float min_p, float top_p, int rank, u32* keys, int* ids,
                            Shared& shared) {
        float x[PER];
#pragma unroll
        for (int i = 0; i < PER; ++i) {
            int at = i * THREADS + threadIdx.x;
            x[i] = at < PART && rank * PART + at < V ? row.logits[rank * PART + at] : -INFINITE;
        }
        u64 left = add_up(row, x, min_p, rank, shared), passed;
        if (top_p < 1) {
            u64 enough = max((u64)((float)upto[BINS] * top_p), (u64)1);
            if (enough <= left) {  // else the least share decides
                look(row, x, enough - 1, rank, counts[0], keys, ids, passed, shared);
                if (rank == 0 && threadIdx.x < CLUSTER) kept.arrivals.post(threadIdx.x, kept.values[0], parted(passed));
                kept.wait();
                left = joined(kept.values[0]);
            }
        }
        u64 target = left ? min((u64)((float)left * uniform), left - 1) : 0;
        return look(row, x, target, rank, counts[1], keys, ids, passed, shared);
    }
};
#endif

// logits f32 [B, V], -inf where forbidden, plain [B, V] as the model gave them. settings f32 [B, 4]: uniform,
// temperature, min_p, top_p; top_k [B]. token [B]; report [B, 2]: log-probability in the plain distribution, the
// adjusted logit. next [B], if not null, gets the token too: the input of the following step. keys, ids [B, V]: to work
// in. Grid (CLUSTER, B).
KERNEL CLUSTER_OF(CLUSTER, 1, 1) __launch_bounds__(THREADS) void sample(
    const float* logits, const float* plain, const float* settings, const int* top_k, int* token, float* report,
    int* next, u32* keys, int* ids) {
    PASS_TURN();
    __shared__ Shared shared;
    __shared__ Mailbox<CLUSTER, 4> mail;
    int rank = blockIdx.x, b = blockIdx.y;
#if CLUSTER > 1
    __shared__ Draw draw;
    if (threadIdx.x == 0) draw.open();
#endif
    if (threadIdx.x == 0) mail.open();
    cluster_arrive();
    cluster_wait();
    AWAIT_TURN();
    logits += (size_t)b * V, plain += (size_t)b * V, settings += 4 * b;
    const int OF_BLOCK = (V + CLUSTER - 1) / CLUSTER;
    float uniform = settings[0], temperature = settings[1], min_p = settings[2], top_p = settings[3];
    int k = top_k[b];
    bool draws = temperature > 0 && top_p > 0, few = k > 0 && k < V;
    Found found = find(logits, plain, rank * OF_BLOCK, min((rank + 1) * OF_BLOCK, V), shared);
    if (threadIdx.x < 4) {
        float all[4] = {found.best, found.most, found.sum, __int_as_float(found.at)};
        float mine = all[0];
        for (int i = 1; i < 4; ++i)
            if (threadIdx.x == i) mine = all[i];
        for (int r = 0; r < (draws && !few ? CLUSTER : 1); ++r) mail.post(r, rank, threadIdx.x, mine);
    }
    if (rank && (!draws || few)) return;
    mail.wait();
    found = Found{-INFINITE, -INFINITE, 0, V};
    for (int r = 0; r < CLUSTER; ++r) {
        const float* part = mail.values[r];
        found.join(Found{part[0], part[1], part[2], __float_as_int(part[3])});
    }
    float best = found.best, most = found.most, sum = found.sum;
    Place choice = {0, min(found.at, V - 1)};
    Row row = {logits, 0, 0, V, 0, ~0u, best, fminf(fmaxf(temperature, 1e-30f), 1e30f), false, {0, V}};
    __syncthreads();
#if CLUSTER > 1
    if (draws && !few) {
        choice = draw(row, uniform, min_p, top_p, rank, keys + (size_t)b * V, ids + (size_t)b * V, shared);
        if (rank) return;
        draws = false;
    }
#endif
    if (draws) {
        u64 passed, kept, all;
        if (few) {
            row.counting = true;
            row.last = pass(row, k - 1, passed, shared);
            row.counting = false;
        }
        // What shares less than this adds up to less than top_p leaves out: it need not be looked at.
        float least = fmaxf(min_p, top_p < 1 ? 0.999f * (1 - top_p) / V : 0.f);
        gather(row, least, keys + (size_t)b * V, ids + (size_t)b * V, kept, all, shared);
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
    choice.id = min(choice.id, V - 1);
    if (threadIdx.x == 0) {
        token[b] = choice.id;
        report[2 * b] = plain[choice.id] - most - logf(sum), report[2 * b + 1] = logits[choice.id];
        if (next) next[b] = choice.id;
    }
}

struct Kept {
    float* rows[16];
};

// rows[b] = logits[b]. Grid (V / 1024, B).
KERNEL void keep(const float* logits, const __grid_constant__ Kept kept) {
    TAKE_TURN();
    int i = blockIdx.x * THREADS + threadIdx.x;
    if (i < V) kept.rows[blockIdx.y][i] = logits[(size_t)blockIdx.y * V + i];
}
