// The product of activations x with a quantized weight, and words that all files share:
// - a token is a row of x;
// - the top of a row is its largest magnitude;
// - a panel is a copy of some tokens as they are multiplied, which is held while all rows of the weight are read;
// - digits are the bytes of an integer that stands for an activation, the highest first (bytes/digits.h);
// - the token scale is the factor of a token's sums of products: an activation is its integer times it.
// bytes/ multiplies codes with digits, words/ with numbers of 16 bits, and tiles/ many tokens with AVX-512 or AMX.
#pragma once
#include <stdint.h>
#include "thresholds.h"

// The version of `Weight` and of the functions in interface.c and attention.c. Python uses a library of its own version
// only, so change both numbers when one of these changes.
#define ABI 5

enum { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

// The formats of other programs: imported.c.
enum { AFFINE = 1, TABLE4 = 2, FLOAT8_GROUPS = 3 };
// The codings of formats/scale_codings.py.
enum { PLAIN, E8M0, E4M3, E4M3_DIVIDED, NESTED, K4, K2, K3, K6, IQ4_XS };
// What is subtracted from codes of affine, or added to their products with the scale: half the range of codes, integer
// zero points, those stored less 1, others, or a bias, or minima of the coding.
enum { FIXED_ZERO, ZERO_POINT, ZERO_POINT_MINUS_1, FLOAT_ZERO_POINT, BIAS, MINIMA };

// The description of a weight, the same in each call. `hf_trainweights/kernels/compiled.py` fills it in this order.
typedef struct {
    int64_t N, K;
    int64_t group_size;   // columns that share a scale: 4, 8, 16, 32 or a multiple of 64; 0 if a row has one scale
    int32_t dtype;        // of x, the bias and the result
    int32_t scale_dtype;
    int32_t digits;       // bytes that hold an activation: 1, 2, or 3 for float32
    int32_t bits;         // of an integer code: 8 or 4, for uint 2 to 6; 0 for float8, whose x has no digits
    int32_t code_units;   // of uint, else 0: see words/uint.c
    int32_t zero_units;   // of uint, else 0: see words/uint.c
    int32_t codebook;     // whether codes of 4 bits are indices into the values of codebook4
    int32_t family;       // of a format of other programs, else 0; group_size is then any multiple of 8, or 0
    int32_t coding;       // of scales, of these formats; scale_dtype is that of plain ones
    int32_t offset;       // of affine
    int32_t zero_bits;    // bits of an integer zero point: bits, or 8 if they are bytes
    int32_t rounds_each;  // whether the steps of dequantizing are rounded to the dtype
    int32_t outer_count;  // outer scales of a row, of nested scales
} Weight;

typedef struct {
    Weight weight;
    int64_t M;
    const void *x;         // [M][K]
    const uint8_t *qdata;  // [N][K] codes: int8, or float8, or nibbles of code + 8 with the even column in the low one;
                           // uint codes as formats/planes.py packs them
    const void *scale;     // [N][G]; for uint and codebook4 [N]
    const void *bias;      // [N] or NULL
    void *out;             // [M][N]
    const uint8_t *group_scale, *zero_point;  // for uint [N][G / 2], the first of two groups in the low bits;
                                              // codebook4 has group_scale alone: see scales.h
    // Formats of other programs: zero_point may be floats or a bias instead.
    const float *table, *global_scale, *nested_values, *outer_scale, *nested_offset;
    const uint8_t *phase;
    int64_t repeats;   // if set, each stored scale is that of so many groups
    int table_digits;  // of the values of the table, as bytes/table.h holds them, or NO_DIGITS
} Product;

// Values of a table that are bfloat16.
#define NO_DIGITS -1

// The most stored tensors of a weight beside codes and scales.
#define OTHERS 5

// The alignment of scratch memory, in bytes.
#define ALIGNMENT 64
// A smaller top counts as this one, or the unit of the last digit would be a subnormal number.
#define SMALLEST_TOP 0x1p-103f

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }
static inline int64_t itemsize(int dtype) { return dtype == FLOAT32 ? 4 : 2; }
static inline int64_t groups_of(const Product *p) {
    return p->weight.group_size ? p->weight.K / p->weight.group_size : 1;
}

// Return the activation that the integer 1 stands for. `top` is stored as the digit 127 with digits of 0 behind it.
static inline float unit_of(float top, int digits) {
    return top / 127 * (digits == 3 ? 0x1p-16f : digits == 2 ? 0x1p-8f : 1.0f);
}

#ifdef _OPENMP
int omp_get_thread_num(void);
static inline int thread_index(void) { return omp_get_thread_num(); }
#else
static inline int thread_index(void) { return 0; }
#endif

int64_t integers_bytes(const Product *p, int threads);
int64_t float8_bytes(const Product *p);
int64_t uint_bytes(const Product *p, int threads);
void multiply_integers(const Product *p, int threads, int8_t *memory);
void multiply_float8(const Product *p, int threads, int8_t *memory);
void multiply_uint(const Product *p, int threads, int8_t *memory);

// Whether float8.c reads a weight: groups of its own formats have one scale a row, and those of others full vectors.
static inline int takes_float8(const Product *p) {
    const Weight *w = &p->weight;
    return w->family ? w->family == FLOAT8_GROUPS && w->group_size % 32 == 0 : !w->bits;
}

// Write row n of the weight to out from element `at` on, in the dtype of x. The scratch memory has `row_bytes`.
int64_t row_bytes(const Product *p);
void dequantize_row(const Product *p, int64_t n, int64_t at, int8_t *memory);
int64_t uint_row_bytes(const Product *p);
// Return some columns of row n as integers, which are to be multiplied by the scale of the row. The first column is a
// multiple of 64, and zeros fill the integers up to a multiple of 64.
const int16_t *write_uint_row(const Product *p, int64_t n, int64_t first, int64_t columns, int8_t *memory);
void dequantize_uint_row(const Product *p, int64_t n, int64_t at, int8_t *memory);
void dequantize_float8_row(const Product *p, int64_t n, int64_t at);

// Formats of other programs, each row written as floats.
int64_t imported_row_bytes(const Product *p);
void dequantize_imported_row(const Product *p, int64_t n, int64_t at, int8_t *memory);
int64_t imported_bytes(const Product *p, int threads);
void multiply_imported(const Product *p, int threads, int8_t *memory);

// Products of few tokens with them as bytes, where bytes/ is compiled.
#if defined(__AVXVNNI__) || defined(__AVX512VNNI__) || defined(__ARM_NEON)
// Return whether bytes/ multiplies, and if so, describe the groups as it takes them.
int prepare_bytes(Product *p);
int64_t bytes_in_fours(const Product *p);
// Multiply any number of tokens, four at a time.
void multiply_in_fours(const Product *p, int threads, int8_t *memory);
#else
static inline int prepare_bytes(Product *p) { return (void)p, 0; }
static inline int64_t bytes_in_fours(const Product *p) { return (void)p, 0; }
static inline void multiply_in_fours(const Product *p, int threads, int8_t *memory) {
    (void)p, (void)threads, (void)memory;
}
#endif

// Products of one to four tokens with uint2 to uint6 by an instruction of AVX2 that adds products of bytes in pairs.
// Tests compile NEON's library with AVX2, so __ARM_NEON is asked too.
#if defined(__AVX2__) && !defined(__ARM_NEON)
#define FEW_UINT
static inline int takes_few_uint(const Product *p) { return p->weight.code_units && p->M <= FEW_ROWS; }
int64_t few_uint_bytes(const Product *p);
void multiply_few_uint(const Product *p, int threads, int8_t *memory);
#else
static inline int takes_few_uint(const Product *p) { return (void)p, 0; }
static inline int64_t few_uint_bytes(const Product *p) { return (void)p, 0; }
static inline void multiply_few_uint(const Product *p, int threads, int8_t *memory) {
    (void)p, (void)threads, (void)memory;
}
#endif

// Products of many rows of x by panels: native/tiles has them for AVX-512, floats.c for CPUs with AVX2 alone.
#ifdef __ARM_NEON
static inline int takes_panels(const Product *p) { return (void)p, 0; }
static inline int64_t panels_bytes(const Product *p, int threads) { return (void)p, threads; }
static inline void multiply_panels(const Product *p, int threads, int8_t *memory) {
    (void)p, (void)threads, (void)memory;
}
#else
int takes_panels(const Product *p);
int64_t panels_bytes(const Product *p, int threads);
void multiply_panels(const Product *p, int threads, int8_t *memory);
#endif
