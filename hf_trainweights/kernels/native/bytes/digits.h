// Activations as integers: x = worth * (d0 + d1 / 256 + d2 / 256**2), where the digits d are the signed bytes of one
// integer, the highest first, and worth is 1/127 of the largest magnitude of the row.
#pragma once
#include "../vectors.h"

// Write the digits of a vector of elements from x[k] on, a vector for each; those of elements behind K are 0.
static inline __attribute__((always_inline)) void write_digits(const void *x, int dtype, int64_t k, int64_t K,
                                                               Floats per_unit, int digits, Integers out[3]) {
    Integers numbers[4], bytes[4];
    for (int i = 0; i < 4; i++)
        numbers[i] = to_integers(load_floats(x, dtype, k + i * LANES, K - k - i * LANES) * per_unit);
    if (digits == 1) {
        out[0] = pack_bytes(numbers);
        return;
    }
    // The signed bytes of a number are its bytes after 128 was added to each, with the highest bit of each flipped.
    const Integers middles = all_integers(digits == 3 ? 0x808080 : 0x8080);
    for (int i = 0; i < 4; i++) numbers[i] = (numbers[i] + middles) ^ middles;
    for (int d = 0; d < digits; d++) {
        for (int i = 0; i < 4; i++) bytes[i] = numbers[i] << (24 - 8 * (digits - 1 - d)) >> 24;
        out[d] = pack_bytes(bytes);
    }
}

// Return the sum of products with each digit, as a number of the first digit's worth.
static inline __attribute__((always_inline)) Floats join_digits(const Integers *products, int digits) {
    Floats sum = to_floats(products[digits - 1]);
    for (int d = digits - 2; d >= 0; d--) sum = multiply_add(sum, all_floats(1.0f / 256), to_floats(products[d]));
    return sum;
}
