"""Reports: one file without scripts and links, hostile names in it are text, and a damaged source writes nothing."""

from __future__ import annotations

import os
import re
import weakref
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from architectures import make_llama, make_qwen3_moe
from checkpoint.sharded_states import save_alone
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from hf_trainweights import TrainWeightsConfig, quantize_, write_report
from hf_trainweights.checkpoint.dcp.reader import ShardedContents
from hf_trainweights.errors import ConfigError, CorruptFileError, SaveError
from hf_trainweights.files.disk import claim_file
from hf_trainweights.report import write
from hf_trainweights.report.write import read_weights, write_text

HOSTILE = '"><img src=x onerror=alert(1)><script>alert(2)</script>{{ 7 * 7 }}&amp;\x1b[31m'
SAFE_TAGS = {
    *("html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "section", "div", "table", "thead", "tbody"),
    *("tr", "th", "td", "details", "summary", "svg", "text", "rect", "line", "circle", "polyline"),
}


class Tags(HTMLParser):
    """The tags and attributes of a page."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}


def page_of(file: Path) -> str:
    """Return a report, checked to be safe to open anywhere."""
    text = file.read_text(encoding="utf-8")
    tags = Tags(text)
    assert tags.tags <= SAFE_TAGS
    assert {name for name in tags.attributes if name.startswith("on") or name in ("src", "href", "action")} == set()
    assert not re.search(r"url\(|@import|https?://", text)
    assert "prefers-color-scheme: dark" in text
    return text


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    torch.manual_seed(0)
    return make_llama()


@pytest.fixture(scope="module")
def saved(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The directories of a float model and of its quantized twin."""
    root = tmp_path_factory.mktemp("models")
    model.save_pretrained(root / "float")
    twin = type(model).from_pretrained(root / "float")
    quantize_(twin, TrainWeightsConfig("int4", group_size=32, overrides={"re:.*down_proj": {"format": "int8"}}))
    twin.save_pretrained(root / "int4")
    return root / "float", root / "int4"


@pytest.mark.slow
def test_a_report_of_a_quantized_model_names_formats_errors_and_the_worst_weights(
    saved: tuple[Path, Path], tmp_path: Path
) -> None:
    report = write_report(saved[1], tmp_path / "r.html", against=saved[0])
    text = page_of(tmp_path / "r.html")
    for part in ("int4 g32", "int8", "The worst 10", "dB", "output error", "histograms", "down_proj", "torch "):
        assert part.lower() in text.lower()
    lines = "\n".join(report.lines)
    assert re.search(r"MB|kB", lines)
    assert re.search(r"int4 g32: \d+, ", lines)
    assert "0 without a counterpart" in lines
    assert str(report).endswith(f"report: {tmp_path / 'r.html'}")


def test_the_worst_weights_come_first(saved: tuple[Path, Path], tmp_path: Path) -> None:
    write_report(saved[1], tmp_path / "r.html", against=saved[0])
    worst = page_of(tmp_path / "r.html").partition("The worst")[2].partition("</table>")[0]
    errors = [float(each) for each in re.findall(r"<td>(\d+\.\d)</td>", worst)]
    assert len(errors) == 10
    assert errors == sorted(errors)
    assert worst.count("<title>codes of ") == 10


def test_a_weight_that_has_become_nan_is_the_worst(tmp_path: Path) -> None:
    weights = {"broken": torch.ones(4, 4), "good": torch.ones(4, 4)}
    save_file(weights, tmp_path / "a.safetensors")
    save_file(
        {"broken": weights["broken"] / torch.eye(4) * 0, "good": weights["good"] + 0.1}, tmp_path / "b.safetensors"
    )
    report = write_report(tmp_path / "b.safetensors", tmp_path / "report.html", tmp_path / "a.safetensors")
    assert report.lines[-3:] == ("  -inf dB  broken", "  20.0 dB  good", "0 equal, 0 without a counterpart")
    worst = page_of(tmp_path / "report.html").partition("The worst 2")[2].partition("All weights")[0]
    assert worst.index("broken") < worst.index("good")


@pytest.mark.slow
def test_a_model_in_memory_and_its_directory_are_reported_alike(
    model: PreTrainedModel, saved: tuple[Path, Path], tmp_path: Path
) -> None:
    twin = type(model).from_pretrained(saved[1])
    in_memory = write_report(twin, tmp_path / "a.html", against=model)
    on_disk = write_report(saved[1], tmp_path / "b.html", against=saved[0])
    # A `_format` tensor, which a file has for a weight of another format, is not a weight in memory.
    assert in_memory.lines[-1] == on_disk.lines[-1]
    assert [line for line in in_memory.lines if "dB" in line] == [line for line in on_disk.lines if "dB" in line]


def test_without_a_counterpart_there_are_histograms_and_no_errors(saved: tuple[Path, Path], tmp_path: Path) -> None:
    write_report(saved[1], tmp_path / "r.html")
    text = page_of(tmp_path / "r.html")
    assert "The largest 10" in text
    assert "<h2>Error</h2>" not in text
    assert text.count("<title>codes of ") == 10


@pytest.mark.slow
def test_merged_experts_are_compared_with_the_experts_of_a_float_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = make_qwen3_moe()
    model.save_pretrained(tmp_path / "float")
    model = type(model).from_pretrained(tmp_path / "float", quantization_config=TrainWeightsConfig("int8"))
    model.save_pretrained(tmp_path / "int8")
    report = write_report(tmp_path / "int8", tmp_path / "r.html", against=tmp_path / "float")
    assert report.lines[-1].endswith("0 without a counterpart")
    assert "experts.gate_up_proj" in page_of(tmp_path / "r.html")


def test_hostile_names_of_tensors_and_models_stay_text(tmp_path: Path) -> None:
    directory = tmp_path / HOSTILE.replace("/", "|").replace("\x1b", "")
    directory.mkdir()
    save_file(
        {HOSTILE: torch.randn(8, 64), f"layers.0.{HOSTILE}.weight": torch.ones(4)}, directory / "model.safetensors"
    )
    write_report(directory, tmp_path / "r.html", against=directory)
    text = page_of(tmp_path / "r.html")
    assert "&lt;script&gt;" in text
    assert "49" not in re.findall(r"&amp;lt;/script|script&gt;(\d+)", text)
    assert "\x1b" not in text


def test_weights_of_files_are_mapped_and_not_read(saved: tuple[Path, Path], tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(1 << 22)}, tmp_path / "model.safetensors")
    before = _resident_bytes()
    weights = read_weights(tmp_path)
    assert weights["weight"].stored_bytes == 1 << 24
    assert _resident_bytes() - before < 1 << 23


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * 4096


@pytest.mark.parametrize("name", ["report.txt", "model.safetensors", "report"])
def test_a_report_is_not_written_over_a_file_of_another_kind(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("precious")
    with pytest.raises(ConfigError, match=r"expected a file name that ends in \.html"):
        write_report(nn.Linear(2, 2), tmp_path / name)
    assert (tmp_path / name).read_text() == "precious"


def test_a_source_that_is_missing_is_an_error_that_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected a model, .*, found nothing\. .*snapshot_download"):
        write_report("someone/some-model", tmp_path / "r.html")
    assert list(tmp_path.iterdir()) == []


def test_a_module_without_weights_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected weights, found none"):
        write_report(nn.ReLU(), tmp_path / "r.html")


def test_a_damaged_file_writes_no_report_and_keeps_the_old_one(saved: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "r.html").write_text("the old one")
    (tmp_path / "model").mkdir()
    whole = (saved[0] / "model.safetensors").read_bytes()
    (tmp_path / "model" / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CorruptFileError, match=r"model\.safetensors: expected"):
        write_report(tmp_path / "model", tmp_path / "r.html")
    assert (tmp_path / "r.html").read_text() == "the old one"


@pytest.mark.slow
def test_a_directory_that_takes_no_file_is_a_save_error(tmp_path: Path) -> None:
    with pytest.raises(SaveError, match="No report was written"):
        write_report(nn.Linear(2, 2), tmp_path / "missing" / "r.html")


def test_of_many_layers_the_largest_are_drawn_and_all_are_listed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("hf_trainweights.report.models._MOST_ROWS", 3)
    layers = nn.Sequential(*(nn.Linear(8 * (1 + i % 2), 8) for i in range(7)))
    write_report(layers, tmp_path / "r.html")
    text = page_of(tmp_path / "r.html")
    assert "(the 4 smallest are left out)" in text
    assert all(f"<td>{i}.weight</td>" in text for i in range(7))


def test_the_page_names_machine_and_versions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(write, "default_caption", lambda: HOSTILE)
    write_report(nn.Linear(2, 2), tmp_path / "r.html")
    assert "&lt;script&gt;" in page_of(tmp_path / "r.html")
    monkeypatch.undo()
    write_report(nn.Linear(2, 2), tmp_path / "r.html")
    assert re.search(r"hf_trainweights \S+, torch \S+, transformers \S+; .*\d cores; ", page_of(tmp_path / "r.html"))


def test_what_a_killed_writer_left_is_removed_by_the_next_report(tmp_path: Path) -> None:
    claim, descriptor = claim_file(tmp_path)
    os.close(descriptor)
    claim.release()
    write_text(tmp_path / "report.html", "text", "Nothing was written.")
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_weights_of_a_sharded_checkpoint_are_read_one_after_the_other_and_only_to_be_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = {f"layers.{row}.weight": torch.randn(8 + row, 16) for row in range(12)}
    save_alone({"model": weights}, tmp_path / "dcp")
    read, most = [], 0
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    original = ShardedContents.read_tensor

    def read_tensor(contents: ShardedContents, name: str) -> torch.Tensor:
        nonlocal most
        read.append(name)
        alive.add(tensor := original(contents, name))
        most = max(most, len(alive))
        return tensor

    monkeypatch.setattr(ShardedContents, "read_tensor", read_tensor)
    write_report(tmp_path / "dcp", tmp_path / "report.html")
    assert sorted(read) == sorted(f"model.layers.{row}.weight" for row in range(2, 12))  # ten histograms
    read.clear()
    save_file({name: weight + 0.01 for name, weight in weights.items()}, tmp_path / "other.safetensors")
    write_report(tmp_path / "dcp", tmp_path / "report.html", against=tmp_path / "other.safetensors")
    assert len(set(read)) == 12
    assert most <= 2
    assert "12 weights" in page_of(tmp_path / "report.html")
