// Vectors, and the dtypes that they are loaded from and stored to: as long as the instructions have them that a file is
// compiled for, unless it asks for 32 bytes. avx2.h has all functions of avx512.h, and some for single numbers.
#pragma once
#include <immintrin.h>
#include <string.h>
#include "product.h"

#if defined(__AVX512F__) && !defined(VECTORS_OF_32_BYTES)
#include "avx512.h"
#else
#include "avx2.h"
#endif

// How far ahead of what a row of the weight is read at its codes are fetched. The CPU's own prefetching stops at the end
// of a page of 4 KB, and a row or two of codes fill one: docs/performance.md, "Thresholds".
#define FETCHED_BYTES 4096

// Fetch the codes that are read some time after these. An address behind the weight does no harm.
static inline __attribute__((always_inline)) void fetch_ahead(const uint8_t *codes) {
    _mm_prefetch((const char *)codes + FETCHED_BYTES, _MM_HINT_T0);
}

// Write `count` elements as float32, and zeros up to `padded`, a multiple of LANES.
static inline void copy_as_float32(const void *from, int dtype, int64_t index, int64_t count, int64_t padded,
                                   float *to) {
    for (int64_t i = 0; i < padded; i += LANES)
        *(Floats *)(to + i) = load_floats(from, dtype, index + i, count - i);
}

// Return a factor for each lane, of sums over `block` columns, an equal number in each lane: the scale of its group of
// `size` columns, the first of which is `scale`.
static inline Floats part_scale(const float *scale, int64_t size, int64_t block) {
    if (size >= block) return all_floats(*scale);
    return permuted(*(const Floats *)scale, lane_numbers() >> __builtin_ctzll(size * LANES / block));
}
