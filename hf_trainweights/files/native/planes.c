// Words <-> planes of their bytes of equal significance, lowest first; byte_planes.py says what for.
#include "../../formats/native/clones.h"

int abi(void) { return 1; }

// Fill the planes, which lie `stride` bytes apart, with the bytes of the words.
#define SPLIT(NAME, WORD)                                                                  \
    CLONES void NAME(const WORD *words, int64_t count, uint8_t *planes, int64_t stride) {  \
        for (int byte = 0; byte < (int)sizeof(WORD); byte++) {                             \
            uint8_t *restrict plane = planes + byte * stride;                              \
            for (int64_t i = 0; i < count; i++) plane[i] = (uint8_t)(words[i] >> 8 * byte); \
        }                                                                                  \
    }

SPLIT(split_2, uint16_t)
SPLIT(split_4, uint32_t)
SPLIT(split_8, uint64_t)

CLONES void join_2(const uint8_t *const *planes, int64_t count, uint16_t *restrict words) {
    const uint8_t *a = planes[0], *b = planes[1];
    for (int64_t i = 0; i < count; i++) words[i] = (uint16_t)(a[i] | b[i] << 8);
}

CLONES void join_4(const uint8_t *const *planes, int64_t count, uint32_t *restrict words) {
    const uint8_t *a = planes[0], *b = planes[1], *c = planes[2], *d = planes[3];
    for (int64_t i = 0; i < count; i++)
        words[i] = a[i] | (uint32_t)b[i] << 8 | (uint32_t)c[i] << 16 | (uint32_t)d[i] << 24;
}
