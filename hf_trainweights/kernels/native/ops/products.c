// Three ops that multiply with a weight: `bare_product` takes codes and scales, `product` takes a bias and two more stored
// tensors, and `imported_product` serves formats of other programs.
#include "torch.h"

// The first arguments of an op; ADDED is the bias. Behind them come the other stored tensors and the description of the
// weight.
enum { X, QDATA, SCALE, ADDED, FIRST_OTHER };
// How many tensors each op takes. The bare one has no optional tensors, because PyTorch takes 60 ns for each.
enum { BARE_TENSORS = ADDED, OWN_TENSORS = FIRST_OTHER + 2, MOST_TENSORS = FIRST_OTHER + OTHERS };

// Return the lowest bits of a number, and move those above them down.
static int64_t take_bits(uint64_t *packed, int bits) {
    int64_t field = *packed & ((1u << bits) - 1);
    *packed >>= bits;
    return field;
}

// Return the description of a weight of N rows. Python packs it into `own`, and for formats of other programs into
// `imported` too: PyTorch takes 60 ns for each argument of an op, so there are no more than these two numbers.
static Weight unpack(int64_t N, uint64_t own, uint64_t imported) {
    Weight w = {.N = N};
    w.K = take_bits(&own, 17), w.group_size = take_bits(&own, 17);
    w.dtype = take_bits(&own, 2), w.scale_dtype = take_bits(&own, 2), w.digits = take_bits(&own, 2);
    w.bits = take_bits(&own, 4), w.code_units = take_bits(&own, 8), w.zero_units = take_bits(&own, 8);
    w.codebook = take_bits(&own, 1);
    w.family = take_bits(&imported, 2), w.coding = take_bits(&imported, 4), w.offset = take_bits(&imported, 3);
    w.zero_bits = take_bits(&imported, 4), w.rounds_each = take_bits(&imported, 1);
    w.outer_count = take_bits(&imported, 17);
    return w;
}

// Return the result; NULL if the product cannot read these arguments.
static Handle multiply(uint64_t own, uint64_t imported, const Handle *tensors) {
    int64_t dimensions, elements, *sizes, *scale_sizes, out_sizes[MOST_DIMENSIONS];
    int32_t dtype;
    if (torch.get_sizes(tensors[SCALE], &scale_sizes)) return NULL;
    Weight weight = unpack(scale_sizes[0], own, imported);
    int64_t N = weight.N, K = weight.K;
    if (torch.get_dtype(tensors[X], &dtype) || dtype != torch.dtypes[weight.dtype]) return NULL;
    if (torch.get_dim(tensors[X], &dimensions) || dimensions < 1 || dimensions > MOST_DIMENSIONS) return NULL;
    if (torch.get_sizes(tensors[X], &sizes) || sizes[dimensions - 1] != K) return NULL;
    if (torch.get_numel(tensors[X], &elements)) return NULL;
    if (tensors[ADDED]) {
        int64_t biases;
        int32_t bias_dtype;
        if (torch.get_numel(tensors[ADDED], &biases) || biases != N) return NULL;
        if (torch.get_dtype(tensors[ADDED], &bias_dtype) || bias_dtype != dtype) return NULL;
    }
    for (int64_t i = 0; i < dimensions; i++) out_sizes[i] = i == dimensions - 1 ? N : sizes[i];
    void *at[MOST_TENSORS] = {NULL}, *out_at;
    for (int i = elements ? 0 : MOST_TENSORS; i < MOST_TENSORS; i++)
        if (tensors[i] && !(at[i] = address_of(tensors[i]))) return NULL;
    int64_t M = elements / K;
    int threads = M * N * K >= torch.threaded ? torch.get_num_threads() : 1;
    int8_t *memory = elements ? take_scratch(torch.product_bytes(&weight, M, threads)) : NULL;
    if (elements && !memory) return NULL;
    Handle out = new_tensor(dimensions, out_sizes, dtype, &out_at);
    if (!out || !elements) return out;
    void **others = at + FIRST_OTHER;
    torch.product(&weight, at[X], at[QDATA], at[SCALE], at[ADDED], out_at, M, threads, memory, others[0], others[1],
                  others[2], others[3], others[4]);
    return out;
}

static void run(Value *stack, int count) {
    Handle tensors[MOST_TENSORS] = {NULL};
    // PyTorch hands an optional tensor over as the address of a Value, or 0 for None.
    for (int i = 0; i < count; i++) tensors[i] = (Handle)(i >= ADDED && stack[i] ? *(Value *)stack[i] : stack[i]);
    Handle out = multiply(stack[count], count == MOST_TENSORS ? stack[count + 1] : 0, tensors);
    for (int i = 0; i < count; i++) {
        if (tensors[i]) torch.delete_tensor_object(tensors[i]);
        if (i >= ADDED && stack[i]) torch.delete((void *)stack[i]);
    }
    // Raises a RuntimeError.
    if (!out)
        torch.check_fail("product", "products.c", __LINE__,
                         "hf_trainweights::product: an input, a weight or a bias has another shape or dtype than the "
                         "program was compiled for, or its storage was freed");
    stack[0] = (Value)out;
}

void run_bare_product(Value *stack, uint64_t arguments, uint64_t results) {
    (void)arguments, (void)results;
    run(stack, BARE_TENSORS);
}

void run_product(Value *stack, uint64_t arguments, uint64_t results) {
    (void)arguments, (void)results;
    run(stack, OWN_TENSORS);
}

void run_imported_product(Value *stack, uint64_t arguments, uint64_t results) {
    (void)arguments, (void)results;
    run(stack, MOST_TENSORS);
}
