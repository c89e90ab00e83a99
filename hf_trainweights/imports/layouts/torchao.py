"""torchao's weights as Transformers writes them to safetensors.

A weight is stored as the plain tensors `_weight_qdata`, `_weight_scale` and, for some, `_weight_zero_point`. The
metadata in the file's header has the name and the attributes of the weight's tensor subclass.
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
from hf_trainweights.imports.layouts.weights import float8_weight, integer_weight, unsigned
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor

_BITS = {"int2": 2, "int3": 3, "int4": 4, "int5": 5, "int6": 6}
_INTX = "IntxUnpackedToInt8Tensor"
_CODE_DTYPES = {"Int8Tensor": torch.int8, _INTX: torch.int8, "Float8Tensor": torch.float8_e4m3fn}


class TorchAO(Layout):
    """`Int8Tensor`, `IntxUnpackedToInt8Tensor` and `Float8Tensor`."""

    leaves = marks = frozenset(
        ("_weight_qdata", "_weight_scale", "_weight_zero_point", "_weight_act_pre_scale", "_weight_act_quant_scale")
    )

    def weight(self, module: str, tensors: Mapping[str, Tensor]) -> QuantizedTensor:
        """Return the weight of a module."""
        name = f"{module}.weight"
        kind, block, bits, has_zeros = self._described(name)
        if "_weight_act_pre_scale" in tensors:
            raise unsupported(name, "weights alone", "a scale for activations (act_pre_scale)")
        if kind not in _CODE_DTYPES:
            raise unsupported(name, f"{', '.join(_CODE_DTYPES)} of torchao", f"a {kind}")
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
            rows, columns = attributes["block_size"] if kind in _CODE_DTYPES else (1, 1)
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
