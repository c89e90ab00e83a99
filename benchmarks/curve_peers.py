"""What other quantizers make of a weight: llama.cpp by its own library, with and without data, NF4 by definition."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

# ggml's number of a type, the weights in a block, and its bytes.
_GGML = {
    "Q2_K": (10, 256, 84),
    "Q3_K": (11, 256, 110),
    "Q4_0": (2, 32, 18),
    "IQ4_XS": (23, 256, 136),
    "Q4_K": (12, 256, 144),
    "Q5_K": (13, 256, 176),
    "Q6_K": (14, 256, 210),
    "Q8_0": (8, 32, 34),
    "IQ2_S": (22, 256, 82),
    "IQ3_XXS": (18, 256, 98),
    "IQ3_S": (21, 256, 110),
}
# These are made for an importance matrix.
_WITH_IMPORTANCE = ("Q2_K", "IQ2_S", "IQ3_XXS", "IQ3_S", "Q3_K", "IQ4_XS", "Q4_K", "Q5_K")
_WITHOUT = tuple(name for name in _GGML if name not in ("IQ2_S", "IQ3_XXS", "IQ3_S"))

# The values of NF4, from "QLoRA" by Dettmers et al., appendix E.
_NF4 = torch.tensor(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ]
)

# Returns what is left of a weight `[N, K]`, and the bits of each of its elements. A squared error in a column counts as
# much as the second argument says, `[K]`, where a peer asks for it.
Peer = Callable[[Tensor, Tensor], tuple[Tensor, float]]


def peers(library: Path | None) -> dict[str, Peer]:
    """Return the peers by name.

    Args:
        library: `libggml-base` of llama.cpp, which llama-cpp-python brings; None to leave its types out.
    """
    found: dict[str, Peer] = {"NF4, groups of 64": nf4}
    if library is not None:
        ggml = ctypes.CDLL(str(library))
        found |= {name: _ggml_type(ggml, name, by_importance=False) for name in _WITHOUT}
        found |= {f"{name}, imatrix": _ggml_type(ggml, name, by_importance=True) for name in _WITH_IMPORTANCE}
    return found


def nf4(weight: Tensor, importance: Tensor) -> tuple[Tensor, float]:
    """Return a weight in NF4 with a scale of 16 bits for 64 weights: bitsandbytes without double quantizing."""
    del importance
    groups = weight.float().reshape(-1, 64)
    scale = groups.abs().amax(dim=-1, keepdim=True).bfloat16().float()
    codes = torch.bucketize(groups / scale.clamp_min(1e-30), (_NF4[1:] + _NF4[:-1]) / 2)
    return (_NF4[codes] * scale).view(weight.shape), 4 + 16 / 64


def _ggml_type(ggml: ctypes.CDLL, name: str, *, by_importance: bool) -> Peer:
    number, block, block_bytes = _GGML[name]
    quantize, dequantize = ggml.ggml_quantize_chunk, getattr(ggml, f"dequantize_row_{_c_name(name)}")
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    quantize.argtypes, quantize.restype = (
        [ctypes.c_int, pointer, pointer, count, count, count, pointer],
        ctypes.c_size_t,
    )
    dequantize.argtypes, dequantize.restype = [pointer, pointer, count], None

    def peer(weight: Tensor, importance: Tensor) -> tuple[Tensor, float]:
        # MiniLM's rows of 384 are no multiple of 256: two of them are laid end to end, which costs nothing.
        values = weight.float().contiguous()
        columns = values.shape[-1] if values.shape[-1] % block == 0 else 2 * values.shape[-1]
        packed = torch.empty(values.numel() // block * block_bytes, dtype=torch.uint8)
        rows = values.numel() // columns
        matrix = importance.float().repeat(columns // values.shape[-1]).contiguous()
        known = matrix.data_ptr() if by_importance else None
        written = quantize(number, values.data_ptr(), packed.data_ptr(), 0, rows, columns, known)
        assert written == packed.numel(), name
        result = torch.empty_like(values)
        dequantize(packed.data_ptr(), result.data_ptr(), values.numel())
        return result, 8 * block_bytes / block

    return peer


def _c_name(name: str) -> str:
    # The k-quants keep their capital letter: dequantize_row_q4_K.
    return name.lower().replace("_k", "_K")
