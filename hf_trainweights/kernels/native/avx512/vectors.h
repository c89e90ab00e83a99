// Vectors of AVX-512, and the dtypes that they are loaded from and stored to.
#pragma once
#include <immintrin.h>
#include "../product.h"

// 32-bit numbers in a vector, and bytes in it.
#define LANES 16
#define BYTES 64

// A mask of the first `count` lanes, which may be negative or more than there are.
static inline __mmask16 first_lanes(int64_t count) {
    return count >= LANES ? 0xffff : count > 0 ? (__mmask16)((1u << count) - 1) : 0;
}

// The elements of `mask` from element `index` on, as float32; 0 in the other lanes.
static inline __m512 load_floats(const void *from, int dtype, int64_t index, __mmask16 mask) {
    if (dtype == FLOAT32) return _mm512_maskz_loadu_ps(mask, (const float *)from + index);
    __m256i half = _mm256_maskz_loadu_epi16(mask, (const uint16_t *)from + index);
    if (dtype == FLOAT16) return _mm512_cvtph_ps(half);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

// Rounds to the nearest, ties to even, as PyTorch does; NaN stays NaN.
static inline __m256i to_bfloat16(__m512 values) {
    __m512i bits = _mm512_castps_si512(values);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    __mmask16 nan = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc0)));
}

static inline void store_floats(void *to, int dtype, int64_t index, __mmask16 mask, __m512 values) {
    if (dtype == FLOAT32) {
        _mm512_mask_storeu_ps((float *)to + index, mask, values);
        return;
    }
    __m256i half = dtype == FLOAT16 ? _mm512_cvtps_ph(values, 0) : to_bfloat16(values);
    _mm256_mask_storeu_epi16((uint16_t *)to + index, mask, half);
}

// Write `count` elements as float32.
static inline void copy_as_float32(const void *from, int dtype, int64_t index, int64_t count, float *to) {
    for (int64_t i = 0; i < count; i += LANES) {
        __mmask16 mask = first_lanes(count - i);
        _mm512_mask_storeu_ps(to + i, mask, load_floats(from, dtype, index + i, mask));
    }
}
