// The loops that the searches of uint.c and codebook.c share. Groups are columns, so that one vector instruction
// computes for many groups.
//
// The functions compute what PyTorch's ops compute in uint_search.py and codebook4.py, to the last bit: each operation
// is rounded once, and the squares of a group are added by halves.
#pragma once
#include <math.h>
#include <string.h>

#include "clones.h"

enum { WIDTH = 64, MOST = 32 };  // groups in a block, and the most weights of a group

// Runs `call` for each block of groups, on several threads, which a function of CLONES could not start by itself.
#define FOR_EACH_BLOCK(n, call)                                 \
  _Pragma("omp parallel for if (n > 4 * WIDTH)")                \
  for (int64_t start = 0; start < (n); start += WIDTH) {        \
    const int64_t width = (n) - start < WIDTH ? (n) - start : WIDTH; \
    call;                                                       \
  }

#define INLINE static inline __attribute__((always_inline))

INLINE float clamp(float x, float low, float high) {
  x = x < low ? low : x;
  return x > high ? high : x;
}

// Copies the columns `start` to `start + width` of groups [size, n] into a block, and fills the block up with zeros.
INLINE void take(float (*block)[WIDTH], const float *groups, int64_t size, int64_t n, int64_t start, int64_t width) {
  for (int64_t k = 0; k < size; k++) {
    memset(block[k], 0, sizeof block[k]);
    memcpy(block[k], groups + k * n + start, 4 * width);
  }
}

// Adds the squares of each group by halves, and leaves the sum in the first row.
INLINE void add_up(float (*squares)[WIDTH], int64_t size) {
  for (int64_t half = size / 2; half; half /= 2)
    for (int64_t k = 0; k < half; k++)
      for (int i = 0; i < WIDTH; i++) squares[k][i] += squares[k + half][i];
}
