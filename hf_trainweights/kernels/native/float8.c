// float8_e4m3 weights: products of few rows of x, and rows of the float weight for products of many. Sums are scaled
// when they are complete, so x beyond 1e33 overflows.
#include "codings.h"
#include "scales.h"

// Codes that are widened at a time.
#define STEP (2 * LANES)

static inline __attribute__((always_inline)) void add_products(const uint8_t *codes, int64_t left, const float *x,
                                                               int64_t stride, int M, Floats total[FEW_ROWS][2]) {
    Floats weight[2];
    fetch_ahead(codes);
    load_float8(codes, left, weight);
    for (int m = 0; m < M; m++)
        for (int half = 0; half < 2; half++) {
            Floats values = *(const Floats *)(x + m * stride + half * LANES);
            total[m][half] = multiply_add(weight[half], values, total[m][half]);
        }
}

static inline __attribute__((always_inline)) void multiply_row(const float *x, int64_t stride, const uint8_t *codes,
                                                               int64_t K, int M, float *sums) {
    Floats total[FEW_ROWS][2];
    int64_t k = 0;
    for (int m = 0; m < M; m++) total[m][0] = total[m][1] = all_floats(0);
    for (; k + STEP <= K; k += STEP) add_products(codes + k, STEP, x + k, stride, M, total);
    if (k < K) add_products(codes + k, K - k, x + k, stride, M, total);
    for (int m = 0; m < M; m++) sums[m] = sum_of(total[m][0] + total[m][1]);
}

// Multiply a row whose groups have scales. A group is a number of steps, but the last one may end before.
static inline __attribute__((always_inline)) void multiply_groups(const float *x, int64_t stride, const uint8_t *codes,
                                                                  int64_t K, int64_t size, const float *scale, int M,
                                                                  float *sums) {
    Floats total[FEW_ROWS];
    for (int m = 0; m < M; m++) total[m] = all_floats(0);
    for (int64_t k = 0; k < K; scale++) {
        Floats products[FEW_ROWS][2];
        int64_t end = least(k + size, K);
        for (int m = 0; m < M; m++) products[m][0] = products[m][1] = all_floats(0);
        for (; k + STEP <= end; k += STEP) add_products(codes + k, STEP, x + k, stride, M, products);
        if (k < end) add_products(codes + k, end - k, x + k, stride, M, products);
        k = end;
        for (int m = 0; m < M; m++)
            total[m] = multiply_add(products[m][0] + products[m][1], all_floats(*scale), total[m]);
    }
    for (int m = 0; m < M; m++) sums[m] = sum_of(total[m]);
}

static void multiply_groups_of(const Product *p, const float *x, int64_t n, int64_t M, float *sums) {
    int64_t K = p->weight.K, stride = round_up(K, STEP), size = p->weight.group_size ? p->weight.group_size : K;
    const uint8_t *codes = p->qdata + n * K;
    float scale[groups_length(coded_groups(p))];
    write_groups(p, n, (Groups){.scale = scale});
    if (M == 1) multiply_groups(x, stride, codes, K, size, scale, 1, sums);
    if (M == 2) multiply_groups(x, stride, codes, K, size, scale, 2, sums);
    if (M == 3) multiply_groups(x, stride, codes, K, size, scale, 3, sums);
    if (M == 4) multiply_groups(x, stride, codes, K, size, scale, 4, sums);
}

// The compiler gets the number of tokens as a constant, so that the sums stay in registers.
static void multiply_row_of(const Product *p, const float *x, int64_t n, int64_t M, float *sums) {
    int64_t K = p->weight.K, stride = round_up(K, STEP);
    const uint8_t *codes = p->qdata + n * K;
    if (p->weight.family) {
        multiply_groups_of(p, x, n, M, sums);
        return;
    }
    if (M == 1) multiply_row(x, stride, codes, K, 1, sums);
    if (M == 2) multiply_row(x, stride, codes, K, 2, sums);
    if (M == 3) multiply_row(x, stride, codes, K, 3, sums);
    if (M == 4) multiply_row(x, stride, codes, K, 4, sums);
}

// Multiply `count` rows of the weight with all tokens. The rows stay in a cache meanwhile.
static void multiply_rows(const Product *p, const float *x, int64_t first, int64_t count) {
    const Weight *w = &p->weight;
    Floats bias = p->bias ? load_floats(p->bias, w->dtype, first, count) : all_floats(0);
    Floats scale = w->family ? all_floats(1) : load_floats(p->scale, w->scale_dtype, first, count);
    scale *= all_floats(256);
    for (int64_t token = 0; token < p->M; token += FEW_ROWS) {
        int64_t tokens = least(FEW_ROWS, p->M - token);
        float results[FEW_ROWS][LANES], sums[FEW_ROWS];
        for (int64_t n = 0; n < count; n++) {
            multiply_row_of(p, x + token * round_up(w->K, STEP), first + n, tokens, sums);
            for (int64_t m = 0; m < tokens; m++) results[m][n] = sums[m];
        }
        for (int64_t m = 0; m < tokens; m++) {
            Floats values = multiply_add(*(Floats *)results[m], scale, bias);
            store_floats(p->out, w->dtype, (token + m) * w->N + first, count, values);
        }
    }
}

int64_t float8_bytes(const Product *p) { return p->M * round_up(p->weight.K, STEP) * 4; }

void multiply_float8(const Product *p, int threads, int8_t *memory) {
    int64_t stride = round_up(p->weight.K, STEP), K = p->weight.K;
    float *x = (float *)memory;
    for (int64_t m = 0; m < p->M; m++) copy_as_float32(p->x, p->weight.dtype, m * K, K, stride, x + m * stride);
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t n = 0; n < p->weight.N; n += LANES) multiply_rows(p, x, n, least(LANES, p->weight.N - n));
}

static inline __attribute__((always_inline)) void write_step(const uint8_t *codes, int64_t count, Floats factor,
                                                             int dtype, void *out, int64_t at) {
    Floats weight[2];
    fetch_ahead(codes);
    load_float8(codes, count, weight);
    for (int half = 0; half < 2; half++)
        store_floats(out, dtype, at + half * LANES, count - half * LANES, weight[half] * factor);
}

static inline __attribute__((always_inline)) void write_row(const uint8_t *codes, int64_t K, Floats factor, int dtype,
                                                            void *out, int64_t at) {
    int64_t k = 0;
    for (; k + STEP <= K; k += STEP) write_step(codes + k, STEP, factor, dtype, out, at + k);
    if (k < K) write_step(codes + k, K - k, factor, dtype, out, at + k);
}

// The compiler gets the dtype as a constant.
void dequantize_float8_row(const Product *p, int64_t n, int64_t at) {
    const uint8_t *codes = p->qdata + n * p->weight.K;
    Floats factor = all_floats(256 * row_scale(p, n));
    if (p->weight.dtype == FLOAT32) write_row(codes, p->weight.K, factor, FLOAT32, p->out, at);
    else if (p->weight.dtype == BFLOAT16) write_row(codes, p->weight.K, factor, BFLOAT16, p->out, at);
    else write_row(codes, p->weight.K, factor, FLOAT16, p->out, at);
}
