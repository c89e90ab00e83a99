// A product of activations with a quantized weight, and the functions that compute it.
#pragma once
#include "vectors.h"

// What does not change from call to call; `hf_trainweights/kernels/compiled.py` fills it in this order.
typedef struct {
    int64_t N, K;
    int64_t group_size;   // columns that share a scale: 4, 8, 16, 32 or a multiple of 64; 0 where a row shares one
    int32_t dtype;        // of x, the bias and the result
    int32_t scale_dtype;
    int32_t digits;       // bytes that hold an activation: 1, 2, or 3 for float32
    int32_t bits;         // of an integer code: 8 or 4; 0 for float8, which has no digits
} Weight;

typedef struct {
    Weight weight;
    int64_t M;
    const void *x;         // [M][K]
    const uint8_t *qdata;  // [N][K] codes: int8, or float8, or nibbles of code + 8 with the even column in the low one
    const void *scale;     // [N][G]
    const void *bias;      // [N] or NULL
    void *out;             // [M][N]
} Product;

// Tokens whose sums stay in registers while a row of the weight passes.
#define FEW_ROWS 4

static inline int64_t padded_columns(const Product *p) { return round_up(p->weight.K, BYTES); }
static inline int64_t groups_of(const Product *p) {
    return p->weight.group_size ? p->weight.K / p->weight.group_size : 1;
}

// What codes are stored with, or made unsigned by.
static inline int offset_of(const Product *p) { return p->weight.bits == 8 ? 128 : 8; }

// 64 codes of row n from column k on, each plus the offset; behind K, which meets digits of 0, any codes.
static inline __m512i load_codes(const Product *p, int bits, int64_t n, int64_t k) {
    int64_t K = p->weight.K, left = K - k;
    if (bits == 8) {
        __mmask64 mask = left >= BYTES ? ~0ull : (1ull << left) - 1;
        return _mm512_xor_si512(_mm512_maskz_loadu_epi8(mask, p->qdata + n * K + k), _mm512_set1_epi8((char)0x80));
    }
    __mmask32 mask = left >= BYTES ? ~0u : (1u << (left / 2)) - 1;
    __m512i pairs = _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(mask, p->qdata + (n * K + k) / 2));
    return _mm512_and_si512(_mm512_or_si512(pairs, _mm512_slli_epi16(pairs, 4)), _mm512_set1_epi8(0x0f));
}

int64_t float8_bytes(const Product *p);
int64_t few_rows_bytes(const Product *p);
int64_t many_rows_bytes(const Product *p, int threads);
void dequantize_float8(const Product *p, int threads);
void multiply_float8(const Product *p, int threads, int8_t *memory);
void multiply_few_rows(const Product *p, int threads, int8_t *memory);
void multiply_many_rows(const Product *p, int threads, int8_t *memory);
