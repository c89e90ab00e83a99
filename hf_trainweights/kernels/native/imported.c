// Formats of other programs (codings.h), of which bytes/ reads some faster: a row of the weight is written as float32,
// and then multiplied with all tokens.
#define VECTORS_OF_32_BYTES
#include "codings.h"

// Codes that are unpacked at a time.
#define STEP 32

// A thread's memory for a row.
typedef struct {
    Groups groups;
    float *values;   // [padded K]
    uint8_t *codes;  // [padded K]; for float8 the values hold them
} Row;

static int64_t padded_columns(const Product *p) { return round_up(p->weight.K, STEP); }

int64_t imported_row_bytes(const Product *p) {
    return round_up(3 * groups_length(coded_groups(p)) * 4 + padded_columns(p) * 5, ALIGNMENT);
}

static Row row_in(const Product *p, int8_t *memory) {
    int64_t length = groups_length(coded_groups(p));
    Row row = {.groups.scale = (float *)memory};
    row.groups.zero = row.groups.scale + length;
    row.groups.offset = row.groups.zero + length;
    row.values = row.groups.offset + length;
    row.codes = (uint8_t *)(row.values + padded_columns(p));
    return row;
}

// Write each code as a byte. Where `widen_bytes` takes bytes with a sign (BYTE_OFFSET is 0), they are written less 128,
// which `widened` adds again.
static inline __attribute__((always_inline)) void unpack_row(const uint8_t *from, int64_t K, int bits, uint8_t *to) {
    for (int64_t k = 0; k < K; k += BYTES) {
        fetch_ahead(from + (k * bits >> 3));
        Integers codes = bits == 8   ? load_bytes(from + k, K - k)
                         : bits == 4 ? load_nibbles(from + (k >> 1), K - k)
                                     : load_planes(from + k / STEP * bits * 4, bits, (int)(k % STEP));
        *(Integers *)(to + k) = codes ^ all_bytes(128 - BYTE_OFFSET);
    }
}

// Write codes of float8 / 256.
static void unpack_float8(const uint8_t *from, int64_t K, float *to) {
    for (int64_t k = 0; k < K; k += 2 * LANES) load_float8(from + k, K - k, (Floats *)(to + k));
}

// The compiler gets the number of bits as a constant.
static void unpack(const Product *p, int64_t n, const Row *row) {
    int64_t K = p->weight.K;
    const uint8_t *codes = p->qdata + (p->weight.bits ? n * (K * p->weight.bits >> 3) : n * K);
    if (p->weight.bits == 0) unpack_float8(codes, K, row->values);
    if (p->weight.bits == 2) unpack_row(codes, K, 2, row->codes);
    if (p->weight.bits == 3) unpack_row(codes, K, 3, row->codes);
    if (p->weight.bits == 4) unpack_row(codes, K, 4, row->codes);
    if (p->weight.bits == 5) unpack_row(codes, K, 5, row->codes);
    if (p->weight.bits == 6) unpack_row(codes, K, 6, row->codes);
    if (p->weight.bits == 8) unpack_row(codes, K, 8, row->codes);
}

// Return a vector of codes as integers.
static inline Integers widened(const uint8_t *codes) {
    int64_t eight = 0;
    memcpy(&eight, codes, LANES);
    Integers bytes = all_integers(0);
    memcpy(&bytes, &eight, LANES);
    return widen_bytes(bytes, 0) + all_integers(128 - BYTE_OFFSET);
}

// Return table[i] for each index i, 0 to 15.
static inline Floats values_of(const float *table, Integers indexes) {
    Floats values = permuted(*(const Floats *)table, indexes & all_integers(LANES - 1));
    for (int first = LANES; first < 16; first += LANES) {
        Floats others = permuted(*(const Floats *)(table + first), indexes & all_integers(LANES - 1));
        Integers is_other = (Integers)(indexes >= all_integers(first));
        values = (Floats)(((Integers)others & is_other) | ((Integers)values & ~is_other));
    }
    return values;
}

// Return a vector of the weights of group g. Intermediate results are rounded to a dtype.
static inline __attribute__((always_inline)) Floats weights_of(const Product *p, const Row *row, int64_t k, int64_t g,
                                                               int operations, int dtype) {
    // Scaling by 256 is exact.
    if (operations == FLOAT8_GROUPS)
        return *(const Floats *)(row->values + k) * (all_floats(row->groups.scale[g]) * all_floats(256));
    Integers codes = widened(row->codes + k);
    Floats values = operations == TABLE4 ? values_of(p->table, codes) : to_floats(codes);
    return numbers_of(values, &row->groups, g, operations, dtype);
}

// Write the weights of row n in a dtype, to the elements of `to` from `at` on. If `each` is 1, each operation rounds
// its result to the dtype (`rounds_each` of the weight); if it is 0, the last operation alone does.
static inline __attribute__((always_inline)) void write_weights(const Product *p, const Row *row, int operations,
                                                                int dtype, int each, void *to, int64_t at) {
    int64_t K = p->weight.K, size = p->weight.group_size ? p->weight.group_size : K;
    int between = each ? dtype : FLOAT32;
    for (int64_t first = 0, g = 0; first < K; first += size, g++) {
        int64_t k = first, end = least(first + size, K);
        for (; k + LANES <= end; k += LANES)
            store_floats(to, dtype, at + k, LANES, weights_of(p, row, k, g, operations, between));
        if (k < end) store_floats(to, dtype, at + k, end - k, weights_of(p, row, k, g, operations, between));
    }
}

// The compiler gets the operations as a constant.
static inline __attribute__((always_inline)) void write_row(const Product *p, const Row *row, int dtype, int each,
                                                            void *to, int64_t at) {
    int operations = operations_of(&p->weight);
    if (operations == TABLE4) write_weights(p, row, TABLE4, dtype, each, to, at);
    if (operations == FLOAT8_GROUPS) write_weights(p, row, FLOAT8_GROUPS, dtype, each, to, at);
    if (operations == (AFFINE | SUBTRACT)) write_weights(p, row, AFFINE | SUBTRACT, dtype, each, to, at);
    if (operations == (AFFINE | ADD)) write_weights(p, row, AFFINE | ADD, dtype, each, to, at);
}

static void prepare_row(const Product *p, int64_t n, const Row *row) {
    write_groups(p, n, row->groups);
    unpack(p, n, row);
}

// The compiler gets the dtype as a constant.
void dequantize_imported_row(const Product *p, int64_t n, int64_t at, int8_t *memory) {
    Row row = row_in(p, memory);
    int each = p->weight.rounds_each;
    prepare_row(p, n, &row);
    if (p->weight.dtype == FLOAT32) write_row(p, &row, FLOAT32, 0, p->out, at);
    else if (p->weight.dtype == BFLOAT16 && each) write_row(p, &row, BFLOAT16, 1, p->out, at);
    else if (p->weight.dtype == BFLOAT16) write_row(p, &row, BFLOAT16, 0, p->out, at);
    else if (each) write_row(p, &row, FLOAT16, 1, p->out, at);
    else write_row(p, &row, FLOAT16, 0, p->out, at);
}

static inline __attribute__((always_inline)) void multiply_row(const float *row, const float *x, int64_t padded, int M,
                                                               float *sums) {
    Floats total[FEW_ROWS][2];
    for (int m = 0; m < M; m++) total[m][0] = total[m][1] = all_floats(0);
    for (int64_t k = 0; k < padded; k += 2 * LANES)
        for (int m = 0; m < M; m++)
            for (int half = 0; half < 2; half++) {
                const Floats *values = (const Floats *)(row + k + half * LANES);
                const Floats *token = (const Floats *)(x + m * padded + k + half * LANES);
                total[m][half] = multiply_add(*values, *token, total[m][half]);
            }
    for (int m = 0; m < M; m++) sums[m] = sum_of(total[m][0] + total[m][1]);
}

// The compiler gets the number of tokens as a constant, so that the sums stay in registers.
static void multiply_row_of(const float *row, const float *x, int64_t padded, int64_t M, float *sums) {
    if (M == 1) multiply_row(row, x, padded, 1, sums);
    if (M == 2) multiply_row(row, x, padded, 2, sums);
    if (M == 3) multiply_row(row, x, padded, 3, sums);
    if (M == 4) multiply_row(row, x, padded, 4, sums);
}

typedef struct {
    float *token_scales;  // [M]: 1, or NaN if codes are integers and x is not finite
    float *x;             // [M][padded K]
    int8_t *rows;         // of the threads
} Tokens;

static Tokens tokens_at(const Product *p, int8_t *memory) {
    Tokens tokens = {.token_scales = (float *)memory};
    tokens.x = tokens.token_scales + round_up(p->M, ALIGNMENT / 4);
    tokens.rows = (int8_t *)(tokens.x + p->M * padded_columns(p));
    return tokens;
}

int64_t imported_bytes(const Product *p, int threads) {
    return tokens_at(p, NULL).rows - (int8_t *)NULL + threads * imported_row_bytes(p);
}

static void write_token(const Product *p, const Tokens *tokens, int64_t m) {
    const Weight *w = &p->weight;
    float *x = tokens->x + m * padded_columns(p), top = 0;
    copy_as_float32(p->x, w->dtype, m * w->K, w->K, padded_columns(p), x);
    if (w->family != FLOAT8_GROUPS) top = largest_magnitude(x, FLOAT32, padded_columns(p));
    tokens->token_scales[m] = top != top ? top : 1;
}

static void multiply_rows(const Product *p, const Tokens *tokens, int64_t n) {
    const Weight *w = &p->weight;
    int64_t padded = padded_columns(p);
    Row row = row_in(p, tokens->rows + thread_index() * imported_row_bytes(p));
    float bias = p->bias ? load_floats(p->bias, w->dtype, n, 1)[0] : 0;
    prepare_row(p, n, &row);
    // The weights of float8 replace the codes in the same memory: each vector is read before it is written.
    write_row(p, &row, FLOAT32, 0, row.values, 0);
    for (int64_t k = w->K; k < padded; k++) row.values[k] = 0;
    for (int64_t token = 0; token < p->M; token += FEW_ROWS) {
        int64_t count = least(FEW_ROWS, p->M - token);
        float sums[FEW_ROWS];
        multiply_row_of(row.values, tokens->x + token * padded, padded, count, sums);
        for (int64_t m = 0; m < count; m++) {
            float sum = sums[m] * tokens->token_scales[token + m] + bias;
            store_floats(p->out, w->dtype, (token + m) * w->N + n, 1, all_floats(sum));
        }
    }
}

void multiply_imported(const Product *p, int threads, int8_t *memory) {
    Tokens tokens = tokens_at(p, memory);
    for (int64_t m = 0; m < p->M; m++) write_token(p, &tokens, m);
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t n = 0; n < p->weight.N; n++) multiply_rows(p, &tokens, n);
}
