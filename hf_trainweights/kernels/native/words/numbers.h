// Activations as one 16-bit number each, or two for float32: x = worth * number, or worth * (number + second / 65536).
#pragma once
#define VECTORS_OF_32_BYTES
#include "../scales.h"

// Columns that x is padded to, with zeros.
#define STEP 64
// Numbers that are held at a time: half of a second-level cache of 1 MB.
#define PANEL_BYTES (1 << 19)

typedef struct {
    float *worth;     // [tokens]
    float *row;       // [padded K], of the token that is being written
    int16_t *values;  // [tokens][words][padded K]
    int8_t *end;      // of this memory
} Numbers;

static inline int64_t padded_columns(const Product *p) { return round_up(p->weight.K, STEP); }
static inline int words_of(const Product *p) { return p->weight.digits == 3 ? 2 : 1; }

static inline int64_t tokens_at_once(const Product *p) {
    int64_t fit = PANEL_BYTES / (2 * words_of(p) * padded_columns(p)) / FEW_ROWS * FEW_ROWS;
    return least(fit < FEW_ROWS ? FEW_ROWS : fit, p->M);
}

static inline Numbers numbers_at(const Product *p, int8_t *memory) {
    int64_t tokens = tokens_at_once(p), padded = padded_columns(p);
    Numbers numbers = {.worth = (float *)memory};
    numbers.row = numbers.worth + round_up(tokens, ALIGNMENT / 4);
    numbers.values = (int16_t *)(numbers.row + padded);
    numbers.end = (int8_t *)(numbers.values + tokens * words_of(p) * padded);
    return numbers;
}

// Return the largest magnitude; NaN where the row holds NaN or infinity.
static inline float largest_magnitude(const float *row, int64_t count) {
    __m256 top = _mm256_setzero_ps(), fault = _mm256_setzero_ps(), sign = _mm256_set1_ps(-0.0f);
    for (int64_t k = 0; k < count; k += LANES) {
        __m256 values = _mm256_loadu_ps(row + k);
        top = _mm256_max_ps(top, _mm256_andnot_ps(sign, values));
        fault = _mm256_fmadd_ps(values, _mm256_setzero_ps(), fault);  // NaN after NaN or infinity
    }
    float tops[LANES], found = sum_of(fault), largest = SMALLEST_TOP;
    _mm256_storeu_ps(tops, top);
    for (int i = 0; i < LANES; i++) largest = tops[i] > largest ? tops[i] : largest;
    return found != found ? found : largest;
}

// Write the numbers of a step so that a vector of 16 holds every column, every second one or every fourth.
static inline __attribute__((always_inline)) void write_step(const int32_t *step, int apart, int words, int64_t padded,
                                                             int16_t *values) {
    for (int i = 0; i < STEP; i++) {
        int32_t number = step[i / (16 * apart) * (16 * apart) + i % 16 * apart + i / 16 % apart];
        // Of a number of 24 bits the highest 8, rounded, and the signed rest.
        if (words == 2) values[i] = (int16_t)((number + 0x8000) >> 16);
        values[i + (words - 1) * padded] = (int16_t)number;
    }
}

// Write the numbers of a token, the m-th of those that are held.
static inline __attribute__((always_inline)) void write_token(const Product *p, const Numbers *numbers, int64_t token,
                                                              int64_t m, int apart) {
    const Weight *w = &p->weight;
    int64_t padded = padded_columns(p);
    int words = words_of(p);
    copy_as_float32(p->x, w->dtype, (token + m) * w->K, w->K, padded, numbers->row);
    float top = largest_magnitude(numbers->row, padded), unit = unit_of(top, w->digits);
    numbers->worth[m] = words == 2 ? top / 127 : unit;
    for (int64_t k = 0; k < padded; k += STEP) {
        int16_t *values = numbers->values + m * words * padded + k;
        int32_t step[STEP];
        for (int i = 0; i < STEP; i += LANES) {
            __m256 scaled = _mm256_mul_ps(_mm256_loadu_ps(numbers->row + k + i), _mm256_set1_ps(1 / unit));
            _mm256_storeu_si256((__m256i *)(step + i), _mm256_cvtps_epi32(scaled));
        }
        if (words == 2) write_step(step, apart, 2, padded, values);
        else write_step(step, apart, 1, padded, values);
    }
}

// Return the sum of a token's products as a number of its worth.
static inline __attribute__((always_inline)) __m256 join_words(const __m256i *products, int words) {
    __m256 sum = _mm256_cvtepi32_ps(products[0]);
    return words == 1 ? sum : _mm256_fmadd_ps(_mm256_cvtepi32_ps(products[1]), _mm256_set1_ps(0x1p-16f), sum);
}

// Add the products of 16 numbers of 16 bits each, two in a lane. AVX512_VNNI has one instruction for it, whose next sum
// waits for the last product: with it a token takes a tenth (float32) to a quarter (bfloat16) longer on AMD's Zen 5.
static inline __m256i add_products(__m256i sums, __m256i a, __m256i b) {
    return _mm256_add_epi32(sums, _mm256_madd_epi16(a, b));
}
