// Vectors of ARM's NEON with products of bytes, which CPUs have from ARMv8.2 on. The functions are those of avx2.h,
// except the ones for single numbers. A `count` of elements may be more than a vector holds, and a count of floats may
// be negative.
#pragma once

// Bytes in a vector, 32-bit numbers in a vector, and the number of sums of products that stay in registers. There are
// registers for twice that number of sums, but then GCC 12 would load the codes of all rows first and keep sums in
// memory.
#define BYTES 16
#define LANES 4
#define SUMS 12
// The instruction for products takes signed bytes only, so nothing is added to codes.
#define BYTE_OFFSET 0

typedef float Floats __attribute__((vector_size(BYTES), aligned(4), may_alias));
typedef int32_t Integers __attribute__((vector_size(BYTES), aligned(1), may_alias));
typedef int16_t Words __attribute__((vector_size(BYTES), aligned(1), may_alias));

static inline Floats all_floats(float value) { return vdupq_n_f32(value); }
static inline Integers all_integers(int32_t value) { return vdupq_n_s32(value); }
static inline Integers all_bytes(int value) { return (Integers)vdupq_n_s8((int8_t)value); }
static inline Words all_words(int16_t value) { return vdupq_n_s16(value); }
static inline Floats multiply_add(Floats a, Floats b, Floats sum) { return vfmaq_f32(sum, a, b); }
static inline Floats larger(Floats a, Floats b) { return vmaxq_f32(a, b); }
static inline Floats magnitudes(Floats values) { return vabsq_f32(values); }
static inline float sum_of(Floats values) { return vaddvq_f32(values); }
static inline float largest_of(Floats values) { return vmaxvq_f32(values); }
static inline Integers to_integers(Floats values) { return vcvtnq_s32_f32(values); }
static inline Floats to_floats(Integers values) { return vcvtq_f32_s32(values); }

// Lane i of the result is lane indexes[i] of the values.
static inline Floats permuted(Floats values, Integers indexes) {
    Integers bytes = indexes * all_integers(0x04040404) + all_integers(0x03020100);
    return (Floats)vqtbl1q_u8((uint8x16_t)values, (uint8x16_t)bytes);
}

// Lane i of the result is number indexes[i] of four.
static inline Floats permuted_four(const float *four, Integers indexes) {
    return permuted(*(const Floats *)four, indexes);
}

static inline Integers loaded_once(Integers values) { return values; }

// Return a product that the compiler does not fuse with the sum that follows. Tests compile this for another CPU.
static inline Floats unfused(Floats values) {
    __asm__("" : "+m"(values));
    return values;
}

static inline Integers lane_numbers(void) { return (Integers){0, 1, 2, 3}; }

// Add the products of bytes, four to each lane.
static inline Integers add_products_of_bytes(Integers sums, Integers codes, Integers digits) {
    return vdotq_s32(sums, (int8x16_t)codes, (int8x16_t)digits);
}

// Add the products of numbers of 16 bits, two to each lane.
static inline Integers add_products_of_words(Integers sums, Words a, Words b) {
    return vmlal_high_s16(vmlal_s16(sums, vget_low_s16(a), vget_low_s16(b)), a, b);
}

// Copy the last bytes of a row to `room`, with zeros behind them, so that a full vector can be read there.
static inline const void *with_zeros(const void *from, int64_t count, void *room, int64_t room_bytes) {
    memset(room, 0, room_bytes);
    return count > 0 ? memcpy(room, from, count) : room;
}

// Load `count` elements from `index` on as float32; 0 in the other lanes.
static inline Floats load_floats(const void *from, int dtype, int64_t index, int64_t count) {
    const void *at = (const char *)from + index * itemsize(dtype);
    Floats room;
    if (count < LANES) at = with_zeros(at, count * itemsize(dtype), &room, BYTES);
    if (dtype == FLOAT32) return *(const Floats *)at;
    uint16x4_t half = vld1_u16(at);
    if (dtype == FLOAT16) return vcvt_f32_f16(vreinterpret_f16_u16(half));
    return (Floats)vshll_n_u16(half, 16);
}

// Rounds to the nearest, ties to even, as PyTorch does; NaN stays NaN.
static inline uint16x4_t to_bfloat16(Floats values) {
    Integers bits = (Integers)values;
    Integers rounded = bits + all_integers(0x7fff) + (bits >> 16 & all_integers(1));
    Integers nan = (Integers)(values != values);
    return vmovn_u32((uint32x4_t)(((rounded & ~nan) | (all_integers(0x7fc00000) & nan)) >> 16));
}

static inline void store_floats(void *to, int dtype, int64_t index, int64_t count, Floats values) {
    char *at = (char *)to + index * itemsize(dtype);
    if (dtype == FLOAT32) {
        memcpy(at, &values, count >= LANES ? BYTES : count > 0 ? 4 * count : 0);
        return;
    }
    uint16x4_t half = dtype == FLOAT16 ? vreinterpret_u16_f16(vcvt_f16_f32(values)) : to_bfloat16(values);
    memcpy(at, &half, count >= LANES ? BYTES / 2 : count > 0 ? 2 * count : 0);
}

// Load `count` bytes, and zeros behind them.
static inline Integers load_bytes(const uint8_t *from, int64_t count) {
    Integers room;
    return *(const Integers *)(count >= BYTES ? from : with_zeros(from, count, &room, BYTES));
}

static inline uint8x8_t load_half(const uint8_t *from, int64_t count) {
    uint8x8_t room;
    return vld1_u8(count >= BYTES / 2 ? from : with_zeros(from, count, &room, BYTES / 2));
}

// Load `count` numbers of 4 bits as bytes, the low half of a byte before its high one, and any numbers behind them.
static inline Integers load_nibbles(const uint8_t *from, int64_t count) {
    Integers pairs = (Integers)vmovl_u8(load_half(from, count / 2));
    return (pairs | pairs << 4) & all_bytes(0x0f);
}

// Load the codes of a vector of 32 columns from `column` on, a byte each; formats/planes.py has their order.
static inline __attribute__((always_inline)) Integers load_planes(const uint8_t *from, int bits, int column) {
    Integers codes = all_integers(0);
    if (bits & 4) codes = *(const Integers *)from >> (column >> 2) & all_bytes(15);
    if (bits & 2) {
        int64_t plane;
        memcpy(&plane, from + (bits & 4) * 4, 8);
        int64x2_t shifted = vshlq_s64(vdupq_n_s64(plane), (int64x2_t){-(column >> 2), -(column >> 2) - 2});
        codes |= ((Integers)shifted & all_bytes(3)) << (bits & 4);
    }
    if (bits & 1) {
        int32_t plane;
        memcpy(&plane, from + (bits & 6) * 4, 4);
        Integers shifted = vshlq_s32(vdupq_n_s32(plane), -(lane_numbers() + all_integers(column >> 2)));
        codes |= (shifted & all_bytes(1)) << (bits & 6);
    }
    return codes;
}

// Load the planes of 4, 2 and 1 bits of 32 columns. Words of a plane of 2 bits stand there twice, and those of one bit
// four times.
static inline __attribute__((always_inline)) void load_planes_apart(const uint8_t *from, int bits, Integers planes[3]) {
    int64_t twos = 0;
    int32_t ones = 0;
    if (bits & 4) planes[0] = *(const Integers *)from;
    if (bits & 2) memcpy(&twos, from + (bits & 4) * 4, 8);
    if (bits & 1) memcpy(&ones, from + (bits & 6) * 4, 4);
    planes[1] = (Integers)vdupq_n_s64(twos);
    planes[2] = vdupq_n_s32(ones);
}

// Return the bits of `a` where a mask has ones, else those of `b`.
static inline Integers selected(Integers mask, Integers a, Integers b) { return (a & mask) | (b & ~mask); }

// Return the bytes of one half of a vector as numbers of 16 bits; all are below 128.
static inline Words widen_half(Integers bytes, int half) {
    uint8x16_t all = (uint8x16_t)bytes;
    return (Words)vmovl_u8(half ? vget_high_u8(all) : vget_low_u8(all));
}

static inline Integers load_words(const int16_t *from) { return vmovl_s16(vld1_s16(from)); }

// Return the signed bytes of a quarter of a vector as 32-bit numbers.
static inline Integers widen_bytes(Integers bytes, int quarter) {
    int8x16_t all = (int8x16_t)bytes;
    int16x8_t half = vmovl_s8(quarter < 2 ? vget_low_s8(all) : vget_high_s8(all));
    return vmovl_s16(quarter & 1 ? vget_high_s16(half) : vget_low_s16(half));
}

// Return table[i] for each byte i, 0 to 15.
static inline Integers looked_up(const uint8_t table[16], Integers indexes) {
    return (Integers)vqtbl1q_u8(vld1q_u8(table), (uint8x16_t)indexes);
}

// Load `count` codes of float8_e4m3 as their values / 256, and zeros behind them. The bits are read as float16, whose
// exponent has one bit more and a larger bias. NaN, which no weight holds, becomes a number.
static inline void load_float8(const uint8_t *from, int64_t count, Floats out[2]) {
    Words bits = vmovl_s8(vreinterpret_s8_u8(load_half(from, count))) << 7 & all_words((int16_t)0xbf80);
    out[0] = vcvt_f32_f16(vreinterpret_f16_s16(vget_low_s16(bits)));
    out[1] = vcvt_f32_f16(vreinterpret_f16_s16(vget_high_s16(bits)));
}

// Pack four vectors of numbers that fit a signed byte into one, in their order.
static inline Integers pack_bytes(const Integers numbers[4]) {
    int16x8_t low = vcombine_s16(vmovn_s32(numbers[0]), vmovn_s32(numbers[1]));
    int16x8_t high = vcombine_s16(vmovn_s32(numbers[2]), vmovn_s32(numbers[3]));
    return (Integers)vcombine_s8(vmovn_s16(low), vmovn_s16(high));
}

// Store column i of the rows at `to + i * stride_bytes`.
static inline void store_transposed(const Integers rows[LANES], int8_t *to, int64_t stride_bytes) {
    // Each vector holds two rows, 0 and 1 or 2 and 3, of two columns: `even` of 0 and 2, `odd` of 1 and 3.
    int64x2_t even = (int64x2_t)vtrn1q_s32(rows[0], rows[1]), odd = (int64x2_t)vtrn2q_s32(rows[0], rows[1]);
    int64x2_t even_below = (int64x2_t)vtrn1q_s32(rows[2], rows[3]), odd_below = (int64x2_t)vtrn2q_s32(rows[2], rows[3]);
    *(Integers *)to = (Integers)vtrn1q_s64(even, even_below);
    *(Integers *)(to + stride_bytes) = (Integers)vtrn1q_s64(odd, odd_below);
    *(Integers *)(to + 2 * stride_bytes) = (Integers)vtrn2q_s64(even, even_below);
    *(Integers *)(to + 3 * stride_bytes) = (Integers)vtrn2q_s64(odd, odd_below);
}
