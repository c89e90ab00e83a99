"""An ONNX file holds the codes, and ONNX Runtime computes with it what the dequantized model computes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from architectures import ARCHITECTURES
from covering import by_default, exhaustive
from exports.models import FORMATS, Convolutional, dequantized_outputs, images, no_file_beyond, quantized
from torch import Tensor, nn

from hf_trainweights import QuantizedTensor
from hf_trainweights.errors import ConfigError, SaveError, UnsupportedError
from hf_trainweights.exports import OnnxModel, export_onnx, verify_onnx_model
from hf_trainweights.exports.onnx import graph, writer

pytestmark = pytest.mark.slow  # an export takes seconds

RUNTIMES = ("portable", "onnxruntime")
NAMES: dict[str, Any] = {
    "input_names": ["image"],
    "output_names": ["scores"],
    "dynamic_axes": {"image": {0: "batch"}, "scores": {0: "batch"}},
}


def close_to(found: np.ndarray, wanted: torch.Tensor) -> bool:
    return bool(np.abs(found - wanted.numpy()).max() <= 1e-5 * wanted.abs().max().item())


def octets(tensor: onnx.TensorProto) -> bytes:
    return tensor.raw_data


@pytest.mark.covering(1)
@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("config", by_default(("int4 g32", "codebook4 with column scales"), FORMATS))
def test_any_module_is_exported_with_names_and_free_dimensions_its_codes_and_no_float_copy(
    tmp_path: Path, config: str, runtime: Any
) -> None:
    model = quantized(Convolutional(), config)
    export_onnx(model, tmp_path / "model.onnx", example_inputs=images(2), runtime=runtime, **NAMES)
    session = OnnxModel(tmp_path / "model.onnx")
    assert (session.input_names, session.output_names) == (("image",), ("scores",))
    assert close_to(session.predict(images(5))["scores"], dequantized_outputs(model, images(5))[0])
    assert os.listdir(tmp_path) == ["model.onnx"]
    assert model.training
    tensors = onnx.load(tmp_path / "model.onnx").graph.initializer
    weights = [weight for weight in model.parameters() if isinstance(weight, QuantizedTensor)]
    assert len(weights) == 2
    for weight in weights:
        codes = weight.qdata.view(torch.uint8)
        # As they lie here; with the sign bit of each int8 code flipped; with the sign bit of each nibble flipped.
        forms = {(codes ^ flip).numpy().tobytes() for flip in (0, 0x80, 0x88)}
        assert any(octets(tensor) in forms for tensor in tensors)
        assert not any(t.data_type == onnx.TensorProto.FLOAT and list(t.dims) == list(weight.shape) for t in tensors)


@pytest.mark.parametrize(
    ("architecture", "config", "runtime"),
    [
        *exhaustive(
            ("vit", "int4 g32", "portable"),
            ("llama_tied", "int8", "onnxruntime"),
            ("bert", "int8", "portable"),
            ("bert", "int4 g32", "onnxruntime"),
            ("bert", "float8", "onnxruntime"),
            ("llama_tied", "int4 g32", "portable"),
            ("gpt2", "int8 g32", "onnxruntime"),
            ("qwen3_moe", "int4 g32", "onnxruntime"),
            ("whisper", "int8", "onnxruntime"),
            ("whisper", "float8", "portable"),
        ),
    ],
)
def test_a_transformer_takes_any_batch_and_length(tmp_path: Path, architecture: str, config: str, runtime: Any) -> None:
    model = quantized(architecture, config)
    inputs = ARCHITECTURES[architecture].inputs(model)
    export_onnx(model, tmp_path / "model.onnx", example_inputs=inputs, runtime=runtime)
    longer = {name: torch.cat([value, value.roll(1, -1)]) for name, value in inputs.items()}
    if "input_ids" in inputs:
        longer = {name: torch.cat([value, value[..., :3]], dim=-1) for name, value in longer.items()}
    wanted = dequantized_outputs(model, **longer)
    outputs = OnnxModel(tmp_path / "model.onnx").predict(longer)
    assert close_to(outputs["logits"], wanted[0])


def test_a_directory_is_exported_with_inputs_that_are_made_up(tmp_path: Path) -> None:
    model = quantized("bert", "int8", torch.bfloat16)
    model.save_pretrained(tmp_path / "saved")
    export_onnx(tmp_path / "saved", tmp_path / "model.onnx")
    inputs = ARCHITECTURES["bert"].inputs(model)
    wanted = dequantized_outputs(model.to(torch.float32), **inputs)
    outputs = OnnxModel(tmp_path / "model.onnx").predict(
        {name: inputs[name] for name in ("input_ids", "attention_mask")}
    )
    assert close_to(outputs["logits"], wanted[0])


class Masked(nn.Module):
    """Takes arguments that have no name, and returns infinities."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: Tensor, /, *others: Tensor) -> Tensor:
        return self.layer(x + others[0]).masked_fill(torch.arange(64) >= 60, -torch.inf)


def test_arguments_without_names_and_infinities_are_verified_too(tmp_path: Path) -> None:
    model, inputs = quantized(Masked(), "int8"), (torch.ones(2, 64), torch.eye(2, 64))
    export_onnx(model, tmp_path / "model.onnx", example_inputs=inputs)
    outputs = OnnxModel(tmp_path / "model.onnx")(*inputs)["masked_fill"]
    np.testing.assert_allclose(outputs, dequantized_outputs(model, *inputs)[0], rtol=1e-4, atol=1e-5)


def test_large_weights_go_to_a_second_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "_LARGEST_FILE_BYTES", 1000)
    model = quantized(Convolutional(), "int8")
    for name in ("model.onnx", "model.onnx.data"):
        (tmp_path / name).write_bytes(b"of an earlier export")
    export_onnx(model, tmp_path / "model.onnx", example_inputs=images(2), verify=False)
    assert sorted(os.listdir(tmp_path)) == ["model.onnx", "model.onnx.data"]
    assert verify_onnx_model(tmp_path / "model.onnx", model.eval(), images(2))
    export_onnx(model, tmp_path / "model.onnx", example_inputs=images(2), external_data=False, verify=False)
    assert os.listdir(tmp_path) == ["model.onnx"]


@pytest.mark.parametrize("external_data", by_default((True,), (False, True)))
def test_a_full_disk_leaves_the_old_files(tmp_path: Path, external_data: bool) -> None:
    model, names = quantized(Convolutional(), "int8"), ["model.onnx", "model.onnx.data"]
    for name in names:
        (tmp_path / name).write_bytes(b"old")
    with no_file_beyond(2000), pytest.raises(SaveError, match="File too large"):
        export_onnx(model, tmp_path / "model.onnx", example_inputs=images(2), external_data=external_data)
    assert {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)} == dict.fromkeys(names, b"old")


def test_a_model_in_bfloat16_is_refused_with_the_way_out(tmp_path: Path) -> None:
    model = quantized("bert", "int8", torch.bfloat16)
    with pytest.raises(UnsupportedError, match=r"found weights in torch\.bfloat16\. Load it with dtype=torch\.float32"):
        export_onnx(model, tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_computes_something_else_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = quantized(Convolutional(), "int8")
    (tmp_path / "model.onnx").write_bytes(b"what was there")
    target = writer._TARGETS["portable"]
    monkeypatch.setattr(target, "dequantize", lambda self, weight: -weight.buffers["codes"].to(torch.float32))
    with pytest.raises(UnsupportedError, match="which is too much"):
        export_onnx(model, tmp_path / "model.onnx", example_inputs=images(2))
    assert (tmp_path / "model.onnx").read_bytes() == b"what was there"
    assert os.listdir(tmp_path) == ["model.onnx"]


def test_wrong_options_are_refused(tmp_path: Path) -> None:
    model, out = quantized(Convolutional(), "int8"), tmp_path / "model.onnx"
    with pytest.raises(ConfigError, match=r"^runtime: expected one of portable, onnxruntime, found 'tensorrt'"):
        export_onnx(model, out, example_inputs=images(2), runtime="tensorrt")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^opset: expected 21 or later, found 13"):
        export_onnx(model, out, example_inputs=images(2), opset=13)
    for opset in ("21", 21.0, None):
        with pytest.raises(ConfigError, match=rf"^opset: expected 21 or later, found {opset!r}\. Leave it out"):
            export_onnx(model, out, example_inputs=images(2), opset=opset)  # type: ignore[arg-type]
    for names in ("pixels", [1], 1):
        with pytest.raises(ConfigError, match=r"^output_names: expected a list of names, found .*(1|pixels)"):
            export_onnx(model, out, example_inputs=images(2), output_names=names)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^opset: expected one that the exporter can write, found 99, for which it"):
        export_onnx(model, out, example_inputs=images(2), opset=99, verify=False)
    with pytest.raises(ConfigError, match=r"^runtime: expected one of portable, onnxruntime, found \['portable'\]"):
        export_onnx(model, out, example_inputs=images(2), runtime=["portable"])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^task: expected None or one of .*, found \[\]"):
        export_onnx(model, out, task=[])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^out: expected a file that ends in \.onnx"):
        export_onnx(model, tmp_path, example_inputs=images(2))
    with pytest.raises(ConfigError, match=r"^example_inputs: expected inputs for a Convolutional, found None"):
        export_onnx(model, out)
    with pytest.raises(ConfigError, match="expected quantized weights, found none"):
        export_onnx(nn.Linear(64, 64), out, example_inputs=torch.zeros(1, 64))
    with pytest.raises(ConfigError, match="config"):
        export_onnx(tmp_path, out)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(SaveError, match="file"):
        export_onnx(model, tmp_path / "file" / "model.onnx", example_inputs=images(2))
    assert os.listdir(tmp_path) == ["file"]
