// The eight tiles of AMX, of 16 rows of 64 bytes each. An instruction multiplies two tiles A and B: it adds the sum
// over k and i of A[m][k][i] * B[k][n][i] to C[m][n], where i counts the four bytes or the two numbers of bfloat16 in
// 32 bits. The number of a tile has to be a literal. In libraries for CPUs without AMX, in_vectors.h multiplies the
// same memory.
#pragma once
#include "../vectors.h"

#define TILE_ROWS 16
#define TILE_BYTES 1024

#if defined(EMULATED_TILES) || defined(__AMX_TILE__)
#define HAS_TILES
#endif

#if defined(EMULATED_TILES)
#include "emulated.h"
#elif defined(HAS_TILES)
#include <errno.h>
#include <sys/syscall.h>
#include <unistd.h>

// Linux grants tiles to a process that asks for them, with all of its threads and forked children: arch_prctl(2).
#define ARCH_REQ_XCOMP_PERM 0x1023
#define XFEATURE_XTILEDATA 18

// Return 0, or the number of an error: ENOSPC if the stack for signals of a thread is too small.
static inline int ask_for_tiles(void) {
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) ? errno : 0;
}

// GCC does not know which memory a tile is loaded from. Without this it could move stores behind the load or omit them.
#define finish_stores(memory) __asm__ volatile("" ::"r"(memory) : "memory")

// Each thread configures tiles before it uses them, because other libraries configure their own, and releases them
// after: tiles in use are saved whenever the system takes the thread off its CPU. Both together take 57 ns.
static inline void begin_tiles(void) {
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } configuration __attribute__((aligned(64))) = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        configuration.row_bytes[i] = 64;
        configuration.rows[i] = TILE_ROWS;
    }
    finish_stores(&configuration);
    _tile_loadconfig(&configuration);
}

static inline void end_tiles(void) { _tile_release(); }

#define zero_tile(tile) _tile_zero(tile)
#define load_tile(tile, from) _tile_loadd(tile, from, 64)
// The CPU does not keep the bytes that this loads in the first-level cache.
#define stream_tile(tile, from) _tile_stream_loadd(tile, from, 64)
#define store_tile(tile, to) _tile_stored(tile, to, 64)
#define add_products_of_bytes_in_tiles(c, a, b) _tile_dpbssd(c, a, b)
#define add_products_of_bfloat16_in_tiles(c, a, b) _tile_dpbf16ps(c, a, b)
#else
static inline void begin_tiles(void) {}
static inline void end_tiles(void) {}
#endif
