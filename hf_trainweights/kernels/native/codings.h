// The numbers of the groups of formats of other programs, as in formats/affine.py, formats/table4.py and
// formats/scale_codings.py: weight = (code - zero) * scale + offset. Codings are the ways in which files store scales.
#pragma once
#include "vectors.h"

// The columns of a superblock of GGUF.
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

static inline void write_products(const uint8_t *integers, int count, int less, float factor, float *to) {
    for (int i = 0; i < count; i++) to[i] = (float)((int)integers[i] - less) * factor;
}

// Unpack the integers of a superblock: scales to integers[0], and minima to integers[1].
static inline void unpack_superblock(int coding, const uint8_t *from, uint8_t integers[2][16]) {
    const uint32_t two = 0x03030303, four = 0x0f0f0f0f, six = 0x3f3f3f3f;
    uint32_t words[4] = {0, 0, 0, 0}, *scales = (uint32_t *)integers[0], *minima = (uint32_t *)integers[1];
    memcpy(words, from, coding == IQ4_XS ? 6 : coding == K4 || coding == K3 ? 12 : 16);
    switch (coding) {
        case K4:
            scales[0] = words[0] & six;
            scales[1] = (words[2] & four) | (words[0] >> 6 & two) << 4;
            minima[0] = words[1] & six;
            minima[1] = (words[2] >> 4 & four) | (words[1] >> 6 & two) << 4;
            break;
        case K2:
            for (int i = 0; i < 4; i++) {
                scales[i] = words[i] & four;
                minima[i] = words[i] >> 4 & four;
            }
            break;
        case K3:
            for (int i = 0; i < 4; i++)
                scales[i] = (words[i % 2] >> (i / 2 * 4) & four) | (words[2] >> (2 * i) & two) << 4;
            break;
        case K6: memcpy(scales, words, 16); break;
        case IQ4_XS:
            for (int i = 0; i < 8; i++)
                integers[0][i] = (uint8_t)((from[2 + i / 2] >> (i % 2 * 4) & 15) | (from[i / 4] >> (i % 4 * 2) & 3) << 4);
            break;
        default: break;
    }
}

static inline int64_t superblock_octets(int coding) {
    return coding == IQ4_XS ? 6 : coding == K4 || coding == K3 ? 12 : 16;
}

static inline void write_superblocks(const Product *p, int64_t n, Groups to) {
    int coding = p->weight.coding, count = coding == K4 || coding == IQ4_XS ? 8 : 16, has_minima = has_offsets(&p->weight);
    int64_t blocks = p->weight.K / SUPERBLOCK, octets = superblock_octets(coding), first = n * blocks;
    for (int64_t b = 0; b < blocks; b++) {
        uint8_t integers[2][16] __attribute__((aligned(16)));
        Floats factors = load_floats(p->scale, FLOAT16, (first + b) * (has_minima ? 2 : 1), has_minima ? 2 : 1);
        unpack_superblock(coding, p->group_scale + (first + b) * octets, integers);
        if (coding == K6)
            for (int i = 0; i < 16; i++) to.scale[16 * b + i] = (float)(int8_t)integers[0][i] * factors[0];
        else write_products(integers[0], count, has_minima ? 0 : 32, factors[0], to.scale + count * b);
        if (has_minima) write_products(integers[1], count, 0, -factors[1], to.offset + count * b);
    }
}

// Write 2**(code - 127). Code 0 is a subnormal number, and 255 is NaN.
static inline void write_powers(const uint8_t *codes, int64_t G, float *to) {
    for (int64_t g = 0; g < G; g++) {
        uint32_t bits = (uint32_t)codes[g] << 23 | (uint32_t)(codes[g] == 0 || codes[g] == 255) << 22;
        memcpy(to + g, &bits, 4);
    }
}

static inline void write_float8(const Product *p, int64_t n, int64_t G, float *to) {
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

static inline void write_nested(const Product *p, int64_t n, int64_t G, float *to) {
    const uint8_t *codes = (const uint8_t *)p->scale + n * G;
    const float *outer = p->outer_scale + n * p->weight.outer_count;
    int64_t last = p->weight.outer_count - 1, end;
    for (int64_t g = 0; g < G; g++) to[g] = p->nested_values[codes[g]];
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

static inline void write_zeros(const Product *p, int64_t n, int64_t G, float *to) {
    const Weight *w = &p->weight;
    int added = w->offset == ZERO_POINT_MINUS_1, bits = w->zero_bits;
    int64_t octets = (G * bits + 7) / 8;
    const uint8_t *packed = p->zero_point + n * octets;
    if (w->offset == FIXED_ZERO)
        for (int64_t g = 0; g < G; g++) to[g] = (float)(1 << (w->bits - 1));
    else if (w->offset == FLOAT_ZERO_POINT)
        copy_as_float32(p->zero_point, w->scale_dtype, n * G, G, round_up(G, LANES), to);
    else if (bits == 8)
        for (int64_t g = 0; g < G; g++) to[g] = (float)(packed[g] + added);
    else
        for (int64_t g = 0, from = 0; g < G; g += 8, from += bits) {
            uint64_t word = 0;
            memcpy(&word, packed + from, least(bits, octets - from));
            for (int i = 0; i < 8 && g + i < G; i++, word >>= bits)
                to[g + i] = (float)((int)(word & ((1u << bits) - 1)) + added);
        }
}

static inline void write_scales_of_coding(const Product *p, int64_t n, int64_t G, Groups to) {
    switch (p->weight.coding) {
        case PLAIN: copy_as_float32(p->scale, p->weight.scale_dtype, n * G, G, round_up(G, LANES), to.scale); break;
        case E8M0: write_powers((const uint8_t *)p->scale + n * G, G, to.scale); break;
        case E4M3:
        case E4M3_DIVIDED: write_float8(p, n, G, to.scale); break;
        case NESTED: write_nested(p, n, G, to.scale); break;
        default: write_superblocks(p, n, to); break;
    }
}

// Write the numbers of the groups of row n.
static inline void write_groups(const Product *p, int64_t n, Groups to) {
    int64_t G = coded_groups(p);
    write_scales_of_coding(p, n, G, to);
    if (has_zeros(&p->weight)) write_zeros(p, n, G, to.zero);
    if (p->weight.offset == BIAS)
        copy_as_float32(p->zero_point, p->weight.scale_dtype, n * G, G, round_up(G, LANES), to.offset);
}
