// Products of many rows of x in float32, for CPUs with AVX2 and without AVX-512. Rows of the weight are dequantized, a
// few at a time, and multiplied with all tokens while they are in a cache. Tokens lie side by side in the lanes of a
// vector, and each number of a row is copied to all lanes. A panel is the tokens held at a time (`Tokens`).
#include "vectors.h"

// A thread dequantizes BLOCK_ROWS rows of the weight at a time. The sums of SUMS_OF_ROWS rows with one vector of tokens
// stay in registers, or those of half as many rows with two vectors.
#define BLOCK_ROWS 24
#define SUMS_OF_ROWS 12
// The tokens of a unit: two vectors, which rows are multiplied with at a time.
#define UNIT_TOKENS (2 * LANES)
// Columns that are summed at a time. They stay in the first-level cache, and the errors of more float32 products in a
// row would add up.
#define STEP_COLUMNS 256
// Bytes of the tokens that are held at a time. A third-level cache is fast enough for them.
#define HELD_BYTES (1 << 23)

typedef struct {
    int64_t count;        // of tokens, at most, in full units
    float *x;             // [units][K][UNIT_TOKENS]
    float *token_scales;  // [count]; NaN if codes are integers and x is not finite
    int8_t *blocks;       // of the threads
} Tokens;

typedef struct {
    float *rows;     // [BLOCK_ROWS][stride]
    float *sums;     // [BLOCK_ROWS][UNIT_TOKENS]
    float *results;  // [UNIT_TOKENS][BLOCK_ROWS]
    int8_t *memory;  // to dequantize a row
} Block;

// Return the distance of two rows. 16 columns more keep a column of all rows from sharing the same lines of a cache.
static int64_t stride_of(const Product *p) { return round_up(p->weight.K, LANES) + 16; }

static int64_t block_bytes(const Product *p) {
    return round_up(BLOCK_ROWS * (stride_of(p) + 2 * UNIT_TOKENS) * 4 + row_bytes(p), ALIGNMENT);
}

static Tokens tokens_at(const Product *p, int8_t *memory) {
    int64_t fit = HELD_BYTES / 4 / p->weight.K / UNIT_TOKENS * UNIT_TOKENS;
    Tokens tokens = {.count = least(fit < UNIT_TOKENS ? UNIT_TOKENS : fit, round_up(p->M, UNIT_TOKENS))};
    tokens.x = (float *)memory;
    tokens.token_scales = tokens.x + tokens.count * p->weight.K;
    tokens.blocks = (int8_t *)(tokens.token_scales + tokens.count);
    return tokens;
}

static Block block_at(const Product *p, const Tokens *tokens, int thread) {
    Block block = {.rows = (float *)(tokens->blocks + thread * block_bytes(p))};
    block.sums = block.rows + BLOCK_ROWS * stride_of(p);
    block.results = block.sums + BLOCK_ROWS * UNIT_TOKENS;
    block.memory = (int8_t *)(block.results + BLOCK_ROWS * UNIT_TOKENS);
    return block;
}

// Return up to how many rows of x the products of bytes/ and words/ take less time.
static int64_t most_rows_of_others(const Weight *w) {
    if (w->family) return FEW_ROWS;
#ifdef __AVXVNNI__
    if (w->bits && !w->code_units) return INT64_MAX;
#endif
    int is_one = w->dtype != FLOAT32 || w->digits == 1;  // whether one number of 16 bits holds an activation
    if (w->bits == 4 && !w->code_units) return is_one ? ROWS_OF_INT4 : ROWS_OF_INT4_IN_FLOAT32;
    return is_one && w->bits ? ROWS_OF_INTEGERS : ROWS_OF_INTEGERS_IN_FLOAT32;
}

int takes_panels(const Product *p) { return p->M > most_rows_of_others(&p->weight); }

int64_t panels_bytes(const Product *p, int threads) {
    return tokens_at(p, NULL).blocks - (int8_t *)NULL + threads * block_bytes(p);
}

static float token_scale_of(const Product *p, int64_t token) {
    const Weight *w = &p->weight;
    if (!w->bits) return 1;
    float top = largest_magnitude((const char *)p->x + token * w->K * itemsize(w->dtype), w->dtype, w->K);
    return top != top ? top : w->digits == 1 ? unit_of(top, 1) : 1;
}

// Write some columns of LANES tokens. Zeros stand for tokens from `count` on, which x does not have.
static void write_columns(const Product *p, int64_t token, int64_t k, int64_t count, const float *token_scales,
                          float *to) {
    const Weight *w = &p->weight;
    Floats numbers[LANES];
    for (int64_t i = 0; i < LANES; i++) {
        numbers[i] = load_floats(p->x, w->dtype, (token + i) * w->K + k, i < count ? w->K - k : 0);
        if (w->digits == 1 && i < count)
            numbers[i] = to_floats(to_integers(numbers[i] * all_floats(1 / token_scales[i])));
    }
    if (w->K - k >= LANES) {
        store_transposed((const Integers *)numbers, (int8_t *)to, UNIT_TOKENS * 4);
        return;
    }
    for (int64_t j = 0; j < w->K - k; j++)
        for (int i = 0; i < LANES; i++) to[j * UNIT_TOKENS + i] = numbers[i][j];
}

static void write_unit(const Product *p, const Tokens *tokens, int64_t token, int64_t unit) {
    int64_t K = p->weight.K, first = token + unit * UNIT_TOKENS, count = least(UNIT_TOKENS, p->M - first);
    float *to = tokens->x + unit * UNIT_TOKENS * K, *token_scales = tokens->token_scales + unit * UNIT_TOKENS;
    for (int64_t i = 0; i < count; i++) token_scales[i] = token_scale_of(p, first + i);
    for (int64_t m = 0; m < UNIT_TOKENS; m += LANES)
        for (int64_t k = 0; k < K; k += LANES)
            write_columns(p, first + m, k, count - m, token_scales + m, to + k * UNIT_TOKENS + m);
}

// Add the products of rows and one or two vectors of tokens, over some columns, to sums [rows][UNIT_TOKENS].
static inline __attribute__((always_inline)) void add_products(const float *row, int64_t stride, const float *x,
                                                               int64_t columns, int begins, int vectors, float *sums) {
    Floats total[SUMS_OF_ROWS];
    _Pragma("GCC unroll 12") for (int i = 0; i < SUMS_OF_ROWS; i++) total[i] = all_floats(0);
    for (int64_t k = 0; k < columns; k++, x += UNIT_TOKENS, row++) {
        Floats tokens[2];
        _Pragma("GCC unroll 2") for (int v = 0; v < vectors; v++) tokens[v] = *(const Floats *)(x + v * LANES);
        _Pragma("GCC unroll 12") for (int n = 0; n < SUMS_OF_ROWS / vectors; n++)
            _Pragma("GCC unroll 2") for (int v = 0; v < vectors; v++)
                total[n * vectors + v] = multiply_add(all_floats(row[n * stride]), tokens[v], total[n * vectors + v]);
    }
    _Pragma("GCC unroll 12") for (int i = 0; i < SUMS_OF_ROWS; i++) {
        float *sum = sums + i / vectors * UNIT_TOKENS + i % vectors * LANES;
        if (!begins) total[i] += *(const Floats *)sum;
        *(Floats *)sum = total[i];
    }
}

static void multiply_unit(const Product *p, const Block *block, const float *x, int64_t rows, int64_t tokens) {
    int64_t K = p->weight.K, stride = stride_of(p);
    for (int64_t k = 0; k < K; k += STEP_COLUMNS, x += STEP_COLUMNS * UNIT_TOKENS)
        for (int64_t n = 0; n < rows; n += tokens > LANES ? SUMS_OF_ROWS / 2 : SUMS_OF_ROWS) {
            const float *row = block->rows + n * stride + k;
            float *sums = block->sums + n * UNIT_TOKENS;
            if (tokens > LANES) add_products(row, stride, x, least(STEP_COLUMNS, K - k), k == 0, 2, sums);
            else add_products(row, stride, x, least(STEP_COLUMNS, K - k), k == 0, 1, sums);
        }
}

static void store_results(const Product *p, const Block *block, const float *token_scales, int64_t first, int64_t rows,
                          int64_t token, int64_t tokens) {
    const Weight *w = &p->weight;
    for (int64_t n = 0; n < rows; n += LANES) {
        Floats bias = p->bias ? load_floats(p->bias, w->dtype, first + n, rows - n) : all_floats(0);
        for (int64_t m = 0; m < tokens; m += LANES) {
            Integers sums[LANES];
            for (int i = 0; i < LANES; i++) sums[i] = *(Integers *)(block->sums + (n + i) * UNIT_TOKENS + m);
            store_transposed(sums, (int8_t *)(block->results + m * BLOCK_ROWS + n), BLOCK_ROWS * 4);
        }
        for (int64_t i = 0; i < tokens; i++) {
            Floats sums = *(Floats *)(block->results + i * BLOCK_ROWS + n);
            Floats values = multiply_add(sums, all_floats(token_scales[i]), bias);
            store_floats(p->out, w->dtype, (token + i) * w->N + first + n, rows - n, values);
        }
    }
}

static void multiply_rows(const Product *p, const Tokens *tokens, int64_t token, int64_t first) {
    Block block = block_at(p, tokens, thread_index());
    int64_t rows = least(BLOCK_ROWS, p->weight.N - first), held = least(tokens->count, p->M - token);
    Product floats = *p;
    floats.weight.dtype = FLOAT32;
    floats.out = block.rows;
    for (int64_t r = 0; r < rows; r++) dequantize_row(&floats, first + r, r * stride_of(p), block.memory);
    for (int64_t m = 0; m < held; m += UNIT_TOKENS) {
        int64_t count = least(UNIT_TOKENS, held - m);
        multiply_unit(p, &block, tokens->x + m * p->weight.K, rows, count);
        store_results(p, &block, tokens->token_scales + m, first, rows, token + m, count);
    }
}

void multiply_panels(const Product *p, int threads, int8_t *memory) {
    Tokens tokens = tokens_at(p, memory);
    for (int64_t token = 0; token < p->M; token += tokens.count) {
        int64_t units = (least(tokens.count, p->M - token) + UNIT_TOKENS - 1) / UNIT_TOKENS;
#pragma omp parallel num_threads(threads) if (threads > 1)
        {
#pragma omp for
            for (int64_t unit = 0; unit < units; unit++) write_unit(p, &tokens, token, unit);
#pragma omp for
            for (int64_t n = 0; n < p->weight.N; n += BLOCK_ROWS) multiply_rows(p, &tokens, token, n);
        }
    }
}
