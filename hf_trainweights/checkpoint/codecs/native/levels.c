// The arithmetic of the lossy codecs: a matrix [R][C] of floats <-> levels. Each operation is rounded once, as the
// modules delta_uniform.py and moments.py specify. The compiler must not fuse any two.
//
// Functions that encode fill `levels`, and add to `sizes`, one per row, the magnitudes of the row's levels. Functions
// that decode fill `out`, which may be a larger matrix than that of levels: `out_rows` lists its row for each row of
// levels, or is NULL if they are the same. `anchor_rows` and `v_rows` do so for the matrices of references.
#include <math.h>
#include <stdlib.h>

#include "levels.h"

enum { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };
#define TINY 0x1p-126f
// Most elements of a row that are worked on at once. The sum of their magnitudes fits 32 bits.
#define PIECE 65536
// The table of dither repeats after this many elements.
#define PERIOD 4093

// Go through a matrix in pieces of its rows: `count` elements from `column` of `row` on, the first at index `start`.
#define FOR_PIECES                                                                              \
    for (int64_t row = 0; row < R; row++)                                                       \
        for (int64_t column = 0, start = row * C, count; count = least(PIECE, C - column), column < C; \
             column += count, start += count)
// Call with a constant dtype, so that the compiler makes a loop for each dtype, without branches inside.
#define BY_DTYPE(CALL) (dtype == FLOAT32 ? CALL(FLOAT32) : dtype == BFLOAT16 ? CALL(BFLOAT16) : CALL(FLOAT16))

// Sums over a piece. `exact`: the number of elements that must be stored as they are. Over the others, `largest`: the
// largest error, as the bits of a float that is not negative, and `size`: the sum of the magnitudes of their levels.
typedef struct { int64_t exact; uint32_t largest, size; } Totals;

static inline uint32_t bits_of(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }
static inline float float_of(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }
static inline uint32_t most(uint32_t a, uint32_t b) { return a > b ? a : b; }

// Add the totals of a piece to those of the matrix, and its size to that of its row.
static inline void add(Totals *all, Totals piece, double *size) {
    all->exact += piece.exact;
    all->largest = most(all->largest, piece.largest);
    *size += piece.size;
}

// Return the index at which a row begins in a matrix; `rows` as described at the top.
static inline int64_t row_start(const int64_t *rows, int64_t row, int64_t C) { return (rows ? rows[row] : row) * C; }

// Return x rounded to a number of a dtype; a NaN need not stay one.
static inline float round_to(float x, int dtype) {
    uint32_t bits = bits_of(x), sign = bits & 0x80000000, size = bits ^ sign;
    if (dtype == BFLOAT16) return float_of((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000);
    if (dtype == FLOAT16) {
        uint32_t normal = (size + 0xfff + (size >> 13 & 1)) & ~0x1fffu;
        // Near .5 a float32 is a multiple of 2**-24, as a float16 near zero is.
        float small = (float_of(size) + .5f) - .5f;
        uint32_t rounded = size < 0x38800000 ? bits_of(small) : normal >= 0x47800000 ? 0x7f800000 : normal;
        return float_of(rounded | sign);
    }
    return x;
}

// Round a number, NaN too, to a level. A number out of range is clipped: it decodes wrong and becomes EXACT.
static inline int32_t level_of(float level) {
    level = rintf(level);
    level = level > SAME + 1 ? level : SAME + 1;
    level = level < EXACT - 1 ? level : EXACT - 1;
    return (int32_t)level;
}

// One piece of `delta_levels`. `inverse` is 1 / step.
static inline Totals delta(const float *x, const float *anchor, const float *moment, const float *dither, float step,
                           float inverse, float limit, int dtype, int64_t count, int16_t *restrict levels) {
    uint32_t largest = 0, size = 0, exact = 0;
    for (int64_t i = 0; i < count; i++) {
        float prediction = anchor ? anchor[i] : 0, change = x[i] - prediction;
        if (moment) change = moment[i] == 0 && fabsf(change) <= step / 2 ? 0 : change;
        int same = change == 0;
        int32_t level = level_of(change * inverse + dither[i]);
        float decoded = ((float)level - dither[i]) * step;
        decoded = decoded * (same ? 0.0f : 1.0f) + prediction;
        float error = fabsf(round_to(decoded, dtype) - x[i]);
        int fits = error <= limit;
        uint32_t mask = -(uint32_t)fits;  // all bits or none, because GCC makes no vectors of sums under a condition
        largest = most(largest, bits_of(error) & mask);
        exact -= ~mask;
        size += (uint32_t)abs(level) & mask;
        levels[i] = (int16_t)(fits ? same ? SAME : level : EXACT);
    }
    return (Totals){exact, largest, size};
}

// Encode weights x for delta-uniform. `anchor` and `moment` (exp_avg_sq) may be NULL. The dither of a row begins at its
// index of `starts` in the table `dither`. Returns the number of elements whose error exceeds `limit`, and sets
// `largest_error` to the largest error of the others, both in the unit of x.
CLONES int64_t delta_levels(const float *x, const float *anchor, const float *moment, const float *dither,
                            const int64_t *starts, float step, float inverse, float limit, int dtype, int64_t R,
                            int64_t C, int16_t *levels, double *sizes, float *largest_error) {
    Totals all = {0};
    FOR_PIECES {
        const float *piece_dither = dither + (starts[row] + column) % PERIOD;
#define DELTA(ANCHOR, MOMENT, DTYPE) \
    delta(x + start, ANCHOR, MOMENT, piece_dither, step, inverse, limit, DTYPE, count, levels + start)
#define ALONE(DTYPE) DELTA(NULL, NULL, DTYPE)
#define ANCHORED(DTYPE) DELTA(anchor + start, NULL, DTYPE)
#define HINTED(DTYPE) DELTA(anchor + start, moment + start, DTYPE)
        add(&all, !anchor ? BY_DTYPE(ALONE) : !moment ? BY_DTYPE(ANCHORED) : BY_DTYPE(HINTED), &sizes[row]);
    }
    *largest_error = float_of(all.largest);
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
        const float *piece_dither = dither + (starts[row] + column) % PERIOD;
        float *piece_out = out + row_start(out_rows, row, C) + column;
        if (anchor)
            decode_delta(levels + start, anchor + row_start(anchor_rows, row, C) + column, piece_dither, step, count,
                         piece_out);
        else
            decode_delta(levels + start, NULL, piece_dither, step, count, piece_out);
    }
}

// Return t, the distance of two levels of a first moment, given its second moment v.
static inline float unit_of(float v, float step) { return sqrtf(v) * step; }

// One piece of `update_levels` and of `row_levels`: the distance of two levels is t, or that of each v if there is one.
static inline Totals update(const float *m, const float *v, float step, float row_t, float limit, int dtype,
                            int64_t count, int16_t *restrict levels) {
    uint32_t largest = 0, size = 0, exact = 0;
    for (int64_t i = 0; i < count; i++) {
        float t = v ? unit_of(v[i], step) : row_t, divisor = t < TINY ? TINY : t;
        int32_t level = level_of(m[i] / divisor);
        float error = fabsf((round_to((float)level * t, dtype) - m[i]) / divisor);
        // If t is below TINY, the error was divided by another number, so only an m of zero may have a level.
        int fits = (error <= limit) & !((t < TINY) & (m[i] != 0));
        uint32_t mask = -(uint32_t)fits;
        largest = most(largest, bits_of(error) & mask);
        exact -= ~mask;
        size += (uint32_t)abs(level) & mask;
        levels[i] = (int16_t)(fits ? level : EXACT);
    }
    return (Totals){exact, largest, size};
}

// Encode first moments m for update-space, given second moments v. Returns and sets the same as `delta_levels`; errors
// and `limit` are in units of t.
CLONES int64_t update_levels(const float *m, const float *v, float step, float limit, int dtype, int64_t R, int64_t C,
                             int16_t *levels, double *sizes, float *largest_error) {
    Totals all = {0};
#define UPDATE(DTYPE) update(m + start, v + start, step, 0, limit, DTYPE, count, levels + start)
    FOR_PIECES add(&all, BY_DTYPE(UPDATE), &sizes[row]);
    *largest_error = float_of(all.largest);
    return all.exact;
}

CLONES void update_decode(const int16_t *levels, const float *v, const int64_t *v_rows, float step, int64_t R,
                          int64_t C, float *out, const int64_t *out_rows) {
    for (int64_t row = 0; row < R; row++) {
        const float *row_v = v + row_start(v_rows, row, C);
        float *restrict row_out = out + row_start(out_rows, row, C);
        for (int64_t i = 0; i < C; i++) row_out[i] = (float)levels[row * C + i] * unit_of(row_v[i], step);
    }
}

// Encode a momentum m for row-uniform, given t of each row. Returns and sets the same as `update_levels`.
CLONES int64_t row_levels(const float *m, const float *t, float limit, int dtype, int64_t R, int64_t C,
                          int16_t *levels, double *sizes, float *largest_error) {
    Totals all = {0};
#define ROW(DTYPE) update(m + start, NULL, 0, t[row], limit, DTYPE, count, levels + start)
    FOR_PIECES add(&all, BY_DTYPE(ROW), &sizes[row]);
    *largest_error = float_of(all.largest);
    return all.exact;
}

CLONES void row_decode(const int16_t *levels, const float *t, int64_t R, int64_t C, float *out,
                       const int64_t *out_rows) {
    for (int64_t row = 0; row < R; row++) {
        float *restrict row_out = out + row_start(out_rows, row, C);
        for (int64_t i = 0; i < C; i++) row_out[i] = (float)levels[row * C + i] * t[row];
    }
}

// Return the second moment of a level: 2**(level * step) times the factors of its row and column. `exponent_step` is
// step << 23, where a float has its exponent. A power out of float32's range wraps around.
static inline float decode_log(int32_t level, uint32_t exponent_step, float row_factor, float column_factor) {
    return float_of((127u << 23) + exponent_step * (uint32_t)level) * row_factor * column_factor;
}

// Return log2 of a positive number to within 8e-6, as `_log2` in moments.py. Other numbers give anything.
static inline float log2_of(float x) {
    int is_small = x < TINY;
    uint32_t bits = bits_of(is_small ? x * 0x1p32f : x), above = bits - 0x3f2aaaab;  // the bits of 2/3
    float exponent = (float)((int32_t)above >> 23) - (is_small ? 32.0f : 0.0f);
    float r = float_of(bits - (above & 0xff800000)) - 1;
    // In one expression: GCC makes no vectors of a loop around a loop.
    return (((((((-0.231981888f * r + 0.252026826f) * r - 0.234679684f) * r + 0.28458789f) * r - 0.360927671f) * r +
               0.481019735f) * r - 0.721343935f) * r + 1.44269407f) * r + exponent;
}

// One piece of `log_levels`.
static inline Totals logs(const float *v, float row_log, const float *column_logs, float row_factor,
                          const float *column_factors, float inverse, uint32_t exponent_step, int dtype, int64_t count,
                          int16_t *restrict levels, float *restrict decoded, float *restrict quotients) {
    uint32_t size = 0;
    for (int64_t i = 0; i < count; i++) {
        int same = v[i] == 0;
        float positive = same ? 1.0f : v[i];
        int32_t level = level_of((log2_of(positive) - row_log - column_logs[i]) * inverse);
        float value = round_to(decode_log(level, exponent_step, row_factor, column_factors[i]), dtype);
        // A negative element may decode to a negative number, so that their quotient would look right.
        quotients[i] = positive < 0 ? 0.0f : value / positive;
        size += (uint32_t)abs(level) & ~-(uint32_t)same;
        levels[i] = (int16_t)(same ? SAME : level);
        decoded[i] = value * (same ? 0.0f : 1.0f);
    }
    return (Totals){.size = size};
}

// Encode second moments v for log-rank1, given the means of log2 of rows and columns, and 2 to the power of these (the
// factors). Fills `decoded`, and `quotients` with decoded / original, or 0 for a negative original; zeros are SAME. The
// caller finds by the quotients which elements become EXACT.
CLONES void log_levels(const float *v, const float *row_logs, const float *column_logs, const float *row_factors,
                       const float *column_factors, float inverse, uint32_t exponent_step, int dtype, int64_t R,
                       int64_t C, int16_t *levels, float *decoded, float *quotients, double *sizes) {
    Totals all = {0};
#define LOGS(DTYPE)                                                                                                   \
    logs(v + start, row_logs[row], column_logs + column, row_factors[row], column_factors + column, inverse,          \
         exponent_step, DTYPE, count, levels + start, decoded + start, quotients + start)
    FOR_PIECES add(&all, BY_DTYPE(LOGS), &sizes[row]);
}

CLONES void log_decode(const int16_t *levels, const float *row_factors, const float *column_factors,
                       uint32_t exponent_step, int64_t R, int64_t C, float *out, const int64_t *out_rows) {
    for (int64_t row = 0; row < R; row++) {
        const int16_t *row_levels = levels + row * C;
        float *restrict row_out = out + row_start(out_rows, row, C);
        for (int64_t i = 0; i < C; i++)
            row_out[i] = decode_log(row_levels[i], exponent_step, row_factors[row], column_factors[i]) *
                         (row_levels[i] == SAME ? 0.0f : 1.0f);
    }
}
