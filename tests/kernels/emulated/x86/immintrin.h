// The functions for AVX-512, AVX512_BF16 and AVX-VNNI that native/ calls, in plain C, and those for AVX2 of the compiler's
// own headers: tests compile the products with them for CPUs that have no more than AVX2.
#pragma once
#define _IMMINTRIN_H_INCLUDED
#define __IMMINTRIN_H
#define EMULATED_VECTORS
#include <math.h>
#include <nmmintrin.h>
#include <stdint.h>
#include <string.h>
#include <avxintrin.h>
#include <avx2intrin.h>
#include <f16cintrin.h>
#include <fmaintrin.h>

#define VECTOR(TYPE, BYTES) TYPE __attribute__((vector_size(BYTES), may_alias))
#define UNALIGNED(TYPE) TYPE __attribute__((vector_size(64), may_alias, aligned(1)))
typedef VECTOR(float, 64) __m512;
typedef VECTOR(int64_t, 64) __m512i;
typedef VECTOR(int16_t, 64) __m512bh;
typedef VECTOR(int16_t, 32) __m256bh;
typedef VECTOR(int16_t, 16) __m128bh;
typedef uint16_t __mmask16;
typedef uint32_t __mmask32;
typedef uint64_t __mmask64;
typedef VECTOR(int32_t, 64) Int;
typedef VECTOR(uint32_t, 64) Unsigned;
typedef VECTOR(int16_t, 64) Short;
typedef VECTOR(uint16_t, 64) UnsignedShort;
typedef VECTOR(int8_t, 64) Byte;
typedef VECTOR(uint8_t, 64) UnsignedByte;
typedef VECTOR(int16_t, 32) HalfShort;
typedef VECTOR(uint16_t, 32) HalfUnsignedShort;
typedef VECTOR(int8_t, 32) HalfByte;
typedef VECTOR(uint8_t, 32) HalfUnsignedByte;
typedef VECTOR(int8_t, 16) QuarterByte;
typedef VECTOR(uint8_t, 16) QuarterUnsignedByte;

#define FUNCTION static inline __attribute__((unused))
#define EACH(COUNT) for (int i = 0; i < (COUNT); i++)
// A function whose result is made element by element of a type, and seen as another.
#define DEFINE(NAME, TO, AS, COUNT, ELEMENT, ...) \
    FUNCTION TO NAME(__VA_ARGS__) {               \
        AS out;                                   \
        EACH(COUNT) out[i] = ELEMENT;             \
        return (TO)out;                           \
    }

DEFINE(_mm512_set1_ps, __m512, __m512, 16, value, float value)
DEFINE(_mm512_set1_epi32, __m512i, Int, 16, value, int32_t value)
DEFINE(_mm512_set1_epi16, __m512i, Short, 32, value, int16_t value)
DEFINE(_mm512_set1_epi8, __m512i, Byte, 64, value, int8_t value)
DEFINE(_mm512_setzero_si512, __m512i, Int, 16, 0, void)
#define _mm512_setr_epi32(...) ((__m512i)(Int){__VA_ARGS__})

#define a_(TYPE) ((TYPE)a)[i]
#define b_(TYPE) ((TYPE)b)[i]
#define OF_TWO(NAME, TYPE, COUNT, ELEMENT) DEFINE(NAME, __m512i, TYPE, COUNT, ELEMENT, __m512i a, __m512i b)
OF_TWO(_mm512_add_epi32, Unsigned, 16, a_(Unsigned) + b_(Unsigned))
OF_TWO(_mm512_add_epi16, Short, 32, (int16_t)(a_(Short) + b_(Short)))
OF_TWO(_mm512_sub_epi8, Byte, 64, (int8_t)(a_(Byte) - b_(Byte)))
OF_TWO(_mm512_and_si512, Int, 16, a_(Int) & b_(Int))
OF_TWO(_mm512_or_si512, Int, 16, a_(Int) | b_(Int))
OF_TWO(_mm512_shuffle_epi8, Byte, 64, b_(Byte) < 0 ? 0 : ((Byte)a)[i / 16 * 16 + (b_(Byte) & 15)])
OF_TWO(_mm512_permutexvar_epi32, Int, 16, ((Int)b)[a_(Int) & 15])
OF_TWO(_mm512_permutexvar_epi16, Short, 32, ((Short)b)[a_(Short) & 31])
#define OF_LANES(NAME, TYPE, LANE, FIRST) \
    OF_TWO(NAME, TYPE, 64 / sizeof(a_(TYPE)), (i % 2 ? (TYPE)b : (TYPE)a)[i / LANE * LANE + FIRST + i % LANE / 2])
OF_LANES(_mm512_unpacklo_epi32, Int, 4, 0)
OF_LANES(_mm512_unpackhi_epi32, Int, 4, 2)
OF_LANES(_mm512_unpacklo_epi64, __m512i, 2, 0)
OF_LANES(_mm512_unpackhi_epi64, __m512i, 2, 1)

FUNCTION int cut(int value, int least, int most) { return value < least ? least : value > most ? most : value; }
#define PACKED(TYPE, LANE) (i % LANE < LANE / 2 ? (TYPE)a : (TYPE)b)[i / LANE * (LANE / 2) + i % (LANE / 2)]
OF_TWO(_mm512_packs_epi32, Short, 32, (int16_t)cut(PACKED(Int, 8), INT16_MIN, INT16_MAX))
OF_TWO(_mm512_packs_epi16, Byte, 64, (int8_t)cut(PACKED(Short, 16), INT8_MIN, INT8_MAX))

DEFINE(_mm512_slli_epi32, __m512i, Unsigned, 16, a_(Unsigned) << by, __m512i a, int by)
DEFINE(_mm512_srli_epi32, __m512i, Unsigned, 16, a_(Unsigned) >> by, __m512i a, int by)
DEFINE(_mm512_slli_epi16, __m512i, UnsignedShort, 32, (uint16_t)(a_(UnsignedShort) << by), __m512i a, int by)
DEFINE(_mm512_srli_epi16, __m512i, UnsignedShort, 32, a_(UnsignedShort) >> by, __m512i a, int by)
DEFINE(_mm512_permutexvar_ps, __m512, __m512, 16, values[a_(Int) & 15], __m512i a, __m512 values)
DEFINE(_mm512_permutevar_ps, __m512, __m512, 16, values[i / 4 * 4 + (a_(Int) & 3)], __m512 values, __m512i a)
DEFINE(_mm512_broadcast_f32x4, __m512, __m512, 16, four[i % 4], __m128 four)
DEFINE(_mm512_permutex2var_epi16, __m512i, Short, 32, ((((Short)order)[i] & 32) ? (Short)b : (Short)a)[((Short)order)[i] & 31],
       __m512i a, __m512i order, __m512i b)
DEFINE(_mm512_permutex2var_epi32, __m512i, Int, 16, ((((Int)order)[i] & 16) ? (Int)b : (Int)a)[((Int)order)[i] & 15],
       __m512i a, __m512i order, __m512i b)
// Of the functions of three bits, that which takes the second where the first is 1, and else the third.
DEFINE(_mm512_ternarylogic_epi32, __m512i, Int, 16, (((Int)mask)[i] & a_(Int)) | (~((Int)mask)[i] & b_(Int)), __m512i mask,
       __m512i a, __m512i b, int selects)
DEFINE(_mm512_shuffle_i32x4, __m512i, Int, 16, (i < 8 ? (Int)a : (Int)b)[(lanes >> (i / 4 * 2) & 3) * 4 + i % 4], __m512i a,
       __m512i b, int lanes)
DEFINE(_mm512_broadcast_i32x4, __m512i, Byte, 64, ((QuarterByte)a)[i % 16], __m128i a)
DEFINE(_mm512_inserti64x4, __m512i, Byte, 64, (i / 32 == half) ? ((HalfByte)b)[i % 32] : a_(Byte), __m512i a, __m256i b, int half)
DEFINE(_mm512_extracti64x4_epi64, __m256i, HalfByte, 32, ((Byte)a)[32 * half + i], __m512i a, int half)
// Other bytes may be any.
DEFINE(_mm512_castsi128_si512, __m512i, Byte, 64, i < 16 ? ((QuarterByte)a)[i % 16] : 85, __m128i a)
DEFINE(_mm512_castsi256_si512, __m512i, Byte, 64, i < 32 ? ((HalfByte)a)[i % 32] : 85, __m256i a)
DEFINE(_mm512_castsi512_si256, __m256i, HalfByte, 32, ((Byte)a)[i], __m512i a)
FUNCTION __m512i _mm512_castps_si512(__m512 a) { return (__m512i)a; }
FUNCTION __m512 _mm512_castsi512_ps(__m512i a) { return (__m512)a; }

DEFINE(_mm512_fmadd_ps, __m512, __m512, 16, fmaf(a[i], b[i], sum[i]), __m512 a, __m512 b, __m512 sum)
DEFINE(_mm512_max_ps, __m512, __m512, 16, a[i] > b[i] ? a[i] : b[i], __m512 a, __m512 b)
DEFINE(_mm512_abs_ps, __m512, __m512, 16, fabsf(a[i]), __m512 a)
FUNCTION float _mm512_reduce_add_ps(__m512 a) {
    for (int half = 8; half; half /= 2) EACH(half) a[i] += a[i + half];
    return a[0];
}
FUNCTION float _mm512_reduce_max_ps(__m512 a) {
    for (int half = 8; half; half /= 2) EACH(half) a[i] = a[i] > a[i + half] ? a[i] : a[i + half];
    return a[0];
}
// Of the kinds of comparison, that which tells whether a number is NaN.
FUNCTION __mmask16 _mm512_cmp_ps_mask(__m512 a, __m512 b, int unordered) {
    __mmask16 out = 0;
    EACH(16) out |= (__mmask16)((a[i] != a[i] || b[i] != b[i]) << i);
    return (void)unordered, out;
}
DEFINE(_mm512_mask_mov_epi32, __m512i, Int, 16, mask >> i & 1 ? b_(Int) : a_(Int), __m512i a, __mmask16 mask, __m512i b)

DEFINE(_mm512_cvtepi8_epi32, __m512i, Int, 16, a_(QuarterByte), __m128i a)
DEFINE(_mm512_cvtepu8_epi32, __m512i, Int, 16, a_(QuarterUnsignedByte), __m128i a)
DEFINE(_mm512_cvtepi8_epi16, __m512i, Short, 32, a_(HalfByte), __m256i a)
DEFINE(_mm512_cvtepu8_epi16, __m512i, Short, 32, a_(HalfUnsignedByte), __m256i a)
DEFINE(_mm512_cvtepi16_epi32, __m512i, Int, 16, a_(HalfShort), __m256i a)
DEFINE(_mm512_cvtepu16_epi32, __m512i, Int, 16, a_(HalfUnsignedShort), __m256i a)
DEFINE(_mm512_cvtepi32_epi16, __m256i, HalfShort, 16, (int16_t)a_(Int), __m512i a)
DEFINE(_mm512_cvtepi32_ps, __m512, __m512, 16, (float)a_(Int), __m512i a)
DEFINE(_mm512_cvtps_epi32, __m512i, Int, 16, _mm_cvtss_si32(_mm_set_ss(a[i])), __m512 a)
DEFINE(_mm512_cvtph_ps, __m512, __m512, 16, _cvtsh_ss(a_(HalfUnsignedShort)), __m256i a)
DEFINE(_mm512_cvtps_ph, __m256i, HalfUnsignedShort, 16, _cvtss_sh(a[i], 0), __m512 a, int rounding)

// Rounds to the nearest, ties to even; subnormal numbers become 0.
FUNCTION uint16_t bfloat16_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if (value != value) return (uint16_t)(bits >> 16 | 0x40);
    if (!(bits >> 23 & 0xff)) return (uint16_t)(bits >> 16 & 0x8000);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
DEFINE(_mm256_cvtneps_pbh, __m128bh, __m128bh, 8, (int16_t)bfloat16_of(a[i]), __m256 a)
DEFINE(_mm512_cvtneps_pbh, __m256bh, __m256bh, 16, (int16_t)bfloat16_of(a[i]), __m512 a)
DEFINE(_mm512_cvtne2ps_pbh, __m512bh, __m512bh, 32, (int16_t)bfloat16_of(i < 16 ? low[i] : high[i - 16]), __m512 high, __m512 low)

FUNCTION float widened_bfloat16(__m512bh a, int i) {
    uint32_t bits = (uint32_t)(uint16_t)a[i] << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
FUNCTION __m512 _mm512_dpbf16_ps(__m512 sums, __m512bh a, __m512bh b) {
    for (int j = 1; j >= 0; j--)
        EACH(16) sums[i] += widened_bfloat16(a, 2 * i + j) * widened_bfloat16(b, 2 * i + j);
    return sums;
}
FUNCTION __m512i _mm512_dpbusd_epi32(__m512i sums, __m512i without, __m512i with) {
    Int out = (Int)sums;
    EACH(64) out[i / 4] += ((UnsignedByte)without)[i] * ((Byte)with)[i];
    return (__m512i)out;
}
FUNCTION __m256i _mm256_dpbusd_avx_epi32(__m256i sums, __m256i without, __m256i with) {
    VECTOR(int32_t, 32) out = (VECTOR(int32_t, 32))sums;
    EACH(32) out[i / 4] += ((HalfUnsignedByte)without)[i] * ((HalfByte)with)[i];
    return (__m256i)out;
}

// What a mask leaves out is not touched.
#define LOAD(NAME, TO, AS, COUNT, MASK, FROM) \
    DEFINE(NAME, TO, AS, COUNT, mask >> i & 1 ? ((const FROM *)from)[i] : 0, MASK mask, const void *from)
LOAD(_mm512_maskz_loadu_ps, __m512, __m512, 16, __mmask16, float)
LOAD(_mm512_maskz_loadu_epi16, __m512i, Short, 32, __mmask32, int16_t)
LOAD(_mm512_maskz_loadu_epi8, __m512i, Byte, 64, __mmask64, int8_t)
LOAD(_mm256_maskz_loadu_epi16, __m256i, HalfShort, 16, __mmask16, int16_t)
LOAD(_mm256_maskz_loadu_epi8, __m256i, HalfByte, 32, __mmask32, int8_t)
FUNCTION __m512i _mm512_loadu_si512(const void *from) { return (__m512i) * (const UNALIGNED(int64_t) *)from; }
FUNCTION void _mm512_storeu_si512(void *to, __m512i a) { memcpy(to, &a, 64); }
FUNCTION void _mm512_mask_storeu_ps(void *to, __mmask16 mask, __m512 a) {
    EACH(16) if (mask >> i & 1) ((float *)to)[i] = a[i];
}
FUNCTION void _mm256_mask_storeu_epi16(void *to, __mmask16 mask, __m256i a) {
    EACH(16) if (mask >> i & 1) ((int16_t *)to)[i] = a_(HalfShort);
}
