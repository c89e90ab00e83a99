// Tokens as float32, 16 columns a step, and rows of uint and float8 weights as float32 or bfloat16.
#include "panel.h"

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

// Write 32 numbers of a row, and return where its next numbers go.
static inline __attribute__((always_inline)) int8_t *write_numbers(const Floats numbers[2], Way way, int8_t *to) {
#ifdef __AVX512BF16__
    if (way == WIDENED) {
        *(Integers *)to = (Integers)_mm512_cvtne2ps_pbh(numbers[1], numbers[0]);
        return to + TILE_BYTES;
    }
#endif
    (void)way;
    *(Floats *)to = numbers[0];
    *(Floats *)(to + TILE_BYTES) = numbers[1];
    return to + 2 * TILE_BYTES;
}

static inline __attribute__((always_inline)) void write_uint(const Panel *panel, int64_t n, Way way, int8_t *memory,
                                                             int8_t *to) {
    Floats scale = all_floats(row_scale(panel->product, n)), numbers[2];
    const int16_t *row = write_uint_row(panel->product, n, panel->column, panel->columns, memory);
    for (int64_t k = 0; k < round_up(panel->columns, 64); k += 2 * LANES) {
        for (int i = 0; i < 2; i++) {
            __m256i words = _mm256_loadu_si256((const __m256i *)(row + k + i * LANES));
            numbers[i] = to_floats((Integers)_mm512_cvtepi16_epi32(words)) * scale;
        }
        to = write_numbers(numbers, way, to);
    }
}

static inline __attribute__((always_inline)) void write_float8(const Panel *panel, int64_t n, Way way, int8_t *to) {
    Floats scale = all_floats(256 * row_scale(panel->product, n)), numbers[2];
    const uint8_t *codes = panel->product->qdata + n * panel->product->weight.K + panel->column;
    for (int64_t k = 0, end = panel->columns; k < round_up(end, 64); k += 2 * LANES) {
        fetch_ahead(codes + k);
        load_float8(codes + k, end > k ? end - k : 0, numbers);
        for (int i = 0; i < 2; i++) numbers[i] *= scale;
        to = write_numbers(numbers, way, to);
    }
}

// The way is a constant in each case.
void write_rows_as_numbers(const Panel *panel, const Block *block) {
    const Weight *w = &panel->product->weight;
    int64_t steps = steps_of(panel, panel->columns);
    for (int64_t r = 0; r < least(BLOCK_ROWS, w->N - block->first); r++) {
        int64_t n = block->first + r;
        int8_t *to = block->tiles + r / TILE_ROWS * steps * TILE_BYTES + r % TILE_ROWS * BYTES;
        if (w->code_units && panel->way == WIDENED) write_uint(panel, n, WIDENED, (int8_t *)block->scale, to);
        else if (w->code_units) write_uint(panel, n, FLOATS, (int8_t *)block->scale, to);
        else if (panel->way == WIDENED) write_float8(panel, n, WIDENED, to);
        else write_float8(panel, n, FLOATS, to);
    }
}
