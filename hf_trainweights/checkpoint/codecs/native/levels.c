// The arithmetic of the lossy codecs: a matrix [R][C] of floats <-> levels. Each operation is rounded once, as in the
// formats that the codecs' modules specify; the compiler must not fuse any.
#include <math.h>
#include <stdlib.h>

#include "levels.h"

enum { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };
#define TINY 0x1p-126f
// Most elements of a row that are worked on at once; the sum of so many levels fits 32 bits.
#define PIECE 65536
// DITHER repeats after so many elements.
#define PERIOD 4093

// Go through a matrix in pieces: `count` elements from a `column` of a `row` on, which are at `start` in the matrix.
#define FOR_PIECES                                                                              \
    for (int64_t row = 0; row < R; row++)                                                       \
        for (int64_t column = 0, start = row * C, count; count = least(PIECE, C - column), column < C; \
             column += count, start += count)
// A loop that is called with a constant is compiled for it, without questions inside.
#define BY_DTYPE(CALL) (dtype == FLOAT32 ? CALL(FLOAT32) : dtype == BFLOAT16 ? CALL(BFLOAT16) : CALL(FLOAT16))

// What was found in a piece: elements that must be stored as they are; of the others the largest error, not negative
// and as bits, and the sum of their levels' sizes.
typedef struct { int64_t exact; uint32_t largest, size; } Found;

static inline uint32_t bits_of(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }
static inline float float_of(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }
static inline uint32_t most(uint32_t a, uint32_t b) { return a > b ? a : b; }

// Add what was found in a piece to what was found before it, and to the size of its row.
static inline void add(Found *all, Found found, double *size) {
    all->exact += found.exact;
    all->largest = most(all->largest, found.largest);
    *size += found.size;
}

// Return where a row of levels begins in a matrix whose `rows` they are, in their own order where that is NULL.
static inline int64_t place(const int64_t *rows, int64_t row, int64_t C) { return (rows ? rows[row] : row) * C; }

// Return x rounded to what a dtype can hold; a NaN need not stay one.
static inline float round_to(float x, int dtype) {
    uint32_t bits = bits_of(x), sign = bits & 0x80000000, size = bits ^ sign;
    if (dtype == BFLOAT16) return float_of((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000);
    if (dtype == FLOAT16) {
        uint32_t normal = (size + 0xfff + (size >> 13 & 1)) & ~0x1fffu;
        // Beside .5 a float32 holds multiples of 2**-24, as float16 does next to zero.
        float small = (float_of(size) + .5f) - .5f;
        uint32_t rounded = size < 0x38800000 ? bits_of(small) : normal >= 0x47800000 ? 0x7f800000 : normal;
        return float_of(rounded | sign);
    }
    return x;
}

// Return a level within what can be stored; a NaN becomes one, too.
static inline int32_t level_of(float level) {
    level = rintf(level);
    level = level > SAME + 1 ? level : SAME + 1;
    level = level < EXACT - 1 ? level : EXACT - 1;
    return (int32_t)level;
}

static inline Found delta(const float *x, const float *anchor, const float *moment, const float *dither, float step,
                          float inverse, float limit, int dtype, int64_t count, int16_t *restrict levels) {
    uint32_t largest = 0, size = 0, exact = 0;
    for (int64_t i = 0; i < count; i++) {
        float near = anchor ? anchor[i] : 0, change = x[i] - near;
        if (moment) change = moment[i] == 0 && fabsf(change) <= step / 2 ? 0 : change;
        int same = change == 0;
        int32_t level = level_of(change * inverse + dither[i]);
        float decoded = ((float)level - dither[i]) * step;
        decoded = decoded * (same ? 0.0f : 1.0f) + near;
        float error = fabsf(round_to(decoded, dtype) - x[i]);
        int fits = error <= limit;
        uint32_t kept = -(uint32_t)fits;  // a mask, because GCC makes no vectors of sums under a condition
        largest = most(largest, bits_of(error) & kept);
        exact -= ~kept;
        size += (uint32_t)abs(level) & kept;
        levels[i] = (int16_t)(fits ? same ? SAME : level : EXACT);
    }
    return (Found){exact, largest, size};
}

// Fill the levels; anchor and moment may be NULL, and the dither of a row begins at its place in `starts`. `worst`
// becomes the largest error of those that keep the limit. Returns how many do not.
CLONES int64_t delta_levels(const float *x, const float *anchor, const float *moment, const float *dither,
                            const int64_t *starts, float step, float inverse, float limit, int dtype, int64_t R,
                            int64_t C, int16_t *levels, double *sizes, float *worst) {
    Found all = {0};
    FOR_PIECES {
        const float *later = dither + (starts[row] + column) % PERIOD;
#define DELTA(NEAR, MOMENT, DTYPE) \
    delta(x + start, NEAR, MOMENT, later, step, inverse, limit, DTYPE, count, levels + start)
#define ALONE(DTYPE) DELTA(NULL, NULL, DTYPE)
#define NEAR(DTYPE) DELTA(anchor + start, NULL, DTYPE)
#define HINTED(DTYPE) DELTA(anchor + start, moment + start, DTYPE)
        add(&all, !anchor ? BY_DTYPE(ALONE) : !moment ? BY_DTYPE(NEAR) : BY_DTYPE(HINTED), &sizes[row]);
    }
    *worst = float_of(all.largest);
    return all.exact;
}

static inline void decode_delta(const int16_t *levels, const float *anchor, const float *dither, float step,
                                int64_t count, float *restrict out) {
    for (int64_t i = 0; i < count; i++) {
        float moved = levels[i] == SAME ? 0.0f : 1.0f;
        float change = ((float)levels[i] * moved - dither[i]) * step * moved;
        out[i] = change + (anchor ? anchor[i] : 0);
    }
}

CLONES void delta_decode(const int16_t *levels, const float *anchor, const int64_t *anchor_rows, const float *dither,
                         const int64_t *starts, float step, int64_t R, int64_t C, float *out,
                         const int64_t *out_rows) {
    FOR_PIECES {
        const float *later = dither + (starts[row] + column) % PERIOD;
        float *to = out + place(out_rows, row, C) + column;
        if (anchor)
            decode_delta(levels + start, anchor + place(anchor_rows, row, C) + column, later, step, count, to);
        else
            decode_delta(levels + start, NULL, later, step, count, to);
    }
}

static inline float unit_of(float square, float step) { return sqrtf(square) * step; }

static inline Found update(const float *m, const float *squares, float step, float limit, int dtype, int64_t count,
                           int16_t *restrict levels) {
    uint32_t largest = 0, size = 0, exact = 0;
    for (int64_t i = 0; i < count; i++) {
        float unit = unit_of(squares[i], step), divisor = unit < TINY ? TINY : unit;
        int32_t level = level_of(m[i] / divisor);
        float error = fabsf((round_to((float)level * unit, dtype) - m[i]) / divisor);
        // Below TINY the divisor is not the unit.
        int fits = (error <= limit) & !((unit < TINY) & (m[i] != 0));
        uint32_t kept = -(uint32_t)fits;
        largest = most(largest, bits_of(error) & kept);
        exact -= ~kept;
        size += (uint32_t)abs(level) & kept;
        levels[i] = (int16_t)(fits ? level : EXACT);
    }
    return (Found){exact, largest, size};
}

// The same as `delta_levels` for exp_avg m in units of sqrt(exp_avg_sq) * step.
CLONES int64_t update_levels(const float *m, const float *squares, float step, float limit, int dtype, int64_t R,
                             int64_t C, int16_t *levels, double *sizes, float *worst) {
    Found all = {0};
#define UPDATE(DTYPE) update(m + start, squares + start, step, limit, DTYPE, count, levels + start)
    FOR_PIECES add(&all, BY_DTYPE(UPDATE), &sizes[row]);
    *worst = float_of(all.largest);
    return all.exact;
}

CLONES void update_decode(const int16_t *levels, const float *squares, const int64_t *square_rows, float step,
                          int64_t R, int64_t C, float *out, const int64_t *out_rows) {
    for (int64_t row = 0; row < R; row++) {
        const float *square = squares + place(square_rows, row, C);
        float *restrict to = out + place(out_rows, row, C);
        for (int64_t i = 0; i < C; i++) to[i] = (float)levels[row * C + i] * unit_of(square[i], step);
    }
}

// Return 2**(level * step) * row * column, unit being step << 23; the power wraps around beyond what float32 holds.
static inline float power(int32_t level, uint32_t unit, float row, float column) {
    return float_of((127u << 23) + unit * (uint32_t)level) * row * column;
}

// Return log2 of a positive number to within 8e-6, as `_log2` in moments.py; another one gives any number.
static inline float log2_of(float x) {
    int is_small = x < TINY;
    uint32_t bits = bits_of(is_small ? x * 0x1p32f : x), above = bits - 0x3f2aaaab;  // 2/3
    float exponent = (float)((int32_t)above >> 23) - (is_small ? 32.0f : 0.0f);
    float r = float_of(bits - (above & 0xff800000)) - 1;
    // In one expression: GCC makes no vectors of a loop around a loop.
    return (((((((-0.231981888f * r + 0.252026826f) * r - 0.234679684f) * r + 0.28458789f) * r - 0.360927671f) * r +
               0.481019735f) * r - 0.721343935f) * r + 1.44269407f) * r + exponent;
}

static inline Found logs(const float *x, float row_log, const float *column_logs, float row, const float *columns,
                         float inverse, uint32_t unit, int dtype, int64_t count, int16_t *restrict levels,
                         float *restrict decoded, float *restrict quotients) {
    uint32_t size = 0;
    for (int64_t i = 0; i < count; i++) {
        int same = x[i] == 0;
        float positive = same ? 1.0f : x[i];
        int32_t level = level_of((log2_of(positive) - row_log - column_logs[i]) * inverse);
        float value = round_to(power(level, unit, row, columns[i]), dtype);
        // The power that a negative number gets may be negative, too.
        quotients[i] = positive < 0 ? 0.0f : value / positive;
        size += (uint32_t)abs(level) & ~-(uint32_t)same;
        levels[i] = (int16_t)(same ? SAME : level);
        decoded[i] = value * (same ? 0.0f : 1.0f);
    }
    return (Found){.size = size};
}

// Fill levels, decoded numbers and their quotients by the original ones of exp_avg_sq x, 0 for a negative one; zeros are
// `SAME`.
CLONES void log_levels(const float *x, const float *row_logs, const float *column_logs, const float *rows,
                       const float *columns, float inverse, uint32_t unit, int dtype, int64_t R, int64_t C,
                       int16_t *levels, float *decoded, float *quotients, double *sizes) {
    Found all = {0};
#define LOGS(DTYPE)                                                                                              \
    logs(x + start, row_logs[row], column_logs + column, rows[row], columns + column, inverse, unit, DTYPE, count, \
         levels + start, decoded + start, quotients + start)
    FOR_PIECES add(&all, BY_DTYPE(LOGS), &sizes[row]);
}

CLONES void log_decode(const int16_t *levels, const float *rows, const float *columns, uint32_t unit, int64_t R,
                       int64_t C, float *out, const int64_t *out_rows) {
    for (int64_t row = 0; row < R; row++) {
        const int16_t *from = levels + row * C;
        float *restrict to = out + place(out_rows, row, C);
        for (int64_t i = 0; i < C; i++)
            to[i] = power(from[i], unit, rows[row], columns[i]) * (from[i] == SAME ? 0.0f : 1.0f);
    }
}
