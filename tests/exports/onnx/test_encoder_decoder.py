"""An encoder, a decoder and a decoder with past generate in ONNX Runtime what Transformers generates dequantized."""

from __future__ import annotations

import copy
import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir
import onnxruntime
import pytest
import torch
from architectures import ARCHITECTURES, randomize
from covering import exhaustive
from exports.models import Convolutional, bart, quantized
from torch import Tensor, nn
from transformers import AutoConfig, FalconConfig, FalconForCausalLM, GenerationConfig

from hf_trainweights import QuantizedTensor, dequantize_, quantize_
from hf_trainweights.errors import ConfigError, UnsupportedError
from hf_trainweights.exports import export_onnx
from hf_trainweights.exports.onnx import encoder_decoder, writer

# Each export takes seconds.
pytestmark = pytest.mark.slow

STEPS = 6
GRAPHS = ["decoder_model.onnx", "decoder_with_past_model.onnx", "encoder_model.onnx"]
FILES = sorted(["config.json", "generation_config.json", *GRAPHS])
TASKS: dict[str, Any] = {
    "bart": "text2text-generation",
    "whisper": "automatic-speech-recognition",
}


def of_one_layer(name: str) -> Any:
    """Return a model of a single layer on each side, which is exported in half the time; BART shows several."""
    model = ARCHITECTURES[name].make()
    layers = {each: 1 for each in model.config.to_dict() if each.endswith("_layers")}
    torch.manual_seed(0)
    model = type(model)(type(model.config).from_dict(model.config.to_dict() | layers))
    randomize(model)
    return model.eval()


OWN_MODELS: dict[str, Any] = {"bart": bart, **{name: partial(of_one_layer, name) for name in ("t5", "whisper")}}


def build(name: str, config: str) -> Any:
    return quantized(OWN_MODELS[name]() if name in OWN_MODELS else name, config)


def inputs_of(name: str) -> dict[str, Tensor]:
    inputs = ARCHITECTURES["t5" if name == "bart" else name].make_inputs()
    return {key: value for key, value in inputs.items() if key != "decoder_input_ids"}


def generated(model: Any, inputs: dict[str, Tensor]) -> list[list[int]]:
    """Return what Transformers generates with dequantized weights."""
    copied = copy.deepcopy(model).eval()
    dequantize_(copied)
    return copied.generate(**inputs, max_new_tokens=STEPS, min_new_tokens=STEPS, do_sample=False).tolist()


def run(path: Path, call: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    session = onnxruntime.InferenceSession(path)
    names = [each.name for each in session.get_outputs()]
    outputs = session.run(None, {each.name: call[each.name] for each in session.get_inputs()})
    return dict(zip(names, outputs, strict=True))


def generated_by_files(directory: Path, inputs: dict[str, Tensor]) -> list[list[int]]:
    """Return what a bare loop around ONNX Runtime generates: what a reader without PyTorch would write."""
    config = GenerationConfig.from_pretrained(directory)
    call = {name: value.numpy() for name, value in inputs.items()}
    source = {"encoder_hidden_states": run(directory / "encoder_model.onnx", call)["last_hidden_state"]}
    if "attention_mask" in call:
        source["encoder_attention_mask"] = call["attention_mask"]
    ids = np.full((len(next(iter(call.values()))), 1), config.decoder_start_token_id)
    past: dict[str, np.ndarray] = {}
    for _ in range(STEPS):
        file = "decoder_with_past_model.onnx" if past else "decoder_model.onnx"
        outputs = run(directory / file, {**source, **past, "input_ids": ids[:, -1:]})
        ids = np.concatenate([ids, outputs.pop("logits")[:, -1:].argmax(-1)], 1)
        past |= {name.replace("present", "past_key_values"): value for name, value in outputs.items()}
    return ids.tolist()


# Three graphs take most of a minute: tests of them are exhaustive, those of a decoder's run by default.
@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """Return a quantized T5 and the directory of its export."""
    model, directory = build("t5", "int8"), tmp_path_factory.mktemp("t5")
    export_onnx(model, directory, task="text2text-generation")
    return model, directory


def assert_generates_the_same(directory: Path, model: Any, calls: list[dict[str, Tensor]]) -> None:
    for inputs in calls:
        # Whisper's own generate returns no start token.
        found, wanted = generated_by_files(directory, inputs), generated(model, inputs)
        assert [tokens[-STEPS:] for tokens in found] == [tokens[-STEPS:] for tokens in wanted]


@pytest.mark.exhaustive
def test_a_loop_around_the_files_generates_the_same_tokens(exported: tuple[Any, Path]) -> None:
    inputs = inputs_of("t5")
    one = {key: value[1:] for key, value in inputs.items()}
    assert_generates_the_same(exported[1], exported[0], [inputs, one, padded(inputs)])
    assert sorted(os.listdir(exported[1])) == FILES


@pytest.mark.parametrize(("name", "config"), exhaustive(("whisper", "int8"), ("bart", "int4 g32")))
def test_a_loop_around_the_files_of_other_models_does_so_too(tmp_path: Path, name: str, config: str) -> None:
    model, inputs = build(name, config), inputs_of(name)
    export_onnx(model, tmp_path, task=TASKS[name], runtime="onnxruntime")
    calls = [inputs, {key: value[1:] for key, value in inputs.items()}]
    assert_generates_the_same(tmp_path, model, [*calls, *([] if name == "whisper" else [padded(inputs)])])


def padded(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a longer text, the end of whose first row is padding."""
    longer = {name: torch.cat([value, value[:, :3]], 1) for name, value in inputs.items()}
    longer["attention_mask"][0, 5:] = 0
    return longer


@pytest.mark.exhaustive
def test_each_file_holds_the_codes_of_what_it_computes(exported: tuple[Any, Path]) -> None:
    model, directory = exported
    held = {file: {tensor.raw_data for tensor in onnx.load(directory / file).graph.initializer} for file in GRAPHS}
    for name, weight in model.named_parameters():
        if isinstance(weight, QuantizedTensor):
            codes = weight.qdata.numpy().tobytes()
            files = {file for file, tensors in held.items() if codes in tensors}
            is_source = "EncDecAttention.k" in name or "EncDecAttention.v" in name
            decoder = {"decoder_model.onnx"} | (set() if is_source else {"decoder_with_past_model.onnx"})
            encoder = {"encoder_model.onnx"}
            wanted = encoder if name.startswith("encoder.") else decoder
            assert files == (encoder | decoder if name == "shared.weight" else wanted), name


@pytest.mark.exhaustive
def test_names_and_free_dimensions_are_those_that_other_tools_know(exported: tuple[Any, Path]) -> None:
    named = {}
    for file in GRAPHS:
        graph = onnx.load(exported[1] / file).graph
        named[file] = [
            {value.name: [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim] for value in values}
            for values in (graph.input, graph.output)
        ]
    source, step = ["batch_size", "encoder_sequence_length"], ["batch_size", "decoder_sequence_length"]
    parts = ["0.decoder", "0.encoder"]
    past = [f"past_key_values.{part}.{each}" for part in parts for each in ("key", "value")]
    own = [name.replace("past_key_values", "present") for name in past if "decoder" in name]
    assert named["encoder_model.onnx"][0] == {"input_ids": source, "attention_mask": source}
    assert list(named["encoder_model.onnx"][1]) == ["last_hidden_state"]
    assert named["decoder_model.onnx"][0] == {
        "input_ids": step,
        "encoder_hidden_states": [*source, 64],
        "encoder_attention_mask": source,
    }
    assert list(named["decoder_model.onnx"][1]) == ["logits", *(n.replace("past_key_values", "present") for n in past)]
    inputs, outputs = named["decoder_with_past_model.onnx"]
    assert inputs == {
        "input_ids": step,
        "encoder_attention_mask": source,
        **{
            name: ["batch_size", 4, ("past_decoder" if "decoder" in name else "encoder") + "_sequence_length", 16]
            for name in past
        },
    }
    assert list(outputs) == ["logits", *own]


@pytest.mark.exhaustive
def test_files_of_another_model_are_not_verified(exported: tuple[Any, Path]) -> None:
    model, directory = copy.deepcopy(exported[0]).eval(), exported[1]
    assert encoder_decoder.verify_encoder_decoder(directory, model)
    model.decoder.final_layer_norm.weight.data[0] += 0.1
    report = encoder_decoder.verify_encoder_decoder(directory, model)
    assert [output.name for output in report.outputs if not output.ok] == ["logits of a first call", "logits of a step"]


@pytest.mark.exhaustive
def test_a_configuration_lies_beside_the_files(exported: tuple[Any, Path]) -> None:
    config = AutoConfig.from_pretrained(exported[1])
    assert not hasattr(config, "quantization_config")
    assert config.architectures == ["T5ForConditionalGeneration"]


@pytest.mark.parametrize(
    ("name", "task", "found"),
    [
        ("llama", "text2text-generation", "LlamaForCausalLM"),
        ("whisper", "text2text-generation", "WhisperForConditionalGeneration, which takes input_features"),
        ("t5", "automatic-speech-recognition", "T5ForConditionalGeneration, which takes input_ids"),
        (None, "text2text-generation", "Convolutional"),
    ],
)
def test_other_models_are_refused(tmp_path: Path, name: str | None, task: Any, found: str) -> None:
    model: nn.Module = quantized(name or Convolutional(), "int8")
    message = rf"^task='{task}': expected an encoder-decoder of Transformers that takes \w+, found {found}\."
    with pytest.raises(UnsupportedError, match=message):
        export_onnx(model, tmp_path / "out", task=task)
    assert not (tmp_path / "out").exists()


def test_a_float_model_and_a_directory_of_another_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected quantized weights, found none"):
        export_onnx(ARCHITECTURES["t5"].build(), tmp_path / "out", task="text2text-generation")
    assert not (tmp_path / "out").exists()
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"^out: expected a directory without another model"):
        export_onnx(build("t5", "int8"), tmp_path, task="text2text-generation")


@pytest.mark.exhaustive
def test_files_that_compute_something_else_are_not_written(
    exported: tuple[Any, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = {file: onnx_ir.load(exported[1] / file) for file in GRAPHS}
    task = writer.TASKS["text2text-generation"]._replace(trace=lambda *_: graphs)
    monkeypatch.setitem(writer.TASKS, "text2text-generation", task)
    for file in GRAPHS:
        (tmp_path / file).write_bytes(b"what was there")
    model = copy.deepcopy(exported[0])
    export_onnx(model, tmp_path / "same", task="text2text-generation")
    model.encoder.final_layer_norm.weight.data[0] += 0.1
    with pytest.raises(UnsupportedError, match=r"hidden states: off by .* which is too much"):
        export_onnx(model, tmp_path, task="text2text-generation")
    assert {path.read_bytes() for path in tmp_path.glob("*.onnx")} == {b"what was there"}


@pytest.mark.exhaustive
def test_without_a_task_one_call_is_exported(tmp_path: Path) -> None:
    model, inputs = build("t5", "int8"), ARCHITECTURES["t5"].make_inputs()
    export_onnx(model, tmp_path / "model.onnx", example_inputs=inputs, verify=False)
    outputs = run(tmp_path / "model.onnx", {name: value.numpy() for name, value in inputs.items()})
    with torch.no_grad():
        wanted = copy.deepcopy(model).eval()
        dequantize_(wanted)
        logits = wanted(**inputs).logits
    torch.testing.assert_close(torch.from_numpy(next(iter(outputs.values()))), logits, rtol=1e-4, atol=1e-4)


@pytest.mark.exhaustive
def test_what_onnx_has_no_operation_for_is_refused_by_name(tmp_path: Path) -> None:
    sizes = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = FalconForCausalLM(FalconConfig(**sizes, alibi=True)).eval()
    quantize_(model, "int8")
    with pytest.raises(UnsupportedError, match=r"export_torchscript|export_program"):
        export_onnx(model, tmp_path / "model.onnx", example_inputs={"input_ids": torch.arange(8)[None]})
