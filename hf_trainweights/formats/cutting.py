"""Slices of a quantized weight: some of its rows, or some of its columns, without new rounding.

A weight `[*, N, K]` is a table of stored tensors. N is the last dimension but one of each, except of the tensors in
`Format.shared_names`, which all rows share. Along K a stored tensor is cut in proportion, or every slice has all of it.
A tensor in `Format.bit_packed` has codes of groups that do not begin at whole bytes: it is unpacked, cut and packed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from hf_trainweights.errors import QuantizationError
from hf_trainweights.formats.base import Format
from hf_trainweights.formats.group_scales import pack_bits, unpack_bits

# Rows of the small weight that shows whether columns can be cut. Some formats cannot hold a weight of one row.
_PROVING_ROWS = 2


def cut_rows(form: Format, tensors: Mapping[str, Tensor], cut: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Cut the rows of each stored tensor `[*, N, k]` with `cut`; keep the stored tensors that all rows share."""
    return {name: stored if name in form.shared_names else cut(stored) for name, stored in tensors.items()}


def cut_columns(
    form: Format, tensors: Mapping[str, Tensor], shape: Sequence[int], start: int, stop: int
) -> dict[str, Tensor]:
    """Cut columns out of stored tensors, into new ones unless all slices share one; QuantizationError: no whole groups.

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
    """Return whether columns `start` to `stop` of K can be cut out of each stored tensor, and keep their values.

    A format may pack columns in ways that `column_step` does not tell, so this cuts a small weight and compares it.
    """
    step, shape, width = form.column_step, (_PROVING_ROWS, K), stop - start
    if (start, stop) == (0, K) and K:
        return True
    if not (form.has_cuttable_columns and 0 <= start < stop <= K) or start % step or stop % step:
        return False
    if form.fallback((_PROVING_ROWS, width)) != form or not _is_proportional(form, K, start, stop):
        return False
    if form.fallback(shape) != form:
        # This format holds no weight of so few rows to try it with: the sizes of its tensors are proof enough.
        return True
    tensors = _some_tensors(form, shape)
    cut_tensors, cut_shape = _cut(form, tensors, shape, start, stop), (_PROVING_ROWS, width)
    if form.shape_of(cut_tensors["qdata"]) != cut_shape:
        return False
    values = form.dequantize(tensors, shape, torch.float32)[:, start:stop]
    return torch.equal(form.dequantize(cut_tensors, cut_shape, torch.float32).nan_to_num(), values.nan_to_num())


def _some_tensors(form: Format, shape: Sequence[int]) -> dict[str, Tensor]:
    """Return stored tensors of a weight of this shape: of random values, or of random bits in an import-only format."""
    generator = torch.Generator().manual_seed(0)
    if not form.is_import_only:
        return form.quantize(torch.randn(tuple(shape), generator=generator, device="cpu", dtype=torch.float32))
    tensors = form.empty(shape, torch.float32, "cpu")
    for tensor in tensors.values():
        if tensor.is_floating_point() and tensor.itemsize > 1:
            tensor.uniform_(-1, 1, generator=generator)
        else:
            tensor.view(torch.uint8).random_(0, 256, generator=generator)
    return tensors


def _is_proportional(form: Format, K: int, start: int, stop: int) -> bool:
    """Return whether each stored tensor is the same for all columns, or as much shorter in the slice as K is."""
    widths = K, stop - start
    specs, slice_specs = (form.tensor_specs((_PROVING_ROWS, width), torch.float32) for width in widths)
    for name in specs.keys() - form.bit_packed.keys():
        size, slice_size = specs[name][0][-1], slice_specs[name][0][-1]
        if size != slice_size and (start * size % K or slice_size * K != size * (stop - start)):
            return False
    return True


def _cut(form: Format, tensors: Mapping[str, Tensor], shape: Sequence[int], start: int, stop: int) -> dict[str, Tensor]:
    *lead, K = shape
    sizes = _row_sizes(form, shape, tensors)
    slice_sizes = _row_sizes(form, (*lead, stop - start), tensors)
    cut_tensors = {}
    for name, stored in tensors.items():
        if sizes[name] == slice_sizes[name] and name not in form.bit_packed:
            cut_tensors[name] = stored
        elif name in form.bit_packed:
            codes = unpack_bits(stored, form.bit_packed[name], form.groups_in(K))
            groups = codes[..., form.groups_in(start) : form.groups_in(stop)]
            cut_tensors[name] = pack_bits(groups, form.bit_packed[name])
        else:
            first = start * sizes[name] // K
            cut_tensors[name] = stored.narrow(-1, first, slice_sizes[name]).contiguous()
    return cut_tensors


def join_columns(form: Format, parts: Sequence[Mapping[str, Tensor]], widths: Sequence[int]) -> dict[str, Tensor]:
    """Join the slices of a weight that was cut along K; a stored tensor that they share comes from the first slice."""
    lead = form.shape_of(parts[0]["qdata"])[:-1]
    sizes = _row_sizes(form, (*lead, sum(widths)), parts[0])
    joined = {}
    for name, stored in parts[0].items():
        pieces = [tensors[name] for tensors in parts]
        if name in form.bit_packed:
            bits = form.bit_packed[name]
            counts = [form.groups_in(width) for width in widths]
            codes = [unpack_bits(piece, bits, count) for piece, count in zip(pieces, counts, strict=True)]
            joined[name] = pack_bits(torch.cat(codes, dim=-1), bits)
        else:
            joined[name] = stored if stored.shape[-1] == sizes[name] else torch.cat(pieces, dim=-1)
    return joined


def _row_sizes(form: Format, shape: Sequence[int], tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the last dimension of each stored tensor of a weight of this shape."""
    return {name: size[-1] for name, (size, _) in form.tensor_specs(shape, tensors["scale"].dtype).items()}
