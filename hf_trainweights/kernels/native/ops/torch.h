// Words that the ops for PyTorch's dispatcher share. A compiled program calls such an op without a line of Python.
//
// Ops are registered by functions that libtorch exports for C, the stable ABI of PyTorch from 2.8 on, which
// torch/csrc/inductor/aoti_torch/c/shim.h declares. Python looks them up and hands over their addresses, so no header
// of PyTorch is needed, and one library fits all its versions.
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../attention.h"
#include "../product.h"

// The version of `Torch`, of `Layer` and of the ops' arguments.
#define OP_ABI 4

typedef uint64_t Value;   // an argument or a result of an op: a number, or the address of a tensor or of a Value
typedef void *Handle;     // a tensor
typedef void (*Kernel)(Value *stack, uint64_t arguments, uint64_t results);

// Functions of libtorch, C++'s `operator delete`, functions of the library of products, and numbers.
// `hf_trainweights/kernels/native_ops.py` fills it in this order.
typedef struct {
    int32_t (*get_dtype)(Handle, int32_t *);
    int32_t (*get_dim)(Handle, int64_t *);
    int32_t (*get_sizes)(Handle, int64_t **);
    int32_t (*get_strides)(Handle, int64_t **);
    int32_t (*get_numel)(Handle, int64_t *);
    int32_t (*is_contiguous)(Handle, bool *);
    int32_t (*get_data_ptr)(Handle, void **);
    int32_t (*delete_tensor_object)(Handle);
    int32_t (*empty_strided)(int64_t, const int64_t *, const int64_t *, int32_t, int32_t, int32_t, Handle *);
    int32_t (*library_init_impl)(const char *, const char *, const char *, uint32_t, void **);
    int32_t (*library_impl)(void *, const char *, Kernel);
    int32_t (*call_dispatcher)(const char *, const char *, Value *);
    int (*get_num_threads)(void);
    void (*check_fail)(const char *, const char *, uint32_t, const char *);
    void (*delete)(void *);
    void (*product)(const Weight *, const void *, const uint8_t *, const void *, const void *, void *, int64_t, int,
                    int8_t *, const void *, const void *, const void *, const void *, const void *);
    int64_t (*product_bytes)(const Weight *, int64_t, int);
    void (*store_tokens)(const void *, int, int64_t, int64_t, int64_t, int, int, const float *, uint8_t *, uint16_t *,
                         int64_t, int64_t, int);
    int64_t (*attention_bytes)(const Attention *);
    void (*attend)(const Attention *, const void *, const uint8_t *, const uint16_t *, const float *, const uint8_t *,
                   const uint16_t *, const uint8_t *, void *, char *);
    int64_t dtypes[3];       // PyTorch's numbers of FLOAT32, BFLOAT16 and FLOAT16
    int64_t int64, boolean;  // and of the dtypes of integers and of masks
    int64_t threaded;        // products and attentions of so many multiplications take several threads
    int64_t threaded_store;  // as many numbers to store do
    int64_t attention_rows;  // query rows of a head of keys up to which `attend` is fast
} Torch;

extern Torch torch;

enum { MOST_DIMENSIONS = 8 };

// Return scratch memory of this thread; NULL if there is none.
int8_t *take_scratch(int64_t bytes);
// Return the address of a tensor's elements; NULL if its storage was freed or its elements are not contiguous.
void *address_of(Handle tensor);
// Return a new contiguous tensor on the CPU and the address of its elements; NULL if there is no memory.
Handle new_tensor(int64_t dimensions, const int64_t *sizes, int32_t dtype, void **elements);
// Return FLOAT32, BFLOAT16 or FLOAT16 for such a tensor, else -1.
int dtype_of(Handle tensor);

// The kernels of the ops.
void run_bare_product(Value *stack, uint64_t arguments, uint64_t results);
void run_product(Value *stack, uint64_t arguments, uint64_t results);
void run_imported_product(Value *stack, uint64_t arguments, uint64_t results);
void run_store_codes(Value *stack, uint64_t arguments, uint64_t results);
void run_attend_to_codes(Value *stack, uint64_t arguments, uint64_t results);
