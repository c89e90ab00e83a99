#include "integers.h"

int64_t integers_bytes(const Product *p, int threads) {
    return p->M <= FEW_ROWS ? few_rows_bytes(p) : many_rows_bytes(p, threads);
}

void multiply_integers(const Product *p, int threads, int8_t *memory) {
    if (p->M <= FEW_ROWS) multiply_few_rows(p, threads, memory);
    else multiply_many_rows(p, threads, memory);
}
