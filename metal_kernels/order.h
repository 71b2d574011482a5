// Floats in the order of unsigned integers.

// Larger for larger scores, and -0 equals 0. No score is 0 here but one NaN, so 0 can stand for no score at all.
inline uint order_of(float score) {
    uint bits = as_type<uint>(score);
    bits = bits == 0x80000000u ? 0u : bits;
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}
