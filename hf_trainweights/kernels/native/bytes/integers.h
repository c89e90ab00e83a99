// Products with integer codes, for few and for many rows of x.
#pragma once
#include "../vectors.h"

static inline int64_t padded_columns(const Product *p) { return round_up(p->weight.K, BYTES); }

// What codes are stored with, or made unsigned by.
static inline int offset_of(const Product *p) { return p->weight.bits == 8 ? 128 : 8; }

static inline const uint8_t *row_of(const Product *p, int64_t n) {
    return p->qdata + n * (p->weight.K * p->weight.bits >> 3);
}

// A vector of codes of a row from column k on, each plus the offset; behind the `left` codes that the row has there are
// any codes, which meet digits of 0.
static inline Integers load_codes(const uint8_t *row, int bits, int64_t k, int64_t left) {
    if (bits == 4) return load_nibbles(row + (k >> 1), left);
    return load_bytes(row + k, left) ^ all_bytes(0x80);
}

int64_t few_rows_bytes(const Product *p);
int64_t many_rows_bytes(const Product *p, int threads);
void multiply_few_rows(const Product *p, int threads, int8_t *memory);
void multiply_many_rows(const Product *p, int threads, int8_t *memory);
