// Definitions for products by panels. A panel is a copy of up to 512 tokens, or of some of their columns, in the order
// in which tiles take them, 16 tokens to a tile. It is the right factor. A block of 32 rows of the weight is the left
// factor: two tiles of 16 rows, in the order of the file. A block is unpacked once and multiplied with the panel by
// units of 32 tokens. One instruction multiplies a step, 64 bytes of each row: 64 columns as bytes, or 32 as bfloat16.
#pragma once
#include "../bytes/integers.h"
#include "tiles.h"

#define BLOCK_ROWS 32
// The tokens of a unit, whose products are summed at a time: two tiles.
#define UNIT_TOKENS 32
// Tests make these small, so that small products have several panels.
#ifndef HELD_BYTES
// Bytes of a panel that tiles multiply: half of a second-level cache of 2 MB.
#define HELD_BYTES (1 << 20)
// Bytes of a row of a block if not all columns of the tokens fit a panel. So a block of bytes, 40 KB, stays in the
// first-level cache, and most of a block of bfloat16 does, whose columns take twice the bytes.
#define ROW_BYTES 1280
#define ROW_BYTES_OF_BFLOAT16 1792
#endif
#define MOST_TOKENS 512

// The way in which codes are multiplied.
typedef enum {
    NO_WAY,   // not by panels
    DIGITS,   // as bytes, with the digits of x
    WIDENED,  // as bfloat16, with an x of that dtype
    FLOATS,   // as float32; for tiles each number is written as pieces of bfloat16, whose sum it is
} Way;

typedef struct {
    const Product *product;
    Way way;
    int digits;             // of a token; 1 for numbers
    int token_pieces;       // pieces of each number of a token, 1 or more
    int row_pieces;         // pieces of each number of a row of the weight
    int64_t most_columns;   // of any panel: all of K, or fewer, in full groups
    int64_t most_tokens;    // of any panel
    int64_t token, tokens;  // the first token of this panel, and their number
    int64_t column, columns;
    float *token_scales;    // [most_tokens]; NaN if x is not finite
    float *per_unit;        // [most_tokens]: the factors that x is multiplied by before it becomes digits or pieces
    float *partial_sums;    // [N / 32][most_tokens / 32][QUARTERS][16][16]: sums over the panels of earlier columns
    int8_t *tiles;          // [tokens / 16][digits][steps][token_pieces] of tokens
    int8_t *blocks;         // of the threads
} Panel;

// A thread's memory for a block of rows and their products with a panel.
typedef struct {
    int64_t first;        // row of the weight
    int8_t *tiles;        // [2][steps][row_pieces] of rows; behind the last row of the weight they hold any bytes
    float *scale;         // [BLOCK_ROWS][G], for uint, float8 and formats of other programs [BLOCK_ROWS]
    int8_t *row;          // memory for a row of uint, or for the groups of a row of other programs
    int8_t *sums;         // [2][SUMS_BYTES]: of a unit and of the next
    float *partial_sums;  // [QUARTERS][16][16]: sums over earlier groups
    float *results;       // [16 tokens][BLOCK_ROWS]
} Block;

// Quarters of a unit, of 16 rows and 16 tokens: [2 of tokens][2 of rows].
#define QUARTERS 4
#define SUMS_BYTES (QUARTERS * 3 * TILE_BYTES)

// Whether tiles multiply; otherwise vectors do.
#ifdef HAS_TILES
#define IN_TILES 1
#else
#define IN_TILES 0
#endif

static inline int64_t step_columns(Way way) { return way == DIGITS ? 64 : way == WIDENED || IN_TILES ? 32 : 16; }
static inline int is_in_pieces(Way way) { return IN_TILES && way == FLOATS; }
static inline int64_t steps_of(const Panel *panel, int64_t columns) {
    return round_up(columns, 64) / step_columns(panel->way);
}
static inline int8_t *token_tiles(const Panel *panel, int64_t tile) {
    return panel->tiles + tile * panel->digits * panel->token_pieces * steps_of(panel, panel->columns) * TILE_BYTES;
}
// Columns that share a scale.
static inline int64_t group_columns(const Product *p) {
    return p->weight.group_size ? p->weight.group_size : round_up(p->weight.K, 64);
}

// Whether codes are multiplied by their scales before they are multiplied with x. The codes of a row with one scale are
// not, so that they stay exact.
static inline int codes_hold_scales(const Panel *panel) {
    const Weight *w = &panel->product->weight;
    if (panel->way == FLOATS) return !IN_TILES;
    return panel->way == WIDENED && (w->family || w->bits != 8 || w->group_size);
}
// Whether codes are written as numbers that hold the scales of groups: those of uint, float8 and other programs. The
// others are integers of one byte or half a byte.
static inline int has_other_codes(const Product *p) {
    return p->weight.code_units || !p->weight.bits || p->weight.family;
}
// Whether a step of bfloat16 has the even columns of 64, and the next one the odd ones, as nibbles lie in bytes.
static inline int is_in_nibbles(const Product *p) {
    const Weight *w = &p->weight;
    int64_t size = w->group_size;
    if (w->family) return w->bits == 4 && (size == 16 || size == 32 || (size && size % 64 == 0));
    return w->bits == 4 && !w->code_units;
}
// The number of scales of a row in a block. The integers of uint contain the scales of their groups.
static inline int64_t scales_of_row(const Product *p) { return has_other_codes(p) ? 1 : groups_of(p); }

// Whether `prepare` has found that tiles may be used. If they may not, an instruction for tiles ends the process.
#ifdef HAS_TILES
extern int tiles_are_granted;
#endif

Panel panel_at(const Product *p, Way way, int8_t *memory);
Block block_at(const Panel *panel, int thread);
int64_t bytes_of_way(const Product *p, Way way, int threads);
void multiply_by_way(const Product *p, Way way, int threads, int8_t *memory);

// Write the tile of 16 tokens from panel->token + 16 * tile on, and for the first panel of columns their token scales.
void write_tokens_as_digits(const Panel *panel, int64_t tile);
void write_tokens_as_bfloat16(const Panel *panel, int64_t tile);
void write_tokens_as_floats(const Panel *panel, int64_t tile);
// Write the rows of a block, up to the last one of the weight.
void write_rows_as_bytes(const Panel *panel, const Block *block);
void write_rows_as_bfloat16(const Panel *panel, const Block *block);
void write_rows_as_numbers(const Panel *panel, const Block *block);
void write_imported_rows(const Panel *panel, const Block *block);
// Memory for the groups of a row of a format of another program.
int64_t groups_bytes(const Product *p);

// Write the token scales of tokens that are written as the numbers of x: all are `token_scale`, but NaN if codes are
// integers and x is not finite, which makes the results NaN.
static inline void measure_tokens(const Panel *panel, int64_t tile, float token_scale) {
    const Product *p = panel->product;
    const Weight *w = &p->weight;
    int64_t first = panel->token + tile * TILE_ROWS;
    for (int64_t i = 0; i < least(TILE_ROWS, p->M - first); i++) {
        const char *x = (const char *)p->x + (first + i) * w->K * itemsize(w->dtype);
        float top = w->bits ? largest_magnitude(x, w->dtype, w->K) : 0;
        panel->token_scales[tile * TILE_ROWS + i] = top != top ? top : token_scale;
    }
}
