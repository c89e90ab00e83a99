// Tokens and rows of the weight as bytes, 64 columns a step.
#include "../bytes/digits.h"
#include "panel.h"

static void measure_digits(const Panel *panel, int64_t tile, const char *x, int64_t tokens) {
    const Weight *w = &panel->product->weight;
    for (int64_t i = 0; i < tokens; i++) {
        float top = largest_magnitude(x + i * w->K * itemsize(w->dtype), w->dtype, w->K);
        panel->token_scales[tile * TILE_ROWS + i] = top / 127;
        panel->per_unit[tile * TILE_ROWS + i] = 1 / unit_of(top, panel->digits);
    }
}

static inline __attribute__((always_inline)) void write_tile(const Panel *panel, int64_t tile, const char *x,
                                                             int64_t tokens, int dtype, int digits) {
    int64_t row = panel->product->weight.K * itemsize(dtype), steps = steps_of(panel, panel->columns);
    const float *per_unit = panel->per_unit + tile * TILE_ROWS;
    int8_t *to = token_tiles(panel, tile);
    Integers digit_vectors[3], out[3][TILE_ROWS];
    for (int d = 0; d < digits; d++)
        for (int i = 0; i < TILE_ROWS; i++) out[d][i] = all_integers(0);
    for (int64_t s = 0; s < steps; s++) {
        int64_t k = panel->column + s * 64, end = panel->column + panel->columns;
        for (int i = 0; i < tokens; i++) {
            write_digits(x + i * row, dtype, k, end, all_floats(per_unit[i]), digits, digit_vectors);
            for (int d = 0; d < digits; d++) out[d][i] = digit_vectors[d];
        }
        for (int d = 0; d < digits; d++) store_transposed(out[d], to + (d * steps + s) * TILE_BYTES, 64);
    }
}

// The compiler gets the dtype and the number of digits as constants.
void write_tokens_as_digits(const Panel *panel, int64_t tile) {
    const Product *p = panel->product;
    int64_t first = panel->token + tile * TILE_ROWS, tokens = least(TILE_ROWS, p->M - first);
    int dtype = p->weight.dtype, digits = panel->digits;
    const char *x = (const char *)p->x + first * p->weight.K * itemsize(dtype);
    if (panel->column == 0) measure_digits(panel, tile, x, tokens);
    if (dtype == FLOAT32 && digits == 1) write_tile(panel, tile, x, tokens, FLOAT32, 1);
    else if (dtype == FLOAT32) write_tile(panel, tile, x, tokens, FLOAT32, 3);
    else if (digits == 1) write_tile(panel, tile, x, tokens, dtype, 1);
    else write_tile(panel, tile, x, tokens, dtype, 2);
}

static inline __attribute__((always_inline)) void write_row(const uint8_t *row, int64_t columns, int bits, int8_t *to) {
    for (int64_t k = 0; k < columns; k += 64, to += TILE_BYTES) {
        Integers codes = load_codes(row, bits, k, columns - k);
        *(Integers *)to = (Integers)_mm512_sub_epi8((__m512i)codes, _mm512_set1_epi8((char)(bits == 8 ? 128 : 8)));
    }
}

void write_rows_as_bytes(const Panel *panel, const Block *block) {
    const Product *p = panel->product;
    int64_t steps = steps_of(panel, panel->columns), skipped = panel->column * p->weight.bits >> 3;
    for (int64_t r = 0; r < least(BLOCK_ROWS, p->weight.N - block->first); r++) {
        const uint8_t *row = row_of(p, block->first + r) + skipped;
        int8_t *to = block->tiles + r / TILE_ROWS * steps * TILE_BYTES + r % TILE_ROWS * 64;
        if (p->weight.bits == 8) write_row(row, panel->columns, 8, to);
        else write_row(row, panel->columns, 4, to);
    }
}
