// Numbers of a row of the weight as a step has them: as float32, as bfloat16, or as pieces of it.
#pragma once
#include "../codings.h"
#include "panel.h"

#ifdef HAS_TILES
// Return 32 numbers rounded to bfloat16, and subtract the rounded numbers from them. Infinity leaves 0.
static inline Integers take_piece(Floats numbers[2]) {
    Integers piece = (Integers)_mm512_cvtne2ps_pbh(numbers[1], numbers[0]);
    __m256i halves[2];
    memcpy(halves, &piece, sizeof piece);
    for (int i = 0; i < 2; i++) {
        Floats left = numbers[i] - (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves[i]), 16);
        numbers[i] = (Floats)((Integers)left & (left == left));
    }
    return piece;
}
#endif

// Write 32 numbers of a row, perhaps as pieces, and return the address of its next numbers.
static inline __attribute__((always_inline)) int8_t *write_numbers(Floats numbers[2], Way way, int pieces, int8_t *to) {
#ifdef HAS_TILES
    if (way == FLOATS) {
        for (int r = 0; r < pieces; r++, to += TILE_BYTES) *(Integers *)to = take_piece(numbers);
        return to;
    }
#endif
#ifdef __AVX512BF16__
    if (way == WIDENED) {
        *(Integers *)to = (Integers)_mm512_cvtne2ps_pbh(numbers[1], numbers[0]);
        return to + TILE_BYTES;
    }
#endif
    (void)way, (void)pieces;
    *(Floats *)to = numbers[0];
    *(Floats *)(to + TILE_BYTES) = numbers[1];
    return to + 2 * TILE_BYTES;
}

// The numbers that the 16 codes of 4 bits stand for in each group of a row.
typedef struct {
    Floats codes;   // before the operations
    Groups groups;  // of the row
    int64_t count;  // of groups
    int operations, dtype;
} Numbers;

// Write the columns of a panel of row n, whose codes have 4 bits, in groups of 16, 32 or a multiple of 64, as bfloat16.
void write_row_of_nibbles(const Panel *panel, int64_t n, const Numbers *numbers, int8_t *to);
