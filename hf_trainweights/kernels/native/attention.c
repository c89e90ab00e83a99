// Attention of a few rows of queries to keys and values that are stored as integers. A block of codes is read once for
// all query heads that share it, and multiplied as it is stored. A token is a position of the cache: for it each head
// has a key and a value.
//
// Sixteen tokens make a block, in the order in which one product of bytes serves LANES tokens of keys or LANES columns
// of values. D is the number of stored columns, a multiple of 32:
//     keys    8 bits [D/4][16 tokens][4 columns]   4 bits [D/8][16][4], columns 8i to 8i + 3 in the low halves
//     values  8 bits [4][D][4 tokens]              4 bits [2][D][4],    tokens 8i to 8i + 3 in the low halves
// A code of 8 bits has a sign; a code of 4 bits is its number plus 8. Scales are bfloat16 [G][16 tokens]: one for a
// token of 8 bits, one for each 32 columns of a token of 4 bits.
#include <math.h>
#include "attention.h"
#include "vectors.h"

// Tokens whose scores are held at a time: their keys and values stay in the second cache for all rows of queries.
#define CHUNK 256
// Query rows whose sums stay in registers, and vectors of tokens or columns that are multiplied with them at a time.
#define TILE 4
#define STEP (SUMS >= 4 * TILE ? 2 : 1)
// Instructions multiply bytes, so queries and probabilities become integers of two digits, each a byte with a sign.
#define DIGITS 2
// The largest integer of two digits.
#define LARGEST 32512.0f
// A head gets one thread for each PART tokens. For fewer, a thread would cost more time than it saves.
#define PART 512

#define INLINE static inline __attribute__((always_inline))
#define EACH(INDEX, COUNT) for (int INDEX = 0; INDEX < (COUNT); INDEX++)

INLINE int64_t stored_columns(int64_t columns) { return round_up(columns, 32); }
INLINE int64_t groups_of_token(int bits, int64_t D) { return bits == 4 ? D / 32 : 1; }
INLINE int64_t block_bytes(int bits, int64_t D) { return BLOCK * D * bits / 8; }
INLINE int code_offset(int bits) { return bits == 4 ? 8 : BYTE_OFFSET; }

INLINE float from_bfloat16(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

INLINE uint16_t rounded_to_bfloat16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return value != value ? 0x7fc0 : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Return e to the power of numbers that are not positive, NaN for NaN, and 2**-100 for all that give less.
INLINE Floats exponentials(Floats x) {
    Floats scaled = larger(all_floats(-100), x * all_floats(1.44269504f));
    // The sum's lowest bits are the integer that is nearest.
    Floats shifted = scaled + all_floats(0x1.8p23f), rest = scaled - (shifted - all_floats(0x1.8p23f));
    Floats power = all_floats(9.5605102e-3f);
    const float terms[] = {5.5917039e-2f, 2.4024981e-1f, 6.9312197e-1f, 1.0f};
    EACH(i, 4) power = multiply_add(power, rest, all_floats(terms[i]));
    return (Floats)((Integers)power + ((Integers)shifted << 23));
}

// The same for one number. `expf` would be a function of a library that nothing here is linked with.
INLINE float exponential(float x) { return exponentials(all_floats(x))[0]; }

// Storing tokens

// The number that a scale divides by, as a factor; 0 where all codes are 0.
INLINE float inverse_of(float scale) { return fabsf(scale) >= 0x1p-126f && fabsf(scale) <= 0x1p126f ? 1 / scale : 0; }

INLINE int rounded_code(float value, int smallest, int largest) {
    float nearest = nearbyintf(value);
    return nearest != nearest ? 0 : nearest < smallest ? smallest : nearest > largest ? largest : (int)nearest;
}

// The scale of a group of 4 bits: the longer side of its range reaches -8, the shorter one at most 7.5.
static float scale_of_nibbles(const float *x) {
    float low = 0, high = 0, fault = 0;  // NaN where a number is not finite
    EACH(i, 32) {
        if (x[i] < low) low = x[i];
        if (x[i] > high) high = x[i];
        fault += x[i] * 0;
    }
    int negative_is_longer = -low >= high;
    float longer = negative_is_longer ? low / -8 : high / -8, shorter = fabsf(negative_is_longer ? high : low);
    if (shorter > 7.5f * fabsf(longer)) longer = copysignf(shorter / 7.5f, longer);
    return longer + fault;
}

static void store_bytes(const float *x, int is_key, int64_t D, int64_t token, uint8_t *block, uint16_t *scales) {
    scales[token] = rounded_to_bfloat16(largest_magnitude(x, FLOAT32, D) / 127);
    float inverse = inverse_of(from_bfloat16(scales[token]));
    for (int64_t i = 0; i < D; i++) {
        int code = rounded_code(x[i] * inverse, -127, 127);
        int64_t at = is_key ? i / 4 * 64 + token * 4 + i % 4 : token / 4 * 4 * D + i * 4 + token % 4;
        block[at] = (uint8_t)code;
    }
}

static void store_nibbles(const float *x, int is_key, int64_t D, int64_t token, uint8_t *block, uint16_t *scales) {
    for (int64_t g = 0; g < D / 32; g++) {
        scales[BLOCK * g + token] = rounded_to_bfloat16(scale_of_nibbles(x + 32 * g));
        float inverse = inverse_of(from_bfloat16(scales[BLOCK * g + token]));
        for (int64_t i = 32 * g; i < 32 * g + 32; i++) {
            int code = rounded_code(x[i] * inverse, -8, 7) + 8;
            int64_t at = is_key ? i / 8 * 64 + token * 4 + i % 4 : token / 8 * 4 * D + i * 4 + token % 4;
            int is_high = (is_key ? i : token) & 4;
            block[at] = (uint8_t)(is_high ? (block[at] & 0x0f) | code << 4 : (block[at] & 0xf0) | code);
        }
    }
}

static void load_token(const uint8_t *block, const uint16_t *scales, int bits, int is_key, int64_t D, int64_t token,
                       float *to) {
    for (int64_t i = 0; i < D && bits == 8; i++) {
        int64_t at = is_key ? i / 4 * 64 + token * 4 + i % 4 : token / 4 * 4 * D + i * 4 + token % 4;
        to[i] = from_bfloat16(scales[token]) * (int8_t)block[at];
    }
    for (int64_t i = 0; i < D && bits == 4; i++) {
        int64_t at = is_key ? i / 8 * 64 + token * 4 + i % 4 : token / 8 * 4 * D + i * 4 + token % 4;
        int code = (is_key ? i : token) & 4 ? block[at] >> 4 : block[at] & 0x0f;
        to[i] = from_bfloat16(scales[i / 32 * BLOCK + token]) * (code - 8);
    }
}

// Store tokens [heads][count][columns], the first as token `at`. `channels` [heads][2][columns], a mean and a magnitude
// for each column, is NULL where columns are stored as they are.
void store_tokens(const void *x, int dtype, int64_t heads, int64_t count, int64_t columns, int bits, int is_key,
                  const float *channels, uint8_t *codes, uint16_t *scales, int64_t capacity, int64_t at, int threads) {
    int64_t D = stored_columns(columns), bytes = block_bytes(bits, D), G = groups_of_token(bits, D);
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t head = 0; head < heads; head++) {
        const float *mean = channels + head * 2 * columns, *magnitude = mean + columns;
        float row[D];
        for (int64_t i = 0; i < count; i++) {
            int64_t token = at + i, block = head * capacity + token / BLOCK;
            copy_as_float32(x, dtype, (head * count + i) * columns, columns, D, row);
            for (int64_t d = 0; channels && d < columns; d++) row[d] = (row[d] - mean[d]) / magnitude[d];
            uint16_t *scale = scales + block * G * BLOCK;
            if (bits == 8) store_bytes(row, is_key, D, token % BLOCK, codes + block * bytes, scale);
            else store_nibbles(row, is_key, D, token % BLOCK, codes + block * bytes, scale);
        }
    }
}

// Fill out [heads][count][columns] with the tokens from `first` on.
void load_tokens(const uint8_t *codes, const uint16_t *scales, int64_t heads, int64_t first, int64_t count,
                 int64_t columns, int bits, int is_key, const float *channels, int64_t capacity, void *out, int dtype,
                 int threads) {
    int64_t D = stored_columns(columns), bytes = block_bytes(bits, D), G = groups_of_token(bits, D);
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t head = 0; head < heads; head++) {
        const float *mean = channels + head * 2 * columns, *magnitude = mean + columns;
        float row[D];
        for (int64_t i = 0; i < count; i++) {
            int64_t token = first + i, block = head * capacity + token / BLOCK;
            const uint16_t *scale = scales + block * G * BLOCK;
            if (bits == 8) load_token(codes + block * bytes, scale, 8, is_key, D, token % BLOCK, row);
            else load_token(codes + block * bytes, scale, 4, is_key, D, token % BLOCK, row);
            for (int64_t d = 0; channels && d < columns; d++) row[d] = row[d] * magnitude[d] + mean[d];
            for (int64_t d = 0; d < columns; d += LANES)
                store_floats(out, dtype, (head * count + i) * columns + d, columns - d, *(Floats *)(row + d));
        }
    }
}

// Attention

// Rows of queries as integers of two digits: a query is `unit` times (256 * high + low).
typedef struct {
    float unit[TILE];
    int32_t *offset_sums;  // [TILE][DIGITS][G]: -offset * the sum of the digits. Sums of products begin with it,
                           // because codes are too large by the offset
    int8_t *digits;    // [TILE][DIGITS][D]
} Queries;

// The scratch memory of one thread.
typedef struct {
    float *scores;         // [TILE][CHUNK]
    float largest[TILE];   // the largest score of a row in the chunk
    float *scales;         // [CHUNK]: of one group of the values
    float fault;           // NaN if one of these scales is not finite, else 0
    int8_t *digits;        // [TILE][DIGITS][CHUNK]: of probabilities times the scales of values
    float unit[TILE];
    int32_t offset_sums[TILE][DIGITS];
    Queries *tiles;
} Room;

// Write `count` integers as two digits, and return in `sums` the sum of each.
INLINE void write_two_digits(const int32_t *numbers, int64_t count, int8_t *high, int8_t *low, int32_t sums[DIGITS]) {
    int32_t high_sum = 0, low_sum = 0;
    for (int64_t i = 0; i < count; i++) {
        int32_t upper = (numbers[i] + 128) >> 8, lower = numbers[i] - upper * 256;
        high[i] = (int8_t)upper;
        low[i] = (int8_t)lower;
        high_sum += upper;
        low_sum += lower;
    }
    sums[0] = high_sum;
    sums[1] = low_sum;
}

// Join the sums of both digits.
INLINE Floats joined(Integers high, Integers low) {
    return multiply_add(to_floats(high), all_floats(256), to_floats(low));
}

static void write_query(const Attention *a, const void *query, int64_t index, const float *magnitude, Queries *tile,
                        int row) {
    int64_t D = stored_columns(a->key_columns), G = groups_of_token(a->key_bits, D), size = D / G;
    float values[D];
    int32_t numbers[D];
    copy_as_float32(query, a->dtype, index, a->key_columns, D, values);
    for (int64_t d = 0; magnitude && d < a->key_columns; d++) values[d] *= magnitude[d];
    float top = largest_magnitude(values, FLOAT32, D), inverse = LARGEST / top;
    tile->unit[row] = top / LARGEST;
    for (int64_t d = 0; d < D; d += LANES) *(Integers *)(numbers + d) = to_integers(*(Floats *)(values + d) * inverse);
    int8_t *high = tile->digits + row * DIGITS * D, *low = high + D;
    for (int64_t g = 0; g < G; g++) {
        int32_t sums[DIGITS];
        write_two_digits(numbers + g * size, size, high + g * size, low + g * size, sums);
        EACH(digit, DIGITS) tile->offset_sums[(row * DIGITS + digit) * G + g] = -code_offset(a->key_bits) * sums[digit];
    }
}

// Load a vector of codes; of 4 bits both halves, of which the low one comes first.
INLINE void load_codes(const uint8_t *from, int bits, Integers codes[2]) {
    Integers bytes = *(const Integers *)from;
    codes[0] = bits == 8 ? bytes ^ all_bytes(BYTE_OFFSET) : bytes & all_bytes(0x0f);
    codes[1] = bytes >> 4 & all_bytes(0x0f);
}

// Add the products of codes with word `word` of both digits of each row.
INLINE void add_row_products(const Integers codes[STEP][2], int bits, const int8_t *digits, int64_t length, int64_t word,
                             int rows, Integers sums[TILE][DIGITS][STEP]) {
    EACH(half, 8 / bits) EACH(row, rows) EACH(digit, DIGITS) {
        Integers x = all_integers(((const int32_t *)(digits + (row * DIGITS + digit) * length))[word + half]);
        EACH(s, STEP)
            sums[row][digit][s] = add_products_of_bytes(sums[row][digit][s], codes[s][half], x);
    }
}

// Fetch codes that will be read a chunk later: into the second cache, because the first one is full of this chunk.
INLINE void fetch(const uint8_t *ahead) { __builtin_prefetch(ahead, 0, 2); }

// Fill the scores of `count` tokens, a multiple of BLOCK, and fetch as many codes of keys at `ahead`.
INLINE void score(Room *room, const Queries *tile, int rows, int bits, int64_t D, const uint8_t *keys,
                  const uint16_t *scales, int64_t count, float scaling, const uint8_t *ahead) {
    int64_t G = groups_of_token(bits, D), words = D / 4 / G, bytes = block_bytes(bits, D);
    Floats largest[TILE];
    EACH(row, rows) largest[row] = all_floats(-INFINITY);
    for (int64_t token = 0; token < count; token += STEP * LANES) {
        const uint8_t *from[STEP], *fetched[STEP];
        const uint16_t *scale[STEP];
        EACH(s, STEP) {
            int64_t at = least(token + s * LANES, count - LANES), block = at / BLOCK;
            from[s] = keys + block * bytes + at % BLOCK * 4;
            fetched[s] = ahead ? ahead + block * bytes + at % BLOCK * 4 : from[s];
            scale[s] = scales + block * G * BLOCK + at % BLOCK;
        }
        Floats totals[TILE][STEP];
        EACH(row, rows) EACH(s, STEP) totals[row][s] = all_floats(0);
        for (int64_t g = 0; g < G; g++) {
            Integers sums[TILE][DIGITS][STEP];
            EACH(row, rows) EACH(digit, DIGITS) EACH(s, STEP)
                sums[row][digit][s] = all_integers(tile->offset_sums[(row * DIGITS + digit) * G + g]);
            for (int64_t word = g * words; word < (g + 1) * words; word += 8 / bits) {
                Integers codes[STEP][2];
                EACH(s, STEP) {
                    fetch(fetched[s] + word * 8 * bits);
                    load_codes(from[s] + word * 8 * bits, bits, codes[s]);
                }
                add_row_products(codes, bits, tile->digits, D, word, rows, sums);
            }
            EACH(s, STEP) {
                Floats factor = load_floats(scale[s] + g * BLOCK, BFLOAT16, 0, LANES);
                EACH(row, rows)
                    totals[row][s] = multiply_add(joined(sums[row][0][s], sums[row][1][s]), factor, totals[row][s]);
            }
        }
        EACH(row, rows) EACH(s, STEP) {
            Floats scores = totals[row][s] * all_floats(tile->unit[row] * scaling);
            *(Floats *)(room->scores + row * CHUNK + token + s * LANES) = scores;
            largest[row] = larger(largest[row], scores);
        }
    }
    EACH(row, rows) room->largest[row] = largest_of(largest[row]);
}

// Apply the mask to the scores of a row. A chunk may hold tokens that no row attends to: `skipped` ones before
// `a->first`, and those from `count` on. Their scores become -infinity.
static void mask_scores(const Attention *a, const uint8_t *mask, int64_t index, int64_t skipped, int64_t count,
                        float *scores, float *largest) {
    if (a->mask == NO_MASK && skipped == 0 && count == CHUNK) return;
    if (a->mask == BOOL_MASK) {
        for (int64_t t = skipped; t < count; t++) scores[t] = mask[index + t] ? scores[t] : -INFINITY;
    } else if (a->mask == FLOAT_MASK) {
        for (int64_t t = skipped; t < count; t++) scores[t] += ((const float *)mask)[index + t];
    }
    for (int64_t t = 0; t < skipped; t++) scores[t] = -INFINITY;
    for (int64_t t = count; t < CHUNK; t++) scores[t] = -INFINITY;
    Floats all = all_floats(-INFINITY);
    for (int64_t t = 0; t < CHUNK; t += LANES) all = larger(all, *(Floats *)(scores + t));
    *largest = largest_of(all);
}

// Load the scales of a group of the values, 0 for tokens that no row attends to.
static void load_value_scales(Room *room, const uint16_t *scales, int64_t G, int64_t skipped, int64_t count) {
    Floats faults = all_floats(0);
    memset(room->scales, 0, CHUNK * sizeof(float));
    for (int64_t t = 0; t < count; t += LANES)
        *(Floats *)(room->scales + t) = load_floats(scales + t / BLOCK * G * BLOCK + t % BLOCK, BFLOAT16, 0, LANES);
    for (int64_t t = 0; t < skipped; t++) room->scales[t] = 0;
    for (int64_t t = 0; t < count; t += LANES) faults += *(Floats *)(room->scales + t) * all_floats(0);
    room->fault = sum_of(faults);
}

// Replace the scores of a chunk by the exponentials of their distances to `top`, the largest score of the row so far,
// and add these to `total`. If `top` rises, `total` and `out`, the sums over earlier chunks, are scaled to the new one.
static void add_exponentials(float *scores, float largest, int64_t D, float *top, float *total, float *out) {
    float now = largest > *top ? largest : *top;
    if (now == -INFINITY) {
        // A maximum may pass over NaN.
        for (int64_t t = 0; t < CHUNK; t++) *total += scores[t] == -INFINITY ? 0 : NAN;
        memset(scores, 0, CHUNK * sizeof(float));
        return;
    }
    float shrunk = *top == -INFINITY ? 0 : exponential(*top - now);
    Floats sum = all_floats(0);
    *top = now;
    for (int64_t t = 0; t < CHUNK; t += LANES) {
        Floats values = exponentials(*(Floats *)(scores + t) - all_floats(now));
        *(Floats *)(scores + t) = values;
        sum += values;
    }
    *total = *total * shrunk + sum_of(sum);
    for (int64_t d = 0; shrunk != 1 && d < D; d += LANES) *(Floats *)(out + d) *= all_floats(shrunk);
}

INLINE int32_t total_of(Integers numbers) {
    int32_t total = 0;
    EACH(i, LANES) total += numbers[i];
    return total;
}

// Write the probabilities of a row, times the scales of a group of the values, as digits.
static void write_probabilities(Room *room, int row, int bits) {
    const float *scores = room->scores + row * CHUNK;
    Floats products[CHUNK / LANES], tops = all_floats(SMALLEST_TOP);
    for (int64_t t = 0; t < CHUNK; t += LANES) {
        products[t / LANES] = *(const Floats *)(scores + t) * *(const Floats *)(room->scales + t);
        tops = larger(tops, bits == 4 ? magnitudes(products[t / LANES]) : products[t / LANES]);
    }
    float top = largest_of(tops), inverse = LARGEST / top;
    int8_t *high = room->digits + row * DIGITS * CHUNK;
    Integers sum = all_integers(0), upper_sum = sum;
    for (int64_t t = 0; t < CHUNK; t += 4 * LANES) {
        Integers upper[4], lower[4];
        EACH(i, 4) {
            Integers number = to_integers(products[t / LANES + i] * all_floats(inverse));
            upper[i] = (number + all_integers(128)) >> 8;
            lower[i] = number - (upper[i] << 8);
            sum += number;
            upper_sum += upper[i];
        }
        *(Integers *)(high + t) = pack_bytes(upper);
        *(Integers *)(high + CHUNK + t) = pack_bytes(lower);
    }
    int32_t total = total_of(sum), upper_total = total_of(upper_sum);
    room->unit[row] = top / LARGEST + room->fault;
    room->offset_sums[row][0] = -code_offset(bits) * upper_total;
    room->offset_sums[row][1] = -code_offset(bits) * (total - 256 * upper_total);
}

// Add to out [rows][D] the values of `count` tokens in STEP * LANES columns.
INLINE void add_values(const Room *room, int rows, int bits, int64_t D, const uint8_t *values, int64_t count,
                       int64_t column, const uint8_t *ahead, float *out) {
    int64_t lines = count / BLOCK * (bits == 8 ? 4 : 2);
    Integers sums[TILE][DIGITS][STEP];
    EACH(row, rows) EACH(digit, DIGITS) EACH(s, STEP) sums[row][digit][s] = all_integers(room->offset_sums[row][digit]);
    for (int64_t line = 0; line < lines; line++) {
        Integers codes[STEP][2];
        EACH(s, STEP) {
            int64_t at = (line * D + column + s * LANES) * 4;
            if (ahead) fetch(ahead + at);
            load_codes(values + at, bits, codes[s]);
        }
        add_row_products(codes, bits, room->digits, CHUNK, line * (8 / bits), rows, sums);
    }
    EACH(row, rows) EACH(s, STEP) {
        Floats *to = (Floats *)(out + row * D + column + s * LANES);
        *to = multiply_add(joined(sums[row][0][s], sums[row][1][s]), all_floats(room->unit[row]), *to);
    }
}

// The keys and values of a head, from the block of the chunk's first token on.
typedef struct {
    const uint8_t *keys, *values;
    const uint16_t *key_scales, *value_scales;
} Chunk;

// Fetch the scales of the next chunk, of so many groups.
INLINE void fetch_scales(const uint16_t *scales, int64_t G) {
    for (int64_t i = 0; i < CHUNK * G; i += 32) fetch((const uint8_t *)(scales + CHUNK * G + i));
}

// Attend with a tile of rows to the tokens of a chunk.
INLINE void attend_tile(const Attention *a, Room *room, const Queries *tile, const Chunk *chunk, int rows, int key_bits,
                        int value_bits, int64_t first_row, int64_t skipped, int64_t count, const uint8_t *mask,
                        int64_t mask_index, float *out, float *tops, float *totals) {
    int64_t K = stored_columns(a->key_columns), V = stored_columns(a->value_columns);
    int64_t padded = round_up(count, BLOCK), G = groups_of_token(value_bits, V);
    // The first tile fetches the codes of the next chunk for all tiles.
    const uint8_t *keys_ahead = first_row ? NULL : chunk->keys + CHUNK / BLOCK * block_bytes(key_bits, K);
    const uint8_t *values_ahead = first_row ? NULL : chunk->values + CHUNK / BLOCK * block_bytes(value_bits, V);
    if (first_row == 0) fetch_scales(chunk->key_scales, groups_of_token(key_bits, K));
    if (first_row == 0) fetch_scales(chunk->value_scales, G);
    score(room, tile, rows, key_bits, K, chunk->keys, chunk->key_scales, padded, a->scaling, keys_ahead);
    EACH(row, rows) {
        int64_t index = (first_row + row) / a->rows * a->mask_head + (first_row + row) % a->rows * a->mask_row;
        float *scores = room->scores + row * CHUNK;
        mask_scores(a, mask, mask_index + index, skipped, count, scores, room->largest + row);
        add_exponentials(scores, room->largest[row], V, tops + row, totals + row, out + row * V);
    }
    for (int64_t column = 0; column < V; column += STEP * LANES) {
        int64_t g = G == 1 ? 0 : column / 32;
        if (column == 0 || (G > 1 && column % 32 == 0)) {
            load_value_scales(room, chunk->value_scales + g * BLOCK, G, skipped, padded);
            EACH(row, rows) write_probabilities(room, row, value_bits);
        }
        add_values(room, rows, value_bits, V, chunk->values, padded, column, values_ahead, out);
    }
}

#define ARGUMENTS first_row, skipped, count, mask, mask_index, out, tops, totals
#define CASE(ROWS, KEY_BITS, VALUE_BITS)                                          \
    if (rows == ROWS && a->key_bits == KEY_BITS && a->value_bits == VALUE_BITS) { \
        attend_tile(a, room, tile, chunk, ROWS, KEY_BITS, VALUE_BITS, ARGUMENTS); \
        return;                                                                   \
    }
#define CASES(ROWS) CASE(ROWS, 8, 8) CASE(ROWS, 8, 4) CASE(ROWS, 4, 8) CASE(ROWS, 4, 4)

// The numbers are constants in each case, so that the sums stay in registers.
static void attend_tile_of(const Attention *a, Room *room, const Queries *tile, const Chunk *chunk, int rows,
                           int64_t first_row, int64_t skipped, int64_t count, const uint8_t *mask, int64_t mask_index,
                           float *out, float *tops, float *totals) {
    CASES(1) CASES(2) CASES(3) CASES(4)
}

// Attend with all rows that share a head to the tokens from `first` to `end`. `first` is a multiple of BLOCK.
static void attend_part(const Attention *a, Room *room, const Chunk *head, const uint8_t *mask, int64_t mask_index,
                        int64_t first, int64_t end, float *out, float *tops, float *totals) {
    int64_t rows = a->shared * a->rows, K = stored_columns(a->key_columns), V = stored_columns(a->value_columns);
    int64_t key_groups = groups_of_token(a->key_bits, K), value_groups = groups_of_token(a->value_bits, V);
    memset(out, 0, rows * V * sizeof(float));
    for (int64_t row = 0; row < rows; row++) tops[row] = -INFINITY, totals[row] = 0;
    for (int64_t token = first; token < end; token += CHUNK) {
        int64_t count = least(CHUNK, end - token), skipped = a->first > token ? a->first - token : 0;
        int64_t block = token / BLOCK;
        Chunk chunk = {.keys = head->keys + block * block_bytes(a->key_bits, K),
                       .values = head->values + block * block_bytes(a->value_bits, V),
                       .key_scales = head->key_scales + block * key_groups * BLOCK,
                       .value_scales = head->value_scales + block * value_groups * BLOCK};
        for (int64_t row = 0; row < rows; row += TILE)
            attend_tile_of(a, room, room->tiles + row / TILE, &chunk, (int)least(TILE, rows - row), row, skipped, count,
                           mask, mask_index + token - a->first, out + row * V, tops + row, totals + row);
    }
}

static int64_t tiles_of(const Attention *a) { return (a->shared * a->rows + TILE - 1) / TILE; }
static int64_t query_bytes(const Attention *a) {
    int64_t D = stored_columns(a->key_columns);
    return TILE * DIGITS * (round_up(groups_of_token(a->key_bits, D) * 4, ALIGNMENT) + D);
}
static int64_t room_bytes(const Attention *a) {
    int64_t tiles = tiles_of(a) * (round_up(sizeof(Queries), ALIGNMENT) + query_bytes(a));
    return round_up(CHUNK * (TILE * (4 + DIGITS) + 4) + tiles, ALIGNMENT);
}
// Sums, largest scores and totals of one part of the tokens.
static int64_t sums_bytes(const Attention *a) {
    return round_up(a->shared * a->rows * (stored_columns(a->value_columns) + 2) * 4, ALIGNMENT);
}
// The tokens of a head are parted where there are fewer heads than threads.
static int64_t parts_of(const Attention *a) {
    int64_t heads = a->batch * a->heads, wanted = heads ? (a->threads + heads - 1) / heads : 1;
    int64_t most = (a->end - a->first + PART - 1) / PART;
    return wanted < 1 ? 1 : most < 1 ? 1 : least(wanted, most);
}

static Room room_at(const Attention *a, char *memory) {
    Room room = {.scores = (float *)memory};
    room.scales = room.scores + TILE * CHUNK;
    room.digits = (int8_t *)(room.scales + CHUNK);
    room.tiles = (Queries *)(room.digits + TILE * DIGITS * CHUNK);
    int64_t D = stored_columns(a->key_columns), tiles = tiles_of(a);
    char *at = (char *)room.tiles + tiles * round_up(sizeof(Queries), ALIGNMENT);
    for (int64_t i = 0; i < tiles; i++, at += query_bytes(a)) {
        room.tiles[i].digits = (int8_t *)at;
        room.tiles[i].offset_sums = (int32_t *)(at + TILE * DIGITS * D);
    }
    return room;
}

// Return the scratch memory that `attend` needs, at any address.
int64_t attention_bytes(const Attention *a) {
    return a->threads * room_bytes(a) + parts_of(a) * a->batch * a->heads * sums_bytes(a) + ALIGNMENT;
}

// Add the parts of a row of queries, and store it.
static void store_row(const Attention *a, const char *sums, int64_t parts, int64_t row, void *out, int64_t index) {
    int64_t rows = a->shared * a->rows, V = stored_columns(a->value_columns);
    float top = -INFINITY, total = 0, result[V];
    memset(result, 0, sizeof result);
    for (int64_t part = 0; part < parts; part++) {
        float own = ((const float *)(sums + part * sums_bytes(a)))[rows * V + row];
        top = own <= top ? top : own;
    }
    for (int64_t part = 0; part < parts; part++) {
        const float *values = (const float *)(sums + part * sums_bytes(a)), *tops = values + rows * V;
        float factor = tops[row] == -INFINITY ? 0 : exponential(tops[row] - top);
        total += tops[rows + row] * factor;
        for (int64_t d = 0; d < V; d++) result[d] += values[row * V + d] * factor;
    }
    float inverse = total == 0 ? 0 : 1 / total;  // a row that may attend to no token is 0
    for (int64_t d = 0; d < a->value_columns; d += LANES)
        store_floats(out, a->dtype, index + d, a->value_columns - d, *(Floats *)(result + d) * all_floats(inverse));
}

// Fill out [batch][heads * shared][rows][value columns] from query [batch][heads * shared][rows][key columns], in the
// dtype of the query. `channels` [batch * heads][2][key columns] are the means and magnitudes with which `store_tokens`
// stored the keys, or NULL. Queries are multiplied by the magnitudes. The means are left out: they would add the same
// number to all scores of a row, and the softmax would cancel it.
void attend(const Attention *a, const void *query, const uint8_t *keys, const uint16_t *key_scales,
            const float *channels, const uint8_t *values, const uint16_t *value_scales, const uint8_t *mask, void *out,
            char *memory) {
    int64_t heads = a->batch * a->heads, rows = a->shared * a->rows, parts = parts_of(a);
    int64_t K = stored_columns(a->key_columns), V = stored_columns(a->value_columns);
    int64_t start = a->first / BLOCK * BLOCK, step = round_up((a->end - start + parts - 1) / parts, BLOCK);
    memory += -(intptr_t)memory & (ALIGNMENT - 1);
    char *sums = memory + a->threads * room_bytes(a);
#pragma omp parallel for num_threads(a->threads) if (a->threads > 1) schedule(dynamic)
    for (int64_t i = 0; i < heads * parts; i++) {
        int64_t head = i / parts, first = start + i % parts * step;
        Room room = room_at(a, memory + thread_index() * room_bytes(a));
        const float *magnitude = channels ? channels + (head * 2 + 1) * a->key_columns : NULL;
        for (int64_t row = 0; row < rows; row++)
            write_query(a, query, (head * rows + row) * a->key_columns, magnitude, room.tiles + row / TILE, row % TILE);
        Chunk codes = {.keys = keys + head * a->capacity * block_bytes(a->key_bits, K),
                       .values = values + head * a->capacity * block_bytes(a->value_bits, V)};
        codes.key_scales = key_scales + head * a->capacity * groups_of_token(a->key_bits, K) * BLOCK;
        codes.value_scales = value_scales + head * a->capacity * groups_of_token(a->value_bits, V) * BLOCK;
        int64_t mask_index = head / a->heads * a->mask_batch + head % a->heads * a->shared * a->mask_head;
        float *own = (float *)(sums + i * sums_bytes(a));
        attend_part(a, &room, &codes, mask, mask_index, first, least(first + step, a->end), own, own + rows * V,
                    own + rows * V + rows);
    }
    for (int64_t head = 0; head < heads; head++)
        for (int64_t row = 0; row < rows; row++)
            store_row(a, sums + head * parts * sums_bytes(a), parts, row, out,
                      (head * rows + row) * a->value_columns);
}
