"""Attention to tokens that are stored as integers, on a GPU, written in Triton; `cuda_attention` launches the kernels.

The tokens are divided into sections. A program attends to one section for all rows of queries that share a head of
keys, and a second kernel adds the sections up. The order of codes is that of `native/attention.c`, read in words of 32
bits. Tensor cores multiply 16-bit floats, and nothing that they get is rounded by more than 2**-24 of the largest
number of its row: a code is exact as float16, also times a scale of 4 bits; a query or a probability is two of them, a
high and a low part.
"""

# Arguments without a type are pointers and 32-bit integers; a checker knows neither them nor Triton's constants.
# pyright: reportMissingImports=false, reportAssignmentType=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl


@triton.jit
def unpack(words, BITS: tl.constexpr):
    """Return the codes of words `[R, W]` as float16 `[R, W * 32 / BITS]`, in the order of `native/attention.c`."""
    R: tl.constexpr = words.shape[0]
    COUNT: tl.constexpr = words.shape[1] * (32 // BITS)
    # Each join adds a last dimension. The last join's is the lowest bit of the code's number within the word.
    if BITS == 4:
        halves = tl.join(words, words >> 4)  # the nibbles of four low halves come before those of the high ones
        pairs = tl.join(halves, halves >> 16)
        nibbles = tl.join(pairs, pairs >> 8).reshape(R, COUNT) & 15
        # These bits above a nibble make it the float16 1024 + nibble.
        codes = (nibbles | 0x6400).to(tl.int16).to(tl.float16, bitcast=True) - 1032.0
    else:
        pairs = tl.join(words, words >> 16)
        codes = tl.join(pairs, pairs >> 8).reshape(R, COUNT).to(tl.int8).to(tl.float16)
    return codes


@triton.jit
def load_scales(scales, token, counts, COLUMNS: tl.constexpr, BITS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return a factor for each token, float32 `[T]`, and one for its codes of 4 bits, float16 `[T, BLOCK_D / 32]`.

    Their product is the scale, and 0 for tokens that do not count. A token of 8 bits has one scale, the first factor. A
    token of 4 bits has a scale for each 32 columns: its first factor is a power of two, near the largest of them, so
    that the second one is exact.
    """
    if BITS == 8:
        first = tl.load(scales + token, mask=counts, other=0).to(tl.float32)
        second = 1.0
    else:
        GROUPS: tl.constexpr = COLUMNS // 32
        group = tl.arange(0, BLOCK_D // 32)
        address = scales + (token // 16 * (GROUPS * 16) + token % 16)[:, None] + group[None, :] * 16
        scale = tl.load(address, mask=counts[:, None] & (group < GROUPS)[None, :], other=0).to(tl.float32)
        exponent = scale.to(tl.int32, bitcast=True) & 0x7F800000
        # A scale that is not finite is left as it is, and the others of its token need no power of two.
        largest = tl.max(tl.where(exponent == 0x7F800000, 0, exponent), axis=1)
        largest = tl.minimum(tl.maximum(largest, 0x00800000), 0x7E000000)  # the inverse is a number, too
        first = largest.to(tl.float32, bitcast=True)
        second = (scale * (0x7F000000 - largest).to(tl.float32, bitcast=True)[:, None]).to(tl.float16)
    return first, second


@triton.jit
def scaled(codes, factor, BITS: tl.constexpr):
    """Return codes `[T, D]` times the second factor of `load_scales`."""
    if BITS == 4:
        T: tl.constexpr = codes.shape[0]
        D: tl.constexpr = codes.shape[1]
        codes = (codes.reshape(T, D // 32, 32) * factor[:, :, None]).reshape(T, D)
    return codes


@triton.jit
def load_keys(codes, token, stop, COLUMNS: tl.constexpr, BITS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return the codes of keys `[T, BLOCK_D]`. Blocks behind the last token are not read: there may be none."""
    WORDS: tl.constexpr = COLUMNS * BITS // 32
    word = tl.arange(0, BLOCK_D * BITS // 32)
    address = codes + (token // 16 * (WORDS * 16) + token % 16)[:, None] + word[None, :] * 16
    fits = (token < tl.cdiv(stop, 16) * 16)[:, None] & (word < WORDS)[None, :]
    return unpack(tl.load(address, mask=fits, other=0), BITS)


@triton.jit
def load_values(codes, start, stop, COLUMNS: tl.constexpr, BITS: tl.constexpr, T: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return the codes of T values from `start` on, `[T, BLOCK_D]`; a word holds several tokens of one column."""
    COUNT: tl.constexpr = 32 // BITS
    line, column = start // COUNT + tl.arange(0, T // COUNT), tl.arange(0, BLOCK_D)
    address = codes + line[:, None] * COLUMNS + column[None, :]
    fits = (line < tl.cdiv(stop, 16) * (16 // COUNT))[:, None] & (column < COLUMNS)[None, :]
    codes = unpack(tl.load(address, mask=fits, other=0), BITS)
    return codes.reshape(T // COUNT, BLOCK_D, COUNT).permute(0, 2, 1).reshape(T, BLOCK_D)


@triton.jit
def in_two_parts(x):
    """Return for rows x `[M, K]` a high and a low part as float16, and the unit `[M]` that multiplies their sum.

    A row with a number that is not finite has parts that are NaN.
    """
    top = tl.maximum(tl.max(tl.abs(x), axis=1), 1.1754944e-38)  # 2**-126
    x = x * (1.0 / top)[:, None]
    high = x.to(tl.float16)
    return high, (x - high.to(tl.float32)).to(tl.float16), top


@triton.jit
def load_queries(query, channels, head, m, M, COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return the rows m of a head's queries as float32, times the magnitudes of the keys' channels if there are any."""
    d = tl.arange(0, BLOCK_D)
    fits = (m < M)[:, None] & (d < COLUMNS)[None, :]
    x = tl.load(query + (head.to(tl.int64) * M + m)[:, None] * COLUMNS + d[None, :], mask=fits, other=0)
    x = x.to(tl.float32)
    if channels is not None:
        magnitudes = channels + (head.to(tl.int64) * 2 + 1) * COLUMNS + d
        x *= tl.load(magnitudes, mask=d < COLUMNS, other=0)[None, :]
    return x


@triton.jit
def at_head(codes, scales, head, capacity, COLUMNS: tl.constexpr, BITS: tl.constexpr):
    """Return pointers to the codes and the scales of a head."""
    block = head.to(tl.int64) * capacity
    GROUPS: tl.constexpr = COLUMNS // 32 if BITS == 4 else 1
    return codes + block * (COLUMNS * BITS // 2), scales + block * (16 * GROUPS)


@triton.jit
def multiply(high, low, unit, codes):
    """Return the product of rows in two parts with codes."""
    return tl.dot(low, codes, tl.dot(high, codes)) * unit[:, None]


@triton.jit
def exponentials_of(scores, top):
    """Return the exponentials of scores `[M, T]` less the largest of their row so far.

    Also the factors `[M]` that bring earlier ones down to it from `top`, and this largest score itself.
    """
    largest = tl.maximum(top, tl.max(scores, axis=1))
    # While a row has met no token that counts, all its exponentials are 0.
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    return tl.exp(scores - shift[:, None]), tl.exp(top - shift), largest


@triton.jit
def store_sums(sums, tops, totals, line, fits, out, top, total, COLUMNS: tl.constexpr):
    """Store the results of a section for rows that fit, each row at its line.

    The results are sums `[lines, COLUMNS]` of values times the exponentials of scores less the largest score, and
    `[lines]` this score and the sum of the exponentials.
    """
    v = tl.arange(0, out.shape[1])
    tl.store(sums + line[:, None] * COLUMNS + v[None, :], out, mask=fits[:, None] & (v < COLUMNS)[None, :])
    tl.store(tops + line, top, mask=fits)
    tl.store(totals + line, total, mask=fits)


@triton.jit
def mask_lines(head, m, heads, shared, rows, batch_step, head_step, row_step):
    """Return where the mask of row m begins: that of row m % rows of a query head that shares the head of keys."""
    query_head = head % heads * shared + m // rows
    line = head // heads * batch_step.to(tl.int64) + query_head * head_step.to(tl.int64)
    return line + m % rows * row_step.to(tl.int64)


@triton.jit
def masked(scores, allowed, mask, lines, steps):
    """Return scores `[M, T]` plus a mask of floats, and the tokens that `allowed` and a mask of bytes both allow."""
    values = tl.load(mask + lines[:, None] + steps[None, :], mask=allowed, other=0)
    if mask.dtype.element_ty == tl.uint8:
        allowed = allowed & (values != 0)
    else:
        scores += values.to(tl.float32)
    return scores, allowed


# These arguments change from call to call, and a kernel compiled for one of their values is no faster.
_CHANGING = [
    *("first", "stop", "capacity", "section_blocks", "heads", "shared", "rows"),
    *("batch_step", "head_step", "row_step", "token_step"),
]


@triton.jit(do_not_specialize=_CHANGING)
def attend_to_section(
    query,
    keys,
    key_scales,
    channels,
    values,
    value_scales,
    mask,
    sums,
    tops,
    totals,
    scaling,
    first,
    stop,
    capacity,
    section_blocks,
    heads,
    shared,
    rows,
    batch_step,
    head_step,
    row_step,
    token_step,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    KEY_COLUMNS: tl.constexpr,
    STORED_KEY_COLUMNS: tl.constexpr,
    STORED_VALUE_COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Attend to section s of head h by program (h, s), for all its rows `[shared, rows]` of queries."""
    head, section = tl.program_id(0), tl.program_id(1)
    M, m = shared * rows, tl.arange(0, BLOCK_M)
    high, low, unit = in_two_parts(load_queries(query, channels, head, m, M, KEY_COLUMNS, BLOCK_K))
    keys, key_scales = at_head(keys, key_scales, head, capacity, STORED_KEY_COLUMNS, KEY_BITS)
    values, value_scales = at_head(values, value_scales, head, capacity, STORED_VALUE_COLUMNS, VALUE_BITS)
    start = (first // BLOCK_T + section * section_blocks) * BLOCK_T
    lines = mask_lines(head, m, heads, shared, rows, batch_step, head_step, row_step)
    out, total = tl.zeros([BLOCK_M, BLOCK_V], tl.float32), tl.zeros([BLOCK_M], tl.float32)
    top = total - float("inf")
    for at in range(start, tl.minimum(start + section_blocks * BLOCK_T, stop), BLOCK_T):
        token = at + tl.arange(0, BLOCK_T)
        counts = (token >= first) & (token < stop)
        factor, factors = load_scales(key_scales, token, counts, STORED_KEY_COLUMNS, KEY_BITS, BLOCK_K)
        codes = load_keys(keys, token, stop, STORED_KEY_COLUMNS, KEY_BITS, BLOCK_K)
        scores = multiply(high, low, unit * scaling, scaled(codes, factors, KEY_BITS).trans()) * factor[None, :]
        allowed = counts[None, :] & (m < M)[:, None]
        if mask is not None:
            scores, allowed = masked(scores, allowed, mask, lines, (token - first).to(tl.int64) * token_step)
        exponentials, shrunk, top = exponentials_of(tl.where(allowed, scores, float("-inf")), top)
        total = total * shrunk + tl.sum(exponentials, axis=1)
        factor, factors = load_scales(value_scales, token, counts, STORED_VALUE_COLUMNS, VALUE_BITS, BLOCK_V)
        codes = load_values(values, at, stop, STORED_VALUE_COLUMNS, VALUE_BITS, BLOCK_T, BLOCK_V)
        upper, lower, step = in_two_parts(exponentials * factor[None, :])
        out = out * shrunk[:, None] + multiply(upper, lower, step, scaled(codes, factors, VALUE_BITS))
    line = (head.to(tl.int64) * tl.num_programs(1) + section) * M + m
    store_sums(sums, tops, totals, line, m < M, out, top, total, STORED_VALUE_COLUMNS)


@triton.jit(do_not_specialize=["sections", "M"])
def add_attended_sections(
    sums,
    tops,
    totals,
    out,
    sections,
    M,
    COLUMNS: tl.constexpr,
    STORED_COLUMNS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Add the sections of row m of head h up by program (h, m), and write out `[heads, M, COLUMNS]`."""
    head, m = tl.program_id(0).to(tl.int64), tl.program_id(1)
    s, v = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_V)
    line = (head * sections + s) * M + m
    top = tl.load(tops + line, mask=s < sections, other=float("-inf"))
    largest = tl.max(top, axis=0)
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.sum(tl.exp(top - shift) * tl.load(totals + line, mask=s < sections, other=0), axis=0)
    result = tl.zeros([BLOCK_V], tl.float32)
    for section in range(sections):
        at = (head * sections + section) * M + m
        part = tl.load(sums + at * STORED_COLUMNS + v, mask=v < STORED_COLUMNS, other=0)
        result += part * tl.exp(tl.load(tops + at) - shift)
    # The sums of a row that may attend to no token are 0.
    result /= tl.where(total == 0, 1.0, total)
    tl.store(out + (head * M + m) * COLUMNS + v, result.to(out.dtype.element_ty), mask=v < COLUMNS)
