// Products of one to four rows of x with integer codes: each row of the weight is read once, in one stream, and a
// vector of codes is multiplied with the digits of every token while it is in a register.
#include "digits.h"
#include "integers.h"

typedef struct {
    float *worth;       // [M]
    Integers *initial;  // [M][digits][parts]: what sums begin with, so that codes count from their offset
    int8_t *digits;     // [M][digits][padded K]; for nibbles, of each two vectors those of even columns come first
} Tokens;

// From so many bytes of digits on, which no longer stay in the first cache, two rows of the weight go side by side and
// use what is read of the tokens twice. Below it one row after the other is faster: memory is read in one stream.
#define PAIRED_BYTES (24 << 10)
#define PAIR 2
// Up to so many sums, each is kept in two halves: a product waits some cycles for the sum before it, in which others
// can begin. With a weight in the caches, one token takes a fifth less time, and a third less with AVX-VNNI.
#define HALVED_SUMS 4

// Columns of a vector of codes as they are stored.
#define COLUMNS_OF(BITS) (BYTES * 8 / (BITS))

static int64_t padded_length(const Product *p) { return round_up(p->weight.K, COLUMNS_OF(p->weight.bits)); }

// Columns whose products are added as integers: those of a group, or of the groups within one vector.
static int64_t part_columns(const Product *p) {
    int64_t size = p->weight.group_size, columns = COLUMNS_OF(p->weight.bits);
    return !size ? padded_length(p) : size < columns ? columns : size;
}

static int64_t parts_of(const Product *p) { return padded_length(p) / part_columns(p); }

int64_t few_rows_bytes(const Product *p) {
    return round_up(p->M * 4, BYTES) + p->M * p->weight.digits * (parts_of(p) * BYTES + padded_length(p));
}

static Tokens tokens_at(const Product *p, int8_t *memory) {
    Tokens tokens = {.worth = (float *)memory};
    tokens.initial = (Integers *)(memory + round_up(p->M * 4, BYTES));
    tokens.digits = (int8_t *)(tokens.initial + p->M * p->weight.digits * parts_of(p));
    return tokens;
}

// Put the digits of even columns before those of odd ones, as the low and the high halves of bytes hold nibbles.
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
    int64_t size = part_columns(p), parts = parts_of(p), length = padded_length(p);
    int8_t *digits = tokens->digits + m * w->digits * length;
    Integers *initial = tokens->initial + m * w->digits * parts, found[3];
    float top = largest_magnitude(x, w->dtype, w->K);
    Floats per_unit = all_floats(1 / unit_of(top, w->digits));
    tokens->worth[m] = top / 127;
    for (int64_t k = 0; k < length; k += BYTES) {
        write_digits(x, w->dtype, k, w->K, per_unit, w->digits, found);
        for (int d = 0; d < w->digits; d++) *(Integers *)(digits + d * length + k) = found[d];
    }
    for (int64_t i = 0; w->bits == 4 && i < w->digits * length; i += COLUMNS_OF(4)) split_columns(digits + i);
    for (int d = 0; d < w->digits; d++)
        for (int64_t part = 0; part < parts; part++) {
            Integers sum = all_integers(0);
            for (int64_t k = part * size; k < (part + 1) * size; k += BYTES)
                sum = add_products_of_bytes(sum, all_bytes(1), *(Integers *)(digits + d * length + k));
            initial[d * parts + part] = sum * -offset_of(kind_of(p));
        }
}

// Add the products of the vector of codes from column k on with each vector of digits.
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

// Add the products of as many pairs of vectors as fit before `end`, and return the column behind them.
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

// Fill the sums [rows][FEW_ROWS] of rows of the weight from n on, whose scales lie `scales` apart.
static inline __attribute__((always_inline)) void multiply_pair(const Product *p, const Tokens *tokens, int64_t n,
                                                                const float *scale, int64_t scales, int rows, int M,
                                                                int digits, int kind, float *sums) {
    int64_t K = p->weight.K, size = part_columns(p), parts = parts_of(p), length = padded_length(p);
    int64_t columns = COLUMNS_OF(bits_of(kind));
    int64_t group = p->weight.group_size ? p->weight.group_size : size, groups = size / group;
    const uint8_t *codes[PAIR];
    Floats total[PAIR][FEW_ROWS];
    for (int row = 0; row < rows; row++) {
        codes[row] = row_of(p, n + row);
        for (int m = 0; m < M; m++) total[row][m] = all_floats(0);
    }
    for (int64_t part = 0; part < parts; part++, scale += groups) {
        Integers products[PAIR][FEW_ROWS * 3];
        int64_t k = part * size, end = least(k + size, K);
        for (int row = 0; row < rows; row++)
            for (int i = 0; i < M * digits; i++) products[row][i] = tokens->initial[i * parts + part];
        // Groups are short, and their sums do not wait for each other.
        if (rows * M * digits <= HALVED_SUMS && parts == 1)
            k = add_in_halves(codes, tokens->digits, length, end, rows, M * digits, kind, products);
        // Whole vectors without a mask: with one, AMD's Zen 5 takes three times as long for one token in int8.
        for (; k + columns <= end; k += columns)
            add_products(codes, tokens->digits, length, k, columns, rows, M * digits, kind, products);
        if (k < end) add_products(codes, tokens->digits, length, k, end - k, rows, M * digits, kind, products);
        for (int row = 0; row < rows; row++) {
            Floats factors = part_scale(scale + row * scales, group, columns);
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

// The numbers are constants in each case, so that the sums stay in registers.
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
        Floats values = multiply_add(*(Floats *)results[m], all_floats(tokens->worth[m]), bias);
        store_floats(p->out, w->dtype, m * w->N + first, count, values);
    }
}

void multiply_few_rows(const Product *p, int threads, int8_t *memory) {
    Tokens tokens = tokens_at(p, memory);
    for (int64_t m = 0; m < p->M; m++) write_token(p, &tokens, m);
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t n = 0; n < p->weight.N; n += LANES) multiply_rows(p, &tokens, n, least(LANES, p->weight.N - n));
}
