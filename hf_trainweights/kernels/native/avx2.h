// Vectors of AVX2. A `count` of elements may be more than a vector holds, and a count of floats may be negative.
#pragma once

// Bytes in a vector, 32-bit numbers in a vector, and the number of sums of products that stay in registers.
#define BYTES 32
#define LANES 8
#define SUMS 12
// A signed byte plus this number has no sign: the instruction for products takes one signed and one unsigned byte.
#define BYTE_OFFSET 128

typedef float Floats __attribute__((vector_size(BYTES), aligned(4), may_alias));
typedef int32_t Integers __attribute__((vector_size(BYTES), aligned(1), may_alias));
typedef int16_t Words __attribute__((vector_size(BYTES), aligned(1), may_alias));

static inline Floats all_floats(float value) { return _mm256_set1_ps(value); }
static inline Integers all_integers(int32_t value) { return (Integers)_mm256_set1_epi32(value); }
static inline Integers all_bytes(int value) { return (Integers)_mm256_set1_epi8((char)value); }
static inline Words all_words(int16_t value) { return (Words)_mm256_set1_epi16(value); }
static inline Floats multiply_add(Floats a, Floats b, Floats sum) { return _mm256_fmadd_ps(a, b, sum); }
static inline Floats larger(Floats a, Floats b) { return _mm256_max_ps(a, b); }
static inline Floats magnitudes(Floats values) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), values); }
static inline Integers to_integers(Floats values) { return (Integers)_mm256_cvtps_epi32(values); }
static inline Floats to_floats(Integers values) { return _mm256_cvtepi32_ps((__m256i)values); }

static inline float sum_of(Floats values) {
    __m128 sum = _mm_add_ps(_mm256_castps256_ps128(values), _mm256_extractf128_ps(values, 1));
    sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
    return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}

static inline float largest_of(Floats values) {
    __m128 top = _mm_max_ps(_mm256_castps256_ps128(values), _mm256_extractf128_ps(values, 1));
    top = _mm_max_ps(top, _mm_movehl_ps(top, top));
    return _mm_cvtss_f32(_mm_max_ss(top, _mm_movehdup_ps(top)));
}

// Lane i of the result is lane indexes[i] of the values.
static inline Floats permuted(Floats values, Integers indexes) {
    return _mm256_permutevar8x32_ps(values, (__m256i)indexes);
}

// Lane i of the result is number indexes[i] of four.
static inline Floats permuted_four(const float *four, Integers indexes) {
    return _mm256_permutevar_ps(_mm256_broadcast_ps((const __m128 *)four), (__m256i)indexes);
}

// Keep a vector in a register. GCC 12 would load it from memory again for its second use.
static inline Integers loaded_once(Integers values) {
    __asm__("" : "+x"(values));
    return values;
}

// Return a product that the compiler does not fuse with the sum that follows.
static inline Floats unfused(Floats values) {
    __asm__("" : "+x"(values));
    return values;
}

static inline Integers lane_numbers(void) { return (Integers){0, 1, 2, 3, 4, 5, 6, 7}; }

// Add the products of unsigned and signed bytes, four to each lane. AVX2 alone has to widen them to 16 bits first.
static inline Integers add_products_of_bytes(Integers sums, Integers without, Integers with) {
#ifdef __AVXVNNI__
    return (Integers)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)without, (__m256i)with);
#else
    __m256i even = _mm256_and_si256((__m256i)without, _mm256_set1_epi16(0xff));
    __m256i even_with = _mm256_srai_epi16(_mm256_slli_epi16((__m256i)with, 8), 8);
    __m256i odd = _mm256_srli_epi16((__m256i)without, 8), odd_with = _mm256_srai_epi16((__m256i)with, 8);
    __m256i products = _mm256_add_epi32(_mm256_madd_epi16(even, even_with), _mm256_madd_epi16(odd, odd_with));
    return (Integers)_mm256_add_epi32((__m256i)sums, products);
#endif
}

// Add the products of numbers of 16 bits, two to each lane. AVX512_VNNI does both by one instruction, but then each sum
// waits for the product before it: a token takes a tenth (float32) to a quarter (bfloat16) longer on AMD's Zen 5.
static inline Integers add_products_of_words(Integers sums, Words a, Words b) {
    return (Integers)_mm256_add_epi32((__m256i)sums, _mm256_madd_epi16((__m256i)a, (__m256i)b));
}

static inline float load_float(const void *from, int dtype, int64_t index) {
    if (dtype == FLOAT32) return ((const float *)from)[index];
    uint16_t half = ((const uint16_t *)from)[index];
    if (dtype == FLOAT16) return _cvtsh_ss(half);
    return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128((int)((uint32_t)half << 16))));
}

// Load `count` elements from `index` on as float32; 0 in the other lanes.
static inline Floats load_floats(const void *from, int dtype, int64_t index, int64_t count) {
    if (count < LANES) {
        float rest[LANES] = {0};
        for (int64_t i = 0; i < count; i++) rest[i] = load_float(from, dtype, index + i);
        return _mm256_loadu_ps(rest);
    }
    if (dtype == FLOAT32) return _mm256_loadu_ps((const float *)from + index);
    __m128i half = _mm_loadu_si128((const __m128i *)((const uint16_t *)from + index));
    if (dtype == FLOAT16) return _mm256_cvtph_ps(half);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

// Rounds to the nearest, ties to even, as PyTorch does; NaN stays NaN.
static inline void store_float(void *to, int dtype, int64_t index, float value) {
    if (dtype == FLOAT32) ((float *)to)[index] = value;
    else if (dtype == FLOAT16) ((uint16_t *)to)[index] = _cvtss_sh(value, 0);
    else {
        uint32_t bits;
        memcpy(&bits, &value, 4);
        ((uint16_t *)to)[index] = value != value ? 0x7fc0 : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
}

// Round as `store_float` does.
static inline __m128i to_bfloat16(__m256 values) {
#ifdef __AVX512BF16__
    return (__m128i)_mm256_cvtneps_pbh(values);  // subnormal numbers become 0
#else
    __m256i bits = _mm256_castps_si256(values);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(values, values, _CMP_UNORD_Q));
    rounded = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), nan);
    return _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
#endif
}

static inline void store_floats(void *to, int dtype, int64_t index, int64_t count, Floats values) {
    if (count < LANES) {
        for (int64_t i = 0; i < count; i++) store_float(to, dtype, index + i, values[i]);
        return;
    }
    if (dtype == FLOAT32) {
        _mm256_storeu_ps((float *)to + index, values);
        return;
    }
    __m128i half = dtype == FLOAT16 ? _mm256_cvtps_ph(values, 0) : to_bfloat16(values);
    _mm_storeu_si128((__m128i *)((uint16_t *)to + index), half);
}

// Copy the last bytes of a row to `room`, with zeros behind them, so that a full vector can be read there.
static inline const uint8_t *with_zeros(const uint8_t *from, int64_t count, uint8_t *room, int64_t room_bytes) {
    memset(room, 0, room_bytes);
    return memcpy(room, from, count);
}

// Load `count` bytes, and zeros behind them.
static inline Integers load_bytes(const uint8_t *from, int64_t count) {
    if (count >= BYTES) return *(const Integers *)from;
    uint8_t room[BYTES];
    return *(const Integers *)with_zeros(from, count, room, BYTES);
}

static inline __m128i load_half(const uint8_t *from, int64_t count) {
    if (count >= BYTES / 2) return _mm_loadu_si128((const __m128i *)from);
    uint8_t room[BYTES / 2];
    return _mm_loadu_si128((const __m128i *)with_zeros(from, count, room, BYTES / 2));
}

// Load `count` numbers of 4 bits as bytes, the low half of a byte before its high one, and any numbers behind them.
static inline Integers load_nibbles(const uint8_t *from, int64_t count) {
    __m256i pairs = _mm256_cvtepu8_epi16(load_half(from, count >> 1));
    return (Integers)_mm256_and_si256(_mm256_or_si256(pairs, _mm256_slli_epi16(pairs, 4)), _mm256_set1_epi8(0x0f));
}

// Load the codes of a vector of 32 columns from `column` on, a byte each; formats/planes.py has their order.
static inline __attribute__((always_inline)) Integers load_planes(const uint8_t *from, int bits, int column) {
    (void)column;  // 0: there is one vector of them
    __m256i codes = _mm256_setzero_si256();
    if (bits & 4) {
        __m128i pairs = _mm_loadu_si128((const __m128i *)from), nibble = _mm_set1_epi8(15);
        __m128i high = _mm_and_si128(_mm_srli_epi16(pairs, 4), nibble);
        codes = _mm256_set_m128i(high, _mm_and_si128(pairs, nibble));
    }
    if (bits & 2) {
        int64_t plane;
        memcpy(&plane, from + (bits & 4) * 4, 8);
        __m256i shifted = _mm256_srlv_epi64(_mm256_set1_epi64x(plane), _mm256_setr_epi64x(0, 2, 4, 6));
        shifted = _mm256_and_si256(shifted, _mm256_set1_epi8(3));
        codes = _mm256_or_si256(codes, _mm256_slli_epi16(shifted, bits & 4));
    }
    if (bits & 1) {
        int32_t plane;
        memcpy(&plane, from + (bits & 6) * 4, 4);
        __m256i shifted = _mm256_srlv_epi32(_mm256_set1_epi32(plane), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
        shifted = _mm256_and_si256(shifted, _mm256_set1_epi8(1));
        codes = _mm256_or_si256(codes, _mm256_slli_epi16(shifted, bits & 6));
    }
    return (Integers)codes;
}

// Load the planes of 4, 2 and 1 bits of 64 columns. 16 bytes of each belong to 32 columns, so the words of a plane of 2
// bits stand there twice, and those of one bit four times.
static inline __attribute__((always_inline)) void load_planes_apart(const uint8_t *from, int bits, Integers planes[3]) {
    const uint8_t *next = from + 4 * bits;  // of the other 32 columns
    if (bits & 4) {
        __m128i high = _mm_loadu_si128((const __m128i *)next);
        planes[0] = (Integers)_mm256_set_m128i(high, _mm_loadu_si128((const __m128i *)from));
    }
    if (bits & 2) {
        int64_t low, high;
        memcpy(&low, from + (bits & 4) * 4, 8);
        memcpy(&high, next + (bits & 4) * 4, 8);
        planes[1] = (Integers)_mm256_setr_epi64x(low, low, high, high);
    }
    if (bits & 1) {
        int32_t low, high;
        memcpy(&low, from + (bits & 6) * 4, 4);
        memcpy(&high, next + (bits & 6) * 4, 4);
        planes[2] = (Integers)_mm256_set_m128i(_mm_set1_epi32(high), _mm_set1_epi32(low));
    }
}

// Return the bits of `a` where a mask has ones, else those of `b`.
static inline Integers selected(Integers mask, Integers a, Integers b) { return (a & mask) | (b & ~mask); }

// Return the bytes of one half of a vector as numbers of 16 bits; all are below 128.
static inline Words widen_half(Integers bytes, int half) {
    __m256i all = (__m256i)bytes;
    return (Words)_mm256_cvtepu8_epi16(half ? _mm256_extracti128_si256(all, 1) : _mm256_castsi256_si128(all));
}

static inline Integers load_words(const int16_t *from) {
    return (Integers)_mm256_cvtepi16_epi32(_mm_loadu_si128((const __m128i *)from));
}

// Return the unsigned bytes of a quarter of a vector as 32-bit numbers.
static inline Integers widen_bytes(Integers bytes, int quarter) {
    int64_t quarters[4];
    memcpy(quarters, &bytes, sizeof bytes);
    return (Integers)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(quarters[quarter]));
}

// Return table[i] for each byte i, 0 to 15.
static inline Integers looked_up(const uint8_t table[16], Integers indexes) {
    __m256i values = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table));
    return (Integers)_mm256_shuffle_epi8(values, (__m256i)indexes);
}

// Load `count` codes of float8_e4m3 as their values / 256, and zeros behind them. The bits are read as float16, whose
// exponent has one bit more and a larger bias. NaN, which no weight holds, becomes a number.
static inline void load_float8(const uint8_t *from, int64_t count, Floats out[2]) {
    __m256i bits = _mm256_slli_epi16(_mm256_cvtepi8_epi16(load_half(from, count)), 7);
    bits = _mm256_and_si256(bits, _mm256_set1_epi16((short)0xbf80));
    out[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(bits));
    out[1] = _mm256_cvtph_ps(_mm256_extracti128_si256(bits, 1));
}

// Pack four vectors of numbers that fit a signed byte into one, in their order.
static inline Integers pack_bytes(const Integers numbers[4]) {
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    __m256i low = _mm256_packs_epi32((__m256i)numbers[0], (__m256i)numbers[1]);
    __m256i high = _mm256_packs_epi32((__m256i)numbers[2], (__m256i)numbers[3]);
    return (Integers)_mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order);
}

// Store column i of the rows at `to + i * stride_bytes`.
static inline void store_transposed(const Integers rows[LANES], int8_t *to, int64_t stride_bytes) {
    __m256i pairs[LANES], fours[LANES];
    for (int i = 0; i < 4; i++) {
        pairs[2 * i] = _mm256_unpacklo_epi32((__m256i)rows[2 * i], (__m256i)rows[2 * i + 1]);
        pairs[2 * i + 1] = _mm256_unpackhi_epi32((__m256i)rows[2 * i], (__m256i)rows[2 * i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        fours[i] = _mm256_unpacklo_epi64(pairs[i], pairs[i + 2]);
        fours[i + 1] = _mm256_unpackhi_epi64(pairs[i], pairs[i + 2]);
        fours[i + 2] = _mm256_unpacklo_epi64(pairs[i + 1], pairs[i + 3]);
        fours[i + 3] = _mm256_unpackhi_epi64(pairs[i + 1], pairs[i + 3]);
    }
    // Half h of fours[4 * j + i] holds rows 4 * j to 4 * j + 3 of column 4 * h + i.
    for (int i = 0; i < 4; i++) {
        *(Integers *)(to + i * stride_bytes) = (Integers)_mm256_permute2x128_si256(fours[i], fours[i + 4], 0x20);
        *(Integers *)(to + (i + 4) * stride_bytes) = (Integers)_mm256_permute2x128_si256(fours[i], fours[i + 4], 0x31);
    }
}
