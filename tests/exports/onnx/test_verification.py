"""A report of a verification is true where the file computes what the model computes, and only there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from exports.models import Convolutional, images, quantized
from onnx import helper

from hf_trainweights.errors import CorruptFileError
from hf_trainweights.exports import VerificationReport, export_onnx, verify_onnx_model
from hf_trainweights.exports.onnx.model import compare

pytestmark = pytest.mark.slow  # its fixture exports, which takes seconds


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("onnx") / "model.onnx"
    torch.manual_seed(0)
    export_onnx(quantized(Convolutional(), "int8"), path, example_inputs=images(2))
    return path


def convolutional() -> Convolutional:
    torch.manual_seed(0)
    return quantized(Convolutional(), "int8").eval()  # type: ignore[return-value]


def test_the_same_model_is_verified(path: Path) -> None:
    report = verify_onnx_model(path, convolutional(), images(2))
    assert report
    (output,) = report.outputs
    assert output.largest_difference <= 1e-5 * output.largest_value
    assert "which is too much" not in str(report)


def test_another_model_is_not(path: Path) -> None:
    other = convolutional()
    other.norm.bias.data.add_(0.1)
    report = verify_onnx_model(path, other, images(2))
    assert not report
    assert "which is too much" in str(report)
    assert verify_onnx_model(path, other, images(2), rtol=10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_infinities_are_no_difference_and_nan_is_one(dtype: torch.dtype) -> None:
    wanted = torch.tensor([-torch.inf, 2.0], dtype=dtype)
    comparison = compare("scores", np.array([-np.inf, 2], np.float32), wanted)
    assert (comparison.ok, comparison.largest_difference, comparison.largest_value) == (True, 0, 2)
    assert not compare("scores", np.array([np.inf, 2], np.float32), wanted).ok
    assert not compare("scores", np.array([-np.inf, np.nan], np.float32), wanted).ok
    assert not compare("scores", np.array([np.nan], np.float32), torch.tensor([torch.nan], dtype=dtype)).ok


def test_shapes_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    x, y, z = (helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2, 3]) for name in "xyz")
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "y"], ["z"])], "graph", [x, y], [z])
    onnx.save(helper.make_model(graph), tmp_path / "model.onnx")
    with pytest.raises(CorruptFileError, match=r"model\.onnx: expected valid ONNX, found .*Incompatible dimensions"):
        verify_onnx_model(tmp_path / "model.onnx", convolutional(), images(2))


def test_nothing_compared_is_nothing_verified() -> None:
    assert not VerificationReport(())


def test_a_damaged_file_is_refused(path: Path, tmp_path: Path) -> None:
    model = onnx.load(path)
    model.graph.node[0].op_type = "NoSuchOp"
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(CorruptFileError, match=r"model\.onnx: expected valid ONNX, found .*NoSuchOp"):
        verify_onnx_model(tmp_path / "model.onnx", convolutional(), images(2))
