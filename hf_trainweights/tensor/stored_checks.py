"""What tensors must be to become the stored tensors of a weight: checked where they come from a file or a user.

Shape and dtype do not tell where a tensor's bytes lie. PyTorch's products take the address of a scale and read on from
there, whatever its strides say: past its end, if one number was expanded to a column.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from hf_trainweights.errors import CorruptFileError
from hf_trainweights.formats.base import Format


def check_stored(tensors: Mapping[str, Tensor], form: Format, shape: Sequence[int], name: str = "weight") -> None:
    """Check that a format's tensors of a weight `[*, N, K]` may be held and read by address; else CorruptFileError."""
    *lead, N, K = shape
    # Of many rows: a single one, which no weight is quantized to alone, may be cut out of another weight.
    if form.fallback((*lead, max(N, 2), K)) != form:
        next_step = "The file is damaged or belongs to another model; save it again from the source."
        raise CorruptFileError(name, f"columns that {form} can hold", f"{K}", next_step)
    form.check(tensors, shape, name)
    device = tensors["qdata"].device
    for key in form.tensor_names:
        fault = _fault(tensors[key], device)
        if fault is not None:
            raise CorruptFileError(
                name,
                f"{key} to be a plain contiguous tensor on {device}",
                fault,
                "Call .contiguous() on a tensor that you made; where it comes from a file, the file is damaged.",
            )


def _fault(tensor: Tensor, device: torch.device) -> str | None:
    """Return what keeps a tensor from being read by its address, None if nothing does."""
    if type(tensor) is not Tensor and type(tensor) is not nn.Parameter:
        return f"a {type(tensor).__name__}"
    if tensor.layout != torch.strided:
        return f"a tensor of layout {tensor.layout}"
    if tensor.device != device:
        return f"a tensor on {tensor.device}"
    if tensor.is_neg() or not tensor.is_contiguous():
        return f"strides {tensor.stride()}{' and a negated view' * tensor.is_neg()}"
    end_bytes = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
    storage_bytes = tensor.untyped_storage().nbytes()
    return f"one that ends at byte {end_bytes} of {storage_bytes}" if end_bytes > storage_bytes else None
