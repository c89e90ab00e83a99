"""`trainweights quantize`, `inspect`, `verify`, `diff` and `export`: exit codes, what is printed where, and JSON."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, DECODER
from safetensors.torch import load_file, save_file
from tiny_tokenizers import byte_level
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from hf_trainweights import TrainWeightsConfig, quantize_
from hf_trainweights.errors import ConfigError
from hf_trainweights.files.digests import write_digests
from hf_trainweights.models.directory import load_saved
from hf_trainweights_cli.main import app

NEEDS_ONNX = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("onnx_ir", "onnxscript", "onnxruntime")),
    reason="an export to ONNX needs the packages of the extra onnx",
)


def run(*arguments: object, width: int = 80) -> Any:
    environment = {"COLUMNS": str(width)}
    return CliRunner().invoke(app, [str(each) for each in arguments], env=environment, catch_exceptions=False)


def run_json(*arguments: object, exit_code: int = 0) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == exit_code, result.output
    return json.loads(result.stdout, parse_constant=pytest.fail)


def unwrapped(text: str) -> str:
    return " ".join(text.replace("│", " ").split())


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    ARCHITECTURES["llama"].build().save_pretrained(directory)
    (directory / "tokenizer.json").write_text("{}")
    return directory


@pytest.fixture
def int4(llama: Path, tmp_path: Path) -> Path:
    run_json("quantize", llama, tmp_path / "int4", "--format", "int4", "--group-size", 32)
    return tmp_path / "int4"


@pytest.fixture(scope="module")
def vit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("vit")
    model = ARCHITECTURES["vit"].build()
    quantize_(model, TrainWeightsConfig("int8"))
    model.save_pretrained(directory)
    return directory


@pytest.mark.parametrize(
    ("suffix", "text"),
    [
        ("json", '{"re:.*down_proj": "int8", "lm_head": null, "re:.*q_proj": {"format": "int8", "group_size": 64}}'),
        ("toml", '"re:.*down_proj" = "int8"\nlm_head = false\n"re:.*q_proj" = {format = "int8", group_size = 64}'),
    ],
)
def test_quantize_follows_options_and_rules(suffix: str, text: str, llama: Path, tmp_path: Path) -> None:
    (tmp_path / f"rules.{suffix}").write_text(text)
    options = ("--format", "int4", "--group-size", 32, "--include-embeddings", "--rules", tmp_path / f"rules.{suffix}")
    result = run_json("quantize", llama, tmp_path / "out", *options)
    formats = {row["name"]: row["format"] for row in result["tensors"]}
    assert formats["model.layers.0.mlp.down_proj.weight"] == {"format": "int8", "group_size": None}
    assert formats["model.layers.0.self_attn.q_proj.weight"] == {"format": "int8", "group_size": 64}
    assert formats["model.embed_tokens.weight"] == {"format": "int4", "group_size": 32}
    assert formats["lm_head.weight"] is None
    assert result["bytes_after"] < 0.5 * result["bytes_before"]
    assert load_saved(tmp_path / "out").config.quantization_config.overrides["lm_head"] is None
    assert (tmp_path / "out" / "tokenizer.json").exists()


def test_quantize_keeps_the_choice_of_activations(llama: Path, tmp_path: Path) -> None:
    run_json("quantize", llama, tmp_path / "out", "--format", "int8", "--activations", "int8")
    assert load_saved(tmp_path / "out").config.quantization_config.activations == "int8"


def test_quantize_prints_sizes_within_80_columns(llama: Path, tmp_path: Path) -> None:
    result = run("quantize", llama, tmp_path / "out", "--format", "int8")
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.split() == ["int8", "14", "294.9", "kB", "77.8", "kB", "3.79"] for line in lines)
    assert any(line.split()[:1] == ["total"] for line in lines)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "Missing option '--format'"),
        (("--format", "int3"), "--format: format: expected one of int8, int4, float8_e4m3"),
        (("--format", "int4", "--activations", "int8"), "--format: format int4: expected group_size"),
        (("--format", "int4", "--group-size", "7"), "--group-size: group_size: expected one of 32, 64, 128"),
        (("--format", "int4", "--rules", "{missing}"), "does not exist"),
        (("--format", "int4", "--rules", "{text}"), "cannot be read"),
        (("--format", "int4", "--rules", "{list}"), "holds no table"),
        (("--format", "int4", "--rules", "{wrong}"), "--rules: overrides"),
    ],
)
def test_wrong_usage_exits_with_2_and_writes_nothing(
    arguments: tuple[str, ...], message: str, llama: Path, tmp_path: Path
) -> None:
    for name, text in {"text": "int8", "list": "[]", "wrong": '{"lm_head": "int3"}'}.items():
        (tmp_path / name).write_text(text)
    files = {name: str(tmp_path / name) for name in ("missing", "text", "list", "wrong")}
    result = run("quantize", llama, tmp_path / "out", *(each.format(**files) for each in arguments), width=400)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in unwrapped(result.stderr)
    assert not (tmp_path / "out").exists()


def test_an_error_is_one_line_and_debug_shows_the_traceback(llama: Path, int4: Path) -> None:
    result = run("quantize", llama, int4, "--format", "int8")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(f"error: {int4}: expected a new or empty directory")
    assert result.stderr.count("\n") == 1
    with pytest.raises(ConfigError, match="expected a new or empty directory"):
        run("quantize", llama, int4, "--format", "int8", "--debug")


@pytest.mark.parametrize("width", [80, 120])
def test_inspect_prints_every_tensor_and_totals(width: int, int4: Path) -> None:
    result = run("inspect", int4, width=width)
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= width
    rows = [line.split() for line in lines]
    assert ["model.layers.0.mlp.up_proj.weight", "int4", "g32", "[128,", "64]", "5.1", "kB"] in rows
    assert any(row[:4] == ["14", "of", "int4", "g32"] for row in rows)
    assert any(row[:1] == ["total"] for row in rows)


def test_inspect_warns_of_a_file_that_it_does_not_unpickle(tmp_path: Path) -> None:
    torch.save({"weight": torch.zeros(3), "threshold": pytest.approx(1.0)}, tmp_path / "odd.pt")
    result = run("inspect", tmp_path / "odd.pt")
    assert result.exit_code == 0
    assert "data/0" in result.stdout
    assert result.stderr.startswith("warning: odd.pt was not unpickled: it would call ")
    assert "ApproxScalar" in run_json("inspect", tmp_path / "odd.pt")["unsafe"]["odd.pt"][0]


def test_verify_finds_a_flipped_bit_and_a_foreign_file(int4: Path) -> None:
    result = run("verify", int4)
    assert (result.exit_code, result.stderr) == (0, "")
    assert f"{int4}: intact, 1 weight files" in result.stdout
    assert "not covered" not in result.stdout
    assert "written by hf_trainweights" in result.stdout
    content = bytearray((int4 / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (int4 / "model.safetensors").write_bytes(content)
    (int4 / "pytorch_model.bin").touch()
    result = run("verify", int4)
    assert result.exit_code == 1
    assert f"problem: {int4 / 'model.safetensors'}: has another SHA-256" in result.stderr
    assert f"problem: {int4 / 'pytorch_model.bin'}: was not saved with the model" in result.stderr
    report = run_json("verify", int4, exit_code=1)
    assert list(report["problems"]) == ["model.safetensors"]
    assert report["foreign"] == ["pytorch_model.bin"]


def test_verify_finds_an_edited_quantization_config_or_says_that_nothing_covers_it(int4: Path) -> None:
    config = json.loads((int4 / "config.json").read_text())
    described = config.pop("quantization_config")
    (int4 / "config.json").write_text(json.dumps({**config, "quantization_config": {**described, "group_size": 64}}))
    result = run("verify", int4)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"problem: {int4 / 'config.json'}: has another quantization_config")
    assert run_json("verify", int4, exit_code=1)["covers_config"] is True
    (int4 / "config.json").unlink()
    write_digests(int4, ["model.safetensors"])
    result = run("verify", int4)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "not covered: the quantization_config in config.json" in result.stdout
    assert run_json("verify", int4)["covers_config"] is False


@pytest.mark.parametrize("found", ["nothing there", "Error no file named model.safetensors"])
def test_a_source_that_is_no_model_is_an_error_in_one_line(found: str, llama: Path, tmp_path: Path) -> None:
    source = tmp_path / "missing"
    if found != "nothing there":
        source.mkdir()
        (source / "config.json").write_bytes((llama / "config.json").read_bytes())
    result = run("quantize", source, tmp_path / "out", "--format", "int8")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(f"error: {source}: expected a model that Transformers loads, found {found}")
    assert result.stderr.count("\n") == 1


def test_diff_measures_what_quantizing_costs(llama: Path, int4: Path) -> None:
    result = run_json("diff", llama, int4)
    rows = {row["key"]: row for row in result["tensors"]}
    assert 0.05 < rows["model.layers.0.mlp.up_proj.weight"]["relative_l2"] < 0.12
    assert rows["model.norm.weight"]["largest"] == 0
    assert [row["key"] for row in result["totals"]] == ["all of weights"]
    printed = run("diff", llama, int4)
    assert (printed.exit_code, printed.stderr) == (0, "")
    assert max(map(len, printed.stdout.splitlines())) <= 80


def test_diff_of_two_files_exits_with_1_where_keys_differ(llama: Path, tmp_path: Path) -> None:
    tensors = load_file(llama / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "other.safetensors")
    result = run("diff", llama / "model.safetensors", tmp_path / "other.safetensors")
    assert result.exit_code == 1
    assert result.stderr == f"problem: lm_head.weight is only in {llama / 'model.safetensors'}\n"


def test_export_writes_the_layout(int4: Path, tmp_path: Path) -> None:
    result = run_json("export", int4, tmp_path / "ct", "--to", "compressed-tensors")
    assert result["disk_bytes"] == (tmp_path / "ct" / "model.safetensors").stat().st_size
    config = json.loads((tmp_path / "ct" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    assert (tmp_path / "ct" / "tokenizer.json").exists()
    assert run("export", int4, tmp_path / "keras", "--to", "keras").exit_code == 2
    assert not (tmp_path / "keras").exists()


@pytest.mark.parametrize(
    ("layout", "options", "name"),
    [
        ("torchscript", (), "model.pt"),
        ("pt2", (), "model.pt2"),
        pytest.param("onnx", (), "model.onnx", marks=NEEDS_ONNX),
        pytest.param("onnx", ("--runtime", "onnxruntime"), "model.onnx", marks=NEEDS_ONNX),
    ],
)
def test_export_writes_one_call_of_a_model(
    layout: str, options: tuple[str, ...], name: str, vit: Path, tmp_path: Path
) -> None:
    result = run_json("export", vit, tmp_path / name, "--to", layout, *options)
    size = (tmp_path / name).stat().st_size
    assert (result["layout"], result["disk_bytes"]) == (layout, size)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_an_export_of_one_call_prints_its_size_or_an_error_in_one_line(vit: Path, tmp_path: Path) -> None:
    result = run("export", vit, tmp_path / "model.pt", "--to", "torchscript", width=400)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith(f"{tmp_path / 'model.pt'}: torchscript, ")
    for layout, name in (("pt2", "model.pt"), ("torchscript", ".")):
        refused = run("export", vit, tmp_path / name, "--to", layout)
        assert (refused.exit_code, refused.stdout, refused.stderr.count("\n")) == (1, "", 1)
        assert refused.stderr.startswith("error: out: expected a file")


def test_export_takes_a_runtime_for_onnx_alone(int4: Path, tmp_path: Path) -> None:
    result = run("export", int4, tmp_path / "model.pt2", "--to", "pt2", "--runtime", "onnxruntime", width=400)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "pt2 has no runtimes; only onnx has." in unwrapped(result.stderr)
    assert list(tmp_path.glob("model*")) == []


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


def test_export_of_what_the_layout_cannot_hold_is_an_error_in_one_line(llama: Path, tmp_path: Path) -> None:
    run_json("quantize", llama, tmp_path / "int8", "--format", "int8", "--include-embeddings")
    result = run("export", tmp_path / "int8", tmp_path / "ct", "--to", "compressed-tensors")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("error: model.embed_tokens.weight: ")
    assert result.stderr.count("\n") == 1
