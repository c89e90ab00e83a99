// Vectors of AVX-512. A `count` of elements may be more than a vector holds, and a count of floats may be negative.
#pragma once

// Bytes in a vector, 32-bit numbers in a vector, and the number of sums of products that stay in registers.
#define BYTES 64
#define LANES 16
#define SUMS 24
// A signed byte plus this number has no sign: the instruction for products takes one signed and one unsigned byte.
#define BYTE_OFFSET 128

typedef float Floats __attribute__((vector_size(BYTES), aligned(4), may_alias));
typedef int32_t Integers __attribute__((vector_size(BYTES), aligned(1), may_alias));

static inline Floats all_floats(float value) { return _mm512_set1_ps(value); }
static inline Integers all_integers(int32_t value) { return (Integers)_mm512_set1_epi32(value); }
static inline Integers all_bytes(int value) { return (Integers)_mm512_set1_epi8((char)value); }
static inline Floats multiply_add(Floats a, Floats b, Floats sum) { return _mm512_fmadd_ps(a, b, sum); }
static inline Floats larger(Floats a, Floats b) { return _mm512_max_ps(a, b); }
static inline Floats magnitudes(Floats values) { return _mm512_abs_ps(values); }
static inline float sum_of(Floats values) { return _mm512_reduce_add_ps(values); }
static inline float largest_of(Floats values) { return _mm512_reduce_max_ps(values); }
static inline Integers to_integers(Floats values) { return (Integers)_mm512_cvtps_epi32(values); }
static inline Floats to_floats(Integers values) { return _mm512_cvtepi32_ps((__m512i)values); }

// Lane i of the result is lane indexes[i] of the values.
static inline Floats permuted(Floats values, Integers indexes) {
    return _mm512_permutexvar_ps((__m512i)indexes, values);
}

// Lane i of the result is number indexes[i] of four.
static inline Floats permuted_four(const float *four, Integers indexes) {
    return _mm512_permutevar_ps(_mm512_broadcast_f32x4(_mm_loadu_ps(four)), (__m512i)indexes);
}

// Keep a vector in a register. GCC 12 would load it from memory again for its second use.
static inline Integers loaded_once(Integers values) {
#ifndef EMULATED_VECTORS
    __asm__("" : "+v"(values));
#endif
    return values;
}

// Return a product that the compiler does not fuse with the sum that follows.
static inline Floats unfused(Floats values) {
#ifndef EMULATED_VECTORS
    __asm__("" : "+v"(values));
#endif
    return values;
}

static inline Integers lane_numbers(void) {
    return (Integers){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
}

// Add the products of unsigned and signed bytes, four to each lane.
static inline Integers add_products_of_bytes(Integers sums, Integers without, Integers with) {
    return (Integers)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)without, (__m512i)with);
}

// A mask of the first `count` lanes.
static inline __mmask16 first_lanes(int64_t count) {
    return count >= LANES ? 0xffff : count > 0 ? (__mmask16)((1u << count) - 1) : 0;
}

// Load `count` elements from `index` on as float32; 0 in the other lanes.
static inline Floats load_floats(const void *from, int dtype, int64_t index, int64_t count) {
    __mmask16 mask = first_lanes(count);
    if (dtype == FLOAT32) return _mm512_maskz_loadu_ps(mask, (const float *)from + index);
    __m256i half = _mm256_maskz_loadu_epi16(mask, (const uint16_t *)from + index);
    if (dtype == FLOAT16) return _mm512_cvtph_ps(half);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

// Rounds to the nearest, ties to even, as PyTorch does; NaN stays NaN.
static inline __m256i to_bfloat16(__m512 values) {
#ifdef __AVX512BF16__
    return (__m256i)_mm512_cvtneps_pbh(values);  // subnormal numbers become 0
#else
    __m512i bits = _mm512_castps_si512(values);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    __mmask16 nan = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc0)));
#endif
}

static inline void store_floats(void *to, int dtype, int64_t index, int64_t count, Floats values) {
    __mmask16 mask = first_lanes(count);
    if (dtype == FLOAT32) {
        _mm512_mask_storeu_ps((float *)to + index, mask, values);
        return;
    }
    __m256i half = dtype == FLOAT16 ? _mm512_cvtps_ph(values, 0) : to_bfloat16(values);
    _mm256_mask_storeu_epi16((uint16_t *)to + index, mask, half);
}

// Store eight floats to each of two places.
static inline void store_halves(Floats values, float *first, float *second) {
    __m512i bits = _mm512_castps_si512(values);
    _mm256_storeu_si256((__m256i *)first, _mm512_castsi512_si256(bits));
    _mm256_storeu_si256((__m256i *)second, _mm512_extracti64x4_epi64(bits, 1));
}

// Load `count` bytes, and zeros behind them.
static inline Integers load_bytes(const uint8_t *from, int64_t count) {
    return (Integers)_mm512_maskz_loadu_epi8(count >= BYTES ? ~0ull : (1ull << count) - 1, from);
}

// Load `count` numbers of 4 bits as bytes, the low half of a byte before its high one, and any numbers behind them.
static inline Integers load_nibbles(const uint8_t *from, int64_t count) {
    __mmask32 mask = count >= BYTES ? ~0u : (1u << (count / 2)) - 1;
    __m512i pairs = _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(mask, from));
    return (Integers)_mm512_and_si512(_mm512_or_si512(pairs, _mm512_slli_epi16(pairs, 4)), _mm512_set1_epi8(0x0f));
}

// Load the codes of a vector of 64 columns, a byte each; formats/planes.py has their order.
static inline __attribute__((always_inline)) Integers load_planes(const uint8_t *from, int bits, int column) {
    typedef uint64_t Longs __attribute__((vector_size(BYTES)));
    typedef uint32_t Unsigned __attribute__((vector_size(BYTES)));
    const uint8_t *next = from + 4 * bits;  // of the other 32 columns
    __m512i codes = _mm512_setzero_si512(), both = codes;
    (void)column;  // 0: there is one vector of them
    if (bits & 4) {
        both = _mm512_inserti64x4(both, _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)from)), 0);
        both = _mm512_inserti64x4(both, _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)next)), 1);
        codes = _mm512_and_si512((__m512i)((Longs)both >> (Longs){0, 0, 4, 4, 0, 0, 4, 4}), _mm512_set1_epi8(15));
    }
    if (bits & 2) {
        int64_t low, high;
        memcpy(&low, from + (bits & 4) * 4, 8);
        memcpy(&high, next + (bits & 4) * 4, 8);
        both = _mm512_inserti64x4(both, _mm256_set1_epi64x(low), 0);
        both = _mm512_inserti64x4(both, _mm256_set1_epi64x(high), 1);
        both = _mm512_and_si512((__m512i)((Longs)both >> (Longs){0, 2, 4, 6, 0, 2, 4, 6}), _mm512_set1_epi8(3));
        codes = _mm512_or_si512(codes, _mm512_slli_epi16(both, bits & 4));
    }
    if (bits & 1) {
        int32_t low, high;
        memcpy(&low, from + (bits & 6) * 4, 4);
        memcpy(&high, next + (bits & 6) * 4, 4);
        both = _mm512_inserti64x4(both, _mm256_set1_epi32(low), 0);
        both = _mm512_inserti64x4(both, _mm256_set1_epi32(high), 1);
        both = (__m512i)((Unsigned)both >> (Unsigned){0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7});
        codes = _mm512_or_si512(codes, _mm512_slli_epi16(_mm512_and_si512(both, _mm512_set1_epi8(1)), bits & 6));
    }
    return (Integers)codes;
}

// Load the planes of 4, 2 and 1 bits of 128 columns. 16 bytes of each belong to 32 columns, so the words of a plane of 2
// bits stand there twice, and those of one bit four times.
static inline __attribute__((always_inline)) void load_planes_apart(const uint8_t *from, int bits, Integers planes[3]) {
    const Integers first = (lane_numbers() >> 2) * all_integers(bits), lane = lane_numbers() & all_integers(3);
    const __m512i fours = (__m512i)(first + lane), ones = (__m512i)(first + all_integers(bits & 6));
    const __m512i twos = (__m512i)(first + (lane & all_integers(1)) + all_integers(bits & 4));
    __m512i head = (__m512i)loaded_once(load_bytes(from, 16 * bits)), tail = head;
    if (bits == 5) tail = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)(from + BYTES)));
    if (bits == 6) tail = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)(from + BYTES)));
    if (bits > 4) tail = (__m512i)loaded_once((Integers)tail);
    if (bits & 4) planes[0] = (Integers)_mm512_permutex2var_epi32(head, fours, tail);
    if (bits & 2) planes[1] = (Integers)_mm512_permutex2var_epi32(head, twos, tail);
    if (bits & 1) planes[2] = (Integers)_mm512_permutex2var_epi32(head, ones, tail);
}

// Return the bits of `a` where a mask has ones, else those of `b`.
static inline Integers selected(Integers mask, Integers a, Integers b) {
    return (Integers)_mm512_ternarylogic_epi32((__m512i)mask, (__m512i)a, (__m512i)b, 0xca);
}

// Return the unsigned bytes of a quarter of a vector as 32-bit numbers.
static inline Integers widen_bytes(Integers bytes, int quarter) {
    __m128i quarters[4];
    memcpy(quarters, &bytes, sizeof bytes);
    return (Integers)_mm512_cvtepu8_epi32(quarters[quarter]);
}

// Return table[i] for each byte i, 0 to 15.
static inline Integers looked_up(const uint8_t table[16], Integers indexes) {
    __m512i values = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)table));
    return (Integers)_mm512_shuffle_epi8(values, (__m512i)indexes);
}

// Load `count` codes of float8_e4m3 as their values / 256, and zeros behind them. The bits are read as float16, whose
// exponent has one bit more and a larger bias. NaN, which no weight holds, becomes a number.
static inline void load_float8(const uint8_t *from, int64_t count, Floats out[2]) {
    __mmask32 mask = count >= 2 * LANES ? ~0u : (1u << count) - 1;
    __m512i bits = _mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi8(mask, from));
    bits = _mm512_and_si512(_mm512_slli_epi16(bits, 7), _mm512_set1_epi16((short)0xbf80));
    out[0] = _mm512_cvtph_ps(_mm512_castsi512_si256(bits));
    out[1] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(bits, 1));
}

// Pack four vectors of numbers that fit a signed byte into one, in their order.
static inline Integers pack_bytes(const Integers numbers[4]) {
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    __m512i low = _mm512_packs_epi32((__m512i)numbers[0], (__m512i)numbers[1]);
    __m512i high = _mm512_packs_epi32((__m512i)numbers[2], (__m512i)numbers[3]);
    return (Integers)_mm512_permutexvar_epi32(order, _mm512_packs_epi16(low, high));
}

// Store column i of the rows at `to + i * stride_bytes`.
static inline void store_transposed(const Integers rows[LANES], int8_t *to, int64_t stride_bytes) {
    __m512i pairs[LANES], fours[LANES];
    for (int i = 0; i < 8; i++) {
        pairs[2 * i] = _mm512_unpacklo_epi32((__m512i)rows[2 * i], (__m512i)rows[2 * i + 1]);
        pairs[2 * i + 1] = _mm512_unpackhi_epi32((__m512i)rows[2 * i], (__m512i)rows[2 * i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        fours[i] = _mm512_unpacklo_epi64(pairs[i], pairs[i + 2]);
        fours[i + 1] = _mm512_unpackhi_epi64(pairs[i], pairs[i + 2]);
        fours[i + 2] = _mm512_unpacklo_epi64(pairs[i + 1], pairs[i + 3]);
        fours[i + 3] = _mm512_unpackhi_epi64(pairs[i + 1], pairs[i + 3]);
    }
    // Quarter q of fours[4 * j + i] holds rows 4 * j to 4 * j + 3 of column 4 * q + i.
    for (int i = 0; i < 4; i++) {
        __m512i even = _mm512_shuffle_i32x4(fours[i], fours[i + 4], 0x88);
        __m512i odd = _mm512_shuffle_i32x4(fours[i], fours[i + 4], 0xdd);
        __m512i even_below = _mm512_shuffle_i32x4(fours[i + 8], fours[i + 12], 0x88);
        __m512i odd_below = _mm512_shuffle_i32x4(fours[i + 8], fours[i + 12], 0xdd);
        _mm512_storeu_si512(to + i * stride_bytes, _mm512_shuffle_i32x4(even, even_below, 0x88));
        _mm512_storeu_si512(to + (i + 4) * stride_bytes, _mm512_shuffle_i32x4(odd, odd_below, 0x88));
        _mm512_storeu_si512(to + (i + 8) * stride_bytes, _mm512_shuffle_i32x4(even, even_below, 0xdd));
        _mm512_storeu_si512(to + (i + 12) * stride_bytes, _mm512_shuffle_i32x4(odd, odd_below, 0xdd));
    }
}
