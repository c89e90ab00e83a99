// What Python calls.
#include "product.h"

// Return the scratch memory that a product of M rows needs, at any address.
int64_t product_bytes(const Weight *weight, int64_t M, int threads) {
    Product product = {.weight = *weight, .M = M};
    int64_t bytes = weight->bits == 0 ? float8_bytes(&product)
                    : M <= FEW_ROWS   ? few_rows_bytes(&product)
                                      : many_rows_bytes(&product, threads);
    return bytes + BYTES;
}

// Fill out [M][N] with x [M][K] times the transpose of the weight, plus the bias.
void product(const Weight *weight, const void *x, const uint8_t *qdata, const void *scale, const void *bias, void *out,
             int64_t M, int threads, int8_t *memory) {
    Product product = {.weight = *weight, .M = M, .x = x, .qdata = qdata, .scale = scale, .bias = bias, .out = out};
    memory += -(intptr_t)memory & (BYTES - 1);
    if (weight->bits == 0) multiply_float8(&product, threads, memory);
    else if (M <= FEW_ROWS) multiply_few_rows(&product, threads, memory);
    else multiply_many_rows(&product, threads, memory);
}

// Fill out [N][K] with a float8 weight.
void dequantize(const Weight *weight, const uint8_t *qdata, const void *scale, void *out, int threads) {
    Product product = {.weight = *weight, .qdata = qdata, .scale = scale, .out = out};
    dequantize_float8(&product, threads);
}
