"""The picture of a run: sizes and loss beside each other, legible on a light and on a dark page."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from report.test_charts import assert_legible

from hf_trainweights.errors import ConfigError, SaveError
from hf_trainweights.report.write import plot_run

HISTORY = [*({"step": step, "loss": 6 - step / 10} for step in range(1, 21)), {"step": 20, "eval_loss": 4.5}]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    root = tmp_path / "a run"
    for step in (10, 20):
        path = root / f"checkpoint-{step}"
        path.mkdir(parents=True)
        (path / "model.safetensors").write_bytes(b"w" * 1000)
        (path / "optimizer.pt").write_bytes(b"m" * 2000)
        (path / "trainer_state.json").write_text(json.dumps({"log_history": HISTORY}))
    return root


def texts(svg: str) -> list[str]:
    return [each.text or "" for each in ElementTree.fromstring(svg).iter() if each.tag.endswith("}text")]


def test_sizes_and_losses_stand_beside_each_other(run: Path, tmp_path: Path) -> None:
    plot_run(run, tmp_path / "out.svg")
    svg = (tmp_path / "out.svg").read_text(encoding="utf-8")
    assert_legible(svg)
    shown = texts(svg)
    assert {"Bytes of each checkpoint", "step 10", "step 20", "kB", "weights", "moments of the optimizer"} <= {*shown}
    assert {"Loss", "loss", "eval_loss", "step"} <= {*shown}
    assert shown[-1].startswith("a run: 2 checkpoints, ")
    left, right = (each.attrib["transform"] for each in ElementTree.fromstring(svg) if each.tag.endswith("}g"))
    assert (left, right) == ("translate(0.0 0.0)", "translate(760.0 0.0)")


def test_a_picture_that_is_shown_alone_has_a_light_or_dark_background(run: Path, tmp_path: Path) -> None:
    plot_run(run, tmp_path / "out.svg")
    svg = (tmp_path / "out.svg").read_text(encoding="utf-8")
    light, dark = svg.split("@media (prefers-color-scheme: dark)")
    assert "rect.page { fill: #ffffff; }" in light
    assert "rect.page { fill: #0d1117; }" in dark
    first = next(each for each in ElementTree.fromstring(svg) if each.tag.endswith("}rect"))
    assert (first.attrib["class"], first.attrib["width"]) == ("page", "100%")


def test_without_a_log_only_the_sizes_are_drawn(run: Path, tmp_path: Path) -> None:
    for file in run.rglob("trainer_state.json"):
        file.unlink()
    plot_run(run, tmp_path / "out.svg")
    svg = (tmp_path / "out.svg").read_text(encoding="utf-8")
    assert_legible(svg)
    assert "Loss" not in texts(svg)


@pytest.mark.parametrize("name", ["out.html", "out.HTML"])
def test_an_html_file_is_the_report_of_the_run(run: Path, tmp_path: Path, name: str) -> None:
    plot_run(run, tmp_path / name)
    text = (tmp_path / name).read_text(encoding="utf-8")
    assert text.startswith("<!DOCTYPE html>")
    assert "<h2>Checkpoints</h2>" in text
    assert "<h2>Loss</h2>" in text


@pytest.mark.parametrize("name", ["out.png", "out", "model.safetensors"])
def test_a_file_of_another_kind_is_not_replaced(run: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"mine")
    with pytest.raises(ConfigError, match=r"expected a file name that ends in \.svg or \.html"):
        plot_run(run, tmp_path / name)
    assert (tmp_path / name).read_bytes() == b"mine"


@pytest.mark.parametrize("where", ["checkpoint-10", "nowhere"])
def test_what_is_no_run_is_refused(run: Path, tmp_path: Path, where: str) -> None:
    with pytest.raises(ConfigError, match=r"expected a run: .* Give the run"):
        plot_run(run / where, tmp_path / "out.svg")
    assert not (tmp_path / "out.svg").exists()


def test_a_file_that_cannot_be_written_is_a_save_error(run: Path, tmp_path: Path) -> None:
    with pytest.raises(SaveError, match="No picture was written"):
        plot_run(run, tmp_path / "missing" / "out.svg")
