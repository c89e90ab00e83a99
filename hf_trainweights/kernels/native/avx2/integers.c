// Products with integer codes. AVX2 adds products of bytes with a sum that is cut off at 16 bits, but those of 16-bit
// numbers with 32 bits: an activation is one such number, or two for float32, and codes are widened in registers.
#include "vectors.h"

// Rows of the weight that pass all tokens while they are in the first-level cache.
#define BLOCK_ROWS 8
// Columns that x is padded to, with zeros.
#define STEP 64
// Sums of products of so many columns fit 32 bits.
#define MOST_COLUMNS 2048
// 16-bit numbers that are held at a time: half of a second-level cache of 1 MB.
#define PANEL_BYTES (1 << 19)

typedef struct {
    float *worth;      // [tokens]
    float *row;        // [padded K], of the token that is being written
    int16_t *numbers;  // [tokens][words][padded K], in the order of the codes that `load_codes` returns
    float *scale;      // [threads][scale_length]
} Memory;

static int64_t padded_columns(const Product *p) { return round_up(p->weight.K, STEP); }
static int words_of(const Product *p) { return p->weight.digits == 3 ? 2 : 1; }

static int64_t tokens_at_once(const Product *p) {
    int64_t fit = PANEL_BYTES / (2 * words_of(p) * padded_columns(p)) / FEW_ROWS * FEW_ROWS;
    return least(fit < FEW_ROWS ? FEW_ROWS : fit, p->M);
}

// Scales of one row, and room to load a vector of them behind the last.
static int64_t scale_length(const Product *p) { return round_up(groups_of(p), LANES) + LANES; }

static Memory memory_at(const Product *p, int8_t *memory) {
    int64_t tokens = tokens_at_once(p), padded = padded_columns(p);
    Memory m = {.worth = (float *)memory};
    m.row = m.worth + round_up(tokens, 16);
    m.numbers = (int16_t *)(m.row + padded);
    m.scale = (float *)(m.numbers + tokens * words_of(p) * padded);
    return m;
}

int64_t integers_bytes(const Product *p, int threads) {
    Memory m = memory_at(p, 0);
    return (int8_t *)(m.scale + threads * scale_length(p)) - (int8_t *)0;
}

static float largest_magnitude(const float *row, int64_t count) {
    __m256 top = _mm256_setzero_ps(), fault = _mm256_setzero_ps(), sign = _mm256_set1_ps(-0.0f);
    for (int64_t k = 0; k < count; k += LANES) {
        __m256 values = _mm256_loadu_ps(row + k);
        top = _mm256_max_ps(top, _mm256_andnot_ps(sign, values));
        fault = _mm256_fmadd_ps(values, _mm256_setzero_ps(), fault);  // NaN after NaN or infinity
    }
    float tops[LANES], found = sum_of(fault), largest = SMALLEST_TOP;
    _mm256_storeu_ps(tops, top);
    for (int i = 0; i < LANES; i++) largest = tops[i] > largest ? tops[i] : largest;
    return found != found ? found : largest;
}

// Write the numbers of a step in the order of their codes: `vectors` of 16 hold every second or every fourth column.
static inline __attribute__((always_inline)) void write_step(const int32_t *step, int vectors, int words,
                                                             int64_t padded, int16_t *numbers) {
    for (int i = 0; i < STEP; i++) {
        int32_t number = step[i / (16 * vectors) * (16 * vectors) + i % 16 * vectors + i / 16 % vectors];
        // Of a number of 24 bits the highest 8, rounded, and the signed rest.
        if (words == 2) numbers[i] = (int16_t)((number + 0x8000) >> 16);
        numbers[i + (words - 1) * padded] = (int16_t)number;
    }
}

static void write_token(const Product *p, const Memory *memory, int64_t token, int64_t m) {
    const Weight *w = &p->weight;
    int64_t padded = padded_columns(p);
    int words = words_of(p);
    copy_as_float32(p->x, w->dtype, (token + m) * w->K, w->K, padded, memory->row);
    float top = largest_magnitude(memory->row, padded), unit = unit_of(top, w->digits);
    memory->worth[m] = words == 2 ? top / 127 : unit;
    for (int64_t k = 0; k < padded; k += STEP) {
        int16_t *numbers = memory->numbers + m * words * padded + k;
        int32_t step[STEP];
        for (int i = 0; i < STEP; i += LANES) {
            __m256 scaled = _mm256_mul_ps(_mm256_loadu_ps(memory->row + k + i), _mm256_set1_ps(1 / unit));
            _mm256_storeu_si256((__m256i *)(step + i), _mm256_cvtps_epi32(scaled));
        }
        if (w->bits == 8 && words == 2) write_step(step, 2, 2, padded, numbers);
        else if (w->bits == 8) write_step(step, 2, 1, padded, numbers);
        else if (words == 2) write_step(step, 4, 2, padded, numbers);
        else write_step(step, 4, 1, padded, numbers);
    }
}

// 32 codes of 8 bits as 16-bit numbers, those of even columns first; or 64 of 4 bits, by the remainder of column / 4.
static inline __attribute__((always_inline)) void load_codes(__m256i bytes, int bits, __m256i codes[4]) {
    if (bits == 8) {
        codes[0] = _mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8);
        codes[1] = _mm256_srai_epi16(bytes, 8);
        return;
    }
    const __m256i nibble = _mm256_set1_epi16(15), offset = _mm256_set1_epi16(8);
    for (int i = 0; i < 4; i++)
        codes[i] = _mm256_sub_epi16(_mm256_and_si256(_mm256_srli_epi16(bytes, 4 * i), nibble), offset);
}

// Return the scales of a part of the columns, of which a lane holds as many as two codes for each vector of them.
static inline __m256 part_scale(const float *scale, int64_t size, int64_t block) {
    if (size >= block) return _mm256_set1_ps(*scale);
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    __m256i group = _mm256_srl_epi32(lanes, _mm_cvtsi64_si128(__builtin_ctzll(size * LANES / block)));
    return _mm256_permutevar8x32_ps(_mm256_loadu_ps(scale), group);
}

static inline __attribute__((always_inline)) void multiply_row(const Product *p, const int16_t *numbers, int64_t n,
                                                               const float *scale, int M, int words, int bits,
                                                               float *sums) {
    int64_t K = p->weight.K, padded = padded_columns(p), block = 16 * (16 / bits), row_bytes = K * bits / 8;
    // Columns whose sums are scaled together: a group, or the groups within one block of codes.
    int64_t size = p->weight.group_size ? p->weight.group_size : padded, part = size < block ? block : size;
    int64_t scales = part / size;
    const uint8_t *row = p->qdata + n * row_bytes;
    __m256 total[FEW_ROWS];
    for (int m = 0; m < M; m++) total[m] = _mm256_setzero_ps();
    for (int64_t k = 0, end; k < K; scale += scales)
        for (end = least(k + part, K); k < end;) {
            int64_t last = least(k + MOST_COLUMNS, end);
            __m256i products[FEW_ROWS * 2], codes[4];
            for (int i = 0; i < M * words; i++) products[i] = _mm256_setzero_si256();
            for (; k < last; k += block) {
                load_codes(load_bytes(row, k * bits / 8, row_bytes), bits, codes);
                for (int i = 0; i < M * words; i++)
                    for (int v = 0; v < 16 / bits; v++) {
                        __m256i x = _mm256_loadu_si256((const __m256i *)(numbers + i * padded + k + 16 * v));
                        products[i] = _mm256_add_epi32(products[i], _mm256_madd_epi16(codes[v], x));
                    }
            }
            __m256 factors = part_scale(scale, size, block);
            for (int m = 0; m < M; m++) {
                __m256 sum = _mm256_cvtepi32_ps(products[m * words]);
                if (words == 2)
                    sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(products[m * 2 + 1]), _mm256_set1_ps(0x1p-16f), sum);
                total[m] = _mm256_fmadd_ps(sum, factors, total[m]);
            }
        }
    for (int m = 0; m < M; m++) sums[m] = sum_of(total[m]);
}

#define CASE(M_, WORDS, BITS)                                        \
    if (M == M_ && words_of(p) == WORDS && p->weight.bits == BITS)   \
        multiply_row(p, numbers, n, scale, M_, WORDS, BITS, sums);
#define CASES(WORDS, BITS) CASE(1, WORDS, BITS) CASE(2, WORDS, BITS) CASE(3, WORDS, BITS) CASE(4, WORDS, BITS)

// The numbers are constants in each case, so that the sums stay in registers.
static void multiply_row_of(const Product *p, const int16_t *numbers, int64_t n, const float *scale, int64_t M,
                            float *sums) {
    CASES(1, 8) CASES(2, 8) CASES(1, 4) CASES(2, 4)
}

static void multiply_block(const Product *p, const Memory *memory, float *scale, int64_t token, int64_t tokens,
                           int64_t first) {
    const Weight *w = &p->weight;
    int64_t G = groups_of(p), last = least(first + BLOCK_ROWS, w->N), stride = words_of(p) * padded_columns(p);
    for (int64_t m = 0; m < tokens; m += FEW_ROWS)
        for (int64_t n = first; n < last; n++) {
            float sums[FEW_ROWS], bias = p->bias ? load_float(p->bias, w->dtype, n) : 0;
            copy_as_float32(p->scale, w->scale_dtype, n * G, G, scale_length(p), scale);
            multiply_row_of(p, memory->numbers + m * stride, n, scale, least(FEW_ROWS, tokens - m), sums);
            for (int64_t i = 0; i < least(FEW_ROWS, tokens - m); i++)
                store_float(p->out, w->dtype, (token + m + i) * w->N + n, sums[i] * memory->worth[m + i] + bias);
        }
}

void multiply_integers(const Product *p, int threads, int8_t *scratch) {
    Memory memory = memory_at(p, scratch);
    for (int64_t token = 0; token < p->M; token += tokens_at_once(p)) {
        int64_t tokens = least(tokens_at_once(p), p->M - token);
        for (int64_t m = 0; m < tokens; m++) write_token(p, &memory, token, m);
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
        for (int64_t n = 0; n < p->weight.N; n += BLOCK_ROWS)
            multiply_block(p, &memory, memory.scale + thread_index() * scale_length(p), token, tokens, n);
    }
}
