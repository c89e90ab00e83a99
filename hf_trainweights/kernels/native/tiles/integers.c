// Which products with integer codes take tiles, and how.
#include "panel.h"

// From more rows of x on, one product of bfloat16 takes less time than two of digits, each of which takes as long in
// tiles: docs/performance.md, "Tiles of AMX".
#define DIGIT_ROWS_OF_INT4 16
#define DIGIT_ROWS_OF_GROUPS 64
#define DIGIT_ROWS 127
// Codes of 8 bits with one scale in a row are widened up to so many columns.
#define WIDENED_COLUMNS 768

static int are_widened(const Product *p) {
    const Weight *w = &p->weight;
    if (w->dtype != BFLOAT16 || w->digits == 1) return 0;
    if (w->bits == 4) return p->M > DIGIT_ROWS_OF_INT4;
    if (w->group_size) return p->M > DIGIT_ROWS_OF_GROUPS;
    return p->M > DIGIT_ROWS && w->K <= WIDENED_COLUMNS;
}

static int take_tiles(const Product *p) {
    int64_t size = p->weight.group_size;
    return tiles_are_granted && !p->weight.codebook && (size % 64 == 0 || (size == 32 && p->weight.bits == 4 && are_widened(p)));
}

static Way way_of(const Product *p) { return are_widened(p) ? WIDENED : DIGITS; }

int64_t integers_bytes(const Product *p, int threads) {
    if (p->M <= FEW_ROWS) return few_rows_bytes(p);
    return take_tiles(p) ? tiles_bytes(p, way_of(p), threads) : many_rows_bytes(p, threads);
}

void multiply_integers(const Product *p, int threads, int8_t *memory) {
    if (p->M <= FEW_ROWS) multiply_few_rows(p, threads, memory);
    else if (take_tiles(p)) multiply_by_tiles(p, way_of(p), threads, memory);
    else multiply_many_rows(p, threads, memory);
}
