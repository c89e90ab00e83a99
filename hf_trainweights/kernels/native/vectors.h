// Vectors of the CPU, which are loaded from and stored to all dtypes of x. They are as long as the instructions that a
// file is compiled for allow, unless it defines VECTORS_OF_32_BYTES. avx2.h has all functions of avx512.h, and more
// that native/words needs.
#pragma once
#include <string.h>
#include "product.h"

#if defined(__ARM_NEON)
#include <arm_neon.h>
#include "neon.h"
#elif defined(__AVX512F__) && !defined(VECTORS_OF_32_BYTES)
#include <immintrin.h>
#include "avx512.h"
#else
#include <immintrin.h>
#include "avx2.h"
#endif

// Fetch the codes FETCHED_BYTES behind these into the second-level cache: the CPU's own prefetching stops at the end of
// a page of 4 KB, which a row or two of codes fill. The first-level cache waits for few lines at a
// time, and if they come from memory, a token took up to 1.7 times as long on AMD's Zen 4. An address behind the weight
// does no harm.
static inline __attribute__((always_inline)) void fetch_ahead(const uint8_t *codes) {
    __builtin_prefetch(codes + FETCHED_BYTES, 0, 2);
}

// Write `count` elements as float32, and zeros up to `padded`, a multiple of LANES.
static inline void copy_as_float32(const void *from, int dtype, int64_t index, int64_t count, int64_t padded,
                                   float *to) {
    for (int64_t i = 0; i < padded; i += LANES)
        *(Floats *)(to + i) = load_floats(from, dtype, index + i, count - i);
}

// Return the top of a row, at least SMALLEST_TOP; NaN if the row holds NaN or infinity.
static inline float largest_magnitude(const void *x, int dtype, int64_t K) {
    Floats tops[4], faults[4];
    for (int i = 0; i < 4; i++) tops[i] = faults[i] = all_floats(0);
    for (int64_t k = 0; k < K; k += 4 * LANES)
        for (int i = 0; i < 4; i++) {
            Floats values = load_floats(x, dtype, k + i * LANES, K - k - i * LANES);
            tops[i] = larger(tops[i], magnitudes(values));
            faults[i] = multiply_add(values, all_floats(0), faults[i]);  // NaN after NaN or infinity
        }
    float fault = sum_of((faults[0] + faults[1]) + (faults[2] + faults[3]));
    float largest = largest_of(larger(larger(tops[0], tops[1]), larger(tops[2], tops[3])));
    return fault != fault ? fault : largest < SMALLEST_TOP ? SMALLEST_TOP : largest;
}

// Return the scale for each lane of a vector of sums. Each lane holds the sum over an equal share of `block` columns,
// groups have `size` columns, and `scale` points to the scale of the first column.
static inline Floats span_scale(const float *scale, int64_t size, int64_t block) {
    if (size >= block) return all_floats(*scale);
    return permuted(*(const Floats *)scale, lane_numbers() >> __builtin_ctzll(size * LANES / block));
}
