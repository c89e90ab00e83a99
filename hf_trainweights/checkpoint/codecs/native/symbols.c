// Levels <-> symbols of some bits, packed into bytes; levels.py specifies them.
#include "levels.h"

int abi(void) { return 2; }

// Levels among which an escape is looked for at once: most runs of this length have none.
#define RUN 32
// Levels coded together, as in levels.py: a tile. It is some rows, or a part of a longer row.
#define TILE 65536
// As there: a tile's width is chosen by so many of its levels, and one in so many of them may be an escape.
#define SAMPLE 4096
#define LEVELS_PER_ESCAPE 64

// A matrix of levels; its rows are coded in the order of these indices, or where it is NULL in their own.
typedef struct {
    const int16_t *levels;
    const int64_t *order;
    int64_t R, C;
} Matrix;

typedef struct {
    int32_t lowest, highest, offset;  // of the levels that have a symbol
    int32_t escape;                   // the symbol of those that have none
} Range;

static inline Range range_of(int width) {
    int32_t offset = width == 2 ? 1 : 1 << (width - 1);
    int32_t escape = (1 << width) - 1;
    return (Range){width == 2 ? -1 : 1 - offset, escape - 1 - offset, offset, escape};
}

static inline int is_escaped(int32_t level, int width, Range range) {
    int outside = level < range.lowest || level > range.highest;
    return outside && !(level == SAME && width > 2);
}

// Copy the levels of a tile, and return their number.
static inline int64_t copy_tile(const Matrix *matrix, int64_t index, int16_t *tile) {
    int64_t C = matrix->C, height = C < TILE ? TILE / C : 1, across = (C + TILE - 1) / TILE;
    int64_t first = index / across * height, column = index % across * TILE;
    int64_t rows = least(height, matrix->R - first), columns = least(TILE, C - column);
    for (int64_t row = 0; row < rows; row++) {
        int64_t number = matrix->order ? matrix->order[first + row] : first + row;
        memcpy(tile + row * columns, matrix->levels + number * C + column, 2 * columns);
    }
    return rows * columns;
}

// Return the narrowest width that fits nearly all levels of a sample.
static inline int choose_width(const int16_t *tile, int64_t count) {
    static const int widths[] = {2, 4, 8, 10, 12, 14};
    int16_t sample[SAMPLE];
    int64_t step = count / SAMPLE + 1, taken = 0;
    for (int64_t i = 0; i < count; i += step) sample[taken++] = tile[i];
    for (int number = 0; number < 6; number++) {
        Range range = range_of(widths[number]);
        int32_t escapes = 0;
        for (int64_t i = 0; i < taken; i++) escapes += is_escaped(sample[i], widths[number], range);
        if (escapes * LEVELS_PER_ESCAPE <= taken) return widths[number];
    }
    return 16;
}

static inline uint32_t symbol_of(int32_t level, int width, Range range) {
    uint32_t symbol = level == SAME ? 0 : (uint32_t)(level + range.offset);
    return is_escaped(level, width, range) ? (uint32_t)range.escape : symbol;
}

static inline void pack(const int16_t *tile, int64_t count, int width, uint8_t *restrict high, uint8_t *restrict low) {
    Range range = range_of(width);
    int shift = width - 8, parts = width > 8 ? 1 : 8 / width;
    int64_t size = (count + parts - 1) / parts;
    for (int64_t i = 0; width > 8 && i < count; i++) {
        uint32_t symbol = symbol_of(tile[i], width, range);
        high[i] = (uint8_t)(symbol >> shift);
        low[i] = (uint8_t)(symbol & ((1u << shift) - 1));
    }
    for (int part = 0; width <= 8 && part < parts; part++) {
        const int16_t *later = tile + part * size;
        for (int64_t i = 0; i < least(count - part * size, size); i++) {
            uint32_t symbol = symbol_of(later[i], width, range) << part * width;
            high[i] = (uint8_t)(part ? high[i] | symbol : symbol);
        }
    }
}

// Fill in the escapes, of which there is room for as many as levels; return their number.
static inline int64_t collect_escapes(const int16_t *tile, int64_t count, int width, int16_t *restrict escapes) {
    Range range = range_of(width);
    int64_t found = 0;
    for (int64_t start = 0; start < count; start += RUN) {
        int64_t end = least(start + RUN, count);
        int32_t any = 0;
        for (int64_t i = start; i < end; i++) any |= is_escaped(tile[i], width, range);
        for (int64_t i = start; any && i < end; i++) {
            escapes[found] = tile[i];
            found += is_escaped(tile[i], width, range);
        }
    }
    return found;
}

typedef struct {
    Matrix matrix;
    uint8_t *widths, *high, *low;
    int16_t *escapes;
    int64_t *escape_counts;
} Pack;

CLONES void pack_tile(const Pack *job, int64_t index, int64_t place) {
    int16_t tile[TILE];
    int64_t count = copy_tile(&job->matrix, index, tile);
    int width = job->widths[place] = (uint8_t)choose_width(tile, count);
    pack(tile, count, width, job->high + place * TILE, job->low + place * TILE);
    job->escape_counts[place] = collect_escapes(tile, count, width, job->escapes + place * TILE);
}

// Fill in of each tile its width, its packed symbols, of more than 8 bits the high bits and apart the low ones, and its
// escapes and their number; all but numbers `TILE` places apart.
void pack_tiles(const int16_t *levels, const int64_t *order, int64_t R, int64_t C, int64_t first, int64_t count,
                uint8_t *widths, uint8_t *high, uint8_t *low, int16_t *escapes, int64_t *escape_counts) {
    Pack job = {{levels, order, R, C}, widths, high, low, escapes, escape_counts};
    for (int64_t i = 0; i < count; i++) pack_tile(&job, first + i, i);
}

// Undo `pack_tiles` for one tile but for its escapes, which become the level that no symbol stands for. Returns their
// number.
CLONES int64_t unpack_levels(const uint8_t *high, const uint8_t *low, int64_t count, int width,
                             int16_t *restrict tile) {
    Range range = range_of(width);
    int32_t none = range.escape - range.offset, escapes = 0;
    int parts = width > 8 ? 1 : 8 / width;
    int64_t size = (count + parts - 1) / parts;
    for (int part = 0; part < parts; part++) {
        int16_t *later = tile + part * size;
        for (int64_t i = 0; i < least(count - part * size, size); i++) {
            int32_t symbol = width > 8 ? high[i] << (width - 8) | low[i] : high[i] >> part * width & range.escape;
            int32_t level = symbol - range.offset;
            later[i] = (int16_t)(symbol == 0 && width > 2 ? SAME : level);
            escapes += level == none;
        }
    }
    return escapes;
}

// Put the escapes, all low bytes and then all high ones, in their places. Returns how many of them are `EXACT`.
CLONES int64_t put_escapes(const uint8_t *escapes, int64_t escape_count, int64_t count, int width, int16_t *tile) {
    Range range = range_of(width);
    int32_t none = range.escape - range.offset;
    int64_t taken = 0, exact = 0;
    for (int64_t start = 0; start < count; start += RUN) {
        int64_t end = least(start + RUN, count);
        int32_t any = 0;
        for (int64_t i = start; i < end; i++) any |= tile[i] == none;
        for (int64_t i = start; any && i < end && taken < escape_count; i++) {
            if (tile[i] != none) continue;
            tile[i] = (int16_t)(escapes[taken] | escapes[escape_count + taken] << 8);
            exact += tile[i] == EXACT;
            taken++;
        }
    }
    return exact;
}
