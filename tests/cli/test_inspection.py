"""`trainweights inspect`, `verify` and `diff`: exit codes, what is printed where, and JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from command_line import run, run_json
from helpers import flip_a_bit
from safetensors.torch import load_file, save_file

from hf_trainweights.files.digests import write_digests
from hf_trainweights.kernels import compiled


@pytest.mark.slow
def test_inspect_sums_up_by_format_and_shows_the_ten_largest(int4: Path) -> None:
    result = run("inspect", int4)
    assert (result.exit_code, result.stderr) == (0, "")
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["int4", "g32", "14", "46.1", "kB"] in rows
    assert rows[5][:2] == ["total", "21"]
    assert result.stdout.splitlines()[6] == f"on this machine: {compiled.describe()}"
    names = [row[0] for row in rows[10:-1]]
    by_size = sorted(run_json("inspect", int4)["tensors"], key=lambda each: each["stored_bytes"], reverse=True)
    assert names == [each["name"] for each in by_size[:10]]
    assert result.stdout.endswith("\nand 11 smaller ones; --tensors shows them all\n")


@pytest.mark.slow
def test_inspect_shows_all_tensors_if_asked(int4: Path) -> None:
    result = run("inspect", int4, "--tensors")
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["model.layers.0.mlp.up_proj.weight", "int4", "g32", "[128,", "64]", "5.1", "kB"] in rows
    names = {tensor["name"] for tensor in run_json("inspect", int4)["tensors"]}
    assert names <= {row[0] for row in rows if row}
    assert "smaller" not in result.stdout


@pytest.mark.slow
def test_inspect_says_which_products_serve(int4: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "is_available", lambda: False)
    assert run_json("inspect", int4)["products"] == "no compiled products"
    assert "on this machine: no compiled products\n" in run("inspect", int4).stdout


def test_inspect_warns_of_a_file_that_it_does_not_unpickle(tmp_path: Path) -> None:
    torch.save({"weight": torch.zeros(3), "threshold": pytest.approx(1.0)}, tmp_path / "odd.pt")
    result = run("inspect", tmp_path / "odd.pt")
    assert result.exit_code == 0
    assert "data/0" in result.stdout
    assert result.stderr.startswith("warning: odd.pt was not unpickled: it would call ")
    assert "ApproxScalar" in run_json("inspect", tmp_path / "odd.pt")["unsafe"]["odd.pt"][0]


@pytest.mark.slow
def test_verify_finds_a_flipped_bit_and_a_foreign_file(int4: Path) -> None:
    result = run("verify", int4)
    assert (result.exit_code, result.stderr) == (0, "")
    assert f"{int4}: intact, 1 weight files" in result.stdout
    assert "not covered" not in result.stdout
    assert "written by hf_trainweights" in result.stdout
    flip_a_bit(int4 / "model.safetensors", -1)
    (int4 / "pytorch_model.bin").touch()
    result = run("verify", int4)
    assert result.exit_code == 1
    assert f"problem: {int4 / 'model.safetensors'}: has another SHA-256" in result.stderr
    assert f"problem: {int4 / 'pytorch_model.bin'}: was not saved with the model" in result.stderr
    report = run_json("verify", int4, exit_code=1)
    assert list(report["problems"]) == ["model.safetensors"]
    assert report["ok"] is False
    assert report["foreign"] == ["pytorch_model.bin"]


@pytest.mark.slow
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


@pytest.mark.slow
def test_diff_measures_what_quantizing_costs(llama: Path, int4: Path) -> None:
    result = run_json("diff", llama, int4)
    rows = {row["name"]: row for row in result["tensors"]}
    assert 0.05 < rows["model.layers.0.mlp.up_proj.weight"]["relative_l2"] < 0.12
    assert rows["model.norm.weight"]["largest"] == 0
    assert [row["name"] for row in result["totals"]] == ["all of weights"]
    printed = run("diff", llama, int4)
    assert (printed.exit_code, printed.stderr) == (0, "")
    lines = printed.stdout.splitlines()
    decibels = [float(line.split()[1]) for line in lines[2:16]]
    assert decibels == sorted(decibels)
    assert "model.norm.weight" not in printed.stdout
    assert lines[-1].startswith("7 of 21 are equal; dB: ")


@pytest.mark.slow
def test_diff_shows_only_the_worst_if_asked(llama: Path, int4: Path) -> None:
    worst = run_json("diff", llama, int4)["tensors"]
    result = run_json("diff", llama, int4, "--top", 2)
    assert result["tensors"] == worst[:2]
    assert result["equal"] == 7
    printed = run("diff", llama, int4, "--top", 2).stdout
    assert [line.split()[0] for line in printed.splitlines()[2:4]] == [each["name"] for each in worst[:2]]
    assert printed.splitlines()[-1].startswith("12 more differ, 7 of 21 are equal")


def test_of_many_problems_ten_are_shown_and_json_has_all(llama: Path, tmp_path: Path) -> None:
    save_file({f"w{index}": torch.zeros(1) for index in range(30)}, tmp_path / "other.safetensors")
    result = run("diff", llama / "model.safetensors", tmp_path / "other.safetensors")
    lines = result.stderr.splitlines()
    assert (result.exit_code, len(lines), lines[-1]) == (1, 11, "problem: 41 more; --json has all")
    assert len(run_json("diff", llama, tmp_path / "other.safetensors", exit_code=1)["problems"]) == 51


def test_diff_of_two_files_exits_with_1_where_keys_differ(llama: Path, tmp_path: Path) -> None:
    tensors = load_file(llama / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "other.safetensors")
    result = run("diff", llama / "model.safetensors", tmp_path / "other.safetensors")
    assert result.exit_code == 1
    assert result.stderr == f"problem: lm_head.weight is only in {llama / 'model.safetensors'}\n"


@pytest.mark.slow
@pytest.mark.parametrize("command", ["inspect", "verify", "diff", "export", "dequantize", "push", "quantize"])
@pytest.mark.parametrize("source", ["{missing}", "no/such/path", "name with spaces"])
def test_a_path_that_is_missing_is_said_to_be_missing(command: str, source: str, tmp_path: Path) -> None:
    more = {
        "diff": (tmp_path,),
        "export": (tmp_path / "out", "--to", "gguf"),
        "dequantize": (tmp_path / "out",),
        "push": ("me/model",),
        "quantize": (tmp_path / "out", "--format", "int8"),
    }
    path = source.format(missing=tmp_path / "missing")
    result = run(command, path, *more.get(command, ()))
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(
        f"error: {path}: expected a path, or the id of a model on the Hub, found nothing there"
    )
    assert result.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
