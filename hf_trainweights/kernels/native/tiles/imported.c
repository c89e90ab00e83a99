// Rows of the formats of other programs (codings.h) as numbers, of bfloat16 or float32.
#include "pieces.h"

int64_t groups_bytes(const Product *p) { return round_up(3 * groups_length(coded_groups(p)) * 4, ALIGNMENT); }

static Groups groups_of_row(const Product *p, int64_t n, int8_t *memory) {
    int64_t length = groups_length(coded_groups(p));
    float *scale = (float *)memory;
    Groups groups = {.scale = scale, .zero = scale + length, .offset = scale + 2 * length};
    write_groups(p, n, groups);
    return groups;
}

// Load the codes of 64 columns, of which the row still has `left`, as floats; for float8, their values / 256.
static inline __attribute__((always_inline)) void load_numbers(const Product *p, const uint8_t *row, int64_t k,
                                                               int64_t left, int bits, int operations,
                                                               Floats numbers[4]) {
    uint8_t tail[64] = {0};
    const uint8_t *codes = row + (k * bits >> 3);
    if (bits == 0) {
        load_float8(row + k, left, numbers);
        load_float8(row + k + 32, left > 32 ? left - 32 : 0, numbers + 2);
        return;
    }
    // Planes of 64 columns are loaded at once, and the last row may end after 32.
    if (bits != 8 && bits != 4 && left < 64) codes = memcpy(tail, codes, 4 * bits);
    Integers bytes = bits == 8   ? load_bytes(codes, left)
                     : bits == 4 ? load_nibbles(codes, left)
                                 : load_planes(codes, bits, 0);
    for (int i = 0; i < 4; i++) {
        Integers indexes = widen_bytes(bytes, i);
        numbers[i] = operations == TABLE4 ? permuted(*(const Floats *)p->table, indexes) : to_floats(indexes);
    }
}

// Write the columns of a panel. Vectors of 16 columns belong to one group each.
static inline __attribute__((always_inline)) void write_row(const Panel *panel, int64_t n, const Groups *groups,
                                                            Way way, int bits, int operations, int8_t *to) {
    const Product *p = panel->product;
    const Weight *w = &p->weight;
    const int64_t code_bits = bits ? bits : 8;
    const uint8_t *row = p->qdata + n * (w->K * code_bits >> 3) + (panel->column * code_bits >> 3);
    int64_t size = w->group_size ? w->group_size : w->K, g = panel->column / size;
    int64_t next = (g + 1) * size - panel->column;
    int dtype = w->rounds_each && way == WIDENED ? BFLOAT16 : FLOAT32;
    for (int64_t k = 0; k < panel->columns; k += 64) {
        int64_t left = panel->columns - k;
        Floats numbers[4];
        fetch_ahead(row + (k * code_bits >> 3));
        load_numbers(p, row, k, left, bits, operations, numbers);
        for (int i = 0; i < 4; i++) {
            if (k + i * LANES == next) {
                g++;
                next += size;
            }
            numbers[i] = numbers_of(numbers[i], groups, g, operations, dtype);
            // Scaling by 256 is exact.
            if (bits == 0) numbers[i] *= all_floats(256);
            if (left < (i + 1) * LANES)
                numbers[i] = (Floats)((Integers)numbers[i] & (lane_numbers() < all_integers((int)(left - i * LANES))));
        }
        to = write_numbers(numbers, way, 1, to);
        to = write_numbers(numbers + 2, way, 1, to);
    }
}

#define CASE(BITS, OPERATIONS)                                                                     \
    if (w->bits == (BITS) && operations == (OPERATIONS)) {                                         \
        if (panel->way == WIDENED) write_row(panel, n, groups, WIDENED, BITS, OPERATIONS, to);     \
        else write_row(panel, n, groups, FLOATS, BITS, OPERATIONS, to);                            \
        return;                                                                                    \
    }
#define CASES(BITS) CASE(BITS, AFFINE | SUBTRACT) CASE(BITS, AFFINE | ADD)

// The compiler gets the way, the bits and the operations as constants.
static void write_columns(const Panel *panel, int64_t n, const Groups *groups, int8_t *to) {
    const Weight *w = &panel->product->weight;
    int operations = operations_of(w);
    CASE(0, FLOAT8_GROUPS) CASE(4, TABLE4) CASES(2) CASES(3) CASES(4) CASES(5) CASES(6) CASES(8)
}

void write_imported_rows(const Panel *panel, const Block *block) {
    const Product *p = panel->product;
    const Weight *w = &p->weight;
    int64_t steps = steps_of(panel, panel->columns);
    Numbers numbers = {.codes = to_floats(lane_numbers()), .count = coded_groups(p), .operations = operations_of(w)};
    numbers.dtype = w->rounds_each ? BFLOAT16 : FLOAT32;
    if (w->family == TABLE4) numbers.codes = *(const Floats *)p->table;
    for (int64_t r = 0; r < least(BLOCK_ROWS, w->N - block->first); r++) {
        int64_t n = block->first + r;
        int8_t *to = block->tiles + r / TILE_ROWS * steps * TILE_BYTES + r % TILE_ROWS * BYTES;
        numbers.groups = groups_of_row(p, n, block->row);
        block->scale[r] = 1;
#ifdef __AVX512BF16__
        if (panel->way == WIDENED && is_in_nibbles(p)) {
            write_row_of_nibbles(panel, n, &numbers, to);
            continue;
        }
#endif
        write_columns(panel, n, &numbers.groups, to);
    }
}
