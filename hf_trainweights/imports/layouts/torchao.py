"""torchao's weights as Transformers writes them to safetensors: plain tensors, described in the header's metadata.

`_weight_qdata`, `_weight_scale` and `_weight_zero_point`; the metadata names the tensor subclass and its attributes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hf_trainweights.errors import CorruptFileError
from hf_trainweights.imports.asymmetric import asymmetric_weight
from hf_trainweights.imports.layouts.base import Layout, no_place
from hf_trainweights.imports.weights import AGAIN, float8_weight, required
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor

_TENSORS = {"_weight_qdata", "_weight_scale", "_weight_zero_point"}
_INT4 = ("int2", "int3", "int4")


class TorchAO(Layout):
    """`Int8Tensor`, `IntxUnpackedToInt8Tensor` and `Float8Tensor`."""

    leaves = frozenset((*_TENSORS, "_weight_act_pre_scale", "_weight_act_quant_scale"))

    def read(self, module: str, tensors: Mapping[str, Tensor]) -> QuantizedTensor | None:
        """Return the weight of a module.

        Args:
            module: Its full name, for errors.
            tensors: Its tensors.

        Raises:
            CorruptFileError: A tensor is missing, one does not fit the others, or the metadata does not describe them.
            UnsupportedError: It is of another subclass, has activations scaled, or a zero point cannot be held.
        """
        if not tensors:
            return None
        name = f"{module}.weight"
        kind, attributes = self._description(name)
        if "_weight_act_pre_scale" in tensors:
            raise no_place(name, "weights alone", "a scale for activations (act_pre_scale)")
        if kind not in ("Int8Tensor", "IntxUnpackedToInt8Tensor", "Float8Tensor"):
            raise no_place(name, "an Int8Tensor, IntxUnpackedToInt8Tensor or Float8Tensor of torchao", f"a {kind}")
        codes, scale = required(module, tensors, "_weight_qdata", "_weight_scale")
        if kind == "Float8Tensor":
            return float8_weight(name, codes, scale, _rows_per_block(attributes))
        zero = tensors.get("_weight_zero_point", torch.zeros(1, dtype=torch.int8))
        target = attributes.get("target_dtype")
        bits = 4 if isinstance(target, Mapping) and target.get("_data") in _INT4 else 8
        return asymmetric_weight(name, codes, scale, zero, bits)

    def _description(self, name: str) -> tuple[str, Mapping[str, Any]]:
        """Return the subclass of a weight and its attributes."""
        try:
            described = json.loads(self.metadata[name])
            kind, attributes = described["_type"], described.get("_data", {})
            if isinstance(kind, str) and isinstance(attributes, Mapping):
                return kind, attributes
            fault = "other values"
        except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
            fault = repr(error)[:200]
        expected = "a tensor subclass of torchao in the metadata of its file"
        raise CorruptFileError(
            name, expected, fault, "Write it with Transformers 5 and torchao 0.15 or newer. " + AGAIN
        )


def _rows_per_block(attributes: Mapping[str, Any]) -> int:
    block = attributes.get("block_size")
    return max(1, block[0]) if isinstance(block, list) and block and type(block[0]) is int else 1
