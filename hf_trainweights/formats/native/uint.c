// The group scales and zero points of uint: uint_search.py says what is tried.
#include "search.h"

enum { PARAMETERS = 16 };

typedef struct {
  float largest_code, code_units, codes_of_zero, zeros_of_code;
  const float *importance;  // of each weight of a group, or NULL
} grid;

typedef struct {
  float scale[WIDTH], zero[WIDTH], error[WIDTH];
} best;

INLINE void try_zero(const grid *g, float (*groups)[WIDTH], int64_t size, const float *scale, const float *zero,
                     best *kept) {
  float squares[MOST][WIDTH], inverse[WIDTH], start[WIDTH];
  for (int i = 0; i < WIDTH; i++) {
    inverse[i] = 1 / (scale[i] * g->code_units);
    start[i] = zero[i] * g->codes_of_zero;
  }
  for (int64_t k = 0; k < size; k++) {
    const float weight = g->importance ? g->importance[k] : 1;
    for (int i = 0; i < WIDTH; i++) {
      const float exact = groups[k][i] * inverse[i] + start[i];
      const float off = exact - clamp(rintf(exact), 0, g->largest_code);
      squares[k][i] = off * off * weight;
    }
  }
  add_up(squares, size);
  for (int i = 0; i < WIDTH; i++) {
    const float error = squares[0][i] * (scale[i] * scale[i]);
    const int better = error < kept->error[i];
    kept->error[i] = better ? error : kept->error[i];
    kept->scale[i] = better ? scale[i] : kept->scale[i];
    kept->zero[i] = better ? zero[i] : kept->zero[i];
  }
}

INLINE void try_scale(const grid *g, float (*groups)[WIDTH], int64_t size, const float *wanted, const float *middle,
                      best *kept) {
  float scale[WIDTH], zero[WIDTH];
  for (int i = 0; i < WIDTH; i++) {
    scale[i] = clamp(rintf(wanted[i]), 1, PARAMETERS);
    const float below = g->largest_code / 2 - middle[i] / (scale[i] * g->code_units);
    zero[i] = clamp(rintf(below * g->zeros_of_code), 0, PARAMETERS - 1);
  }
  try_zero(g, groups, size, scale, zero, kept);
}

INLINE void try_all(const grid *g, float (*groups)[WIDTH], int64_t size, const float *covering, const float *middle,
                    const float *clippings, int64_t count, best *kept) {
  float wanted[WIDTH], from[WIDTH];
  for (int i = 0; i < WIDTH; i++) kept->error[i] = INFINITY, kept->scale[i] = kept->zero[i] = 0;
  for (int64_t c = 0; c < count; c++) {
    for (int i = 0; i < WIDTH; i++) wanted[i] = covering[i] * clippings[c];
    try_scale(g, groups, size, wanted, middle, kept);
  }
  memcpy(from, kept->scale, sizeof from);
  for (int step = -1; step <= 1; step += 2) {
    for (int i = 0; i < WIDTH; i++) wanted[i] = from[i] + step;
    try_scale(g, groups, size, wanted, middle, kept);
  }
  float scale[WIDTH];
  memcpy(scale, kept->scale, sizeof scale);
  memcpy(from, kept->zero, sizeof from);
  for (int step = -1; step <= 1; step += 2) {
    for (int i = 0; i < WIDTH; i++) wanted[i] = clamp(from[i] + step, 0, PARAMETERS - 1);
    try_zero(g, groups, size, scale, wanted, kept);
  }
}

static CLONES void search_uint_block(const grid *g, const float *groups, int64_t size, int64_t n, int64_t start,
                                     int64_t width, const float *covering, const float *middle,
                                     const float *clippings, int64_t count, float *scale, float *zero) {
  float block[MOST][WIDTH], covered[1][WIDTH], middles[1][WIDTH];
  best kept;
  take(block, groups, size, n, start, width);
  take(covered, covering, 1, n, start, width);
  take(middles, middle, 1, n, start, width);
  try_all(g, block, size, covered[0], middles[0], clippings, count, &kept);
  memcpy(scale + start, kept.scale, 4 * width);
  memcpy(zero + start, kept.zero, 4 * width);
}

// groups [size, n], size a power of two of at most MOST; covering, middle, scale, zero [n].
void search_uint(const float *groups, int64_t size, int64_t n, const float *covering, const float *middle,
                 const float *importance, int bits, float code_units, float zero_units, const float *clippings,
                 int64_t count, float *scale, float *zero) {
  const grid g = {(float)((1 << bits) - 1), code_units, zero_units / code_units, code_units / zero_units, importance};
  FOR_EACH_BLOCK(n, search_uint_block(&g, groups, size, n, start, width, covering, middle, clippings, count, scale,
                                      zero))
}
