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
// this difference, the sign if `is_signed`, then as many zeros as `spare` says; the difference 0 stands for the magnitude
// 0. It returns whether a word has no such code: its difference is not positive or does not fit, or its sign is left out.
// `absolute` undoes it, in place.
#define MAGNITUDES(BYTES, WORD)                                                                                       \
    CLONES int64_t relative_##BYTES(const WORD *words, const WORD *rows, const WORD *columns, int64_t R, int64_t C,   \
                                    int is_signed, int spare, WORD *restrict codes) {                                 \
        const WORD most = (WORD)((WORD)-1 >> 1), largest = (WORD)((WORD)-1 >> (spare + is_signed));                   \
        const WORD refused = is_signed ? 0 : 1;                                                                       \
        WORD misfits = 0;                                                                                             \
        for (int64_t row = 0; row < R; row++)                                                                         \
            for (int64_t i = 0; i < C; i++) {                                                                         \
                WORD word = words[row * C + i], magnitude = word & most, sign = word >> (8 * BYTES - 1);              \
                WORD change = (WORD)(magnitude - rows[row] - columns[i]);                                             \
                misfits |= (WORD)((magnitude != 0) & ((WORD)(change - 1) >= largest)) | (sign & refused);             \
                change = magnitude ? change : 0;                                                                      \
                codes[row * C + i] = (WORD)((WORD)(change << is_signed | sign) << spare);                             \
            }                                                                                                         \
        return misfits;                                                                                               \
    }                                                                                                                 \
    CLONES void absolute_##BYTES(WORD *restrict codes, const WORD *rows, const WORD *columns, int64_t R, int64_t C,   \
                                 int is_signed, int spare) {                                                          \
        const WORD most = (WORD)((WORD)-1 >> 1), kept = is_signed ? 1 : 0;                                            \
        for (int64_t row = 0; row < R; row++)                                                                         \
            for (int64_t i = 0; i < C; i++) {                                                                         \
                WORD code = (WORD)(codes[row * C + i] >> spare), change = (WORD)(code >> is_signed);                  \
                WORD magnitude = (WORD)(change + rows[row] + columns[i]) & most;                                      \
                codes[row * C + i] = (WORD)((change ? magnitude : 0) | (WORD)((code & kept) << (8 * BYTES - 1)));     \
            }                                                                                                         \
    }

MAGNITUDES(2, uint16_t)
MAGNITUDES(4, uint32_t)

// Bytes whose lowest `spare` bits are 0, 2 or 4 bits, are packed in groups of GROUP bytes. A group has 8 / spare parts.
// The bits of its last part, lowest first, take the spare bits of the others. A shorter last group is filled with zeros.
#define GROUP 256

#define PACK(SPARE)                                                                                                    \
    static inline void pack_##SPARE(const uint8_t *group, int64_t part, uint8_t *restrict packed) {                    \
        const uint8_t *last = group + (8 / SPARE - 1) * part;                                                          \
        for (int each = 0; each < 8 / SPARE - 1; each++)                                                               \
            for (int64_t i = 0; i < part; i++)                                                                         \
                packed[each * part + i] = group[each * part + i] | (last[i] >> SPARE * (each + 1) & ((1 << SPARE) - 1)); \
    }                                                                                                                  \
    static inline void unpack_##SPARE(const uint8_t *packed, int64_t part, uint8_t *restrict group) {                  \
        uint8_t *last = group + (8 / SPARE - 1) * part;                                                                \
        for (int64_t i = 0; i < part; i++) {                                                                           \
            uint8_t byte = 0;                                                                                          \
            for (int each = 0; each < 8 / SPARE - 1; each++) {                                                         \
                uint8_t stored = packed[each * part + i];                                                              \
                group[each * part + i] = (uint8_t)(stored & ~((1 << SPARE) - 1));                                      \
                byte |= (uint8_t)((stored & ((1 << SPARE) - 1)) << SPARE * (each + 1));                                \
            }                                                                                                          \
            last[i] = byte;                                                                                            \
        }                                                                                                              \
    }

PACK(2)
PACK(4)

CLONES void pack_bytes(const uint8_t *bytes, int64_t count, int spare, uint8_t *packed) {
    for (int64_t start = 0; start < count; start += GROUP) {
        uint8_t filled[GROUP] = {0};
        int64_t size = count - start < GROUP ? count - start : GROUP, parts = 8 / spare, part = (size + parts - 1) / parts;
        const uint8_t *group = bytes + start;
        if (size < GROUP) group = memcpy(filled, group, size);
        if (spare == 2)
            pack_2(group, size < GROUP ? part : GROUP / 4, packed);
        else
            pack_4(group, size < GROUP ? part : GROUP / 2, packed);
        packed += (parts - 1) * part;
    }
}

CLONES void unpack_bytes(const uint8_t *packed, int64_t count, int spare, uint8_t *bytes) {
    for (int64_t start = 0; start < count; start += GROUP) {
        uint8_t filled[GROUP];
        int64_t size = count - start < GROUP ? count - start : GROUP, parts = 8 / spare, part = (size + parts - 1) / parts;
        uint8_t *group = size < GROUP ? filled : bytes + start;
        if (spare == 2)
            unpack_2(packed, size < GROUP ? part : GROUP / 4, group);
        else
            unpack_4(packed, size < GROUP ? part : GROUP / 2, group);
        if (size < GROUP) memcpy(bytes + start, filled, size);
        packed += (parts - 1) * part;
    }
}
