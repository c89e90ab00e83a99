"""torchao's weights as Transformers writes them to safetensors.

A weight is stored as the plain tensors `_weight_qdata`, `_weight_scale` and, for some, `_weight_zero_point`. The
metadata in the file's header has the name and the attributes of the weight's tensor subclass.

| subclass | codes | scales and zero points |
|---|---|---|
| `Int8Tensor`, `IntxUnpackedToInt8Tensor` | int8 `[N, K]` | for each row or block |
| `Float8Tensor` | float8_e4m3fn `[N, K]` | for each row or block |
| `Int4Tensor` | int8 `[N, K / 2]`, -8 to 7, the first column in the low bits | `[G, N]`; floats to add |
| `Int4PlainInt32Tensor` | int32 `[N, K / 8]`, 0 to 15, the first column in the lowest bits | `[G, N]`; int8 |
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch
from torch import Tensor

from hf_trainweights.errors import CorruptFileError
from hf_trainweights.formats.arithmetic import FLOAT_DTYPES
from hf_trainweights.imports.layouts.base import (
    AGAIN,
    FLOAT8_SCALES,
    INTEGERS,
    TENSOR_SHAPES,
    Layout,
    block_shape,
    channel_shapes,
    check_groups,
    check_tensor,
    matrix,
    unsupported,
)
from hf_trainweights.imports.layouts.codes import unpack_stream
from hf_trainweights.imports.layouts.weights import float8_weight, integer_weight, unsigned
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor

_BITS = {"int2": 2, "int3": 3, "int4": 4, "int5": 5, "int6": 6}
_INTX = "IntxUnpackedToInt8Tensor"
_CODE_DTYPES = {"Int8Tensor": torch.int8, _INTX: torch.int8, "Float8Tensor": torch.float8_e4m3fn}
# Several codes in one number, and how many.
_PACKED = {"Int4Tensor": (torch.int8, 2), "Int4PlainInt32Tensor": (torch.int32, 8)}


class TorchAO(Layout):
    """Weights of the subclasses in `_CODE_DTYPES` and `_PACKED`."""

    leaves = marks = frozenset(
        ("_weight_qdata", "_weight_scale", "_weight_zero_point", "_weight_act_pre_scale", "_weight_act_quant_scale")
    ) | {"_weight_scale_and_zero"}

    def weight(self, module: str, tensors: Mapping[str, Tensor]) -> QuantizedTensor:
        """Return the weight of a module."""
        name = f"{module}.weight"
        kind, block, bits, has_zeros = self._described(name)
        if "_weight_act_pre_scale" in tensors:
            raise unsupported(name, "weights alone", "a scale for activations (act_pre_scale)")
        if kind in _PACKED:
            return _packed_weight(module, tensors, kind, block)
        if kind not in _CODE_DTYPES:
            raise unsupported(name, f"{', '.join((*_CODE_DTYPES, *_PACKED))} of torchao", f"a {kind}")
        dtype = _CODE_DTYPES[kind]
        is_float = dtype is torch.float8_e4m3fn
        N, K = matrix(module, tensors, "_weight_qdata", dtype)
        if not is_float:
            check_groups(name, K, block[1])
        shape = block_shape(N, K, block)
        shapes = TENSOR_SHAPES if shape == (1, 1) else channel_shapes(N) if shape == (N, 1) else (shape,)
        check_tensor(module, tensors, "_weight_scale", FLOAT8_SCALES if is_float else FLOAT_DTYPES, *shapes)
        codes, scale, zero = tensors["_weight_qdata"], tensors["_weight_scale"], tensors.get("_weight_zero_point")
        check_tensor(module, tensors, "_weight_zero_point", INTEGERS, tuple(scale.shape), required=has_zeros)
        if is_float:
            return float8_weight(name, codes, scale, block)
        middle = 2 ** (bits - 1)
        return integer_weight(
            name, unsigned(name, codes, middle), scale, bits, None if zero is None else zero.to(torch.int32) + middle
        )

    def _described(self, name: str) -> tuple[str, tuple[int, int], int, bool]:
        """Read a weight's tensor subclass, block of one scale, bits, and whether it has zero points."""
        try:
            described = json.loads(self.metadata[name])
            kind, attributes = described["_type"], described.get("_data", {})
            rows, columns = attributes["block_size"] if kind in (*_CODE_DTYPES, *_PACKED) else (1, 1)
            target, stored = attributes.get("target_dtype", {}), described.get("_tensor_data_names", [])
            if min(rows, columns) > 0 and isinstance(kind, str) and isinstance(rows + columns, int):
                bits = _BITS.get(target.get("_data"), 8)
                return kind, (rows, columns), bits, kind == _INTX or "zero_point" in stored
            fault = "other values"
        except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
            fault = repr(error)[:200]
        expected = "a tensor subclass of torchao in the metadata of its file"
        raise CorruptFileError(
            name, expected, fault, "Write it with Transformers 5 and torchao 0.15 or newer. " + AGAIN
        )


def _packed_weight(module: str, tensors: Mapping[str, Tensor], kind: str, block: tuple[int, int]) -> QuantizedTensor:
    """Return a weight of several codes in one number, in groups of columns of a row."""
    name, (dtype, count) = f"{module}.weight", _PACKED[kind]
    N, words = matrix(module, tensors, "_weight_qdata", dtype)
    K = words * count
    if block[0] != 1 or K % block[1]:
        raise unsupported(name, f"groups of columns of a row that divide {K} columns", f"blocks of {block}")
    shape = (K // block[1], N)
    check_tensor(module, tensors, "_weight_scale", FLOAT_DTYPES, shape)
    check_tensor(module, tensors, "_weight_zero_point", (*INTEGERS, *FLOAT_DTYPES), shape)
    scale, zero = tensors["_weight_scale"].t().contiguous(), tensors["_weight_zero_point"].t()
    codes = unpack_stream(tensors["_weight_qdata"], 4)
    if zero.is_floating_point() and bool(zero.any()):
        # The floats are added to the product, in bfloat16, and no format here has both a middle code and a number to
        # add.
        raise unsupported(f"{module}._weight_zero_point", "integers, or zeros", "floats to add")
    if kind == "Int4Tensor":
        return integer_weight(name, codes ^ 8, scale, 4)
    if zero.is_floating_point():
        raise unsupported(f"{module}._weight_zero_point", "int8, as for XPU", f"{zero.dtype}")
    return integer_weight(name, codes, scale, 4, zero.to(torch.int32))
