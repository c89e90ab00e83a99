// Products of one to four rows of x with integer codes. Each row of the weight is read once, in one stream. A vector of
// codes is multiplied with the digits of every token while it is in a register. A span is as many columns as have their
// products added up as integers, before a scale multiplies the sum.
#include "../codings.h"
#include "digits.h"
#include "steps.h"
#include "table.h"

typedef struct {
    float *token_scales;    // [M]
    Integers *offset_sums;  // [spans][M][digits]: -offset * the sum of the digits. Sums of products begin with it,
                            // because codes are too large by the offset
    float *group_sums;      // [padded G / LANES][M][LANES]: the same for each group, as one number; the sum of the
                            // digits itself if groups have offsets
    Integers *digits;       // [steps][M][digits][halves]: for nibbles, the first half has the even columns of a step,
                            // for planes the even pieces
    Table table;            // of table4
    int64_t stored_groups;  // of a row of a format of another program
    int64_t scale_length;   // the floats that the scales of a row take in memory
} Tokens;

// So many rows of the weight are multiplied side by side if they have at most MOST_SUMS sums, which stay in registers.
// They share the loads of digits, which take as long as the products: with one token and a weight in the caches, a
// tenth to a fifth of the time.
#define SIDE_BY_SIDE (SUMS > 12 ? 4 : 2)
#define MOST_SUMS (4 * SIDE_BY_SIDE)
// Up to HALVED_SUMS sums are each computed in two halves: a product waits some cycles for the sum before it, in which the
// other half can begin. With a weight in the caches, one token takes a fifth less time, and a third less with AVX-VNNI.

// The kinds of spans: a row with one scale, the groups within one step, each in both halves of its codes or in one of
// them, a group of one or two steps, which the compiler then knows, or of any number of steps.
enum { APART = -3, WHOLE_ROW = -2, WITHIN = -1, SEVERAL = 0, ONE = 1, TWO = 2 };

static int64_t padded_length(const Product *p) { return round_up(p->weight.K, COLUMNS_OF(kind_of(p))); }
static int64_t padded_groups(const Product *p) { return round_up(groups_of(p), LANES); }

// Return the columns of a span: those of a row with one scale, of a group, or of the groups within one vector.
static int64_t span_columns(const Product *p) {
    int64_t size = p->weight.group_size, columns = COLUMNS_OF(kind_of(p));
    return !size ? padded_length(p) : size < columns ? columns : size;
}

static int64_t spans_of(const Product *p) { return padded_length(p) / span_columns(p); }

static int span_of(const Product *p) {
    int64_t size = p->weight.group_size, step = COLUMNS_OF(kind_of(p));
    if (!size) return WHOLE_ROW;
    if (p->weight.family) return IN_PLANES(kind_of(p)) && size <= PIECE ? APART : WITHIN;
    if (size < step || (size == step && p->weight.bits == 8)) return WITHIN;
    return size == step ? ONE : size == 2 * step && p->weight.digits > 1 ? TWO : SEVERAL;
}

// Return whether the offset of nibbles is subtracted for all groups of a row at once, in float32. That saves loads in
// each step, and is as exact while the sums of a group have no more digits than float32.
static inline int has_group_sums(int kind, int digits) {
    return (kind == NIBBLES && digits < 3) || kind & AFFINE_CODES;
}

// Codes of affine with a fixed zero point are like nibbles; others have an offset for each group.
static inline int has_offset_of_groups(const Product *p) {
    return p->weight.family == AFFINE && p->weight.offset != FIXED_ZERO;
}

// Return the number that the sums of digits are multiplied by: less the offset of codes, or 1 if groups have theirs.
static int32_t factor_of_sums(const Product *p) {
    if (has_offset_of_groups(p)) return 1;
    return p->weight.family == AFFINE ? -(1 << (p->weight.bits - 1)) : -offset_of(kind_of(p));
}

// A step has to hold whole groups. So a group of the file counts as `repeats` smaller ones that share its scale, each
// of as many columns as the largest power of two that divides the group, but at most a step.
int prepare_bytes(Product *p) {
    Weight *w = &p->weight;
    int64_t size = w->group_size ? w->group_size : w->K, divisor = size & -size;
    if (w->family == FLOAT8_GROUPS || divisor < 8) return 0;
    // NEON multiplies signed bytes alone.
    if (w->bits == 8 && !BYTE_OFFSET) return 0;
    p->table_digits = p->table ? table_of(p->table).digits : 1;
    if (p->table_digits == 0 || (p->table_digits == 2 && w->digits == 3)) return 0;
#ifdef __AVX512BF16__
    // One product of bfloat16 takes less time than three of digits.
    if (p->table_digits == 2 && w->dtype == BFLOAT16) p->table_digits = NO_DIGITS;
#endif
    // Zero points and offsets are subtracted from a sum that is many times as large, which costs float32 too many bits.
    if (w->family == AFFINE && w->digits == 3) return 0;
    w->group_size = least(divisor, COLUMNS_OF(kind_of(p)));
    p->repeats = size / w->group_size;
    return 1;
}

int64_t few_rows_bytes(const Product *p) {
    int64_t vectors = p->M * p->weight.digits;
    return round_up(p->M * 4, BYTES) + vectors * (spans_of(p) * BYTES + padded_length(p)) + p->M * padded_groups(p) * 4;
}

static Tokens tokens_at(const Product *p, int8_t *memory) {
    Tokens tokens = {.token_scales = (float *)memory};
    tokens.offset_sums = (Integers *)(memory + round_up(p->M * 4, BYTES));
    tokens.group_sums = (float *)(tokens.offset_sums + p->M * p->weight.digits * spans_of(p));
    tokens.digits = (Integers *)(tokens.group_sums + p->M * padded_groups(p));
    return tokens;
}

// Write the digits of a step of token m, and add the digits of each four columns of a half to `sums`.
static inline void write_step(const Product *p, const Tokens *tokens, int64_t m, int64_t k, Floats per_unit,
                              Integers sums[2][3]) {
    const Weight *w = &p->weight;
    const char *x = (const char *)p->x + m * w->K * itemsize(w->dtype);
    int64_t columns = COLUMNS_OF(kind_of(p)), halves = HALVES_OF(kind_of(p)), digits = w->digits;
    Integers *step = tokens->digits + (k / columns * p->M + m) * digits * halves, digit_vectors[3];
    for (int half = 0; half < halves; half++) {
        write_digits(x, w->dtype, k + half * BYTES, w->K, per_unit, (int)digits, digit_vectors);
        for (int d = 0; d < digits; d++) step[d * halves + half] = digit_vectors[d];
    }
    for (int d = 0; d < digits; d++) {
        if (w->bits == 4) split_step(step + d * halves, 1);
        else if (halves == 2) split_step(step + d * halves, PIECE);
        for (int half = 0; half < halves; half++)
            sums[half][d] = add_products_of_bytes(sums[half][d], all_bytes(1), step[d * halves + half]);
    }
}

// Write the sums of token m over the groups of a span, or over those in one half of its codes. The lanes of `sums` hold
// equal shares of their columns.
static void write_group_sums(const Product *p, const Tokens *tokens, int64_t m, int64_t span, int half, Floats sums) {
    int64_t groups = span_columns(p) / p->weight.group_size, is_apart = span_of(p) == APART;
    int64_t count = is_apart ? groups / 2 : groups, together = is_apart ? PIECE / p->weight.group_size : 0;
    for (int64_t i = 0; i < count; i++) {
        // Behind the groups of each piece come as many of the other half.
        int64_t g = span * groups + i + (i & -together) + half * together;
        float sum = 0;
        for (int64_t lane = 0; lane < LANES / count; lane++) sum += sums[i * (LANES / count) + lane];
        // There are no groups in the rest of the last vector, and their sums are 0.
        if (g < padded_groups(p)) tokens->group_sums[(g / LANES * p->M + m) * LANES + g % LANES] = sum;
    }
}

// Write token m as `add_bfloat16` takes it.
static void write_bfloat16(const Product *p, const Tokens *tokens, int64_t m) {
    int64_t K = p->weight.K, columns = COLUMNS_OF(BFLOATS);
    const uint16_t *x = (const uint16_t *)p->x + m * K;
    float top = largest_magnitude(x, BFLOAT16, K);
    tokens->token_scales[m] = top != top ? top : 1;
    for (int64_t k = 0; k < K; k += columns) {
        uint16_t *step = (uint16_t *)(tokens->digits + (k / columns * p->M + m) * 4), room[2 * BYTES] = {0};
        memcpy(room, x + k, 2 * least(columns, K - k));
        for (int i = 0; i < 4; i++)
            for (int word = 0; word < BYTES / 2; word++) step[i * (BYTES / 2) + word] = room[4 * word + i];
    }
}

static void write_token(const Product *p, const Tokens *tokens, int64_t m) {
    const Weight *w = &p->weight;
    if (kind_of(p) == BFLOATS) {
        write_bfloat16(p, tokens, m);
        return;
    }
    int64_t columns = span_columns(p), step = COLUMNS_OF(kind_of(p));
    int32_t factor = factor_of_sums(p);
    float top = largest_magnitude((const char *)p->x + m * w->K * itemsize(w->dtype), w->dtype, w->K);
    Floats per_unit = all_floats(1 / unit_of(top, w->digits));
    tokens->token_scales[m] = top / 127;
    for (int64_t g = 0; g < padded_groups(p); g += LANES)
        *(Floats *)(tokens->group_sums + g * p->M + m * LANES) = all_floats(0);
    for (int64_t span = 0; span < spans_of(p); span++) {
        Integers sums[2][3] = {{all_integers(0)}};
        for (int64_t k = 0; k < columns; k += step) write_step(p, tokens, m, span * columns + k, per_unit, sums);
        for (int half = 0; half < 2 && span_of(p) == APART; half++)
            write_group_sums(p, tokens, m, span, half, join_digits(sums[half], w->digits) * all_floats((float)factor));
        for (int d = 0; d < w->digits; d++)
            tokens->offset_sums[(span * p->M + m) * w->digits + d] = sums[0][d] = (sums[0][d] + sums[1][d]) * factor;
        // Second digits of a table are multiplied with first digits of x.
        if (kind_of(p) == WIDE_TABLE) tokens->offset_sums[(span * p->M + m) * w->digits + 1] += sums[0][0];
        if (has_group_sums(kind_of(p), w->digits) && span_of(p) != APART)
            write_group_sums(p, tokens, m, span, 0, join_digits(sums[0], w->digits));
    }
}

// A row of the weight, or several that are multiplied side by side.
typedef struct {
    const uint8_t *codes[SIDE_BY_SIDE];
    const float *scale;  // [rows][scales]: those of groups, and behind scale_length offsets of affine
    int64_t scales;      // the distance of the scales of two rows
    const Table *table;
    int64_t fetched_bytes;  // how far ahead codes are fetched: FETCHED_BYTES, but at least behind all of these rows
} Rows;

// The sums of products of the rows and their tokens.
typedef Integers Sums[SIDE_BY_SIDE][FEW_ROWS * 3];

// Multiply a vector of codes of rows `first` to `last` - 1 with the digits of a step, and add the products to `products`,
// or those of the second half to the sums behind them, if halves are apart. `left` bytes of the rows begin at `at`.
static inline __attribute__((always_inline)) void add_products(const Rows *weight, int64_t at, int64_t left,
                                                               const Integers *digits, int first, int last, int vectors,
                                                               int kind, int is_apart, Sums *products) {
    const int halves = HALVES_OF(kind);
    Integers loaded[SIDE_BY_SIDE][2], seconds[SIDE_BY_SIDE][2];
    for (int row = first; row < last; row++) {
        // As fetch_ahead. In a function of vectors.h, GCC 12 orders these fetches in another way, and a product of 8192
        // columns from memory took 1.2 times as long on AMD's Zen 4.
        __builtin_prefetch(weight->codes[row] + at + weight->fetched_bytes, 0, 2);
        load_step(weight->codes[row] + at, kind, left, loaded[row]);
        for (int half = 0; half < halves; half++) {
            if (kind == WIDE_TABLE) seconds[row][half] = looked_up(weight->table->values[1], loaded[row][half]);
            if (kind == INDEXES) loaded[row][half] = values_of(loaded[row][half]);
            if (kind == TABLE || kind == WIDE_TABLE)
                loaded[row][half] = looked_up(weight->table->values[0], loaded[row][half]);
        }
    }
    for (int half = 0; half < halves; half++)
        for (int i = 0; i < vectors; i++) {
            Integers digit = digits[i * halves + half];
            if (last - first > 1) digit = loaded_once(digit);
            for (int row = first; row < last; row++) {
                Integers *sum = &products[is_apart ? half : 0][row][i];
                *sum = add_products_of_bytes(*sum, loaded[row][half], digit);
                if (kind == WIDE_TABLE && i % 2)
                    *sum = add_products_of_bytes(*sum, seconds[row][half], digits[(i - 1) * halves + half]);
            }
        }
}

// Add the products of a row with one scale, which `totals` has to be multiplied by yet.
static inline __attribute__((always_inline)) void add_whole_row(const Rows *weight, const Integers *x,
                                                                const Integers *offset_sums, int64_t bytes, int rows,
                                                                int M, int digits, int kind,
                                                                Floats totals[SIDE_BY_SIDE][FEW_ROWS]) {
    const int vectors = M * digits, step = vectors * HALVES_OF(kind);
    Sums products, others;
    int64_t at = 0;
    for (int row = 0; row < rows; row++)
        for (int i = 0; i < vectors; i++) {
            products[row][i] = offset_sums[i];
            others[row][i] = all_integers(0);
        }
    for (; rows * vectors <= HALVED_SUMS && at + 2 * BYTES <= bytes; at += 2 * BYTES, x += 2 * step) {
        add_products(weight, at, BYTES, x, 0, rows, vectors, kind, 0, &products);
        add_products(weight, at + BYTES, BYTES, x + step, 0, rows, vectors, kind, 0, &others);
    }
    for (; at + BYTES <= bytes; at += BYTES, x += step)
        add_products(weight, at, BYTES, x, 0, rows, vectors, kind, 0, &products);
    if (at < bytes) add_products(weight, at, bytes - at, x, 0, rows, vectors, kind, 0, &products);
    for (int row = 0; row < rows; row++) {
        for (int i = 0; i < vectors; i++) products[row][i] += others[row][i];
        for (int m = 0; m < M; m++) totals[row][m] = join_digits(products[row] + m * digits, digits);
    }
}

// Return the scales of the lanes of a half of the codes of a step. `lanes` are the groups that they belong to.
static inline __attribute__((always_inline)) Floats factors_of(const float *scale, int64_t groups, Integers lanes,
                                                               int span) {
    if (span != WITHIN && span != APART) return all_floats(*scale);
    return groups <= 4 ? permuted_four(scale, lanes) : permuted(*(const Floats *)scale, lanes);
}

#ifdef __AVX512BF16__
// Add the products of codes that are indices into a table of bfloat16 with tokens in bfloat16, times their scales. Word i
// of each vector of x has column 4 * i or one of the three behind it, as the words of the codes have them.
static inline __attribute__((always_inline)) void add_bfloat16(const Rows *weight, int64_t at, int64_t left,
                                                               const Integers *x, int64_t scale_at, int64_t groups,
                                                               Integers lanes, int rows, int M,
                                                               Floats totals[SIDE_BY_SIDE][FEW_ROWS]) {
    const __m512i table = (__m512i)*(const Integers *)weight->table->bfloat16;
    for (int row = 0; row < rows; row++) {
        __builtin_prefetch(weight->codes[row] + at + weight->fetched_bytes, 0, 2);
        __m512i codes = (__m512i)loaded_once(load_bytes(weight->codes[row] + at, left));
        const float *scale = weight->scale + row * weight->scales + scale_at;
        Floats sums[FEW_ROWS], factors = factors_of(scale, groups, lanes, WITHIN);
        for (int m = 0; m < M; m++) sums[m] = all_floats(0);
        for (int i = 0; i < 4; i++) {
            // The lowest five bits of a word are the index. The table stands there twice, so the fifth has no effect.
            __m512bh values = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 4 * i), table);
            for (int m = 0; m < M; m++) sums[m] = _mm512_dpbf16_ps(sums[m], values, (__m512bh)x[4 * m + i]);
        }
        for (int m = 0; m < M; m++) totals[row][m] = multiply_add(sums[m], factors, totals[row][m]);
    }
}
#endif

// Add the products of a span times their scales to `totals`. `left` bytes of the rows begin at its last step.
static inline __attribute__((always_inline)) void add_span(const Rows *weight, int64_t at, int64_t left,
                                                           const Integers *x, const Integers *offset_sums,
                                                           int64_t scale_at, int64_t groups, const Integers lanes[2],
                                                           int64_t steps, int rows, int M, int digits, int kind,
                                                           int span, Floats totals[SIDE_BY_SIDE][FEW_ROWS]) {
    const int vectors = M * digits, step = vectors * HALVES_OF(kind), parts = span == APART ? 2 : 1;
    Sums products[2];
#ifdef __AVX512BF16__
    if (kind == BFLOATS) {
        add_bfloat16(weight, at, left, x, scale_at, groups, lanes[0], rows, M, totals);
        return;
    }
#endif
    for (int part = 0; part < parts; part++)
        for (int row = 0; row < rows; row++)
            for (int i = 0; i < vectors; i++)
                products[part][row][i] = has_group_sums(kind, digits) ? all_integers(0) : offset_sums[i];
    for (int64_t i = 0; i < steps && !IN_PLANES(kind); i++)
        add_products(weight, at + i * STEP_BYTES(kind), left, x + i * step, 0, rows, vectors, kind, 0, products);
    if (IN_PLANES(kind)) {
        Integers loaded[2 * FEW_ROWS * 3];
        for (int i = 0; i < step; i++) loaded[i] = rows > 1 ? loaded_once(x[i]) : x[i];
        for (int row = 0; row < rows; row++)
            add_products(weight, at, left, loaded, row, row + 1, vectors, kind, parts == 2, products);
    }
    for (int row = 0; row < rows; row++)
        for (int part = 0; part < parts; part++) {
            Floats factors = factors_of(weight->scale + row * weight->scales + scale_at, groups, lanes[part], span);
            for (int m = 0; m < M; m++)
                totals[row][m] =
                    multiply_add(join_digits(products[part][row] + m * digits, digits), factors, totals[row][m]);
        }
}

// Add the products of a row whose groups have scales.
static inline __attribute__((always_inline)) void add_groups(const Rows *weight, const Integers *x,
                                                             const Integers *offset_sums, int64_t bytes, int64_t size,
                                                             int rows, int M, int digits, int kind, int span,
                                                             Floats totals[SIDE_BY_SIDE][FEW_ROWS]) {
    const int vectors = M * digits;
    // Groups within a vector have several scales, each for equally many lanes of the sums.
    const int64_t columns = COLUMNS_OF(kind), groups = span == WITHIN || span == APART ? columns / size : 1;
    const int64_t steps = span == SEVERAL ? size / columns : span == TWO ? 2 : 1;
    const Integers lanes[2] = {groups_of_lanes(kind, 0, size), groups_of_lanes(kind, 1, size)};
    int64_t at = 0, scale_at = 0;
    for (int row = 0; row < rows; row++)
        for (int m = 0; m < M; m++) totals[row][m] = all_floats(0);
    for (; at + steps * STEP_BYTES(kind) <= bytes; at += steps * STEP_BYTES(kind), scale_at += groups) {
        add_span(weight, at, STEP_BYTES(kind), x, offset_sums, scale_at, groups, lanes, steps, rows, M, digits, kind,
                 span, totals);
        x += steps * vectors * HALVES_OF(kind);
        offset_sums += vectors;
    }
    if ((span == WITHIN || span == APART) && at < bytes)
        add_span(weight, at, bytes - at, x, offset_sums, scale_at, groups, lanes, steps, rows, M, digits, kind, span,
                 totals);
}

// Add the scales, or the offsets, of all groups times the sums of x there.
static inline __attribute__((always_inline)) void add_group_sums(const Rows *weight, const float *group_sums, int64_t G,
                                                                 int64_t offsets, int rows, int M,
                                                                 Floats totals[SIDE_BY_SIDE][FEW_ROWS]) {
    for (int64_t g = 0; g < G; g += LANES, group_sums += M * LANES)
        for (int row = 0; row < rows; row++) {
            Floats factors = *(const Floats *)(weight->scale + row * weight->scales + offsets + g);
            for (int m = 0; m < M; m++)
                totals[row][m] =
                    multiply_add(*(const Floats *)(group_sums + m * LANES), factors, totals[row][m]);
        }
}

// Let each number stand `repeats` times.
static void repeat(float *numbers, int64_t count, int64_t repeats) {
    for (int64_t i = count - 1; i >= 0; i--)
        for (int64_t copy = 0; copy < repeats; copy++) numbers[i * repeats + copy] = numbers[i];
}

// Write the scales of a row of a format of another program, and for affine its offsets, with zero points in them.
static inline __attribute__((always_inline)) void write_groups_of_row(const Product *p, const Tokens *tokens, int64_t n,
                                                                      float *to) {
    int64_t length = tokens->scale_length, G = tokens->stored_groups;
    Groups groups = {.scale = to, .offset = to + length, .zero = to + 2 * length};
    write_scales_of_coding(p, n, G, groups);
    if (has_offset_of_groups(p)) write_offsets(p, n, G, groups);
    if (has_offset_of_groups(p) && has_zeros(&p->weight))
        for (int64_t g = 0; g < G; g += LANES)
            *(Floats *)(groups.offset + g) = -*(Floats *)(groups.zero + g) * *(Floats *)(groups.scale + g);
    if (p->repeats == 1) return;
    repeat(groups.scale, G, p->repeats);
    if (has_offset_of_groups(p)) repeat(groups.offset, G, p->repeats);
}

// Return the floats that the scales of a row take, with its offsets and zero points.
static int64_t numbers_length(const Product *p) { return scale_length(p) * (p->weight.family ? 3 : 1); }

// Compiled once, and not in each function below.
static __attribute__((noinline)) void write_decoded_scales(const Product *p, const Tokens *tokens, int64_t n,
                                                           float *to) {
    if (p->weight.family) write_groups_of_row(p, tokens, n, to);
    else write_scales(p, n, tokens->scale_length, to);
}

// Write the scales of a row. Plain ones, which codes of these kinds have, need so few instructions that a call would
// take a tenth of the product's time. The first ones of the next row are fetched meanwhile: if they come from memory,
// a product of 4096 columns waits for them a tenth of its time.
static inline __attribute__((always_inline)) void write_scales_of_row(const Product *p, const Tokens *tokens, int64_t n,
                                                                      int kind, float *to) {
    int64_t G = groups_of(p);
    if (kind != NIBBLES && kind != BYTE_CODES) {
        write_decoded_scales(p, tokens, n, to);
        return;
    }
    __builtin_prefetch((const char *)p->scale + (n + 1) * G * itemsize(p->weight.scale_dtype), 0, 3);
    copy_as_float32(p->scale, p->weight.scale_dtype, n * G, G, round_up(G, LANES), to);
}

// Fill the sums of as many rows of a block as `rows` divides, and return their number.
static inline __attribute__((always_inline)) int64_t multiply_rows(const Product *p, const Tokens *tokens,
                                                                   int64_t first, int64_t count, float *scale,
                                                                   int rows, int M, int digits, int kind, int span,
                                                                   float results[FEW_ROWS][LANES]) {
    int64_t bytes = p->weight.K * bits_of(kind) >> 3, size = p->weight.group_size, scales = numbers_length(p), n = 0;
    int64_t offsets = has_offset_of_groups(p) ? scale_length(p) : 0;
    for (; n + rows <= count; n += rows) {
        Rows weight = {.scale = scale, .scales = scales, .table = &tokens->table};
        weight.fetched_bytes = rows * bytes > FETCHED_BYTES ? rows * bytes : FETCHED_BYTES;
        Floats totals[SIDE_BY_SIDE][FEW_ROWS];
        for (int row = 0; row < rows; row++) {
            weight.codes[row] = row_of(p, first + n + row);
            if (span != WHOLE_ROW) write_scales_of_row(p, tokens, first + n + row, kind, scale + row * scales);
        }
        if (span == WHOLE_ROW)
            add_whole_row(&weight, tokens->digits, tokens->offset_sums, bytes, rows, M, digits, kind, totals);
        else
            add_groups(&weight, tokens->digits, tokens->offset_sums, bytes, size, rows, M, digits, kind, span, totals);
        if (has_group_sums(kind, digits))
            add_group_sums(&weight, tokens->group_sums, groups_of(p), offsets, rows, M, totals);
        for (int row = 0; row < rows; row++)
            for (int m = 0; m < M; m++) results[m][n + row] = sum_of(totals[row][m]);
    }
    return n;
}

typedef int64_t (*MultiplyRows)(const Product *, const Tokens *, int64_t, int64_t, float *, float (*)[LANES]);

// The compiler gets these numbers as constants, so that the sums stay in registers. Each function is compiled for
// itself: in one function with all loops, the compiler keeps constants and addresses in memory.
#define FUNCTION(ROWS, M, DIGITS, KIND, SPAN)                                                       \
    static __attribute__((noinline)) int64_t multiply_##ROWS##_##M##_##DIGITS##_##KIND##_##SPAN(    \
        const Product *p, const Tokens *tokens, int64_t first, int64_t count, float *scale,         \
        float results[FEW_ROWS][LANES]) {                                                           \
        return multiply_rows(p, tokens, first, count, scale, ROWS, M, DIGITS, KIND, SPAN, results); \
    }
#define CASE(ROWS, M_, DIGITS, KIND, SPAN)                                                                     \
    if ((ROWS == 1 || ROWS * M_ * DIGITS <= MOST_SUMS) && rows == ROWS && p->M == M_ &&                       \
        p->weight.digits == DIGITS && kind_of(p) == KIND && span_of(p) == SPAN)                               \
        return multiply_##ROWS##_##M_##_##DIGITS##_##KIND##_##SPAN;
#define FOR_TOKENS(DO, ...)                                                                                     \
    DO(1, 1, __VA_ARGS__) DO(1, 2, __VA_ARGS__) DO(1, 3, __VA_ARGS__) DO(1, 4, __VA_ARGS__)                     \
    DO(SIDE_BY_SIDE, 1, __VA_ARGS__) DO(SIDE_BY_SIDE, 2, __VA_ARGS__) DO(SIDE_BY_SIDE, 3, __VA_ARGS__)          \
    DO(SIDE_BY_SIDE, 4, __VA_ARGS__)
#define FOR_DIGITS(DO, ...) FOR_TOKENS(DO, 2, __VA_ARGS__) FOR_TOKENS(DO, 3, __VA_ARGS__)
#define FOR_PLANES(DO, KIND) FOR_TOKENS(DO, 2, KIND, WITHIN) FOR_TOKENS(DO, 2, KIND, APART)
#define FOR_ALL(DO)                                                                                             \
    FOR_DIGITS(DO, NIBBLES, WITHIN) FOR_DIGITS(DO, NIBBLES, ONE) FOR_LONG_GROUPS(DO)                            \
    FOR_DIGITS(DO, INDEXES, WITHIN) FOR_INDEXES_OF_ONE(DO)                                                      \
    FOR_DIGITS(DO, BYTE_CODES, WITHIN) FOR_DIGITS(DO, BYTE_CODES, TWO) FOR_DIGITS(DO, BYTE_CODES, SEVERAL)      \
    FOR_DIGITS(DO, BYTE_CODES, WHOLE_ROW) FOR_TOKENS(DO, 1, BYTE_CODES, WITHIN)                                 \
    FOR_TOKENS(DO, 1, BYTE_CODES, SEVERAL) FOR_TOKENS(DO, 1, BYTE_CODES, WHOLE_ROW)                             \
    FOR_TOKENS(DO, 2, CODES4, WITHIN) FOR_DIGITS(DO, TABLE, WITHIN) FOR_TOKENS(DO, 2, WIDE_TABLE, WITHIN)       \
    FOR_PLANES(DO, CODES2) FOR_PLANES(DO, CODES3) FOR_PLANES(DO, CODES5) FOR_PLANES(DO, CODES6)                 \
    FOR_TOKENS(DO, 2, CODES8, WITHIN) FOR_BFLOATS(DO)
// Groups of nibbles have 32, 64 or 128 columns, and those of codebook4 have 32.
#if BYTES == 64
#define FOR_LONG_GROUPS(DO)
#elif BYTES == 32
#define FOR_LONG_GROUPS(DO) FOR_DIGITS(DO, NIBBLES, TWO)
#else
#define FOR_LONG_GROUPS(DO) FOR_DIGITS(DO, NIBBLES, TWO) FOR_DIGITS(DO, NIBBLES, SEVERAL)
#endif
#if BYTES == 16
#define FOR_INDEXES_OF_ONE(DO) FOR_DIGITS(DO, INDEXES, ONE)
#else
#define FOR_INDEXES_OF_ONE(DO)
#endif

#ifdef __AVX512BF16__
#define FOR_BFLOATS(DO) FOR_TOKENS(DO, 2, BFLOATS, WITHIN)
#else
#define FOR_BFLOATS(DO)
#endif

FOR_ALL(FUNCTION)

// Return the function that multiplies so many rows of the weight side by side; NULL if there is none.
static MultiplyRows function_of(const Product *p, int rows) {
    FOR_ALL(CASE)
    return NULL;
}

static void multiply_block(const Product *p, const Tokens *tokens, MultiplyRows single, MultiplyRows several,
                           int64_t first, int64_t count) {
    const Weight *w = &p->weight;
    int64_t numbers = SIDE_BY_SIDE * numbers_length(p), length = tokens->scale_length;
    // A vector of scales that lies on two lines of a cache takes twice as long to store.
    float results[FEW_ROWS][LANES], scale[numbers] __attribute__((aligned(ALIGNMENT)));
    // Sums of x behind the last group are 0. What lies there is multiplied with them, and may not be NaN.
    for (int64_t end = length; w->family && end <= numbers; end += length)
        for (int64_t i = end - 2 * LANES; i < end; i += LANES) *(Floats *)(scale + i) = all_floats(0);
    int64_t n = several ? several(p, tokens, first, count, scale, results) : 0;
    float(*rest)[LANES] = (float(*)[LANES])(results[0] + n);
    if (n < count) single(p, tokens, first + n, count - n, scale, rest);
    Floats bias = p->bias ? load_floats(p->bias, w->dtype, first, count) : all_floats(0);
    Floats scales = w->group_size ? all_floats(tokens->table.unit) : load_floats(p->scale, w->scale_dtype, first, count);
    for (int64_t m = 0; m < p->M; m++) {
        Floats factors = scales * all_floats(tokens->token_scales[m]);
        store_floats(p->out, w->dtype, m * w->N + first, count, multiply_add(*(Floats *)results[m], factors, bias));
    }
}

void multiply_few_rows(const Product *p, int threads, int8_t *memory) {
    Tokens tokens = tokens_at(p, memory);
    tokens.stored_groups = p->weight.family ? coded_groups(p) : 0;
    tokens.scale_length = scale_length(p);
    tokens.table = p->weight.family == TABLE4 ? table_of(p->table) : (Table){.unit = 1};
#ifdef __AVX512BF16__
    if (kind_of(p) == BFLOATS) set_bfloat16(&tokens.table, p->table);
#endif
    MultiplyRows single = function_of(p, 1), several = function_of(p, SIDE_BY_SIDE);
    for (int64_t m = 0; m < p->M; m++) write_token(p, &tokens, m);
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t n = 0; n < p->weight.N; n += LANES)
        multiply_block(p, &tokens, single, several, n, least(LANES, p->weight.N - n));
}

// Return the product of up to four tokens from `token` on.
static Product four_of(const Product *p, int64_t token) {
    const Weight *w = &p->weight;
    Product four = *p;
    four.M = least(FEW_ROWS, p->M - token);
    four.x = (const char *)p->x + token * w->K * itemsize(w->dtype);
    four.out = (char *)p->out + token * w->N * itemsize(w->dtype);
    return four;
}

int64_t bytes_in_fours(const Product *p) {
    Product four = four_of(p, 0);
    return few_rows_bytes(&four);
}

void multiply_in_fours(const Product *p, int threads, int8_t *memory) {
    for (int64_t token = 0; token < p->M; token += FEW_ROWS) {
        Product four = four_of(p, token);
        multiply_few_rows(&four, threads, memory);
    }
}
