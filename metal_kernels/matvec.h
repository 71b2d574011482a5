// Products of a few rows of a matrix with a few vectors, for decode: every weight is read once and decoded in
// registers, all in float. Needs blocks.h before it.
//
// A lane takes portions (blocks.h) first, first + step, ... of each row: neighbouring lanes read neighbouring bytes.
// A weight is scale * q - minimum, so a product is scale * sum(q x) - minimum * sum(x), and the rows share sum(x).

// Bit t: vector t takes part. A single vector always does.
template <int TOKENS> inline bool takes_part(uint wanted, uint t) {
    return TOKENS == 1 || (wanted >> t & 1);
}

// sums[r * TOKENS + t] += this lane's share of the product of rows[r], of K weights, and vectors[t], for the t wanted.
// `wanted` must be the same in a simdgroup.
template <int KIND, int ROWS, int TOKENS> inline void add_products(
        const device uint8_t* const thread* rows, const device float* const thread* vectors, uint wanted, uint K,
        uint first, uint step, const threadgroup ulong* codebook, thread float* sums) {
    for (uint index = first; index < row_portions<KIND>(K); index += step) {
        Portion<KIND> portions[ROWS];
        UNROLL for (uint r = 0; r < ROWS; ++r) {
            portions[r] = read_portion<KIND>(rows[r], index);
        }
        UNROLL for (uint g = 0; g < uint(Format<KIND>::octets); ++g) {
            float4 low[TOKENS], high[TOKENS];
            float totals[TOKENS];
            UNROLL for (uint t = 0; t < TOKENS; ++t) {
                if (takes_part<TOKENS>(wanted, t)) {
                    const device float4* v = (const device float4*)(vectors[t] + octet_start<KIND>(index, g));
                    low[t] = v[0];
                    high[t] = v[1];
                    totals[t] = Format<KIND>::minimum ? dot(low[t] + high[t], float4(1)) : 0;
                }
            }
            UNROLL for (uint r = 0; r < ROWS; ++r) {
                Octet q = octet(portions[r], g, codebook);
                UNROLL for (uint t = 0; t < TOKENS; ++t) {
                    if (takes_part<TOKENS>(wanted, t)) {
                        float product = dot(q.low, low[t]) + dot(q.high, high[t]);
                        sums[r * TOKENS + t] += q.scale * product - q.minimum * totals[t];
                    }
                }
            }
        }
    }
}

// partial[i] = the sum of sums[i] over a simdgroup, i < COUNT. A barrier must follow.
template <int COUNT> inline void add_lanes(thread const float* sums, threadgroup float* partial, uint lane) {
    UNROLL for (uint i = 0; i < COUNT; ++i) {
        float sum = simd_sum(sums[i]);
        if (lane == 0) {
            partial[i] = sum;
        }
    }
}
