// Activations as one number of 16 bits each: x = token_scale * number. In float32 they are two: x = token_scale *
// (number + second / 65536).
#pragma once
#define VECTORS_OF_32_BYTES
#include "../scales.h"

// Columns that x is padded to, with zeros.
#define STEP 64
// Bytes of the numbers that are held at a time: half of a second-level cache of 1 MB.
#define PANEL_BYTES (1 << 19)

typedef struct {
    float *token_scales;  // [tokens]
    float *row;           // [padded K], of the token that is being written
    int16_t *values;      // [tokens][words][padded K]
    int8_t *end;          // of this memory
} Numbers;

static inline int64_t padded_columns(const Product *p) { return round_up(p->weight.K, STEP); }
static inline int words_of(const Product *p) { return p->weight.digits == 3 ? 2 : 1; }

static inline int64_t tokens_at_once(const Product *p) {
    int64_t fit = PANEL_BYTES / (2 * words_of(p) * padded_columns(p)) / FEW_ROWS * FEW_ROWS;
    return least(fit < FEW_ROWS ? FEW_ROWS : fit, p->M);
}

static inline Numbers numbers_at(const Product *p, int8_t *memory) {
    int64_t tokens = tokens_at_once(p), padded = padded_columns(p);
    Numbers numbers = {.token_scales = (float *)memory};
    numbers.row = numbers.token_scales + round_up(tokens, ALIGNMENT / 4);
    numbers.values = (int16_t *)(numbers.row + padded);
    numbers.end = (int8_t *)(numbers.values + tokens * words_of(p) * padded);
    return numbers;
}

// Write the numbers of a step so that a vector of 16 holds columns that are `apart` (1, 2 or 4) columns apart.
static inline __attribute__((always_inline)) void write_step(const int32_t *step, int apart, int words, int64_t padded,
                                                             int16_t *values) {
    for (int i = 0; i < STEP; i++) {
        int32_t number = step[i / (16 * apart) * (16 * apart) + i % 16 * apart + i / 16 % apart];
        // A number of 24 bits becomes its highest 8 bits, rounded, and the signed rest.
        if (words == 2) values[i] = (int16_t)((number + 0x8000) >> 16);
        values[i + (words - 1) * padded] = (int16_t)number;
    }
}

// Write the numbers of a token of x, which becomes token m of those that are held.
static inline __attribute__((always_inline)) void write_token(const Product *p, const Numbers *numbers, int64_t token,
                                                              int64_t m, int apart) {
    const Weight *w = &p->weight;
    int64_t padded = padded_columns(p);
    int words = words_of(p);
    copy_as_float32(p->x, w->dtype, (token + m) * w->K, w->K, padded, numbers->row);
    float top = largest_magnitude(numbers->row, FLOAT32, padded), unit = unit_of(top, w->digits);
    numbers->token_scales[m] = words == 2 ? top / 127 : unit;
    for (int64_t k = 0; k < padded; k += STEP) {
        int16_t *values = numbers->values + m * words * padded + k;
        int32_t step[STEP];
        for (int i = 0; i < STEP; i += LANES) {
            Floats scaled = *(const Floats *)(numbers->row + k + i) * all_floats(1 / unit);
            *(Integers *)(step + i) = to_integers(scaled);
        }
        if (words == 2) write_step(step, apart, 2, padded, values);
        else write_step(step, apart, 1, padded, values);
    }
}

// Return the sum of a token's products in units of its token scale.
static inline __attribute__((always_inline)) Floats join_words(const Integers *products, int words) {
    Floats sum = to_floats(products[0]);
    return words == 1 ? sum : multiply_add(to_floats(products[1]), all_floats(0x1p-16f), sum);
}
