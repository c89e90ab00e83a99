"""Products of rows of x with their experts, as an op on plain tensors, so that compilers keep it as one.

On a GPU one launch multiplies all rows, and the CPU does not wait to learn how many rows each expert has. Elsewhere one
expert after the other is multiplied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hf_trainweights.formats.base import Format
from hf_trainweights.kernels import cuda
from hf_trainweights.kernels.stored import config_of, format_of, linear, multiply_dequantized


def multiply_experts(x: Tensor, tensors: Mapping[str, Tensor], form: Format, ends: Tensor) -> Tensor:
    """Return the products of rows of x with their experts by the op `EXPERTS`.

    Args:
        x: Float `[M, K]`, of the dtype of the weight; any strides.
        tensors: The stored tensors of experts `[E, N, K]`; any strides.
        form: Their format.
        ends: Integers `[E]`, ascending: expert e multiplies the rows from `ends[e - 1]` to `ends[e]`.

    Returns:
        A new tensor `[M, N]` of the dtype of x. Rows behind the last end are 0.
    """
    return EXPERTS(x, [tensors[name] for name in form.tensor_names], ends, config_of(form))


def serves(form: Format, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> bool:
    """Return whether the op is the way to multiply on a device: on a GPU only if the CPU need not wait for it."""
    device = tensors["qdata"].device.type
    return device == "cpu" or (device == "cuda" and cuda.serves_experts(form, tensors, dtype))


def _multiply(x: Tensor, stored: Sequence[Tensor], ends: Tensor, config: str) -> Tensor:
    form = format_of(config)
    tensors = dict(zip(form.tensor_names, stored, strict=True))
    if serves(form, tensors, x.dtype) and x.device.type == "cuda":
        out = cuda.multiply_experts(x.contiguous(), tensors, form, ends)
        if out is not None:
            return out
    out = x.new_zeros(x.shape[0], tensors["qdata"].shape[-2])
    bounds = ends.tolist()
    for index, (start, end) in enumerate(zip([0, *bounds], bounds, strict=False)):
        if end > start:
            expert = {name: tensor[index] for name, tensor in tensors.items()}
            rows = linear(x[start:end], expert, form)
            if rows is None:
                shape = form.shape_of(expert["qdata"])
                rows = multiply_dequantized(x[start:end], expert, form, shape, None)
            out[start:end] = rows
    return out


_LIBRARY = torch.library.Library("hf_trainweights", "FRAGMENT")
_LIBRARY.define(
    "experts(Tensor x, Tensor[] stored, Tensor ends, str config) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order),
)
_LIBRARY.impl("experts", _multiply, "CompositeExplicitAutograd")
# `config` is the JSON description of a format, and `stored` are its tensors in the order of `tensor_names`.
EXPERTS = torch.ops.hf_trainweights.experts.default


@torch.library.register_fake("hf_trainweights::experts", lib=_LIBRARY)
def _empty(x: Tensor, stored: Sequence[Tensor], *_: object) -> Tensor:
    return x.new_empty((x.shape[0], stored[0].shape[-2]))
