// The choice of the products that take panels, and of their way.
#include "panel.h"

// For more rows of x than these constants say, one product of bfloat16 takes less time than the two products of an x of
// two digits, each of which takes as long.
#ifdef HAS_TILES
#define DIGIT_ROWS_OF_GROUPS DIGIT_ROWS_OF_GROUPS_IN_TILES
#define DIGIT_ROWS DIGIT_ROWS_IN_TILES
#define WIDENED_COLUMNS WIDENED_COLUMNS_IN_TILES
#else
#define DIGIT_ROWS_OF_GROUPS DIGIT_ROWS_OF_GROUPS_IN_VECTORS
#define DIGIT_ROWS DIGIT_ROWS_IN_VECTORS
#define WIDENED_COLUMNS INT64_MAX
#endif

#ifdef HAS_TILES
#define IS_GRANTED tiles_are_granted
#else
#define IS_GRANTED 1
#endif

#ifdef __AVX512BF16__
// Return whether integer codes are multiplied as bfloat16. Otherwise they are multiplied with digits of x.
static int are_widened(const Product *p) {
    const Weight *w = &p->weight;
    if (w->dtype != BFLOAT16 || w->digits == 1) return 0;
    if (w->bits == 4) return p->M > DIGIT_ROWS_OF_INT4;
    if (w->group_size) return p->M > DIGIT_ROWS_OF_GROUPS;
    return p->M > DIGIT_ROWS && w->K <= WIDENED_COLUMNS;
}

// Return whether each group is a number of steps of `columns` columns.
static int fits(const Product *p, int64_t columns) { return p->weight.group_size % columns == 0; }
#endif

static Way way_of_others(const Product *p) {
    const Weight *w = &p->weight;
    if (p->M <= ROWS_WITHOUT_PANELS && (w->code_units || w->dtype != BFLOAT16)) return NO_WAY;
#ifdef __AVX512BF16__
    if (w->dtype == BFLOAT16) return WIDENED;
#endif
    return FLOATS;
}

// Return the way of a format of another program. Its numbers are written 16 at a time, all of one group.
static Way way_of_family(const Product *p) {
    const Weight *w = &p->weight;
    int is_fast = w->family == FLOAT8_GROUPS && w->dtype == BFLOAT16, has_bytes = w->family != AFFINE || w->digits < 3;
    if ((p->M <= ROWS_WITHOUT_PANELS && has_bytes && !is_fast) || w->group_size % LANES) return NO_WAY;
#ifdef __AVX512BF16__
    if (w->dtype == BFLOAT16) return WIDENED;
#endif
    return IN_TILES ? NO_WAY : FLOATS;
}

static Way way_of(const Product *p) {
    if (p->M <= FEW_ROWS || !IS_GRANTED) return NO_WAY;
    if (p->weight.family) return way_of_family(p);
    if (has_other_codes(p)) return way_of_others(p);
#ifdef __AVX512BF16__
    if (are_widened(p) && fits(p, 32)) return WIDENED;
#endif
#ifdef HAS_TILES
    if (fits(p, 64) && !p->weight.codebook) return DIGITS;
#endif
    return NO_WAY;
}

int takes_panels(const Product *p) { return way_of(p) != NO_WAY; }

int64_t panels_bytes(const Product *p, int threads) { return bytes_of_way(p, way_of(p), threads); }

void multiply_panels(const Product *p, int threads, int8_t *memory) { multiply_by_way(p, way_of(p), threads, memory); }
