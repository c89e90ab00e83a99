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

// Part of a row: its first element, and their number. `start` is where that is among the levels.
typedef struct { int64_t row, column, start, count; } Piece;
// Rows of a matrix [.][C], one of these numbers for each row of levels; where they are NULL in their own order.
typedef struct { const float *numbers; const int64_t *rows; int64_t C; } Source;
typedef struct { float *numbers; const int64_t *rows; int64_t C; } Target;
// What was found in it: elements that must be stored as they are; of the others the largest error, not negative and as
// bits, and the sum of their levels' sizes.
typedef struct { int64_t exact; uint32_t largest, size; } Found;
typedef Found Work(const void *job, Piece piece);

static inline uint32_t bits_of(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }
static inline float float_of(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }
static inline uint32_t most(uint32_t a, uint32_t b) { return a > b ? a : b; }

static inline int64_t place(const int64_t *rows, int64_t C, Piece piece) {
    return (rows ? rows[piece.row] : piece.row) * C + piece.column;
}

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

// Work on all pieces of a matrix; add to each row's size the sum of the sizes of its levels.
static Found for_pieces(Work *work, const void *job, int64_t R, int64_t C, double *sizes) {
    Found all = {0};
    for (int64_t row = 0; row < R; row++)
        for (int64_t column = 0; column < C; column += PIECE) {
            Found found = work(job, (Piece){row, column, row * C + column, least(PIECE, C - column)});
            all.exact += found.exact;
            all.largest = most(all.largest, found.largest);
            if (sizes) sizes[row] += found.size;
        }
    return all;
}

// The dither of a row begins at its place in `starts`.
typedef struct {
    const float *x, *anchor, *moment, *dither;  // anchor and moment may be NULL
    float step, inverse, limit;
    int dtype;
    const int64_t *starts;
    int16_t *levels;
} Delta;

static inline Found delta(const Delta *job, const float *anchor, const float *moment, int dtype, Piece piece) {
    const float *x = job->x + piece.start, *dither = job->dither + (job->starts[piece.row] + piece.column) % PERIOD;
    float step = job->step, inverse = job->inverse, limit = job->limit;
    int16_t *restrict levels = job->levels + piece.start;
    uint32_t largest = 0, size = 0, exact = 0;
    for (int64_t i = 0; i < piece.count; i++) {
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

CLONES Found delta_piece(const void *data, Piece piece) {
    const Delta *job = data;
    const float *anchor = job->anchor ? job->anchor + piece.start : NULL;
    const float *moment = job->moment ? job->moment + piece.start : NULL;
    // The loop is compiled for each case, without questions inside.
#define CASES(DTYPE)                                           \
    if (!anchor) return delta(job, NULL, NULL, DTYPE, piece);  \
    if (!moment) return delta(job, anchor, NULL, DTYPE, piece); \
    return delta(job, anchor, moment, DTYPE, piece)
    if (job->dtype == FLOAT32) { CASES(FLOAT32); }
    if (job->dtype == BFLOAT16) { CASES(BFLOAT16); }
    CASES(FLOAT16);
#undef CASES
}

// Fill the levels. `worst` becomes the largest error of those that keep the limit. Returns how many do not.
int64_t delta_levels(const float *x, const float *anchor, const float *moment, const float *dither, const int64_t *starts,
                     float step, float inverse, float limit, int dtype, int64_t R, int64_t C,
                     int16_t *levels, double *sizes, float *worst) {
    Delta job = {x, anchor, moment, dither, step, inverse, limit, dtype, starts, levels};
    Found found = for_pieces(delta_piece, &job, R, C, sizes);
    *worst = float_of(found.largest);
    return found.exact;
}

typedef struct {
    const int16_t *levels;
    Source anchor;  // its numbers may be NULL
    const float *dither;
    const int64_t *starts;
    float step;
    Target out;
} DeltaDecode;

static inline void decode_delta(const int16_t *levels, const float *anchor, const float *dither, float step,
                                int64_t count, float *restrict out) {
    for (int64_t i = 0; i < count; i++) {
        float moved = levels[i] == SAME ? 0.0f : 1.0f;
        float change = ((float)levels[i] * moved - dither[i]) * step * moved;
        out[i] = change + (anchor ? anchor[i] : 0);
    }
}

CLONES Found delta_decode_piece(const void *data, Piece piece) {
    const DeltaDecode *job = data;
    const int16_t *levels = job->levels + piece.start;
    Source near = job->anchor;
    const float *dither = job->dither + (job->starts[piece.row] + piece.column) % PERIOD;
    float *out = job->out.numbers + place(job->out.rows, job->out.C, piece), step = job->step;
    // The loop is compiled for each case, without questions inside.
    if (near.numbers)
        decode_delta(levels, near.numbers + place(near.rows, near.C, piece), dither, step, piece.count, out);
    else
        decode_delta(levels, NULL, dither, step, piece.count, out);
    return (Found){0};
}

void delta_decode(const int16_t *levels, const float *anchor, const int64_t *anchor_rows, const float *dither,
                  const int64_t *starts, float step, int64_t R, int64_t C, float *out, const int64_t *out_rows) {
    DeltaDecode job = {levels, {anchor, anchor_rows, C}, dither, starts, step, {out, out_rows, C}};
    for_pieces(delta_decode_piece, &job, R, C, NULL);
}

typedef struct {
    const float *m, *squares;
    float step, limit;
    int dtype;
    int16_t *levels;
} Update;

static inline float unit_of(float square, float step) { return sqrtf(square) * step; }

static inline Found update(const Update *job, int dtype, Piece piece) {
    const float *m = job->m + piece.start, *squares = job->squares + piece.start;
    float step = job->step, limit = job->limit;
    int16_t *restrict levels = job->levels + piece.start;
    uint32_t largest = 0, size = 0, exact = 0;
    for (int64_t i = 0; i < piece.count; i++) {
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

CLONES Found update_piece(const void *data, Piece piece) {
    const Update *job = data;
    if (job->dtype == FLOAT32) return update(job, FLOAT32, piece);
    if (job->dtype == BFLOAT16) return update(job, BFLOAT16, piece);
    return update(job, FLOAT16, piece);
}

// The same as `delta_levels` for exp_avg m in units of sqrt(exp_avg_sq) * step.
int64_t update_levels(const float *m, const float *squares, float step, float limit, int dtype, int64_t R, int64_t C,
                      int16_t *levels, double *sizes, float *worst) {
    Update job = {m, squares, step, limit, dtype, levels};
    Found found = for_pieces(update_piece, &job, R, C, sizes);
    *worst = float_of(found.largest);
    return found.exact;
}

typedef struct {
    const int16_t *levels;
    Source squares;
    float step;
    Target out;
} UpdateDecode;

CLONES Found update_decode_piece(const void *data, Piece piece) {
    const UpdateDecode *job = data;
    const int16_t *levels = job->levels + piece.start;
    const float *squares = job->squares.numbers + place(job->squares.rows, job->squares.C, piece);
    float *restrict out = job->out.numbers + place(job->out.rows, job->out.C, piece), step = job->step;
    for (int64_t i = 0; i < piece.count; i++)
        out[i] = (float)levels[i] * unit_of(squares[i], step);
    return (Found){0};
}

void update_decode(const int16_t *levels, const float *squares, const int64_t *square_rows, float step, int64_t R,
                   int64_t C, float *out, const int64_t *out_rows) {
    UpdateDecode job = {levels, {squares, square_rows, C}, step, {out, out_rows, C}};
    for_pieces(update_decode_piece, &job, R, C, NULL);
}

typedef struct {
    const float *x, *row_logs, *column_logs, *rows, *columns;
    float inverse;
    uint32_t unit;  // step << 23
    int dtype;
    int16_t *levels;
    float *decoded, *quotients;
} Logs;

// Return 2**(level * step) * row * column; the power wraps around beyond what float32 holds.
static inline float power(int32_t level, uint32_t unit, float row, float column) {
    return float_of((127u << 23) + unit * (uint32_t)level) * row * column;
}

// Return log2 of a positive number to within 8e-6, as `_log2` in log_rank1.py; another one gives any number.
static inline float log2_of(float x) {
    int is_small = x < TINY;
    uint32_t bits = bits_of(is_small ? x * 0x1p32f : x), above = bits - 0x3f2aaaab;  // 2/3
    float exponent = (float)((int32_t)above >> 23) - (is_small ? 32.0f : 0.0f);
    float r = float_of(bits - (above & 0xff800000)) - 1;
    // In one expression: GCC makes no vectors of a loop around a loop.
    return (((((((-0.231981888f * r + 0.252026826f) * r - 0.234679684f) * r + 0.28458789f) * r - 0.360927671f) * r +
               0.481019735f) * r - 0.721343935f) * r + 1.44269407f) * r + exponent;
}

static inline Found logs(const Logs *job, int dtype, Piece piece, int16_t *restrict levels, float *restrict decoded,
                         float *restrict quotients) {
    const float *x = job->x + piece.start;
    const float *column_logs = job->column_logs + piece.column, *columns = job->columns + piece.column;
    float row_log = job->row_logs[piece.row], row = job->rows[piece.row], inverse = job->inverse;
    uint32_t unit = job->unit, size = 0;
    for (int64_t i = 0; i < piece.count; i++) {
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

CLONES Found log_piece(const void *data, Piece piece) {
    const Logs *job = data;
    int16_t *levels = job->levels + piece.start;
    float *decoded = job->decoded + piece.start, *quotients = job->quotients + piece.start;
    if (job->dtype == FLOAT32) return logs(job, FLOAT32, piece, levels, decoded, quotients);
    if (job->dtype == BFLOAT16) return logs(job, BFLOAT16, piece, levels, decoded, quotients);
    return logs(job, FLOAT16, piece, levels, decoded, quotients);
}

// Fill levels, decoded numbers and their quotients by the original ones of exp_avg_sq x, 0 for a negative one; zeros are
// `SAME`.
void log_levels(const float *x, const float *row_logs, const float *column_logs, const float *rows,
                const float *columns, float inverse, uint32_t unit, int dtype, int64_t R, int64_t C, int16_t *levels,
                float *decoded, float *quotients, double *sizes) {
    Logs job = {x, row_logs, column_logs, rows, columns, inverse, unit, dtype, levels, decoded, quotients};
    for_pieces(log_piece, &job, R, C, sizes);
}

typedef struct {
    const int16_t *levels;
    const float *rows, *columns;
    uint32_t unit;
    Target out;
} LogDecode;

CLONES Found log_decode_piece(const void *data, Piece piece) {
    const LogDecode *job = data;
    const int16_t *levels = job->levels + piece.start;
    const float *columns = job->columns + piece.column, row = job->rows[piece.row];
    uint32_t unit = job->unit;
    float *restrict out = job->out.numbers + place(job->out.rows, job->out.C, piece);
    for (int64_t i = 0; i < piece.count; i++)
        out[i] = power(levels[i], unit, row, columns[i]) * (levels[i] == SAME ? 0.0f : 1.0f);
    return (Found){0};
}

void log_decode(const int16_t *levels, const float *rows, const float *columns, uint32_t unit, int64_t R, int64_t C,
                float *out, const int64_t *out_rows) {
    LogDecode job = {levels, rows, columns, unit, {out, out_rows, C}};
    for_pieces(log_decode_piece, &job, R, C, NULL);
}

// Return how many levels are `EXACT`, and fill in their positions, of which there is room for as many as levels.
CLONES int64_t find_exact(const int16_t *levels, int64_t count, int64_t *positions) {
    int64_t found = 0;
    for (int64_t start = 0; start < count; start += 256) {
        int64_t end = least(start + 256, count);
        int any = 0;
        for (int64_t i = start; i < end; i++) any |= levels[i] == EXACT;
        for (int64_t i = start; any && i < end; i++) {
            positions[found] = i;
            found += levels[i] == EXACT;
        }
    }
    return found;
}
