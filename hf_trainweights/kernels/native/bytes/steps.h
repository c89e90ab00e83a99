// The codes of a step, and the order of the digits that they are multiplied with. A step is the columns of one vector of
// codes, or of two if codes lie in planes. Its codes are loaded as bytes in one or two vectors, its halves.
#pragma once
#include "integers.h"

// Whether codes lie in planes (formats/planes.py), 32 columns together.
#define IN_PLANES(KIND) ((KIND) & AFFINE_CODES && bits_of(KIND) != 4 && bits_of(KIND) != 8)
// The columns of a step: the codes of so many fill a vector, or their bytes do two if they lie in planes.
#define COLUMNS_OF(KIND) (IN_PLANES(KIND) ? 2 * BYTES : BYTES * 8 / bits_of(KIND))
#define STEP_BYTES(KIND) (COLUMNS_OF(KIND) * bits_of(KIND) / 8)
#define MOST_STEP_BYTES (2 * BYTES)
// The vectors of digits that belong to the codes of a step, for each token and digit.
#define HALVES_OF(KIND) (COLUMNS_OF(KIND) / BYTES)
// The neighbouring columns that lie in one half of codes in planes: the low halves of 16 bytes hold their codes, and
// the high halves those of as many columns behind them.
#define PIECE 16

// Put the bytes of even pieces of a step before those of odd ones. Nibbles need the digits of even columns first, because
// low halves of bytes hold their codes; planes those of even pieces of 16 columns.
static inline __attribute__((always_inline)) void split_step(Integers step[2], int piece) {
    int8_t digits[2 * BYTES], even[BYTES], odd[BYTES];
    memcpy(digits, step, 2 * BYTES);
    for (int i = 0; i < BYTES; i += piece) {
        memcpy(even + i, digits + 2 * i, piece);
        memcpy(odd + i, digits + 2 * i + piece, piece);
    }
    memcpy(step, even, BYTES);
    memcpy(step + 1, odd, BYTES);
}

// Return the group of a step that each lane of a half of its codes belongs to. A lane has four of 8 columns of nibbles,
// or four neighbouring columns.
static inline Integers groups_of_lanes(int kind, int half, int64_t size) {
    Integers columns = lane_numbers() << (bits_of(kind) == 4 ? 3 : 2);
    if (IN_PLANES(kind)) columns += (columns & all_integers(-PIECE)) + all_integers(half * PIECE);
    return columns >> __builtin_ctzll(size);
}

// Copy the last codes of a row, whose planes fill no step. Zeros follow them.
static __attribute__((noinline)) void copy_planes(const uint8_t *from, int64_t bytes, uint8_t to[MOST_STEP_BYTES]) {
    // Stores of whole vectors: a load of a vector would wait for smaller stores to the same place.
    for (int64_t at = 0; at < MOST_STEP_BYTES; at += BYTES)
        *(Integers *)(to + at) = load_bytes(from + at, bytes > at ? least(bytes - at, BYTES) : 0);
}

// Load the codes of a step in planes. Shifts of whole words bring the bits of a column to its byte.
static inline __attribute__((always_inline)) void unpack_planes(const uint8_t *step, int bits, Integers loaded[2]) {
    typedef uint64_t Longs __attribute__((vector_size(BYTES)));
    typedef uint32_t Unsigned __attribute__((vector_size(BYTES)));
    const Integers low = all_bytes(0x0f), lane = lane_numbers() & all_integers(3);
    Integers planes[3], rest = all_integers(0);
    load_planes_apart(step, bits, planes);
    if (bits & 2) {
        Longs by = (Longs)((lane == all_integers(2)) & all_integers(2));
        rest = (Integers)((Longs)planes[1] >> by) & all_bytes(0x33);
    }
    if (bits & 1) {
        Integers ones = (Integers)((Unsigned)planes[2] >> (Unsigned)lane) & all_bytes(0x11);
        rest |= bits & 2 ? ones << 2 : ones;
    }
    loaded[0] = rest & low;
    loaded[1] = rest >> 4 & low;
    if (bits & 4) {
        loaded[0] = selected(low, planes[0], rest << 4);
        loaded[1] = selected(low, planes[0] >> 4, rest);
    }
}

// Load the codes of a step as vectors of bytes, as many as there are halves. `left` bytes of the row begin at `codes`;
// codes behind them are 0.
static inline __attribute__((always_inline)) void load_step(const uint8_t *codes, int kind, int64_t left,
                                                            Integers loaded[2]) {
    if (IN_PLANES(kind)) {
        uint8_t tail[MOST_STEP_BYTES];
        if (left < STEP_BYTES(kind)) {
            copy_planes(codes, left, tail);
            codes = tail;
        }
        unpack_planes(codes, bits_of(kind), loaded);
        return;
    }
    Integers bytes = load_bytes(codes, left);
    if (bits_of(kind) == 4) bytes = loaded_once(bytes);
    loaded[0] = bytes;
    if (kind == BYTE_CODES) loaded[0] = bytes ^ all_bytes(BYTE_OFFSET);
    if (bits_of(kind) == 4) loaded[0] = bytes & all_bytes(0x0f);
    loaded[1] = bytes >> 4 & all_bytes(0x0f);
}
