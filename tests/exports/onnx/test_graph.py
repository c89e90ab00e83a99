"""The names of dimensions in an ONNX graph: those of the caller, in every shape, and sizes as they are."""

from __future__ import annotations

from typing import Any

import pytest

from hf_trainweights.exports.onnx.graph import name_dimensions

ir: Any = pytest.importorskip("onnx_ir")


def graph_of(*shape: int | str) -> Any:
    """Returns a model that hands its input on."""
    x = ir.Value(name="x", shape=ir.Shape(shape))
    node = ir.node("Identity", [x])
    node.outputs[0].shape = ir.Shape(shape)
    return ir.Model(ir.Graph([x], node.outputs, nodes=[node]), ir_version=10)


@pytest.mark.parametrize(
    ("shape", "dimensions", "expected"),
    [
        (("s36", "s70", "s36 + s70", 3), {0: "past", 1: "new"}, ["past", "new", "new + past", 3]),
        (("s36", "2*s36"), {0: "batch_size"}, ["batch_size", "2*batch_size"]),
        (("s36", "s36"), {0: 7}, [7, 7]),
        ((2, 3), {0: "batch_size"}, [2, 3]),
        ((2, 3), {}, [2, 3]),
        ((2, "s1"), {}, [2, "s1"]),
    ],
    ids=["a sum", "a product", "a size", "no free dimension", "no names", "a symbol without a name"],
)
def test_free_dimensions_get_the_names_of_the_inputs(
    shape: tuple[int | str, ...], dimensions: dict[int, str | int], expected: list[int | str]
) -> None:
    graph = graph_of(*shape)
    name_dimensions(graph, {"x": dimensions})
    for value in (*graph.graph.inputs, *graph.graph.outputs):
        assert [getattr(size, "value", size) for size in value.shape] == expected
