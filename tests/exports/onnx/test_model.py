"""`OnnxModel` runs whole batches and parts of them, and refuses inputs that the file does not take."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from exports.models import Convolutional, images, quantized
from onnx import helper
from torch import nn

from hf_trainweights import TrainWeightsConfig, quantize_
from hf_trainweights.errors import ConfigError, CorruptFileError
from hf_trainweights.exports import OnnxModel, export_onnx

pytestmark = pytest.mark.slow  # its fixture exports, which takes seconds


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> OnnxModel:
    path = tmp_path_factory.mktemp("onnx") / "model.onnx"
    axes = {"image": {0: "batch"}, "scores": {0: "batch"}}
    names = {"input_names": ["image"], "output_names": ["scores"], "dynamic_axes": axes}
    export_onnx(quantized(Convolutional(), "int8"), path, example_inputs=images(2), **names)
    return OnnxModel(path)


def test_it_runs_on_the_cpu_where_there_is_no_gpu(model: OnnxModel) -> None:
    assert model.providers[-1] == "CPUExecutionProvider"


def test_inputs_are_taken_in_every_way(model: OnnxModel) -> None:
    image = images(3)
    wanted = model.predict({"image": image})["scores"]
    ways = [
        model.predict(image),
        model.predict(image.numpy()),
        model.predict([image]),
        model(image),
        model(image=image),
    ]
    assert all(np.array_equal(way["scores"], wanted) for way in ways)


@pytest.mark.parametrize("batch_size", [1, 3, 7, 32])
def test_the_last_part_of_a_batch_may_be_ragged(model: OnnxModel, batch_size: int) -> None:
    outputs = model.predict_batch(images(7), batch_size)["scores"]
    np.testing.assert_allclose(outputs, model.predict(images(7))["scores"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "^inputs: expected image, found none"),
        ({"picture": images(1)}, "^inputs: expected image, found picture"),
        ([images(1), images(1)], "^inputs: expected 1: image, found 2 inputs"),
        (images(1)[0], r"^input image: expected tensor\(float\) \['batch', 1, 8, 8\], found float32 \[1, 8, 8\]"),
        (images(1)[..., :4], r"^input image: .*found float32 \[1, 1, 8, 4\]"),
        (images(1).double(), r"^input image: .*found float64 \[1, 1, 8, 8\]"),
        (images(1).bfloat16(), r"^input image: expected what NumPy has an array for, found .*BFloat16.* to float32"),
    ],
)
def test_inputs_that_the_file_does_not_take_are_refused(model: OnnxModel, inputs: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        model.predict(inputs)  # type: ignore[arg-type]


def test_an_input_that_is_given_twice_or_has_no_name_is_refused(model: OnnxModel) -> None:
    with pytest.raises(ConfigError, match=r"^inputs: expected each of these once: image, found 1 in order and image"):
        model(images(1), image=images(1))
    with pytest.raises(ConfigError, match=r"^inputs: expected each of these once: image, found 2 in order and image"):
        model(images(1), images(1), image=images(1))


def test_an_output_without_rows_is_not_of_a_batch(tmp_path: Path) -> None:
    x = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["rows"])
    total = helper.make_tensor_value_info("total", onnx.TensorProto.FLOAT, [])
    graph = helper.make_graph([helper.make_node("ReduceSum", ["x"], ["total"], keepdims=0)], "graph", [x], [total])
    opsets = [helper.make_opsetid("", 21)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), tmp_path / "model.onnx")
    session = OnnxModel(tmp_path / "model.onnx")
    assert session.predict(np.ones(3, np.float32))["total"] == 3
    with pytest.raises(ConfigError, match=r"^output total: expected a row for each of the batch, found one number"):
        session.predict_batch(np.ones(3, np.float32))


def test_a_batch_without_rows_or_parts_is_refused(model: OnnxModel) -> None:
    with pytest.raises(ConfigError, match=r"^inputs: expected the same number of rows"):
        model.predict_batch(images(1)[:0])
    with pytest.raises(ConfigError, match=r"^inputs: expected the same number of rows"):
        model.predict_batch(torch.tensor(1.0))
    with pytest.raises(ConfigError, match=r"^batch_size: expected at least 1, found 0"):
        model.predict_batch(images(1), 0)


def test_an_unknown_provider_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^providers: expected some of .*CPUExecutionProvider, found Abacus"):
        OnnxModel(tmp_path / "model.onnx", providers=["Abacus"])


@pytest.mark.parametrize("content", [None, b"", b"no model"])
def test_a_file_that_is_no_model_is_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "model.onnx"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CorruptFileError, match=r"model\.onnx: expected a model that ONNX Runtime reads"):
        OnnxModel(path)


def test_values_that_the_graph_cannot_compute_with_are_a_typed_error(tmp_path: Path) -> None:
    table = nn.Sequential(nn.Embedding(8, 32))
    quantize_(table, TrainWeightsConfig("int8", include_embeddings=True))
    ids = torch.zeros(1, 3, dtype=torch.long)
    export_onnx(table, tmp_path / "model.onnx", example_inputs=ids)
    with pytest.raises(CorruptFileError, match=r"computes with these inputs, found .*Check the values"):
        OnnxModel(tmp_path / "model.onnx").predict(ids + 99)
