"""Quanto (optimum-quanto), as `QuantizedModelForCausalLM` and its like save it.

| tensor | shape | dtype |
|---|---|---|
| `weight._data` | 8 bits: `[N, K]` | int8, float8_e4m3fn |
| `weight._data._data` | 4 and 2 bits: `[ceil(N * G * bits / 8), K / G]`: the groups, several in one row | uint8 |
| `weight._scale` | `[N * G, 1]` | float |
| `weight._shift` | 4 and 2 bits: `[N * G, 1]` | float, or uint8 zero points |

`weight = code * scale - shift`, both operations rounded to the dtype of the scales, or `(code - zero_point) * scale`.
G is the number of groups of a row, K / group size. The rows of groups are divided into as many equal blocks as a packed
byte holds codes. Packed row i holds row i of each block, that of the first block in the lowest bits.
`quanto_qmap.json` names the type of each module.
Source: https://github.com/huggingface/optimum-quanto
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from hf_trainweights.errors import ConfigError, CorruptFileError
from hf_trainweights.formats.arithmetic import FLOAT_DTYPES
from hf_trainweights.imports.layouts.base import AGAIN, TENSOR_SHAPES, Layout, Shape, check_tensor, matrix, unsupported
from hf_trainweights.imports.layouts.weights import float8_weight, integer_weight, offset_weight, unsigned
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor

MAP_NAME = "quanto_qmap.json"
_BYTES = {"qint8": torch.int8, "qfloat8_e4m3fn": torch.float8_e4m3fn, "qfloat8": torch.float8_e4m3fn}
_BITS = {"qint4": 4, "qint2": 2}
_PART = re.compile(r"(?P<module>.+)\.(?P<leaf>weight\._data(?:\._data)?|weight\._scale|weight\._shift)", re.DOTALL)
_CODES, _PACKED, _SCALE, _SHIFT = "weight._data", "weight._data._data", "weight._scale", "weight._shift"


class Quanto(Layout):
    """Weights of 8 bits with one scale a row, and of 4 or 2 bits in groups."""

    marks = frozenset((_CODES, _PACKED, _SCALE, _SHIFT))
    leaves = marks | {"input_scale", "output_scale"}

    def split_name(self, name: str) -> tuple[str, str]:
        """Split a tensor's name; the tensors of a weight have names that begin with the weight's."""
        match = _PART.fullmatch(name)
        return (match["module"], match["leaf"]) if match else super().split_name(name)

    def weight(self, module: str, tensors: Mapping[str, Tensor]) -> QuantizedTensor:
        """Return the weight of a module."""
        settings = self.config.get(module)
        kind = settings.get("weights") if isinstance(settings, Mapping) else None
        if not isinstance(kind, str):
            raise ConfigError(f"{MAP_NAME}: {module}", "the type of its weights", repr(settings)[:200], AGAIN)
        if kind in _BITS:
            return self._packed(module, tensors, _BITS[kind])
        if kind not in _BYTES:
            raise unsupported(f"{MAP_NAME}: {module}", f"one of {', '.join((*_BYTES, *_BITS))}", kind)
        name, dtype = f"{module}.weight", _BYTES[kind]
        N, K = matrix(module, tensors, _CODES, dtype)
        check_tensor(module, tensors, _CODES, (dtype,), self.shapes.get(module, (N, K)))
        check_tensor(module, tensors, _SCALE, FLOAT_DTYPES, *_shapes(N))
        # `unsigned` adds 128 to the codes, because the format for imported weights counts them from 0.
        if dtype is torch.int8:
            return integer_weight(name, unsigned(name, tensors[_CODES], 128), tensors[_SCALE], 8)
        return float8_weight(name, tensors[_CODES], tensors[_SCALE])

    def _packed(self, module: str, tensors: Mapping[str, Tensor], bits: int) -> QuantizedTensor:
        """Return a weight of less than 8 bits."""
        name, parts = f"{module}.weight", 8 // bits
        packed_rows, size = matrix(module, tensors, _PACKED, torch.uint8)
        N, K = self.shapes.get(module, (0, 0))
        groups = N * K // size
        if groups * size != N * K or packed_rows != -(-groups // parts) or K % size:
            expected = f"{bits} bits for each of {N} rows of {K} columns, in groups"
            raise CorruptFileError(f"{module}.{_PACKED}", expected, f"shape {(packed_rows, size)}", AGAIN)
        check_tensor(module, tensors, _SCALE, FLOAT_DTYPES, *_shapes(groups))
        check_tensor(module, tensors, _SHIFT, (tensors[_SCALE].dtype, torch.uint8), *_shapes(groups))
        fields = [(tensors[_PACKED] >> start) & (2**bits - 1) for start in range(0, 8, bits)]
        codes = torch.cat(fields)[:groups].reshape(N, K)
        scale, shift = (tensors[leaf].reshape(N, K // size) for leaf in (_SCALE, _SHIFT))
        if shift.is_floating_point():
            # "each": quanto rounds after each operation, not once at the end.
            return offset_weight(name, codes, scale, bits, "bias", -shift, "each")
        return integer_weight(name, codes, scale, bits, shift)


def _shapes(groups: int) -> tuple[Shape, ...]:
    """Return the shapes that the scales of `groups` groups may have."""
    return TENSOR_SHAPES if groups == 1 else ((groups, 1),)
