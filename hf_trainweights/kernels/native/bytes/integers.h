// Products with integer codes, for few and for many rows of x.
#pragma once
#include "../scales.h"

// The kinds of codes: the bits of a code, plus 16 for nibbles that are indices into the values of codebook4, 32 for codes
// of affine, or 64, 128 or 256 for indices into a table of table4 whose values have one or two digits or are bfloat16.
enum { BYTE_CODES = 8, NIBBLES = 4, INDEXES = 16 + 4, AFFINE_CODES = 32 };
enum { TABLE = 64 + 4, WIDE_TABLE = 128 + 4, BFLOATS = 256 + 4 };
enum { CODES2 = 32 + 2, CODES3 = 32 + 3, CODES4 = 32 + 4, CODES5 = 32 + 5, CODES6 = 32 + 6, CODES8 = 32 + 8 };

static inline int kind_of(const Product *p) {
    if (p->weight.family == AFFINE) return AFFINE_CODES + p->weight.bits;
    if (p->weight.family == TABLE4)
        return p->table_digits == NO_DIGITS ? BFLOATS : p->table_digits == 2 ? WIDE_TABLE : TABLE;
    return p->weight.codebook ? INDEXES : p->weight.bits;
}
static inline int bits_of(int kind) { return kind & 15; }

static inline int64_t padded_columns(const Product *p) { return round_up(p->weight.K, BYTES); }

// The number that each code is too large by when it is multiplied: nibbles are stored so, and for bytes it is added.
// Codes of affine have offsets of their own.
static inline int offset_of(int kind) { return kind == NIBBLES ? 8 : BYTE_OFFSET; }

static inline const uint8_t *row_of(const Product *p, int64_t n) {
    return p->qdata + n * (p->weight.K * p->weight.bits >> 3);
}

// Return the values of codebook4 at the indices, each plus the offset.
static inline Integers values_of(Integers nibbles) { return looked_up(CODEBOOK, nibbles) ^ all_bytes(128 - BYTE_OFFSET); }

// Return a vector of codes of a row from column k on, each plus the offset. Behind the `left` codes that the row still
// has there may be any codes: the digits there are 0.
static inline Integers load_codes(const uint8_t *row, int kind, int64_t k, int64_t left) {
    if (kind == BYTE_CODES) return load_bytes(row + k, left) ^ all_bytes(BYTE_OFFSET);
    Integers nibbles = load_nibbles(row + (k >> 1), left);
    return kind == INDEXES ? values_of(nibbles) : nibbles;
}

int64_t few_rows_bytes(const Product *p);
int64_t many_rows_bytes(const Product *p, int threads);
void multiply_few_rows(const Product *p, int threads, int8_t *memory);
void multiply_many_rows(const Product *p, int threads, int8_t *memory);
