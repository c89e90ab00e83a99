// The number of tokens and columns of a panel, and the layout of its memory.
#include "panel.h"

// Return the pieces of bfloat16, of 8 bits each, that hold a number of a token or of a row of the weight. Codes of
// float8 have 4 significant bits, and the integers of uint 10.
static int pieces_of_token(const Weight *w) { return w->dtype == FLOAT32 ? 3 : 2; }
static int pieces_of_row(const Weight *w) { return w->code_units ? 2 : 1; }

// Return the columns of a panel. They are all columns if vectors multiply, or if all columns of all tokens fit a panel.
// Otherwise panels of about equal size, of full groups, have at most the columns that a row of a block may have.
static int64_t most_columns(const Panel *panel, int64_t column_bytes) {
    const Product *p = panel->product;
    int64_t K = p->weight.K, all = round_up(K, 64), whole = group_columns(p);
    if (!IN_TILES || round_up(p->M, TILE_ROWS) * all * column_bytes <= HELD_BYTES) return all;
    int64_t most = panel->way == DIGITS ? ROW_BYTES : ROW_BYTES_OF_BFLOAT16 / 2 / panel->row_pieces;
    int64_t panels = (K + most - 1) / most;
    int has_groups = p->weight.group_size > 64 && !p->weight.family;
    return least(all, round_up((K + panels - 1) / panels, has_groups ? whole : 64));
}

static int64_t most_tokens(const Product *p, int64_t token_bytes) {
    int64_t held = IN_TILES ? HELD_BYTES : HELD_BYTES_OF_VECTORS;
    int64_t fit = held / token_bytes / UNIT_TOKENS * UNIT_TOKENS;
    return least(fit < UNIT_TOKENS ? UNIT_TOKENS : least(fit, MOST_TOKENS), round_up(p->M, TILE_ROWS));
}

Panel panel_at(const Product *p, Way way, int8_t *memory) {
    const Weight *w = &p->weight;
    Panel panel = {.product = p, .way = way, .digits = way == DIGITS ? w->digits : 1};
    panel.token_pieces = is_in_pieces(way) ? pieces_of_token(w) : 1;
    panel.row_pieces = is_in_pieces(way) ? pieces_of_row(w) : 1;
    int64_t column_bytes = panel.digits * panel.token_pieces * 64 / step_columns(way);
    int64_t blocks = (w->N + BLOCK_ROWS - 1) / BLOCK_ROWS;
    panel.most_columns = most_columns(&panel, column_bytes);
    panel.most_tokens = most_tokens(p, panel.most_columns * column_bytes);
    int64_t units = panel.most_columns < w->K ? (panel.most_tokens + UNIT_TOKENS - 1) / UNIT_TOKENS * blocks : 0;
    panel.token_scales = (float *)memory;
    panel.per_unit = panel.token_scales + panel.most_tokens;
    panel.partial_sums = panel.per_unit + panel.most_tokens;
    panel.tiles = (int8_t *)panel.partial_sums + units * QUARTERS * TILE_BYTES;
    panel.blocks = panel.tiles + panel.most_tokens * panel.most_columns * column_bytes;
    return panel;
}

// Return the number of tiles that a block's rows take.
static int64_t row_tiles(const Panel *panel) { return 2 * steps_of(panel, panel->most_columns) * panel->row_pieces; }

static int64_t block_bytes(const Panel *panel) {
    const Product *p = panel->product;
    int64_t row = p->weight.family ? groups_bytes(p) : 0;
    if (p->weight.code_units) row = round_up(uint_row_bytes(p), ALIGNMENT);
    return (row_tiles(panel) + QUARTERS + 2) * TILE_BYTES + 2 * SUMS_BYTES + BLOCK_ROWS * scales_of_row(p) * 4 + row;
}

Block block_at(const Panel *panel, int thread) {
    Block block = {.tiles = panel->blocks + thread * block_bytes(panel)};
    block.sums = block.tiles + row_tiles(panel) * TILE_BYTES;
    block.partial_sums = (float *)(block.sums + 2 * SUMS_BYTES);
    block.results = block.partial_sums + QUARTERS * TILE_BYTES / 4;
    block.scale = block.results + 2 * TILE_BYTES / 4;
    block.row = (int8_t *)(block.scale + BLOCK_ROWS * scales_of_row(panel->product));
    return block;
}

int64_t bytes_of_way(const Product *p, Way way, int threads) {
    Panel panel = panel_at(p, way, NULL);
    return panel.blocks - (int8_t *)NULL + threads * block_bytes(&panel);
}
