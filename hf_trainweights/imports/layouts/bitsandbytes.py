"""bitsandbytes: LLM.int8, and the four bits of NF4 and FP4 with plain or double quantization.

| | tensor | shape | dtype |
|---|---|---|---|
| LLM.int8 | `weight` | `[N, K]` | int8 |
| | `SCB` | `[N]` | float32 |
| | `weight_format`: 0 for rows | one number | uint8 |
| NF4, FP4 | `weight`: two codes in a byte, the even one in the high bits | `[N * K / 2, 1]` bytes | any |
| | `weight.absmax` | one for each block | float32, or uint8 if quantized itself |
| | `weight.quant_map` | `[16]` | float32 |
| | `weight.nested_absmax`, `weight.nested_quant_map` | one for each 256 blocks, `[256]` | float32 |
| | `weight.quant_state.bitsandbytes__nf4`: JSON | `[n]` | uint8 |

Blocks of four bits run over the flattened weight, so a block may go on in the next row. `weight = map[code] * absmax`,
rounded to float32 and then to the dtype; a quantized absmax is `nested_map[code] * nested_absmax + nested_offset`, each
operation rounded to float32. Source: https://github.com/bitsandbytes-foundation/bitsandbytes
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_trainweights.errors import CorruptFileError
from hf_trainweights.formats.arithmetic import FLOAT_DTYPES
from hf_trainweights.formats.scale_codings import OUTER_GROUPS, outer_count
from hf_trainweights.imports.layouts.base import AGAIN, INTEGERS, Layout, check_tensor, matrix, unsupported
from hf_trainweights.imports.layouts.codes import swap_nibbles
from hf_trainweights.imports.layouts.weights import integer_weight, table_weight
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor

# The dtypes that a user may choose to store codes in.
_STORAGES = (torch.uint8, torch.int8, torch.int16, torch.int32, *FLOAT_DTYPES, torch.float64)
_STATES = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")
_PARTS = ("weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map", *_STATES)
_PART = re.compile(rf"(?P<module>.*)\.(?P<leaf>{'|'.join(map(re.escape, _PARTS))})", re.DOTALL)


@dataclass(frozen=True)
class _State:
    """The JSON beside a weight: the weight's shape, the weights of a block, and the offset of quantized scales."""

    shape: tuple[int, int]
    block: int
    offset: float


class BitsAndBytes(Layout):
    """Weights of 8 or 4 bits."""

    leaves = frozenset(("weight", "SCB", "weight_format", *_PARTS))
    marks = frozenset(("SCB", "weight_format", *_PARTS))

    def split_name(self, name: str) -> tuple[str, str]:
        """Split a tensor's name; the tensors beside a weight have names that begin with the weight's."""
        match = _PART.fullmatch(name)
        return (match["module"], match["leaf"]) if match else super().split_name(name)

    def weight(self, module: str, tensors: Mapping[str, Tensor]) -> QuantizedTensor:
        """Return the weight of a module."""
        is_int8 = bool(self.config.get("load_in_8bit", self.config.get("_load_in_8bit")))
        return self._int8(module, tensors) if is_int8 else self._four_bits(module, tensors)

    def _int8(self, module: str, tensors: Mapping[str, Tensor]) -> QuantizedTensor:
        """Return a weight whose scale is SCB / 127, rounded to float32. The first files lack `weight_format`."""
        N, _ = matrix(module, tensors, "weight", torch.int8)
        check_tensor(module, tensors, "SCB", FLOAT_DTYPES, (N,))
        check_tensor(module, tensors, "weight_format", INTEGERS, (), (1,), required=False)
        order = tensors.get("weight_format")
        if order is not None and bool(order.any()):
            raise unsupported(f"{module}.weight_format", "0, rows", f"{order.tolist()}")
        codes = tensors["weight"].view(torch.uint8) ^ 128
        return integer_weight(f"{module}.weight", codes, tensors["SCB"].float() / 127, bits=8)

    def _four_bits(self, module: str, tensors: Mapping[str, Tensor]) -> QuantizedTensor:
        name = f"{module}.weight"
        state_name = next((leaf for leaf in _STATES if leaf in tensors), _STATES[0])
        check_tensor(module, tensors, state_name, (torch.uint8,), (None,))
        state = _read_state(f"{module}.{state_name}", tensors[state_name])
        N, K = state.shape
        octets = _octets(name, tensors, N, K)
        blocks = -(-N * K // state.block)
        check_tensor(module, tensors, "weight.quant_map", (torch.float32,), (16,))
        is_nested = "weight.nested_absmax" in tensors or "weight.nested_quant_map" in tensors
        check_tensor(module, tensors, "weight.absmax", (torch.uint8 if is_nested else torch.float32,), (blocks,))
        absmax, table = tensors["weight.absmax"], tensors["weight.quant_map"]
        if is_nested:
            check_tensor(module, tensors, "weight.nested_absmax", (torch.float32,), (-(-blocks // OUTER_GROUPS),))
            check_tensor(module, tensors, "weight.nested_quant_map", (torch.float32,), (256,))
        if is_nested and K % state.block == 0:
            scales = _nested(tensors, N, K // state.block, state.offset)
            return table_weight(name, octets, state.block, "nested", scales, table)
        if is_nested:
            absmax = _absmax(tensors, state.offset)
        # A block that goes on in the next row becomes groups of a row that repeat its scale.
        size = math.gcd(K, state.block)
        scale = absmax[torch.arange(N * K // size) * size // state.block].view(N, K // size)
        return table_weight(name, octets, size, "plain", {"scale": scale}, table)


def _octets(name: str, tensors: Mapping[str, Tensor], N: int, K: int) -> Tensor:
    """Return the codes of a weight as `[N, K / 2]` bytes, the even column in the low bits."""
    stored, count = tensors.get("weight"), -(-N * K // 2)
    if stored is None or stored.dtype not in _STORAGES or stored.dim() != 2 or stored.nbytes != count:
        actual = "none" if stored is None else f"{stored.dtype} of shape {tuple(stored.shape)}"
        raise CorruptFileError(name, f"{count} bytes for {N} rows of {K} columns", actual, AGAIN)
    if K % 2:
        raise unsupported(name, "an even number of columns", f"{K}")
    return swap_nibbles(stored.contiguous().flatten().view(torch.uint8).view(N, K // 2))


def _read_state(name: str, stored: Tensor) -> _State:
    """Read the JSON beside a weight of four bits; CorruptFileError: it is none, or has other values."""
    fault = "other values"
    try:
        state = json.loads(bytes(stored.tolist()))
        shape, block, offset = state["shape"], state["blocksize"], state.get("nested_offset", 0.0)
        sizes = [*shape, block]
        sound = len(sizes) == 3 and all(type(size) is int and 0 < size < 1 << 31 for size in sizes)
        if sound and math.isfinite(offset) and state.get("nested_blocksize", OUTER_GROUPS) == OUTER_GROUPS:
            return _State((shape[0], shape[1]), block, float(offset))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        fault = repr(error)[:200]
    expected = f"JSON with the shape of a matrix, a blocksize, and nested blocks of {OUTER_GROUPS}"
    raise CorruptFileError(name, expected, fault, AGAIN)


def _nested(tensors: Mapping[str, Tensor], N: int, G: int, offset: float) -> dict[str, Tensor]:
    """Return the stored tensors of quantized scales by row: with `phase` a row finds the outer scale of each group."""
    outer = tensors["weight.nested_absmax"]
    first = torch.arange(N, device="cpu") * G
    runs = (first // OUTER_GROUPS).unsqueeze(1) + torch.arange(outer_count(G), device="cpu")
    return {
        "scale": tensors["weight.absmax"].view(N, G),
        "nested_values": tensors["weight.nested_quant_map"].view(1, 256),
        "outer_scale": outer[runs.clamp(max=len(outer) - 1)],
        "phase": (first % OUTER_GROUPS).to(torch.uint8).unsqueeze(1),
        "nested_offset": torch.full((N, 1), offset, dtype=torch.float32),
    }


def _absmax(tensors: Mapping[str, Tensor], offset: float) -> Tensor:
    """Return quantized scales as float32, each operation rounded as bitsandbytes does."""
    codes = tensors["weight.absmax"]
    outer = tensors["weight.nested_absmax"].repeat_interleave(OUTER_GROUPS)[: len(codes)]
    return tensors["weight.nested_quant_map"][codes.int()] * outer + torch.tensor(offset, dtype=torch.float32)
