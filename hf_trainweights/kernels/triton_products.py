"""Products of activations with int8 and int4 codes on a GPU, written in Triton; `cuda` decides what runs them.

Both kernels read the codes as they are on disk, once for all rows of x, make weights of them in registers, and sum in
float32. Nothing is added up in an order that may change from run to run.
"""

# Arguments without a type are pointers and 32-bit integers; a checker knows neither them nor Triton's constants.
# pyright: reportMissingImports=false, reportAssignmentType=false

import triton
import triton.language as tl


@triton.jit
def load_codes(qdata, n, block, N, K, row_stride, BITS: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return codes `[n, BLOCK_K]`: int8 ones as they are, int4 ones as float32; no matter which past the end."""
    PER_ELEMENT: tl.constexpr = 8 if BITS == 4 else 1
    column = block * (BLOCK_K // PER_ELEMENT) + tl.arange(0, BLOCK_K // PER_ELEMENT)
    mask = (n < N)[:, None] & (column < K // PER_ELEMENT)[None, :]
    codes = tl.load(qdata + n.to(tl.int64)[:, None] * row_stride + column[None, :], mask=mask, other=0)
    if BITS == 4:
        # The last dimension of what is joined is the lowest bit of the nibble's place in the word.
        codes = tl.join(codes, codes >> 16)
        codes = tl.join(codes, codes >> 8)
        codes = tl.join(codes, codes >> 4).reshape(n.shape[0], BLOCK_K)
        # These bits are the float32 2**23 + nibble: a subtraction instead of a conversion, which is slower by far.
        codes = ((codes & 15) | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + 8)
    return codes


@triton.jit
def load_scales(scale, n, k, N, K, G, GROUP: tl.constexpr):
    """Return float32 scales `[n, k]` of columns k, 0 past the end; GROUP 0 is one scale a row."""
    group = k // GROUP if GROUP else k * 0
    mask = (n < N)[:, None] & (k < K)[None, :]
    return tl.load(scale + n.to(tl.int64)[:, None] * G + group[None, :], mask=mask, other=0).to(tl.float32)


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
        codes = load_codes(qdata, n, block, N, K, row_stride, BITS, BLOCK_K).to(tl.float32)
        k = block * BLOCK_K + tl.arange(0, BLOCK_K)
        factors = tl.load(x + k, mask=k < K, other=0).to(tl.float32)
        chunks = tl.sum((codes * factors[None, :]).reshape(BLOCK_N, CHUNKS, 8), axis=2)
        if GROUP:
            chunks *= load_scales(scale, n, block * BLOCK_K + tl.arange(0, CHUNKS) * 8, N, K, G, GROUP)
        sums += chunks
    total = tl.sum(sums, axis=1)
    if not GROUP:
        total *= tl.load(scale + n.to(tl.int64) * G, mask=n < N, other=0).to(tl.float32)
    if bias is not None:
        total += tl.load(bias + n, mask=n < N, other=0).to(tl.float32)
    tl.store(out + n, total.to(out.dtype.element_ty), mask=n < N)


# These two change from call to call, and no other program is better for some of their values.
@triton.jit(do_not_specialize=["M", "blocks_of_part"])
def multiply_tiles(
    x,
    qdata,
    scale,
    bias,
    out,
    M,
    N,
    K,
    row_stride,
    G,
    blocks_of_part,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Multiply x `[M, K]` by tiles; program (i, j, s) writes its tile of part s of out `[parts, M, N]`.

    A part is the sum over so many blocks of columns. The weight is the left factor: that is the one which tensor cores
    take from registers, where its codes become floats. With one scale a row it multiplies the sum; groups give the
    weights that `dequantize` gives, rounded to the dtype of x.
    """
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    part = tl.program_id(2)
    rows = m.to(tl.int64)
    SPAN: tl.constexpr = min(GROUP, BLOCK_K) if GROUP else BLOCK_K
    SPANS: tl.constexpr = BLOCK_K // SPAN
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for block in range(part * blocks_of_part, min((part + 1) * blocks_of_part, tl.cdiv(K, BLOCK_K))):
        weight = load_codes(qdata, n, block, N, K, row_stride, BITS, BLOCK_K)
        if GROUP:
            factors = load_scales(scale, n, block * BLOCK_K + tl.arange(0, SPANS) * SPAN, N, K, G, GROUP)
            weight = weight.to(tl.float32).reshape(BLOCK_N, SPANS, SPAN) * factors[:, :, None]
            weight = weight.reshape(BLOCK_N, BLOCK_K)
        k = block * BLOCK_K + tl.arange(0, BLOCK_K)
        inputs = tl.load(x + rows[None, :] * K + k[:, None], mask=(m < M)[None, :] & (k < K)[:, None], other=0)
        sums = tl.dot(weight.to(inputs.dtype), inputs, sums, input_precision="ieee")
    if not GROUP:
        sums *= tl.load(scale + n.to(tl.int64) * G, mask=n < N, other=0).to(tl.float32)[:, None]
    if bias is not None:
        sums += tl.load(bias + n, mask=n < N, other=0).to(tl.float32)[:, None]
    mask = (m < M)[None, :] & (n < N)[:, None]
    places = out + (part * M + rows)[None, :] * N + n[:, None]
    tl.store(places, sums.to(out.dtype.element_ty), mask=mask)
