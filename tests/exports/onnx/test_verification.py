"""A report of a verification is true where the file computes what the model computes, and only there."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import torch
from exports.models import Convolutional, images, quantized

from hf_trainweights.errors import CorruptFileError
from hf_trainweights.exports import VerificationReport, export_onnx, verify_onnx_model

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


def test_nothing_compared_is_nothing_verified() -> None:
    assert not VerificationReport(())


def test_a_damaged_file_is_refused(path: Path, tmp_path: Path) -> None:
    model = onnx.load(path)
    model.graph.node[0].op_type = "NoSuchOp"
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(CorruptFileError, match=r"model\.onnx: expected valid ONNX, found .*NoSuchOp"):
        verify_onnx_model(tmp_path / "model.onnx", convolutional(), images(2))
