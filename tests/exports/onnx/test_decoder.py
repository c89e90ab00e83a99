"""A decoder with past generates in ONNX Runtime what Transformers generates with the dequantized model."""

from __future__ import annotations

import copy
import errno
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir
import onnxruntime
import pytest
import torch
from architectures import ARCHITECTURES, DECODER, randomize
from covering import exhaustive
from exports.models import Convolutional, quantized
from simulated_disk import FailingDisk
from torch import Tensor
from transformers import AutoConfig, GenerationConfig, MistralConfig, MistralForCausalLM

from hf_trainweights import QuantizedTensor, dequantize_
from hf_trainweights.errors import ConfigError, SaveError, UnsupportedError
from hf_trainweights.exports import export_onnx
from hf_trainweights.exports.onnx import decoder, writer
from hf_trainweights.files import disk
from hf_trainweights.files.disk import TEMPORARY_PREFIX
from hf_trainweights.models.loading.saved_models import load_saved

# Tests share an export that takes seconds.
pytestmark = pytest.mark.slow

STEPS = 6
FILES = ["config.json", "generation_config.json", "model.onnx"]


def left_padded(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    mask = inputs["attention_mask"].clone()
    mask[0, :3] = 0
    return {**inputs, "attention_mask": mask}


def generated(model: Any, inputs: dict[str, Tensor]) -> list[list[int]]:
    """Return what Transformers generates with dequantized weights."""
    copied = copy.deepcopy(model).eval()
    dequantize_(copied)
    return copied.generate(**inputs, max_new_tokens=STEPS, min_new_tokens=STEPS, do_sample=False).tolist()


def generated_by_file(directory: Path, inputs: dict[str, Tensor]) -> list[list[int]]:
    """Return what a bare loop around ONNX Runtime generates: what a reader without PyTorch would write."""
    session = onnxruntime.InferenceSession(directory / "model.onnx")
    ids, mask = inputs["input_ids"].numpy(), inputs["attention_mask"].numpy()
    taken = {each.name: each.shape for each in session.get_inputs()}
    past = {
        name: np.zeros((len(ids), shape[1], 0, shape[3]), np.float32)
        for name, shape in taken.items()
        if name.startswith("past_key_values")
    }
    new = ids
    for _ in range(STEPS):
        positions = np.maximum(mask.cumsum(-1) - 1, 0)[:, -new.shape[1] :]
        call = {"input_ids": new, "attention_mask": mask, "position_ids": positions, **past}
        logits, *present = session.run(None, {name: call[name] for name in taken})
        past = dict(zip(past, present, strict=True))
        new = logits[:, -1].argmax(-1, keepdims=True)
        ids, mask = np.concatenate([ids, new], 1), np.concatenate([mask, np.ones_like(mask[:, :1])], 1)
    return ids.tolist()


@pytest.mark.parametrize(
    ("architecture", "config", "runtime"),
    [
        *exhaustive(
            ("gpt2", "int4 g32", "portable"),
            ("qwen3_moe", "int4 g32", "onnxruntime"),
            ("llama", "int8", "portable"),
            ("llama", "int4 g32", "onnxruntime"),
            ("llama_tied", "int8", "onnxruntime"),
            ("llama_tied", "int4 g32", "portable"),
            ("gpt2", "int8", "onnxruntime"),
            ("qwen3_moe", "int8", "portable"),
            ("gpt_oss", "int8", "portable"),
        ),
    ],
)
def test_a_loop_around_the_file_generates_the_same_tokens(
    tmp_path: Path, architecture: str, config: str, runtime: Any
) -> None:
    model = quantized(architecture, config)
    export_onnx(model, tmp_path, task="text-generation", runtime=runtime)
    inputs = ARCHITECTURES[architecture].inputs(model)  # type: ignore[arg-type]
    for each in (inputs, left_padded(inputs), {name: value[:1, :1] for name, value in inputs.items()}):
        assert generated_by_file(tmp_path, each) == generated(model, each)
    assert sorted(os.listdir(tmp_path)) == FILES


def tied(dtype: torch.dtype = torch.float32) -> MistralForCausalLM:
    """Return a model of one layer with a sliding window, whose embedding is most of it."""
    torch.manual_seed(0)
    settings = {**DECODER, "num_hidden_layers": 1, "vocab_size": 12288, "tie_word_embeddings": True}
    model = MistralForCausalLM(MistralConfig(**settings, sliding_window=4))
    randomize(model)
    return model.to(dtype).eval()


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the directory of a saved model with a tokenizer's file, and that of its export."""
    root = tmp_path_factory.mktemp("decoder")
    quantized(tied(torch.bfloat16), "int8").save_pretrained(root / "saved")  # type: ignore[operator]
    (root / "saved" / "tokenizer.json").write_text("{}")
    export_onnx(root / "saved", root / "onnx", task="text-generation")
    return root / "saved", root / "onnx"


def test_a_loop_around_the_file_of_a_directory_generates_the_same_tokens_by_a_sliding_window(
    exported: tuple[Path, Path],
) -> None:
    """Though the past holds all tokens."""
    model: Any = load_saved(exported[0]).to(torch.float32)  # type: ignore[arg-type]
    inputs = ARCHITECTURES["llama"].make_inputs()
    for each in (inputs, left_padded(inputs), {name: value[:1, :1] for name, value in inputs.items()}):
        assert generated_by_file(exported[1], each) == generated(model, each)


def test_a_directory_brings_the_files_of_its_tokenizer(exported: tuple[Path, Path]) -> None:
    source, directory = exported
    assert sorted(os.listdir(directory)) == [*FILES, "tokenizer.json"]
    config = AutoConfig.from_pretrained(directory)
    assert not hasattr(config, "quantization_config")
    assert (config.architectures, config.dtype) == (["MistralForCausalLM"], torch.float32)
    assert GenerationConfig.from_pretrained(directory).bos_token_id == 1
    assert "quantization_config" in json.loads((source / "config.json").read_text())


def test_a_file_names_no_file_of_the_machine_it_was_written_on(exported: tuple[Path, Path]) -> None:
    assert b".py" not in (exported[1] / "model.onnx").read_bytes()


def test_names_and_free_dimensions_are_those_that_other_tools_know(exported: tuple[Path, Path]) -> None:
    graph = onnx.load(exported[1] / "model.onnx").graph
    inputs, outputs = (
        {value.name: [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim] for value in values}
        for values in (graph.input, graph.output)
    )
    parts = ["0.key", "0.value"]
    assert inputs == {
        "input_ids": ["batch_size", "sequence_length"],
        "attention_mask": ["batch_size", "total_sequence_length"],
        "position_ids": ["batch_size", "sequence_length"],
        **{f"past_key_values.{part}": ["batch_size", 2, "past_sequence_length", 16] for part in parts},
    }
    total = "past_sequence_length + sequence_length"
    assert outputs == {
        "logits": ["batch_size", "sequence_length", 12288],
        **{f"present.{part}": ["batch_size", 2, total, 16] for part in parts},
    }


def test_a_tied_weight_of_a_directory_is_in_the_file_once(exported: tuple[Path, Path]) -> None:
    assert_each_weight_is_in_the_file_once(load_saved(exported[0]).to(torch.float32), exported[1])  # type: ignore[arg-type]


@pytest.mark.exhaustive
@pytest.mark.parametrize("config", ["int8", "int4 g32", "float8"])
@pytest.mark.parametrize("runtime", ["portable", "onnxruntime"])
def test_a_tied_weight_is_in_the_file_once(tmp_path: Path, config: str, runtime: Any) -> None:
    model = quantized(tied(), config)
    export_onnx(model, tmp_path, task="text-generation", runtime=runtime)
    assert_each_weight_is_in_the_file_once(model, tmp_path)


def assert_each_weight_is_in_the_file_once(model: Any, directory: Path) -> None:
    parts = [w.tensors.values() if isinstance(w, QuantizedTensor) else [w] for w in model.parameters()]
    stored = sum(tensor.nbytes for tensors in parts for tensor in tensors)
    initializers = onnx.load(directory / "model.onnx").graph.initializer
    # Norms may be folded into what follows them.
    assert 0.99 * stored <= sum(len(tensor.raw_data) for tensor in initializers) <= 1.05 * stored


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "feature-extraction"}, r"^task: expected None or one of text-generation, .*, found 'feature"),
        ({"example_inputs": torch.zeros(1)}, "^example_inputs: .* found example_inputs with task='text-generation'"),
        ({"input_names": ["a"], "output_names": ["b"]}, "^input_names: .* found input_names, output_names with task="),
        ({"dynamic_axes": {}}, "^dynamic_axes: .* Leave these out"),
        ({"runtime": "tensorrt"}, "^runtime: expected one of portable, onnxruntime"),
        ({"opset": 13}, "^opset: expected 21 or later, found 13"),
    ],
)
def test_options_that_the_task_does_not_take_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        export_onnx(quantized("llama", "int8"), tmp_path / "out", **{"task": "text-generation", **options})
    assert not (tmp_path / "out").exists()


def test_only_a_directory_without_another_model_is_written_to(exported: tuple[Path, Path], tmp_path: Path) -> None:
    source, _ = exported
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    with pytest.raises(
        ConfigError, match=r"^out: expected a directory without another model, found model\.safetensors"
    ):
        export_onnx(source, source, task="text-generation")
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before
    with pytest.raises(
        ConfigError, match=r"^out: expected a directory for task='text-generation', found .*model\.onnx"
    ):
        export_onnx(source, tmp_path / "model.onnx", task="text-generation")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"^out: expected a directory for task=.*, found .*file"):
        export_onnx(source, tmp_path / "file", task="text-generation")
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("architecture", ["t5", "whisper", "bert", "vit", "mamba", None])
def test_other_models_than_decoders_are_refused(tmp_path: Path, architecture: str | None) -> None:
    model = quantized(architecture or Convolutional(), "int8")
    with pytest.raises(
        UnsupportedError, match=r"a decoder of Transformers .* (Leave task out: then the file|Use task=\"text2text)"
    ):
        export_onnx(model, tmp_path / "out", task="text-generation")
    assert not (tmp_path / "out").exists()


def test_a_float_decoder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected quantized weights, found none"):
        export_onnx(ARCHITECTURES["llama"].build(), tmp_path / "out", task="text-generation")


def test_a_file_of_another_decoder_is_not_verified(exported: tuple[Path, Path]) -> None:
    model = load_saved(exported[0]).to(torch.float32)  # type: ignore[arg-type]
    assert decoder.verify_decoder(exported[1], model)
    model.model.norm.weight.data[0] += 0.1
    report = decoder.verify_decoder(exported[1], model)
    assert [output.name for output in report.outputs if not output.ok] == ["logits of a prompt", "logits of a step"]


def replace_trace(monkeypatch: pytest.MonkeyPatch, graph: object) -> None:
    task = writer.TASKS["text-generation"]._replace(trace=lambda *_: {"model.onnx": graph})
    monkeypatch.setitem(writer.TASKS, "text-generation", task)


def test_an_error_of_the_disk_leaves_the_old_files_or_the_new_ones(
    exported: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_saved(exported[0]).to(torch.float32)  # type: ignore[arg-type]
    graph = onnx_ir.load(exported[1] / "model.onnx")
    replace_trace(monkeypatch, graph)
    export_onnx(model, tmp_path, task="text-generation")
    whole, old, errors = (tmp_path / "model.onnx").read_bytes(), b"old", 0
    for call in range(1, 1000):
        for name in FILES:
            (tmp_path / name).write_bytes(old)
        failing = FailingDisk(call, errno.ENOSPC, for_good=False)
        monkeypatch.setattr(disk, "file_system", failing)
        try:
            export_onnx(model, tmp_path, task="text-generation", verify=False)
        except SaveError:
            errors += 1
        found = [(tmp_path / name).read_bytes() for name in FILES]
        assert [content == old for content in found] in ([True] * 3, [False] * 3)
        assert found[2] in (old, whole)
        # Where the disk refused to clean up, the next save does.
        assert sorted(name for name in os.listdir(tmp_path) if not name.startswith(TEMPORARY_PREFIX)) == FILES
        if failing.count < call:
            break
    assert errors >= 5
    assert sorted(os.listdir(tmp_path)) == FILES


def test_a_disk_that_fills_up_while_the_graph_is_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill_up(graphs: object, directory: Path, external_data: object) -> None:
        (directory / "model.onnx").write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    replace_trace(monkeypatch, None)
    monkeypatch.setattr(writer, "save_graphs", fill_up)
    with pytest.raises(SaveError, match="enough free disk space"):
        export_onnx(quantized("llama", "int8"), tmp_path / "out", task="text-generation")
    assert os.listdir(tmp_path / "out") == []
