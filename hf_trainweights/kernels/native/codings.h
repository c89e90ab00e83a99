// The numbers of the groups of formats of other programs, as in formats/affine.py, formats/table4.py and
// formats/scale_codings.py: weight = (code - zero) * scale + offset. Codings are the ways in which files store scales.
#pragma once
#include "vectors.h"

// The columns of a superblock of GGUF: groups whose scales are integers that share a float factor.
#define SUPERBLOCK 256
// Groups that share an outer scale of the coding NESTED.
#define OUTER_GROUPS 256

// The numbers of the groups of a row, each array with zeros up to a multiple of LANES and one vector behind it.
typedef struct {
    float *scale;
    float *zero;    // if has_zeros
    float *offset;  // if has_offsets
} Groups;

static inline int64_t coded_groups(const Product *p) {
    int64_t size = p->weight.group_size * (p->repeats ? p->repeats : 1);
    return size ? (p->weight.K + size - 1) / size : 1;
}

static inline int has_zeros(const Weight *w) { return w->family == AFFINE && w->offset < BIAS; }
static inline int has_offsets(const Weight *w) { return w->offset == BIAS || w->offset == MINIMA; }

// The floats of each array of `Groups`.
static inline int64_t groups_length(int64_t G) { return round_up(G, LANES) + LANES; }

// Return a vector of integers that repeats four.
static inline __attribute__((always_inline)) Integers for_words(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    const uint32_t words[4] = {a, b, c, d};
    Integers repeated = all_integers(0);
    _Pragma("GCC unroll 16") for (int i = 0; i < LANES; i++) repeated[i] = (int32_t)words[i % 4];
    return repeated;
}

// Shift each word of the bytes of superblocks right, by `shift`, and keep the bits of a mask. Three words of the file
// belong to 16 bytes of the result, and `word` has the number of the one to take.
static inline __attribute__((always_inline)) Integers words_of(Integers bytes, Integers word, Integers shift,
                                                               Integers mask) {
    typedef uint32_t Unsigned __attribute__((vector_size(BYTES)));
    Integers from = (lane_numbers() >> 2) * all_integers(3) + word;
    return (Integers)((Unsigned)permuted((Floats)bytes, from) >> (Unsigned)shift) & mask;
}

// The superblocks whose integer scales, or scales and minima, fill a vector of bytes.
#define SUPERBLOCKS_OF(CODING) (BYTES / ((CODING) == IQ4_XS ? 8 : 16))

// Return the integer scales of the groups of SUPERBLOCKS_OF(coding) superblocks, a byte each. Those of K4 have eight
// scales before eight minima, and K2 keeps its minima in the high halves of the same bytes.
static inline __attribute__((always_inline)) Integers unpack_superblocks(Integers bytes, int coding) {
    const Integers four = all_bytes(0x0f);
    if (coding == K4)
        return words_of(bytes, for_words(0, 0, 1, 1), for_words(0, 2, 0, 2),
                        for_words(0x3f3f3f3f, 0x30303030, 0x3f3f3f3f, 0x30303030)) |
               words_of(bytes, all_integers(2), for_words(0, 0, 0, 4), for_words(0, 0x0f0f0f0f, 0, 0x0f0f0f0f));
    if (coding == K3)
        return words_of(bytes, for_words(0, 1, 0, 1), for_words(0, 0, 4, 4), four) |
               words_of(bytes, all_integers(2), for_words(0, 2, 4, 6), all_bytes(3)) << 4;
    if (coding == K2) return bytes & four;
    // `widen_bytes` takes bytes without a sign where BYTE_OFFSET is 128.
    if (coding == K6) return bytes ^ all_bytes(BYTE_OFFSET);
    // Numbers of 4 and of 2 bits move to a byte each. 12 bytes of the file are two superblocks.
    Integers fours = words_of(bytes, for_words(0, 1, 2, 2), for_words(16, 0, 0, 16), all_integers(0xffff));
    Integers twos = words_of(bytes, for_words(0, 0, 1, 1), for_words(0, 8, 16, 24), all_integers(0xff));
    fours = (fours | fours << 8) & all_integers(0x00ff00ff);
    twos = (twos | twos << 12) & all_integers(0x000f000f);
    return ((fours | fours << 4) & four) | ((twos | twos << 6) & all_bytes(3)) << 4;
}

// Write (number - less) * factor for the first `count` * 16 bytes of a vector. Each 16 have one of the factors, which are
// `apart` from each other.
static inline __attribute__((always_inline)) void write_sixteens(Integers bytes, int64_t count, int less, int64_t apart,
                                                                const float *factor, float *to) {
    for (int i = 0; i < 4 && i * LANES < 16 * count; i++)
        *(Floats *)(to + i * LANES) =
            to_floats(widen_bytes(bytes, i) - all_integers(less)) * all_floats(factor[i * LANES / 16 * apart]);
}

// Write them where each eight bytes have a factor of their own. Every second eight go to `seconds` if there is such an
// array.
static inline __attribute__((always_inline)) void write_eights(Integers bytes, int64_t count, int less,
                                                               const float *factor, float *to, float *seconds) {
    for (int i = 0; i < 4 && i * LANES < 16 * count; i++) {
        int eight = i * LANES / 8;
        Floats factors = LANES < 16 ? all_floats(factor[eight]) : permuted_four(factor + eight, lane_numbers() >> 3);
        Floats numbers = to_floats(widen_bytes(bytes, i) - all_integers(less)) * factors;
        float *own = to + 8 * eight, *other = own + 8;
        if (seconds) own = (eight % 2 ? seconds : to) + 8 * (eight / 2), other = seconds + 8 * (eight / 2);
#if LANES == 16
        store_halves(numbers, own, other);
#else
        (void)other;
        *(Floats *)(own + i * LANES % 8) = numbers;
#endif
    }
}

// Write the scales of a row, and its minima. The memory for zero points, which such rows do not have, holds the factors
// of the superblocks.
static inline __attribute__((always_inline)) void write_superblocks(const Product *p, int64_t n, Groups to,
                                                                    int coding) {
    const int has_minima = coding == K4 || coding == K2, less = coding == K6 ? BYTE_OFFSET : has_minima ? 0 : 32;
    const int64_t octets = coding == IQ4_XS ? 6 : coding == K4 || coding == K3 ? 12 : 16, each = has_minima ? 2 : 1;
    const int64_t blocks = p->weight.K / SUPERBLOCK, groups = coding == K4 || coding == IQ4_XS ? 8 : 16;
    const uint8_t *from = p->group_scale + n * blocks * octets, *end = p->group_scale + p->weight.N * blocks * octets;
    float *factor = to.zero;
    copy_as_float32(p->scale, FLOAT16, n * blocks * each, blocks * each, round_up(blocks * each, LANES), factor);
    // Minima are subtracted.
    if (has_minima)
        for (int64_t b = 0; b < blocks * 2; b += LANES)
            *(Floats *)(factor + b) = (Floats)(*(Integers *)(factor + b) ^ (lane_numbers() << 31));
    for (int64_t b = 0; b < blocks; b += SUPERBLOCKS_OF(coding), from += SUPERBLOCKS_OF(coding) * octets) {
        Integers bytes = load_bytes(from, end - from), numbers = unpack_superblocks(bytes, coding);
        float *scale = to.scale + b * groups, *offset = to.offset + b * groups;
        int64_t left = blocks - b;
        if (coding == K4) write_eights(numbers, left, less, factor + 2 * b, scale, offset);
        else if (coding == IQ4_XS) write_eights(numbers, (left + 1) / 2, less, factor + b, scale, NULL);
        else write_sixteens(numbers, left, less, each, factor + each * b, scale);
        if (coding == K2) write_sixteens(bytes >> 4 & all_bytes(0x0f), left, 0, each, factor + each * b + 1, offset);
    }
}

// Write 2**(code - 127). Code 0 is a subnormal number, and 255 is NaN.
static inline void write_powers(const uint8_t *codes, int64_t G, float *to) {
    for (int64_t g = 0; g < G; g++) {
        uint32_t bits = (uint32_t)codes[g] << 23 | (uint32_t)(codes[g] == 0 || codes[g] == 255) << 22;
        memcpy(to + g, &bits, 4);
    }
}

static inline void write_float8_scales(const Product *p, int64_t n, int64_t G, float *to) {
    Floats global = all_floats(p->global_scale[n]), values[2];
    for (int64_t g = 0; g < G; g += 2 * LANES) {
        load_float8((const uint8_t *)p->scale + n * G + g, G - g, values);
        for (int half = 0; half < 2; half++) {
            Floats scale = values[half] * all_floats(256);
            scale = p->weight.coding == E4M3 ? scale * global : scale / global;
            store_floats(to, FLOAT32, g + half * LANES, G - g - half * LANES, scale);
        }
    }
}

static inline __attribute__((always_inline)) void write_nested(const Product *p, int64_t n, int64_t G, float *to) {
    const uint8_t *codes = (const uint8_t *)p->scale + n * G;
    const float *outer = p->outer_scale + n * p->weight.outer_count;
    int64_t last = p->weight.outer_count - 1, end;
    int64_t begun = 0;
    for (; begun + 8 <= G; begun += 8) {
        uint64_t eight;
        memcpy(&eight, codes + begun, 8);
        _Pragma("GCC unroll 8") for (int i = 0; i < 8; i++) to[begun + i] = p->nested_values[eight >> (8 * i) & 255];
    }
    for (; begun < G; begun++) to[begun] = p->nested_values[codes[begun]];
    for (int64_t g = 0; g < G; g = end) {
        // A phase of a damaged file could lead behind the outer scales.
        int64_t run = (g + p->phase[n]) / OUTER_GROUPS;
        end = least((run + 1) * OUTER_GROUPS - p->phase[n], G);
        for (int64_t i = g; i < end; i += LANES) {
            Floats scaled = unfused(load_floats(to, FLOAT32, i, end - i) * all_floats(outer[least(run, last)]));
            store_floats(to, FLOAT32, i, end - i, scaled + all_floats(p->nested_offset[n]));
        }
    }
}

// Write the codes of packed zero points, of any number of bits.
static inline void write_packed(const uint8_t *packed, int64_t packed_bytes, int64_t G, int bits, float *to) {
    for (int64_t g = 0, from = 0; g < G; g += 8, from += bits) {
        uint64_t word = 0;
        memcpy(&word, packed + from, least(8, packed_bytes - from));
        for (int64_t i = 0; i < least(8, G - g); i++) to[g + i] = (float)(word >> (i * bits) & ((1u << bits) - 1));
    }
}

static inline __attribute__((always_inline)) void write_zeros(const Product *p, int64_t n, int64_t G, float *to) {
    const Weight *w = &p->weight;
    int bits = w->zero_bits;
    int64_t packed_bytes = (G * bits + 7) / 8;
    const uint8_t *packed = p->zero_point + n * packed_bytes;
    if (w->offset == FIXED_ZERO)
        for (int64_t g = 0; g < G; g++) to[g] = (float)(1 << (w->bits - 1));
    else if (w->offset == FLOAT_ZERO_POINT)
        copy_as_float32(p->zero_point, w->scale_dtype, n * G, G, round_up(G, LANES), to);
    else {
        float added = w->offset == ZERO_POINT_MINUS_1 ? 1 : 0;
        if (bits != 4 && bits != 8) write_packed(packed, packed_bytes, G, bits, to);
        for (int64_t g = 0; g < G && (bits == 4 || bits == 8); g += BYTES) {
            // Where vectors widen bytes with a sign, they are written less 128.
            int flipped = 128 - BYTE_OFFSET;
            Integers bytes = bits == 4 ? load_nibbles(packed + g / 2, round_up(G - g, 2)) : load_bytes(packed + g, G - g);
            bytes ^= all_bytes(flipped);
            for (int i = 0; i < 4; i++)
                store_floats(to, FLOAT32, g + i * LANES, G - g - i * LANES,
                             to_floats(widen_bytes(bytes, i) + all_integers(flipped)));
        }
        for (int64_t g = 0; g < G; g++) to[g] += added;
    }
}

static inline __attribute__((always_inline)) void write_scales_of_coding(const Product *p, int64_t n, int64_t G,
                                                                         Groups to) {
    switch (p->weight.coding) {
        case PLAIN: copy_as_float32(p->scale, p->weight.scale_dtype, n * G, G, round_up(G, LANES), to.scale); break;
        case E8M0: write_powers((const uint8_t *)p->scale + n * G, G, to.scale); break;
        case E4M3:
        case E4M3_DIVIDED: write_float8_scales(p, n, G, to.scale); break;
        case NESTED: write_nested(p, n, G, to.scale); break;
        case K4: write_superblocks(p, n, to, K4); break;
        case K2: write_superblocks(p, n, to, K2); break;
        case K3: write_superblocks(p, n, to, K3); break;
        case K6: write_superblocks(p, n, to, K6); break;
        default: write_superblocks(p, n, to, IQ4_XS); break;
    }
}

// Write the zero points or the offsets of row n, if it has any.
static inline __attribute__((always_inline)) void write_offsets(const Product *p, int64_t n, int64_t G, Groups to) {
    if (has_zeros(&p->weight)) write_zeros(p, n, G, to.zero);
    if (p->weight.offset == BIAS)
        copy_as_float32(p->zero_point, p->weight.scale_dtype, n * G, G, round_up(G, LANES), to.offset);
}

// Write the numbers of the groups of row n.
static inline __attribute__((always_inline)) void write_groups(const Product *p, int64_t n, Groups to) {
    int64_t G = coded_groups(p);
    write_scales_of_coding(p, n, G, to);
    write_offsets(p, n, G, to);
}

// Return an intermediate result as the next operation gets it.
static inline __attribute__((always_inline)) Floats rounded_to(Floats values, int dtype) {
    uint16_t halves[LANES];
    if (dtype == FLOAT32) return unfused(values);
    store_floats(halves, dtype, 0, LANES, values);
    return load_floats(halves, dtype, 0, LANES);
}

// The operations that make a number of a code of affine: it has zero points, or a bias or minima.
enum { SUBTRACT = 8, ADD = 16 };

static inline int operations_of(const Weight *w) {
    return w->family | (has_zeros(w) ? SUBTRACT : 0) | (has_offsets(w) ? ADD : 0);
}

// Return the numbers that codes of group g stand for. The result of each operation but the last is rounded to a dtype;
// the store of the numbers rounds the last one.
static inline __attribute__((always_inline)) Floats numbers_of(Floats codes, const Groups *groups, int64_t g,
                                                               int operations, int dtype) {
    if (operations & SUBTRACT) codes = rounded_to(codes - all_floats(groups->zero[g]), dtype);
    codes *= all_floats(groups->scale[g]);
    if (operations & ADD) codes = rounded_to(codes, dtype) + all_floats(groups->offset[g]);
    return codes;
}
