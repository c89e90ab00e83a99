// The search for the group scale and zero point of each group of uint; `search` in uint_search.py is its twin.
#include "search.h"

enum { PARAMETERS = 16 };  // values that a group scale may have, 1 to 16, and a zero point, 0 to 15

typedef struct {
  float largest_code, code_units, codes_of_zero, zeros_of_code;  // the last two: zero_units / code_units, its inverse
  const float *importance;  // of each weight of a group, or NULL
} grid;

typedef struct {
  float scale[WIDTH], zero[WIDTH], error[WIDTH];
} best;

INLINE void try_zero(const grid *g, float (*groups)[WIDTH], int64_t size, const float *scale, const float *zero,
                     best *so_far) {
  float squares[MOST][WIDTH], inverse[WIDTH], start[WIDTH];
  for (int i = 0; i < WIDTH; i++) {
    inverse[i] = 1 / (scale[i] * g->code_units);
    start[i] = zero[i] * g->codes_of_zero;
  }
  for (int64_t k = 0; k < size; k++) {
    const float weight = g->importance ? g->importance[k] : 1;
    for (int i = 0; i < WIDTH; i++) {
      const float exact = groups[k][i] * inverse[i] + start[i];
      const float error = exact - clamp(rintf(exact), 0, g->largest_code);
      squares[k][i] = error * error * weight;
    }
  }
  add_up(squares, size);
  for (int i = 0; i < WIDTH; i++) {
    const float error = squares[0][i] * (scale[i] * scale[i]);
    const int better = error < so_far->error[i];
    so_far->error[i] = better ? error : so_far->error[i];
    so_far->scale[i] = better ? scale[i] : so_far->scale[i];
    so_far->zero[i] = better ? zero[i] : so_far->zero[i];
  }
}

INLINE void try_scale(const grid *g, float (*groups)[WIDTH], int64_t size, const float *wanted, const float *middle,
                      best *so_far) {
  float scale[WIDTH], zero[WIDTH];
  for (int i = 0; i < WIDTH; i++) {
    scale[i] = clamp(rintf(wanted[i]), 1, PARAMETERS);
    const float below = g->largest_code / 2 - middle[i] / (scale[i] * g->code_units);
    zero[i] = clamp(rintf(below * g->zeros_of_code), 0, PARAMETERS - 1);
  }
  try_zero(g, groups, size, scale, zero, so_far);
}

INLINE void try_all(const grid *g, float (*groups)[WIDTH], int64_t size, const float *covering, const float *middle,
                    const float *clippings, int64_t count, best *so_far) {
  float tried[WIDTH], centre[WIDTH];
  for (int i = 0; i < WIDTH; i++) so_far->error[i] = INFINITY, so_far->scale[i] = so_far->zero[i] = 0;
  for (int64_t c = 0; c < count; c++) {
    for (int i = 0; i < WIDTH; i++) tried[i] = covering[i] * clippings[c];
    try_scale(g, groups, size, tried, middle, so_far);
  }
  memcpy(centre, so_far->scale, sizeof centre);
  for (int step = -1; step <= 1; step += 2) {
    for (int i = 0; i < WIDTH; i++) tried[i] = centre[i] + step;
    try_scale(g, groups, size, tried, middle, so_far);
  }
  float scale[WIDTH];
  memcpy(scale, so_far->scale, sizeof scale);
  memcpy(centre, so_far->zero, sizeof centre);
  for (int step = -1; step <= 1; step += 2) {
    for (int i = 0; i < WIDTH; i++) tried[i] = clamp(centre[i] + step, 0, PARAMETERS - 1);
    try_zero(g, groups, size, scale, tried, so_far);
  }
}

static CLONES void search_uint_block(const grid *g, const float *groups, int64_t size, int64_t n, int64_t start,
                                     int64_t width, const float *covering, const float *middle,
                                     const float *clippings, int64_t count, float *scale, float *zero) {
  float block[MOST][WIDTH], covered[1][WIDTH], middles[1][WIDTH];
  best so_far;
  take(block, groups, size, n, start, width);
  take(covered, covering, 1, n, start, width);
  take(middles, middle, 1, n, start, width);
  try_all(g, block, size, covered[0], middles[0], clippings, count, &so_far);
  memcpy(scale + start, so_far.scale, 4 * width);
  memcpy(zero + start, so_far.zero, 4 * width);
}

// groups [size, n], size a power of two of at most MOST; covering, middle, scale, zero [n].
// covering: the group scale whose codes cover the range of a group; middle: the middle of that range.
void search_uint(const float *groups, int64_t size, int64_t n, const float *covering, const float *middle,
                 const float *importance, int bits, float code_units, float zero_units, const float *clippings,
                 int64_t count, float *scale, float *zero) {
  const grid g = {(float)((1 << bits) - 1), code_units, zero_units / code_units, code_units / zero_units, importance};
  FOR_EACH_BLOCK(n, search_uint_block(&g, groups, size, n, start, width, covering, middle, clippings, count, scale,
                                      zero))
}

// Packs the codes of groups, 0 to 2**bits - 1, as planes.py does; groups of 16 as if 16 zeros followed.
INLINE void pack(const int32_t (*codes)[WIDTH], int64_t size, int bits, int32_t (*words)[WIDTH]) {
  int first = 0;
  memset(words, 0, bits * sizeof *words);
  for (int plane = 4; plane; plane /= 2) {
    if (!(bits & plane)) continue;
    for (int k = 0; k < size; k++) {
      const int word = first + k / 4 % plane, shift = k % 4 * 8 + k / 4 / plane * plane;
      for (int i = 0; i < WIDTH; i++)
        words[word][i] |= (int32_t)((uint32_t)(codes[k][i] >> first & ((1 << plane) - 1)) << shift);
    }
    first += plane;
  }
}

static CLONES void encode_uint_block(const grid *g, const float *groups, int64_t size, int64_t n, int64_t start,
                                     int64_t width, const float *scale, const float *zero, int bits, int32_t *qdata) {
  float block[MOST][WIDTH], scales[1][WIDTH], zeros[1][WIDTH], inverse[WIDTH], first[WIDTH];
  int32_t codes[MOST][WIDTH], words[8][WIDTH];
  take(block, groups, size, n, start, width);
  take(scales, scale, 1, n, start, width);
  take(zeros, zero, 1, n, start, width);
  for (int i = 0; i < WIDTH; i++) {
    inverse[i] = i < width ? 1 / (scales[0][i] * g->code_units) : 0;
    first[i] = zeros[0][i] * g->codes_of_zero;
  }
  for (int64_t k = 0; k < size; k++)
    for (int i = 0; i < WIDTH; i++)
      codes[k][i] = (int32_t)clamp(rintf(block[k][i] * inverse[i] + first[i]), 0, g->largest_code);
  pack(codes, size, bits, words);
  // Two groups of 16 share 32 columns: the second has the upper halves of the bytes.
  const int64_t groups_together = 32 / size;
  for (int64_t i = 0; i < width; i += groups_together)
    for (int word = 0; word < bits; word++)
      qdata[(start + i) / groups_together * bits + word] =
          words[word][i] | (groups_together == 2 ? (int32_t)((uint32_t)words[word][i + 1] << 4) : 0);
}

// groups [size, n], size 16 or 32, n even; scale and zero [n]; qdata [n * size / 32, bits].
void encode_uint(const float *groups, int64_t size, int64_t n, const float *scale, const float *zero, int bits,
                 float code_units, float zero_units, int32_t *qdata) {
  const grid g = {(float)((1 << bits) - 1), code_units, zero_units / code_units, code_units / zero_units, NULL};
  FOR_EACH_BLOCK(n, encode_uint_block(&g, groups, size, n, start, width, scale, zero, bits, qdata))
}

static CLONES void lay_side_by_side_block(const float *values, int64_t size, int64_t n, int64_t start, int64_t width,
                                          float *groups, float *ends) {
  float block[MOST][WIDTH], low[WIDTH] = {0}, high[WIDTH] = {0};
  for (int64_t i = 0; i < width; i++)
    for (int64_t k = 0; k < size; k++) block[k][i] = values[(start + i) * size + k];
  for (int64_t k = 0; k < size; k++) {
    for (int i = 0; i < width; i++) {
      low[i] = block[k][i] < low[i] ? block[k][i] : low[i];
      high[i] = block[k][i] > high[i] ? block[k][i] : high[i];
    }
    memcpy(groups + k * n + start, block[k], 4 * width);
  }
  memcpy(ends + start, low, 4 * width);
  memcpy(ends + n + start, high, 4 * width);
}

// values [n, size], groups [size, n]; ends [2, n]: the least value of each group or 0, and the largest or 0.
void lay_side_by_side(const float *values, int64_t size, int64_t n, float *groups, float *ends) {
  FOR_EACH_BLOCK(n, lay_side_by_side_block(values, size, n, start, width, groups, ends))
}
