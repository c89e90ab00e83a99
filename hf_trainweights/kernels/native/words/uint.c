// Products with uint2 to uint6 weights. Codes, zero points and group scales are small integers, so a row of the weight
// is written as 16-bit integers with one scale for the row, and then multiplied with all tokens.
#include "numbers.h"

// The codes of this many columns are packed together, as formats/planes.py specifies, and unpacked at once.
#define COLUMNS 32
// An integer is at most 63 * 16, so sums of products of this many columns fit 32 bits.
#define MOST_COLUMNS 512

// A thread's memory for a row: integer = code * factor - offset, with one factor and one offset for each group.
typedef struct {
    int16_t *integers;  // [padded K]
    int16_t *factors;   // [G]
    int16_t *offsets;   // [G]
} Row;

int64_t uint_row_bytes(const Product *p) { return (padded_columns(p) + 2 * round_up(groups_of(p), 16)) * 2; }

static Row row_in(const Product *p, int8_t *memory) {
    Row row = {.integers = (int16_t *)memory};
    row.factors = row.integers + padded_columns(p);
    row.offsets = row.factors + round_up(groups_of(p), 16);
    return row;
}

int64_t uint_bytes(const Product *p, int threads) {
    return numbers_at(p, 0).end - (int8_t *)0 + threads * uint_row_bytes(p);
}

// Write the factors and offsets of pairs of groups of row n.
static void write_groups(const Product *p, int64_t n, int64_t first, int64_t pairs, const Row *row) {
    int64_t at = n * (groups_of(p) / 2) + first;
    const uint8_t *scale = p->group_scale + at, *zero = p->zero_point + at;
    int code_units = p->weight.code_units, zero_units = p->weight.zero_units;
    for (int64_t i = 0; i < pairs; i++) {
        int low = (scale[i] & 15) + 1, high = (scale[i] >> 4) + 1;
        row->factors[2 * i] = (int16_t)(low * code_units);
        row->factors[2 * i + 1] = (int16_t)(high * code_units);
        row->offsets[2 * i] = (int16_t)(low * (zero[i] & 15) * zero_units);
        row->offsets[2 * i + 1] = (int16_t)(high * (zero[i] >> 4) * zero_units);
    }
}

// Write columns of row n as integers: (code * code_units - zero_point * zero_units) * (group_scale + 1). The first
// column is a multiple of 64, so that no pair of groups is cut.
static inline __attribute__((always_inline)) void write_row(const Product *p, int64_t n, int64_t first, int64_t columns,
                                                            int bits, const Row *row) {
    int shift = p->weight.group_size == 32 ? 5 : 4;
    const uint8_t *codes = p->qdata + (n * p->weight.K + first) / COLUMNS * bits * 4;
    write_groups(p, n, first >> (shift + 1), columns >> (shift + 1), row);
    for (int64_t k = 0; k < columns; k += COLUMNS, codes += bits * 4) {
        fetch_ahead(codes);
        for (int column = 0; column < COLUMNS; column += BYTES / 2) {
            int64_t group = (k + column) >> shift;
            Words widened = widen_half(load_planes(codes, bits, column & -BYTES), column / (BYTES / 2) & 1);
            *(Words *)(row->integers + k + column) =
                widened * all_words(row->factors[group]) - all_words(row->offsets[group]);
        }
    }
    for (int64_t k = columns; k < round_up(columns, STEP); k++) row->integers[k] = 0;
}

// The compiler gets the number of bits as a constant.
const int16_t *write_uint_row(const Product *p, int64_t n, int64_t first, int64_t columns, int8_t *memory) {
    Row row = row_in(p, memory);
    if (p->weight.bits == 2) write_row(p, n, first, columns, 2, &row);
    if (p->weight.bits == 3) write_row(p, n, first, columns, 3, &row);
    if (p->weight.bits == 4) write_row(p, n, first, columns, 4, &row);
    if (p->weight.bits == 5) write_row(p, n, first, columns, 5, &row);
    if (p->weight.bits == 6) write_row(p, n, first, columns, 6, &row);
    return row.integers;
}

static inline __attribute__((always_inline)) void multiply_row(const int16_t *row, const int16_t *values,
                                                               int64_t padded, int M, int words, float *sums) {
    Floats total[FEW_ROWS];
    for (int m = 0; m < M; m++) total[m] = all_floats(0);
    for (int64_t k = 0; k < padded;) {
        int64_t last = least(k + MOST_COLUMNS, padded);
        Integers products[FEW_ROWS * 2];
        for (int i = 0; i < M * words; i++) products[i] = all_integers(0);
        for (; k < last; k += BYTES / 2) {
            Words codes = *(const Words *)(row + k);
            for (int i = 0; i < M * words; i++)
                products[i] = add_products_of_words(products[i], codes, *(const Words *)(values + i * padded + k));
        }
        for (int m = 0; m < M; m++) total[m] += join_words(products + m * words, words);
    }
    for (int m = 0; m < M; m++) sums[m] = sum_of(total[m]);
}

#define CASE(M_, WORDS) \
    if (M == M_ && words == WORDS) multiply_row(row, values, padded, M_, WORDS, sums);

// The compiler gets these numbers as constants, so that the sums stay in registers.
static void multiply_row_of(const int16_t *row, const int16_t *values, int64_t padded, int64_t M, int words,
                            float *sums) {
    CASE(1, 1) CASE(2, 1) CASE(3, 1) CASE(4, 1) CASE(1, 2) CASE(2, 2) CASE(3, 2) CASE(4, 2)
}

static void multiply_tokens(const Product *p, const Numbers *numbers, int64_t token, int64_t tokens, int64_t n) {
    const Weight *w = &p->weight;
    const int16_t *row = write_uint_row(p, n, 0, w->K, numbers->end + thread_index() * uint_row_bytes(p));
    int64_t padded = padded_columns(p);
    float scale = row_scale(p, n), bias = p->bias ? load_floats(p->bias, w->dtype, n, 1)[0] : 0;
    for (int64_t m = 0; m < tokens; m += FEW_ROWS) {
        int64_t count = least(FEW_ROWS, tokens - m);
        float sums[FEW_ROWS];
        multiply_row_of(row, numbers->values + m * words_of(p) * padded, padded, count, words_of(p), sums);
        for (int64_t i = 0; i < count; i++) {
            float sum = sums[i] * scale * numbers->token_scales[m + i] + bias;
            store_floats(p->out, w->dtype, (token + m + i) * w->N + n, 1, all_floats(sum));
        }
    }
}

void multiply_uint(const Product *p, int threads, int8_t *memory) {
    Numbers numbers = numbers_at(p, memory);
    for (int64_t token = 0; token < p->M; token += tokens_at_once(p)) {
        int64_t tokens = least(tokens_at_once(p), p->M - token);
        for (int64_t m = 0; m < tokens; m++) write_token(p, &numbers, token, m, 1);
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
        for (int64_t n = 0; n < p->weight.N; n++) multiply_tokens(p, &numbers, token, tokens, n);
    }
}

static inline __attribute__((always_inline)) void widen(const int16_t *integers, int64_t K, Floats scale, int dtype,
                                                        void *out, int64_t at) {
    for (int64_t k = 0; k < K; k += LANES)  // K is a multiple of COLUMNS
        store_floats(out, dtype, at + k, LANES, to_floats(load_words(integers + k)) * scale);
}

// The compiler gets the dtype as a constant.
void dequantize_uint_row(const Product *p, int64_t n, int64_t at, int8_t *memory) {
    Floats scale = all_floats(row_scale(p, n));
    const int16_t *integers = write_uint_row(p, n, 0, p->weight.K, memory);
    if (p->weight.dtype == FLOAT32) widen(integers, p->weight.K, scale, FLOAT32, p->out, at);
    else if (p->weight.dtype == BFLOAT16) widen(integers, p->weight.K, scale, BFLOAT16, p->out, at);
    else widen(integers, p->weight.K, scale, FLOAT16, p->out, at);
}
