"""Blocks on the disk: a call that was interrupted goes on, and with other texts or weights begins anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from architectures import DECODER
from covering import by_default
from torch import Tensor

from hf_trainweights import TrainWeightsConfig
from hf_trainweights.files.spill import Spill
from hf_trainweights.formats import get_format
from hf_trainweights.models import directory as directories
from hf_trainweights.models.calibration import walk
from hf_trainweights.models.calibration.finished import FinishedBlocks, remove_blocks
from hf_trainweights.models.directory import quantize_directory
from hf_trainweights.models.quantize_in_place import quantize_module

MODEL = {**DECODER, "num_hidden_layers": 3}
CONFIG = TrainWeightsConfig("int4", group_size=32)
WEIGHT, FORM = torch.arange(64.0).view(2, 32), get_format({"format": "int4", "group_size": 32})


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model") / "float"
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**MODEL)).save_pretrained(path)
    return path


@pytest.fixture(autouse=True)
def few_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_trainweights.models.calibration.batches._WINDOW", 16)
    monkeypatch.setattr("hf_trainweights.models.calibration.batches._WINDOWS", 8)
    monkeypatch.setattr("hf_trainweights.models.calibration.batches._TOKENS_AN_INPUT", 1)


def weights_of(out: Path) -> bytes:
    return (out / "model.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("stop_after", by_default((1,), (1, 2)))
def test_a_call_after_an_interruption_chooses_only_what_is_left(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_after: int
) -> None:
    chosen: list[str] = []
    choose = walk.quantize_with_feedback
    quantize_directory(source, tmp_path / "whole", CONFIG, calibration="self")

    def counting(weight: Tensor, *rest: object) -> object:
        chosen.append("")
        if len(chosen) > 7 * stop_after + 3:
            raise KeyboardInterrupt
        return choose(weight, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(walk, "quantize_with_feedback", counting)
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        quantize_directory(source, out, CONFIG, calibration="self")
    assert not out.exists()
    assert len(list((tmp_path / "out.calibration").glob("*.safetensors"))) == stop_after
    chosen.clear()
    monkeypatch.setattr(walk, "quantize_with_feedback", lambda *given: chosen.append("") or choose(*given))
    quantize_directory(source, out, CONFIG, calibration="self")
    assert len(chosen) == 7 * (MODEL["num_hidden_layers"] - stop_after)
    assert weights_of(out) == weights_of(tmp_path / "whole")
    assert [path.name for path in tmp_path.iterdir() if "calibration" in path.name] == []


@pytest.mark.slow
def test_a_save_that_fails_loses_no_block(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(directories, "new_directory", refuse)
        with pytest.raises(OSError, match="No space left"):
            quantize_directory(source, tmp_path / "out", CONFIG, calibration="self")
    assert len(list((tmp_path / "out.calibration").iterdir())) == MODEL["num_hidden_layers"]


@pytest.mark.parametrize(
    ("texts", "name", "weight"),
    [("other", "a", WEIGHT), ("same", "b", WEIGHT), ("same", "a", WEIGHT + 1)],
)
def test_other_texts_names_and_weights_find_nothing(tmp_path: Path, texts: str, name: str, weight: Tensor) -> None:
    written = FinishedBlocks(tmp_path / "new", "same")
    found = written.read([("a", FORM, WEIGHT)])
    assert found is None
    tensors = FORM.quantize(WEIGHT)
    mapped = written.write({"a": tensors})
    assert all(torch.equal(mapped["a"][part], tensors[part]) for part in tensors)
    assert FinishedBlocks(tmp_path / "new", "same").read([("a", FORM, WEIGHT)]) is not None
    assert FinishedBlocks(tmp_path / "new", texts).read([(name, FORM, weight)]) is None


def test_the_block_before_counts_too(tmp_path: Path) -> None:
    blocks = [FinishedBlocks(tmp_path, "same") for _ in range(2)]
    blocks[1].read([("a", FORM, WEIGHT)])
    for block in blocks:
        block.read([("b", FORM, WEIGHT)])
    assert blocks[0]._key != blocks[1]._key


@pytest.mark.parametrize("others", [[], ["texts.safetensors", "abc.part"]])
def test_of_a_directory_only_blocks_are_removed(tmp_path: Path, others: list[str]) -> None:
    directory = tmp_path / "out.calibration"
    blocks = FinishedBlocks(directory, "same")
    blocks.read([("a", FORM, WEIGHT)])
    blocks.write({"a": FORM.quantize(WEIGHT)})
    for name in others:
        (directory / name).touch()
    remove_blocks(directory)
    assert directory.exists() == bool(others)
    assert sorted(path.name for path in directory.glob("*")) == sorted(others)


@pytest.mark.parametrize("lost_bytes", [1, 100, None])
def test_a_file_that_is_cut_off_is_written_anew(tmp_path: Path, lost_bytes: int | None) -> None:
    blocks = FinishedBlocks(tmp_path, "same")
    blocks.read([("a", FORM, WEIGHT)])
    blocks.write({"a": FORM.quantize(WEIGHT)})
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[: -lost_bytes if lost_bytes else 0])
    assert FinishedBlocks(tmp_path, "same").read([("a", FORM, WEIGHT)]) is None


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [{"format": "int4", "group_size": 32}, {"bits": 6.0}], ids=["int4", "bits"])
def test_what_calibration_does_not_choose_lies_in_files_too(
    arguments: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Tensor] = []
    keep = Spill.keep
    monkeypatch.setattr(Spill, "keep", lambda spill, tensor: (kept.append(keep(spill, tensor)), kept[-1])[1])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "head_dim": 128}
        shape: dict[str, Any] = {**DECODER, **sizes}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape))
    batches = [{"input_ids": torch.arange(16).view(1, 16)}]
    config = TrainWeightsConfig(**arguments, overrides={"down_proj": "int8"})
    quantize_module(model, config, batches, tmp_path / "blocks")
    weight: Any = model.get_parameter("model.layers.0.mlp.down_proj.weight")
    assert any(weight.tensors["qdata"] is tensor for tensor in kept)
    # With a budget the copy that is measured lies there too: four matrices of this size or more.
    codes = [each for each in kept if each.dtype == torch.int8 and each.numel() >= 1 << 16]
    assert (len(codes) > 4) == ("bits" in arguments)
