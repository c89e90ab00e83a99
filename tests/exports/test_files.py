"""What the exporters of single files have in common: what fails leaves the file that was there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from architectures import ARCHITECTURES
from exports.models import Convolutional, images, no_file_beyond, quantized

from hf_trainweights import export_program, export_torchscript
from hf_trainweights.errors import ConfigError, SaveError

EXPORTERS = pytest.mark.parametrize(
    ("export", "name"),
    [(export_program, "model.pt2"), (export_torchscript, "model.pt")],
    ids=["program", "torchscript"],
)


@pytest.mark.slow
@EXPORTERS
def test_a_full_disk_leaves_the_old_file(tmp_path: Path, export: Callable[..., Any], name: str) -> None:
    model = quantized(Convolutional(), "int8")
    (tmp_path / name).write_bytes(b"old")
    with no_file_beyond(2000), pytest.raises(SaveError, match="File too large"):
        export(model, tmp_path / name, images(2))
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"old"]
    export(model, tmp_path / name, images(2))
    assert [path.read_bytes() != b"old" for path in tmp_path.iterdir()] == [True]


@pytest.mark.slow
@EXPORTERS
@pytest.mark.parametrize("source", ["nowhere", "empty", "float"])
def test_a_directory_without_a_quantized_model_is_refused(
    tmp_path: Path, export: Callable[..., Any], name: str, source: str
) -> None:
    (tmp_path / "empty").mkdir()
    ARCHITECTURES["vit"].build().save_pretrained(tmp_path / "float")
    expected = "quantized weights, found none" if source == "float" else "a model that Transformers loads"
    with pytest.raises(ConfigError, match=f"expected {expected}"):
        export(tmp_path / source, tmp_path / name)
    assert not (tmp_path / name).exists()
