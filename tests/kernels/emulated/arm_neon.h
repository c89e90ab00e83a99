// The functions of ARM's arm_neon.h that native/neon.h calls, in plain C: tests compile the products with them for x86.
#pragma once
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define VECTOR(TYPE, BYTES) TYPE __attribute__((vector_size(BYTES), may_alias))
typedef VECTOR(float, 16) float32x4_t;
typedef VECTOR(int32_t, 16) int32x4_t;
typedef VECTOR(uint32_t, 16) uint32x4_t;
typedef VECTOR(int64_t, 16) int64x2_t;
typedef VECTOR(int16_t, 16) int16x8_t;
typedef VECTOR(uint16_t, 16) uint16x8_t;
typedef VECTOR(int8_t, 16) int8x16_t;
typedef VECTOR(uint8_t, 16) uint8x16_t;
typedef VECTOR(int16_t, 8) int16x4_t;
typedef VECTOR(uint16_t, 8) uint16x4_t;
typedef VECTOR(int8_t, 8) int8x8_t;
typedef VECTOR(uint8_t, 8) uint8x8_t;
typedef struct {
    uint16_t bits[4];
} float16x4_t;

#define FUNCTION static inline __attribute__((unused))
#define EACH(COUNT) for (int i = 0; i < (COUNT); i++)
#define DEFINE(NAME, TO, COUNT, ELEMENT, ...) \
    FUNCTION TO NAME(__VA_ARGS__) {           \
        TO out;                               \
        EACH(COUNT) out[i] = ELEMENT;         \
        return out;                           \
    }

DEFINE(vdupq_n_f32, float32x4_t, 4, value, float value)
DEFINE(vdupq_n_s64, int64x2_t, 2, value, int64_t value)
DEFINE(vdupq_n_s32, int32x4_t, 4, value, int32_t value)
DEFINE(vdupq_n_s16, int16x8_t, 8, value, int16_t value)
DEFINE(vdupq_n_s8, int8x16_t, 16, value, int8_t value)
DEFINE(vld1_s16, int16x4_t, 4, from[i], const int16_t *from)
DEFINE(vld1_u16, uint16x4_t, 4, from[i], const uint16_t *from)
DEFINE(vld1_u8, uint8x8_t, 8, from[i], const uint8_t *from)
DEFINE(vld1q_u8, uint8x16_t, 16, from[i], const uint8_t *from)

DEFINE(vfmaq_f32, float32x4_t, 4, fmaf(a[i], b[i], sum[i]), float32x4_t sum, float32x4_t a, float32x4_t b)
DEFINE(vmaxq_f32, float32x4_t, 4, a[i] > b[i] || a[i] != a[i] ? a[i] : b[i], float32x4_t a, float32x4_t b)
DEFINE(vabsq_f32, float32x4_t, 4, fabsf(a[i]), float32x4_t a)
DEFINE(vcvtq_f32_s32, float32x4_t, 4, (float)a[i], int32x4_t a)
FUNCTION float vaddvq_f32(float32x4_t a) { return (a[0] + a[1]) + (a[2] + a[3]); }
FUNCTION float vmaxvq_f32(float32x4_t a) {
    float32x4_t swapped = {a[2], a[3], a[0], a[1]}, pairs = vmaxq_f32(a, swapped);
    return vmaxq_f32(pairs, (float32x4_t){pairs[1]})[0];
}

// Rounds to the nearest, ties to even; what does not fit is cut off, and NaN becomes 0.
FUNCTION int32_t rounded(float value) {
    return value != value ? 0 : value >= 0x1p31f ? INT32_MAX : value < -0x1p31f ? INT32_MIN : (int32_t)rintf(value);
}
DEFINE(vcvtnq_s32_f32, int32x4_t, 4, rounded(a[i]), float32x4_t a)

FUNCTION int32x4_t vdotq_s32(int32x4_t sums, int8x16_t a, int8x16_t b) {
    EACH(16) sums[i / 4] += a[i] * b[i];
    return sums;
}

DEFINE(vmlal_s16, int32x4_t, 4, sums[i] + a[i] * b[i], int32x4_t sums, int16x4_t a, int16x4_t b)
DEFINE(vmlal_high_s16, int32x4_t, 4, sums[i] + a[4 + i] * b[4 + i], int32x4_t sums, int16x8_t a, int16x8_t b)
// Of 32 and 64 bits; a negative number shifts to the right.
#define SHIFTED(A, B) ((B) < 0 ? (A) >> -(B) : (A) << (B))
DEFINE(vshlq_s32, int32x4_t, 4, SHIFTED(a[i], b[i]), int32x4_t a, int32x4_t b)
DEFINE(vshlq_s64, int64x2_t, 2, SHIFTED(a[i], b[i]), int64x2_t a, int64x2_t b)
DEFINE(vshll_n_u16, uint32x4_t, 4, (uint32_t)a[i] << count, uint16x4_t a, int count)

DEFINE(vmovl_u8, uint16x8_t, 8, a[i], uint8x8_t a)
DEFINE(vmovl_s8, int16x8_t, 8, a[i], int8x8_t a)
DEFINE(vmovl_s16, int32x4_t, 4, a[i], int16x4_t a)
DEFINE(vmovn_s16, int8x8_t, 8, (int8_t)a[i], int16x8_t a)
DEFINE(vmovn_s32, int16x4_t, 4, (int16_t)a[i], int32x4_t a)
DEFINE(vmovn_u32, uint16x4_t, 4, (uint16_t)a[i], uint32x4_t a)

DEFINE(vget_low_s16, int16x4_t, 4, a[i], int16x8_t a)
DEFINE(vget_high_s16, int16x4_t, 4, a[4 + i], int16x8_t a)
DEFINE(vget_low_s8, int8x8_t, 8, a[i], int8x16_t a)
DEFINE(vget_high_s8, int8x8_t, 8, a[8 + i], int8x16_t a)
DEFINE(vget_low_u8, uint8x8_t, 8, a[i], uint8x16_t a)
DEFINE(vget_high_u8, uint8x8_t, 8, a[8 + i], uint8x16_t a)
DEFINE(vcombine_s16, int16x8_t, 8, i < 4 ? a[i] : b[i - 4], int16x4_t a, int16x4_t b)
DEFINE(vcombine_s8, int8x16_t, 16, i < 8 ? a[i] : b[i - 8], int8x8_t a, int8x8_t b)
DEFINE(vqtbl1q_u8, uint8x16_t, 16, indexes[i] < 16 ? table[indexes[i]] : 0, uint8x16_t table, uint8x16_t indexes)
DEFINE(vtrn1q_s32, int32x4_t, 4, i & 1 ? b[i - 1] : a[i], int32x4_t a, int32x4_t b)
DEFINE(vtrn2q_s32, int32x4_t, 4, i & 1 ? b[i] : a[i + 1], int32x4_t a, int32x4_t b)
DEFINE(vtrn1q_s64, int64x2_t, 2, i ? b[0] : a[0], int64x2_t a, int64x2_t b)
DEFINE(vtrn2q_s64, int64x2_t, 2, i ? b[1] : a[1], int64x2_t a, int64x2_t b)

FUNCTION int8x8_t vreinterpret_s8_u8(uint8x8_t a) { return (int8x8_t)a; }
FUNCTION float16x4_t vreinterpret_f16_s16(int16x4_t a) {
    float16x4_t out;
    memcpy(&out, &a, sizeof out);
    return out;
}
FUNCTION float16x4_t vreinterpret_f16_u16(uint16x4_t a) { return vreinterpret_f16_s16((int16x4_t)a); }
DEFINE(vreinterpret_u16_f16, uint16x4_t, 4, a.bits[i], float16x4_t a)
DEFINE(vcvt_f32_f16, float32x4_t, 4, _cvtsh_ss(a.bits[i]), float16x4_t a)
FUNCTION float16x4_t vcvt_f16_f32(float32x4_t a) {
    float16x4_t out;
    EACH(4) out.bits[i] = _cvtss_sh(a[i], 0);
    return out;
}
