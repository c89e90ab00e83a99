"""The arithmetic that formats share: how scales and products are rounded, in blocks that stay in the caches."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Rows are quantized in blocks of about this many elements. Choosing the scales of a block takes some twenty calls
# whatever its size, 50 us; 4 MB of bfloat16 outweigh them and are still in the last-level cache for the second pass.
BLOCK_ELEMENTS = 1 << 21

# Their values are read in cache blocks of about this many elements for each thread, 512 kB of float32, which with a
# scratch block stay in the second-level cache through a dozen operations. Half as many are 10 % slower, for the calls;
# with twice as many int4 is 6 % slower, for misses.
CACHE_BLOCK_ELEMENTS = 1 << 17

_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}

# The smallest scale: a float16 scale of 2**-24 codes every float16 value exactly; below 2**-126 a float32
# reciprocal overflows to infinity.
SMALLEST_SCALE = {torch.float32: 2.0**-126, torch.bfloat16: 2.0**-126, torch.float16: 2.0**-24}


def cache_blocks(values: Tensor) -> Iterator[slice]:
    """Yield slices of the first dimension that together cover it, each of values that fit the cores' own caches."""
    # An accelerator has no such cache to stay in, and a launch costs it more than a miss.
    elements = CACHE_BLOCK_ELEMENTS * torch.get_num_threads() if values.device.type == "cpu" else BLOCK_ELEMENTS
    step = max(1, elements // values[0].numel())
    for start in range(0, len(values), step):
        yield slice(start, min(start + step, len(values)))


def float32_blocks(values: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield the cache blocks of `values` in float32, and where each lies.

    Args:
        values: Any float dtype, `[n, *]`, no dimension empty.

    Returns:
        Slices of the first dimension, each with its values: one buffer, which may be overwritten and soon is.
    """
    buffer = values.new_empty(0, dtype=torch.float32)
    for block in cache_blocks(values):
        part = values[block]
        yield block, buffer.resize_(part.shape).copy_(part)


def largest_magnitude(values: Tensor) -> Tensor:
    """Return the largest magnitude along the last dimension, float32; the values are contiguous and not empty.

    Without its sign, a float is the larger the larger its bits are as an integer. Integers take half the time: the
    float operation must watch for NaN.
    """
    bits = values.view(_BITS[values.dtype])
    magnitudes, largest = bits.new_empty(0), bits.new_empty(bits.shape[:-1])
    for block in cache_blocks(bits):
        part = bits[block]
        torch.bitwise_and(part, torch.iinfo(bits.dtype).max, out=magnitudes.resize_(part.shape))
        torch.amax(magnitudes, dim=-1, out=largest[block])
    return largest.view(values.dtype).float()


def round_scale(scale: Tensor, largest_code: int, dtype: torch.dtype) -> Tensor:
    """Return float32 scales rounded to the dtype they are stored in, zero only where they were zero.

    The codes are chosen after this rounding, so what is stored is what was used. A scale is kept small enough that
    the largest code times the scale is finite in `dtype`, and large enough that its reciprocal is finite.

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
        # It has few bits left below 2**-17: a scale rounded down by half would clip the row's largest weights at half
        # their size. So it goes up to the next one, 2**-24 away, where more than bfloat16's half step of 2**-8 is lost.
        rounded = torch.where(rounded.float() * (1 + 2**-8) < bounded, rounded + 2**-24, rounded)
    return rounded.masked_fill_(scale == 0, 0.0)


def reciprocal(scale: Tensor) -> Tensor:
    """Return float32 1 / scale, and 0 where the scale is 0, so that an all-zero row keeps codes of 0.

    Args:
        scale: Scales of any float dtype and shape; a zero scale stands for a group of zeros.
    """
    return scale.float().reciprocal().masked_fill_(scale == 0, 0.0)


def round_to_int8(groups: Tensor, amax: Tensor, scale: Tensor, codes: Tensor) -> None:
    """Fill int8 codes `[n, G, g]` with `round(w * (1 / scale))`, clamped; `amax` and `scale` are `[n, G]`."""
    inverse = reciprocal(scale)
    # A scale that was rounded down far can make the largest magnitude 128; else the pass over all values is spared.
    fits = bool((amax.to(torch.float32) * inverse < 127.5).all())
    inverse = inverse.unsqueeze(-1)
    for block, values in float32_blocks(groups):
        values.mul_(inverse[block]).round_()
        codes[block].copy_(values if fits else values.clamp_(-128, 127))


def scale_codes(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return codes times scale, rounded once to `dtype`.

    From a float32 scale to bfloat16 or float16 the product is rounded to float32 first; all others are exact there.

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
    """Return elements of one byte as uint8, in the same memory, and any others as they are.

    PyTorch 2.8 does not index, join or select float8 on a CPU, and not every backend sends it to other ranks.
    """
    return stored.view(torch.uint8) if stored.dtype.itemsize == 1 else stored


def add_by_halves(values: Tensor) -> Tensor:
    """Return the sums over the first dimension, a power of two, always in this order; the values are overwritten."""
    while len(values) > 1:
        first, second = values.chunk(2)
        values = first.add_(second)
    return values[0]
