// The experts of tokens and the shared one: mid[t, s] = weight swiglu(W1 x, W3 x), then y[t] = sum_s W2 mid[t, s]. FORM
// chooses: few tokens (expert_rows.cuh), many (expert_tiles.cuh), or what is between products of many.
#include "matvec.cuh"
#include "strips.cuh"

DEVICE float swiglu(float gate, float up, float limit) {
    gate = fminf(gate, limit);
    return gate * sigmoid(gate) * fminf(fmaxf(up, -limit), limit);
}

#define FEW 0
#define MANY 1
#define BETWEEN 2
#if FORM == FEW
#include "expert_rows.cuh"
#elif FORM == MANY
#include "expert_tiles.cuh"
#else
#include "expert_groups.cuh"
#endif
