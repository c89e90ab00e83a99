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

// Write (byte - less) * factor for each of the eight bytes of a word.
static inline __attribute__((always_inline)) void write_octets(uint64_t octets, int less, float factor, float *to) {
#ifdef __AVX2__
    __m256i integers = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128((int64_t)octets));
    integers = _mm256_sub_epi32(integers, _mm256_set1_epi32(less));
    _mm256_storeu_ps(to, _mm256_mul_ps(_mm256_cvtepi32_ps(integers), _mm256_set1_ps(factor)));
#else
    for (int i = 0; i < 8; i++) to[i] = (float)((int)(octets >> (8 * i) & 255) - less) * factor;
#endif
}

// Load 4, 6 or 8 bytes. A larger load of what smaller stores have written would wait for them.
static inline __attribute__((always_inline)) uint64_t load_word(const uint8_t *from, int bytes) {
    uint64_t word;
    uint32_t half;
    uint16_t quarter;
    if (bytes == 8) {
        memcpy(&word, from, 8);
        return word;
    }
    memcpy(&half, from, 4);
    if (bytes == 4) return half;
    memcpy(&quarter, from + 4, 2);
    return half | (uint64_t)quarter << 32;
}

// A word of eight bytes that all are VALUE.
#define EACH_OCTET(VALUE) (0x0101010101010101ull * (VALUE))

// Move the eight lowest numbers of 4 bits, or of 2 bits, to a byte each.
static inline uint64_t spread_fours(uint64_t word) {
    word = (word | word << 16) & 0x0000ffff0000ffffull;
    word = (word | word << 8) & 0x00ff00ff00ff00ffull;
    return (word | word << 4) & EACH_OCTET(15);
}
static inline uint64_t spread_twos(uint64_t word) {
    word = (word | word << 24) & 0x000000ff000000ffull;
    word = (word | word << 12) & 0x000f000f000f000full;
    return (word | word << 6) & EACH_OCTET(3);
}

// Return fields of 2 bits of the bytes of a word of 32 bits: those from bit `start` on, and behind them the next ones.
static inline uint64_t twos_of(uint64_t word, int start) {
    return (word >> start & 0x03030303) | (word >> (start + 2) & 0x03030303) << 32;
}

// The integer scales and minima of the groups of a superblock, a byte each. A superblock of eight groups fills the
// first words alone, one of sixteen groups both.
typedef struct {
    uint64_t scales[2], minima[2];
} Superblock;

static inline __attribute__((always_inline)) Superblock unpack_superblock(const uint8_t *from, int coding) {
    const uint64_t fours = EACH_OCTET(15), sixes = 0x3f3f3f3f;
    const int last = coding == K4 || coding == K3 ? 4 : 8;
    uint64_t words[2];
    if (coding == IQ4_XS) words[0] = load_word(from, 6), words[1] = 0;
    else words[0] = load_word(from, 8), words[1] = load_word(from + 8, last);
    uint64_t first = words[0] & 0xffffffff, second = words[0] >> 32, low = words[1] & 0x0f0f0f0f;
    if (coding == K4) {
        uint64_t high = words[1] >> 4 & 0x0f0f0f0f;
        return (Superblock){.scales = {(first & sixes) | (low | (first >> 6 & 0x03030303) << 4) << 32},
                            .minima = {(second & sixes) | (high | (second >> 6 & 0x03030303) << 4) << 32}};
    }
    if (coding == K2)
        return (Superblock){.scales = {words[0] & fours, words[1] & fours},
                            .minima = {words[0] >> 4 & fours, words[1] >> 4 & fours}};
    if (coding == K3)
        return (Superblock){.scales = {(words[0] & fours) | twos_of(words[1], 0) << 4,
                                       (words[0] >> 4 & fours) | twos_of(words[1], 4) << 4}};
    if (coding == K6) return (Superblock){.scales = {words[0] ^ EACH_OCTET(128), words[1] ^ EACH_OCTET(128)}};
    return (Superblock){.scales = {spread_fours(words[0] >> 16 & 0xffffffff) | spread_twos(words[0] & 0xffff) << 4}};
}

static inline __attribute__((always_inline)) void write_superblocks(const Product *p, int64_t n, Groups to,
                                                                    int coding) {
    const int eights = coding == K4 || coding == IQ4_XS ? 1 : 2, has_minima = coding == K4 || coding == K2;
    const int less = coding == K6 ? 128 : has_minima ? 0 : 32;
    const int64_t octets = coding == IQ4_XS ? 6 : coding == K4 || coding == K3 ? 12 : 16;
    int64_t blocks = p->weight.K / SUPERBLOCK, first = n * blocks;
    for (int64_t b = 0; b < blocks; b++) {
        Superblock integers = unpack_superblock(p->group_scale + (first + b) * octets, coding);
        Floats factors = load_floats(p->scale, FLOAT16, (first + b) * (has_minima ? 2 : 1), has_minima ? 2 : 1);
        for (int i = 0; i < eights; i++) {
            write_octets(integers.scales[i], less, factors[0], to.scale + 8 * (eights * b + i));
            if (has_minima) write_octets(integers.minima[i], 0, -factors[1], to.offset + 8 * (eights * b + i));
        }
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
    int64_t packed_bytes = (G * bits + 7) / 8;
    const uint8_t *packed = p->zero_point + n * packed_bytes;
    if (w->offset == FIXED_ZERO)
        for (int64_t g = 0; g < G; g++) to[g] = (float)(1 << (w->bits - 1));
    else if (w->offset == FLOAT_ZERO_POINT)
        copy_as_float32(p->zero_point, w->scale_dtype, n * G, G, round_up(G, LANES), to);
    else
        for (int64_t g = 0, from = 0; g < G; g += 8, from += bits) {
            int64_t left = (p->weight.N - n) * packed_bytes - from;
            uint64_t word = 0, octets = 0;
            float eight[8];
            if (left >= 8) word = load_word(packed + from, 8);
            else memcpy(&word, packed + from, left);
            if (bits == 8) octets = word;
            else if (bits == 4) octets = spread_fours(word & 0xffffffff);
            else
                for (int i = 0; i < 8; i++) octets |= (word >> (i * bits) & ((1u << bits) - 1)) << (8 * i);
            write_octets(octets, -added, 1, G - g < 8 ? eight : to + g);
            if (G - g < 8) memcpy(to + g, eight, 4 * (G - g));
        }
}

static inline void write_scales_of_coding(const Product *p, int64_t n, int64_t G, Groups to) {
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

// Write the numbers of the groups of row n.
static inline void write_groups(const Product *p, int64_t n, Groups to) {
    int64_t G = coded_groups(p);
    write_scales_of_coding(p, n, G, to);
    if (has_zeros(&p->weight)) write_zeros(p, n, G, to.zero);
    if (p->weight.offset == BIAS)
        copy_as_float32(p->zero_point, p->weight.scale_dtype, n * G, G, round_up(G, LANES), to.offset);
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
