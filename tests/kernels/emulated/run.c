// Run one call of native/interface.c: read its arguments from the standard input, and write its result to the output.
#include <stdio.h>
#include <stdlib.h>
#include "product.h"

int64_t product_bytes(const Weight *weight, int64_t M, int threads);
void product(const Weight *weight, const void *x, const uint8_t *qdata, const void *scale, const void *bias, void *out,
             int64_t M, int threads, int8_t *memory, const void *, const void *, const void *, const void *,
             const void *);
int64_t dequantized_bytes(const Weight *weight, int threads);
void dequantize(const Weight *weight, const uint8_t *qdata, const void *scale, void *out, int64_t first, int64_t count,
                int threads, int8_t *memory, const void *, const void *, const void *, const void *, const void *);

static void read_bytes(void *to, int64_t count) {
    if (fread(to, 1, (size_t)count, stdin) != (size_t)count) exit(1);
}

// Return a tensor; NULL where its number of bytes is 0.
static void *read_tensor(void) {
    int64_t count;
    read_bytes(&count, sizeof count);
    void *tensor = count ? malloc((size_t)count) : NULL;
    if (count) read_bytes(tensor, count);
    return tensor;
}

// M is 0 for the rows of the weight.
int main(void) {
    Weight weight;
    int64_t M, threads, out_bytes;
    void *tensors[4 + OTHERS];
    read_bytes(&weight, sizeof weight);
    read_bytes(&M, sizeof M);
    read_bytes(&threads, sizeof threads);
    read_bytes(&out_bytes, sizeof out_bytes);
    for (int i = 0; i < 4 + OTHERS; i++) tensors[i] = read_tensor();
    void *x = tensors[0], *qdata = tensors[1], *scale = tensors[2], *bias = tensors[3], *out = malloc((size_t)out_bytes);
    int64_t bytes = M ? product_bytes(&weight, M, (int)threads) : dequantized_bytes(&weight, (int)threads);
    int8_t *memory = malloc((size_t)bytes);
    void **others = tensors + 4;
    if (M)
        product(&weight, x, qdata, scale, bias, out, M, (int)threads, memory, others[0], others[1], others[2],
                others[3], others[4]);
    else
        dequantize(&weight, qdata, scale, out, 0, weight.N, (int)threads, memory, others[0], others[1], others[2],
                   others[3], others[4]);
    return fwrite(out, 1, (size_t)out_bytes, stdout) != (size_t)out_bytes;
}
