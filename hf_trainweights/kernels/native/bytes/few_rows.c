// Products of one to four rows of x with integer codes. Each row of the weight is read once, in one stream. A vector of
// codes is multiplied with the digits of every token while it is in a register. A span is as many columns as have their
// products added up as integers, before a scale multiplies the sum.
#include "digits.h"
#include "integers.h"

typedef struct {
    float *token_scales;    // [M]
    Integers *offset_sums;  // [M][digits][spans]: -offset * the sum of the digits. Sums of products begin with it,
                            // because codes are too large by the offset
    int8_t *digits;         // [M][digits][padded K]; for nibbles, a pair of vectors has its even columns first
} Tokens;

// So many bytes of digits no longer stay in the first-level cache, and two rows of the weight are multiplied side by
// side, so that digits are read half as often. With fewer, one row at a time is faster: memory is read in one stream.
#define PAIRED_BYTES (24 << 10)
#define PAIR 2
// Up to so many sums, each is computed in two halves: a product waits some cycles for the sum before it, in which the
// other half can begin. With a weight in the caches, one token takes a fifth less time, and a third less with AVX-VNNI.
#define HALVED_SUMS 4

// The codes of so many columns fill a vector.
#define COLUMNS_OF(BITS) (BYTES * 8 / (BITS))

static int64_t padded_length(const Product *p) { return round_up(p->weight.K, COLUMNS_OF(p->weight.bits)); }

// Return the columns of a span: those of a row with one scale, of a group, or of the groups within one vector.
static int64_t span_columns(const Product *p) {
    int64_t size = p->weight.group_size, columns = COLUMNS_OF(p->weight.bits);
    return !size ? padded_length(p) : size < columns ? columns : size;
}

static int64_t spans_of(const Product *p) { return padded_length(p) / span_columns(p); }

int64_t few_rows_bytes(const Product *p) {
    return round_up(p->M * 4, BYTES) + p->M * p->weight.digits * (spans_of(p) * BYTES + padded_length(p));
}

static Tokens tokens_at(const Product *p, int8_t *memory) {
    Tokens tokens = {.token_scales = (float *)memory};
    tokens.offset_sums = (Integers *)(memory + round_up(p->M * 4, BYTES));
    tokens.digits = (int8_t *)(tokens.offset_sums + p->M * p->weight.digits * spans_of(p));
    return tokens;
}

// Put the digits of even columns before those of odd ones, because low halves of bytes hold the codes of even columns.
static void split_columns(int8_t *digits) {
    int8_t even[BYTES], odd[BYTES];
    for (int i = 0; i < BYTES; i++) {
        even[i] = digits[2 * i];
        odd[i] = digits[2 * i + 1];
    }
    memcpy(digits, even, BYTES);
    memcpy(digits + BYTES, odd, BYTES);
}

static void write_token(const Product *p, const Tokens *tokens, int64_t m) {
    const Weight *w = &p->weight;
    const char *x = (const char *)p->x + m * w->K * itemsize(w->dtype);
    int64_t size = span_columns(p), spans = spans_of(p), length = padded_length(p);
    int8_t *digits = tokens->digits + m * w->digits * length;
    Integers *offset_sums = tokens->offset_sums + m * w->digits * spans, digit_vectors[3];
    float top = largest_magnitude(x, w->dtype, w->K);
    Floats per_unit = all_floats(1 / unit_of(top, w->digits));
    tokens->token_scales[m] = top / 127;
    for (int64_t k = 0; k < length; k += BYTES) {
        write_digits(x, w->dtype, k, w->K, per_unit, w->digits, digit_vectors);
        for (int d = 0; d < w->digits; d++) *(Integers *)(digits + d * length + k) = digit_vectors[d];
    }
    for (int64_t i = 0; w->bits == 4 && i < w->digits * length; i += COLUMNS_OF(4)) split_columns(digits + i);
    for (int d = 0; d < w->digits; d++)
        for (int64_t span = 0; span < spans; span++) {
            Integers sum = all_integers(0);
            for (int64_t k = span * size; k < (span + 1) * size; k += BYTES)
                sum = add_products_of_bytes(sum, all_bytes(1), *(Integers *)(digits + d * length + k));
            offset_sums[d * spans + span] = sum * -offset_of(kind_of(p));
        }
}

// Multiply the vector of codes from column k on with each vector of digits there, and add the products to `products`.
static inline __attribute__((always_inline)) void add_products(const uint8_t *codes[PAIR], const int8_t *digits,
                                                               int64_t length, int64_t k, int64_t left, int rows,
                                                               int vectors, int kind,
                                                               Integers products[PAIR][FEW_ROWS * 3]) {
    Integers loaded[PAIR][2];
    for (int row = 0; row < rows; row++) {
        const uint8_t *from = codes[row] + (k * bits_of(kind) >> 3);
        fetch_ahead(from);
        Integers bytes = load_bytes(from, left * bits_of(kind) >> 3);
        loaded[row][0] = kind == BYTE_CODES ? bytes ^ all_bytes(BYTE_OFFSET) : bytes & all_bytes(0x0f);
        loaded[row][1] = bytes >> 4 & all_bytes(0x0f);
        for (int half = 0; kind == INDEXES && half < 2; half++)
            loaded[row][half] = values_of(loaded[row][half]);
    }
    for (int i = 0; i < vectors; i++)
        for (int half = 0; half < 8 / bits_of(kind); half++) {
            Integers x = *(const Integers *)(digits + i * length + k + half * BYTES);
            for (int row = 0; row < rows; row++)
                products[row][i] = add_products_of_bytes(products[row][i], loaded[row][half], x);
        }
}

// Add the products of the vectors before `end`, two at a time to the halves of a sum. Return the column behind them.
static inline __attribute__((always_inline)) int64_t add_in_halves(const uint8_t *codes[PAIR], const int8_t *digits,
                                                                   int64_t length, int64_t end, int rows, int vectors,
                                                                   int kind, Integers products[PAIR][FEW_ROWS * 3]) {
    Integers others[PAIR][FEW_ROWS * 3];
    int64_t k = 0, columns = COLUMNS_OF(bits_of(kind));
    for (int row = 0; row < rows; row++)
        for (int i = 0; i < vectors; i++) others[row][i] = all_integers(0);
    for (; k + 2 * columns <= end; k += 2 * columns) {
        add_products(codes, digits, length, k, columns, rows, vectors, kind, products);
        add_products(codes, digits, length, k + columns, columns, rows, vectors, kind, others);
    }
    for (int row = 0; row < rows; row++)
        for (int i = 0; i < vectors; i++) products[row][i] += others[row][i];
    return k;
}

// Fill the sums [rows][FEW_ROWS] of rows of the weight from n on. The scales of two rows lie `scales` floats apart.
static inline __attribute__((always_inline)) void multiply_pair(const Product *p, const Tokens *tokens, int64_t n,
                                                                const float *scale, int64_t scales, int rows, int M,
                                                                int digits, int kind, float *sums) {
    int64_t K = p->weight.K, size = span_columns(p), spans = spans_of(p), length = padded_length(p);
    int64_t columns = COLUMNS_OF(bits_of(kind));
    int64_t group = p->weight.group_size ? p->weight.group_size : size, groups = size / group;
    const uint8_t *codes[PAIR];
    Floats total[PAIR][FEW_ROWS];
    for (int row = 0; row < rows; row++) {
        codes[row] = row_of(p, n + row);
        for (int m = 0; m < M; m++) total[row][m] = all_floats(0);
    }
    for (int64_t span = 0; span < spans; span++, scale += groups) {
        Integers products[PAIR][FEW_ROWS * 3];
        int64_t k = span * size, end = least(k + size, K);
        for (int row = 0; row < rows; row++)
            for (int i = 0; i < M * digits; i++) products[row][i] = tokens->offset_sums[i * spans + span];
        // Groups need no halves: they are short, and the sums of different groups do not wait for each other.
        if (rows * M * digits <= HALVED_SUMS && spans == 1)
            k = add_in_halves(codes, tokens->digits, length, end, rows, M * digits, kind, products);
        // Full vectors need no mask: with one, AMD's Zen 5 takes three times as long for one token in int8.
        for (; k + columns <= end; k += columns)
            add_products(codes, tokens->digits, length, k, columns, rows, M * digits, kind, products);
        if (k < end) add_products(codes, tokens->digits, length, k, end - k, rows, M * digits, kind, products);
        for (int row = 0; row < rows; row++) {
            Floats factors = span_scale(scale + row * scales, group, columns);
            for (int m = 0; m < M; m++) {
                Floats joined = join_digits(products[row] + m * digits, digits);
                total[row][m] = multiply_add(joined, factors, total[row][m]);
            }
        }
    }
    for (int row = 0; row < rows; row++)
        for (int m = 0; m < M; m++) sums[row * FEW_ROWS + m] = sum_of(total[row][m]);
}

#define CASE(M_, DIGITS, KIND)                                                                      \
    if (p->M == M_ && p->weight.digits == DIGITS && kind_of(p) == KIND) {                           \
        if (rows == PAIR) multiply_pair(p, tokens, n, scale, scales, PAIR, M_, DIGITS, KIND, sums); \
        else multiply_pair(p, tokens, n, scale, scales, 1, M_, DIGITS, KIND, sums);                 \
    }
#define CASES(DIGITS, KIND) CASE(1, DIGITS, KIND) CASE(2, DIGITS, KIND) CASE(3, DIGITS, KIND) CASE(4, DIGITS, KIND)

// The compiler gets these numbers as constants, so that the sums stay in registers.
static void multiply_pair_of(const Product *p, const Tokens *tokens, int64_t n, const float *scale, int64_t scales,
                             int rows, float *sums) {
    CASES(1, BYTE_CODES) CASES(2, BYTE_CODES) CASES(3, BYTE_CODES)
    CASES(1, NIBBLES) CASES(2, NIBBLES) CASES(3, NIBBLES)
    CASES(1, INDEXES) CASES(2, INDEXES) CASES(3, INDEXES)
}

static void multiply_rows(const Product *p, const Tokens *tokens, int64_t first, int64_t count) {
    const Weight *w = &p->weight;
    int64_t G = groups_of(p), scales = round_up(G, LANES) + LANES, vectors = p->M * w->digits;
    int64_t step = vectors * padded_length(p) < PAIRED_BYTES || PAIR * vectors > SUMS ? 1 : PAIR;
    float results[FEW_ROWS][LANES], sums[PAIR * FEW_ROWS], scale[PAIR * scales];
    for (int64_t n = 0; n < count; n += step) {
        int rows = (int)least(step, count - n);
        for (int row = 0; row < rows; row++)
            write_scales(p, first + n + row, scales, scale + row * scales);
        multiply_pair_of(p, tokens, first + n, scale, scales, rows, sums);
        for (int row = 0; row < rows; row++)
            for (int64_t m = 0; m < p->M; m++) results[m][n + row] = sums[row * FEW_ROWS + m];
    }
    Floats bias = p->bias ? load_floats(p->bias, w->dtype, first, count) : all_floats(0);
    for (int64_t m = 0; m < p->M; m++) {
        Floats values = multiply_add(*(Floats *)results[m], all_floats(tokens->token_scales[m]), bias);
        store_floats(p->out, w->dtype, m * w->N + first, count, values);
    }
}

void multiply_few_rows(const Product *p, int threads, int8_t *memory) {
    Tokens tokens = tokens_at(p, memory);
    for (int64_t m = 0; m < p->M; m++) write_token(p, &tokens, m);
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t n = 0; n < p->weight.N; n += LANES) multiply_rows(p, &tokens, n, least(LANES, p->weight.N - n));
}
