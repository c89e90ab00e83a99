// Products of one to four rows of x with integer codes: each row of the weight is read once, in one stream, and a vector
// of 64 codes is multiplied with the digits of every token while it is in a register.
#include "digits.h"
#include "integers.h"

typedef struct {
    float *worth;      // [M]
    __m512i *initial;  // [M][digits][parts]: what sums begin with, so that codes count from their offset
    int8_t *digits;    // [M][digits][padded K]
} Tokens;

// From so many bytes of digits on, which no longer stay in the first cache, two rows of the weight go side by side and
// use what is read of the tokens twice. Below it one row after the other is faster: memory is read in one stream.
#define PAIRED_BYTES (24 << 10)
#define PAIR 2

// Columns whose products are added as integers: those of a group, or of the groups within one vector.
static int64_t part_columns(const Product *p) {
    int64_t size = p->weight.group_size;
    return !size ? padded_columns(p) : size < BYTES ? BYTES : size;
}

static int64_t parts_of(const Product *p) { return padded_columns(p) / part_columns(p); }

static int64_t token_bytes(const Product *p) {
    return round_up(p->M * 4, BYTES) + p->M * p->weight.digits * (parts_of(p) * BYTES + padded_columns(p));
}

int64_t few_rows_bytes(const Product *p) { return token_bytes(p); }

static Tokens tokens_at(const Product *p, int8_t *memory) {
    Tokens tokens = {.worth = (float *)memory};
    tokens.initial = (__m512i *)(memory + round_up(p->M * 4, BYTES));
    tokens.digits = (int8_t *)(tokens.initial + p->M * p->weight.digits * parts_of(p));
    return tokens;
}

static void write_token(const Product *p, const Tokens *tokens, int64_t m) {
    const Weight *w = &p->weight;
    const char *x = (const char *)p->x + m * w->K * itemsize(w->dtype);
    int64_t size = part_columns(p), parts = parts_of(p), length = padded_columns(p);
    int8_t *digits = tokens->digits + m * w->digits * length;
    __m512i *initial = tokens->initial + m * w->digits * parts, found[3];
    float top = largest_magnitude(x, w->dtype, w->K);
    __m512 per_unit = _mm512_set1_ps(1 / unit_of(top, w->digits));
    tokens->worth[m] = top / 127;
    for (int64_t k = 0; k < w->K; k += BYTES) {
        write_digits(x, w->dtype, k, w->K, per_unit, w->digits, found);
        for (int d = 0; d < w->digits; d++) _mm512_store_si512(digits + d * length + k, found[d]);
    }
    for (int d = 0; d < w->digits; d++)
        for (int64_t part = 0; part < parts; part++) {
            __m512i sum = _mm512_setzero_si512();
            for (int64_t k = part * size; k < (part + 1) * size; k += BYTES)
                sum = _mm512_dpbusd_epi32(sum, _mm512_set1_epi8(1), _mm512_load_si512(digits + d * length + k));
            initial[d * parts + part] = _mm512_mullo_epi32(sum, _mm512_set1_epi32(-offset_of(p)));
        }
}

// Return the scales of the columns of a part, of which a lane holds four.
static inline __m512 part_scale(const Product *p, const float *scale, int64_t part) {
    int64_t size = p->weight.group_size;
    if (size == 0 || size >= BYTES) return _mm512_set1_ps(scale[part]);
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __m512i group = _mm512_srlv_epi32(lanes, _mm512_set1_epi32(__builtin_ctzll(size) - 2));
    return _mm512_permutexvar_ps(group, _mm512_loadu_ps(scale + part * (BYTES / size)));
}

// Fill the sums [rows][FEW_ROWS] of rows of the weight from n on, whose scales lie `scales` apart.
static inline __attribute__((always_inline)) void multiply_pair(const Product *p, const Tokens *tokens, int64_t n,
                                                                const float *scale, int64_t scales, int rows, int M,
                                                                int digits, int bits, float *sums) {
    int64_t size = part_columns(p), parts = parts_of(p), length = padded_columns(p);
    __m512 total[PAIR][FEW_ROWS];
    for (int row = 0; row < rows; row++)
        for (int m = 0; m < M; m++) total[row][m] = _mm512_setzero_ps();
    for (int64_t part = 0; part < parts; part++) {
        __m512i products[PAIR][FEW_ROWS * 3], codes[PAIR];
        for (int row = 0; row < rows; row++)
            for (int i = 0; i < M * digits; i++) products[row][i] = tokens->initial[i * parts + part];
        for (int64_t k = part * size; k < (part + 1) * size; k += BYTES) {
            for (int row = 0; row < rows; row++) codes[row] = load_codes(p, bits, n + row, k);
            for (int i = 0; i < M * digits; i++) {
                __m512i x = _mm512_load_si512(tokens->digits + i * length + k);
                for (int row = 0; row < rows; row++)
                    products[row][i] = _mm512_dpbusd_epi32(products[row][i], codes[row], x);
            }
        }
        for (int row = 0; row < rows; row++) {
            __m512 factors = part_scale(p, scale + row * scales, part);
            for (int m = 0; m < M; m++) {
                __m512 joined = join_digits(products[row] + m * digits, digits);
                total[row][m] = _mm512_fmadd_ps(joined, factors, total[row][m]);
            }
        }
    }
    for (int row = 0; row < rows; row++)
        for (int m = 0; m < M; m++) sums[row * FEW_ROWS + m] = _mm512_reduce_add_ps(total[row][m]);
}

#define CASE(M_, DIGITS, BITS)                                                                      \
    if (p->M == M_ && p->weight.digits == DIGITS && p->weight.bits == BITS) {                       \
        if (rows == PAIR) multiply_pair(p, tokens, n, scale, scales, PAIR, M_, DIGITS, BITS, sums); \
        else multiply_pair(p, tokens, n, scale, scales, 1, M_, DIGITS, BITS, sums);                 \
    }
#define CASES(DIGITS, BITS) CASE(1, DIGITS, BITS) CASE(2, DIGITS, BITS) CASE(3, DIGITS, BITS) CASE(4, DIGITS, BITS)

// The numbers are constants in each case, so that the sums stay in registers.
static void multiply_pair_of(const Product *p, const Tokens *tokens, int64_t n, const float *scale, int64_t scales,
                             int rows, float *sums) {
    CASES(1, 8) CASES(2, 8) CASES(3, 8) CASES(1, 4) CASES(2, 4) CASES(3, 4)
}

static void multiply_rows(const Product *p, const Tokens *tokens, int64_t first, int64_t count) {
    const Weight *w = &p->weight;
    int64_t G = groups_of(p), scales = G + LANES, step = p->M * w->digits * padded_columns(p) < PAIRED_BYTES ? 1 : PAIR;
    float results[FEW_ROWS][LANES], sums[PAIR * FEW_ROWS], scale[PAIR * scales];
    for (int64_t i = 0; i < PAIR * scales; i++) scale[i] = 0;
    for (int64_t n = 0; n < count; n += step) {
        int rows = (int)least(step, count - n);
        for (int row = 0; row < rows; row++)
            copy_as_float32(p->scale, w->scale_dtype, (first + n + row) * G, G, scale + row * scales);
        multiply_pair_of(p, tokens, first + n, scale, scales, rows, sums);
        for (int row = 0; row < rows; row++)
            for (int64_t m = 0; m < p->M; m++) results[m][n + row] = sums[row * FEW_ROWS + m];
    }
    __mmask16 mask = first_lanes(count);
    __m512 bias = p->bias ? load_floats(p->bias, w->dtype, first, mask) : _mm512_setzero_ps();
    for (int64_t m = 0; m < p->M; m++) {
        __m512 values = _mm512_maskz_loadu_ps(mask, results[m]);
        values = _mm512_fmadd_ps(values, _mm512_set1_ps(tokens->worth[m]), bias);
        store_floats(p->out, w->dtype, m * w->N + first, mask, values);
    }
}

void multiply_few_rows(const Product *p, int threads, int8_t *memory) {
    Tokens tokens = tokens_at(p, memory);
    for (int64_t m = 0; m < p->M; m++) write_token(p, &tokens, m);
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t n = 0; n < p->weight.N; n += LANES) multiply_rows(p, &tokens, n, least(LANES, p->weight.N - n));
}
