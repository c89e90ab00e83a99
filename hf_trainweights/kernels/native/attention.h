// The description of an attention, which attention.c computes.
#pragma once
#include <stdint.h>

enum { NO_MASK = 0, BOOL_MASK = 1, FLOAT_MASK = 2 };

// `hf_trainweights/kernels/attention.py` and ops/cache.c fill it; Python does so in this order.
typedef struct {
    int64_t batch, heads;                      // of keys and values
    int64_t shared, rows;                      // query heads for each of these heads, rows for each query head
    int64_t key_columns, value_columns;        // as the model has them
    int64_t first, end;                        // the tokens to attend to, from `first` to before `end`
    int64_t capacity;                          // blocks that a head has room for
    int64_t mask_batch, mask_head, mask_row;   // elements from one to the next; 0 where all share the mask
    float scaling;
    int32_t key_bits, value_bits;
    int32_t mask, dtype, threads;
} Attention;

// The tokens of a block of codes.
#define BLOCK 16
