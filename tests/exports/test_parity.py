"""Each target computes with each model what the dequantized model computes, from the same codes, without a float copy.

A model has all formats at once, its weights taking turns, so one export shows many; which weight begins differs by
target and model.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from architectures import ARCHITECTURES, outputs, random_floats
from covering import by_default, exhaustive
from exports.models import Convolutional, dequantized_outputs, images
from stock_reader import StockReader
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from benchmarks import quality
from hf_trainweights import QuantizedTensor, TrainWeightsConfig, export_compressed_tensors, quantize_
from hf_trainweights.exports import OnnxModel, export_onnx, export_program, export_torchscript

# What tracers say of Transformers' own code.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")]

FORMATS: tuple[dict[str, Any], ...] = (
    {"format": "int8"},
    {"format": "int4", "group_size": 32},
    {"format": "float8_e4m3"},
    {"format": "int8", "group_size": 32},
    {"format": "int4", "group_size": 128},
)
GRAPH_FORMATS = (
    *FORMATS,
    *({"format": f"uint{bits}", "group_size": 32 if bits % 2 else 16} for bits in range(2, 7)),
    {"format": "codebook4"},
    {"format": "uint3", "group_size": 32, "column_scale": True},
    {"format": "int4", "group_size": 32, "column_scale": True},
    {"format": "coded", "column_scale": True},
)
# Scales repeated for shorter blocks take less than this; a graph's own constants are small.
SPARE, SPARE_BYTES = 1.05, 2048

Inputs = dict[str, Tensor]


def whisper_encoder() -> nn.Module:
    return ARCHITECTURES["whisper"].build().get_encoder()


def convolutional() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Convolutional().eval()


def text_inputs() -> Inputs:
    mask = (torch.arange(16) < torch.tensor([[16], [12], [9]])).long()
    return {"input_ids": torch.arange(1000, 1048).view(3, 16), "attention_mask": mask}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Inputs]]] = {
    **{name: (ARCHITECTURES[name].build, ARCHITECTURES[name].make_inputs) for name in ("llama", "llama_tied", "vit")},
    "convolutional": (convolutional, lambda: {"image": images(2)}),
    **{name: (ARCHITECTURES[name].build, ARCHITECTURES[name].make_inputs) for name in ("qwen3_moe", "gpt2")},
    "whisper encoder": (whisper_encoder, lambda: {"input_features": random_floats(2, 16, 32)}),
    "minilm": (quality.load, text_inputs),
}


@dataclass(frozen=True)
class Stored:
    """A tensor in a file."""

    is_float: bool
    shape: tuple[int, ...]
    octets: bytes

    @classmethod
    def of(cls, tensor: Tensor) -> Stored:
        octets = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return cls(tensor.dtype == torch.float32, tuple(tensor.shape), octets)


class OnnxFile:
    """An ONNX file, run by ONNX Runtime."""

    def __init__(self, runtime: Any):
        self.runtime = runtime

    def write(self, model: nn.Module, path: Path, inputs: Inputs) -> None:
        export_onnx(model, path, example_inputs=inputs, runtime=self.runtime, verify=False)

    def outputs(self, path: Path, inputs: Inputs) -> list[Tensor]:
        return list(map(torch.from_numpy, OnnxModel(path).predict(inputs).values()))

    def stored(self, path: Path) -> Iterator[Stored]:
        graph = onnx.load(path).graph
        constants = [node.attribute[0].t for node in graph.node if node.op_type == "Constant"]
        for tensor in (*graph.initializer, *constants):
            yield Stored(tensor.data_type == onnx.TensorProto.FLOAT, tuple(tensor.dims), tensor.raw_data)


class TorchScriptFile:
    """A TorchScript file, run by PyTorch."""

    def write(self, model: nn.Module, path: Path, inputs: Inputs) -> None:
        export_torchscript(model, path, inputs)

    def outputs(self, path: Path, inputs: Inputs) -> list[Tensor]:
        outputs = torch.jit.load(path)(*inputs.values())
        return list(outputs) if isinstance(outputs, tuple) else [outputs]

    def stored(self, path: Path) -> Iterator[Stored]:
        yield from map(Stored.of, unique(torch.jit.load(path).state_dict().values()))


class ProgramFile:
    """A file of torch.export, run by PyTorch."""

    def write(self, model: nn.Module, path: Path, inputs: Inputs) -> None:
        export_program(model, path, inputs)

    def outputs(self, path: Path, inputs: Inputs) -> list[Tensor]:
        return tree_leaves(torch.export.load(path).module()(**inputs))

    def stored(self, path: Path) -> Iterator[Stored]:
        program = torch.export.load(path)
        constants = (value for value in program.constants.values() if isinstance(value, Tensor))
        yield from map(Stored.of, unique([*program.state_dict.values(), *constants]))


TARGETS: dict[str, OnnxFile | TorchScriptFile | ProgramFile] = {
    "script.pt": TorchScriptFile(),
    "program.pt2": ProgramFile(),
    "onnxruntime.onnx": OnnxFile("onnxruntime"),
    "portable.onnx": OnnxFile("portable"),
}


def unique(tensors: Any) -> list[Tensor]:
    """Return tensors without those that share another's memory, as those of a tied weight do."""
    return list({(tensor.data_ptr(), tensor.numel()): tensor for tensor in tensors}.values())


def quantized_by_turns(
    make: Callable[[], nn.Module], first: int, formats: Sequence[Mapping[str, Any]] = GRAPH_FORMATS
) -> nn.Module:
    """Return a model whose weights take turns at the formats that fit them, from the given one on."""
    model, turns = make(), itertools.islice(itertools.cycle(formats), first, None)
    embeddings = formats is GRAPH_FORMATS
    overrides = {}
    for name, columns in quantizable(make(), embeddings).items():
        overrides[name] = next(turn for turn in turns if columns % turn.get("group_size", 1) == 0)
    quantize_(model, TrainWeightsConfig(overrides=overrides, include_embeddings=embeddings))
    return model


def quantizable(model: nn.Module, embeddings: bool) -> dict[str, int]:
    """Return the names of the weights that can be quantized, and the lengths of their rows."""
    quantize_(model, TrainWeightsConfig(include_embeddings=embeddings))
    return {name: weight.stored_shape[-1] for name, weight in quantized_weights(model)}


def quantized_weights(model: nn.Module) -> list[tuple[str, QuantizedTensor]]:
    return [(name, weight) for name, weight in model.named_parameters() if isinstance(weight, QuantizedTensor)]


def other_values(inputs: Inputs) -> Inputs:
    """Return other values of the same shapes; what an export took for a constant, they show."""
    return {name: value if name == "attention_mask" else value.flip(-1, 0) for name, value in inputs.items()}


def assert_close(found: list[Tensor], wanted: list[Tensor]) -> None:
    assert len(found) == len(wanted) > 0
    for own, other in zip(found, wanted, strict=True):
        assert (own - other).abs().max() < 1e-5 * (other.max() - other.min())


def assert_holds_the_codes_alone(stored: list[Stored], model: nn.Module) -> None:
    """Check that a file has the codes of each weight once and bit for bit, no float copy of it, and little else."""
    for name, weight in quantized_weights(model):
        codes = weight.qdata.view(torch.uint8)
        # As they lie here; with the sign bit of each int8 code flipped; with that of each nibble flipped.
        forms = {(codes ^ flip).numpy().tobytes() for flip in (0, 0x80, 0x88)}
        assert sum(tensor.octets in forms for tensor in stored) == 1, name
        shapes = (tuple(weight.shape), tuple(weight.shape)[::-1])
        assert not any(tensor.is_float and tensor.shape in shapes for tensor in stored), name
    assert sum(len(tensor.octets) for tensor in stored) <= SPARE * payload_bytes(model) + SPARE_BYTES


def payload_bytes(model: nn.Module) -> int:
    parts = [w.tensors.values() if isinstance(w, QuantizedTensor) else [w] for w in model.parameters()]
    return sum(tensor.nbytes for tensors in parts for tensor in tensors) + sum(
        buffer.nbytes for buffer in model.buffers()
    )


# The smallest model with each target, and a larger one with the quickest.
FEW = [*(("convolutional", target) for target in TARGETS if target != "script.pt"), ("qwen3_moe", "script.pt")]


@pytest.mark.parametrize(("name", "target"), by_default(FEW, itertools.product(MODELS, TARGETS)))
def test_a_file_computes_what_the_model_computes_from_its_codes_alone(tmp_path: Path, name: str, target: str) -> None:
    make, make_inputs = MODELS[name]
    model = quantized_by_turns(make, list(MODELS).index(name) + list(TARGETS).index(target))
    file, path, inputs = TARGETS[target], tmp_path / target, make_inputs()
    file.write(model, path, inputs)
    for given in (inputs, other_values(inputs)):
        assert_close(file.outputs(path, given), dequantized_outputs(model, **given))
    assert_holds_the_codes_alone(list(file.stored(path)), model)


@pytest.mark.parametrize("target", ["script.pt", *exhaustive("program.pt2")])
@pytest.mark.parametrize("name", [*exhaustive("llama_tied", "vit", "qwen3_moe"), "gpt2"])
def test_a_file_of_a_bfloat16_model_computes_what_it_computes(tmp_path: Path, name: str, target: str) -> None:
    model = quantized_by_turns(lambda: ARCHITECTURES[name].build(torch.bfloat16), list(MODELS).index(name))
    file, path, inputs = TARGETS[target], tmp_path / target, ARCHITECTURES[name].inputs(model)  # type: ignore[arg-type]
    file.write(model, path, inputs)
    for own, other in zip(file.outputs(path, inputs), dequantized_outputs(model, **inputs), strict=True):
        # GPT-2 keeps weights transposed: a float one has other strides than codes, so its product rounds otherwise.
        assert (own - other).abs().max() <= (2e-2 * other.abs().max() if name == "gpt2" else 0)


@pytest.mark.parametrize("name", exhaustive("vit", "whisper", "bert", "minilm"))
def test_a_checkpoint_of_all_formats_is_read_to_the_same_model(tmp_path: Path, name: str, reader: StockReader) -> None:
    make = quality.load if name == "minilm" else ARCHITECTURES[name].build
    model = quantized_by_turns(make, len(name), FORMATS)
    inputs = text_inputs() if name == "minilm" else ARCHITECTURES[name].inputs(model)  # type: ignore[arg-type]
    export_compressed_tensors(model, tmp_path / "out")  # type: ignore[arg-type]
    found = reader.outputs(tmp_path / "out", inputs)
    model.dequantize()  # type: ignore[operator]
    assert all(torch.equal(own, other) for own, other in zip(found, outputs(model, inputs), strict=True))
