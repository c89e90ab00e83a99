// Products with integer codes for AVX2. Its sums of products of bytes are cut off at 16 bits, but its sums of products
// of 16-bit numbers have 32 bits. So activations are 16-bit numbers, and codes are widened to 16 bits in registers.
#include "numbers.h"

// This many rows of the weight are multiplied with all tokens while they are in the first-level cache.
#define BLOCK_ROWS 8
// Sums of products of this many columns fit 32 bits.
#define MOST_COLUMNS 2048

// A span: columns of a row whose sum of products fits 32 bits. They end before `end`, and the first one's scale is the
// row's scale number `scale`.
typedef struct {
    int32_t end, scale;
} Span;

typedef struct {
    Numbers numbers;
    int64_t span_count;
    Span *spans;            // [span_count], the same for each row of the weight
    Integers *offset_sums;  // [tokens][words][span_count]: -offset * the sum of the numbers. Sums of products begin
                            // with it, because codes are widened with the offset
    float *scales;          // [threads][scale_length]
    int8_t *end;            // of this memory
} Work;

static inline int64_t columns_of_block(int bits) { return 16 * (16 / bits); }

static inline int64_t columns_of_group(const Product *p) {
    return p->weight.group_size ? p->weight.group_size : padded_columns(p);
}

// Return the offset of widened codes: codes of int4 are stored plus 8, and values of codebook4 plus 128.
static inline int code_offset(int bits, int codebook) { return bits == 8 ? 0 : codebook ? 128 : 8; }

// Return how many spans a row has, and write them unless `spans` is NULL.
static int64_t split_row(const Product *p, Span *spans) {
    int64_t K = p->weight.K, size = columns_of_group(p), block = columns_of_block(p->weight.bits), count = 0;
    for (int64_t k = 0, end; k < K; k = end, count++) {
        int64_t number = k / size, group_end = size < block ? k + block : (number + 1) * size;
        end = least(least(group_end, k + MOST_COLUMNS), K);
        if (spans) spans[count] = (Span){(int32_t)end, (int32_t)number};
    }
    return count;
}

static inline Work work_at(const Product *p, int threads, int8_t *memory) {
    Work work = {.numbers = numbers_at(p, memory), .span_count = split_row(p, NULL)};
    int64_t has_offset = code_offset(p->weight.bits, p->weight.codebook) != 0;
    int64_t sums = has_offset ? tokens_at_once(p) * words_of(p) * work.span_count : 0;
    work.offset_sums = (Integers *)work.numbers.end;
    work.scales = (float *)(work.offset_sums + sums);
    work.spans = (Span *)(work.scales + threads * scale_length(p));
    work.end = (int8_t *)(work.spans + work.span_count);
    return work;
}

int64_t integers_bytes(const Product *p, int threads) { return work_at(p, threads, 0).end - (int8_t *)0; }

// Write the offset sums of token m of those that are held.
static void write_offset_sums(const Product *p, const Work *work, int64_t m) {
    int64_t padded = padded_columns(p);
    const Words offset = all_words((int16_t)-code_offset(p->weight.bits, p->weight.codebook));
    for (int word = 0; word < words_of(p); word++) {
        int64_t row = m * words_of(p) + word, k = 0;
        for (int64_t i = 0; i < work->span_count; i++) {
            Integers sum = all_integers(0);
            for (int64_t end = round_up(work->spans[i].end, STEP); k < end; k += 16)
                sum = add_products_of_words(sum, *(const Words *)(work->numbers.values + row * padded + k), offset);
            work->offset_sums[row * work->span_count + i] = sum;
        }
    }
}

// Widen 32 codes of 8 bits, even columns first, or 64 of 4 bits, sorted by column modulo 4. `raw` saves instructions:
// the offset is not subtracted, and the codes of int4 in every second vector are 16 times as large.
static inline __attribute__((always_inline)) void load_codes(__m256i bytes, int bits, int codebook, int raw,
                                                             __m256i codes[4]) {
    const __m256i byte = _mm256_set1_epi16(0xff), nibble = _mm256_set1_epi16(0x0f), nibbles = _mm256_set1_epi8(0x0f);
    if (bits == 8) {
        codes[0] = _mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8);
        codes[1] = _mm256_srai_epi16(bytes, 8);
        return;
    }
    if (codebook) {
        __m256i even = (__m256i)looked_up(CODEBOOK, (Integers)_mm256_and_si256(bytes, nibbles));
        __m256i odd = (__m256i)looked_up(CODEBOOK, (Integers)_mm256_and_si256(_mm256_srli_epi16(bytes, 4), nibbles));
        codes[0] = _mm256_and_si256(even, byte);
        codes[1] = _mm256_and_si256(odd, byte);
        codes[2] = _mm256_srli_epi16(even, 8);
        codes[3] = _mm256_srli_epi16(odd, 8);
    } else {
        const __m256i upper = _mm256_set1_epi16(0xf0);
        __m256i second = _mm256_srli_epi16(bytes, 8);
        codes[0] = _mm256_and_si256(bytes, nibble);
        codes[1] = raw ? _mm256_and_si256(bytes, upper) : _mm256_and_si256(_mm256_srli_epi16(bytes, 4), nibble);
        codes[2] = _mm256_and_si256(second, nibble);
        codes[3] = raw ? _mm256_and_si256(second, upper) : _mm256_srli_epi16(bytes, 12);
    }
    const __m256i offset = (__m256i)all_words((int16_t)code_offset(bits, codebook));
    for (int v = 0; v < 4 && !raw; v++) codes[v] = _mm256_sub_epi16(codes[v], offset);
}

// Multiply the block of codes from column k on with the numbers of each token, and add the products to `products`. The
// row has `left` bytes there. Products of codes that are 16 times as large are added to `sixteens`.
static inline __attribute__((always_inline)) void add_block(const uint8_t *row, int64_t k, int64_t left,
                                                            const int16_t *numbers, int64_t padded, int rows, int bits,
                                                            int codebook, int raw, Integers *products,
                                                            Integers *sixteens) {
    __m256i codes[4];
    fetch_ahead(row + (k * bits >> 3));
    load_codes((__m256i)load_bytes(row + (k * bits >> 3), left), bits, codebook, raw, codes);
    for (int i = 0; i < rows; i++)
        for (int v = 0; v < 16 / bits; v++) {
            Words x = *(const Words *)(numbers + i * padded + k + 16 * v);
            Integers *sum = raw && !codebook && v % 2 ? sixteens + i : products + i;
            *sum = add_products_of_words(*sum, (Words)codes[v], x);
        }
}

// Multiply a row of the weight with M tokens, from token m of those that are held on.
static inline __attribute__((always_inline)) void multiply_row(const Product *p, const Work *work, int64_t m,
                                                               int64_t n, const float *scale, int M, int words,
                                                               int bits, int codebook, float *sums) {
    int64_t K = p->weight.K, padded = padded_columns(p), size = columns_of_group(p), k = 0;
    const int64_t block = columns_of_block(bits);
    // Up to four sums, and four of codes times 16, stay in registers, and their offset sums take few loads.
    const int raw = bits == 4 && M * words <= 4, sums_of_row = M * words;
    const uint8_t *row = p->qdata + n * (K * bits >> 3);
    const int16_t *numbers = work->numbers.values + m * words * padded;
    const Integers *offset_sums = work->offset_sums + m * words * work->span_count;
    Floats total[FEW_ROWS];
    for (int i = 0; i < M; i++) total[i] = all_floats(0);
    for (int64_t span = 0; span < work->span_count; span++, offset_sums++) {
        int64_t end = work->spans[span].end;
        Integers products[FEW_ROWS * 2], sixteens[FEW_ROWS * 2];
        for (int i = 0; i < sums_of_row; i++) {
            products[i] = raw ? offset_sums[i * work->span_count] : all_integers(0);
            sixteens[i] = all_integers(0);
        }
        for (; k + block <= end; k += block)
            add_block(row, k, BYTES, numbers, padded, sums_of_row, bits, codebook, raw, products, sixteens);
        if (k < end)
            add_block(row, k, (end - k) * bits >> 3, numbers, padded, sums_of_row, bits, codebook, raw, products,
                      sixteens);
        k = end;
        for (int i = 0; raw && !codebook && i < sums_of_row; i++) products[i] += sixteens[i] >> 4;
        Floats factors = span_scale(scale + work->spans[span].scale, size, block);
        for (int i = 0; i < M; i++)
            total[i] = multiply_add(join_words(products + i * words, words), factors, total[i]);
    }
    for (int i = 0; i < M; i++) sums[i] = sum_of(total[i]);
}

#define CASE(M_, WORDS, BITS, CODEBOOK_)                                                              \
    if (M == M_ && words_of(p) == WORDS && p->weight.bits == BITS && p->weight.codebook == CODEBOOK_) \
        multiply_row(p, work, m, n, scale, M_, WORDS, BITS, CODEBOOK_, sums);
#define CASES(WORDS, ...) \
    CASE(1, WORDS, __VA_ARGS__) CASE(2, WORDS, __VA_ARGS__) CASE(3, WORDS, __VA_ARGS__) CASE(4, WORDS, __VA_ARGS__)

// The compiler gets these numbers as constants, so that the sums stay in registers.
static void multiply_row_of(const Product *p, const Work *work, int64_t m, int64_t n, const float *scale, int64_t M,
                            float *sums) {
    CASES(1, 8, 0) CASES(2, 8, 0) CASES(1, 4, 0) CASES(2, 4, 0) CASES(1, 4, 1) CASES(2, 4, 1)
}

static void multiply_block(const Product *p, const Work *work, int64_t token, int64_t tokens, int64_t first) {
    const Weight *w = &p->weight;
    int64_t last = least(first + BLOCK_ROWS, w->N);
    float *scale = work->scales + thread_index() * scale_length(p);
    for (int64_t m = 0; m < tokens; m += FEW_ROWS)
        for (int64_t n = first; n < last; n++) {
            float sums[FEW_ROWS], bias = p->bias ? load_float(p->bias, w->dtype, n) : 0;
            write_scales(p, n, scale_length(p), scale);
            multiply_row_of(p, work, m, n, scale, least(FEW_ROWS, tokens - m), sums);
            for (int64_t i = 0; i < least(FEW_ROWS, tokens - m); i++)
                store_float(p->out, w->dtype, (token + m + i) * w->N + n,
                            sums[i] * work->numbers.token_scales[m + i] + bias);
        }
}

void multiply_integers(const Product *p, int threads, int8_t *memory) {
    Work work = work_at(p, threads, memory);
    split_row(p, work.spans);
    for (int64_t token = 0; token < p->M; token += tokens_at_once(p)) {
        int64_t tokens = least(tokens_at_once(p), p->M - token);
        for (int64_t m = 0; m < tokens; m++) {
            if (p->weight.bits == 8) write_token(p, &work.numbers, token, m, 2);
            else {
                write_token(p, &work.numbers, token, m, 4);
                write_offset_sums(p, &work, m);
            }
        }
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
        for (int64_t n = 0; n < p->weight.N; n += BLOCK_ROWS) multiply_block(p, &work, token, tokens, n);
    }
}
