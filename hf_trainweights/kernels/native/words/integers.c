// Products with integer codes. AVX2 adds products of bytes with a sum that is cut off at 16 bits, but those of 16-bit
// numbers with 32 bits: so activations are such numbers, and codes are widened in registers.
#include "numbers.h"

// Rows of the weight that pass all tokens while they are in the first-level cache.
#define BLOCK_ROWS 8
// Sums of products of so many columns fit 32 bits.
#define MOST_COLUMNS 2048

int64_t integers_bytes(const Product *p, int threads) {
    return numbers_at(p, 0).end - (int8_t *)0 + threads * scale_length(p) * 4;
}

// 32 codes of 8 bits as 16-bit numbers, those of even columns first; or 64 of 4 bits, by the remainder of column / 4.
static inline __attribute__((always_inline)) void load_codes(__m256i bytes, int bits, int codebook,
                                                             __m256i codes[4]) {
    if (bits == 8) {
        codes[0] = _mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8);
        codes[1] = _mm256_srai_epi16(bytes, 8);
        return;
    }
    const __m256i nibble = _mm256_set1_epi16(15), offset = _mm256_set1_epi16(8);
    for (int i = 0; i < 4; i++)
        codes[i] = _mm256_and_si256(_mm256_srli_epi16(bytes, 4 * i), nibble);
    for (int i = 0; i < 4; i++)
        if (!codebook) codes[i] = _mm256_sub_epi16(codes[i], offset);
        else {
            __m256i values = (__m256i)(looked_up(CODEBOOK, (Integers)codes[i]) ^ all_bytes(0x80));
            codes[i] = _mm256_srai_epi16(_mm256_slli_epi16(values, 8), 8);
        }
}

// Add the products of the block of codes from column k on, of which the row has `left` bytes, with those of each token.
static inline __attribute__((always_inline)) void add_block(const uint8_t *row, int64_t k, int64_t left,
                                                            const int16_t *numbers, int64_t padded, int rows, int bits,
                                                            int codebook, Integers *products) {
    __m256i codes[4];
    fetch_ahead(row + (k * bits >> 3));
    load_codes((__m256i)load_bytes(row + (k * bits >> 3), left), bits, codebook, codes);
    for (int i = 0; i < rows; i++)
        for (int v = 0; v < 16 / bits; v++) {
            Words x = *(const Words *)(numbers + i * padded + k + 16 * v);
            products[i] = add_products_of_words(products[i], (Words)codes[v], x);
        }
}

static inline __attribute__((always_inline)) void multiply_row(const Product *p, const int16_t *numbers, int64_t n,
                                                               const float *scale, int M, int words, int bits,
                                                               int codebook, float *sums) {
    int64_t K = p->weight.K, padded = padded_columns(p), block = 16 * (16 / bits);
    // Columns whose sums are scaled together: a group, or the groups within one block of codes.
    int64_t size = p->weight.group_size ? p->weight.group_size : padded, part = size < block ? block : size;
    int64_t scales = part / size;
    const uint8_t *row = p->qdata + n * (K * bits >> 3);
    Floats total[FEW_ROWS];
    for (int m = 0; m < M; m++) total[m] = all_floats(0);
    for (int64_t k = 0, end; k < K; scale += scales)
        for (end = least(k + part, K); k < end;) {
            int64_t last = least(k + MOST_COLUMNS, end);
            Integers products[FEW_ROWS * 2];
            for (int i = 0; i < M * words; i++) products[i] = all_integers(0);
            for (; k + block <= last; k += block)
                add_block(row, k, BYTES, numbers, padded, M * words, bits, codebook, products);
            if (k < last) {
                add_block(row, k, (last - k) * bits >> 3, numbers, padded, M * words, bits, codebook, products);
                k = last;
            }
            Floats factors = part_scale(scale, size, block);
            for (int m = 0; m < M; m++)
                total[m] = multiply_add(join_words(products + m * words, words), factors, total[m]);
        }
    for (int m = 0; m < M; m++) sums[m] = sum_of(total[m]);
}

#define CASE(M_, WORDS, BITS, CODEBOOK_)                                                                    \
    if (M == M_ && words_of(p) == WORDS && p->weight.bits == BITS && p->weight.codebook == CODEBOOK_)       \
        multiply_row(p, numbers, n, scale, M_, WORDS, BITS, CODEBOOK_, sums);
#define CASES(WORDS, ...) \
    CASE(1, WORDS, __VA_ARGS__) CASE(2, WORDS, __VA_ARGS__) CASE(3, WORDS, __VA_ARGS__) CASE(4, WORDS, __VA_ARGS__)

// The numbers are constants in each case, so that the sums stay in registers.
static void multiply_row_of(const Product *p, const int16_t *numbers, int64_t n, const float *scale, int64_t M,
                            float *sums) {
    CASES(1, 8, 0) CASES(2, 8, 0) CASES(1, 4, 0) CASES(2, 4, 0) CASES(1, 4, 1) CASES(2, 4, 1)
}

static void multiply_block(const Product *p, const Numbers *numbers, float *scale, int64_t token, int64_t tokens,
                           int64_t first) {
    const Weight *w = &p->weight;
    int64_t last = least(first + BLOCK_ROWS, w->N), stride = words_of(p) * padded_columns(p);
    for (int64_t m = 0; m < tokens; m += FEW_ROWS)
        for (int64_t n = first; n < last; n++) {
            float sums[FEW_ROWS], bias = p->bias ? load_float(p->bias, w->dtype, n) : 0;
            write_scales(p, n, scale_length(p), scale);
            multiply_row_of(p, numbers->values + m * stride, n, scale, least(FEW_ROWS, tokens - m), sums);
            for (int64_t i = 0; i < least(FEW_ROWS, tokens - m); i++)
                store_float(p->out, w->dtype, (token + m + i) * w->N + n, sums[i] * numbers->worth[m + i] + bias);
        }
}

void multiply_integers(const Product *p, int threads, int8_t *memory) {
    Numbers numbers = numbers_at(p, memory);
    float *scale = (float *)numbers.end;
    for (int64_t token = 0; token < p->M; token += tokens_at_once(p)) {
        int64_t tokens = least(tokens_at_once(p), p->M - token);
        for (int64_t m = 0; m < tokens; m++) {
            if (p->weight.bits == 8) write_token(p, &numbers, token, m, 2);
            else write_token(p, &numbers, token, m, 4);
        }
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
        for (int64_t n = 0; n < p->weight.N; n += BLOCK_ROWS)
            multiply_block(p, &numbers, scale + thread_index() * scale_length(p), token, tokens, n);
    }
}
