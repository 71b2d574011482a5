// y[r, k] = the weight that row r's block holds for k.  One thread decodes 32 weights.
#include "blocks.h"
// ---- kernel rows
threadgroup ulong codebook[KIND == KIND_IQ2_XXS ? 256 : 1];
load_codebook<KIND>(codebook, thread_index_in_threadgroup, threads_per_threadgroup.x);
threadgroup_barrier(mem_flags::mem_threadgroup);
ulong index = ulong(threadgroup_position_in_grid.x) * threads_per_threadgroup.x + thread_index_in_threadgroup;
ulong row = index / (K / 32);
if (row < ulong(rows)) {
    device float4* out = (device float4*)y + index * 8;
    for (uint i = 0; i < 4; ++i) {
        float4 w[2];
        decode8<KIND>(blocks + row * row_bytes<KIND>(K), uint(index % (K / 32)) * 4 + i, codebook, w);
        out[2 * i] = w[0];
        out[2 * i + 1] = w[1];
    }
}
