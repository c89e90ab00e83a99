"""`trainweights import`: exit codes, what is printed, and JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from imports.gguf.files import all_of, write_gguf
from imports.writers import gptq, write_model
from typer.testing import CliRunner

from hf_trainweights_cli.main import app


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_model(tmp_path / "source", gptq())
    return tmp_path / "source"


@pytest.mark.slow
def test_import_prints_the_formats_and_sizes(source: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["import", str(source), str(tmp_path / "out")])
    assert (result.exit_code, result.stderr) == (0, "")
    assert any(line.split()[:3] == ["int4", "g32", "14"] for line in result.stdout.splitlines())
    assert (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.slow
def test_import_as_json_names_each_weight(source: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["import", str(source), str(tmp_path / "out"), "--json"])
    rows = {row["name"]: row["format"] for row in json.loads(result.stdout)["tensors"]}
    assert rows["model.layers.0.self_attn.q_proj.weight"] == {"format": "int4", "group_size": 32}


def test_a_model_that_cannot_be_held_exits_with_1_and_one_line(tmp_path: Path) -> None:
    write_model(tmp_path / "source", gptq(order=lambda K, size: (torch.arange(K) + 1).clamp(max=K - 1) // size))
    result = CliRunner().invoke(app, ["import", str(tmp_path / "source"), str(tmp_path / "out")])
    assert result.exit_code == 1
    assert len(result.stderr.splitlines()) == 1
    assert "groups of different sizes" in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_model_that_is_nowhere_is_one_line_that_says_where_it_was_looked_for(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["import", "nobody/nothing", str(tmp_path / "out")])
    assert result.exit_code == 1
    assert len(result.stderr.splitlines()) == 1
    assert "expected a path, or the id of a model on the Hub" in result.stderr


@pytest.mark.slow
def test_import_reads_the_gguf_file_that_a_pattern_selects(tmp_path: Path) -> None:
    for kind in ("Q4_K", "Q8_0"):
        write_gguf(tmp_path / "source" / f"tiny-{kind}.gguf", kinds=all_of(kind))
    arguments = ["import", str(tmp_path / "source"), str(tmp_path / "out")]
    assert "found 2: tiny-Q4_K.gguf, tiny-Q8_0.gguf" in CliRunner().invoke(app, arguments).stderr
    result = CliRunner().invoke(app, [*arguments, "--file", "*Q4_K*"])
    assert (result.exit_code, result.stderr) == (0, "")
    assert "affine4 k4" in result.stdout
