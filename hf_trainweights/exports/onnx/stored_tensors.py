"""Brings the stored tensors of an ONNX graph from what PyTorch traces to what a file holds."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from hf_trainweights.exports.targets.onnx import STORED


def finish(model: ir.Model) -> None:
    """Remove the ops that mark stored tensors, and make int32 words that DequantizeLinear reads INT4; in place."""
    domain, _, op_type = STORED.partition("::")
    for graph in model.graphs():
        for node in list(graph):
            stored = node.inputs[0] if (node.domain, node.op_type) == (domain, op_type) else None
            if stored is not None:
                ir.convenience.replace_all_uses_with(node.outputs[0], stored)
                graph.remove(node, safe=True)
        for value in list(graph.initializers.values()):
            words = value.const_value
            reads = any(node.op_type == "DequantizeLinear" and index == 0 for node, index in value.uses())
            if reads and words is not None and words.dtype == ir.DataType.INT32:
                shape = ir.Shape([*words.shape.numpy()[:-1], words.shape.numpy()[-1] * 8])
                value.const_value = _lazy_int4(words, shape, value.name)
                value.dtype, value.shape = ir.DataType.INT4, shape
        graph.opset_imports.pop(domain, None)


def _lazy_int4(words: ir.TensorProtocol, shape: ir.Shape, name: str | None) -> ir.LazyTensor:
    # A stored nibble is code + 8; ONNX's is the code's two's complement, which differs in the highest bit.
    def make() -> ir.PackedTensor:
        octets = words.numpy().view(np.uint8) ^ 0x88
        return ir.PackedTensor(octets.reshape(-1), ir.DataType.INT4, shape=shape, name=name)

    return ir.LazyTensor(make, dtype=ir.DataType.INT4, shape=shape, name=name)
