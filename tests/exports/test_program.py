"""A .pt2 file computes what the dequantized model computes, and needs neither this package nor Transformers."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from architectures import ARCHITECTURES
from exports.models import FORMATS, Convolutional, dequantized_outputs, images, quantized

from hf_trainweights.errors import ConfigError
from hf_trainweights.exports import export_program

READ = """
import sys, torch
program = torch.export.load(sys.argv[1]).module()
outputs = program(**torch.load(sys.argv[2], weights_only=True))
torch.save(outputs, sys.argv[3])
assert not any(name.partition(".")[0] in ("hf_trainweights", "transformers") for name in sys.modules)
"""


def read_elsewhere(path: Path, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    given, result = path.with_suffix(".inputs"), path.with_suffix(".outputs")
    torch.save(inputs, given)
    subprocess.run([sys.executable, "-W", "ignore", "-c", READ, path, given, result], check=True, cwd=path.parent)
    return torch.load(result, weights_only=True)


@pytest.mark.parametrize("config", FORMATS)
def test_a_program_of_any_module_takes_free_dimensions(tmp_path: Path, config: str) -> None:
    model = quantized(Convolutional(), config)
    shapes = {"image": {0: torch.export.Dim("batch", min=1, max=64)}}
    export_program(model, tmp_path / "model.pt2", images(2), dynamic_shapes=shapes)
    program = torch.export.load(tmp_path / "model.pt2")
    found = program.module()(images(5))
    torch.testing.assert_close(found, dequantized_outputs(model, images(5))[0], rtol=1e-6, atol=1e-6)
    stored = program.state_dict["scores.1._weight_qdata"]
    assert torch.equal(stored.view(torch.uint8), model.scores[1].weight.qdata.view(torch.uint8))
    assert "scores.1.weight" not in program.state_dict


@pytest.mark.parametrize("architecture", ["bert", "llama_tied"])
def test_a_program_of_a_transformer_returns_named_tensors(tmp_path: Path, architecture: str) -> None:
    model = quantized(architecture, "int4 g32")
    inputs = ARCHITECTURES[architecture].inputs(model)
    export_program(model, tmp_path / "model.pt2", inputs)
    found = read_elsewhere(tmp_path / "model.pt2", inputs)
    wanted = dequantized_outputs(model, **inputs)
    assert list(found) == ["logits"]
    torch.testing.assert_close(found["logits"], wanted[0], rtol=1e-6, atol=1e-6)


@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor compiles C++, and there is no g++ here")
def test_a_program_is_compiled_ahead_of_time(tmp_path: Path) -> None:
    model = quantized(Convolutional(), "int8")
    export_program(model, tmp_path / "model.pt2", images(2), aot=True)
    found = torch._inductor.aoti_load_package(str(tmp_path / "model.pt2"))(images(2))
    torch.testing.assert_close(found, dequantized_outputs(model, images(2))[0], rtol=1e-6, atol=1e-6)


def test_wrong_options_are_refused(tmp_path: Path) -> None:
    model = quantized(Convolutional(), "int8")
    with pytest.raises(ConfigError, match=r"^out: expected a file that ends in \.pt2"):
        export_program(model, tmp_path / "model.pt", images(2))
    with pytest.raises(ConfigError, match=r"^example_inputs: expected inputs for a Convolutional, found None"):
        export_program(model, tmp_path / "model.pt2")
    with pytest.raises(ConfigError, match="expected quantized weights"):
        export_program(Convolutional(), tmp_path / "model.pt2", images(2))
    assert list(tmp_path.iterdir()) == []
