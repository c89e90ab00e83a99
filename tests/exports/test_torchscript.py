"""A TorchScript file computes what the dequantized model computes, and needs this package nowhere."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Literal

import pytest
import torch
from architectures import ARCHITECTURES
from covering import by_default, exhaustive
from exports.elsewhere import read_elsewhere
from exports.models import FORMATS, Branching, Convolutional, dequantized_outputs, images, quantized
from torch import nn

from benchmarks import quality
from hf_trainweights.checkpoint import VersionedModelSaver
from hf_trainweights.errors import ConfigError, UnsupportedError
from hf_trainweights.exports import export_torchscript

pytestmark = pytest.mark.slow  # an export of a transformer takes a second

IDS = torch.arange(12).view(2, 6)


class Unspeakable(nn.Module):
    """Fails where it is traced, uses words that TorchScript lacks, and computes elsewhere."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.jit.is_tracing():
            return torch.ones(1) @ x.mT
        return sum((each for each in [x]), start=torch.zeros(()))


@pytest.mark.parametrize(
    ("config", "optimize"),
    by_default(
        [(config, number % 2 == 0) for number, config in enumerate(FORMATS) if not config.startswith("float8")],
        [
            (config, optimize)
            for config in FORMATS
            for optimize in (False, True)
            if not (config.startswith("float8") and optimize)
        ],
    ),
)
def test_a_scripted_model_keeps_its_control_flow_and_methods(tmp_path: Path, config: str, optimize: bool) -> None:
    model = quantized(Branching(), config)
    export_torchscript(model, tmp_path / "model.pt", method="script", optimize=optimize)
    script = torch.jit.load(tmp_path / "model.pt")
    for ids in (IDS, IDS + 1, IDS[:1, :3]):
        torch.testing.assert_close(script(ids), dequantized_outputs(model, ids)[0], rtol=1e-6, atol=1e-6)
    assert torch.equal(script.embed(IDS), model.embed(IDS))
    if not optimize:
        stored = script.state_dict()["up.recorded._weight_qdata"]
        assert torch.equal(stored.view(torch.uint8), model.up.weight.qdata.view(torch.uint8))


@pytest.mark.parametrize("config", ["int8", *exhaustive(*(name for name in FORMATS if name != "int8"))])
def test_a_traced_module_is_read_without_this_package(tmp_path: Path, config: str) -> None:
    model = quantized(Convolutional(), config)
    export_torchscript(model, tmp_path / "model.pt", images(2))
    outputs = read_elsewhere(tmp_path / "model.pt", [images(5)])
    torch.testing.assert_close(outputs, dequantized_outputs(model, images(5))[0], rtol=1e-6, atol=1e-6)
    assert model.training


def test_a_traced_module_may_have_scripted_methods(tmp_path: Path) -> None:
    model = quantized(Branching(), "int8")
    with pytest.warns(torch.jit.TracerWarning, match="Converting a tensor to a Python integer"):
        export_torchscript(model, tmp_path / "model.pt", {"ids": IDS})
    script = torch.jit.load(tmp_path / "model.pt")
    assert torch.equal(script(IDS), dequantized_outputs(model, IDS)[0])
    assert torch.equal(script.embed(IDS + 3), model.embed(IDS + 3))


def test_a_trace_keeps_the_control_flow_of_functions_that_are_scripted(tmp_path: Path) -> None:
    @torch.jit.script
    def rectified_if_even(values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        if int(ids.sum()) % 2 == 0:
            values = torch.relu(values)
        return values

    class Hybrid(Branching):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.down(rectified_if_even(self.up(self.table(ids)), ids))

    model = quantized(Hybrid(), "int8")
    export_torchscript(model, tmp_path / "model.pt", IDS)
    script = torch.jit.load(tmp_path / "model.pt")
    for ids in (IDS, IDS[:1, :3]):
        torch.testing.assert_close(script(ids), dequantized_outputs(model, ids)[0], rtol=1e-6, atol=1e-6)


def test_a_scripted_model_may_have_a_part_that_was_exported_as_a_trace(tmp_path: Path) -> None:
    class Sum(nn.Module):
        def __init__(self, part: nn.Module) -> None:
            super().__init__()
            self.part = part
            self.scores = nn.Linear(8, 64)

        def forward(self, image: torch.Tensor) -> torch.Tensor:
            scores = self.scores(self.part(image))
            for _ in range(image.size(0)):
                scores = scores * 0.5
            return scores

    part = quantized(Convolutional(), "int4 g32").eval()
    export_torchscript(part, tmp_path / "part.pt", images(2))
    model = Sum(torch.jit.load(tmp_path / "part.pt")).eval()
    script = torch.jit.script(model)
    wanted = model.scores(dequantized_outputs(part, images(3))[0]) * 0.125
    torch.testing.assert_close(script(images(3)), wanted, rtol=1e-6, atol=1e-6)


def changed(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return other values of the same shapes; what a trace took for a constant, they show."""
    return {name: value if name == "attention_mask" else value.flip(-1, 0) for name, value in inputs.items()}


# Transformers' own code asks tensors for Python numbers, which a trace takes for constants.
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.covering(1)
@pytest.mark.parametrize("config", by_default(("int4 g32", "coded"), FORMATS))
@pytest.mark.parametrize(
    "architecture", ["llama_tied", "qwen3_moe", *exhaustive("bert", "llama", "gpt2", "vit", "whisper")]
)
def test_a_traced_transformer_takes_tensors_in_order_and_returns_a_tuple(
    tmp_path: Path, architecture: str, config: str
) -> None:
    model = quantized(architecture, config)
    inputs = ARCHITECTURES[architecture].inputs(model)
    export_torchscript(model, tmp_path / "model.pt", inputs)
    script = torch.jit.load(tmp_path / "model.pt")
    for given in (inputs, changed(inputs)):
        outputs, wanted = script(*given.values()), dequantized_outputs(model, **given)
        assert outputs
        for own, other in zip(outputs, wanted, strict=False):
            assert (own - other).abs().max() <= 1e-6 * other.abs().max()


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("config", exhaustive(*FORMATS))
def test_a_traced_pretrained_model_embeds_as_it_does_itself(tmp_path: Path, config: str) -> None:
    model = quantized(quality.load(), config)
    ids = torch.arange(1000, 1048).view(3, 16)
    inputs = {"input_ids": ids, "attention_mask": (torch.arange(16) < torch.tensor([[16], [12], [9]])).long()}
    export_torchscript(model, tmp_path / "model.pt", inputs)
    outputs = torch.jit.load(tmp_path / "model.pt")(*inputs.values())[0]
    wanted = dequantized_outputs(model, **inputs)[0]
    assert (outputs - wanted).abs().max() <= 1e-6 * wanted.abs().max()


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_the_file_holds_no_float_copy_of_a_quantized_weight(tmp_path: Path) -> None:
    model = quantized("bert", "int4 g32")
    export_torchscript(model, tmp_path / "model.pt")
    tensors = torch.jit.load(tmp_path / "model.pt").state_dict().values()
    shapes = {tuple(weight.shape) for weight in model.parameters() if hasattr(weight, "qdata")}
    assert not [t for t in tensors if t.is_floating_point() and tuple(t.shape) in shapes]


def test_what_torchscript_cannot_compile_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    model = quantized("gpt2", "int8")
    place = r"^GPT2LMHeadModel\.transformer: expected a module that TorchScript can hold, found OSError"
    with pytest.raises(UnsupportedError, match=place):
        export_torchscript(model, tmp_path / "model.pt", method="script")
    assert list(tmp_path.iterdir()) == []


def test_a_frozen_file_that_torchscript_cannot_save_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    model = quantized(Branching(), "float8")
    with pytest.raises(UnsupportedError, match=r"^Branching: expected .*Float8_e4m3fn.* Leave out optimize\."):
        export_torchscript(model, tmp_path / "model.pt", method="script", optimize=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_freezing_moves_a_bfloat16_model_by_a_percent_and_a_float32_model_not_at_all(tmp_path: Path) -> None:
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 2e-2)):
        model = quantized("bert", "int8", dtype)
        inputs = ARCHITECTURES["bert"].inputs(model)
        export_torchscript(model, tmp_path / "model.pt", inputs, optimize=True)
        (outputs,) = torch.jit.load(tmp_path / "model.pt")(*inputs.values())
        (wanted,) = dequantized_outputs(model, **inputs)
        assert (outputs - wanted).norm() <= tolerance * wanted.norm()


@pytest.mark.parametrize("method", ["trace", "script"])
def test_an_error_names_the_module_that_torchscript_stumbled_over(
    tmp_path: Path, method: Literal["trace", "script"]
) -> None:
    model = quantized(nn.Sequential(nn.Linear(64, 64), nn.Sequential(nn.ReLU(), Unspeakable())), "int8")
    with pytest.raises(UnsupportedError, match=r"^Sequential\.1\.1: expected a module that TorchScript can hold"):
        export_torchscript(model, tmp_path / "model.pt", torch.ones(2, 64), method)
    assert list(tmp_path.iterdir()) == []
    assert model(torch.ones(2, 65)[:, :64]).shape == (2, 64)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_tied_weight_is_stored_once(tmp_path: Path) -> None:
    model = quantized("llama_tied", "int8")
    export_torchscript(model, tmp_path / "model.pt")
    with zipfile.ZipFile(tmp_path / "model.pt") as members:
        sizes = [member.file_size for member in members.infolist()]
    assert sizes.count(model.get_input_embeddings().weight.numel()) == 1


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_saved_model_is_exported_from_its_directory(tmp_path: Path) -> None:
    model = quantized("vit", "int8", torch.bfloat16)
    model.save_pretrained(tmp_path / "saved")
    export_torchscript(tmp_path / "saved", tmp_path / "model.pt")
    inputs = ARCHITECTURES["vit"].inputs(model)
    (outputs,) = torch.jit.load(tmp_path / "model.pt")(*inputs.values())
    assert torch.equal(outputs, dequantized_outputs(model, **inputs)[0])


def test_wrong_options_are_refused(tmp_path: Path) -> None:
    model = quantized(Branching(), "int8")
    with pytest.raises(ConfigError, match=r"^method: expected trace or script, found 'guess'"):
        export_torchscript(model, tmp_path / "model.pt", IDS, method="guess")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^example_inputs: expected inputs for a Branching, found None"):
        export_torchscript(model, tmp_path / "model.pt")
    with pytest.raises(ConfigError, match=r"^out: expected a file, found the directory"):
        export_torchscript(model, tmp_path, IDS)
    with pytest.raises(ConfigError, match="expected quantized weights"):
        export_torchscript(Branching(), tmp_path / "model.pt", IDS)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.covering(1)
@pytest.mark.parametrize("config", FORMATS)
@pytest.mark.parametrize("method", ["trace", "script"])
def test_layers_of_every_format_compute_what_the_model_computes(
    tmp_path: Path, config: str, method: Literal["trace", "script"]
) -> None:
    model = quantized(nn.Sequential(nn.Embedding(32, 64), nn.Linear(64, 32)), config)
    ids = torch.arange(12).view(3, 4)
    export_torchscript(model, tmp_path / "model.pt", (ids,), method=method)
    script = torch.jit.load(tmp_path / "model.pt")
    for given in (ids, ids[:1, :3]):
        torch.testing.assert_close(script(given), dequantized_outputs(model, given)[0], rtol=1e-6, atol=1e-6)


@pytest.mark.filterwarnings("always")
@pytest.mark.parametrize("is_version", [False, True])
def test_a_caller_hears_once_that_torchscript_is_deprecated(
    is_version: bool, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    model = quantized(Convolutional(), "int8")
    if is_version:
        VersionedModelSaver(tmp_path).save(model, "1.0", {}, torchscript=True, example_inputs=images(2))
    else:
        export_torchscript(model, tmp_path / "model.pt", images(2))
    (told,) = recwarn
    assert (told.category, told.filename) == (FutureWarning, __file__)
    assert "export_program uses torch.export" in str(told.message)


@pytest.mark.filterwarnings("error:PyTorch deprecates TorchScript")
def test_an_error_that_a_filter_made_of_the_deprecation_leaves_nothing_behind(tmp_path: Path) -> None:
    model = quantized(Convolutional(), "int8")
    with pytest.raises(FutureWarning, match="deprecates TorchScript"):
        export_torchscript(model, tmp_path / "model.pt", images(2))
    assert list(tmp_path.iterdir()) == []
