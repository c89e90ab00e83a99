// hatch_build.py makes this file from ../thresholds.json.
#pragma once
// The sums of this many rows of x stay in registers while a row of the weight is read.
#define FEW_ROWS 4
// Up to this many sums, each is computed in two halves.
#define HALVED_SUMS 4
// Codes are fetched into a cache this many bytes before they are read.
#define FETCHED_BYTES 4096
// A panel of tokens that vectors multiply takes at most this many bytes: a third-level cache is fast enough.
#define HELD_BYTES_OF_VECTORS 8388608
// Up to this many rows, products with uint and formats of other programs take no panels, nor do those with float8 unless x is bfloat16.
#define ROWS_WITHOUT_PANELS 8
// Up to this many rows of bfloat16, int4 is multiplied with the digits of x; above, as bfloat16.
#define DIGIT_ROWS_OF_INT4 16
// The same for int8 in groups, by tiles of AMX.
#define DIGIT_ROWS_OF_GROUPS_IN_TILES 64
// The same for int8 in groups, by vectors of bfloat16.
#define DIGIT_ROWS_OF_GROUPS_IN_VECTORS 48
// The same for int8 with one scale a row, by tiles of AMX.
#define DIGIT_ROWS_IN_TILES 127
// The same for int8 with one scale a row, by vectors of bfloat16.
#define DIGIT_ROWS_IN_VECTORS 48
// Tiles multiply int8 with one scale a row as bfloat16 up to this many columns.
#define WIDENED_COLUMNS_IN_TILES 768
// Up to this many 16-bit rows, AVX2 multiplies codes of 8 bits or uint as integers; above, as float32.
#define ROWS_OF_INTEGERS 48
// The same for int4.
#define ROWS_OF_INT4 12
// The same for float32 rows, and for float8 with rows of any dtype.
#define ROWS_OF_INTEGERS_IN_FLOAT32 10
// The same for int4 with float32 rows.
#define ROWS_OF_INT4_IN_FLOAT32 6
