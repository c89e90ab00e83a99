"""Kernels for int8 and int4 weights on a GPU, written in Triton; `cuda` chooses and launches them.

They read the codes as they are on disk, make weights of them in registers, and sum in float32. The order of summation
is the same in every run.
"""

# Arguments without a type are pointers and 32-bit integers; a checker knows neither them nor Triton's constants.
# pyright: reportMissingImports=false, reportAssignmentType=false, reportOperatorIssue=false

import triton
import triton.language as tl


@triton.jit
def load_stored(qdata, n, column, N, columns, row_stride):
    """Return elements `[n, column]` of stored codes `[N, columns]`, 0 past the end."""
    mask = (n < N)[:, None] & (column < columns)[None, :]
    return tl.load(qdata + n.to(tl.int64)[:, None] * row_stride + column[None, :], mask=mask, other=0)


@triton.jit
def load_codes(qdata, n, block, N, K, row_stride, BITS: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return codes `[n, BLOCK_K]`, int8 codes as they are, int4 codes as float32; past the end any codes."""
    PER_ELEMENT: tl.constexpr = 8 if BITS == 4 else 1
    column = block * (BLOCK_K // PER_ELEMENT) + tl.arange(0, BLOCK_K // PER_ELEMENT)
    codes = load_stored(qdata, n, column, N, K // PER_ELEMENT, row_stride)
    if BITS == 4:
        # Each join adds a last dimension. The last join's is the lowest bit of the nibble's position in the word.
        codes = tl.join(codes, codes >> 16)
        codes = tl.join(codes, codes >> 8)
        codes = tl.join(codes, codes >> 4).reshape(n.shape[0], BLOCK_K)
        # These bits are the float32 2**23 + nibble: a subtraction instead of a conversion, which is slower by far.
        codes = ((codes & 15) | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + 8)
    return codes


@triton.jit
def load_scales(scale, n, k, N, K, G, GROUP: tl.constexpr):
    """Return the scales `[n, k]` of columns k, 0 past the end. GROUP is 0 if a row has one scale."""
    group = k // GROUP if GROUP else k * 0
    mask = (n < N)[:, None] & (k < K)[None, :]
    return tl.load(scale + n.to(tl.int64)[:, None] * G + group[None, :], mask=mask, other=0)


@triton.jit
def and_or(bits, MASK: tl.constexpr, OTHER: tl.constexpr):
    """Return `bits & MASK | OTHER` of int32 by one instruction; a compiler would take two."""
    operands = [bits, MASK, OTHER]
    return tl.inline_asm_elementwise("lop3.b32 $0, $1, $2, $3, 0xEA;", "=r,r,r,r", operands, tl.int32, True, 1)


@triton.jit
def multiply_add(first, second, third, dtype: tl.constexpr):
    """Return `first * second + third` of pairs of 16-bit floats, each pair in an int32, rounded once."""
    operands = [first, second, third]
    if dtype == tl.bfloat16:
        return tl.inline_asm_elementwise("fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", operands, tl.int32, True, 1)
    return tl.inline_asm_elementwise("fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r", operands, tl.int32, True, 1)


@triton.jit
def add_nibbles(sums, words, J: tl.constexpr, x, mask):
    """Return `sums + (nibble J of each word - 8) * x[J]`; J counts the nibbles of the low half, 0 to 3."""
    # The nibble is not shifted: with these bits above it, it is the float32 2**23 + nibble * 16**J.
    codes = and_or(words, 15 << (4 * J), 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + (8 << (4 * J)))
    factors = tl.load(x + J, mask=mask, other=0).to(tl.float32) * (1.0 / (1 << (4 * J)))
    return sums + codes * factors[None, :]


@triton.jit
def multiply_row(
    x,
    qdata,
    scale,
    bias,
    out,
    N,
    K,
    row_stride,
    G,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Multiply one row x `[K]`; each program takes BLOCK_N rows of the weight and all of K."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Eight columns share a scale in every format that comes here, so the scale is applied to their sum.
    CHUNKS: tl.constexpr = BLOCK_K // 8
    sums = tl.zeros([BLOCK_N, CHUNKS], tl.float32)
    for block in range(tl.cdiv(K, BLOCK_K)):
        if BITS == 4:
            column = block * CHUNKS + tl.arange(0, CHUNKS)
            words = load_stored(qdata, n, column, N, K // 8, row_stride)
            low, fits = x + column * 8, column < K // 8
            chunks = tl.zeros([BLOCK_N, CHUNKS], tl.float32)
            for j in tl.static_range(4):
                chunks = add_nibbles(chunks, words, j, low, fits)
                chunks = add_nibbles(chunks, words >> 16, j, low + 4, fits)
        else:
            codes = load_codes(qdata, n, block, N, K, row_stride, BITS, BLOCK_K).to(tl.float32)
            k = block * BLOCK_K + tl.arange(0, BLOCK_K)
            factors = tl.load(x + k, mask=k < K, other=0).to(tl.float32)
            chunks = tl.sum((codes * factors[None, :]).reshape(BLOCK_N, CHUNKS, 8), axis=2)
        if GROUP >= 32:
            # Four chunks share a scale, which is loaded once.
            scales = load_scales(scale, n, block * BLOCK_K + tl.arange(0, CHUNKS // 4) * 32, N, K, G, GROUP)
            scales = tl.broadcast_to(scales[:, :, None], (BLOCK_N, CHUNKS // 4, 4)).reshape(BLOCK_N, CHUNKS)
            chunks *= scales.to(tl.float32)
        elif GROUP:
            chunks *= load_scales(scale, n, block * BLOCK_K + tl.arange(0, CHUNKS) * 8, N, K, G, GROUP).to(tl.float32)
        sums += chunks
    total = tl.sum(sums, axis=1)
    if not GROUP:
        total *= tl.load(scale + n.to(tl.int64) * G, mask=n < N, other=0).to(tl.float32)
    if bias is not None:
        total += tl.load(bias + n, mask=n < N, other=0).to(tl.float32)
    tl.store(out + n, total.to(out.dtype.element_ty), mask=n < N)


@triton.jit
def unpack_pair(words, scales, J: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, dtype: tl.constexpr):
    """Return two codes of each word times their scales, as two 16-bit floats in an int32.

    They are code J of the low half of the word and code J of its high half; `scales` holds pairs of 16-bit floats.
    A code is put into the lowest bits of a constant float whose last bit is worth 1, which is subtracted afterwards.
    """
    words = words >> (BITS * J)
    if BITS == 4 and dtype == tl.bfloat16:  # 128 + nibble, less 136
        pair = multiply_add(and_or(words, 0x000F000F, 0x43004300), 0x3F803F80, 0xC308C308, dtype)
    elif BITS == 4:  # 1024 + nibble, less 1032
        pair = multiply_add(and_or(words, 0x000F000F, 0x64006400), 0x3C003C00, 0xE408E408, dtype)
    elif dtype == tl.bfloat16:  # 128 + the lower seven bits, less 128 or, where the sign is set, 256
        sign = and_or(words, 0x00800080, 0x43004300)
        pair = multiply_add(sign, 0xBF80BF80, and_or(words, 0x007F007F, 0x43004300), dtype)
    else:  # 1024 + 128 + code, less 1152
        pair = multiply_add(and_or(words ^ 0x00800080, 0x00FF00FF, 0x64006400), 0x3C003C00, 0xE480E480, dtype)
    return multiply_add(pair, scales, 0x80008000, dtype) if GROUP else pair


@triton.jit
def unpack_tile(words, scales, BITS: tl.constexpr, GROUP: tl.constexpr, dtype: tl.constexpr):
    """Return weights `[N, K]` of words `[N, K * BITS / 32]`, their columns in the order of `order_rows`.

    In this order all codes of a word are multiplied by the thread that unpacks it, so unpacked weights need not pass
    through shared memory.
    """
    first = unpack_pair(words, scales, 0, BITS, GROUP, dtype)
    second = unpack_pair(words, scales, 1, BITS, GROUP, dtype)
    if BITS == 4:
        third = unpack_pair(words, scales, 2, BITS, GROUP, dtype)
        fourth = unpack_pair(words, scales, 3, BITS, GROUP, dtype)
        pairs = tl.join(tl.join(first, third), tl.join(second, fourth))
    else:
        pairs = tl.join(first, second)
    low, high = pairs.to(tl.int16), (pairs >> 16).to(tl.int16)
    weight = tl.join(low.to(dtype, bitcast=True), high.to(dtype, bitcast=True))
    if BITS == 4:
        weight = weight.reshape(words.shape[0], words.shape[1] // 4, 4, 2, 2, 2).permute(0, 1, 3, 4, 2, 5)
    else:
        weight = weight.reshape(words.shape[0], words.shape[1] // 4, 4, 2, 2).permute(0, 1, 3, 2, 4)
    return weight.reshape(words.shape[0], words.shape[1] * (32 // BITS))


@triton.jit
def order_rows(x, BITS: tl.constexpr):
    """Return rows of x `[K, M]` in the order of `unpack_tile`.

    They are sorted by group of four words, then by position of the pair in its word, then by word, then by half.
    """
    K: tl.constexpr = x.shape[0]
    if BITS == 4:
        return x.reshape(K // 32, 4, 2, 2, 2, x.shape[1]).permute(0, 3, 4, 1, 2, 5).reshape(K, x.shape[1])
    return x.reshape(K // 16, 4, 2, 2, x.shape[1]).permute(0, 3, 1, 2, 4).reshape(K, x.shape[1])


# These two arguments change from call to call, and a kernel compiled for one of their values is no faster.
@triton.jit(do_not_specialize=["M", "section_blocks"])
def multiply_tiles(
    x,
    words,
    scale,
    bias,
    out,
    M,
    N,
    K,
    row_words,
    G,
    section_blocks,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Multiply 16-bit x `[M, K]` by tiles; program (i, j, s) writes tile (i, j) of out `[sections, M, N]` at section s.

    Section s is the sum over `section_blocks` blocks of columns. The weight is the left factor, because tensor cores
    take the left factor from registers, where codes become floats. A row's single scale multiplies its sum. If there
    are groups, the scales multiply the codes, which gives the weights of `dequantize`, rounded to the dtype of x.
    """
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    section = tl.program_id(2)
    rows = m.to(tl.int64)
    WORDS: tl.constexpr = BLOCK_K * BITS // 32
    SPAN: tl.constexpr = min(GROUP, BLOCK_K) if GROUP else BLOCK_K
    SPANS: tl.constexpr = BLOCK_K // SPAN
    first = section * section_blocks
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    # Triton's copies that run ahead of a loop do not take so few bytes, so the next block's scales are loaded by hand.
    scales = load_scales(scale, n, first * BLOCK_K + tl.arange(0, SPANS) * SPAN, N, K, G, GROUP)
    for block in range(first, min(first + section_blocks, tl.cdiv(K, BLOCK_K))):
        column = block * WORDS + tl.arange(0, WORDS)
        codes = load_stored(words, n, column, N, K * BITS // 32, row_words)
        k = block * BLOCK_K + tl.arange(0, BLOCK_K)
        inputs = tl.load(x + rows[None, :] * K + k[:, None], mask=(m < M)[None, :] & (k < K)[:, None], other=0)
        pairs = codes
        if GROUP:
            pairs = scales.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
            pairs = tl.broadcast_to((pairs | (pairs << 16))[:, :, None], (BLOCK_N, SPANS, WORDS // SPANS))
            pairs = pairs.reshape(BLOCK_N, WORDS)
            scales = load_scales(scale, n, (block + 1) * BLOCK_K + tl.arange(0, SPANS) * SPAN, N, K, G, GROUP)
        weight = unpack_tile(codes, pairs, BITS, GROUP, inputs.dtype)
        sums = tl.dot(weight, order_rows(inputs, BITS), sums)
    if not GROUP:
        sums *= tl.load(scale + n.to(tl.int64) * G, mask=n < N, other=0).to(tl.float32)[:, None]
    if bias is not None:
        sums += tl.load(bias + n, mask=n < N, other=0).to(tl.float32)[:, None]
    mask = (m < M)[None, :] & (n < N)[:, None]
    addresses = out + (section * M + rows)[None, :] * N + n[:, None]
    tl.store(addresses, sums.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["sections", "size"])
def add_sections(sums, bias, out, sections, size, N, BLOCK: tl.constexpr):
    """Add up sums `[sections, size]` and the bias of each column; `size` is the number of elements of out `[M, N]`."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    addresses = sums + index
    for _ in range(sections):
        total += tl.load(addresses, mask=index < size, other=0)
        addresses += size
    if bias is not None:
        total += tl.load(bias + index % N, mask=index < size, other=0).to(tl.float32)
    tl.store(out + index, total.to(out.dtype.element_ty), mask=index < size)


@triton.jit
def dequantize_tiles(
    qdata,
    scale,
    out,
    N,
    K,
    row_stride,
    G,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Write the weight `[N, K]`, each program a tile: code times scale in float32, rounded once."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    block = tl.program_id(1)
    CHUNKS: tl.constexpr = BLOCK_K // 8
    codes = load_codes(qdata, n, block, N, K, row_stride, BITS, BLOCK_K).to(tl.float32)
    scales = load_scales(scale, n, block * BLOCK_K + tl.arange(0, CHUNKS) * 8, N, K, G, GROUP).to(tl.float32)
    weight = (codes.reshape(BLOCK_N, CHUNKS, 8) * scales[:, :, None]).reshape(BLOCK_N, BLOCK_K)
    k = block * BLOCK_K + tl.arange(0, BLOCK_K)
    mask = (n < N)[:, None] & (k < K)[None, :]
    tl.store(out + n.to(tl.int64)[:, None] * K + k[None, :], weight.to(out.dtype.element_ty), mask=mask)


@triton.jit
def round_rows(x, codes, row_factors, K, smallest, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    """Write a row of x `[M, K]` as int8 or float8 codes up to LARGEST, and the row's factor to `row_factors`.

    The factor is the largest magnitude divided by LARGEST, or NaN if an element is not finite.
    """
    row = tl.program_id(0).to(tl.int64)
    top = 0.0
    not_finite = 0.0
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        values = tl.load(x + row * K + k, mask=k < K, other=0).to(tl.float32)
        top = tl.maximum(top, tl.max(tl.abs(values), axis=0))
        not_finite += tl.sum(values * 0.0, axis=0)
    factor = tl.maximum(top, smallest) * (1 / LARGEST) + not_finite
    tl.store(row_factors + row, factor)
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        values = tl.div_rn(tl.load(x + row * K + k, mask=k < K, other=0).to(tl.float32), factor)
        if codes.dtype.element_ty == tl.int8:
            # Adding 1.5 * 2**23 and taking it away rounds to the nearest integer, ties to the even one.
            values = (values + 12582912.0) - 12582912.0
        tl.store(codes + row * K + k, values.to(codes.dtype.element_ty), mask=k < K)


@triton.jit(do_not_specialize=["M"])
def multiply_codes(
    codes,
    row_factors,
    qdata,
    scale,
    bias,
    out,
    M,
    N,
    K,
    row_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """Write out `[M, N]`: codes `[M, K]` times int8 codes of a weight, a row's factor and a column's scale, plus bias.

    Integers are summed in registers and scaled there, so none is written to memory.
    """
    # Programs that run at once share rows of x and of the weight: GROUP_M tiles of x meet one tile of the weight.
    program, tiles_m, tiles_n = tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    first = program // (GROUP_M * tiles_n) * GROUP_M
    height = tl.minimum(tiles_m - first, GROUP_M)
    m = (first + program % (GROUP_M * tiles_n) % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = program % (GROUP_M * tiles_n) // height * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # Rows past the end are read as the last one, and not written.
    lefts = codes + tl.minimum(m, M - 1).to(tl.int64)[:, None] * K + k[None, :]
    rights = qdata + tl.minimum(n, N - 1).to(tl.int64)[None, :] * row_stride + k[:, None]
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
    for start in range(0, K, BLOCK_K):
        fits = k < K - start
        left = tl.load(lefts, mask=fits[None, :], other=0)
        sums = tl.dot(left, tl.load(rights, mask=fits[:, None], other=0), sums, out_dtype=tl.int32)
        lefts += BLOCK_K
        rights += BLOCK_K
    result = sums.to(tl.float32) * tl.load(row_factors + m, mask=m < M, other=0)[:, None]
    result *= tl.load(scale + n, mask=n < N, other=0).to(tl.float32)[None, :]
    if bias is not None:
        result += tl.load(bias + n, mask=n < N, other=0).to(tl.float32)[None, :]
    mask = (m < M)[:, None] & (n < N)[None, :]
    tl.store(out + m.to(tl.int64)[:, None] * N + n[None, :], result.to(out.dtype.element_ty), mask=mask)
