"""int8 products of a few rows by PyTorch's own op, where nothing is compiled: it reads the codes as they are stored."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_trainweights.formats.base import Format
from hf_trainweights.formats.int8 import Int8
from hf_trainweights.kernels.guards import Needs, guarded

# Up to so many rows it takes less time than a product with the dequantized weight; its float32 path is scalar.
_MOST_ROWS = 4
# It reads whole vectors of 16 columns: past the end of a matrix with another K, where it returns garbage or crashes.
_COLUMNS = 16
# It crashes where vectors of codes or of x do not begin at a multiple of these addresses, as in a memory-mapped file.
_CODES_ALIGNMENT, _X_ALIGNMENT = 16, 32
# Codes copied to aligned memory at a time.
_COPIED_CODES = 1 << 19

_weight_int8pack_mm = guarded(
    "torch._weight_int8pack_mm",
    Needs("x", ("M", "K"), alignment_bytes=_X_ALIGNMENT),
    Needs("qdata", ("N", "K"), (torch.int8,), alignment_bytes=_CODES_ALIGNMENT),
    Needs("scale", ("N",)),
    rules={f"K to be a multiple of {_COLUMNS}": lambda sizes: sizes["K"] % _COLUMNS == 0},
)(torch.ops.aten._weight_int8pack_mm.default)


def serves(x: Tensor, qdata: Tensor, form: Format) -> bool:
    """Return whether the op multiplies x `[*, K]` with a weight of a format in less time than a dequantized one."""
    K = x.shape[-1]
    fits = isinstance(form, Int8) and form.group_size is None and qdata.numel() > 0 and K % _COLUMNS == 0
    return fits and x.dtype != torch.float32 and 0 < x.numel() // K <= _MOST_ROWS


def multiply(x: Tensor, qdata: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Return `F.linear(x, weight, bias)` of x `[*, K]` and an int8 weight `[N, K]` with one scale a row."""
    N, K = qdata.shape
    rows, factors = x.reshape(-1, K).contiguous(), scale.to(x.dtype).view(-1).contiguous()
    # What torch allocates is aligned.
    rows = rows.clone() if rows.data_ptr() % _X_ALIGNMENT else rows
    out = _multiply_rows(rows, qdata.contiguous(), factors)
    return (out if bias is None else out.add_(bias)).view(*x.shape[:-1], N)


def _multiply_rows(x: Tensor, qdata: Tensor, scale: Tensor) -> Tensor:
    if qdata.data_ptr() % _CODES_ALIGNMENT == 0:
        return _weight_int8pack_mm(x, qdata, scale)
    rows = max(1, _COPIED_CODES // qdata.shape[1])
    buffer = torch.empty_like(qdata[:rows])
    parts = [
        _weight_int8pack_mm(x, buffer[: len(codes)].copy_(codes), factors)
        for codes, factors in zip(qdata.split(rows), scale.split(rows), strict=True)
    ]
    return torch.cat(parts, dim=1)
