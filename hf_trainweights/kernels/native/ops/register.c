// Registers the ops, and holds the functions that they call.
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "torch.h"

Torch torch;
static pthread_key_t scratch_key;
static _Thread_local struct { int8_t *memory; int64_t bytes; } scratch;

int32_t abi(void) { return OP_ABI; }

// It is kept from call to call, because the system maps fresh memory page by page.
int8_t *take_scratch(int64_t bytes) {
    if (scratch.bytes < bytes) {
        free(scratch.memory);
        scratch.memory = malloc(bytes);
        scratch.bytes = scratch.memory ? bytes : 0;
        pthread_setspecific(scratch_key, scratch.memory);  // freed when the thread ends
    }
    return scratch.memory;
}

void *address_of(Handle tensor) {
    bool contiguous = false;
    void *data = NULL;
    if (torch.is_contiguous(tensor, &contiguous) || !contiguous || torch.get_data_ptr(tensor, &data)) return NULL;
    return data;
}

Handle new_tensor(int64_t dimensions, const int64_t *sizes, int32_t dtype, void **elements) {
    int64_t strides[MOST_DIMENSIONS];
    Handle out = NULL;
    for (int64_t i = dimensions - 1, stride = 1; i >= 0; i--) {
        strides[i] = stride;
        stride *= sizes[i] ? sizes[i] : 1;
    }
    if (torch.empty_strided(dimensions, sizes, strides, dtype, 0, -1, &out)) return NULL;
    if (!torch.get_data_ptr(out, elements)) return out;
    torch.delete_tensor_object(out);
    return NULL;
}

int dtype_of(Handle tensor) {
    int32_t dtype;
    if (torch.get_dtype(tensor, &dtype)) return -1;
    for (int i = 0; i < 3; i++)
        if (dtype == torch.dtypes[i]) return i;
    return -1;
}

// Let the ops call these functions.
void set_functions(const Torch *functions) { torch = *functions; }

// Register an op, whose schema Python has defined, and return 0 if it succeeds. Call it once in a process for each op.
int32_t register_op(const char *name) {
    static const struct { const char *name; Kernel kernel; } OPS[] = {
        {"bare_product", run_bare_product},
        {"product", run_product},
        {"imported_product", run_imported_product},
        {"store_codes", run_store_codes},
        {"attend_to_codes", run_attend_to_codes},
    };
    static void *library = NULL;
    if (!library) {
        if (pthread_key_create(&scratch_key, free)) return 1;
        if (torch.library_init_impl("hf_trainweights", "CPU", "register.c", __LINE__, &library)) return 2;
    }
    for (size_t i = 0; i < sizeof OPS / sizeof *OPS; i++)
        if (!strcmp(name, OPS[i].name)) return torch.library_impl(library, name, OPS[i].kernel) ? 3 : 0;
    return 4;
}
