// A product of activations with a quantized weight. Each instruction set has a folder with functions that compute it.
#pragma once
#include <stdint.h>

// A library and the Python code that calls it have the same number: it changes with `Weight` and with any function of
// interface.c and attention.c.
#define ABI 4

enum { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

// What does not change from call to call; `hf_trainweights/kernels/compiled.py` fills it in this order.
typedef struct {
    int64_t N, K;
    int64_t group_size;   // columns that share a scale: 4, 8, 16, 32 or a multiple of 64; 0 where a row shares one
    int32_t dtype;        // of x, the bias and the result
    int32_t scale_dtype;
    int32_t digits;       // bytes that hold an activation: 1, 2, or 3 for float32
    int32_t bits;         // of an integer code: 8 or 4, of uint 2 to 6; 0 for float8, which has no digits
    int32_t code_units;   // of uint, else 0
    int32_t zero_units;   // likewise
    int32_t codebook;     // whether codes of 4 bits are indices into the values of codebook4
} Weight;

typedef struct {
    Weight weight;
    int64_t M;
    const void *x;         // [M][K]
    const uint8_t *qdata;  // [N][K] codes: int8, or float8, or nibbles of code + 8 with the even column in the low one;
                           // of uint as formats/planes.py packs them
    const void *scale;     // [N][G]; of uint and codebook4 [N]
    const void *bias;      // [N] or NULL
    void *out;             // [M][N]
    const uint8_t *group_scale, *zero_point;  // of uint [N][G / 2], the first of two groups in the low bits
                                              // of codebook4 group_scale alone: see scales.h
} Product;

// Bytes that scratch memory is aligned to.
#define ALIGNMENT 64
// Tokens whose sums stay in registers while a row of the weight passes.
#define FEW_ROWS 4
// A smaller largest magnitude of a row of x counts as this one: its last digit would be worth a subnormal number.
#define SMALLEST_TOP 0x1p-103f

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }
static inline int64_t itemsize(int dtype) { return dtype == FLOAT32 ? 4 : 2; }
static inline int64_t groups_of(const Product *p) {
    return p->weight.group_size ? p->weight.K / p->weight.group_size : 1;
}

// Return what the integer 1 stands for where activations are integers of so many bytes: `top` is 127 with zeros behind.
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

// Write row n of the weight at an element of out, in the dtype of x, with memory of `row_bytes`.
int64_t row_bytes(const Product *p);
void dequantize_row(const Product *p, int64_t n, int64_t at, int8_t *memory);
int64_t uint_row_bytes(const Product *p);
// Return some columns of row n, the first a multiple of 64, as integers that the scale of the row multiplies. Zeros fill
// them up to a multiple of 64.
const int16_t *write_uint_row(const Product *p, int64_t n, int64_t first, int64_t columns, int8_t *memory);
void dequantize_uint_row(const Product *p, int64_t n, int64_t at, int8_t *memory);
void dequantize_float8_row(const Product *p, int64_t n, int64_t at);

// Of one to four rows of x with uint2 to uint6, where products of bytes are added in pairs. Tests compile NEON's library
// with AVX2.
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

// Of many rows of x: by native/tiles where AVX-512 is, by floats.c where only AVX2 is.
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
