// What products by tiles share. A block of 32 rows of the weight is the left factor: two tiles of 16 rows, as they lie
// in the file. Tokens are the right factor, 16 in a tile, in the order that tiles want. One instruction multiplies a
// step of each row, 64 bytes: 64 columns as bytes, or 32 as bfloat16.
#pragma once
#include "../bytes/integers.h"
#include "tiles.h"

#define BLOCK_ROWS 32
// Tokens whose products are summed at a time: two tiles.
#define UNIT_TOKENS 32
// Tokens that are held at a time where vectors multiply, which take so long that a third-level cache is fast enough.
#define HELD_BYTES_OF_VECTORS (1 << 23)
// Tests make these small, so that small products have several panels.
#ifndef HELD_BYTES
// The same where tiles do: half of a second-level cache of 2 MB.
#define HELD_BYTES (1 << 20)
// Bytes of a row of a block where not all columns of the tokens fit a panel: so a block of bytes, 40 KB, stays in the
// first-level cache, and of bfloat16, whose columns take twice the bytes, most of it.
#define ROW_BYTES 1280
#define ROW_BYTES_OF_BFLOAT16 1792
#endif
#define MOST_TOKENS 512

// How codes are multiplied.
typedef enum {
    NO_WAY,   // not by panels
    DIGITS,   // with the digits of x, as bytes
    WIDENED,  // as bfloat16, with an x of that dtype
    FLOATS,   // as float32; tiles take pieces of bfloat16, whose sum is the number
} Way;

typedef struct {
    const Product *product;
    Way way;
    int digits;              // of a token; 1 for numbers
    int token_pieces;        // that a number of a token is the sum of, 1 or more
    int row_pieces;          // that a number of a row of the weight is the sum of
    int64_t most_columns;    // of a panel: all of K, or less, in whole groups
    int64_t most_tokens;     // of a panel
    int64_t token, tokens;   // what the panel holds
    int64_t column, columns;
    float *worth;            // [most_tokens]: what their sums are multiplied with; NaN where x is not finite
    float *per_unit;         // [most_tokens]: what x is multiplied with, to be written as digits or pieces
    float *kept;             // [N / 32][most_tokens / 32][PARTS][16][16]: sums between two panels of columns
    int8_t *tiles;           // [tokens / 16][digits][steps][token_pieces] of tokens
    int8_t *blocks;          // of the threads
} Panel;

// What a thread multiplies with a panel.
typedef struct {
    int64_t first;   // of its rows of the weight
    int8_t *tiles;   // [2][steps][row_pieces] of rows; those behind the last row hold anything
    float *scale;    // [BLOCK_ROWS][G], of uint and float8 [BLOCK_ROWS]
    int8_t *row;     // memory for a row of uint
    int8_t *sums;    // [2][SUMS_BYTES]: of a unit and of the next
    float *kept;     // [PARTS][16][16]: sums between one group and the next
    float *results;  // [16 tokens][BLOCK_ROWS]
} Block;

// Parts of a unit, of 16 rows and 16 tokens: [2 of tokens][2 of rows].
#define PARTS 4
#define SUMS_BYTES (PARTS * 3 * TILE_BYTES)

// Whether tiles multiply, and not vectors.
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

// Whether codes are multiplied with their scales before x is: all but those of rows with one scale, which stay exact.
static inline int codes_hold_scales(const Panel *panel) {
    const Weight *w = &panel->product->weight;
    if (panel->way == FLOATS) return !IN_TILES;
    return panel->way == WIDENED && (w->bits != 8 || w->group_size);
}
// Whether a weight has no codes of one byte or half a byte, but those of uint or float8.
static inline int has_other_codes(const Product *p) { return p->weight.code_units || !p->weight.bits; }
// Scales of a row that a block holds: integers of uint have their groups' in them.
static inline int64_t scales_of_row(const Product *p) { return has_other_codes(p) ? 1 : groups_of(p); }

// Whether `prepare` found that tiles may be used; without it an instruction for tiles ends the process.
#ifdef HAS_TILES
extern int tiles_are_granted;
#endif

Panel panel_at(const Product *p, Way way, int8_t *memory);
Block block_at(const Panel *panel, int thread);
int64_t bytes_of_way(const Product *p, Way way, int threads);
void multiply_by_way(const Product *p, Way way, int threads, int8_t *memory);

// Write the tile of 16 tokens from panel->token + 16 * tile on; in the first panel of columns their worth, too.
void write_tokens_as_digits(const Panel *panel, int64_t tile);
void write_tokens_as_bfloat16(const Panel *panel, int64_t tile);
void write_tokens_as_floats(const Panel *panel, int64_t tile);
// Write the rows of a block, as many of them as the weight has.
void write_rows_as_bytes(const Panel *panel, const Block *block);
void write_rows_as_bfloat16(const Panel *panel, const Block *block);
void write_rows_as_numbers(const Panel *panel, const Block *block);

// Write the worth of tokens that are numbers, as they are in x: a sum of 1 stands for `worth`. NaN and infinity make the
// results of integer codes NaN.
static inline void measure_tokens(const Panel *panel, int64_t tile, float worth) {
    const Product *p = panel->product;
    const Weight *w = &p->weight;
    int64_t first = panel->token + tile * TILE_ROWS;
    for (int64_t i = 0; i < least(TILE_ROWS, p->M - first); i++) {
        const char *x = (const char *)p->x + (first + i) * w->K * itemsize(w->dtype);
        float top = w->bits ? largest_magnitude(x, w->dtype, w->K) : 0;
        panel->worth[tile * TILE_ROWS + i] = top != top ? top : worth;
    }
}
