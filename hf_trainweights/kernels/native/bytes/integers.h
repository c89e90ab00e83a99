// Products with integer codes, for few and for many rows of x.
#pragma once
#include "../scales.h"

// The kinds of codes: their bits, and what tells nibbles that are indices from those that are numbers.
enum { BYTE_CODES = 8, NIBBLES = 4, INDEXES = 16 + 4 };

static inline int kind_of(const Product *p) { return p->weight.codebook ? INDEXES : p->weight.bits; }
static inline int bits_of(int kind) { return kind & 15; }

static inline int64_t padded_columns(const Product *p) { return round_up(p->weight.K, BYTES); }

// What codes are stored with, or made unsigned by.
static inline int offset_of(const Product *p) { return kind_of(p) == NIBBLES ? 8 : 128; }

static inline const uint8_t *row_of(const Product *p, int64_t n) {
    return p->qdata + n * (p->weight.K * p->weight.bits >> 3);
}

// A vector of codes of a row from column k on, each plus the offset; behind the `left` codes that the row has there are
// any codes, which meet digits of 0.
static inline Integers load_codes(const uint8_t *row, int kind, int64_t k, int64_t left) {
    if (kind == BYTE_CODES) return load_bytes(row + k, left) ^ all_bytes(0x80);
    Integers nibbles = load_nibbles(row + (k >> 1), left);
    return kind == INDEXES ? looked_up(CODEBOOK, nibbles) : nibbles;
}

int64_t few_rows_bytes(const Product *p);
int64_t many_rows_bytes(const Product *p, int threads);
void multiply_few_rows(const Product *p, int threads, int8_t *memory);
void multiply_many_rows(const Product *p, int threads, int8_t *memory);
