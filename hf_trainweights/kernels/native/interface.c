// The functions that Python calls.
#include "product.h"

int32_t abi(void) { return ABI; }

// Set the pointers to the stored tensors beside codes and scales, which come in the order of the format's tensor_names.
static void set_others(Product *p, const void *const others[OTHERS]) {
    int coding = p->weight.coding, next = 0;
    if (p->weight.family) {
        if (coding == E4M3 || coding == E4M3_DIVIDED) p->global_scale = others[next++];
        if (coding == NESTED) {
            p->nested_values = others[next++];
            p->outer_scale = others[next++];
            p->phase = others[next++];
            p->nested_offset = others[next++];
        }
        if (coding >= K4) p->group_scale = others[next++];
        if (p->weight.family == TABLE4) p->table = others[next];
        else p->zero_point = others[next];
    } else {
        p->group_scale = others[0];
        p->zero_point = others[1];
    }
}

// Return the memory for imported.c or bytes/, whichever takes more: the table decides, which is not known yet.
static int64_t imported_or_fours_bytes(Product *p, int threads) {
    int64_t bytes = imported_bytes(p, threads), fours = prepare_bytes(p) ? bytes_in_fours(p) : 0;
    return fours > bytes ? fours : bytes;
}

// Return the bytes of scratch memory that a product of M rows needs. It may begin at any address.
int64_t product_bytes(const Weight *weight, int64_t M, int threads) {
    Product product = {.weight = *weight, .M = M};
    int64_t bytes = takes_panels(&product)     ? panels_bytes(&product, threads)
                    : takes_float8(&product)   ? float8_bytes(&product)
                    : weight->family           ? imported_or_fours_bytes(&product, threads)
                    : takes_few_uint(&product) ? few_uint_bytes(&product)
                    : weight->code_units       ? uint_bytes(&product, threads)
                                               : integers_bytes(&product, threads);
    return bytes + ALIGNMENT;
}

// Fill out [M][N] with x [M][K] times the transpose of the weight, plus the bias.
void product(const Weight *weight, const void *x, const uint8_t *qdata, const void *scale, const void *bias, void *out,
             int64_t M, int threads, int8_t *memory, const void *first, const void *second, const void *third,
             const void *fourth, const void *fifth) {
    Product product = {.weight = *weight, .M = M, .x = x, .qdata = qdata, .scale = scale, .bias = bias, .out = out};
    set_others(&product, (const void *const[OTHERS]){first, second, third, fourth, fifth});
    memory += -(intptr_t)memory & (ALIGNMENT - 1);
    if (takes_panels(&product)) multiply_panels(&product, threads, memory);
    else if (takes_float8(&product)) multiply_float8(&product, threads, memory);
    else if (weight->family && prepare_bytes(&product)) multiply_in_fours(&product, threads, memory);
    else if (weight->family) multiply_imported(&product, threads, memory);
    else if (takes_few_uint(&product)) multiply_few_uint(&product, threads, memory);
    else if (weight->code_units) multiply_uint(&product, threads, memory);
    else multiply_integers(&product, threads, memory);
}

// Return the bytes of scratch memory that `dequantize` needs. It may begin at any address.
int64_t dequantized_bytes(const Weight *weight, int threads) {
    Product product = {.weight = *weight};
    return threads * row_bytes(&product) + ALIGNMENT;
}

// Fill out [count][K] with rows of the weight from `first_row` on, in the dtype of x.
void dequantize(const Weight *weight, const uint8_t *qdata, const void *scale, void *out, int64_t first_row,
                int64_t count, int threads, int8_t *memory, const void *first, const void *second, const void *third,
                const void *fourth, const void *fifth) {
    Product product = {.weight = *weight, .qdata = qdata, .scale = scale, .out = out};
    set_others(&product, (const void *const[OTHERS]){first, second, third, fourth, fifth});
    memory += -(intptr_t)memory & (ALIGNMENT - 1);
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t i = 0; i < count; i++)
        dequantize_row(&product, first_row + i, i * weight->K, memory + thread_index() * row_bytes(&product));
}
