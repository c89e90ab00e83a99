// Rows of float weights from codes, each number rounded once. They serve products of many tokens, for which
// PyTorch's product with a float weight is the fastest.
#include "bytes/integers.h"

// Return a quarter of a vector of bytes as floats, each byte less the offset.
static inline Floats widened(Integers bytes, int quarter, int offset) {
    return to_floats(widen_bytes(bytes, quarter) - all_integers(offset));
}

// Return the scale of each column of a vector, from `column` on. The group of column k is k >> shift.
static inline Floats scales_of(const float *scale, int64_t column, int shift) {
    if (LANES >> shift <= 1) return all_floats(scale[column >> shift]);
    return permuted(*(const Floats *)(scale + (column >> shift)), lane_numbers() >> shift);
}

// Write a vector of bytes as floats. `scale` points to the scale of the first column; all columns share it if `shift`
// is 0. For codebook4 it is a factor instead, whose product with a value is exact, and `last` is the scale of the row.
static inline __attribute__((always_inline)) void write_columns(Integers bytes, int64_t count, const float *scale,
                                                                int shift, Floats last, int kind, int dtype, void *out,
                                                                int64_t at) {
    _Pragma("GCC unroll 4") for (int i = 0; i < BYTES / LANES; i++) {
        if (i * LANES >= count) break;
        Floats factors = shift ? scales_of(scale, i * LANES, shift) : all_floats(*scale);
        Floats values = widened(bytes, i, offset_of(kind)) * factors;
        if (kind == INDEXES) values *= last;
        store_floats(out, dtype, at + i * LANES, count - i * LANES, values);
    }
}

static inline __attribute__((always_inline)) void write_row(const Product *p, int64_t n, const float *scale, int kind,
                                                            int dtype, int64_t at) {
    // After `span` columns the next scale is taken, or the next scales if a vector has several.
    int64_t K = p->weight.K, size = p->weight.group_size ? p->weight.group_size : K, span = size < BYTES ? BYTES : size;
    int64_t scales = size < BYTES && p->weight.group_size ? BYTES / size : 1, next = span;
    int shift = scales > 1 ? __builtin_ctzll(size) : 0;
    const uint8_t *row = row_of(p, n);
    void *out = p->out;
    Floats last = all_floats(kind == INDEXES ? row_scale(p, n) : 1);
    for (int64_t k = 0; k < K; k += BYTES) {
        if (k == next) scale += scales, next += span;
        fetch_ahead(row + (k * bits_of(kind) >> 3));
        if (K - k >= BYTES)
            write_columns(load_codes(row, kind, k, BYTES), BYTES, scale, shift, last, kind, dtype, out, at + k);
        else
            write_columns(load_codes(row, kind, k, K - k), K - k, scale, shift, last, kind, dtype, out, at + k);
    }
}

#define CASE(KIND, DTYPE) \
    if (kind_of(p) == KIND && p->weight.dtype == DTYPE) write_row(p, n, scale, KIND, DTYPE, at);
#define CASES(KIND) CASE(KIND, FLOAT32) CASE(KIND, BFLOAT16) CASE(KIND, FLOAT16)

int64_t row_bytes(const Product *p) {
    if (p->weight.family) return imported_row_bytes(p);
    return p->weight.code_units ? uint_row_bytes(p) : scale_length(p) * 4;
}

static void dequantize_integers_row(const Product *p, int64_t n, int64_t at, float *scale) {
    if (p->weight.codebook) write_factors(p, n, 1, scale);
    else write_scales(p, n, scale_length(p), scale);
    CASES(BYTE_CODES) CASES(NIBBLES) CASES(INDEXES)
}

void dequantize_row(const Product *p, int64_t n, int64_t at, int8_t *memory) {
    if (p->weight.family) dequantize_imported_row(p, n, at, memory);
    else if (p->weight.code_units) dequantize_uint_row(p, n, at, memory);
    else if (p->weight.bits) dequantize_integers_row(p, n, at, (float *)memory);
    else dequantize_float8_row(p, n, at);
}
