// Vectors of AVX2, and the dtypes that they are loaded from and stored to.
#pragma once
#include <immintrin.h>
#include <string.h>
#include "../product.h"

// 32-bit numbers in a vector, and bytes in it.
#define LANES 8
#define BYTES 32

static inline float load_float(const void *from, int dtype, int64_t index) {
    if (dtype == FLOAT32) return ((const float *)from)[index];
    uint16_t half = ((const uint16_t *)from)[index];
    if (dtype == FLOAT16) return _cvtsh_ss(half);
    return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128((int)half << 16)));
}

static inline __m256 load_floats(const void *from, int dtype, int64_t index) {
    if (dtype == FLOAT32) return _mm256_loadu_ps((const float *)from + index);
    __m128i half = _mm_loadu_si128((const __m128i *)((const uint16_t *)from + index));
    if (dtype == FLOAT16) return _mm256_cvtph_ps(half);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

// Rounds to the nearest, ties to even, as PyTorch does; NaN stays NaN.
static inline void store_float(void *to, int dtype, int64_t index, float value) {
    if (dtype == FLOAT32) ((float *)to)[index] = value;
    else if (dtype == FLOAT16) ((uint16_t *)to)[index] = _cvtss_sh(value, 0);
    else {
        uint32_t bits;
        memcpy(&bits, &value, 4);
        ((uint16_t *)to)[index] = value != value ? 0x7fc0 : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
}

// Write `count` elements as float32, and zeros up to `padded`.
static inline void copy_as_float32(const void *from, int dtype, int64_t index, int64_t count, int64_t padded, float *to) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) _mm256_storeu_ps(to + i, load_floats(from, dtype, index + i));
    for (; i < count; i++) to[i] = load_float(from, dtype, index + i);
    for (; i < padded; i++) to[i] = 0;
}

// The bytes of a row from `first` on, 32 of them; zeros behind its end.
static inline __m256i load_bytes(const uint8_t *row, int64_t first, int64_t row_bytes) {
    if (first + BYTES <= row_bytes) return _mm256_loadu_si256((const __m256i *)(row + first));
    uint8_t rest[BYTES] = {0};
    memcpy(rest, row + first, row_bytes - first);
    return _mm256_loadu_si256((const __m256i *)rest);
}

static inline float sum_of(__m256 values) {
    __m128 sum = _mm_add_ps(_mm256_castps256_ps128(values), _mm256_extractf128_ps(values, 1));
    sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
    return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}
