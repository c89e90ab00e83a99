// Levels <-> symbols of `width` bits, packed into bytes. levels.py specifies levels, symbols and escapes.
#include "levels.h"

int abi(void) { return 3; }

// Escapes are searched for in runs of this many levels: most runs of this length have none, which is quickly found.
#define RUN 32
// Most levels of a tile, which are coded together, as in levels.py. A tile is some rows, or a part of a longer row.
#define TILE 65536
// As in levels.py: a tile's width is chosen by SAMPLE of its levels, and one in LEVELS_PER_ESCAPE may be an escape.
#define SAMPLE 4096
#define LEVELS_PER_ESCAPE 64

// A matrix of levels. `order` lists its rows in the order in which they are coded; if it is NULL, that is their own.
typedef struct {
    const int16_t *levels;
    const int64_t *order;
    int64_t R, C;
} Matrix;

// The levels from `lowest` to `highest` have the symbol level + offset. SAME has the symbol 0 if symbols are wider than
// 2 bits. All others have the symbol `escape`.
typedef struct {
    int32_t lowest, highest, offset, escape;
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

// Copy the levels of the tile with this index, and return their number.
static inline int64_t copy_tile(const Matrix *matrix, int64_t index, int16_t *tile) {
    int64_t C = matrix->C, height = C < TILE ? TILE / C : 1, across = (C + TILE - 1) / TILE;
    int64_t first = index / across * height, column = index % across * TILE;
    int64_t rows = least(height, matrix->R - first), columns = least(TILE, C - column);
    for (int64_t row = 0; row < rows; row++) {
        int64_t source = matrix->order ? matrix->order[first + row] : first + row;
        memcpy(tile + row * columns, matrix->levels + source * C + column, 2 * columns);
    }
    return rows * columns;
}

// Return the smallest width in which nearly all levels of a sample have a symbol.
static inline int choose_width(const int16_t *tile, int64_t count) {
    static const int widths[] = {2, 4, 8, 10, 12, 14};
    int16_t sample[SAMPLE];
    int64_t step = count / SAMPLE + 1, taken = 0;
    for (int64_t i = 0; i < count; i += step) sample[taken++] = tile[i];
    for (int choice = 0; choice < 6; choice++) {
        Range range = range_of(widths[choice]);
        int32_t escapes = 0;
        for (int64_t i = 0; i < taken; i++) escapes += is_escaped(sample[i], widths[choice], range);
        if (escapes * LEVELS_PER_ESCAPE <= taken) return widths[choice];
    }
    return 16;
}

static inline uint32_t symbol_of(int32_t level, int width, Range range) {
    uint32_t symbol = level == SAME ? 0 : (uint32_t)(level + range.offset);
    return is_escaped(level, width, range) ? (uint32_t)range.escape : symbol;
}

// Write the symbols of a tile: up to 8 bits wide, those of its `sections` (1, 2 or 4) share the bytes of `high`; above,
// `high` has their highest 8 bits and `low` the others.
static inline void pack(const int16_t *tile, int64_t count, int width, uint8_t *restrict high, uint8_t *restrict low) {
    Range range = range_of(width);
    int shift = width - 8, sections = width > 8 ? 1 : 8 / width;
    int64_t size = (count + sections - 1) / sections;
    for (int64_t i = 0; width > 8 && i < count; i++) {
        uint32_t symbol = symbol_of(tile[i], width, range);
        high[i] = (uint8_t)(symbol >> shift);
        low[i] = (uint8_t)(symbol & ((1u << shift) - 1));
    }
    for (int section = 0; width <= 8 && section < sections; section++) {
        const int16_t *levels = tile + section * size;
        for (int64_t i = 0; i < least(count - section * size, size); i++) {
            uint32_t symbol = symbol_of(levels[i], width, range) << section * width;
            high[i] = (uint8_t)(section ? high[i] | symbol : symbol);
        }
    }
}

// Fill `escapes`, which has room for all levels of the tile, with the levels of the escapes; return their number.
static inline int64_t collect_escapes(const int16_t *tile, int64_t count, int width, int16_t *restrict escapes) {
    Range range = range_of(width);
    int64_t escape_count = 0;
    for (int64_t start = 0; start < count; start += RUN) {
        int64_t end = least(start + RUN, count);
        int32_t any = 0;
        for (int64_t i = start; i < end; i++) any |= is_escaped(tile[i], width, range);
        for (int64_t i = start; any && i < end; i++) {
            escapes[escape_count] = tile[i];
            escape_count += is_escaped(tile[i], width, range);
        }
    }
    return escape_count;
}

typedef struct {
    Matrix matrix;
    uint8_t *widths, *high, *low;
    int16_t *escapes;
    int64_t *escape_counts;
} Pack;

CLONES void pack_tile(const Pack *job, int64_t index, int64_t slot) {
    int16_t tile[TILE];
    int64_t count = copy_tile(&job->matrix, index, tile);
    int width = job->widths[slot] = (uint8_t)choose_width(tile, count);
    pack(tile, count, width, job->high + slot * TILE, job->low + slot * TILE);
    job->escape_counts[slot] = collect_escapes(tile, count, width, job->escapes + slot * TILE);
}

// Pack `count` tiles from `first` on. Writes for each its width, its symbols (`high` and `low` as in `pack`), and the
// levels and number of its escapes. In `high`, `low` and `escapes`, each tile has a slot of TILE numbers.
void pack_tiles(const int16_t *levels, const int64_t *order, int64_t R, int64_t C, int64_t first, int64_t count,
                uint8_t *widths, uint8_t *high, uint8_t *low, int16_t *escapes, int64_t *escape_counts) {
    Pack job = {{levels, order, R, C}, widths, high, low, escapes, escape_counts};
    for (int64_t i = 0; i < count; i++) pack_tile(&job, first + i, i);
}

// Undo `pack_tiles` for one tile, except for its escapes: they become the level after the highest one with a symbol,
// which `put_escapes` replaces. Returns the number of escapes.
CLONES int64_t unpack_levels(const uint8_t *high, const uint8_t *low, int64_t count, int width,
                             int16_t *restrict tile) {
    Range range = range_of(width);
    int32_t escape_level = range.escape - range.offset, escapes = 0;
    int sections = width > 8 ? 1 : 8 / width;
    int64_t size = (count + sections - 1) / sections;
    for (int section = 0; section < sections; section++) {
        int16_t *levels = tile + section * size;
        for (int64_t i = 0; i < least(count - section * size, size); i++) {
            int32_t symbol = width > 8 ? high[i] << (width - 8) | low[i] : high[i] >> section * width & range.escape;
            int32_t level = symbol - range.offset;
            levels[i] = (int16_t)(symbol == 0 && width > 2 ? SAME : level);
            escapes += level == escape_level;
        }
    }
    return escapes;
}

// Replace the escapes that `unpack_levels` left by their levels. `escapes` has all low bytes, then all high bytes.
// Returns the number of EXACT among them.
CLONES int64_t put_escapes(const uint8_t *escapes, int64_t escape_count, int64_t count, int width, int16_t *tile) {
    Range range = range_of(width);
    int32_t escape_level = range.escape - range.offset;
    int64_t taken = 0, exact = 0;
    for (int64_t start = 0; start < count; start += RUN) {
        int64_t end = least(start + RUN, count);
        int32_t any = 0;
        for (int64_t i = start; i < end; i++) any |= tile[i] == escape_level;
        for (int64_t i = start; any && i < end && taken < escape_count; i++) {
            if (tile[i] != escape_level) continue;
            tile[i] = (int16_t)(escapes[taken] | escapes[escape_count + taken] << 8);
            exact += tile[i] == EXACT;
            taken++;
        }
    }
    return exact;
}
