"""The arithmetic that formats share: rounding of scales, and of code times scale, in blocks that stay in the caches."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Rows are quantized in blocks of about this many elements. Choosing the scales of a block takes twenty calls, 50 us at
# any size. The work on 4 MB of bfloat16 outweighs that, and for the second pass they are still in the last-level cache.
BLOCK_ELEMENTS = 1 << 21

# The values of a block are read in cache blocks of about this many elements for each thread. That is 512 kB of float32,
# which with a scratch block stay in the second-level cache through a dozen operations. Half the size is 10 % slower,
# because of more calls. Twice the size makes int4 6 % slower, because of cache misses.
CACHE_BLOCK_ELEMENTS = 1 << 17

_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}

# The smallest scale: a float16 scale of 2**-24 codes every float16 value exactly. The reciprocal of a scale below
# 2**-126 overflows to infinity in float32.
SMALLEST_SCALE = {torch.float32: 2.0**-126, torch.bfloat16: 2.0**-126, torch.float16: 2.0**-24}


def cache_blocks(values: Tensor) -> Iterator[slice]:
    """Yield slices that together cover the first dimension; the values of each slice fit the cores' own caches."""
    # An accelerator has no such cache, and starting a kernel costs it more than a cache miss.
    elements = CACHE_BLOCK_ELEMENTS * torch.get_num_threads() if values.device.type == "cpu" else BLOCK_ELEMENTS
    step = max(1, elements // values[0].numel())
    for start in range(0, len(values), step):
        yield slice(start, min(start + step, len(values)))


def float32_blocks(values: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield the slice and the float32 values of each cache block of `values`.

    Args:
        values: Any float dtype, `[n, *]`, no dimension empty.

    Returns:
        Slices of the first dimension, each with its values in one buffer, which the caller may overwrite.
    """
    buffer = values.new_empty(0, dtype=torch.float32)
    for block in cache_blocks(values):
        stored = values[block]
        yield block, buffer.resize_(stored.shape).copy_(stored)


def largest_magnitude(values: Tensor) -> Tensor:
    """Return the largest magnitude along the last dimension, float32; the values are contiguous and not empty.

    Floats without a sign have the same order as their bits read as integers. Comparing integers takes half the time,
    because the float operation must watch for NaN.
    """
    bits = values.view(_BITS[values.dtype])
    magnitudes, largest = bits.new_empty(0), bits.new_empty(bits.shape[:-1])
    for block in cache_blocks(bits):
        signed = bits[block]
        torch.bitwise_and(signed, torch.iinfo(bits.dtype).max, out=magnitudes.resize_(signed.shape))
        torch.amax(magnitudes, dim=-1, out=largest[block])
    return largest.view(values.dtype).float()


def round_scale(scale: Tensor, largest_code: int, dtype: torch.dtype) -> Tensor:
    """Round float32 scales to the dtype they are stored in; a scale becomes zero only if it was zero.

    Formats choose their codes after this rounding, for the scale that is stored. The scale is bounded so that the
    largest code times the scale is finite in `dtype`, and so that its reciprocal is finite.

    Args:
        scale: Float32, any shape, non-negative.
        largest_code: The largest magnitude a code can have.
        dtype: Dtype in which the scale is stored.

    Returns:
        A new tensor of `dtype` and the shape of `scale`.
    """
    largest = torch.finfo(dtype).max / (1 << (largest_code - 1).bit_length())
    bounded = scale.clamp(SMALLEST_SCALE[dtype], largest)
    rounded = bounded.to(dtype)
    if dtype == torch.float16:
        # Float16 has few bits left below 2**-17: a scale rounded down by half would clip the row's largest weights at
        # half their size. So a scale that loses more than 2**-8, bfloat16's half step, goes up by one step, 2**-24.
        rounded = torch.where(rounded.float() * (1 + 2**-8) < bounded, rounded + 2**-24, rounded)
    return rounded.masked_fill_(scale == 0, 0.0)


def reciprocal(scale: Tensor) -> Tensor:
    """Return float32 1 / scale, and 0 where the scale is 0, so that an all-zero row keeps codes of 0.

    Args:
        scale: Scales of any float dtype and shape. A group whose weights are all zero has a scale of zero.
    """
    return scale.float().reciprocal().masked_fill_(scale == 0, 0.0)


def round_to_int8(groups: Tensor, amax: Tensor, scale: Tensor, codes: Tensor) -> None:
    """Fill int8 codes `[n, G, g]` with `round(w * (1 / scale))`, clamped; `amax` and `scale` are `[n, G]`."""
    inverse = reciprocal(scale)
    # Only a scale that was rounded down far makes a code of 128. All others skip the clamp, a pass over all values.
    fits = bool((amax.to(torch.float32) * inverse < 127.5).all())
    inverse = inverse.unsqueeze(-1)
    for block, values in float32_blocks(groups):
        values.mul_(inverse[block]).round_()
        codes[block].copy_(values if fits else values.clamp_(-128, 127))


def scale_codes(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return codes times scale, rounded once to `dtype`.

    If the scale is float32 and `dtype` is bfloat16 or float16, code times scale is rounded to float32 first. For every
    other pair of dtypes it is exact before it is rounded to `dtype`.

    Args:
        codes: Integer or float8 codes, `[*, n, K]`, each exact in `dtype`.
        scale: Scales that broadcast against `codes`.
        dtype: Dtype to return.

    Returns:
        A new tensor of the shape of `codes`.
    """
    if torch.promote_types(scale.dtype, dtype) == dtype:
        return codes.to(dtype).mul_(scale.to(dtype))
    return codes.to(torch.float32).mul_(scale.float()).to(dtype)


def as_bytes(stored: Tensor) -> Tensor:
    """Return a tensor of one-byte elements as uint8 in the same memory, and any other tensor unchanged.

    PyTorch 2.8 does not index, join or select float8 on a CPU, and not every backend sends float8 to other ranks.
    """
    return stored.view(torch.uint8) if stored.dtype.itemsize == 1 else stored


def add_by_halves(values: Tensor) -> Tensor:
    """Sum over the first dimension, a power of two, by adding halves. Overwrites the values.

    The order of the additions is that of native/search.h. `sum` adds in an order that depends on the processor, and
    then a tie between two scales could be decided in another way.
    """
    while len(values) > 1:
        first, second = values.chunk(2)
        values = first.add_(second)
    return values[0]
