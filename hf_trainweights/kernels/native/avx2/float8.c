// float8_e4m3 weights: products of few rows of x, and the float weight for many. Sums are scaled when they are
// complete, so x beyond 1e33 overflows.
#include "vectors.h"

// Codes that are widened at a time.
#define STEP 16

// Write 16 codes from `first` on / 256 as float32: as float16 the exponent has one bit more and a larger bias. NaN,
// which no weight holds, is not kept. Behind the end of the row, which meets zeros, are zeros.
static inline __attribute__((always_inline)) void load_float8(const uint8_t *row, int64_t first, int64_t K,
                                                              __m256 out[2]) {
    uint8_t rest[STEP] = {0};
    const uint8_t *codes = row + first;
    if (first + STEP > K) codes = memcpy(rest, codes, K - first);
    __m256i bits = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)codes));
    bits = _mm256_and_si256(_mm256_slli_epi16(bits, 7), _mm256_set1_epi16((short)0xbf80));
    out[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(bits));
    out[1] = _mm256_cvtph_ps(_mm256_extracti128_si256(bits, 1));
}

static inline __attribute__((always_inline)) void multiply_row(const float *x, int64_t stride, const uint8_t *codes,
                                                               int64_t K, int M, float *sums) {
    __m256 total[FEW_ROWS][2], weight[2];
    for (int m = 0; m < M; m++) total[m][0] = total[m][1] = _mm256_setzero_ps();
    for (int64_t k = 0; k < K; k += STEP) {
        load_float8(codes, k, K, weight);
        for (int m = 0; m < M; m++) {
            total[m][0] = _mm256_fmadd_ps(weight[0], _mm256_loadu_ps(x + m * stride + k), total[m][0]);
            total[m][1] = _mm256_fmadd_ps(weight[1], _mm256_loadu_ps(x + m * stride + k + LANES), total[m][1]);
        }
    }
    for (int m = 0; m < M; m++) sums[m] = sum_of(_mm256_add_ps(total[m][0], total[m][1]));
}

// The number of tokens is a constant in each case, so that the sums stay in registers.
static void multiply_row_of(const Product *p, const float *x, int64_t n, int64_t M, float *sums) {
    int64_t K = p->weight.K, stride = round_up(K, STEP);
    const uint8_t *codes = p->qdata + n * K;
    if (M == 1) multiply_row(x, stride, codes, K, 1, sums);
    if (M == 2) multiply_row(x, stride, codes, K, 2, sums);
    if (M == 3) multiply_row(x, stride, codes, K, 3, sums);
    if (M == 4) multiply_row(x, stride, codes, K, 4, sums);
}

// Multiply a row of the weight with all tokens.
static void multiply_tokens(const Product *p, const float *x, int64_t n) {
    const Weight *w = &p->weight;
    float scale = 256 * load_float(p->scale, w->scale_dtype, n), bias = p->bias ? load_float(p->bias, w->dtype, n) : 0;
    for (int64_t token = 0; token < p->M; token += FEW_ROWS) {
        int64_t tokens = least(FEW_ROWS, p->M - token);
        float sums[FEW_ROWS];
        multiply_row_of(p, x + token * round_up(w->K, STEP), n, tokens, sums);
        for (int64_t m = 0; m < tokens; m++)
            store_float(p->out, w->dtype, (token + m) * w->N + n, sums[m] * scale + bias);
    }
}

int64_t float8_bytes(const Product *p) { return p->M * round_up(p->weight.K, STEP) * 4; }

void multiply_float8(const Product *p, int threads, int8_t *memory) {
    const Weight *w = &p->weight;
    int64_t stride = round_up(w->K, STEP);
    float *x = (float *)memory;
    for (int64_t m = 0; m < p->M; m++) copy_as_float32(p->x, w->dtype, m * w->K, w->K, stride, x + m * stride);
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t n = 0; n < w->N; n++) multiply_tokens(p, x, n);
}

void dequantize_float8(const Product *p, int threads) {
    int64_t K = p->weight.K;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t n = 0; n < p->weight.N; n++) {
        __m256 weight[2], factor = _mm256_set1_ps(256 * load_float(p->scale, p->weight.scale_dtype, n));
        for (int64_t k = 0; k < K; k += STEP) {
            float values[STEP];
            load_float8(p->qdata + n * K, k, K, weight);
            for (int half = 0; half < 2; half++)
                _mm256_storeu_ps(values + half * LANES, _mm256_mul_ps(weight[half], factor));
            for (int64_t i = 0; i < least(STEP, K - k); i++) store_float(p->out, p->weight.dtype, n * K + k + i, values[i]);
        }
    }
}
