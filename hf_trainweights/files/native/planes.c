// Words <-> planes of their bytes of equal significance, lowest first; byte_planes.py says what for.
#include <string.h>

#include "../../formats/native/clones.h"

int abi(void) { return 2; }

// Words that stay in the nearest cache while their planes are filled one after the other.
#define BLOCK 4096

// Fill the planes, which lie `stride` bytes apart, with the bytes of the words, or of the words rotated left by one bit.
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

// Undo it; if the words were rotated left by one bit, undo that as well.
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
