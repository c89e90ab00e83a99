// How many tokens and columns a panel has, and where in memory everything is.
#include "panel.h"

// Columns of a panel: all, if vectors multiply or those of all tokens fit it, else equal parts of whole groups that a
// block's rows fit.
static int64_t most_columns(const Product *p, Way way, int64_t column_bytes) {
    int64_t K = p->weight.K, all = round_up(K, 64), whole = group_columns(p);
    if (!is_in_tiles(way) || round_up(p->M, TILE_ROWS) * all * column_bytes <= HELD_BYTES) return all;
    int64_t most = way == DIGITS ? ROW_BYTES : ROW_BYTES_OF_BFLOAT16 / 2, parts = (K + most - 1) / most;
    return least(all, round_up((K + parts - 1) / parts, p->weight.group_size > 64 ? whole : 64));
}

static int64_t most_tokens(const Product *p, Way way, int64_t token_bytes) {
    int64_t held = is_in_tiles(way) ? HELD_BYTES : HELD_BYTES_OF_VECTORS;
    int64_t fit = held / token_bytes / UNIT_TOKENS * UNIT_TOKENS;
    return least(fit < UNIT_TOKENS ? UNIT_TOKENS : least(fit, MOST_TOKENS), round_up(p->M, TILE_ROWS));
}

Panel panel_at(const Product *p, Way way, int8_t *memory) {
    Panel panel = {.product = p, .way = way, .digits = way == DIGITS ? p->weight.digits : 1};
    int64_t column_bytes = way == DIGITS ? panel.digits : 64 / step_columns(way), blocks = (p->weight.N + BLOCK_ROWS - 1) / BLOCK_ROWS;
    panel.most_columns = most_columns(p, way, column_bytes);
    panel.most_tokens = most_tokens(p, way, panel.most_columns * column_bytes);
    int64_t units = panel.most_columns < p->weight.K ? (panel.most_tokens + UNIT_TOKENS - 1) / UNIT_TOKENS * blocks : 0;
    panel.worth = (float *)memory;
    panel.per_unit = panel.worth + panel.most_tokens;
    panel.kept = panel.per_unit + panel.most_tokens;
    panel.tiles = (int8_t *)panel.kept + units * PARTS * TILE_BYTES;
    panel.blocks = panel.tiles + panel.most_tokens * panel.most_columns * column_bytes;
    return panel;
}

static int64_t scale_bytes(const Product *p) {
    if (p->weight.code_units) return round_up(uint_row_bytes(p), ALIGNMENT);
    return round_up(BLOCK_ROWS * groups_of(p) * 4, ALIGNMENT);
}

static int64_t block_bytes(const Panel *panel) {
    const Product *p = panel->product;
    int64_t steps = steps_of(panel, panel->most_columns);
    return (2 * steps + PARTS + 2) * TILE_BYTES + 2 * SUMS_BYTES + scale_bytes(p);
}

Block block_at(const Panel *panel, int thread) {
    Block block = {.tiles = panel->blocks + thread * block_bytes(panel)};
    block.sums = block.tiles + 2 * steps_of(panel, panel->most_columns) * TILE_BYTES;
    block.kept = (float *)(block.sums + 2 * SUMS_BYTES);
    block.results = block.kept + PARTS * TILE_BYTES / 4;
    block.scale = block.results + 2 * TILE_BYTES / 4;
    return block;
}

int64_t bytes_of_way(const Product *p, Way way, int threads) {
    Panel panel = panel_at(p, way, NULL);
    return panel.blocks - (int8_t *)NULL + threads * block_bytes(&panel);
}
