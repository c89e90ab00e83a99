// One token of bfloat16 by the plainest loop for one format and group size, to measure the package beside it: no tail,
// no choice of dtypes, one row at a time. Digits, vectors and the distance of fetching are the package's.
#include "bytes/digits.h"

#define MOST_COLUMNS (1 << 14)

typedef struct {
    float token_scale;
    int64_t K;
    int8_t *digits;         // [2][K]
    float *group_sums;      // [G]
    Integers *offset_sums;  // [2][spans]: -128 times the sums of digits
} Token;

static int8_t digits_memory[2 * MOST_COLUMNS] __attribute__((aligned(64)));
static float sums_memory[MOST_COLUMNS / 32];
static Integers offsets_memory[2 * MOST_COLUMNS / 64] __attribute__((aligned(64)));

static inline Integers digits_at(const Token *token, int d, int64_t k) {
    return *(const Integers *)(token->digits + d * token->K + k);
}

// Write the digits of a token, and the sums over each `group` columns and each `span` columns.
static Token write_token(const uint16_t *x, int64_t K, int64_t group, int64_t span) {
    Token token = {.K = K, .digits = digits_memory, .group_sums = sums_memory, .offset_sums = offsets_memory};
    float top = largest_magnitude(x, BFLOAT16, K);
    Floats per_unit = all_floats(1 / unit_of(top, 2));
    Integers digits[3];
    token.token_scale = top / 127;
    for (int64_t k = 0; k < K; k += BYTES) {
        write_digits(x, BFLOAT16, k, K, per_unit, 2, digits);
        for (int d = 0; d < 2; d++) *(Integers *)(token.digits + d * K + k) = digits[d];
    }
    for (int64_t g = 0; group && g < K / group; g++) {
        int high = 0, low = 0;
        for (int i = 0; i < group; i++) {
            high += token.digits[group * g + i];
            low += token.digits[K + group * g + i];
        }
        token.group_sums[g] = (float)high + (float)low / 256;
    }
    for (int64_t at = 0; span && at < 2 * K; at += span) {
        Integers sum = all_integers(0);
        for (int64_t k = at; k < at + span; k += BYTES)
            sum = add_products_of_bytes(sum, all_bytes(1), *(const Integers *)(token.digits + k));
        token.offset_sums[at / span] = sum * -128;
    }
    return token;
}

// Put the digits of even columns of each 128 before those of odd ones.
static void split_columns(const Token *token) {
    for (int64_t k = 0; k < 2 * token->K; k += 128) {
        int8_t even[64], odd[64];
        for (int i = 0; i < 64; i++) {
            even[i] = token->digits[k + 2 * i];
            odd[i] = token->digits[k + 2 * i + 1];
        }
        memcpy(token->digits + k, even, 64);
        memcpy(token->digits + k + 64, odd, 64);
    }
}

static inline float dot(const float *a, const float *b, int64_t count) {
    Floats sum = all_floats(0);
    for (int64_t i = 0; i < count; i += LANES)
        sum = multiply_add(load_floats(a, FLOAT32, i, count - i), load_floats(b, FLOAT32, i, count - i), sum);
    return sum_of(sum);
}

#define NIBBLES(NAME, GROUP)                                                                                          \
    void NAME(const uint16_t *x, const uint8_t *qdata, const uint16_t *s, float *out, int64_t N, int64_t K) {         \
        Token token = write_token(x, K, GROUP, 0);                                                                    \
        int64_t G = K / GROUP;                                                                                        \
        float scale[G + 2 * LANES];                                                                                   \
        const Integers lanes = lane_numbers() / (GROUP / 8);                                                          \
        split_columns(&token);                                                                                        \
        for (int64_t n = 0; n < N; n++) {                                                                             \
            copy_as_float32(s, FLOAT16, n * G, G, round_up(G, LANES), scale);                                         \
            const uint8_t *row = qdata + n * K / 2;                                                                   \
            Floats total = all_floats(0);                                                                             \
            for (int64_t k = 0; k < K; k += 128) {                                                                    \
                fetch_ahead(row + k / 2);                                                                             \
                Integers bytes = *(const Integers *)(row + k / 2), p[2];                                              \
                Integers low = bytes & all_bytes(15), high = bytes >> 4 & all_bytes(15);                              \
                for (int d = 0; d < 2; d++) {                                                                         \
                    p[d] = add_products_of_bytes(all_integers(0), low, digits_at(&token, d, k));                      \
                    p[d] = add_products_of_bytes(p[d], high, digits_at(&token, d, k + 64));                           \
                }                                                                                                     \
                Floats factors = GROUP >= 128 ? all_floats(scale[k / GROUP])                                          \
                                              : permuted(*(const Floats *)(scale + k / GROUP), lanes);                \
                total = multiply_add(join_digits(p, 2), factors, total);                                              \
            }                                                                                                         \
            out[n] = (sum_of(total) - 8 * dot(scale, token.group_sums, G)) * token.token_scale;                       \
        }                                                                                                             \
    }

#define OCTETS(NAME, GROUP, SPAN)                                                                                     \
    void NAME(const uint16_t *x, const uint8_t *qdata, const uint16_t *s, float *out, int64_t N, int64_t K) {         \
        Token token = write_token(x, K, 0, SPAN);                                                                     \
        int64_t G = K / GROUP, spans = K / SPAN;                                                                      \
        float scale[G + 2 * LANES];                                                                                   \
        const Integers lanes = lane_numbers() / (GROUP / 4);                                                          \
        for (int64_t n = 0; n < N; n++) {                                                                             \
            copy_as_float32(s, FLOAT16, n * G, G, round_up(G, LANES), scale);                                         \
            const uint8_t *row = qdata + n * K;                                                                       \
            Floats total = all_floats(0);                                                                             \
            for (int64_t k = 0, span = 0; k < K; k += SPAN, span++) {                                                 \
                Integers p[2] = {token.offset_sums[span], token.offset_sums[spans + span]};                           \
                for (int64_t i = k; i < k + SPAN; i += BYTES) {                                                       \
                    fetch_ahead(row + i);                                                                             \
                    Integers codes = *(const Integers *)(row + i) ^ all_bytes(128);                                   \
                    for (int d = 0; d < 2; d++) p[d] = add_products_of_bytes(p[d], codes, digits_at(&token, d, i));   \
                }                                                                                                     \
                Floats factors = GROUP >= SPAN ? all_floats(scale[k / GROUP])                                         \
                                               : permuted(*(const Floats *)(scale + k / GROUP), lanes);               \
                total = multiply_add(join_digits(p, 2), factors, total);                                              \
            }                                                                                                         \
            out[n] = sum_of(total) * token.token_scale;                                                               \
        }                                                                                                             \
    }

NIBBLES(int4_32, 32)
NIBBLES(int4_128, 128)
OCTETS(int8_32, 32, 64)
OCTETS(int8_128, 128, 128)

void int8_0(const uint16_t *x, const uint8_t *qdata, const uint16_t *s, float *out, int64_t N, int64_t K) {
    Token token = write_token(x, K, 0, K);
    for (int64_t n = 0; n < N; n++) {
        const uint8_t *row = qdata + n * K;
        Integers p[2] = {token.offset_sums[0], token.offset_sums[1]}, q[2] = {all_integers(0), all_integers(0)};
        for (int64_t k = 0; k < K; k += 128) {
            fetch_ahead(row + k);
            fetch_ahead(row + k + 64);
            Integers a = *(const Integers *)(row + k) ^ all_bytes(128);
            Integers b = *(const Integers *)(row + k + 64) ^ all_bytes(128);
            for (int d = 0; d < 2; d++) {
                p[d] = add_products_of_bytes(p[d], a, digits_at(&token, d, k));
                q[d] = add_products_of_bytes(q[d], b, digits_at(&token, d, k + 64));
            }
        }
        for (int d = 0; d < 2; d++) p[d] += q[d];
        out[n] = sum_of(join_digits(p, 2)) * load_floats(s, FLOAT16, n, 1)[0] * token.token_scale;
    }
}
