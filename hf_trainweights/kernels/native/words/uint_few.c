// Products of one to four tokens with uint2 to uint6 weights. Codes are multiplied as bytes while they are in a
// register. Zero points are multiplied with the sum of x over each group, because sum((code - zero_point) * x) is
// sum(code * x) - zero_point * sum(x).
#include "../product.h"

#ifdef FEW_UINT
#define VECTORS_OF_32_BYTES
#include "../bytes/digits.h"
#include "../scales.h"

// The codes of COLUMNS columns are packed together, and the zero points of PAIRS pairs of groups are multiplied at
// once.
#define COLUMNS 32
#define PAIRS 16

typedef struct {
    float *token_scales;  // [M]
    int8_t *digits;       // [M][digits][K]
    int16_t *sums;        // [M][digits][2][padded pairs]: sums of digits over the first, and the second, group of pairs
    int16_t *factors;     // [256][16]: factors of the products of two groups of 16 columns, for each byte of two scales
} Tokens;

static inline int64_t pairs_of(const Product *p) { return groups_of(p) / 2; }
static inline int64_t padded_pairs(const Product *p) { return round_up(pairs_of(p), PAIRS); }

int64_t few_uint_bytes(const Product *p) {
    int64_t vectors = p->M * p->weight.digits;
    return round_up(p->M * 4, BYTES) + vectors * (p->weight.K + 4 * padded_pairs(p)) + 256 * BYTES;
}

static Tokens tokens_at(const Product *p, int8_t *memory) {
    int64_t vectors = p->M * p->weight.digits;
    Tokens tokens = {.token_scales = (float *)memory, .digits = memory + round_up(p->M * 4, BYTES)};
    tokens.sums = (int16_t *)(tokens.digits + vectors * p->weight.K);
    tokens.factors = tokens.sums + vectors * 2 * padded_pairs(p);
    return tokens;
}

static void write_token(const Product *p, const Tokens *tokens, int64_t m) {
    const Weight *w = &p->weight;
    const char *x = (const char *)p->x + m * w->K * itemsize(w->dtype);
    int64_t pairs = padded_pairs(p), size = w->group_size;
    float top = largest_magnitude(x, w->dtype, w->K);
    tokens->token_scales[m] = top / 127;
    for (int64_t k = 0; k < w->K; k += COLUMNS) {
        Integers digit_vectors[3];
        write_digits(x, w->dtype, k, w->K, all_floats(1 / unit_of(top, w->digits)), w->digits, digit_vectors);
        for (int d = 0; d < w->digits; d++)
            *(Integers *)(tokens->digits + (m * w->digits + d) * w->K + k) = digit_vectors[d];
    }
    for (int64_t i = m * w->digits; i < (m + 1) * w->digits; i++) {
        const int8_t *digits = tokens->digits + i * w->K;
        int16_t *sums = tokens->sums + i * 2 * pairs;
        memset(sums, 0, 4 * pairs);
        for (int64_t g = 0; g < groups_of(p); g++) {
            int sum = 0;
            for (int64_t k = g * size; k < (g + 1) * size; k++) sum += digits[k];
            sums[g % 2 * pairs + g / 2] = (int16_t)sum;
        }
    }
}

static void write_factors_of_pairs(const Product *p, int16_t *factors) {
    for (int pair = 0; pair < 256; pair++)
        for (int i = 0; i < 16; i++)
            factors[16 * pair + i] = (int16_t)((1 + (i < 8 ? pair & 15 : pair >> 4)) * p->weight.code_units);
}

// Load a vector of bytes of a row. It may go on in the next row, but never behind the last row.
static inline Words load_pairs(const Product *p, const uint8_t *bytes, int64_t at) {
    __m128i loaded = load_half(bytes + at, p->weight.N * pairs_of(p) - at);
    return (Words)_mm256_cvtepu8_epi16(loaded);
}

static inline __attribute__((always_inline)) void subtract_zero_points(const Product *p, const Tokens *tokens, int64_t n,
                                                                       int vectors, Integers *products) {
    const __m256i nibble = _mm256_set1_epi16(15);
    int64_t pairs = pairs_of(p), padded = padded_pairs(p);
    for (int64_t i = 0; i < pairs; i += PAIRS) {
        __m256i scales = (__m256i)load_pairs(p, p->group_scale, n * pairs + i);
        __m256i zeros = (__m256i)load_pairs(p, p->zero_point, n * pairs + i);
        Words offsets[2];
        for (int high = 0; high < 2; high++) {
            __m256i scale = _mm256_and_si256(_mm256_srli_epi16(scales, 4 * high), nibble);
            __m256i zero = _mm256_and_si256(_mm256_srli_epi16(zeros, 4 * high), nibble);
            offsets[high] = ((Words)scale + all_words(1)) * (Words)zero * all_words((int16_t)-p->weight.zero_units);
        }
        for (int v = 0; v < vectors; v++)
            for (int high = 0; high < 2; high++) {
                Words sums = *(const Words *)(tokens->sums + (2 * v + high) * padded + i);
                products[v] = add_products_of_words(products[v], offsets[high], sums);
            }
    }
}

// Fill in the sums of a row of the weight with each token.
static inline __attribute__((always_inline)) void multiply_row(const Product *p, const Tokens *tokens, int64_t n, int M,
                                                               int digits, int bits, float *sums) {
    int64_t K = p->weight.K, is_wide = p->weight.group_size == COLUMNS;
    const uint8_t *codes = p->qdata + n * K / COLUMNS * bits * 4, *scale = p->group_scale + n * pairs_of(p);
    Integers products[FEW_ROWS * 3];
    for (int v = 0; v < M * digits; v++) products[v] = all_integers(0);
    for (int64_t k = 0, block = 0; k < K; k += COLUMNS, block++, codes += bits * 4) {
        fetch_ahead(codes);
        // The scales of both halves of the columns; a group of 32 columns gives both halves its scale.
        int pair = is_wide ? (scale[block >> 1] >> 4 * (block & 1) & 15) * 17 : scale[block];
        __m256i factors = *(const __m256i_u *)(tokens->factors + 16 * pair);
        __m256i loaded = (__m256i)load_planes(codes, bits, 0);
        for (int v = 0; v < M * digits; v++) {
            __m256i sums_of_two = _mm256_maddubs_epi16(loaded, *(const __m256i_u *)(tokens->digits + v * K + k));
            products[v] = add_products_of_words(products[v], (Words)sums_of_two, (Words)factors);
        }
    }
    subtract_zero_points(p, tokens, n, M * digits, products);
    for (int m = 0; m < M; m++) sums[m] = sum_of(join_digits(products + m * digits, digits));
}

#define CASE(M_, DIGITS, BITS)                                              \
    if (p->M == M_ && p->weight.digits == DIGITS && p->weight.bits == BITS) \
        multiply_row(p, tokens, n, M_, DIGITS, BITS, sums);
#define CASES(DIGITS, BITS) CASE(1, DIGITS, BITS) CASE(2, DIGITS, BITS) CASE(3, DIGITS, BITS) CASE(4, DIGITS, BITS)

// The compiler gets these numbers as constants, so that the sums stay in registers.
static void multiply_row_of(const Product *p, const Tokens *tokens, int64_t n, float *sums) {
    CASES(2, 2) CASES(2, 3) CASES(2, 4) CASES(2, 5) CASES(2, 6)
    CASES(3, 2) CASES(3, 3) CASES(3, 4) CASES(3, 5) CASES(3, 6)
}

void multiply_few_uint(const Product *p, int threads, int8_t *memory) {
    const Weight *w = &p->weight;
    Tokens tokens = tokens_at(p, memory);
    write_factors_of_pairs(p, tokens.factors);
    for (int64_t m = 0; m < p->M; m++) write_token(p, &tokens, m);
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t n = 0; n < w->N; n++) {
        float sums[FEW_ROWS], scale = row_scale(p, n), bias = p->bias ? load_float(p->bias, w->dtype, n) : 0;
        multiply_row_of(p, &tokens, n, sums);
        for (int64_t m = 0; m < p->M; m++)
            store_float(p->out, w->dtype, m * w->N + n, sums[m] * scale * tokens.token_scales[m] + bias);
    }
}
#endif
