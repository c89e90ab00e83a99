// few_rows.cu as a function that Python calls with the arguments of a launch. It returns how many loads a GPU refuses.
#define EMULATED
#include "few_rows.cu"

static struct {
    const Weight *weight;
    const uint16 *x, *bias;
    uint16 *out;
    const int *ends;
    int M, E;
} arguments;

static void call() {
    few_rows(*arguments.weight, arguments.x, arguments.bias, arguments.out, arguments.ends, arguments.M, arguments.E);
}

extern "C" long run(int columns, int blocks, const Weight *weight, const uint16 *x, const uint16 *bias, uint16 *out,
                    const int *ends, int M, int E) {
    arguments = {weight, x, bias, out, ends, M, E};
    misaligned = 0;
    for (blockIdx.y = 0; blockIdx.y < blocks; ++blockIdx.y)
        for (blockIdx.x = 0; blockIdx.x < columns; ++blockIdx.x) run_block(32 * WARPS, call);
    return misaligned;
}
