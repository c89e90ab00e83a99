// Products with integer codes, for few and for many rows of x.
#pragma once
#include "vectors.h"

static inline int64_t padded_columns(const Product *p) { return round_up(p->weight.K, BYTES); }

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

int64_t few_rows_bytes(const Product *p);
int64_t many_rows_bytes(const Product *p, int threads);
void multiply_few_rows(const Product *p, int threads, int8_t *memory);
void multiply_many_rows(const Product *p, int threads, int8_t *memory);
