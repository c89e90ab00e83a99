// The 16 values of a table of table4 as one or two signed bytes each: value = unit * (digit + second / 256).
#pragma once
#include <math.h>
#include "../vectors.h"

typedef struct {
    int digits;             // 0 if the values are not finite
    float unit;             // 1 for other formats
    uint8_t values[2][16];  // each digit plus BYTE_OFFSET
    uint16_t bfloat16[32];  // value / unit rounded to bfloat16, and all of them again
} Table;

// Values that are integers of up to 127 times a power of two, as those of MXFP4 and IQ4, have one digit. Others have two
// and are rounded to 1 / 32512 of the largest.
static Table table_of(const float *values) {
    float top = 0, unit = 1;
    Table table = {.digits = 1};
    for (int i = 0; i < 16; i++) {
        if (!(fabsf(values[i]) < INFINITY)) return (Table){.digits = 0};
        if (fabsf(values[i]) > top) top = fabsf(values[i]);
    }
    if (top < SMALLEST_TOP) return (Table){.digits = 0};
    while (top > 127 * unit) unit *= 2;
    while (top <= 63.5f * unit) unit /= 2;
    for (int i = 0; i < 16; i++)
        if (rintf(values[i] / unit) != values[i] / unit) table.digits = 2;
    table.unit = table.digits == 1 ? unit : top / 127;
    for (int i = 0; i < 16; i++) {
        int number = (int)rintf(values[i] / table.unit * 256), digit = (number + 128) >> 8;
        table.values[0][i] = (uint8_t)(digit + BYTE_OFFSET);
        table.values[1][i] = (uint8_t)(number - 256 * digit + BYTE_OFFSET);
    }
    return table;
}

#ifdef __AVX512BF16__
#define FACTORS 32

// Hold the values as bfloat16, each times a factor that the unit takes back. Of some factors we take the one by which the
// values are rounded least: the error of NF4's becomes two thirds, and FP4's are exact.
static void set_bfloat16(Table *table, const float *values) {
    uint32_t bits;
    float unit, least_error = INFINITY;
    memcpy(&bits, &table->unit, 4);
    // The exponent alone is the power of two below. 256 times that is above all values, so sums are no larger than x's.
    bits &= 0x7f800000;
    memcpy(&unit, &bits, 4);
    for (int i = 0; i < FACTORS; i++) {
        float factor = 1 - (float)i / (2 * FACTORS);
        Floats scaled = *(const Floats *)values * all_floats(factor / (256 * unit));
        uint16_t rounded[16];
        store_floats(rounded, BFLOAT16, 0, 16, scaled);
        Floats errors = load_floats(rounded, BFLOAT16, 0, 16) - scaled;
        float error = sum_of(errors * errors) / (factor * factor);
        if (!(error < least_error)) continue;
        least_error = error;
        table->unit = 256 * unit / factor;
        for (int copy = 0; copy < 2; copy++) memcpy(table->bfloat16 + 16 * copy, rounded, 32);
    }
}
#endif
