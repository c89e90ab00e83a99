// The scales of integer codes, and the values of codebook4, as in formats/codebook4.py and formats/group_scales.py.
#pragma once
#include "vectors.h"

// Bits of the scale of a group of codebook4, with and without its sign. Eight scales take GROUP_BITS bytes.
#define GROUP_BITS 7
#define FACTOR_BITS 6

// The values of codebook4, each plus 128, for 16 bytes of a vector.
static const uint8_t CODEBOOK[16] = {1, 28, 50, 67, 81, 94, 106, 117, 128, 139, 151, 163, 177, 192, 210, 234};

static const float EIGHTHS[8] = {128, 140, 152, 166, 181, 197, 215, 235};

// Write the factors of eight groups, each times `number`. `word` holds a code of 6 bits and a sign for each factor, the
// first in the lowest bits. A step of a code is an eighth of an octave, rounded to 8 bits. Code 63 is 1, code 0 is 0.
#ifdef __AVX2__
static inline void write_eight(uint64_t word, float number, float to[8]) {
    const __m256i all = _mm256_set1_epi64x((int64_t)word);
    // The octave is added to the exponent of the eighth times 2**-15.
    const __m256 eighths = _mm256_mul_ps(_mm256_loadu_ps(EIGHTHS), _mm256_set1_ps(0x1p-15f));
    __m256i first = _mm256_srlv_epi64(all, _mm256_setr_epi64x(0, 7, 28, 35));
    __m256i second = _mm256_srlv_epi64(all, _mm256_setr_epi64x(14, 21, 42, 49));
    __m256 low_words = _mm256_shuffle_ps(_mm256_castsi256_ps(first), _mm256_castsi256_ps(second), 0x88);
    __m256i codes = _mm256_castps_si256(low_words), magnitudes = _mm256_and_si256(codes, _mm256_set1_epi32(63));
    __m256i steps = _mm256_add_epi32(magnitudes, _mm256_set1_epi32(1));
    __m256i octaves = _mm256_slli_epi32(_mm256_srli_epi32(steps, 3), 23);
    __m256i bits = _mm256_add_epi32(_mm256_castps_si256(_mm256_permutevar8x32_ps(eighths, steps)), octaves);
    bits = _mm256_andnot_si256(_mm256_cmpeq_epi32(magnitudes, _mm256_setzero_si256()), bits);
    __m256i signs = _mm256_slli_epi32(_mm256_and_si256(codes, _mm256_set1_epi32(1 << FACTOR_BITS)), 31 - FACTOR_BITS);
    __m256 factors = _mm256_castsi256_ps(_mm256_xor_si256(bits, signs));
    _mm256_storeu_ps(to, _mm256_mul_ps(factors, _mm256_set1_ps(number)));
}
#else
static inline void write_eight(uint64_t word, float number, float to[8]) {
    for (int i = 0; i < 8; i++, word >>= GROUP_BITS) {
        int steps = (int)(word & 63) + 1;
        float factor = steps == 1 ? 0 : EIGHTHS[steps & 7] * 0x1p-15f * (float)(1 << (steps >> 3));
        to[i] = (word >> FACTOR_BITS & 1 ? -factor : factor) * number;
    }
}
#endif

// Return the floats that the scales of a row take in memory; a vector may be loaded from the last scale on.
static inline int64_t scale_length(const Product *p) { return round_up(groups_of(p), LANES) + LANES; }

// Write the factors of the groups of a row of codebook4, each times `number`.
static inline void write_factors(const Product *p, int64_t n, float number, float *to) {
    int64_t G = groups_of(p), packed_bytes = (G * GROUP_BITS + 7) / 8;
    const uint8_t *packed = p->group_scale + n * packed_bytes;
    for (int64_t g = 0, from = 0; g < G; g += 8, from += GROUP_BITS) {
        uint64_t word = 0;
        float eight[8];
        memcpy(&word, packed + from, least(8, packed_bytes - from));
        write_eight(word, number, eight);
        memcpy(to + g, eight, 4 * least(8, G - g));
    }
}

// Return the scale of a row whose format has one scale in a row.
static inline float row_scale(const Product *p, int64_t n) {
    return load_floats(p->scale, p->weight.scale_dtype, n, 1)[0];
}

// Write the scales of a row as float32, and zeros up to `padded`.
static inline void write_scales(const Product *p, int64_t n, int64_t padded, float *to) {
    int64_t G = groups_of(p);
    if (p->weight.codebook) {
        write_factors(p, n, row_scale(p, n), to);
        for (int64_t g = G; g < padded; g++) to[g] = 0;
    } else
        copy_as_float32(p->scale, p->weight.scale_dtype, n * G, G, padded, to);
}

// Write the scales of some rows as float32, one row after the other. Behind them any numbers may fill the last vector.
static inline void write_scales_of_rows(const Product *p, int64_t first, int64_t rows, float *to) {
    int64_t G = groups_of(p);
    if (!p->weight.codebook)
        copy_as_float32(p->scale, p->weight.scale_dtype, first * G, rows * G, round_up(rows * G, LANES), to);
    else
        for (int64_t n = 0; n < rows; n++) write_scales(p, first + n, G, to + n * G);
}
