// What is between gate, up and down.
#ifndef DS4_ACTIVATION
#define DS4_ACTIVATION
#include "lanes.cuh"

DEVICE float swiglu(float gate, float up, float limit) {
    gate = fminf(gate, limit);
    return gate * sigmoid(gate) * fminf(fmaxf(up, -limit), limit);
}

#endif
