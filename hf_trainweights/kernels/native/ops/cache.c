// Two ops on a layer of a cache whose keys and values are integers: `store_codes` appends tokens, `attend_to_codes`
// attends to some. They have the arguments of the ops `store_tokens` and `attend` of cache/programs.py. C serves a token
// after a prompt; these two, in Python, serve all else: more room, a window that moves, tensors of other orders.
#include <string.h>

#include "torch.h"

// The keys or the values of a layer, as `StoredTokens` of kernels/tokens.py has them.
typedef struct {
    uint8_t *codes;         // NULL if C cannot read them
    uint16_t *scale;
    const float *channels;  // or NULL
    int64_t batch, heads;
    int64_t capacity;       // blocks that a head has room for
    int64_t columns, bits;
} Stored;

// The record of a layer, a tensor that Python writes: `cache/programs.py`.
typedef struct {
    int64_t number;  // by which Python finds the layer
    Stored keys, values;
} Layer;

// The arguments of the ops, in order.
enum { KEYS, VALUES, STORED_LAYER, DROPPED, AT };
enum { QUERY, ORDER, READ_LAYER, COLUMNS, COUNT, MASK, IS_CAUSAL, SCALE };

// Let the op in Python serve instead. The dispatcher takes the arguments, and leaves the result in their place.
static void run_in_python(const char *op, Value *stack) {
    // Raises a RuntimeError.
    if (torch.call_dispatcher(op, "", stack))
        torch.check_fail("cache", "cache.c", __LINE__,
                         "hf_trainweights: a compiled program could not store tokens in a KVCache or attend to them; "
                         "PyTorch has logged the error");
}

static const Layer *layer_of(Value tensor) { return address_of((Handle)tensor); }

// Return the address of new tokens [batch][heads][n][columns] that C can store; NULL if it cannot.
static const void *new_tokens(Handle x, const Stored *stored, int64_t *count) {
    int64_t dimensions, *sizes;
    if (dtype_of(x) < 0 || torch.get_dim(x, &dimensions) || dimensions != 4 || torch.get_sizes(x, &sizes)) return NULL;
    if (sizes[0] != stored->batch || sizes[1] != stored->heads || sizes[3] != stored->columns) return NULL;
    *count = sizes[2];
    return stored->codes ? address_of(x) : NULL;
}

static void store(Handle x, const void *from, const Stored *stored, int is_key, int64_t count, int64_t at) {
    int64_t heads = stored->batch * stored->heads;
    int threads = heads * count * stored->columns >= torch.threaded_store ? torch.get_num_threads() : 1;
    torch.store_tokens(from, dtype_of(x), heads, count, stored->columns, (int)stored->bits, is_key, stored->channels,
                       stored->codes, stored->scale, stored->capacity, at, threads);
}

// Return how many tokens there is room for.
static int64_t least_room(const Layer *layer) {
    int64_t keys = layer->keys.capacity, values = layer->values.capacity;
    return (keys < values ? keys : values) * BLOCK;
}

// Store tokens, and return their number afterwards as a tensor; NULL if Python has to do it.
static Handle store_codes(const Value *stack) {
    const Layer *layer = layer_of(stack[STORED_LAYER]);
    int64_t counts[2], at = (int64_t)stack[AT];
    void *order;
    if (!layer || stack[DROPPED]) return NULL;
    const void *keys = new_tokens((Handle)stack[KEYS], &layer->keys, counts);
    const void *values = new_tokens((Handle)stack[VALUES], &layer->values, counts + 1);
    if (!keys || !values || counts[0] != counts[1]) return NULL;
    int64_t end = at + counts[0];
    if (end > least_room(layer)) return NULL;
    Handle out = new_tensor(0, NULL, (int32_t)torch.int64, &order);
    if (!out) return NULL;
    store((Handle)stack[KEYS], keys, &layer->keys, 1, counts[0], at);
    store((Handle)stack[VALUES], values, &layer->values, 0, counts[0], at);
    *(int64_t *)order = end;
    return out;
}

void run_store_codes(Value *stack, uint64_t arguments, uint64_t results) {
    (void)arguments, (void)results;
    Handle out = store_codes(stack);
    if (!out) {
        run_in_python("hf_trainweights::store_tokens", stack);
        return;
    }
    for (int i = KEYS; i <= STORED_LAYER; i++) torch.delete_tensor_object((Handle)stack[i]);
    stack[0] = (Value)out;
}

// Describe a mask that broadcasts to [batch][query heads][rows][tokens]. Return its address; NULL if C cannot read it.
static const uint8_t *read_mask(Handle mask, const int64_t shape[4], Attention *call) {
    int64_t dimensions, *sizes, *strides, steps[4] = {0, 0, 0, 0};
    int32_t dtype;
    void *data;
    if (torch.get_dim(mask, &dimensions) || dimensions < 1 || dimensions > 4) return NULL;
    if (torch.get_sizes(mask, &sizes) || torch.get_strides(mask, &strides) || torch.get_dtype(mask, &dtype)) return NULL;
    if (dtype != torch.boolean && dtype != torch.dtypes[FLOAT32]) return NULL;
    for (int i = 0; i < 4; i++) {
        int64_t own = i - (4 - dimensions), size = own < 0 ? 1 : sizes[own];
        if (size != shape[i] && size != 1) return NULL;
        if (size != 1) steps[i] = strides[own];
    }
    if (shape[3] != 1 && steps[3] != 1) return NULL;
    call->mask = dtype == torch.boolean ? BOOL_MASK : FLOAT_MASK;
    call->mask_batch = steps[0], call->mask_head = steps[1], call->mask_row = steps[2];
    return torch.get_data_ptr(mask, &data) ? NULL : data;
}

// Return the attention; NULL if Python has to compute it.
static Handle attend_to_codes(const Value *stack) {
    const Layer *layer = layer_of(stack[READ_LAYER]);
    const Stored *keys = &layer->keys, *values = &layer->values;
    Handle query = (Handle)stack[QUERY];
    const int64_t *stop = address_of((Handle)stack[ORDER]);
    int64_t dimensions, *sizes;
    const uint8_t *mask = NULL;
    void *out_at;
    double scale;
    if (!layer || !stop || (bool)stack[IS_CAUSAL] || !keys->codes || !values->codes) return NULL;
    if (torch.get_dim(query, &dimensions) || dimensions != 4 || torch.get_sizes(query, &sizes)) return NULL;
    if (sizes[0] != keys->batch || sizes[1] % keys->heads || sizes[3] != keys->columns) return NULL;
    memcpy(&scale, stack + SCALE, sizeof scale);
    int64_t count = (int64_t)stack[COUNT], shared = sizes[1] / keys->heads;
    int64_t work = sizes[0] * sizes[1] * sizes[2] * count * sizes[3];
    Attention call = {.batch = keys->batch, .heads = keys->heads, .shared = shared, .rows = sizes[2],
                      .key_columns = sizes[3], .value_columns = values->columns, .first = *stop - count,
                      .end = *stop, .capacity = keys->capacity, .scaling = (float)scale,
                      .key_bits = (int32_t)keys->bits, .value_bits = (int32_t)values->bits,
                      .dtype = dtype_of(query), .threads = work >= torch.threaded ? torch.get_num_threads() : 1};
    if (call.dtype < 0 || call.first < 0 || *stop > call.capacity * BLOCK) return NULL;
    if (shared * call.rows > torch.attention_rows || values->capacity != call.capacity) return NULL;
    const void *query_at = address_of(query);
    // PyTorch hands an optional tensor over as the address of a Value, or 0 for None.
    const int64_t shape[4] = {sizes[0], sizes[1], sizes[2], count};
    if (stack[MASK] && !(mask = read_mask((Handle) * (Value *)stack[MASK], shape, &call))) return NULL;
    int8_t *memory = query_at ? take_scratch(torch.attention_bytes(&call)) : NULL;
    const int64_t out_sizes[4] = {sizes[0], sizes[1], sizes[2], call.value_columns};
    Handle out = memory ? new_tensor(4, out_sizes, (int32_t)torch.dtypes[call.dtype], &out_at) : NULL;
    if (out)
        torch.attend(&call, query_at, keys->codes, keys->scale, keys->channels, values->codes,
                     values->scale, mask, out_at, (char *)memory);
    return out;
}

void run_attend_to_codes(Value *stack, uint64_t arguments, uint64_t results) {
    (void)arguments, (void)results;
    Handle out = attend_to_codes(stack);
    if (!out) {
        run_in_python("hf_trainweights::attend", stack);
        return;
    }
    for (int i = QUERY; i <= READ_LAYER; i++) torch.delete_tensor_object((Handle)stack[i]);
    if (stack[MASK]) {
        torch.delete_tensor_object((Handle) * (Value *)stack[MASK]);
        torch.delete((void *)stack[MASK]);
    }
    stack[0] = (Value)out;
}
