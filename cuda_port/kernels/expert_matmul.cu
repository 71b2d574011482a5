// The experts of tokens and the shared one: mid[t, s] = weight swiglu(W1 x, W3 x), then y[t] = sum_s W2 mid[t, s]. FORM
// chooses: few tokens (expert_rows.cuh, or expert_step.cuh where experts lie in tiles), many (expert_tiles.cuh), or
// what is between products of many.
#ifndef TILED
#define TILED 0  // whether experts lie in tiles (blocks.cuh)
#endif
#include "activation.cuh"
#include "matvec.cuh"
#include "strips.cuh"

#define FEW 0
#define MANY 1
#define BETWEEN 2
#define STEP 3
#if FORM == FEW
#include "expert_rows.cuh"
#elif FORM == MANY
#include "expert_tiles.cuh"
#elif FORM == STEP
#include "expert_step.cuh"
#else
#include "expert_groups.cuh"
#endif
