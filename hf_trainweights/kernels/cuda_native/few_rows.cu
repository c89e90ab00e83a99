// Products of a few rows of x with a stored weight: out[M, N] = x[M, K] W[N, K]^T + bias.
//
// A warp takes 16 * ROW_TILES rows of the weight and every WARPS-th segment of columns, which is 64 bytes of each row.
// Each lane of four loads 16 bytes of a segment. Tensor cores sum over K, in any order that is the same for x. So codes
// stay in the lane that loads them and become numbers in its registers, and nothing passes through shared memory
// before the end. x is loaded from where its numbers lie, and ordered by one instruction for a pair.
//
// Groups of whole segments: the sum over a segment is scaled in float32. Shorter groups: scales that 16 bits hold
// multiply the numbers of codes, which gives the bits of the dequantized weight. For other scales four lanes exchange
// words, so that each product of tensor cores has columns of one group, and its sum is scaled.
//
// Macros beside those of weights.cuh:
//   HALF          1: x, scales and out are float16; 0: bfloat16
//   ROW_TILES     16 rows of the weight each, that a block takes
//   COLUMN_TILES  8 rows of x each, that a block takes
//   WARPS         of a block; they share the columns
//   STAGES        segments that a warp has in flight
//   BLOCKS        at least so many of a processor's registers suffice for
//   GROUPED       1: the weight is E matrices, and rows of x before ends[e] meet matrix e, as in torch._grouped_mm. A
//                 block for each row of x; those work that begin 8 * COLUMN_TILES rows of one matrix
//
// The kernel requires N >= 1, codes whose rows begin at multiples of 16 bytes, K a multiple of the codes of 16 bytes,
// and x contiguous and at a multiple of 16 bytes.

#ifdef EMULATED
#include "gpu.h"
#else
#include "instructions.cuh"
#endif
#include "weights.cuh"

#define SEGMENT (16 * PER_WORD)  // codes of a row in a segment
#define OF_LANE (4 * PER_WORD)   // those of them that a lane loads
#define TILES (PAIRS / 2)  // products of tensor cores that a word of each lane makes
#define ROWS (16 * ROW_TILES)       // of the weight, in a block
#define COLUMNS (8 * COLUMN_TILES)  // rows of x in a block: columns of W x^T, as tensor cores compute it
// Whether a segment has codes of several groups; then scales multiply the numbers of codes, or lanes exchange words.
#define IS_SHORT (GROUP != 0 && GROUP % SEGMENT != 0)
#define SCALES_CODES (IS_SHORT && IN_16_BITS)
#define EXCHANGES (IS_SHORT && !IN_16_BITS)
// Counted from the group of a lane's first code, where groups are at most as long as the codes that a lane has.
#define GROUP_OF_WORD(i) (GROUP < OF_LANE ? PER_WORD * (i) / GROUP : 0)
// Words of a lane that belong to one group, and so are summed before they are scaled.
#define SPAN (!EXCHANGES ? 4 : GROUP % (2 * OF_LANE) == 0 ? 2 : 1)
#define SPANS (4 / SPAN)

#if EXCHANGES && GROUP % OF_LANE != 0
#error "such short groups have no product of tensor cores of their own"
#endif

// The first column, within a segment, of the codes of a word.
DEVICE int column_of(int word, int t) { return EXCHANGES ? OF_LANE * word + PER_WORD * t : OF_LANE * t + PER_WORD * word; }

// Word i of lane t becomes word t of lane i, among four lanes.
DEVICE void exchange_words(uint32 (&words)[4], int t) {
    UNROLL for (int distance = 1; distance <= 2; ++distance) {
        const bool is_upper = t & distance;
        UNROLL for (int i = 0; i < 4; ++i) {
            if (i & distance) continue;
            const uint32 received = exchange(is_upper ? words[i] : words[i | distance], distance);
            words[i] = is_upper ? received : words[i];
            words[i | distance] = is_upper ? words[i | distance] : received;
        }
    }
}

// x of a segment, for each word of a lane, in the order of its codes.
DEVICE void load_x(uint32 (&ordered)[4][PAIRS], const uint16 *row, int column, int t, int K) {
#if BITS == 8 && !EXCHANGES
    UNROLL for (int i = 0; i < 4; i += 2) {
        uint32 numbers[4];
        load_numbers(numbers, row + column + column_of(i, t), column + OF_LANE * t < K);
        const uint32 first[2] = {numbers[0], numbers[1]}, second[2] = {numbers[2], numbers[3]};
        order_numbers(ordered[i], first);
        order_numbers(ordered[i + 1], second);
    }
#else
    UNROLL for (int i = 0; i < 4; ++i) {
        uint32 numbers[PAIRS];
        load_numbers(numbers, row + column + column_of(i, t), column + OF_LANE * (EXCHANGES ? i : t) < K);
        order_numbers(ordered[i], numbers);
    }
#endif
}

// Products of tensor cores of one word of each lane, in rows `upper` and `lower`, with x.
DEVICE void multiply_word(float (&sums)[COLUMN_TILES][4], const uint32 (&upper)[PAIRS], const uint32 (&lower)[PAIRS],
                          const uint32 (&x)[COLUMN_TILES][4][PAIRS], int word) {
    UNROLL for (int tile = 0; tile < TILES; ++tile) {
        const uint32 a[4] = {upper[2 * tile], lower[2 * tile], upper[2 * tile + 1], lower[2 * tile + 1]};
        UNROLL for (int j = 0; j < COLUMN_TILES; ++j) {
            const uint32 b[2] = {x[j][word][2 * tile], x[j][word][2 * tile + 1]};
            multiply_tile(sums[j], a, b);
        }
    }
}

KERNEL few_rows(const Weight stored, const uint16 *x, const uint16 *bias, uint16 *out, const int *ends, int M, int E) {
    SHARED float partial[WARPS][ROWS][COLUMNS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, quad = lane / 4, t = lane % 4;
    const int n0 = blockIdx.y * ROWS, N = stored.N, K = stored.K;
    Weight weight = stored;
#if GROUPED
    // The matrix of this row is the first whose rows end behind it.
    const int m0 = blockIdx.x;
    int matrix = 0;
    for (int above = E; matrix < above;) {
        const int middle = (matrix + above) / 2;
        if (ends[middle] > m0) above = middle;
        else matrix = middle + 1;
    }
    if (matrix == E || (m0 - (matrix ? ends[matrix - 1] : 0)) % COLUMNS) return;
    M = ends[matrix];
    Stored *tensors[] = {&weight.qdata, &weight.scale, &weight.group_scale, &weight.global_scale, &weight.zero_point,
                         &weight.bias, &weight.table, &weight.nested_values, &weight.outer_scale, &weight.phase,
                         &weight.nested_offset};
    UNROLL for (int i = 0; i < 11; ++i) tensors[i]->data += matrix * tensors[i]->matrix_bytes;
#else
    const int m0 = blockIdx.x * COLUMNS;
#endif
    const int segments = (K + SEGMENT - 1) / SEGMENT;
    const Table table = table_of(weight);

    // Rows past the end, of the weight or of x, are read as the last one, and not written.
    const uint8 *codes_of[2 * ROW_TILES];
    int n[2 * ROW_TILES];
    UNROLL for (int i = 0; i < 2 * ROW_TILES; ++i) {
        n[i] = min(n0 + 8 * i + quad, N - 1);
        codes_of[i] = row_of(weight.qdata, n[i]) + 16 * t;
    }
    const uint16 *x_of[COLUMN_TILES];
    UNROLL for (int j = 0; j < COLUMN_TILES; ++j) x_of[j] = x + (long long)min(m0 + 8 * j + quad, M - 1) * K;

    float sums[ROW_TILES][COLUMN_TILES][4] = {};
    uint32 codes[STAGES][2 * ROW_TILES][4] = {};
    UNROLL for (int stage = 0; stage < STAGES; ++stage) {
        const int segment = warp + stage * WARPS;
        UNROLL for (int i = 0; i < 2 * ROW_TILES; ++i)
            load_codes(codes[stage][i], codes_of[i] + segment * 64, segment * SEGMENT + OF_LANE * t < K);
    }

    for (int first = warp; first < segments; first += STAGES * WARPS) {
        UNROLL for (int stage = 0; stage < STAGES; ++stage) {
            const int segment = first + stage * WARPS, column = segment * SEGMENT;
            if (segment >= segments) break;
            uint32 numbers[COLUMN_TILES][4][PAIRS];
            UNROLL for (int j = 0; j < COLUMN_TILES; ++j) load_x(numbers[j], x_of[j], column, t, K);
#if HAS_OFFSET && !SCALES_CODES
            // Sums of x over a group, which offsets multiply: products with ones.
            float x_sums[SPANS][COLUMN_TILES][4] = {};
            const uint32 one = HALF ? 0x3C003C00 : 0x3F803F80;
            uint32 ones[PAIRS];
            UNROLL for (int i = 0; i < PAIRS; ++i) ones[i] = one;
            UNROLL for (int i = 0; i < 4; ++i) multiply_word(x_sums[i / SPAN], ones, ones, numbers, i);
#endif
            UNROLL for (int r = 0; r < ROW_TILES; ++r) {
                uint32(&upper)[4] = codes[stage][2 * r], (&lower)[4] = codes[stage][2 * r + 1];
#if EXCHANGES
                exchange_words(upper, t);
                exchange_words(lower, t);
#endif
                UNROLL for (int span = 0; span < SPANS; ++span) {
#if GROUP && !SCALES_CODES
                    const int group = EXCHANGES ? min((column + OF_LANE * SPAN * span) / GROUP, weight.groups - 1)
                                                : column / GROUP;
                    const float low = scale_of(weight, n[2 * r], group), high = scale_of(weight, n[2 * r + 1], group);
                    const uint32 low_zero = zero_of(weight, n[2 * r], group);
                    const uint32 high_zero = zero_of(weight, n[2 * r + 1], group);
                    float sum[COLUMN_TILES][4] = {};
#elif !GROUP
                    const uint32 low_zero = zero_of(weight, n[2 * r], 0), high_zero = zero_of(weight, n[2 * r + 1], 0);
                    float(&sum)[COLUMN_TILES][4] = sums[r];
#else
                    float(&sum)[COLUMN_TILES][4] = sums[r];
#endif
                    UNROLL for (int i = SPAN * span; i < SPAN * (span + 1); ++i) {
#if SCALES_CODES
                        const int group = min((column + OF_LANE * t) / GROUP + GROUP_OF_WORD(i), weight.groups - 1);
                        const uint32 low_zero = zero_of(weight, n[2 * r], group);
                        const uint32 high_zero = zero_of(weight, n[2 * r + 1], group);
#endif
                        uint32 above[PAIRS], below[PAIRS];
                        unpack(above, upper[i], low_zero, table);
                        unpack(below, lower[i], high_zero, table);
#if SCALES_CODES
                        const uint32 low = scale_pair(weight, n[2 * r], group);
                        const uint32 high = scale_pair(weight, n[2 * r + 1], group);
                        const uint32 low_offset = offset_pair(weight, n[2 * r], group);
                        const uint32 high_offset = offset_pair(weight, n[2 * r + 1], group);
                        UNROLL for (int p = 0; p < PAIRS; ++p) {
                            above[p] = multiply_add(above[p], low, low_offset);
                            below[p] = multiply_add(below[p], high, high_offset);
                        }
#endif
                        multiply_word(sum, above, below, numbers, i);
                    }
#if GROUP && !SCALES_CODES
                    UNROLL for (int j = 0; j < COLUMN_TILES; ++j)
                        UNROLL for (int i = 0; i < 4; ++i) sums[r][j][i] += sum[j][i] * (i < 2 ? low : high);
#endif
#if HAS_OFFSET && !SCALES_CODES
                    const float above = offset_of(weight, n[2 * r], group, low);
                    const float below = offset_of(weight, n[2 * r + 1], group, high);
                    UNROLL for (int j = 0; j < COLUMN_TILES; ++j)
                        UNROLL for (int i = 0; i < 4; ++i)
                            sums[r][j][i] += x_sums[span][j][i] * (i < 2 ? above : below);
#endif
                }
            }
            // These codes have been used: the next segment of this stage.
            const int next = segment + STAGES * WARPS;
            UNROLL for (int i = 0; i < 2 * ROW_TILES; ++i)
                load_codes(codes[stage][i], codes_of[i] + next * 64, next * SEGMENT + OF_LANE * t < K);
        }
    }

    UNROLL for (int r = 0; r < ROW_TILES; ++r)
        UNROLL for (int j = 0; j < COLUMN_TILES; ++j)
            UNROLL for (int i = 0; i < 4; ++i)
                partial[warp][16 * r + quad + 8 * (i / 2)][8 * j + 2 * t + i % 2] = sums[r][j][i];
    wait_for_block();

    for (int place = threadIdx.x; place < ROWS * COLUMNS; place += 32 * WARPS) {
        const int row = place % ROWS, column = place / ROWS, of_weight = n0 + row, m = m0 + column;
        if (of_weight < N && m < M) {
            float total = 0;
            UNROLL for (int w = 0; w < WARPS; ++w) total += partial[w][row][column];
            total *= row_factor(weight, of_weight) * table.unit;
            if (bias) total += float_of_number(bias[of_weight]);
            out[(long long)m * N + of_weight] = round_number(total);
        }
    }
}
