// Activations as integers: x = worth * (d0 + d1 / 256 + d2 / 256**2), where the digits d are the signed bytes of one
// integer, the highest first, and worth is 1/127 of the largest magnitude of the row.
#pragma once
#include "vectors.h"

// Return the largest magnitude of a row; NaN where the row holds NaN or infinity.
static inline float largest_magnitude(const void *x, int dtype, int64_t K) {
    __m512 tops[4], faults[4];
    for (int i = 0; i < 4; i++) tops[i] = faults[i] = _mm512_setzero_ps();
    for (int64_t k = 0; k < K; k += 4 * LANES)
        for (int i = 0; i < 4; i++) {
            __m512 values = load_floats(x, dtype, k + i * LANES, first_lanes(K - k - i * LANES));
            tops[i] = _mm512_max_ps(tops[i], _mm512_abs_ps(values));
            faults[i] = _mm512_fmadd_ps(values, _mm512_setzero_ps(), faults[i]);  // NaN after NaN or infinity
        }
    __m512 top = _mm512_max_ps(_mm512_max_ps(tops[0], tops[1]), _mm512_max_ps(tops[2], tops[3]));
    __m512 fault = _mm512_add_ps(_mm512_add_ps(faults[0], faults[1]), _mm512_add_ps(faults[2], faults[3]));
    float found = _mm512_reduce_add_ps(fault), largest = _mm512_reduce_max_ps(top);
    return found != found ? found : largest < SMALLEST_TOP ? SMALLEST_TOP : largest;
}

// Pack four vectors of numbers that fit a signed byte, in their order.
static inline __m512i pack_bytes(const __m512i numbers[4]) {
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    __m512i low = _mm512_packs_epi32(numbers[0], numbers[1]), high = _mm512_packs_epi32(numbers[2], numbers[3]);
    return _mm512_permutexvar_epi32(order, _mm512_packs_epi16(low, high));
}

// Write the digits of 64 elements from x[k] on, a vector for each; those of elements behind K are 0.
static inline __attribute__((always_inline)) void write_digits(const void *x, int dtype, int64_t k, int64_t K,
                                                               __m512 per_unit, int digits, __m512i out[3]) {
    __m512i numbers[4], bytes[4];
    for (int i = 0; i < 4; i++) {
        __m512 values = load_floats(x, dtype, k + i * LANES, first_lanes(K - k - i * LANES));
        numbers[i] = _mm512_cvtps_epi32(_mm512_mul_ps(values, per_unit));
    }
    if (digits == 1) {
        out[0] = pack_bytes(numbers);
        return;
    }
    // The signed bytes of a number are its bytes after 128 was added to each, with the highest bit of each flipped.
    const __m512i middles = _mm512_set1_epi32(digits == 3 ? 0x808080 : 0x8080);
    for (int i = 0; i < 4; i++) numbers[i] = _mm512_xor_si512(_mm512_add_epi32(numbers[i], middles), middles);
    for (int d = 0; d < digits; d++) {
        for (int i = 0; i < 4; i++)
            bytes[i] = _mm512_srai_epi32(_mm512_slli_epi32(numbers[i], 24 - 8 * (digits - 1 - d)), 24);
        out[d] = pack_bytes(bytes);
    }
}

// Return the sum of products with each digit, as a number of the first digit's worth.
static inline __attribute__((always_inline)) __m512 join_digits(const __m512i *products, int digits) {
    __m512 sum = _mm512_cvtepi32_ps(products[digits - 1]);
    for (int d = digits - 2; d >= 0; d--)
        sum = _mm512_fmadd_ps(sum, _mm512_set1_ps(1.0f / 256), _mm512_cvtepi32_ps(products[d]));
    return sum;
}
