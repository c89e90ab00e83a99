// The search for the factor and sign of each group of codebook4; `_search_by_ops` in codebook4.py is its twin.
#include "search.h"

int abi(void) { return 1; }

enum { SIZE = 32, STEPS = 5, NEGATIVE = 64, POSITIONS = 512 };  // weights, tries, sign bit of a code, table entries

typedef struct {
  const int32_t *codes;                // [STEPS, n]
  const float *doubled, *squares;      // [STEPS, n]: twice the inverse of the scale, and the square of the factor
  const float *importance;             // of each weight of a group, or NULL
  int32_t pairs[POSITIONS];            // low 16 bits: twice the nearest value; high 16 bits: that for a negative factor
} tries;

INLINE void try_factor(const tries *t, float (*groups)[WIDTH], const float *doubled, const float *factor_squared,
                       const int32_t *codes, float *least, int32_t *best) {
  float squares[2][SIZE][WIDTH];
  for (int k = 0; k < SIZE; k++) {
    const float weight = t->importance ? t->importance[k] : 1;
    for (int i = 0; i < WIDTH; i++) {
      const float wanted = groups[k][i] * doubled[i];
      const int32_t pair = t->pairs[(int)clamp(wanted + 256, 0, POSITIONS - 1)];
      const float error = (float)(int16_t)pair - wanted, negated_error = (float)(pair >> 16) - wanted;
      squares[0][k][i] = error * error * weight;
      squares[1][k][i] = negated_error * negated_error * weight;
    }
  }
  for (int sign = 0; sign < 2; sign++) {
    add_up(squares[sign], SIZE);
    for (int i = 0; i < WIDTH; i++) {
      const float error = squares[sign][0][i] * factor_squared[i];
      const int better = error < least[i];
      least[i] = better ? error : least[i];
      best[i] = better ? codes[i] + sign * NEGATIVE : best[i];
    }
  }
}

static CLONES void search_codebook_block(const tries *t, const float *groups, int64_t n, int64_t start, int64_t width,
                                         int32_t *chosen) {
  float block[SIZE][WIDTH], doubled[1][WIDTH], squares[1][WIDTH], least[WIDTH];
  int32_t codes[WIDTH] = {0}, best[WIDTH] = {0};
  take(block, groups, SIZE, n, start, width);
  memcpy(best, t->codes + start, 4 * width);
  for (int i = 0; i < WIDTH; i++) least[i] = INFINITY;
  for (int step = 0; step < STEPS; step++) {
    take(doubled, t->doubled + step * n, 1, n, start, width);
    take(squares, t->squares + step * n, 1, n, start, width);
    memcpy(codes, t->codes + step * n + start, 4 * width);
    try_factor(t, block, doubled[0], squares[0], codes, least, best);
  }
  memcpy(chosen + start, best, 4 * width);
}

// groups [SIZE, n]; table [POSITIONS]: twice the nearest value of each position; chosen [n]: the best codes.
void search_codebook(const float *groups, int64_t n, const int32_t *codes, const float *doubled, const float *squares,
                     const float *table, const float *importance, int32_t *chosen) {
  tries t = {codes, doubled, squares, importance, {0}};
  for (int i = 0; i < POSITIONS; i++)
    t.pairs[i] = (int32_t)(((uint32_t)-(int)table[POSITIONS - 1 - i] << 16) | ((uint32_t)(int)table[i] & 0xFFFF));
  FOR_EACH_BLOCK(n, search_codebook_block(&t, groups, n, start, width, chosen))
}
