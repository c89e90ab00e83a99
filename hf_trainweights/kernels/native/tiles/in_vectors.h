// Products of a step of rows and tokens without tiles, which few CPUs have: tokens lie side by side in a vector, and each
// number of a row, or two of bfloat16, in all of its lanes.
#pragma once
#include "panel.h"

// Rows whose sums stay in registers, with one vector of tokens or two.
#define VECTOR_ROWS 8
// Steps after which the next rows are taken, so that those of the tokens stay in the second-level cache, and after which
// sums begin anew: more float32 products in a row would add up their errors.
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
            // Vector by vector: were both multiplied with a number at once, GCC 12 would put a sum into its register
            // and move eleven of the sixteen back: 13.6 cycles of Ice Lake instead of 9.1, as llvm-mca has it.
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

// Fill two tiles of sums with the products of both tiles of rows and one tile of tokens, or four with those of two.
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
