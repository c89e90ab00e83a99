// Products with uint2 to uint6 weights. Codes, zero points and group scales are small whole numbers: a row of the weight
// is written as 16-bit integers with one scale, and multiplied with all tokens.
#include "numbers.h"

// Columns whose codes share their words, and whose integers are computed at once.
#define COLUMNS 32
// An integer is at most 63 * 16: sums of products of so many columns fit 32 bits.
#define MOST_COLUMNS 512

// What a thread writes of a row.
typedef struct {
    int16_t *integers;  // [padded K]
    int16_t *factors;   // [G]: what a code is multiplied with
    int16_t *offsets;   // [G]: what is subtracted then
} Row;

static int64_t row_length(const Product *p) { return padded_columns(p) + 2 * round_up(groups_of(p), 16); }

// Return a thread's part of the memory for rows.
static Row row_at(const Product *p, int8_t *memory) {
    Row row = {.integers = (int16_t *)memory + thread_index() * row_length(p)};
    row.factors = row.integers + padded_columns(p);
    row.offsets = row.factors + round_up(groups_of(p), 16);
    return row;
}

int64_t uint_bytes(const Product *p, int threads) {
    return numbers_at(p, 0).end - (int8_t *)0 + threads * row_length(p) * 2;
}

// Return 32 codes, a byte each. Planes of 4, 2 and 1 bits follow each other; byte j of a plane of p bits holds those of
// columns j, 4p + j, 8p + j, ... from its lowest bits on.
static inline __attribute__((always_inline)) __m256i load_codes(const uint8_t *from, int bits) {
    __m256i codes = _mm256_setzero_si256();
    if (bits & 4) {
        __m128i pairs = _mm_loadu_si128((const __m128i *)from), nibble = _mm_set1_epi8(15);
        __m128i high = _mm_and_si128(_mm_srli_epi16(pairs, 4), nibble);
        codes = _mm256_set_m128i(high, _mm_and_si128(pairs, nibble));
    }
    if (bits & 2) {
        int64_t plane;
        memcpy(&plane, from + (bits & 4) * 4, 8);
        __m256i parts = _mm256_srlv_epi64(_mm256_set1_epi64x(plane), _mm256_setr_epi64x(0, 2, 4, 6));
        parts = _mm256_and_si256(parts, _mm256_set1_epi8(3));
        codes = _mm256_or_si256(codes, _mm256_slli_epi16(parts, bits & 4));
    }
    if (bits & 1) {
        int32_t plane;
        memcpy(&plane, from + (bits & 6) * 4, 4);
        __m256i parts = _mm256_srlv_epi32(_mm256_set1_epi32(plane), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
        parts = _mm256_and_si256(parts, _mm256_set1_epi8(1));
        codes = _mm256_or_si256(codes, _mm256_slli_epi16(parts, bits & 6));
    }
    return codes;
}

static void write_groups(const Product *p, int64_t n, const Row *row) {
    int64_t pairs = groups_of(p) / 2;
    const uint8_t *scale = p->group_scale + n * pairs, *zero = p->zero_point + n * pairs;
    int code_units = p->weight.code_units, zero_units = p->weight.zero_units;
    for (int64_t i = 0; i < pairs; i++) {
        int low = (scale[i] & 15) + 1, high = (scale[i] >> 4) + 1;
        row->factors[2 * i] = (int16_t)(low * code_units);
        row->factors[2 * i + 1] = (int16_t)(high * code_units);
        row->offsets[2 * i] = (int16_t)(low * (zero[i] & 15) * zero_units);
        row->offsets[2 * i + 1] = (int16_t)(high * (zero[i] >> 4) * zero_units);
    }
}

// Write row n as integers: (code * code_units - zero_point * zero_units) * (group_scale + 1).
static inline __attribute__((always_inline)) void write_row(const Product *p, int64_t n, int bits, const Row *row) {
    int64_t K = p->weight.K;
    int shift = p->weight.group_size == 32 ? 5 : 4;
    const uint8_t *codes = p->qdata + n * K / COLUMNS * bits * 4;
    write_groups(p, n, row);
    for (int64_t k = 0; k < K; k += COLUMNS, codes += bits * 4) {
        fetch_ahead(codes);
        __m256i found = load_codes(codes, bits);
        for (int half = 0; half < 2; half++) {
            int64_t first = k + 16 * half, group = first >> shift;
            __m128i part = half ? _mm256_extracti128_si256(found, 1) : _mm256_castsi256_si128(found);
            __m256i factor = _mm256_set1_epi16(row->factors[group]), offset = _mm256_set1_epi16(row->offsets[group]);
            __m256i integers = _mm256_sub_epi16(_mm256_mullo_epi16(_mm256_cvtepu8_epi16(part), factor), offset);
            _mm256_storeu_si256((__m256i *)(row->integers + first), integers);
        }
    }
    for (int64_t k = K; k < padded_columns(p); k++) row->integers[k] = 0;
}

// The number of bits is a constant in each case.
static void write_row_of(const Product *p, int64_t n, const Row *row) {
    if (p->weight.bits == 2) write_row(p, n, 2, row);
    if (p->weight.bits == 3) write_row(p, n, 3, row);
    if (p->weight.bits == 4) write_row(p, n, 4, row);
    if (p->weight.bits == 5) write_row(p, n, 5, row);
    if (p->weight.bits == 6) write_row(p, n, 6, row);
}

static inline __attribute__((always_inline)) void multiply_row(const int16_t *row, const int16_t *values,
                                                               int64_t padded, int M, int words, float *sums) {
    __m256 total[FEW_ROWS];
    for (int m = 0; m < M; m++) total[m] = _mm256_setzero_ps();
    for (int64_t k = 0; k < padded;) {
        int64_t last = least(k + MOST_COLUMNS, padded);
        __m256i products[FEW_ROWS * 2];
        for (int i = 0; i < M * words; i++) products[i] = _mm256_setzero_si256();
        for (; k < last; k += 16) {
            __m256i codes = _mm256_loadu_si256((const __m256i *)(row + k));
            for (int i = 0; i < M * words; i++) {
                __m256i x = _mm256_loadu_si256((const __m256i *)(values + i * padded + k));
                products[i] = add_products(products[i], codes, x);
            }
        }
        for (int m = 0; m < M; m++) total[m] = _mm256_add_ps(total[m], join_words(products + m * words, words));
    }
    for (int m = 0; m < M; m++) sums[m] = sum_of(total[m]);
}

#define CASE(M_, WORDS) \
    if (M == M_ && words == WORDS) multiply_row(row, values, padded, M_, WORDS, sums);

// The numbers are constants in each case, so that the sums stay in registers.
static void multiply_row_of(const int16_t *row, const int16_t *values, int64_t padded, int64_t M, int words,
                            float *sums) {
    CASE(1, 1) CASE(2, 1) CASE(3, 1) CASE(4, 1) CASE(1, 2) CASE(2, 2) CASE(3, 2) CASE(4, 2)
}

static void multiply_tokens(const Product *p, const Numbers *numbers, int64_t token, int64_t tokens, int64_t n) {
    const Weight *w = &p->weight;
    Row row = row_at(p, numbers->end);
    int64_t padded = padded_columns(p);
    float scale = load_float(p->scale, w->scale_dtype, n), bias = p->bias ? load_float(p->bias, w->dtype, n) : 0;
    write_row_of(p, n, &row);
    for (int64_t m = 0; m < tokens; m += FEW_ROWS) {
        int64_t count = least(FEW_ROWS, tokens - m);
        float sums[FEW_ROWS];
        multiply_row_of(row.integers, numbers->values + m * words_of(p) * padded, padded, count, words_of(p), sums);
        for (int64_t i = 0; i < count; i++) {
            float sum = sums[i] * scale * numbers->worth[m + i] + bias;
            store_float(p->out, w->dtype, (token + m + i) * w->N + n, sum);
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

int64_t uint_row_bytes(const Product *p) { return row_length(p) * 2; }

void dequantize_uint(const Product *p, int64_t first, int64_t count, int threads, int8_t *memory) {
    int64_t K = p->weight.K;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t i = 0; i < count; i++) {
        Row row = row_at(p, memory);
        Floats scale = all_floats(load_float(p->scale, p->weight.scale_dtype, first + i));
        write_row_of(p, first + i, &row);
        for (int64_t k = 0; k < K; k += LANES) {
            __m256i integers = _mm256_cvtepi16_epi32(_mm_loadu_si128((const __m128i *)(row.integers + k)));
            store_floats(p->out, p->weight.dtype, i * K + k, K - k, to_floats((Integers)integers) * scale);
        }
    }
}
