"""`trainweights quantize` and `dequantize`: exit codes, what is printed where, and JSON."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import torch
from command_line import run, run_json, unwrapped
from safetensors.torch import load_file

from hf_trainweights.errors import ConfigError
from hf_trainweights.models.loading.saved_models import load_saved


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize(("option", "value"), [("--bits", "6.5"), ("--size", "120 kB")])
def test_quantize_chooses_formats_within_a_budget(option: str, value: str, llama: Path, tmp_path: Path) -> None:
    result = run_json("quantize", llama, tmp_path / "out", option, value)
    quantized = [row for row in result["tensors"] if row["format"] is not None]
    bits = 8 * sum(row["bytes_after"] for row in quantized) / sum(row["numel"] for row in quantized)
    assert len({json.dumps(row["format"]) for row in quantized}) > 1
    assert bits <= 6.5 if option == "--bits" else (tmp_path / "out" / "model.safetensors").stat().st_size <= 120_000


@pytest.mark.slow
def test_a_budget_that_is_too_small_is_an_error_that_names_the_smallest(llama: Path, tmp_path: Path) -> None:
    result = run("quantize", llama, tmp_path / "out", "--size", "10kB")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "size: expected at least " in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_quantize_keeps_the_choice_of_activations(llama: Path, tmp_path: Path) -> None:
    run_json("quantize", llama, tmp_path / "out", "--format", "int8", "--activations", "int8")
    assert load_saved(tmp_path / "out").config.quantization_config.activations == "int8"


@pytest.mark.slow
def test_quantize_chooses_codes_with_texts_and_says_what_they_brought(llama: Path, tmp_path: Path) -> None:
    result = run("quantize", llama, tmp_path / "out", "--format", "uint2", "--calibration", "self", width=400)
    assert result.exit_code == 0
    assert "calibrated with 8,192 tokens: the last block's outputs are off by " in result.stdout
    assert f"next: trainweights report {tmp_path / 'out'} {llama} --texts FILE" in result.stdout
    config = load_saved(tmp_path / "out").config.quantization_config
    assert len(config.calibration_sha256) == 64
    assert not (tmp_path / "out.calibration").exists()
    assert "calibrated with 8,192 tokens" in run("inspect", tmp_path / "out", width=400).stdout
    shown = run("diff", llama, tmp_path / "out", width=400).stdout
    blocks = {line.split()[0]: [float(error) for error in line.split()[1:]] for line in shown.splitlines()[-3:-1]}
    assert list(blocks) == ["model.layers.0", "model.layers.1"]
    assert all(after < before for before, after in blocks.values())
    assert run_json("diff", llama, tmp_path / "out")["calibrated"]["tokens"] == 8192


def test_texts_that_cannot_be_read_are_wrong_usage(llama: Path, tmp_path: Path) -> None:
    arguments = ("--format", "int4", "--calibration", tmp_path / "none.txt")
    result = run("quantize", llama, tmp_path / "out", *arguments, width=400)
    assert result.exit_code == 2
    assert "none.txt cannot be read" in unwrapped(result.stderr)


@pytest.mark.slow
def test_quantize_prints_sizes_where_it_wrote_and_what_to_do_next(llama: Path, tmp_path: Path) -> None:
    result = run("quantize", llama, tmp_path / "out")
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert any(line.split() == ["int8", "14", "294.9", "kB", "77.8", "kB", "3.79"] for line in lines)
    assert any(line.split()[:1] == ["total"] for line in lines)
    size_bytes = (tmp_path / "out" / "model.safetensors").stat().st_size
    assert lines[-2:] == [
        f"written to {tmp_path / 'out'}, {size_bytes / 1000:.1f} kB of weight files",
        f"next: trainweights diff {llama} {tmp_path / 'out'}  shows what each weight lost",
    ]


@pytest.mark.slow
def test_the_next_command_takes_names_with_spaces(llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "two words"
    shown = run("quantize", llama, out, width=400).stdout.splitlines()[-1]
    assert shlex.split(shown)[:5] == ["next:", "trainweights", "diff", str(llama), str(out)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--bits", "4", "--format", "int8"), "--format: expected None with bits or size"),
        (("--bits", "4", "--size", "1GB"), "--bits: expected either bits or size"),
        (("--bits", "0"), "--bits: expected a number of bits per weight"),
        (("--for-target", "gguf"), "--for-target: expected bits or size, for which formats are chosen"),
        (("--size", "big"), "--size: expected a number of bytes, or a text such as"),
        (("--bits", "4", "--group-size", "32"), "--group-size: expected None with bits or size"),
        (("--format", "int3"), "--format: 'int3' is none of int8, int4, float8_e4m3"),
        (("--format", "int4", "--activations", "int8"), "--format: expected group_size"),
        (("--format", "int8", "--activations", "int4"), "'int4' is not one of 'int8'"),
        (("--format", "int8", "--dtype", "int8"), "'int8' is not one of 'float32'"),
        (("--format", "int4", "--group-size", "7"), "--group-size: expected one of 32, 64, 128"),
        (("--format", "int4", "--rules", "{missing}"), "does not exist"),
        (("--format", "int4", "--rules", "{text}"), "cannot be read"),
        (("--format", "int4", "--rules", "{list}"), "holds no table"),
        (("--format", "int4", "--rules", "{wrong}"), "--rules: expected one of int8, int4, float8_e4m3"),
    ],
)
def test_wrong_usage_exits_with_2_and_writes_nothing(
    arguments: tuple[str, ...], message: str, llama: Path, tmp_path: Path
) -> None:
    for name, text in {"text": "int8", "list": "[]", "wrong": '{"lm_head": "int3"}'}.items():
        (tmp_path / name).write_text(text)
    files = {name: str(tmp_path / name) for name in ("missing", "text", "list", "wrong")}
    result = run("quantize", llama, tmp_path / "out", *(argument.format(**files) for argument in arguments), width=400)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in unwrapped(result.stderr)
    assert unwrapped(result.stderr).count("expected") <= 1
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_an_error_is_one_line_and_debug_shows_the_traceback(llama: Path, int4: Path) -> None:
    result = run("quantize", llama, int4, "--format", "int8")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(f"error: {int4}: expected a new or empty directory")
    assert result.stderr.count("\n") == 1
    with pytest.raises(ConfigError, match="expected a new or empty directory"):
        run("quantize", llama, int4, "--format", "int8", "--debug")


def test_a_source_that_is_no_model_is_an_error_in_one_line(llama: Path, tmp_path: Path) -> None:
    source = tmp_path / "model"
    source.mkdir()
    (source / "config.json").write_bytes((llama / "config.json").read_bytes())
    result = run("quantize", source, tmp_path / "out", "--format", "int8")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(
        f"error: {source}: expected a model that Transformers loads, found Error no file named model.safetensors"
    )
    assert result.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_quantize_writes_what_is_not_quantized_in_the_dtype(dtype: str, llama: Path, tmp_path: Path) -> None:
    run_json("quantize", llama, tmp_path / "out", "--format", "int8", "--dtype", dtype)
    formats = {row["format"] for row in run_json("inspect", tmp_path / "out")["tensors"]}
    assert formats == {"int8", dtype}


@pytest.mark.slow
@pytest.mark.parametrize(("options", "dtype"), [((), torch.float32), (("--dtype", "bfloat16"), torch.bfloat16)])
def test_dequantize_writes_the_values_of_the_codes_for_stock_transformers(
    options: tuple[str, ...], dtype: torch.dtype, int4: Path, tmp_path: Path
) -> None:
    result = run_json("dequantize", int4, tmp_path / "float", *options)
    assert result["disk_bytes"] == (tmp_path / "float" / "model.safetensors").stat().st_size
    assert (tmp_path / "float" / "tokenizer.json").exists()
    assert "quantization_config" not in json.loads((tmp_path / "float" / "config.json").read_text())
    expected = load_saved(int4)
    expected.dequantize()
    stored = load_file(tmp_path / "float" / "model.safetensors")
    weights = expected.state_dict()
    assert stored.keys() == weights.keys()
    for name, weight in weights.items():
        assert torch.equal(stored[name], weight.to(dtype)), name


@pytest.mark.slow
def test_dequantize_says_where_it_wrote(int4: Path, tmp_path: Path) -> None:
    result = run("dequantize", int4, tmp_path / "float")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith(f"written to {tmp_path / 'float'}: ")


@pytest.mark.slow
def test_dequantize_refuses_a_float_model_and_a_target_that_exists(llama: Path, int4: Path, tmp_path: Path) -> None:
    refused = run("dequantize", llama, tmp_path / "out")
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert "expected a model that this package has quantized, found a float model" in refused.stderr
    before = {path.name: path.read_bytes() for path in int4.iterdir()}
    refused = run("dequantize", int4, int4)
    assert refused.stderr.startswith(f"error: {int4}: expected a new or empty directory")
    assert {path.name: path.read_bytes() for path in int4.iterdir()} == before
    assert not (tmp_path / "out").exists()
