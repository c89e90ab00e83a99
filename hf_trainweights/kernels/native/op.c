// Three ops for PyTorch's dispatcher, which a compiled program calls without a line of Python: `bare_product` takes codes
// and scales, `product` takes a bias and two more stored tensors, and `imported_product` serves formats of other
// programs.
//
// They are registered by functions that libtorch exports for C, the stable ABI of PyTorch from 2.8 on, which
// torch/csrc/inductor/aoti_torch/c/shim.h declares. Python looks them up and hands over their addresses, so no header
// of PyTorch is needed, and one library fits all its versions.
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>

#include "product.h"

// The version of the functions in this file, of `Torch` and of the ops' arguments.
#define OP_ABI 3

typedef uint64_t Value;   // an argument or a result of an op: a number, or the address of a tensor or of a Value
typedef void *Handle;     // a tensor
typedef void (*Kernel)(Value *stack, uint64_t arguments, uint64_t results);

// Functions of libtorch, C++'s `operator delete`, `product` and `product_bytes` of interface.c, and numbers.
// `hf_trainweights/kernels/product_op.py` fills it in this order.
typedef struct {
    int32_t (*get_dtype)(Handle, int32_t *);
    int32_t (*get_dim)(Handle, int64_t *);
    int32_t (*get_sizes)(Handle, int64_t **);
    int32_t (*get_numel)(Handle, int64_t *);
    int32_t (*is_contiguous)(Handle, bool *);
    int32_t (*get_data_ptr)(Handle, void **);
    int32_t (*delete_tensor_object)(Handle);
    int32_t (*empty_strided)(int64_t, const int64_t *, const int64_t *, int32_t, int32_t, int32_t, Handle *);
    int32_t (*library_init_impl)(const char *, const char *, const char *, uint32_t, void **);
    int32_t (*library_impl)(void *, const char *, Kernel);
    int (*get_num_threads)(void);
    void (*check_fail)(const char *, const char *, uint32_t, const char *);
    void (*delete)(void *);
    void (*product)(const Weight *, const void *, const uint8_t *, const void *, const void *, void *, int64_t, int,
                    int8_t *, const void *, const void *, const void *, const void *, const void *);
    int64_t (*product_bytes)(const Weight *, int64_t, int);
    int64_t dtypes[3];  // PyTorch's numbers of FLOAT32, BFLOAT16 and FLOAT16
    int64_t threaded;   // products of so many multiplications take several threads
} Torch;

// The first arguments of an op; ADDED is the bias. Behind them come the other stored tensors and the description of the
// weight.
enum { X, QDATA, SCALE, ADDED, FIRST_OTHER };
// How many tensors each op takes. The bare one has no optional tensors, because PyTorch takes 60 ns for each.
enum { BARE_TENSORS = ADDED, OWN_TENSORS = FIRST_OTHER + 2, MOST_TENSORS = FIRST_OTHER + OTHERS };
enum { MOST_DIMENSIONS = 8 };

static Torch torch;
static pthread_key_t scratch_key;
static _Thread_local struct { int8_t *memory; int64_t bytes; } scratch;

int32_t abi(void) { return OP_ABI; }

// Return scratch memory of this thread. It is kept from call to call, because the system maps fresh memory page by page.
static int8_t *take_scratch(int64_t bytes) {
    if (scratch.bytes < bytes) {
        free(scratch.memory);
        scratch.memory = malloc(bytes);
        scratch.bytes = scratch.memory ? bytes : 0;
        pthread_setspecific(scratch_key, scratch.memory);  // freed when the thread ends
    }
    return scratch.memory;
}

// Return the address of a tensor's elements; NULL if its storage was freed or its elements are not contiguous.
static void *address(Handle tensor) {
    bool contiguous = false;
    void *data = NULL;
    if (torch.is_contiguous(tensor, &contiguous) || !contiguous || torch.get_data_ptr(tensor, &data)) return NULL;
    return data;
}

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
    int64_t dimensions, elements, *sizes, *scale_sizes;
    int64_t strides[MOST_DIMENSIONS], out_sizes[MOST_DIMENSIONS];
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
    for (int64_t i = dimensions - 1, stride = 1; i >= 0; i--) {
        out_sizes[i] = i == dimensions - 1 ? N : sizes[i];
        strides[i] = stride;
        stride *= out_sizes[i] ? out_sizes[i] : 1;
    }
    Handle out = NULL;
    void *at[MOST_TENSORS] = {NULL}, *out_at;
    for (int i = elements ? 0 : MOST_TENSORS; i < MOST_TENSORS; i++)
        if (tensors[i] && !(at[i] = address(tensors[i]))) return NULL;
    if (torch.empty_strided(dimensions, out_sizes, strides, dtype, 0, -1, &out)) return NULL;
    if (!elements) return out;
    int64_t M = elements / K;
    int threads = M * N * K >= torch.threaded ? torch.get_num_threads() : 1;
    int8_t *memory = take_scratch(torch.product_bytes(&weight, M, threads));
    if (!memory || torch.get_data_ptr(out, &out_at)) {
        torch.delete_tensor_object(out);
        return NULL;
    }
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
        torch.check_fail("product", "op.c", __LINE__,
                         "hf_trainweights::product: an input, a weight or a bias has another shape or dtype than the "
                         "program was compiled for, or its storage was freed");
    stack[0] = (Value)out;
}

static void run_bare_product(Value *stack, uint64_t arguments, uint64_t results) {
    (void)arguments, (void)results;
    run(stack, BARE_TENSORS);
}

static void run_product(Value *stack, uint64_t arguments, uint64_t results) {
    (void)arguments, (void)results;
    run(stack, OWN_TENSORS);
}

static void run_imported_product(Value *stack, uint64_t arguments, uint64_t results) {
    (void)arguments, (void)results;
    run(stack, MOST_TENSORS);
}

// Register the ops, and return 0 if it succeeds. A second call changes the functions of the library of products alone.
int32_t register_op(const Torch *functions) {
    static bool registered = false;
    torch = *functions;
    if (registered) return 0;
    void *library = NULL;
    if (pthread_key_create(&scratch_key, free)) return 1;
    if (torch.library_init_impl("hf_trainweights", "CPU", __FILE__, __LINE__, &library)) return 2;
    if (torch.library_impl(library, "bare_product", run_bare_product)) return 3;
    if (torch.library_impl(library, "product", run_product)) return 4;
    if (torch.library_impl(library, "imported_product", run_imported_product)) return 5;
    registered = true;
    return 0;
}
