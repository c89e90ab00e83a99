// Tokens and rows of the weight as bfloat16, 32 columns a step. If codes are nibbles, the first step of a pair has the
// even columns and the second step the odd ones.
#include "../bytes/digits.h"
#include "pieces.h"

// The integer 1 becomes this number if a row has one scale, which its sums are multiplied by at the end. It is a power
// of two, so that codes stay exact, and so small that sums of 65,536 products with codes of 127 are no larger than x.
#define CODE_UNIT 0x1p-23f

static const uint16_t EVEN[32] = {0,  2,  4,  6,  8,  10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30,
                                  32, 34, 36, 38, 40, 42, 44, 46, 48, 50, 52, 54, 56, 58, 60, 62};

static inline __mmask32 first_of_32(int64_t count) {
    return count >= 32 ? ~0u : count > 0 ? (1u << count) - 1 : 0;
}

// Load 64 columns of a token, in the order of two steps.
static inline __attribute__((always_inline)) void load_pair(const uint16_t *x, int64_t left, int bits, Integers *first,
                                                            Integers *second) {
    const __m512i low = _mm512_maskz_loadu_epi16(first_of_32(left), x);
    const __m512i high = _mm512_maskz_loadu_epi16(first_of_32(left - 32), x + 32);
    if (bits == 8) {
        *first = (Integers)low;
        *second = (Integers)high;
        return;
    }
    const __m512i even = _mm512_loadu_si512(EVEN);
    *first = (Integers)_mm512_permutex2var_epi16(low, even, high);
    *second = (Integers)_mm512_permutex2var_epi16(low, _mm512_add_epi16(even, _mm512_set1_epi16(1)), high);
}

static inline __attribute__((always_inline)) void write_tile(const Panel *panel, int64_t tile, const uint16_t *x,
                                                             int64_t tokens, int bits) {
    int8_t *to = token_tiles(panel, tile);
    Integers first[TILE_ROWS], second[TILE_ROWS];
    for (int i = 0; i < TILE_ROWS; i++) first[i] = second[i] = all_integers(0);
    for (int64_t k = 0; k < panel->columns; k += 64, to += 2 * TILE_BYTES) {
        for (int i = 0; i < tokens; i++) {
            const uint16_t *row = x + i * panel->product->weight.K + panel->column + k;
            load_pair(row, panel->columns - k, bits, first + i, second + i);
        }
        store_transposed(first, to, 64);
        store_transposed(second, to + TILE_BYTES, 64);
    }
}

void write_tokens_as_bfloat16(const Panel *panel, int64_t tile) {
    const Product *p = panel->product;
    int64_t first = panel->token + tile * TILE_ROWS, tokens = least(TILE_ROWS, p->M - first);
    const uint16_t *x = (const uint16_t *)p->x + first * p->weight.K;
    if (panel->column == 0) measure_tokens(panel, tile, codes_hold_scales(panel) ? 1 : 1 / CODE_UNIT);
    if (is_in_nibbles(p)) write_tile(panel, tile, x, tokens, 4);
    else write_tile(panel, tile, x, tokens, 8);
}

static inline Integers rounded(Floats low, Floats high) { return (Integers)_mm512_cvtne2ps_pbh(high, low); }

// Write codes of 8 bits times their scales, or times CODE_UNIT if `scale` is NULL.
static void write_row(const uint8_t *row, int64_t columns, const float *scale, int64_t group, int8_t *to) {
    Floats factor = all_floats(CODE_UNIT);
    for (int64_t k = 0, next = scale ? 0 : -1; k < round_up(columns, 64); k += 32, to += TILE_BYTES) {
        if (k == next) {
            factor = all_floats(*scale++);
            next += group;
        }
        __m256i codes = _mm256_maskz_loadu_epi8(first_of_32(columns - k), row + k);
        Integers low = (Integers)_mm512_cvtepi8_epi32(_mm256_castsi256_si128(codes));
        Integers high = (Integers)_mm512_cvtepi8_epi32(_mm256_extracti128_si256(codes, 1));
        *(Integers *)to = rounded(to_floats(low) * factor, to_floats(high) * factor);
    }
}

// Return the numbers of two groups, or of the last one twice.
static inline __m512i table_of(const Numbers *numbers, int64_t g) {
    int64_t last = numbers->count - 1;
    Floats both[2];
    for (int i = 0; i < 2; i++)
        both[i] = numbers_of(numbers->codes, &numbers->groups, least(g + i, last), numbers->operations, numbers->dtype);
    return (__m512i)rounded(both[0], both[1]);
}

// Write codes of 4 bits as numbers. A group has only 16 different ones, so each code takes its number from a table. A
// vector has room for two tables. The 64 columns of two steps have two in groups of 32, and four in groups of 16.
static inline __attribute__((always_inline)) void write_nibbles(const uint8_t *row, int64_t column, int64_t columns,
                                                                const Numbers *numbers, int64_t group, int tables,
                                                                int8_t *to) {
    const __m512i nibble = _mm512_set1_epi16(15), even_columns = _mm512_loadu_si512(EVEN);
    const int shift = tables == 4 ? 4 : tables == 2 ? 5 : 6;  // from a column to the table of its group
    const __m512i first_entries = _mm512_slli_epi16(_mm512_srli_epi16(even_columns, shift), 4);
    __m512i table = _mm512_setzero_si512(), others = table;
    int64_t g = column / group, next = 0;
    for (int64_t k = 0; k < columns; k += 64, to += 2 * TILE_BYTES) {
        if (k == next) {
            table = table_of(numbers, g);
            if (tables == 4) others = table_of(numbers, g + 2);
            g += tables;
            next = tables == 1 ? g * group - column : next + 64;
        }
        __m512i pairs = _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(first_of_32((columns - k) / 2), row + k / 2));
        __m512i even = _mm512_or_si512(_mm512_and_si512(pairs, nibble), first_entries);
        __m512i odd = _mm512_or_si512(_mm512_srli_epi16(pairs, 4), first_entries);
        if (tables == 4) {
            _mm512_storeu_si512(to, _mm512_permutex2var_epi16(table, even, others));
            _mm512_storeu_si512(to + TILE_BYTES, _mm512_permutex2var_epi16(table, odd, others));
        } else {
            _mm512_storeu_si512(to, _mm512_permutexvar_epi16(even, table));
            _mm512_storeu_si512(to + TILE_BYTES, _mm512_permutexvar_epi16(odd, table));
        }
    }
}

// The compiler gets the number of tables as a constant.
void write_row_of_nibbles(const Panel *panel, int64_t n, const Numbers *numbers, int8_t *to) {
    const uint8_t *row = row_of(panel->product, n) + (panel->column >> 1);
    int64_t column = panel->column, columns = panel->columns, group = group_columns(panel->product);
    if (group == 16) write_nibbles(row, column, columns, numbers, group, 4, to);
    else if (group == 32) write_nibbles(row, column, columns, numbers, group, 2, to);
    else write_nibbles(row, column, columns, numbers, group, 1, to);
}

void write_rows_as_bfloat16(const Panel *panel, const Block *block) {
    const Product *p = panel->product;
    const Weight *w = &p->weight;
    int64_t steps = steps_of(panel, panel->columns), G = groups_of(p), group = group_columns(p);
    Integers values = w->codebook ? widen_bytes(load_bytes(CODEBOOK, 16), 0) - 128 : lane_numbers() - 8;
    Numbers numbers = {.codes = to_floats(values), .count = G};
    for (int64_t r = 0; r < least(BLOCK_ROWS, w->N - block->first); r++) {
        int64_t n = block->first + r;
        const uint8_t *row = row_of(p, n) + panel->column;
        numbers.groups.scale = block->scale + r * G;
        const float *scale = numbers.groups.scale + panel->column / group;
        int8_t *to = block->tiles + r / TILE_ROWS * steps * TILE_BYTES + r % TILE_ROWS * 64;
        if (w->bits == 4) write_row_of_nibbles(panel, n, &numbers, to);
        else write_row(row, panel->columns, codes_hold_scales(panel) ? scale : NULL, group, to);
    }
}
