"""A .pt2 file computes what the dequantized model computes, and needs neither this package nor Transformers."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES
from covering import by_default, exhaustive
from exports.elsewhere import read_elsewhere
from exports.models import FORMATS, Convolutional, dequantized_outputs, images, quantized
from torch import nn

from hf_trainweights.errors import ConfigError, UnsupportedError
from hf_trainweights.exports import export_program

pytestmark = pytest.mark.slow  # an export takes seconds


@pytest.mark.parametrize("config", by_default(("int8", "uint6", "int4 g32", "codebook4 with column scales"), FORMATS))
def test_a_program_of_any_module_takes_free_dimensions(tmp_path: Path, config: str) -> None:
    model = quantized(Convolutional(), config)
    shapes = {"image": {0: torch.export.Dim("batch", min=1, max=64)}}
    export_program(model, tmp_path / "model.pt2", images(2), dynamic_shapes=shapes)
    program = torch.export.load(tmp_path / "model.pt2")
    outputs = program.module()(images(5))
    torch.testing.assert_close(outputs, dequantized_outputs(model, images(5))[0], rtol=1e-6, atol=1e-6)
    stored = program.state_dict["scores.1._weight_qdata"]
    assert torch.equal(stored.view(torch.uint8), model.scores[1].weight.qdata.view(torch.uint8))
    assert "scores.1.weight" not in program.state_dict


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """Return a quantized model and its program, whose batch and length are free."""
    model, path = quantized("bert", "int8"), tmp_path_factory.mktemp("bert") / "model.pt2"
    free = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", max=64)}
    export_program(model, path, dynamic_shapes={"input_ids": free, "attention_mask": free})
    return model, path


def assert_returns_named_tensors_elsewhere(model: Any, path: Path, inputs: dict[str, torch.Tensor]) -> None:
    outputs = read_elsewhere(path, inputs)
    assert list(outputs) == ["logits"]
    torch.testing.assert_close(outputs["logits"], dequantized_outputs(model, **inputs)[0], rtol=1e-6, atol=1e-6)


def test_a_program_of_a_transformer_returns_named_tensors(bert: tuple[Any, Path]) -> None:
    inputs = ARCHITECTURES["bert"].inputs(bert[0])
    assert_returns_named_tensors_elsewhere(*bert, {name: inputs[name] for name in ("input_ids", "attention_mask")})


@pytest.mark.parametrize("architecture", exhaustive("bert", "llama_tied", "vit"))
def test_so_do_programs_of_other_transformers(tmp_path: Path, architecture: str) -> None:
    model = quantized(architecture, "int4 g32")
    inputs = ARCHITECTURES[architecture].inputs(model)
    export_program(model, tmp_path / "model.pt2", inputs)
    assert_returns_named_tensors_elsewhere(model, tmp_path / "model.pt2", inputs)


def test_batch_and_length_of_a_transformer_are_free_by_the_names_of_its_arguments(bert: tuple[Any, Path]) -> None:
    model, path = bert
    program = torch.export.load(path).module()
    for batch, length in ((1, 5), (3, 11)):
        ids = torch.arange(batch * length).view(batch, length)
        inputs = {"input_ids": ids, "attention_mask": (ids != length - 1).long()}
        wanted = dequantized_outputs(model, **inputs)[0]
        torch.testing.assert_close(program(**inputs)["logits"], wanted, rtol=1e-6, atol=1e-6)


def test_an_argument_that_dynamic_shapes_leaves_out_keeps_its_shape(tmp_path: Path) -> None:
    model = quantized("vit", "int8")
    inputs = ARCHITECTURES["vit"].inputs(model)
    export_program(model, tmp_path / "model.pt2", dynamic_shapes={})
    program = torch.export.load(tmp_path / "model.pt2").module()
    torch.testing.assert_close(
        program(**inputs)["logits"], dequantized_outputs(model, **inputs)[0], rtol=1e-6, atol=1e-6
    )
    with pytest.raises(AssertionError, match="Guard failed"):
        program(pixel_values=inputs["pixel_values"][:1])


@pytest.mark.exhaustive
@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor compiles C++, and there is no g++ here")
@pytest.mark.parametrize("architecture", ["linear", "convolutional", "bert"])
def test_a_program_is_compiled_ahead_of_time(tmp_path: Path, architecture: str) -> None:
    built = {"linear": nn.Linear(64, 32), "convolutional": Convolutional()}
    model = quantized(built.get(architecture, architecture), "int8")
    given = {"linear": {"input": torch.linspace(-1, 1, 128).view(2, 64)}, "convolutional": {"image": images(2)}}
    inputs = given[architecture] if architecture in given else ARCHITECTURES[architecture].inputs(model)
    export_program(model, tmp_path / "model.pt2", inputs, aot=True)
    found = torch._inductor.aoti_load_package(str(tmp_path / "model.pt2"))(**inputs)
    found = found["logits"] if isinstance(found, dict) else found
    wanted = dequantized_outputs(model, **inputs)[0]
    assert (found - wanted).norm() <= 1e-6 * wanted.norm()


def test_a_tied_weight_is_stored_once(tmp_path: Path) -> None:
    model = quantized("llama_tied", "int8")
    export_program(model, tmp_path / "model.pt2")
    with zipfile.ZipFile(tmp_path / "model.pt2") as members:
        sizes = [member.file_size for member in members.infolist()]
    assert sizes.count(model.get_input_embeddings().weight.numel()) == 1


def test_a_saved_model_is_exported_from_its_directory(tmp_path: Path) -> None:
    model = quantized("vit", "int8", torch.bfloat16)
    model.save_pretrained(tmp_path / "saved")
    export_program(tmp_path / "saved", tmp_path / "model.pt2")
    inputs = ARCHITECTURES["vit"].inputs(model)
    outputs = torch.export.load(tmp_path / "model.pt2").module()(**inputs)["logits"]
    assert torch.equal(outputs, dequantized_outputs(model, **inputs)[0])


def test_an_error_names_the_module_that_torch_export_stumbled_over(tmp_path: Path) -> None:
    model = quantized(nn.Sequential(nn.Linear(64, 64), nn.Sequential(nn.ReLU(), nn.Linear(32, 64))), "int8")
    with pytest.raises(UnsupportedError, match=r"^Sequential\.1\.1: expected a module that torch\.export can hold"):
        export_program(model, tmp_path / "model.pt2", torch.ones(2, 64))
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_the_compiler_is_ours_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise torch._inductor.exc.InvalidCxxCompiler

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", fail)
    with pytest.raises(UnsupportedError, match="a module that AOTInductor can hold, found InvalidCxxCompiler"):
        export_program(quantized(Convolutional(), "int8"), tmp_path / "model.pt2", images(2), aot=True)
    assert list(tmp_path.iterdir()) == []


def test_wrong_options_are_refused(tmp_path: Path) -> None:
    model = quantized(Convolutional(), "int8")
    with pytest.raises(
        ConfigError, match=rf"^out: expected a file that ends in \.pt2, .*Write to {tmp_path}/model\.pt2,"
    ):
        export_program(model, tmp_path / "model.pt", images(2))
    with pytest.raises(ConfigError, match=r"^example_inputs: expected inputs for a Convolutional, found None"):
        export_program(model, tmp_path / "model.pt2")
    with pytest.raises(ConfigError, match="expected quantized weights"):
        export_program(Convolutional(), tmp_path / "model.pt2", images(2))
    bert = quantized("bert", "int8")
    with pytest.raises(ConfigError, match=r"^dynamic_shapes: expected names among input_ids, .*, found image"):
        export_program(bert, tmp_path / "model.pt2", dynamic_shapes={"image": {0: torch.export.Dim("batch")}})
    assert list(tmp_path.iterdir()) == []
