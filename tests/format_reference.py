"""The arithmetic of `docs/format.md` in whole tensors, one step after the other: what the package must equal."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from hf_trainweights.formats.base import Format

CODES_PER_WORD = 8


def quantize(form: Format, weight: Tensor) -> dict[str, Tensor]:
    """Return what `form` must store of a finite matrix `[N, K]`, both dimensions at least 1."""
    N, K = weight.shape
    group_size = getattr(form, "group_size", None) or K
    groups = weight.float().reshape(N, K // group_size, group_size)
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
    assert form.name == "float8_e4m3", "write the arithmetic of a new format down here"
    scale = stored_scale(amax / 448, 512, weight.dtype)
    clamped = (groups * inverse(scale)).clamp(-448, 448)
    return {"qdata": clamped.to(torch.float8_e4m3fn).reshape(N, K), "scale": scale}


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
