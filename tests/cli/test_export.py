"""`trainweights export`: exit codes, what is printed where, and JSON."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest
from architectures import ARCHITECTURES, DECODER
from command_line import run, run_json, unwrapped
from covering import exhaustive
from tiny_tokenizers import byte_level
from transformers import LlamaConfig, LlamaForCausalLM

from hf_trainweights import TrainWeightsConfig, quantize_

NEEDS_ONNX = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("onnx_ir", "onnxscript", "onnxruntime")),
    reason="an export to ONNX needs the packages of the extra onnx",
)


@pytest.fixture(scope="module")
def vit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("vit")
    model = ARCHITECTURES["vit"].build()
    quantize_(model, TrainWeightsConfig("int8"))
    model.save_pretrained(directory)
    return directory


@pytest.mark.slow
def test_export_writes_the_layout(int4: Path, tmp_path: Path) -> None:
    result = run_json("export", int4, tmp_path / "ct", "--to", "compressed-tensors")
    assert result["disk_bytes"] == (tmp_path / "ct" / "model.safetensors").stat().st_size
    config = json.loads((tmp_path / "ct" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    assert (tmp_path / "ct" / "tokenizer.json").exists()
    assert run("export", int4, tmp_path / "keras", "--to", "keras").exit_code == 2
    assert not (tmp_path / "keras").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "options", "name"),
    [
        ("torchscript", (), "model.pt"),
        *exhaustive(("pt2", (), "model.pt2")),
        pytest.param("onnx", (), "model.onnx", marks=[NEEDS_ONNX, pytest.mark.exhaustive]),
        pytest.param("onnx", ("--runtime", "onnxruntime"), "model.onnx", marks=[NEEDS_ONNX, pytest.mark.exhaustive]),
    ],
)
def test_export_writes_one_call_of_a_model(
    layout: str, options: tuple[str, ...], name: str, vit: Path, tmp_path: Path
) -> None:
    result = run_json("export", vit, tmp_path / name, "--to", layout, *options)
    size = (tmp_path / name).stat().st_size
    assert (result["layout"], result["disk_bytes"]) == (layout, size)
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.slow
def test_an_export_of_one_call_prints_its_size_or_an_error_in_one_line(vit: Path, tmp_path: Path) -> None:
    result = run("export", vit, tmp_path / "model.pt", "--to", "torchscript", width=400)
    assert result.exit_code == 0
    (line,) = result.stderr.splitlines()
    assert re.fullmatch(r"warning: PyTorch deprecates TorchScript, .* `--to pt2` uses torch\.export", line)
    assert result.stdout.startswith(f"written to {tmp_path / 'model.pt'}: torchscript, ")
    refused = run("export", vit, tmp_path / "other.pt", "--to", "pt2")
    assert (refused.exit_code, refused.stdout, refused.stderr.count("\n")) == (1, "", 1)
    assert refused.stderr.startswith("error: out: expected a file")


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("layout", ["compressed-tensors", "gguf", "onnx", "torchscript", "pt2"])
@pytest.mark.parametrize("kind", ["file", "directory"])
def test_export_overwrites_nothing(layout: str, kind: str, int4: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    file = target / "thesis.txt" if kind == "directory" else target
    file.parent.mkdir(exist_ok=True)
    file.write_text("mine")
    refused = run("export", int4, target, "--to", layout)
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert refused.stderr.startswith(f"error: {target}: expected a new name, found something there")
    assert file.read_text() == "mine"


@pytest.mark.slow
def test_export_overwrites_no_data_beside_an_onnx_file(int4: Path, tmp_path: Path) -> None:
    (tmp_path / "model.onnx.data").write_text("mine")
    refused = run("export", int4, tmp_path / "model.onnx", "--to", "onnx")
    assert "model.onnx.data: expected a new name" in refused.stderr
    assert (tmp_path / "model.onnx.data").read_text() == "mine"


@pytest.mark.slow
def test_export_takes_a_runtime_for_onnx_alone(int4: Path, tmp_path: Path) -> None:
    result = run("export", int4, tmp_path / "model.pt2", "--to", "pt2", "--runtime", "onnxruntime", width=400)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "pt2 has no runtimes; only onnx has." in unwrapped(result.stderr)
    assert list(tmp_path.glob("model*")) == []


@pytest.mark.slow
def test_export_writes_a_file_for_llama_cpp(tmp_path: Path) -> None:
    config = LlamaConfig(**{**DECODER, "vocab_size": 400, "bos_token_id": None})
    LlamaForCausalLM(config).half().save_pretrained(tmp_path / "float")
    byte_level(size=400).save_pretrained(tmp_path / "float")
    run_json("quantize", tmp_path / "float", tmp_path / "int8", "--format", "int8")
    file = tmp_path / "model.gguf"
    result = run_json("export", tmp_path / "int8", file, "--to", "gguf")
    assert result == {
        "source": str(tmp_path / "int8"),
        "out": str(file),
        "layout": "gguf",
        "disk_bytes": file.stat().st_size,
    }
    refused = run("export", tmp_path / "int8", tmp_path / "directory", "--to", "gguf")
    assert (refused.exit_code, refused.stderr.count("\n")) == (1, 1)
    assert refused.stderr.endswith(f"Name a file, as {tmp_path / 'directory.gguf'}.\n")


@pytest.mark.slow
def test_export_of_what_the_layout_cannot_hold_is_an_error_in_one_line(llama: Path, tmp_path: Path) -> None:
    run_json("quantize", llama, tmp_path / "int8", "--format", "int8", "--include-embeddings")
    result = run("export", tmp_path / "int8", tmp_path / "ct", "--to", "compressed-tensors")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("error: model.embed_tokens.weight: ")
    assert result.stderr.count("\n") == 1
