// Activations as integers: x = token_scale * (d0 + d1 / 256 + d2 / 256**2). The digits d are the signed bytes of one
// integer, the highest first, and token_scale is the top of the row divided by 127.
#pragma once
#include "../vectors.h"

// Write the digits of a vector of elements from x[k] on: one vector of first digits, one of second ones, and so on. The
// digits of elements behind K are 0.
static inline __attribute__((always_inline)) void write_digits(const void *x, int dtype, int64_t k, int64_t K,
                                                               Floats per_unit, int digits, Integers out[3]) {
    Integers numbers[4], bytes[4];
    for (int i = 0; i < 4; i++)
        numbers[i] = to_integers(load_floats(x, dtype, k + i * LANES, K - k - i * LANES) * per_unit);
    if (digits == 1) {
        out[0] = pack_bytes(numbers);
        return;
    }
    // To get the signed bytes of a number, add 128 to each of its bytes and flip the highest bit of each.
    const Integers middles = all_integers(digits == 3 ? 0x808080 : 0x8080);
    for (int i = 0; i < 4; i++) numbers[i] = (numbers[i] + middles) ^ middles;
    for (int d = 0; d < digits; d++) {
        for (int i = 0; i < 4; i++) bytes[i] = numbers[i] << (24 - 8 * (digits - 1 - d)) >> 24;
        out[d] = pack_bytes(bytes);
    }
}

// Return the sum of products over all digits, in units of the first digit.
static inline __attribute__((always_inline)) Floats join_digits(const Integers *products, int digits) {
    Floats sum = to_floats(products[digits - 1]);
    for (int d = digits - 2; d >= 0; d--) sum = multiply_add(sum, all_floats(1.0f / 256), to_floats(products[d]));
    return sum;
}
