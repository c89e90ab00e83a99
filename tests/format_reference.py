"""The arithmetic of `docs/format.md` in whole tensors, one step after the other: what the package must equal."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from hf_trainweights.formats.affine import Affine
from hf_trainweights.formats.base import Format

CODES_PER_WORD = 8

# Of each format its bits, code units, zero units and clippings.
UINTS = {
    "uint2": (2, 5, 1, (0.95, 0.8, 0.65, 0.5)),
    "uint3": (3, 2, 1, (1.0, 0.88, 0.77, 0.66)),
    "uint4": (4, 1, 1, (1.0, 0.93, 0.86, 0.79)),
    "uint5": (5, 1, 2, (1.04, 0.96, 0.88)),
    "uint6": (6, 1, 4, (1.05, 1.0, 0.95)),
}


def quantize(form: Format, weight: Tensor) -> dict[str, Tensor]:
    """Return what `form` must store of a finite matrix `[N, K]`, both dimensions at least 1."""
    N, K = weight.shape
    group_size = getattr(form, "group_size", None) or K
    padded = torch.nn.functional.pad(weight.float(), (0, -K % group_size))
    groups = padded.reshape(N, -1, group_size)
    amax = groups.abs().amax(dim=-1)
    if form.name == "coded":
        scale = coded_scale(weight, amax.double(), coded_step(weight, form.bits))
        return {"qdata": encode(groups, scale, -128, 127).to(torch.int8).reshape(N, K), "scale": scale}
    if form.name == "int4":
        scale, codes = search(groups, amax, weight.dtype)
        return {"qdata": pack(codes.to(torch.int32).reshape(N, K)), "scale": scale}
    if form.name == "int8":
        scale = stored_scale(amax / 127, 128, weight.dtype)
        return {"qdata": encode(groups, scale, -128, 127).to(torch.int8).reshape(N, K), "scale": scale}
    if form.name == "codebook4":
        return quantize_to_codebook(weight)
    if isinstance(form, Affine):
        return quantize_affine(form, groups, weight.dtype)
    if form.name in UINTS:
        return quantize_uint(form.name, groups, weight.dtype)
    assert form.name == "float8_e4m3", "write the arithmetic of a new format down here"
    scale = stored_scale(amax / 448, 512, weight.dtype)
    clamped = (groups * inverse(scale)).clamp(-448, 448)
    return {"qdata": clamped.reshape(N, -1)[:, :K].to(torch.float8_e4m3fn), "scale": scale}


def coded_step(weight: Tensor, bits: float) -> float:
    """Return the step at which a sample of the matrix takes so many bits in a file."""
    N, K = weight.shape
    rows = weight[:: math.ceil(N / 128)]
    places = torch.arange(0, rows.numel(), max(1, rows.numel() // 2**15) | 1)
    places = places[(rows[places // K] != 0).any(dim=-1)]
    sample, step = rows.double().flatten()[places], 2.0 ** (2.047 - bits)
    for _ in range(6 if len(places) else 0):
        scale = coded_scale(rows, rows.double().abs().amax(dim=-1, keepdim=True), step)
        codes = (sample * inverse(scale).flatten()[places // K]).round().clamp(-128, 127)
        code = huffman_bits(Counter(codes.tolist()).values()) / len(codes)
        rate = 1.004 * code + 0.33 * max(0.0, 2.6 - code) ** 2 + min(2400 / (N * K), 0.02) + 6 / K
        step = max(step * 2.0 ** (rate - bits), 2.0**-12)
    return significant(torch.tensor(step), torch.round, 8).item()


def coded_scale(rows: Tensor, amax: Tensor, step: float) -> Tensor:
    root_mean_square = rows.double().square().mean(dim=-1, keepdim=True).sqrt()
    scale = significant(root_mean_square, torch.round, 4) * step
    scale = torch.minimum(scale, significant(amax / 2, torch.floor, 4))
    scale = torch.where(amax > 127.5 * scale, significant(amax / 127, torch.ceil, 4), scale)
    if rows.dtype is torch.float16:
        scale = torch.where((amax > 0) & (amax <= 127 * 2.0**-24), 2.0**-24, scale)
    return stored_scale(scale.float(), 128, rows.dtype)


def significant(values: Tensor, rounding: Callable[[Tensor], Tensor], bits: int) -> Tensor:
    """Return positive numbers rounded to so many significant bits."""
    values = values.double()
    unit = torch.where(values > 0, 2.0 ** (torch.frexp(values).exponent.double() - bits), 1.0)
    return rounding(values / unit) * unit


def huffman_bits(counts: Iterable[int]) -> int:
    """Return how many bits a Huffman code takes for symbols that are so frequent."""
    nodes, total = sorted(counts), 0
    while len(nodes) > 1:
        first, second, *others = nodes
        total += first + second
        nodes = sorted([*others, first + second])
    return total


def search(groups: Tensor, amax: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the scales of the smallest squared error, the last of equal ones, and their codes."""
    sign = torch.where(-groups.amin(dim=-1) >= groups.amax(dim=-1), 1, -1)
    best, smallest = torch.zeros(amax.shape, dtype=dtype), torch.full(amax.shape, torch.inf)
    for divisor in (9, 8.5, 8, 7.5):
        scale = stored_scale(amax / divisor, 8, dtype) * sign
        error = (encode(groups, scale, -8, 7) * scale.float().unsqueeze(-1) - groups).square().sum(dim=-1)
        best, smallest = torch.where(error <= smallest, scale, best), torch.minimum(error, smallest)
    return best, encode(groups, best, -8, 7)


CODEBOOK = torch.tensor([-127, -100, -78, -61, -47, -34, -22, -11, 0, 11, 23, 35, 49, 64, 82, 106.0])
EIGHTHS = (128, 140, 152, 166, 181, 197, 215, 235)
FACTORS = torch.tensor([0.0] + [EIGHTHS[(code + 1) % 8] * 2.0 ** ((code + 1) // 8 - 15) for code in range(1, 64)])


def quantize_to_codebook(weight: Tensor) -> dict[str, Tensor]:
    """Return what codebook4 must store of a matrix whose K is a multiple of 32."""
    N, K = weight.shape
    groups = weight.float().reshape(N, K // 32, 32)
    amax = groups.abs().amax(dim=-1)
    row = stored_scale(weight.float().abs().amax(dim=-1, keepdim=True) / 127 * (152 / 128), 128, weight.dtype)
    wanted = (amax / 127).clamp_min(2.0**-126)
    first = 1 + ((wanted / row.float()).unsqueeze(-1) - FACTORS[1:]).abs().argmin(dim=-1)
    best, smallest = torch.zeros(amax.shape, dtype=torch.int64), torch.full(amax.shape, torch.inf)
    for step in (0, -1, 1, -2, 2):
        code = (first + step).clamp(1, 63)
        doubled = groups * (inverse(FACTORS[code] * row.float()) * 2)
        for sign in (1, -1):
            difference = 2 * CODEBOOK[nearest_value(sign * doubled)] - sign * doubled
            error = sum_by_halves(difference.square()) * FACTORS[code].square()
            better = error < smallest
            best, smallest = torch.where(better, code + 64 * (sign < 0), best), torch.where(better, error, smallest)
    best = torch.where(amax == 0, 0, best)
    scale = FACTORS[best % 64] * row.float() * torch.where(best >= 64, -1, 1)
    indices = nearest_value(groups * (inverse(scale) * 2)).to(torch.int32) - 8
    octets = [row_octets(codes, 7) for codes in best.tolist()]
    return {
        "qdata": pack(indices.reshape(N, K)),
        "scale": row,
        "group_scale": torch.tensor(octets, dtype=torch.uint8),
    }


def nearest_value(doubled: Tensor) -> Tensor:
    """Return the index of the value that is nearest to half of each number, of the larger one in a tie."""
    borders = CODEBOOK[1:] + CODEBOOK[:-1]
    # The rounding of the sum with 256 may carry a number over a border.
    return torch.bucketize(((doubled + 256) - 256).clamp(-256, 255.5), borders, right=True)


def row_octets(codes: list[int], bits: int) -> list[int]:
    """Return the bytes of a row of codes, the first code in the lowest bits."""
    number = sum(code << bits * place for place, code in enumerate(codes))
    return list(number.to_bytes(-(-len(codes) * bits // 8), "little"))


def encode(groups: Tensor, scale: Tensor, lowest: int, highest: int) -> Tensor:
    return (groups * inverse(scale)).round().clamp(lowest, highest)


def inverse(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 0, 1 / scale.float()).unsqueeze(-1)


def stored_scale(scale: Tensor, divisor: int, dtype: torch.dtype) -> Tensor:
    """Return scales clamped, then rounded to `dtype`; `divisor` keeps the largest code times the scale finite."""
    smallest = 2.0**-24 if dtype is torch.float16 else 2.0**-126
    wanted = scale.clamp(smallest, torch.finfo(dtype).max / divisor)
    stored = wanted.to(dtype)
    if dtype is torch.float16:
        following = (stored.view(torch.int16) + 1).view(dtype)
        stored = torch.where(stored.float() * (1 + 2**-8) < wanted, following, stored)
    return torch.where(scale == 0, 0, stored)


def pack(codes: Tensor) -> Tensor:
    """Return int32 codes `[N, K]` in words of eight nibbles, the first the least significant."""
    nibbles = codes.unflatten(-1, (-1, CODES_PER_WORD)) + 8
    return torch.stack([nibbles[..., place] << 4 * place for place in range(CODES_PER_WORD)]).sum(0).to(torch.int32)


def quantize_uint(name: str, groups: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return what a format of asymmetric codes stores of float32 `[N, G, group_size]`."""
    bits, code_units, zero_units, clippings = UINTS[name]
    Q = 2**bits - 1
    low, high = groups.amin(dim=-1).clamp_max(0), groups.amax(dim=-1).clamp_min(0)
    wanted = (high / (Q * code_units) - low / (Q * code_units)).amax(dim=-1, keepdim=True) / 16
    scale = up_to_two_bits(wanted.clamp_min(2.0**-24 if dtype is torch.float16 else 2.0**-126)).to(dtype)
    scale[wanted == 0] = 0
    to_units = torch.where(scale == 0, 0, 1 / scale.float())
    low, high, groups = low * to_units, high * to_units, groups * to_units.unsqueeze(-1)
    covering, middle = (high - low) / (Q * code_units), (high + low) / 2

    def steps(group_scale: Tensor, zero: Tensor) -> Tensor:
        inverse = (1 / (group_scale * code_units)).unsqueeze(-1)
        return groups * inverse + (zero * (zero_units / code_units)).unsqueeze(-1)

    def central_zero(group_scale: Tensor) -> Tensor:
        below = Q / 2 - middle / (group_scale * code_units)
        return (below * (code_units / zero_units)).round().clamp(0, 15)

    best = torch.zeros_like(low), torch.zeros_like(low), torch.full_like(low, torch.inf)

    def better_of(best: tuple[Tensor, ...], group_scale: Tensor, zero: Tensor) -> tuple[Tensor, ...]:
        exact = steps(group_scale, zero)
        error = sum_by_halves((exact - exact.round().clamp(0, Q)).square()) * group_scale.square()
        return tuple(
            torch.where(error < best[2], new, old) for new, old in zip((group_scale, zero, error), best, strict=True)
        )

    for clipping in clippings:
        group_scale = (covering * clipping).round().clamp(1, 16)
        best = better_of(best, group_scale, central_zero(group_scale))
    for group_scale in [(best[0] + step).clamp(1, 16) for step in (-1, 1)]:
        best = better_of(best, group_scale, central_zero(group_scale))
    for zero in [(best[1] + step).clamp(0, 15) for step in (-1, 1)]:
        best = better_of(best, best[0], zero)
    group_scale, zero = best[0], torch.where(covering == 0, 0, best[1])
    reach = (torch.finfo(dtype).max * to_units / group_scale).floor()
    lowest = ((zero * zero_units - reach) / code_units).ceil().clamp_min(0).unsqueeze(-1)
    highest = ((zero * zero_units + reach) / code_units).floor().clamp_max(Q).unsqueeze(-1)
    codes = torch.where(scale.unsqueeze(-1) == 0, 0, steps(group_scale, zero).round().clamp(lowest, highest))
    return {
        "qdata": pack_planes(codes.to(torch.int64).flatten(1), bits),
        "scale": scale,
        "group_scale": pack_pairs(group_scale - 1),
        "zero_point": pack_pairs(zero),
    }


AFFINE_CLIPPINGS = {2: (1, 0.9, 0.8, 0.7, 0.6, 0.5), 3: (1, 0.93, 0.86, 0.79, 0.72, 0.65), 4: (1, 0.95, 0.9, 0.85, 0.8)}


def quantize_affine(form: Affine, groups: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return what affine with integer zero points must store of float32 `[N, G, group_size]`."""
    Q, most = 2**form.bits - 1, torch.finfo(dtype).max
    low, high = groups.amin(dim=-1).clamp_max(0), groups.amax(dim=-1).clamp_min(0)

    def codes_for(scale: Tensor, zero: Tensor) -> Tensor:
        reach = (most * (1 - 2**-20) * inverse(scale)).floor()
        lowest, highest = (zero.unsqueeze(-1) - reach).clamp_min(0), (zero.unsqueeze(-1) + reach).clamp_max(Q)
        return ((groups * inverse(scale)).round() + zero.unsqueeze(-1)).clamp(lowest, highest)

    best, best_zero, smallest = None, torch.zeros_like(low), torch.full_like(low, torch.inf)
    for clipping in AFFINE_CLIPPINGS.get(form.bits, (1,)):
        scale = stored_scale((high / Q - low / Q) * clipping, 1, dtype)
        zero = (low * clipping * -inverse(scale).squeeze(-1)).round().clamp(0, Q)
        wrong = (codes_for(scale, zero) - zero.unsqueeze(-1)) * scale.float().unsqueeze(-1) - groups
        error = wrong.square().sum(dim=-1)
        if best is None:
            best, best_zero, smallest = scale, zero, error
        better = error < smallest
        best, best_zero = torch.where(better, scale, best), torch.where(better, zero, best_zero)
        smallest = torch.where(better, error, smallest)
    assert best is not None
    codes = codes_for(best, best_zero).to(torch.int32).flatten(1)
    zeros = best_zero.to(torch.int64)
    is_packed = form.bits < 8 and form.group_size is not None
    octets = [row_octets(row, form.bits) for row in zeros.tolist()] if is_packed else zeros
    if form.bits == 8:
        qdata = codes.to(torch.uint8)
    else:
        qdata = pack(codes - 8) if form.bits == 4 else pack_planes(codes.to(torch.int64), form.bits)
    zero_point = torch.as_tensor(octets, dtype=torch.uint8)
    return {"qdata": qdata, "scale": best, "zero_point": zero_point}


def up_to_two_bits(values: Tensor) -> Tensor:
    """Return the least number that is 1 or 1.5 times a power of two and not below each positive value."""
    power = torch.exp2(torch.frexp(values).exponent.double() - 1)
    return torch.where(values <= power, power, torch.where(values <= 1.5 * power, 1.5 * power, 2 * power)).float()


def sum_by_halves(values: Tensor) -> Tensor:
    """Return sums over the last dimension, in which each number of the first half gets one of the second."""
    while values.shape[-1] > 1:
        half = values.shape[-1] // 2
        values = values[..., :half] + values[..., half:]
    return values[..., 0]


def pack_pairs(values: Tensor) -> Tensor:
    """Return numbers 0 to 15 two to a byte, the first in the low bits."""
    return (values[..., ::2] + 16 * values[..., 1::2]).to(torch.uint8)


def pack_planes(codes: Tensor, bits: int) -> Tensor:
    """Return int64 codes `[N, K]` in planes, byte by byte."""
    octets = torch.zeros(*codes.shape[:-1], codes.shape[-1] // 32, 4 * bits, dtype=torch.int64)
    for column in range(32):
        code, first_byte = codes[..., column::32], 0
        for plane in (4, 2, 1):
            if bits & plane:
                field, byte = divmod(column, 4 * plane)
                octets[..., first_byte + byte] += (code % 2**plane) << plane * field
                code, first_byte = code >> plane, first_byte + 4 * plane
    return octets.flatten(-2).to(torch.uint8).view(torch.int32)
