// Activations as integers: x = worth * (d0 + d1 / 256 + d2 / 256**2), where the digits d are the signed bytes of one
// integer, the highest first, and worth is 1/127 of the largest magnitude of the row.
#pragma once
#include "../vectors.h"

// Return the largest magnitude of a row; NaN where the row holds NaN or infinity.
static inline float largest_magnitude(const void *x, int dtype, int64_t K) {
    Floats tops[4], faults[4];
    for (int i = 0; i < 4; i++) tops[i] = faults[i] = all_floats(0);
    for (int64_t k = 0; k < K; k += 4 * LANES)
        for (int i = 0; i < 4; i++) {
            Floats values = load_floats(x, dtype, k + i * LANES, K - k - i * LANES);
            tops[i] = larger(tops[i], magnitudes(values));
            faults[i] = multiply_add(values, all_floats(0), faults[i]);  // NaN after NaN or infinity
        }
    float found = sum_of((faults[0] + faults[1]) + (faults[2] + faults[3]));
    float largest = largest_of(larger(larger(tops[0], tops[1]), larger(tops[2], tops[3])));
    return found != found ? found : largest < SMALLEST_TOP ? SMALLEST_TOP : largest;
}

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
