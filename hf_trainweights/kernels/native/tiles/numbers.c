// Tokens and rows written as numbers. Tokens become float32, 16 columns a step, or pieces of bfloat16 whose sums are
// numbers of float32 or float16, 32 columns a step. Rows of uint and float8 become float32, bfloat16 or pieces.
#include "pieces.h"

#ifdef HAS_TILES
// Return the largest power of two up to a number, and at most 2^126, so that 1 / unit is no subnormal number.
static inline float power_of_two(float number) {
    uint32_t bits;
    memcpy(&bits, &number, 4);
    bits &= 0x7f800000;
    memcpy(&number, &bits, 4);
    return number > 0x1p126f ? 0x1p126f : number;
}

// Write the power of two that each token is divided by. Tiles take numbers below 2^-126 as 0, and would lose small
// pieces without it. A token that is not finite stays as it is with float8, so that its products are those of float32.
static void measure_pieces(const Panel *panel, int64_t tile, const char *x, int64_t tokens) {
    const Weight *w = &panel->product->weight;
    for (int64_t i = 0; i < tokens; i++) {
        float top = largest_magnitude(x + i * w->K * itemsize(w->dtype), w->dtype, w->K);
        int is_finite = top == top;
        float unit = is_finite ? power_of_two(top) : 1;
        panel->token_scales[tile * TILE_ROWS + i] = is_finite || !w->bits ? unit : top;
        panel->per_unit[tile * TILE_ROWS + i] = 1 / unit;
    }
}

static inline __attribute__((always_inline)) void write_tile(const Panel *panel, int64_t tile, const char *x,
                                                             int64_t tokens, int dtype, int pieces) {
    const int64_t K = panel->product->weight.K, end = panel->column + panel->columns;
    const float *per_unit = panel->per_unit + tile * TILE_ROWS;
    int8_t *to = token_tiles(panel, tile);
    Integers out[3][TILE_ROWS];
    for (int t = 0; t < pieces; t++)
        for (int i = 0; i < TILE_ROWS; i++) out[t][i] = all_integers(0);
    for (int64_t k = panel->column; k < round_up(end, 64); k += 2 * LANES) {
        for (int i = 0; i < tokens; i++) {
            Floats numbers[2];
            for (int half = 0; half < 2; half++) {
                int64_t column = k + half * LANES;
                numbers[half] = load_floats(x, dtype, i * K + column, end - column) * all_floats(per_unit[i]);
            }
            for (int t = 0; t < pieces; t++) out[t][i] = take_piece(numbers);
        }
        for (int t = 0; t < pieces; t++, to += TILE_BYTES) store_transposed(out[t], to, BYTES);
    }
}

// The compiler gets the dtype and the number of pieces as constants.
void write_tokens_as_floats(const Panel *panel, int64_t tile) {
    const Product *p = panel->product;
    int64_t first = panel->token + tile * TILE_ROWS, tokens = least(TILE_ROWS, p->M - first);
    const char *x = (const char *)p->x + first * p->weight.K * itemsize(p->weight.dtype);
    if (panel->column == 0) measure_pieces(panel, tile, x, tokens);
    if (p->weight.dtype == FLOAT32) write_tile(panel, tile, x, tokens, FLOAT32, 3);
    else write_tile(panel, tile, x, tokens, FLOAT16, 2);
}
#else
void write_tokens_as_floats(const Panel *panel, int64_t tile) {
    const Product *p = panel->product;
    const Weight *w = &p->weight;
    int64_t first = panel->token + tile * TILE_ROWS, tokens = least(TILE_ROWS, p->M - first);
    int8_t *to = token_tiles(panel, tile);
    Floats numbers[TILE_ROWS];
    measure_tokens(panel, tile, 1);
    for (int i = 0; i < TILE_ROWS; i++) numbers[i] = all_floats(0);
    for (int64_t k = 0; k < round_up(w->K, 64); k += LANES, to += TILE_BYTES) {
        for (int i = 0; i < tokens; i++) numbers[i] = load_floats(p->x, w->dtype, (first + i) * w->K + k, w->K - k);
        store_transposed((const Integers *)numbers, to, BYTES);
    }
}
#endif

static inline __attribute__((always_inline)) void write_uint(const Panel *panel, int64_t n, Way way, float factor,
                                                             int8_t *memory, int8_t *to) {
    Floats scale = all_floats(factor), numbers[2];
    const int16_t *row = write_uint_row(panel->product, n, panel->column, panel->columns, memory);
    for (int64_t k = 0, end = round_up(panel->columns, 64); k < end; k += 2 * LANES) {
        for (int i = 0; i < 2; i++) {
            __m256i words = _mm256_loadu_si256((const __m256i *)(row + k + i * LANES));
            numbers[i] = to_floats((Integers)_mm512_cvtepi16_epi32(words)) * scale;
        }
        to = write_numbers(numbers, way, 2, to);
    }
}

static inline __attribute__((always_inline)) void write_float8(const Panel *panel, int64_t n, Way way, float factor,
                                                               int8_t *to) {
    Floats scale = all_floats(factor), numbers[2];
    const uint8_t *codes = panel->product->qdata + n * panel->product->weight.K + panel->column;
    for (int64_t k = 0, end = panel->columns; k < round_up(end, 64); k += 2 * LANES) {
        fetch_ahead(codes + k);
        load_float8(codes + k, end > k ? end - k : 0, numbers);
        for (int i = 0; i < 2; i++) numbers[i] *= scale;
        to = write_numbers(numbers, way, 1, to);
    }
}

// The compiler gets the way as a constant.
void write_rows_as_numbers(const Panel *panel, const Block *block) {
    const Weight *w = &panel->product->weight;
    int64_t tiles = steps_of(panel, panel->columns) * panel->row_pieces;
    for (int64_t r = 0; r < least(BLOCK_ROWS, w->N - block->first); r++) {
        int64_t n = block->first + r;
        int8_t *to = block->tiles + r / TILE_ROWS * tiles * TILE_BYTES + r % TILE_ROWS * BYTES;
        block->scale[r] = row_scale(panel->product, n) * (w->code_units ? 1 : 256);
        float factor = codes_hold_scales(panel) ? block->scale[r] : 1;
        if (w->code_units && panel->way == WIDENED) write_uint(panel, n, WIDENED, factor, block->row, to);
        else if (w->code_units) write_uint(panel, n, FLOATS, factor, block->row, to);
        else if (panel->way == WIDENED) write_float8(panel, n, WIDENED, factor, to);
        else write_float8(panel, n, FLOATS, factor, to);
    }
}
