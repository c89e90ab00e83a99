// Products of blocks of 32 rows of the weight with all tokens of a panel. The sums of a block with a unit of 32 tokens
// are finished quarter by quarter between the steps of the next unit, while tiles multiply.
#include "../bytes/digits.h"
#include "in_vectors.h"
#include "panel.h"

// Sums of a unit that are still to be finished: to be scaled, added to the partial sums of earlier columns, and stored
// as results or, if more columns follow, as partial sums.
typedef struct {
    int next, count;                    // the next quarter of the unit to finish, and the number of quarters
    int begins, ends;                   // whether these columns are the first ones of a row, and the last ones
    int64_t first, token, tokens;       // the first row of the weight, the first token, and the tokens of x from it on
    const float *scale, *token_scales;  // of the first row and token
    int64_t scales;                     // the distance of the scales of two rows
    const int8_t *sums;                 // [2 of tokens][digits][2 of rows], tiles
    Floats *partial_sums;               // [QUARTERS][TILE_ROWS]
    float *results;                     // [TILE_ROWS of tokens][BLOCK_ROWS]
} Pending;

static void store_results(const Product *p, const Pending *pending, int64_t tile) {
    const Weight *w = &p->weight;
    int64_t tokens = least(TILE_ROWS, pending->tokens - tile * TILE_ROWS), left = w->N - pending->first;
    for (int64_t n = 0; n < BLOCK_ROWS; n += LANES) {
        Floats bias = p->bias ? load_floats(p->bias, w->dtype, pending->first + n, left - n) : all_floats(0);
        for (int64_t i = 0; i < tokens; i++) {
            Floats token_scale = all_floats(pending->token_scales[tile * TILE_ROWS + i]);
            Floats values = multiply_add(*(Floats *)(pending->results + i * BLOCK_ROWS + n), token_scale, bias);
            int64_t token = pending->token + tile * TILE_ROWS + i;
            store_floats(p->out, w->dtype, token * w->N + pending->first + n, left - n, values);
        }
    }
}

static inline __attribute__((always_inline)) void finish(const Product *p, Pending *pending, Way way, int digits) {
    int quarter = pending->next++, tile = quarter / 2, half = quarter % 2;
    const int8_t *from = pending->sums + (tile * digits * 2 + half) * TILE_BYTES;
    const float *scale = pending->scale + half * TILE_ROWS * pending->scales;
    Floats *partial_sums = pending->partial_sums + quarter * TILE_ROWS, sums[TILE_ROWS];
    Floats *to = pending->ends ? sums : partial_sums;
    for (int i = 0; i < TILE_ROWS; i++, from += 64) {
        Integers products[3];
        for (int d = 0; d < digits; d++) products[d] = *(const Integers *)(from + d * 2 * TILE_BYTES);
        Floats sum = way == DIGITS ? join_digits(products, digits) : *(const Floats *)from;
        Floats before = pending->begins ? all_floats(0) : partial_sums[i];
        to[i] = multiply_add(sum, all_floats(scale[i * pending->scales]), before);
    }
    if (!pending->ends) return;
    store_transposed((const Integers *)sums, (int8_t *)(pending->results + half * TILE_ROWS), BLOCK_ROWS * 4);
    if (half) store_results(p, pending, tile);
}

#ifdef HAS_TILES
#define ADD_PRODUCTS(C, A, B)                                           \
    do {                                                                \
        if (way == DIGITS) add_products_of_bytes_in_tiles(C, A, B);     \
        else add_products_of_bfloat16_in_tiles(C, A, B);                \
    } while (0)

// Fill two tiles of sums with the products of both tiles of rows and one tile of tokens over some steps, or four tiles
// with two of tokens. The two tiles of rows lie `stride` bytes times their pieces apart, and so do those of tokens. A
// piece holds 8 bits: products of the last pieces of a row with the last ones of a token are too small for float32.
static inline __attribute__((always_inline)) void multiply_tiles(const Panel *panel, const int8_t *rows,
                                                                 const int8_t *tokens, int64_t stride, int is_pair,
                                                                 int64_t steps, int8_t *sums, Pending *pending,
                                                                 Way way, int digits) {
    // Both are the constant 1 for the compiler unless numbers are written as pieces.
    int of_row = is_in_pieces(way) ? panel->row_pieces : 1, of_token = is_in_pieces(way) ? panel->token_pieces : 1;
    finish_stores(rows);
    zero_tile(0);
    zero_tile(1);
    zero_tile(2);
    zero_tile(3);
    for (int64_t s = 0; s < steps; s++) {
        for (int r = 0; r < of_row; r++)
            for (int t = 0; t < of_token - r; t++) {
                const int8_t *row = rows + (s * of_row + r) * TILE_BYTES;
                const int8_t *token = tokens + (s * of_token + t) * TILE_BYTES;
                stream_tile(6, token);
                if (t == 0) load_tile(4, row);
                ADD_PRODUCTS(0, 4, 6);
                if (t == 0) load_tile(5, row + of_row * stride);
                ADD_PRODUCTS(1, 5, 6);
                if (is_pair) {
                    stream_tile(7, token + of_token * stride);
                    ADD_PRODUCTS(2, 4, 7);
                    ADD_PRODUCTS(3, 5, 7);
                }
            }
        if (pending->next < pending->count) finish(panel->product, pending, way, digits);
    }
    store_tile(0, sums);
    store_tile(1, sums + TILE_BYTES);
    if (is_pair) {
        store_tile(2, sums + 2 * TILE_BYTES);
        store_tile(3, sums + 3 * TILE_BYTES);
    }
}
#endif

// Fetch some rows of the next block into a cache, a share of them in each unit, and the memory that the results of this
// unit go to. An address behind the weight does no harm there.
static void fetch(const Panel *panel, int64_t first, int64_t unit) {
    const Product *p = panel->product;
    const Weight *w = &p->weight;
    int64_t units = (panel->tokens + UNIT_TOKENS - 1) / UNIT_TOKENS, share = (BLOCK_ROWS + units - 1) / units;
    for (int64_t r = unit * share; r < least(BLOCK_ROWS, (unit + 1) * share); r++) {
        const uint8_t *row = row_of(p, first + BLOCK_ROWS + r) + (panel->column * w->bits >> 3);
        for (int64_t i = 0; i < panel->columns * w->bits >> 3; i += 64) __builtin_prefetch(row + i, 0, 2);
    }
    if (panel->column + panel->columns < w->K) return;
    for (int64_t m = unit * UNIT_TOKENS; m < least(panel->tokens, (unit + 1) * UNIT_TOKENS); m++) {
        const char *out = (const char *)p->out + ((panel->token + m) * w->N + first) * itemsize(w->dtype);
        for (int64_t i = 0; i < BLOCK_ROWS * itemsize(w->dtype); i += 64) __builtin_prefetch(out + i, 1, 3);
    }
}

// Describe the sums of a unit over `count` steps from `step` on as pending.
static Pending pending_of(const Panel *panel, const Block *block, int64_t unit, int64_t step, int64_t count,
                          const int8_t *sums) {
    static const float one = 1;
    const Product *p = panel->product;
    int64_t column = panel->column + step * step_columns(panel->way), end = panel->column + panel->columns;
    int64_t units = (panel->most_tokens + UNIT_TOKENS - 1) / UNIT_TOKENS, first = unit * UNIT_TOKENS;
    Pending pending = {.first = block->first, .token = panel->token + first, .tokens = panel->tokens - first};
    pending.count = pending.tokens > TILE_ROWS ? QUARTERS : QUARTERS / 2;
    pending.begins = column == 0;
    pending.ends = end == p->weight.K && step + count == steps_of(panel, panel->columns);
    pending.scale = &one;
    if (!codes_hold_scales(panel)) {
        pending.scales = scales_of_row(p);
        pending.scale = block->scale + (pending.scales > 1 ? column / group_columns(p) : 0);
    }
    pending.token_scales = panel->token_scales + first;
    pending.sums = sums;
    pending.partial_sums = (Floats *)block->partial_sums;
    int64_t unit_index = block->first / BLOCK_ROWS * units + unit;
    if (panel->most_columns < p->weight.K)
        pending.partial_sums = (Floats *)panel->partial_sums + unit_index * QUARTERS * TILE_ROWS;
    pending.results = block->results;
    return pending;
}

static inline __attribute__((always_inline)) void multiply_block(const Panel *panel, const Block *block, Way way,
                                                                 int digits) {
    const Product *p = panel->product;
    int64_t steps = steps_of(panel, panel->columns), stride = steps * TILE_BYTES;
    // Sums of bytes are scaled group by group. Sums of bfloat16 and float32 are scaled when they are complete.
    int64_t most = is_in_pieces(way) ? STEPS_AT_ONCE : steps;
    if (way == DIGITS && groups_of(p) > 1) most = group_columns(p) / 64;
    int8_t *sums = block->sums, *others = block->sums + SUMS_BYTES;
    Pending pending = {.count = 0};
    for (int64_t unit = 0; unit * UNIT_TOKENS < panel->tokens; unit++) {
        int columns = digits * (panel->tokens - unit * UNIT_TOKENS > TILE_ROWS ? 2 : 1);
        fetch(panel, block->first, unit);
        for (int64_t step = 0, count; step < steps; step += count) {
            count = least(most, steps - step);
            const int8_t *tokens = token_tiles(panel, 2 * unit) + step * panel->token_pieces * TILE_BYTES;
            const int8_t *rows = block->tiles + step * panel->row_pieces * TILE_BYTES;
#ifdef HAS_TILES
            for (int i = 0; i < columns; i += 2, tokens += 2 * stride)
                multiply_tiles(panel, rows, tokens, stride, columns - i > 1, count, sums + 2 * i * TILE_BYTES,
                               &pending, way, digits);
#else
            multiply_in_vectors(rows, tokens, stride, columns > 1, count, way, sums);
#endif
            while (pending.next < pending.count) finish(p, &pending, way, digits);
            pending = pending_of(panel, block, unit, step, count, sums);
            int8_t *free = others;
            others = sums;
            sums = free;
        }
    }
    while (pending.next < pending.count) finish(p, &pending, way, digits);
}

// The compiler gets the way and the number of digits as constants.
#define CASE(WAY, DIGITS_)                                                                      \
    static void multiply_block_##WAY##_##DIGITS_(const Panel *panel, const Block *block) {      \
        multiply_block(panel, block, WAY, DIGITS_);                                             \
    }
CASE(FLOATS, 1)
#ifdef __AVX512BF16__
CASE(WIDENED, 1)
#endif
#ifdef HAS_TILES
CASE(DIGITS, 1)
CASE(DIGITS, 2)
CASE(DIGITS, 3)
#endif

static void write_tokens(const Panel *panel, int64_t tile) {
    if (panel->way == FLOATS) write_tokens_as_floats(panel, tile);
#ifdef __AVX512BF16__
    if (panel->way == WIDENED) write_tokens_as_bfloat16(panel, tile);
#endif
#ifdef HAS_TILES
    if (panel->way == DIGITS) write_tokens_as_digits(panel, tile);
#endif
}

// Write rows of the weight, and multiply them with the tokens that the panel holds.
static void write_and_multiply(const Panel *panel, const Block *block) {
    if (panel->product->weight.family) write_imported_rows(panel, block);
    else if (has_other_codes(panel->product)) write_rows_as_numbers(panel, block);
    if (panel->way == FLOATS) multiply_block_FLOATS_1(panel, block);
#ifdef __AVX512BF16__
    if (panel->way == WIDENED) {
        if (!has_other_codes(panel->product)) write_rows_as_bfloat16(panel, block);
        multiply_block_WIDENED_1(panel, block);
    }
#endif
#ifdef HAS_TILES
    if (panel->way != DIGITS) return;
    write_rows_as_bytes(panel, block);
    if (panel->digits == 1) multiply_block_DIGITS_1(panel, block);
    else if (panel->digits == 2) multiply_block_DIGITS_2(panel, block);
    else multiply_block_DIGITS_3(panel, block);
#endif
}

// Multiply the rows of the weight from `first` on with the tokens that the panel holds.
static void multiply_rows(const Panel *panel, int64_t first) {
    const Weight *w = &panel->product->weight;
    Block block = block_at(panel, thread_index());
    block.first = first;
    if (!has_other_codes(panel->product))
        write_scales_of_rows(panel->product, first, least(BLOCK_ROWS, w->N - first), block.scale);
    write_and_multiply(panel, &block);
}

static void multiply_panel(const Panel *panel, int threads) {
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for
        for (int64_t tile = 0; tile < (panel->tokens + TILE_ROWS - 1) / TILE_ROWS; tile++) write_tokens(panel, tile);
        begin_tiles();
#pragma omp for
        for (int64_t n = 0; n < panel->product->weight.N; n += BLOCK_ROWS) multiply_rows(panel, n);
        end_tiles();
    }
}

void multiply_by_way(const Product *p, Way way, int threads, int8_t *memory) {
    Panel panel = panel_at(p, way, memory);
    for (int64_t token = 0; token < p->M; token += panel.most_tokens)
        for (int64_t column = 0; column < p->weight.K; column += panel.most_columns) {
            panel.token = token;
            panel.tokens = least(panel.most_tokens, p->M - token);
            panel.column = column;
            panel.columns = least(panel.most_columns, p->weight.K - column);
            multiply_panel(&panel, threads);
        }
}
