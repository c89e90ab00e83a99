// The 16 values of a table of table4 as one or two signed bytes each: value = unit * (digit + second / 256).
#pragma once
#include <math.h>
#include "../vectors.h"

typedef struct {
    int digits;             // 0 if the values are not finite
    float unit;             // 1 for other formats
    uint8_t values[2][16];  // each digit plus BYTE_OFFSET
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
