"""Parts of a weight that is quantized already: some of its rows, or some of its columns, without new rounding.

A weight `[*, N, K]` is a table of stored tensors. Each has N as its last dimension but one, except those that
`Format.shared_names` lists: they serve all rows alike. Along K a tensor is cut in proportion, or serves every part.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from hf_trainweights.errors import QuantizationError
from hf_trainweights.formats.base import Format
from hf_trainweights.formats.group_scales import pack_bits, unpack_bits

# Rows of the weight that proves how columns can be cut: some formats hold no single row.
_PROVING_ROWS = 2


def cut_rows(form: Format, tensors: Mapping[str, Tensor], cut: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Return what `cut` makes of each stored tensor `[*, N, k]`, and those that all rows share as they are."""
    return {name: stored if name in form.shared_names else cut(stored) for name, stored in tensors.items()}


def cut_columns(
    form: Format, tensors: Mapping[str, Tensor], shape: Sequence[int], start: int, stop: int
) -> dict[str, Tensor]:
    """Return contiguous tensors of columns `start` to `stop`, new or as given; QuantizationError: no whole groups.

    Examples:
        >>> from hf_trainweights.formats import get_format
        >>> form = get_format({"format": "int4", "group_size": 32})
        >>> half = cut_columns(form, form.quantize(torch.ones(2, 64)), (2, 64), 32, 64)
        >>> {name: tuple(tensor.shape) for name, tensor in half.items()}
        {'qdata': (2, 4), 'scale': (2, 1)}
    """
    if not can_cut_columns(form, shape[-1], start, stop):
        step, K = form.column_step, shape[-1]
        in_steps = 0 <= start < stop <= K and not (start % step or stop % step)
        where = "at which its stored tensors can be cut" if in_steps else f"at multiples of {step}"
        next_step = "Cut at other columns, or quantize with a group_size that divides the parts."
        raise QuantizationError("columns", f"a part of {K} columns {where} for {form}", f"{start} to {stop}", next_step)
    return _cut(form, tensors, shape, start, stop)


@functools.lru_cache(maxsize=4096)
def can_cut_columns(form: Format, K: int, start: int, stop: int) -> bool:
    """Return whether columns `start` to `stop` of K are a part of each stored tensor, and stand for the same values.

    A format may pack columns as it likes, and need not say so by `column_step`. So a small weight proves it.
    """
    step, shape, width = form.column_step, (_PROVING_ROWS, K), stop - start
    if not 0 <= start < stop <= K or start % step or stop % step:
        return False
    if (start, stop) == (0, K):
        return True
    if form.fallback((_PROVING_ROWS, width)) != form or not _is_proportional(form, K, start, stop):
        return False
    if form.fallback(shape) != form:
        # No weight of so few rows can have this format, so that the sizes of its tensors must do.
        return True
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0), device="cpu", dtype=torch.float32)
    tensors = form.quantize(weight)
    cut_tensors, cut_shape = _cut(form, tensors, shape, start, stop), (_PROVING_ROWS, width)
    if form.shape_of(cut_tensors["qdata"]) != cut_shape:
        return False
    values = form.dequantize(tensors, shape, torch.float32)[:, start:stop]
    return torch.equal(form.dequantize(cut_tensors, cut_shape, torch.float32), values)


def _is_proportional(form: Format, K: int, start: int, stop: int) -> bool:
    """Return whether each stored tensor serves all columns, or has as great a share for a part as that has of K."""
    widths = K, stop - start
    specs, own_specs = (form.tensor_specs((_PROVING_ROWS, width), torch.float32) for width in widths)
    for name in specs.keys() - form.bit_packed.keys():
        size, part_size = specs[name][0][-1], own_specs[name][0][-1]
        if size != part_size and (start * size % K or part_size * K != size * (stop - start)):
            return False
    return True


def _cut(form: Format, tensors: Mapping[str, Tensor], shape: Sequence[int], start: int, stop: int) -> dict[str, Tensor]:
    (*lead, K), step = shape, form.column_step
    sizes = _row_sizes(form, shape, tensors)
    part_sizes = _row_sizes(form, (*lead, stop - start), tensors)
    part = {}
    for name, stored in tensors.items():
        if sizes[name] == part_sizes[name] and name not in form.bit_packed:
            part[name] = stored
        elif name in form.bit_packed:
            codes = unpack_bits(stored, form.bit_packed[name], K // step)
            part[name] = pack_bits(codes[..., start // step : stop // step], form.bit_packed[name])
        else:
            first = start * sizes[name] // K
            part[name] = stored.narrow(-1, first, part_sizes[name]).contiguous()
    return part


def join_columns(form: Format, parts: Sequence[Mapping[str, Tensor]], widths: Sequence[int]) -> dict[str, Tensor]:
    """Put the parts of a weight that was cut along K together again; a tensor that all share is the first part's."""
    lead = form.shape_of(parts[0]["qdata"])[:-1]
    sizes = _row_sizes(form, (*lead, sum(widths)), parts[0])
    joined = {}
    for name, stored in parts[0].items():
        pieces = [part[name] for part in parts]
        if name in form.bit_packed:
            bits = form.bit_packed[name]
            counts = [width // form.column_step for width in widths]
            codes = [unpack_bits(piece, bits, count) for piece, count in zip(pieces, counts, strict=True)]
            joined[name] = pack_bits(torch.cat(codes, dim=-1), bits)
        else:
            joined[name] = stored if stored.shape[-1] == sizes[name] else torch.cat(pieces, dim=-1)
    return joined


def _row_sizes(form: Format, shape: Sequence[int], tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the last dimension of each stored tensor of a weight of this shape."""
    return {name: size[-1] for name, (size, _) in form.tensor_specs(shape, tensors["scale"].dtype).items()}
