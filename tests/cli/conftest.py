"""Tiny saved models that several commands are tried on."""

from __future__ import annotations

from pathlib import Path

import pytest
from architectures import ARCHITECTURES
from command_line import run_json


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    ARCHITECTURES["llama"].build().save_pretrained(directory)
    (directory / "tokenizer.json").write_text("{}")
    return directory


@pytest.fixture
def int4(llama: Path, tmp_path: Path) -> Path:
    run_json("quantize", llama, tmp_path / "int4", "--format", "int4", "--group-size", 32)
    return tmp_path / "int4"


@pytest.fixture(autouse=True)
def _no_lines_of_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine must not change what a command prints."""
    monkeypatch.setattr("hf_trainweights_cli.console.FIRST_LINE_SECONDS", 3600.0)
