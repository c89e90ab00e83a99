// The check whether tiles may be used. People who compile this library seldom have a CPU that runs it, so it proves
// itself: once in a process it compares small products by tiles with the same products without tiles.
#include <stdlib.h>
#include "panel.h"

int tiles_are_granted = 0;

enum { ROWS = 40, COLUMNS = 192, TOKENS = 20, OTHERWISE = -1 };

// Fill memory with numbers that do not repeat: bytes, or bfloat16 between -1 and 1, two of which make one of float32.
static void fill(void *numbers, int64_t bytes, int are_floats) {
    uint32_t state = 1;
    for (int64_t i = 0; i < bytes / 2; i++) {
        state = state * 1664525 + 1013904223;
        float value = (float)(int32_t)state * 0x1p-31f;
        memcpy((int8_t *)numbers + 2 * i, are_floats ? (int8_t *)&value + 2 : (int8_t *)&state + 2, 2);
    }
}

typedef struct {
    uint8_t codes[ROWS * COLUMNS];
    float x[TOKENS * COLUMNS], scale[ROWS * COLUMNS / 64], by_tiles[TOKENS * ROWS], without[TOKENS * ROWS];
    int8_t memory[1 << 20] __attribute__((aligned(ALIGNMENT)));
} Example;

// Return whether both results agree. Results of 16 bits are rounded twice, by up to 2^-9 each time.
static int are_close(const Example *example, int dtype) {
    float difference = 0, largest = 0;
    for (int64_t i = 0; i < TOKENS * ROWS; i += LANES) {
        Floats a = load_floats(example->by_tiles, dtype, i, LANES), b = load_floats(example->without, dtype, i, LANES);
        difference += sum_of(magnitudes(a - b));
        largest += sum_of(magnitudes(b));
    }
    return difference <= largest * (dtype == FLOAT32 ? 0x1p-18f : 0x1p-7f);
}

static int equals_others(Example *example, Weight weight, Way way) {
    Product p = {.weight = weight, .M = TOKENS, .x = example->x, .qdata = example->codes};
    int64_t bytes = bytes_of_way(&p, way, 1), others = weight.bits ? many_rows_bytes(&p, 1) : float8_bytes(&p);
    if (bytes > (int64_t)sizeof example->memory || others > (int64_t)sizeof example->memory) return 0;
    p.scale = example->scale;
    p.out = example->by_tiles;
    multiply_by_way(&p, way, 1, example->memory);
    p.out = example->without;
    if (weight.bits) multiply_many_rows(&p, 1, example->memory);
    else multiply_float8(&p, 1, example->memory);
    return are_close(example, weight.dtype);
}

// Ask for tiles. Return 0 if they may be used, OTHERWISE if their results differ, or the number of the system's error.
int32_t prepare(void) {
    int refused = ask_for_tiles();
    if (refused) return refused;
    Example *example = aligned_alloc(ALIGNMENT, round_up(sizeof *example, ALIGNMENT));
    if (!example) return OTHERWISE;
    fill(example->x, sizeof example->x, 1);
    fill(example->codes, sizeof example->codes, 0);
    fill(example->scale, sizeof example->scale, 1);
    Weight bytes = {.N = ROWS, .K = COLUMNS, .dtype = FLOAT32, .digits = 3, .bits = 8};
    Weight nibbles = {.N = ROWS, .K = COLUMNS, .group_size = 64, .dtype = BFLOAT16, .digits = 2, .bits = 4};
    Weight float8 = {.N = ROWS, .K = COLUMNS, .dtype = FLOAT32, .digits = 3};
    int equal = equals_others(example, bytes, DIGITS) && equals_others(example, nibbles, WIDENED) &&
                equals_others(example, float8, FLOATS);
    free(example);
    tiles_are_granted = equal;
    return equal ? 0 : OTHERWISE;
}
