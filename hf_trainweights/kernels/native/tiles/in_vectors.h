// Products by panels on CPUs without tiles. Tokens lie side by side in the lanes of a vector, and each number of a row,
// or each pair of bfloat16, is copied to all lanes.
#pragma once
#include "panel.h"

// The sums of this many rows with one or two vectors of tokens stay in registers.
#define VECTOR_ROWS 8
// After this many steps the next rows are multiplied, so that the steps of the tokens stay in the second-level cache.
// Sums begin anew, because the errors of more float32 products in a row would add up.
#define STEPS_AT_ONCE 64

static inline __attribute__((always_inline)) Floats add_products(Floats sum, Integers x, const int8_t *row, Way way) {
    Integers numbers = all_integers(*(const int32_t *)row);
#ifdef __AVX512BF16__
    if (way == WIDENED) return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)numbers);
#endif
    (void)way;
    return multiply_add((Floats)x, (Floats)numbers, sum);
}

static inline __attribute__((always_inline)) void multiply_vectors(const int8_t *rows, const int8_t *tokens,
                                                                   int64_t stride, int64_t steps, int begins,
                                                                   int vectors, Way way, int8_t *sums) {
    Floats products[VECTOR_ROWS][2];
    _Pragma("GCC unroll 8") for (int n = 0; n < VECTOR_ROWS; n++)
        _Pragma("GCC unroll 2") for (int v = 0; v < vectors; v++)
            products[n][v] = all_floats(0);
    for (int64_t s = 0; s < steps; s++, rows += TILE_BYTES, tokens += TILE_BYTES)
        for (int k = 0; k < TILE_ROWS; k++) {
            Integers x[2];
            _Pragma("GCC unroll 2") for (int v = 0; v < vectors; v++)
                x[v] = *(const Integers *)(tokens + v * stride + k * BYTES);
            // Vector by vector: if both were multiplied with a number at once, GCC 12 would overwrite a register with a
            // sum and move eleven of the sixteen sums back: 13.6 cycles of Ice Lake instead of 9.1, by llvm-mca.
            _Pragma("GCC unroll 2") for (int v = 0; v < vectors; v++)
                _Pragma("GCC unroll 8") for (int n = 0; n < VECTOR_ROWS; n++)
                    products[n][v] = add_products(products[n][v], x[v], rows + n * BYTES + k * 4, way);
        }
    _Pragma("GCC unroll 8") for (int n = 0; n < VECTOR_ROWS; n++)
        _Pragma("GCC unroll 2") for (int v = 0; v < vectors; v++) {
            Floats *sum = (Floats *)(sums + v * 2 * TILE_BYTES + n * BYTES);
            if (!begins) products[n][v] += *sum;
            *sum = products[n][v];
        }
}

// Fill two tiles of sums with the products of both tiles of rows and one tile of tokens, or four with two of tokens.
static inline __attribute__((always_inline)) void multiply_in_vectors(const int8_t *rows, const int8_t *tokens,
                                                                      int64_t stride, int is_pair, int64_t steps,
                                                                      Way way, int8_t *sums) {
    for (int64_t s = 0; s < steps; s += STEPS_AT_ONCE) {
        int64_t count = least(STEPS_AT_ONCE, steps - s);
        for (int n = 0; n < BLOCK_ROWS; n += VECTOR_ROWS) {
            const int8_t *from = rows + n / TILE_ROWS * stride + n % TILE_ROWS * BYTES + s * TILE_BYTES;
            const int8_t *x = tokens + s * TILE_BYTES;
            if (is_pair) multiply_vectors(from, x, stride, count, s == 0, 2, way, sums + n * BYTES);
            else multiply_vectors(from, x, stride, count, s == 0, 1, way, sums + n * BYTES);
        }
    }
}
