// float8_e4m3 weights: products of few rows of x, and the float weight for many. Sums are scaled when they are
// complete, so x beyond 1e33 overflows.
#include "vectors.h"

// Write 32 codes / 256 as float32: as float16 the exponent has one bit more and a larger bias. NaN, which no weight
// holds, is not kept.
static inline void load_float8(const uint8_t *codes, __mmask32 mask, __m512 out[2]) {
    __m512i bits = _mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi8(mask, codes));
    bits = _mm512_and_si512(_mm512_slli_epi16(bits, 7), _mm512_set1_epi16((short)0xbf80));
    out[0] = _mm512_cvtph_ps(_mm512_castsi512_si256(bits));
    out[1] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(bits, 1));
}

static inline __mmask32 first_bytes(int64_t count) { return count >= 32 ? ~0u : (1u << count) - 1; }

static inline __attribute__((always_inline)) void multiply_row(const float *x, int64_t stride, const uint8_t *codes,
                                                               int64_t K, int M, float *sums) {
    __m512 total[FEW_ROWS][2], weight[2];
    for (int m = 0; m < M; m++) total[m][0] = total[m][1] = _mm512_setzero_ps();
    for (int64_t k = 0; k < K; k += 32) {
        load_float8(codes + k, first_bytes(K - k), weight);
        for (int m = 0; m < M; m++) {
            total[m][0] = _mm512_fmadd_ps(weight[0], _mm512_load_ps(x + m * stride + k), total[m][0]);
            total[m][1] = _mm512_fmadd_ps(weight[1], _mm512_load_ps(x + m * stride + k + LANES), total[m][1]);
        }
    }
    for (int m = 0; m < M; m++) sums[m] = _mm512_reduce_add_ps(_mm512_add_ps(total[m][0], total[m][1]));
}

// The number of tokens is a constant in each case, so that the sums stay in registers.
static void multiply_row_of(const Product *p, const float *x, int64_t n, int64_t M, float *sums) {
    int64_t K = p->weight.K, stride = round_up(K, BYTES);
    const uint8_t *codes = p->qdata + n * K;
    if (M == 1) multiply_row(x, stride, codes, K, 1, sums);
    if (M == 2) multiply_row(x, stride, codes, K, 2, sums);
    if (M == 3) multiply_row(x, stride, codes, K, 3, sums);
    if (M == 4) multiply_row(x, stride, codes, K, 4, sums);
}

// Multiply `count` rows of the weight, which stay in a cache meanwhile, with all tokens.
static void multiply_rows(const Product *p, const float *x, int64_t first, int64_t count) {
    const Weight *w = &p->weight;
    __mmask16 mask = first_lanes(count);
    __m512 bias = p->bias ? load_floats(p->bias, w->dtype, first, mask) : _mm512_setzero_ps();
    __m512 scale = _mm512_mul_ps(load_floats(p->scale, w->scale_dtype, first, mask), _mm512_set1_ps(256));
    for (int64_t token = 0; token < p->M; token += FEW_ROWS) {
        int64_t tokens = least(FEW_ROWS, p->M - token);
        float results[FEW_ROWS][LANES], sums[FEW_ROWS];
        for (int64_t n = 0; n < count; n++) {
            multiply_row_of(p, x + token * round_up(w->K, BYTES), first + n, tokens, sums);
            for (int64_t m = 0; m < tokens; m++) results[m][n] = sums[m];
        }
        for (int64_t m = 0; m < tokens; m++) {
            __m512 values = _mm512_fmadd_ps(_mm512_maskz_loadu_ps(mask, results[m]), scale, bias);
            store_floats(p->out, w->dtype, (token + m) * w->N + first, mask, values);
        }
    }
}

int64_t float8_bytes(const Product *p) { return p->M * round_up(p->weight.K, BYTES) * 4; }

void multiply_float8(const Product *p, int threads, int8_t *memory) {
    int64_t stride = round_up(p->weight.K, BYTES), K = p->weight.K;
    float *x = (float *)memory;
    for (int64_t m = 0; m < p->M; m++) {
        copy_as_float32(p->x, p->weight.dtype, m * K, K, x + m * stride);
        for (int64_t k = K; k < stride; k++) x[m * stride + k] = 0;
    }
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t n = 0; n < p->weight.N; n += LANES) multiply_rows(p, x, n, least(LANES, p->weight.N - n));
}

void dequantize_float8(const Product *p, int threads) {
    int64_t K = p->weight.K;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t n = 0; n < p->weight.N; n++) {
        __m512 weight[2], factor = load_floats(p->scale, p->weight.scale_dtype, n, 1);
        factor = _mm512_mul_ps(_mm512_set1_ps(_mm512_cvtss_f32(factor)), _mm512_set1_ps(256));
        for (int64_t k = 0; k < K; k += 32) {
            load_float8(p->qdata + n * K + k, first_bytes(K - k), weight);
            for (int half = 0; half < 2; half++) {
                __mmask16 mask = first_lanes(K - k - half * LANES);
                store_floats(p->out, p->weight.dtype, n * K + k + half * LANES, mask, _mm512_mul_ps(weight[half], factor));
            }
        }
    }
}
