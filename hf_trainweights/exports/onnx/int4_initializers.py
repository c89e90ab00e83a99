"""Gives the int4 weights of an ONNX graph their type: while PyTorch traces they are int32 words."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir


def retype(model: ir.Model) -> None:
    """Turn int32 words that DequantizeLinear reads into INT4 initializers, in place: the same bytes, signed.

    Args:
        model: A graph that `lowered` with the target `Onnx` was traced to.
    """
    for graph in model.graphs():
        for value in list(graph.initializers.values()):
            words = value.const_value
            reads = any(node.op_type == "DequantizeLinear" and index == 0 for node, index in value.uses())
            if reads and words is not None and words.dtype == ir.DataType.INT32:
                shape = ir.Shape([*words.shape.numpy()[:-1], words.shape.numpy()[-1] * 8])
                value.const_value = _lazy_int4(words, shape, value.name)
                value.dtype, value.shape = ir.DataType.INT4, shape


def _lazy_int4(words: ir.TensorProtocol, shape: ir.Shape, name: str | None) -> ir.LazyTensor:
    # A stored nibble is code + 8; ONNX's is the code's two's complement, which differs in the highest bit.
    def make() -> ir.PackedTensor:
        octets = words.numpy().view(np.uint8) ^ 0x88
        return ir.PackedTensor(octets.reshape(-1), ir.DataType.INT4, shape=shape, name=name)

    return ir.LazyTensor(make, dtype=ir.DataType.INT4, shape=shape, name=name)
