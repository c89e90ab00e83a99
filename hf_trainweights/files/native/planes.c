// Words to planes of their bytes, lowest bytes first, and back; byte_planes.py describes words and planes.
#include <string.h>

#include "../../formats/native/clones.h"

int abi(void) { return 4; }

// The number of words that stay in the nearest cache while their planes are filled one after the other.
#define BLOCK 4096

// Fill the planes, which lie `stride` bytes apart, with the bytes of words, or of words rotated left by one bit.
#define SPLIT(BYTES, WORD)                                                                                           \
    CLONES void split_##BYTES(const WORD *words, int64_t count, int is_rotated, uint8_t *planes, int64_t stride) {   \
        for (int64_t start = 0; start < count; start += BLOCK) {                                                     \
            int64_t size = count - start < BLOCK ? count - start : BLOCK;                                            \
            WORD block[BLOCK];                                                                                       \
            if (is_rotated)                                                                                          \
                for (int64_t i = 0; i < size; i++)                                                                   \
                    block[i] = (WORD)(words[start + i] << 1 | words[start + i] >> (8 * BYTES - 1));                  \
            else                                                                                                     \
                memcpy(block, words + start, size * BYTES);                                                          \
            for (int byte = 0; byte < BYTES; byte++) {                                                               \
                uint8_t *restrict plane = planes + byte * stride + start;                                            \
                for (int64_t i = 0; i < size; i++) plane[i] = (uint8_t)(block[i] >> 8 * byte);                       \
            }                                                                                                        \
        }                                                                                                            \
    }

SPLIT(2, uint16_t)
SPLIT(4, uint32_t)
SPLIT(8, uint64_t)

static inline uint16_t word_2(const uint8_t *const *planes, int64_t i) {
    return (uint16_t)(planes[0][i] | planes[1][i] << 8);
}

static inline uint32_t word_4(const uint8_t *const *planes, int64_t i) {
    return planes[0][i] | (uint32_t)planes[1][i] << 8 | (uint32_t)planes[2][i] << 16 | (uint32_t)planes[3][i] << 24;
}

// Fill words from planes, the inverse of split; if the words were rotated left by one bit, rotate them back.
#define JOIN(BYTES, WORD)                                                                                        \
    CLONES void join_##BYTES(const uint8_t *const *planes, int64_t count, int is_rotated, WORD *restrict words) { \
        const uint8_t *local[BYTES];                                                                             \
        for (int byte = 0; byte < BYTES; byte++) local[byte] = planes[byte];                                     \
        if (is_rotated)                                                                                          \
            for (int64_t i = 0; i < count; i++) {                                                                \
                WORD word = word_##BYTES(local, i);                                                              \
                words[i] = (WORD)(word >> 1 | word << (8 * BYTES - 1));                                          \
            }                                                                                                    \
        else                                                                                                     \
            for (int64_t i = 0; i < count; i++) words[i] = word_##BYTES(local, i);                               \
    }

JOIN(2, uint16_t)
JOIN(4, uint32_t)

// A zigzag code stands for the difference of two words, modulo the word size: 0, 1, 2, 3, ... for 0, -1, 1, -2, ...
// `add` replaces codes by the words that they stand for: the differences plus the words `near`. `subtract_sums` codes
// words [R, C] less the sum of a number of the row and one of the column; its code is 0 for the word 0, else the zigzag
// code plus 1. `add_sums` undoes it.
#define DIFFERENCES(BYTES, WORD)                                                                                      \
    static inline WORD zigzag_##BYTES(WORD change) {                                                                  \
        return (WORD)((WORD)(change << 1) ^ (WORD)-(change >> (8 * BYTES - 1)));                                      \
    }                                                                                                                 \
    static inline WORD unzigzag_##BYTES(WORD code) { return (WORD)(code >> 1 ^ (WORD)-(code & 1)); }                  \
    CLONES void add_##BYTES(WORD *restrict codes, const WORD *near, int64_t count) {                                  \
        for (int64_t i = 0; i < count; i++) codes[i] = (WORD)(unzigzag_##BYTES(codes[i]) + near[i]);                  \
    }                                                                                                                 \
    CLONES void subtract_sums_##BYTES(const WORD *words, const WORD *rows, const WORD *columns, int64_t R, int64_t C, \
                                      WORD *restrict codes) {                                                         \
        for (int64_t row = 0; row < R; row++)                                                                         \
            for (int64_t i = 0; i < C; i++) {                                                                         \
                WORD word = words[row * C + i];                                                                       \
                WORD code = (WORD)(zigzag_##BYTES((WORD)(word - rows[row] - columns[i])) + 1);                        \
                codes[row * C + i] = word ? code : 0;                                                                 \
            }                                                                                                         \
    }                                                                                                                 \
    CLONES void add_sums_##BYTES(WORD *restrict codes, const WORD *rows, const WORD *columns, int64_t R, int64_t C) { \
        for (int64_t row = 0; row < R; row++)                                                                         \
            for (int64_t i = 0; i < C; i++) {                                                                         \
                WORD code = codes[row * C + i];                                                                       \
                WORD word = (WORD)(unzigzag_##BYTES((WORD)(code - 1)) + rows[row] + columns[i]);                      \
                codes[row * C + i] = code ? word : 0;                                                                 \
            }                                                                                                         \
    }

DIFFERENCES(2, uint16_t)
DIFFERENCES(4, uint32_t)

// `relative` codes words [R, C] by their magnitude less the sum of a number of the row and one of the column. A code is
// this difference, then the sign, then as many zeros as `spare` says; the difference 0 stands for the magnitude 0. It
// returns whether a difference is not positive or does not fit. `absolute` undoes it, in place.
#define MAGNITUDES(BYTES, WORD)                                                                                       \
    CLONES int64_t relative_##BYTES(const WORD *words, const WORD *rows, const WORD *columns, int64_t R, int64_t C,   \
                                    int spare, WORD *restrict codes) {                                                \
        const WORD most = (WORD)((WORD)-1 >> 1), largest = (WORD)(most >> spare);                                     \
        WORD misfits = 0;                                                                                             \
        for (int64_t row = 0; row < R; row++)                                                                         \
            for (int64_t i = 0; i < C; i++) {                                                                         \
                WORD word = words[row * C + i], magnitude = word & most;                                              \
                WORD change = (WORD)(magnitude - rows[row] - columns[i]);                                             \
                misfits |= (WORD)((magnitude != 0) & ((WORD)(change - 1) >= largest));                                \
                change = magnitude ? change : 0;                                                                      \
                codes[row * C + i] = (WORD)((WORD)(change << 1 | word >> (8 * BYTES - 1)) << spare);                  \
            }                                                                                                         \
        return misfits;                                                                                               \
    }                                                                                                                 \
    CLONES void absolute_##BYTES(WORD *restrict codes, const WORD *rows, const WORD *columns, int64_t R, int64_t C,   \
                                 int spare) {                                                                         \
        const WORD most = (WORD)((WORD)-1 >> 1);                                                                      \
        for (int64_t row = 0; row < R; row++)                                                                         \
            for (int64_t i = 0; i < C; i++) {                                                                         \
                WORD code = (WORD)(codes[row * C + i] >> spare), change = (WORD)(code >> 1);                          \
                WORD magnitude = (WORD)(change + rows[row] + columns[i]) & most;                                      \
                codes[row * C + i] = (WORD)((change ? magnitude : 0) | code << (8 * BYTES - 1));                      \
            }                                                                                                         \
    }

MAGNITUDES(2, uint16_t)
MAGNITUDES(4, uint32_t)

// Bytes whose lowest two bits are 0 are packed in groups of so many: their first three quarters become bytes, and the
// bits of the last quarter, lowest first, take the lowest bits of these. A shorter last group is filled up with zeros.
#define GROUP 256
#define QUARTER (GROUP / 4)

CLONES void pack_six(const uint8_t *bytes, int64_t count, uint8_t *packed) {
    for (int64_t start = 0; start < count; start += GROUP, packed += 3 * QUARTER) {
        uint8_t filled[GROUP] = {0};
        int64_t size = count - start < GROUP ? count - start : GROUP, quarter = (size + 3) / 4;
        const uint8_t *group = bytes + start;
        if (size < GROUP) group = memcpy(filled, group, size);
        const uint8_t *last = group + 3 * quarter;
        for (int third = 0; third < 3; third++) {
            uint8_t *restrict out = packed + third * quarter;
            for (int64_t i = 0; i < quarter; i++) out[i] = group[third * quarter + i] | (last[i] >> (2 + 2 * third) & 3);
        }
    }
}

CLONES void unpack_six(const uint8_t *packed, int64_t count, uint8_t *restrict bytes) {
    for (int64_t start = 0; start < count; start += GROUP, packed += 3 * QUARTER) {
        uint8_t filled[GROUP];
        int64_t size = count - start < GROUP ? count - start : GROUP, quarter = (size + 3) / 4;
        uint8_t *group = size < GROUP ? filled : bytes + start;
        for (int64_t i = 0; i < 3 * quarter; i++) group[i] = packed[i] & 0xFC;
        for (int64_t i = 0; i < quarter; i++) {
            uint8_t low = packed[i] & 3, middle = packed[quarter + i] & 3, high = packed[2 * quarter + i] & 3;
            group[3 * quarter + i] = (uint8_t)(low << 2 | middle << 4 | high << 6);
        }
        if (size < GROUP) memcpy(bytes + start, filled, size);
    }
}
