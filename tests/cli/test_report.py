"""`trainweights report`: what it prints, and where the file goes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from hf_trainweights_cli.main import app


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    monkeypatch.chdir(tmp_path)
    for name, noise in (("b", 0.0), ("a\x1b", 0.01)):
        (tmp_path / name).mkdir()
        save_file({"layer.weight": torch.ones(8, 8) + noise}, tmp_path / name / "model.safetensors")
    return tmp_path / "a\x1b", tmp_path / "b"


def run(*arguments: object):
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def test_the_file_is_named_after_the_model_and_the_summary_says_where_it_is(models: tuple[Path, Path]) -> None:
    result = run(*models)
    assert result.exit_code == 0
    assert Path("a\x1b-report.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert "40.0 dB  layer.weight" in result.stdout
    assert r"report: a\x1b-report.html" in result.stdout


def test_html_names_the_file_and_json_the_same_lines(models: tuple[Path, Path], tmp_path: Path) -> None:
    result = run(*models, "--html", tmp_path / "mine.html", "--json")
    assert json.loads(result.stdout)["file"] == str(tmp_path / "mine.html")
    assert (tmp_path / "mine.html").is_file()


def test_an_error_is_one_line(models: tuple[Path, Path], tmp_path: Path) -> None:
    result = run(models[0], "--html", tmp_path / "model.safetensors")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
