// Products of many rows of x with integer codes. Tokens lie side by side in the lanes of a vector, and each instruction
// multiplies four digits of each token with four codes of one row of the weight. No reordered copy of the weight is
// kept: a block of its rows is unpacked to bytes once for all tokens. The digits of the tokens held are the panel.
#include "digits.h"
#include "integers.h"

// Rows of the weight in a block, a multiple of `ROWS_FOR`.
#define BLOCK_ROWS 48
#define MOST_VECTORS 3
// Bytes of the digits that are held at a time: half of a second-level cache of 1 MB.
#define PANEL_BYTES (1 << 19)

// A tile: the tokens of one to three vectors, whose sums with some rows stay in registers.
typedef struct {
    int64_t tokens;
    int vectors;
    float *token_scales;    // [vectors][LANES]
    Integers *offset_sums;  // [G][vectors][digits][LANES]: sums of products begin with it, as in few_rows.c
    int8_t *digits;         // [K / 4][vectors][digits][LANES][4]
} Tile;

// A thread's memory for a block of rows.
typedef struct {
    float *sums;     // [BLOCK_ROWS][vectors][LANES]
    float *results;  // [vectors][LANES][BLOCK_ROWS]
    float *scale;    // [BLOCK_ROWS][G]
    uint8_t *codes;  // [BLOCK_ROWS][code_stride]
} Block;

static int most_vectors(const Product *p) { return p->weight.digits == 1 ? MOST_VECTORS : 1; }
static int64_t tile_tokens(const Product *p) { return LANES * most_vectors(p); }

static int64_t tile_bytes(const Product *p) {
    int64_t vectors = most_vectors(p) * p->weight.digits;
    return most_vectors(p) * BYTES + (groups_of(p) + padded_columns(p) / 4) * vectors * BYTES;
}

static int64_t tiles_at_once(const Product *p) {
    int64_t fit = PANEL_BYTES / tile_bytes(p), all = (p->M + tile_tokens(p) - 1) / tile_tokens(p);
    return fit < 1 ? 1 : least(fit, all);
}

// Return the distance of two rows. If it were a power of two, they would drive each other from the first-level cache.
static int64_t code_stride(const Product *p) { return padded_columns(p) + BYTES; }

static int64_t block_bytes(const Product *p) {
    int64_t sums = BLOCK_ROWS * LANES * MOST_VECTORS * 4;
    return 2 * sums + round_up(BLOCK_ROWS * groups_of(p) * 4, BYTES) + BLOCK_ROWS * code_stride(p);
}

int64_t many_rows_bytes(const Product *p, int threads) {
    return tiles_at_once(p) * tile_bytes(p) + threads * block_bytes(p);
}

static Tile tile_at(const Product *p, int8_t *panel, int64_t index, int64_t tokens) {
    Tile tile = {.tokens = least(tile_tokens(p), tokens - index * tile_tokens(p))};
    int8_t *memory = panel + index * tile_bytes(p);
    tile.vectors = (int)((tile.tokens + LANES - 1) / LANES);
    tile.token_scales = (float *)memory;
    tile.offset_sums = (Integers *)(memory + tile.vectors * BYTES);
    tile.digits = (int8_t *)(tile.offset_sums + groups_of(p) * tile.vectors * p->weight.digits);
    return tile;
}

static Block block_at(const Product *p, int8_t *memory) {
    int64_t sums = BLOCK_ROWS * LANES * MOST_VECTORS;
    Block block = {.sums = (float *)memory};
    block.results = block.sums + sums;
    block.scale = block.results + sums;
    block.codes = (uint8_t *)block.scale + round_up(BLOCK_ROWS * groups_of(p) * 4, BYTES);
    return block;
}

static inline __attribute__((always_inline)) void write_vector(const Product *p, const Tile *tile, int vector,
                                                               const char *x, int64_t tokens, int dtype, int digits) {
    int64_t K = p->weight.K, row = K * itemsize(dtype), stride = tile->vectors * digits;
    Floats per_unit[LANES];
    Integers digit_vectors[3], out[3][LANES];
    for (int i = 0; i < LANES; i++) {
        float top = i < tokens ? largest_magnitude(x + i * row, dtype, K) : 1;
        tile->token_scales[vector * LANES + i] = top / 127;
        per_unit[i] = all_floats(1 / unit_of(top, digits));
        for (int d = 0; d < digits; d++) out[d][i] = all_integers(0);
    }
    for (int64_t k = 0; k < K; k += BYTES) {
        for (int i = 0; i < tokens; i++) {
            write_digits(x + i * row, dtype, k, K, per_unit[i], digits, digit_vectors);
            for (int d = 0; d < digits; d++) out[d][i] = digit_vectors[d];
        }
        for (int d = 0; d < digits; d++)
            store_transposed(out[d], tile->digits + (k / 4 * stride + vector * digits + d) * BYTES, stride * BYTES);
    }
}

static void write_offset_sums(const Product *p, const Tile *tile, int vector) {
    int digits = p->weight.digits;
    int64_t stride = (int64_t)tile->vectors * digits * BYTES;
    int64_t size = (p->weight.group_size ? p->weight.group_size : padded_columns(p)) / 4;
    const Integers ones = all_bytes(1);
    for (int64_t g = 0; g < groups_of(p); g++)
        for (int d = 0; d < digits; d++) {
            const int8_t *from = tile->digits + g * size * stride + (vector * digits + d) * BYTES;
            Integers sums[4];
            for (int i = 0; i < 4; i++) sums[i] = all_integers(0);
            for (int64_t k = 0; k < size; k++)
                sums[k % 4] = add_products_of_bytes(sums[k % 4], ones, *(const Integers *)(from + k * stride));
            Integers sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
            tile->offset_sums[(g * tile->vectors + vector) * digits + d] = sum * -offset_of(kind_of(p));
        }
}

// The compiler gets the dtype and the number of digits as constants.
static void write_tokens(const Product *p, const Tile *tile, int vector, const char *x, int64_t tokens) {
    int dtype = p->weight.dtype, digits = p->weight.digits;
    if (dtype == FLOAT32 && digits == 1) write_vector(p, tile, vector, x, tokens, FLOAT32, 1);
    else if (dtype == FLOAT32) write_vector(p, tile, vector, x, tokens, FLOAT32, 3);
    else if (digits == 1) write_vector(p, tile, vector, x, tokens, dtype, 1);
    else write_vector(p, tile, vector, x, tokens, dtype, 2);
    write_offset_sums(p, tile, vector);
}

// The number of rows of the weight whose sums with COUNT vectors of digits stay in registers: 16, 12 or 8 with AVX-512,
// and 12, 6 or 4 with AVX2 and NEON.
#define ROWS_FOR(COUNT) (SUMS / (COUNT) > 16 ? 16 : SUMS / (COUNT))

// Fill `sums` with the products of ROWS rows of a block, from `row` on, and the tokens of a tile.
#define ACCUMULATE(VECTORS, DIGITS)                                                                              \
    static void accumulate_##VECTORS##_##DIGITS(const Product *p, const Tile *tile, const Block *block,          \
                                                int64_t row) {                                                   \
        enum { COUNT = VECTORS * DIGITS, ROWS = ROWS_FOR(COUNT) };                                               \
        int64_t G = groups_of(p), stride = code_stride(p), size = (p->weight.group_size + 3) / 4;                \
        const int8_t *digits = tile->digits;                                                                     \
        const uint8_t *codes = block->codes + row * stride;                                                      \
        if (!size) size = (p->weight.K + 3) / 4;                                                                 \
        for (int64_t g = 0; g < G; g++) {                                                                        \
            Integers products[ROWS][COUNT];                                                                      \
            _Pragma("GCC unroll 16") for (int n = 0; n < ROWS; n++)                                              \
                _Pragma("GCC unroll 3") for (int v = 0; v < COUNT; v++)                                          \
                    products[n][v] = tile->offset_sums[g * COUNT + v];                                               \
            for (int64_t k = 0; k < size; k++, digits += COUNT * BYTES, codes += 4) {                            \
                Integers x[COUNT];                                                                               \
                _Pragma("GCC unroll 3") for (int v = 0; v < COUNT; v++)                                          \
                    x[v] = *(const Integers *)(digits + v * BYTES);                                              \
                _Pragma("GCC unroll 16") for (int n = 0; n < ROWS; n++) {                                        \
                    Integers four = all_integers(*(const int32_t *)(codes + n * stride));                        \
                    _Pragma("GCC unroll 3") for (int v = 0; v < COUNT; v++)                                      \
                        products[n][v] = add_products_of_bytes(products[n][v], four, x[v]);                      \
                }                                                                                                \
            }                                                                                                    \
            _Pragma("GCC unroll 16") for (int n = 0; n < ROWS; n++)                                              \
                _Pragma("GCC unroll 3") for (int v = 0; v < VECTORS; v++) {                                      \
                    float *sum = block->sums + ((row + n) * VECTORS + v) * LANES;                                \
                    Floats before = g ? *(Floats *)sum : all_floats(0);                                          \
                    Floats factor = all_floats(block->scale[(row + n) * G + g]);                                 \
                    Floats product = join_digits(products[n] + v * DIGITS, DIGITS);                              \
                    *(Floats *)sum = multiply_add(product, factor, before);                                      \
                }                                                                                                \
        }                                                                                                        \
    }

ACCUMULATE(1, 3)
ACCUMULATE(1, 2)
ACCUMULATE(3, 1)
ACCUMULATE(2, 1)
ACCUMULATE(1, 1)

static void accumulate(const Product *p, const Tile *tile, const Block *block) {
    int digits = p->weight.digits, vectors = tile->vectors, step = ROWS_FOR(digits * vectors);
    void (*rows)(const Product *, const Tile *, const Block *, int64_t) =
        digits == 3    ? accumulate_1_3
        : digits == 2  ? accumulate_1_2
        : vectors == 3 ? accumulate_3_1
        : vectors == 2 ? accumulate_2_1
                       : accumulate_1_1;
    for (int64_t n = 0; n < BLOCK_ROWS; n += step) rows(p, tile, block, n);
}

static void store_results(const Product *p, const Tile *tile, const Block *block, int64_t token, int64_t first,
                          int64_t rows) {
    const Weight *w = &p->weight;
    for (int v = 0; v < tile->vectors; v++)
        for (int n = 0; n < BLOCK_ROWS; n += LANES) {
            Floats token_scales = *(Floats *)(tile->token_scales + v * LANES);
            Integers sums[LANES];
            for (int i = 0; i < LANES; i++) {
                Floats sum = *(Floats *)(block->sums + ((n + i) * tile->vectors + v) * LANES);
                sums[i] = (Integers)(sum * token_scales);
            }
            store_transposed(sums, (int8_t *)(block->results + v * LANES * BLOCK_ROWS + n), BLOCK_ROWS * 4);
        }
    for (int64_t n = 0; n < rows; n += LANES) {
        Floats bias = p->bias ? load_floats(p->bias, w->dtype, first + n, rows - n) : all_floats(0);
        for (int64_t m = 0; m < tile->tokens; m++) {
            Floats values = *(Floats *)(block->results + m * BLOCK_ROWS + n) + bias;
            store_floats(p->out, w->dtype, (token + m) * w->N + first + n, rows - n, values);
        }
    }
}

// Unpack a vector of codes to bytes. Codes of the next block are fetched into a cache meanwhile, which saves a tenth of
// the time of 16 tokens. An address behind the weight does no harm there.
static inline void copy_vector(const uint8_t *row, const uint8_t *next, int kind, int64_t k, int64_t left,
                               uint8_t *to) {
    __builtin_prefetch(next + (k * bits_of(kind) >> 3), 0, 2);
    *(Integers *)(to + k) = load_codes(row, kind, k, left);
}

static inline __attribute__((always_inline)) void copy_codes(const Product *p, int64_t n, int kind, uint8_t *to) {
    const uint8_t *row = row_of(p, n), *next = row_of(p, n + BLOCK_ROWS);
    int64_t K = p->weight.K, k = 0;
    for (; k + BYTES <= K; k += BYTES) copy_vector(row, next, kind, k, BYTES, to);
    if (k < K) copy_vector(row, next, kind, k, K - k, to);
}

// Multiply the rows of the weight from `first` on with the tokens from `token` on, whose digits the panel holds.
static void multiply_block(const Product *p, int8_t *panel, Block block, int64_t token, int64_t tokens, int64_t first) {
    const Weight *w = &p->weight;
    int64_t rows = least(BLOCK_ROWS, w->N - first);
    for (int64_t n = 0; n < rows; n++) {
        uint8_t *codes = block.codes + n * code_stride(p);
        if (kind_of(p) == BYTE_CODES) copy_codes(p, first + n, BYTE_CODES, codes);
        else if (kind_of(p) == NIBBLES) copy_codes(p, first + n, NIBBLES, codes);
        else copy_codes(p, first + n, INDEXES, codes);
    }
    write_scales_of_rows(p, first, rows, block.scale);
    for (int64_t index = 0; index * tile_tokens(p) < tokens; index++) {
        Tile tile = tile_at(p, panel, index, tokens);
        accumulate(p, &tile, &block);
        store_results(p, &tile, &block, token + index * tile_tokens(p), first, rows);
    }
}

void multiply_many_rows(const Product *p, int threads, int8_t *memory) {
    int64_t step = tiles_at_once(p) * tile_tokens(p), row = p->weight.K * itemsize(p->weight.dtype);
    int8_t *blocks = memory + tiles_at_once(p) * tile_bytes(p);
    for (int64_t token = 0; token < p->M; token += step) {
        int64_t tokens = least(step, p->M - token);
#pragma omp parallel num_threads(threads) if (threads > 1)
        {
#pragma omp for
            for (int64_t m = 0; m < tokens; m += LANES) {
                Tile tile = tile_at(p, memory, m / tile_tokens(p), tokens);
                const char *x = (const char *)p->x + (token + m) * row;
                write_tokens(p, &tile, (int)(m % tile_tokens(p) / LANES), x, least(LANES, tokens - m));
            }
#pragma omp for
            for (int64_t n = 0; n < p->weight.N; n += BLOCK_ROWS)
                multiply_block(p, memory, block_at(p, blocks + thread_index() * block_bytes(p)), token, tokens, n);
        }
    }
}
