// What a weight's stored tensors hold: its codes as pairs of 16-bit numbers, and the scale and offset of a group.
//
//     weight = (number of the code - zero) * scale + offset
//
// Macros say how they are stored. The names are those of the formats of this package.
//   BITS    of a code: 4, eight to a word, the lowest bits first; 8, signed bytes or float8_e4m3
//   CODES   INTEGERS, FLOAT8, or TABLE: 16 numbers that the weight brings
//   SCALE   the coding of the scales of groups
//   OFFSET  whether there are zeros or offsets, and of which kind
//   GROUP   columns that share a scale; 0 for one scale a row
#pragma once

#define INTEGERS 0
#define FLOAT8 1
#define TABLE 2

#define PLAIN 0  // as x
#define FLOAT32 1
#define E8M0 2
#define E4M3 3
#define E4M3_DIVIDED 4
#define NESTED 5
#define K4 6
#define IQ4_XS 7

#define NO_OFFSET 0
#define ZERO_POINT 1
#define ZERO_POINT_MINUS_1 2
#define ROW_ZERO_POINT 3
#define FLOAT_ZERO_POINT 4
#define BIAS 5
#define MINIMUM 6

#define HAS_ZERO (OFFSET >= ZERO_POINT && OFFSET <= ROW_ZERO_POINT)
#define HAS_OFFSET (OFFSET >= FLOAT_ZERO_POINT)

// Whether codes may be scaled as numbers of 16 bits: these hold codes, scales and offsets, so that the weight alone is
// rounded. Numbers of any table need not fit 16 bits; those of the programs that have scales of few bits do.
#define IN_16_BITS                                                                                                     \
    (((SCALE == PLAIN && CODES != TABLE) || SCALE == E4M3 || SCALE == E4M3_DIVIDED || (SCALE == E8M0 && !HALF)) &&     \
     (!HAS_OFFSET || (OFFSET == BIAS && SCALE == PLAIN)))

#define PER_WORD (32 / BITS)
#define PAIRS (PER_WORD / 2)

// The memory of a stored tensor, and the distances of its rows and matrices, which are 0 if these share it.
struct Stored {
    const uint8 *data;
    long long matrix_bytes;
    int row_bytes;
};

struct Weight {
    Stored qdata, scale, group_scale, global_scale, zero_point, bias, table, nested_values, outer_scale, phase,
        nested_offset;
    int N, K, groups, outer_count;
};

DEVICE const uint8 *row_of(const Stored &stored, int n) { return stored.data + (long long)n * stored.row_bytes; }

DEVICE float float_of_number(uint16 bits) {
#if HALF
    return float_of_half(bits);
#else
    return float_of_bits((uint32)bits << 16);
#endif
}

// A float of a stored tensor whose dtype is that of the scales.
DEVICE float stored_float(const uint8 *row, int index) {
#if SCALE == FLOAT32
    return ((const float *)row)[index];
#else
    return float_of_number(((const uint16 *)row)[index]);
#endif
}

// Exponent and mantissa move to where a half has them; its exponent's bias is larger by 8.
DEVICE float float_of_float8(uint8 code) {
    return 256.0f * float_of_half((code & 0x80) << 8 | (code & 0x7F) << 7);
}

DEVICE float scale_of(const Weight &weight, int n, int group) {
    const uint8 *row = row_of(weight.scale, n);
#if SCALE == PLAIN || SCALE == FLOAT32
    return stored_float(row, group);
#elif SCALE == E8M0
    // 0 is a number below the smallest exponent, and 255 is NaN. As a bfloat16, because a choice would be a branch.
    const uint32 exponent = row[group], bits = max(exponent << 7, 64u) | (exponent + 1) >> 8 << 6;
    return float_of_bits(bits << 16);
#elif SCALE == E4M3 || SCALE == E4M3_DIVIDED
    return float_of_float8(row[group]);
#elif SCALE == NESTED
    const int outer = min((row_of(weight.phase, n)[0] + group) >> 8, weight.outer_count - 1);
    const float value = ((const float *)weight.nested_values.data)[row[group]];
    return value * ((const float *)row_of(weight.outer_scale, n))[outer] +
           ((const float *)row_of(weight.nested_offset, n))[0];
#elif SCALE == K4
    const uint8 *octets = row_of(weight.group_scale, n) + group / 8 * 12;
    const int g = group % 8;
    const int factor = g < 4 ? octets[g] & 63 : (octets[g + 4] & 15) | octets[g - 4] >> 6 << 4;
    return factor * float_of_half(((const uint16 *)row)[group / 8 * 2]);
#else
    const uint8 *octets = row_of(weight.group_scale, n) + group / 8 * 6;
    const int g = group % 8, low = octets[2 + g / 2] >> (4 * (g % 2)) & 15, high = octets[g / 4] >> (2 * (g % 4)) & 3;
    return (low + 16 * high - 32) * float_of_half(((const uint16 *)row)[group / 8]);
#endif
}

// The scale of a group as two equal numbers of 16 bits, which hold it.
DEVICE uint32 scale_pair(const Weight &weight, int n, int group) {
#if SCALE == PLAIN
    const uint32 bits = ((const uint16 *)row_of(weight.scale, n))[group];
#else
    const uint32 bits = round_number(scale_of(weight, n, group));
#endif
    return bits * 0x10001;
}

// The offset of a group likewise; -0, which leaves any number as it is, if there is none.
DEVICE uint32 offset_pair(const Weight &weight, int n, int group) {
#if OFFSET == BIAS && SCALE == PLAIN
    return ((const uint16 *)row_of(weight.bias, n))[group] * 0x10001u;
#else
    return 0x80008000;
#endif
}

// The factor of the whole sum of a row.
DEVICE float row_factor(const Weight &weight, int n) {
#if SCALE == E4M3
    return ((const float *)row_of(weight.global_scale, n))[0];
#elif SCALE == E4M3_DIVIDED
    return 1 / ((const float *)row_of(weight.global_scale, n))[0];
#elif GROUP == 0
    return scale_of(weight, n, 0);
#else
    return 1;
#endif
}

DEVICE float offset_of(const Weight &weight, int n, int group, float scale) {
#if OFFSET == FLOAT_ZERO_POINT
    return -stored_float(row_of(weight.zero_point, n), group) * scale;
#elif OFFSET == BIAS
    return stored_float(row_of(weight.bias, n), group);
#elif OFFSET == MINIMUM
    const uint8 *octets = row_of(weight.group_scale, n) + group / 8 * 12;
    const int g = group % 8;
    const int factor = g < 4 ? octets[g + 4] & 63 : octets[g + 4] >> 4 | octets[g] >> 6 << 4;
    return -factor * float_of_half(((const uint16 *)row_of(weight.scale, n))[group / 8 * 2 + 1]);
#else
    return 0;
#endif
}

// The zero of integer codes of 4 bits.
DEVICE uint32 zero_of(const Weight &weight, int n, int group) {
#if OFFSET == ROW_ZERO_POINT
    return row_of(weight.zero_point, n)[0];
#elif HAS_ZERO
    const uint32 zero = row_of(weight.zero_point, n)[group / 2] >> (4 * (group % 2)) & 15;
    return zero + (OFFSET == ZERO_POINT_MINUS_1);
#elif HAS_OFFSET
    return 0;
#else
    return 8;
#endif
}

// The numbers of 16 codes, by their bytes: those of the lower eight and of the upper eight, the low byte first.
struct Table {
    uint32 low[4], high[4];
    float unit;
};

// The weight's table, divided by a power of two near its largest number so that no number overflows in 16 bits.
DEVICE Table table_of(const Weight &weight) {
    Table table = {};
    table.unit = 1;
#if CODES == TABLE
    const float *numbers = (const float *)weight.table.data;
    uint32 largest = 0;
    UNROLL for (int i = 0; i < 16; ++i) {
        const uint32 exponent = bits_of_float(numbers[i]) & 0x7F800000;
        largest = exponent > largest && exponent < 0x7F000000 ? exponent : largest;
    }
    const uint32 unit = largest ? largest : 127u << 23;
    table.unit = float_of_bits(unit);
    const float inverse = float_of_bits((254u << 23) - unit);
    UNROLL for (int i = 0; i < 16; ++i) {
        const uint32 bits = round_number(numbers[i] * inverse);
        table.low[i / 4] |= (bits & 255) << (8 * (i % 4));
        table.high[i / 4] |= bits >> 8 << (8 * (i % 4));
    }
#endif
    return table;
}

#if CODES == TABLE
// The numbers of the codes in the lower half of a word, as two pairs.
DEVICE void look_up(uint32 &first, uint32 &second, uint32 word, uint32 half, const Table &table) {
    // The lowest three bits of a digit pick among eight bytes, and the fourth bit picks one of two such picks.
    const uint32 codes = word & 0x7777, which = half;
    const uint32 low = pick_bytes(pick_bytes(table.low[0], table.low[1], codes),
                                  pick_bytes(table.low[2], table.low[3], codes), which);
    const uint32 high = pick_bytes(pick_bytes(table.high[0], table.high[1], codes),
                                   pick_bytes(table.high[2], table.high[3], codes), which);
    first = pick_bytes(low, high, 0x5140);
    second = pick_bytes(low, high, 0x7362);
}
#endif

// The numbers of a word's codes, less their zero, as pairs of 16-bit numbers in the order of `order_numbers`.
//
// A code is put into the lowest bits of a constant whose last bit is worth 1, and what is too much is taken away.
DEVICE void unpack(uint32 (&pairs)[PAIRS], uint32 word, uint32 zero, const Table &table) {
#if CODES == TABLE
    const uint32 half = and_or(word >> 1, 0x44444444, 0x32103210);
    look_up(pairs[0], pairs[1], word, half, table);
    look_up(pairs[2], pairs[3], word >> 16, half >> 16, table);
#else
    UNROLL for (int i = 0; i < PAIRS; ++i) {
        const uint32 bits = word >> (BITS * i);
#if CODES == FLOAT8
        // Exponent and mantissa move to where a 16-bit number has them; its exponent's bias is larger by 8 or by 120.
        const uint32 high = i ? word : word << 8;
#if HALF
        pairs[i] = multiply_add(and_or(high, 0x80008000, high >> 1 & 0x3F803F80), 0x5C005C00, 0x80008000);
#else
        pairs[i] = multiply_add(and_or(high, 0x80008000, high >> 4 & 0x07F007F0), 0x7B807B80, 0x80008000);
#endif
#elif OFFSET == ROW_ZERO_POINT  // a byte, which may be larger than a code: it is subtracted from the exact number
        const uint32 surplus = HALF ? 0xE400E400 : 0xC300C300, one = HALF ? 0x3C003C00 : 0x3F803F80;
        pairs[i] = multiply_add(and_or(bits, 0x000F000F, HALF ? 0x64006400 : 0x43004300), one, surplus);
        pairs[i] = multiply_add(pairs[i], one, round_number(-(float)zero) * 0x10001u);
#elif BITS == 4 && HALF  // 1024 + code, less 1024 + zero
        pairs[i] = multiply_add(and_or(bits, 0x000F000F, 0x64006400), 0x3C003C00, 0xE400E400 + zero * 0x10001);
#elif BITS == 4  // 128 + code, less 128 + zero
        pairs[i] = multiply_add(and_or(bits, 0x000F000F, 0x43004300), 0x3F803F80, 0xC300C300 + zero * 0x10001);
#elif HALF  // 1024 + 128 + code, less 1152
        pairs[i] = multiply_add(and_or(bits ^ 0x00800080, 0x00FF00FF, 0x64006400), 0x3C003C00, 0xE480E480);
#else  // 128 + the lower seven bits, less 128 or, where the sign is set, 256
        const uint32 sign = and_or(bits, 0x00800080, 0x43004300);
        pairs[i] = multiply_add(sign, 0xBF80BF80, and_or(bits, 0x007F007F, 0x43004300));
#endif
    }
#endif
}

// Numbers of x that lie side by side, in pairs as `unpack` has them. It separates the halves of a word.
DEVICE void order_numbers(uint32 (&ordered)[PAIRS], const uint32 (&numbers)[PAIRS]) {
#if CODES == TABLE
    UNROLL for (int i = 0; i < PAIRS; ++i) ordered[i] = numbers[i];
#else
    UNROLL for (int i = 0; i < PAIRS; ++i)
        ordered[i] = pick_bytes(numbers[i / 2], numbers[i / 2 + PAIRS / 2], i % 2 ? 0x7632 : 0x5410);
#endif
}
