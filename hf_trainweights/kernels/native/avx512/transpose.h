// 16 vectors of 16 numbers of 32 bits, transposed.
#pragma once
#include "vectors.h"

// Store column i of the rows at `to + i * stride_bytes`, which a vector's bytes divide.
static inline void store_transposed(const __m512i rows[LANES], int8_t *to, int64_t stride_bytes) {
    __m512i pairs[LANES], fours[LANES];
    for (int i = 0; i < 8; i++) {
        pairs[2 * i] = _mm512_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
        pairs[2 * i + 1] = _mm512_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        fours[i] = _mm512_unpacklo_epi64(pairs[i], pairs[i + 2]);
        fours[i + 1] = _mm512_unpackhi_epi64(pairs[i], pairs[i + 2]);
        fours[i + 2] = _mm512_unpacklo_epi64(pairs[i + 1], pairs[i + 3]);
        fours[i + 3] = _mm512_unpackhi_epi64(pairs[i + 1], pairs[i + 3]);
    }
    // Quarter q of fours[4 * j + i] holds rows 4 * j to 4 * j + 3 of column 4 * q + i.
    for (int i = 0; i < 4; i++) {
        __m512i even = _mm512_shuffle_i32x4(fours[i], fours[i + 4], 0x88);
        __m512i odd = _mm512_shuffle_i32x4(fours[i], fours[i + 4], 0xdd);
        __m512i even_below = _mm512_shuffle_i32x4(fours[i + 8], fours[i + 12], 0x88);
        __m512i odd_below = _mm512_shuffle_i32x4(fours[i + 8], fours[i + 12], 0xdd);
        _mm512_store_si512(to + i * stride_bytes, _mm512_shuffle_i32x4(even, even_below, 0x88));
        _mm512_store_si512(to + (i + 4) * stride_bytes, _mm512_shuffle_i32x4(odd, odd_below, 0x88));
        _mm512_store_si512(to + (i + 8) * stride_bytes, _mm512_shuffle_i32x4(even, even_below, 0xdd));
        _mm512_store_si512(to + (i + 12) * stride_bytes, _mm512_shuffle_i32x4(odd, odd_below, 0xdd));
    }
}
