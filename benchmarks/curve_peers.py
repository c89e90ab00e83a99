"""What other quantizers make of a weight without data: llama.cpp's by its own library, NF4 by its definition."""

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
}

# The values of NF4, from "QLoRA" by Dettmers et al., appendix E.
_NF4 = torch.tensor(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ]
)

# Returns what is left of a weight `[N, K]`, and the bits of each of its elements.
Peer = Callable[[Tensor], tuple[Tensor, float]]


def peers(library: Path | None) -> dict[str, Peer]:
    """Return the peers by name.

    Args:
        library: `libggml-base` of llama.cpp, which llama-cpp-python brings; None to leave its types out.
    """
    found: dict[str, Peer] = {"NF4, groups of 64": nf4}
    if library is not None:
        ggml = ctypes.CDLL(str(library))
        found |= {name: _ggml_type(ggml, name) for name in _GGML}
    return found


def nf4(weight: Tensor) -> tuple[Tensor, float]:
    """Return a weight in NF4 with a scale of 16 bits for 64 weights: bitsandbytes without double quantizing."""
    groups = weight.float().reshape(-1, 64)
    scale = groups.abs().amax(dim=-1, keepdim=True).bfloat16().float()
    codes = torch.bucketize(groups / scale.clamp_min(1e-30), (_NF4[1:] + _NF4[:-1]) / 2)
    return (_NF4[codes] * scale).view(weight.shape), 4 + 16 / 64


def _ggml_type(ggml: ctypes.CDLL, name: str) -> Peer:
    number, block, block_bytes = _GGML[name]
    quantize, dequantize = ggml.ggml_quantize_chunk, getattr(ggml, f"dequantize_row_{_c_name(name)}")
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    quantize.argtypes, quantize.restype = (
        [ctypes.c_int, pointer, pointer, count, count, count, pointer],
        ctypes.c_size_t,
    )
    dequantize.argtypes, dequantize.restype = [pointer, pointer, count], None

    def peer(weight: Tensor) -> tuple[Tensor, float]:
        # MiniLM's rows of 384 are no multiple of 256: two of them are laid end to end, which costs nothing.
        values = weight.float().contiguous()
        columns = values.shape[-1] if values.shape[-1] % block == 0 else 2 * values.shape[-1]
        packed = torch.empty(values.numel() // block * block_bytes, dtype=torch.uint8)
        rows = values.numel() // columns
        written = quantize(number, values.data_ptr(), packed.data_ptr(), 0, rows, columns, None)
        assert written == packed.numel(), name
        result = torch.empty_like(values)
        dequantize(packed.data_ptr(), result.data_ptr(), values.numel())
        return result, 8 * block_bytes / block

    return peer


def _c_name(name: str) -> str:
    # The k-quants keep their capital letter: dequantize_row_q4_K.
    return name.lower().replace("_k", "_K")
