"""One flipped bit, a missing weight file, one too many, a damaged file of digests: verify_model finds each."""

from __future__ import annotations

import copy
import hashlib
import importlib.metadata
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, SERIALIZATIONS, outputs
from transformers import PreTrainedModel

from hf_trainweights import TrainWeightsConfig, latest, quantize_, verify_model
from hf_trainweights.checkpoint.directory import compress_directory
from hf_trainweights.checkpoint.run.checkpoints import verify_checkpoint
from hf_trainweights.errors import ConfigError
from hf_trainweights.files.digests import digests_name, write_digests
from hf_trainweights.files.weight_files import is_weight_file

LLAMA = ARCHITECTURES["llama"]
DIGESTS = digests_name()


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    built = LLAMA.build()
    quantize_(built, TrainWeightsConfig("int8"))
    return built


@pytest.fixture(scope="module", params=SERIALIZATIONS)
def saved(request: pytest.FixtureRequest, model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory that no test changes."""
    directory = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(directory, **SERIALIZATIONS[request.param])
    return directory


@pytest.fixture
def directory(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / "model")


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Return a directory with two small files and their digests."""
    for name in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"):
        (tmp_path / name).write_bytes(name.encode())
    write_digests(tmp_path, [file.name for file in tmp_path.iterdir()])
    return tmp_path


def flip(file: Path, bit: int) -> None:
    data = bytearray(file.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)


def sign(directory: Path, **fields: Any) -> None:
    """Write a file of digests that is what it says, whatever it says."""
    content = {"format": "trainweights-files", "format_version": 1, "files": {}, "versions": {}, "sha256": "", **fields}
    text = json.dumps(content, sort_keys=True, indent=2) + "\n"
    content["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    (directory / DIGESTS).write_text(json.dumps(content, sort_keys=True, indent=2) + "\n")


# ---- what a save writes


@pytest.mark.slow
def test_a_saved_model_carries_a_digest_of_each_weight_file_and_versions(saved: Path) -> None:
    report = verify_model(saved)
    assert report.ok
    assert set(report.files) == {file.name for file in saved.iterdir() if is_weight_file(file.name)}
    packages = ("hf_trainweights", "safetensors", "torch", "transformers")
    assert report.versions == {package: importlib.metadata.version(package) for package in packages}
    content = json.loads((saved / DIGESTS).read_bytes())
    for name, entry in content["files"].items():
        data = (saved / name).read_bytes()
        assert entry == {"sha256": hashlib.sha256(data).hexdigest(), "size_bytes": len(data)}


def test_the_digests_are_those_of_the_last_save(model: PreTrainedModel, tmp_path: Path) -> None:
    for options in SERIALIZATIONS.values():
        model.save_pretrained(tmp_path, **options)
        assert verify_model(str(tmp_path)).ok


def test_variants_have_digests_of_their_own(model: PreTrainedModel, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path, variant="fp16", safe_serialization=False)
    report = verify_model(tmp_path)
    assert report.ok
    assert report.files == ("model.safetensors", "pytorch_model.fp16.bin")
    assert report.versions["hf_trainweights"] == importlib.metadata.version("hf_trainweights")
    (tmp_path / digests_name("fp16")).unlink()
    assert verify_model(tmp_path).foreign == ("pytorch_model.fp16.bin",)


def test_a_float_model_takes_the_digests_of_a_quantized_one_away(model: PreTrainedModel, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path, variant="kept")
    plain = copy.deepcopy(model)
    plain.dequantize()
    plain.save_pretrained(tmp_path)
    assert not (tmp_path / DIGESTS).exists()
    report = verify_model(tmp_path)
    assert (report.files, report.foreign) == (("model.kept.safetensors",), ("model.safetensors",))


# ---- what is found


def test_one_flipped_bit_is_found(directory: Path) -> None:
    for name in verify_model(directory).files:
        file = directory / name
        bits = 8 * file.stat().st_size
        for bit in (0, 8 * 9 + 3, bits // 2, bits - 1):
            flip(file, bit)
            report = verify_model(directory)
            assert not report.ok
            assert report.problems == {name: "has another SHA-256 than when it was saved"}
            flip(file, bit)
    assert verify_model(directory).ok


def test_a_missing_or_cut_file_is_found(directory: Path) -> None:
    *_, first, last = ("", *verify_model(directory).files)
    size_bytes = (directory / last).stat().st_size
    (directory / last).write_bytes((directory / last).read_bytes()[:-1])
    expected = {last: f"has {size_bytes - 1} bytes, not {size_bytes} as when it was saved"}
    assert verify_model(directory).problems == expected
    if first:
        (directory / first).unlink()
        assert verify_model(directory).problems == expected | {first: "is missing"}


@pytest.mark.parametrize(
    "name",
    [
        "model-00009-of-00009.safetensors",
        "model.safetensors.index.fp16.json",
        "pytorch_model.v.bin",
        "adapter_model.safetensors",
        "adapter_model.bin",
        "else.safetensors",
    ],
)
def test_a_foreign_weight_file_is_found(name: str, small: Path) -> None:
    assert verify_model(small).ok
    (small / name).write_bytes(b"foreign")
    report = verify_model(small)
    assert not report.ok
    assert (report.foreign, report.problems) == ((name,), {})


def test_other_files_are_nobodys_business(small: Path) -> None:
    for name in ("training_args.bin", "optimizer.pt", "tokenizer.json", "README.md", "trainweights.json"):
        (small / name).write_bytes(b"other")
    assert verify_model(small).ok


@pytest.mark.slow
def test_a_flipped_bit_of_the_digests_is_found(small: Path) -> None:
    file = small / DIGESTS
    for bit in range(0, 8 * file.stat().st_size, 7):  # at every place in a byte
        flip(file, bit)
        assert not verify_model(small).ok, bit
        flip(file, bit)
    assert verify_model(small).ok


@pytest.mark.parametrize("text", [b"", b"{}", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"format_version": 1}'])
def test_digests_that_cannot_be_read_are_a_problem_and_vouch_for_nothing(text: bytes, small: Path) -> None:
    (small / DIGESTS).write_bytes(text)
    report = verify_model(small)
    assert (report.files, list(report.problems), len(report.foreign)) == ((), [DIGESTS], 2)
    assert "expected digests of weight files, found" in report.problems[DIGESTS]


ENTRY = {"sha256": "0" * 64, "size_bytes": 7}


@pytest.mark.parametrize(
    "fields",
    [
        {"files": {"../model.safetensors": ENTRY}},
        {"files": {"/model.safetensors": ENTRY}},
        {"files": {"config.json": ENTRY}},
        {"files": {"model.safetensors": {"sha256": "0" * 64}}},
        {"files": {"model.safetensors": {"sha256": 0, "size_bytes": 7}}},
        {"files": {"model.safetensors": {"sha256": "0" * 64, "size_bytes": True}}},
        {"files": {"model.safetensors": []}},
        {"files": []},
        {"versions": {"torch": ["2"]}},
        {"versions": None},
        {"more": 1},
        {"quantization_config_sha256": 1},
    ],
)
def test_digests_that_nobody_writes_are_a_problem(fields: dict[str, Any], tmp_path: Path) -> None:
    sign(tmp_path)
    assert verify_model(tmp_path).ok
    sign(tmp_path, **fields)
    assert list(verify_model(tmp_path).problems) == [DIGESTS]


def test_digests_of_a_newer_version_say_so(tmp_path: Path) -> None:
    sign(tmp_path, format_version=2)
    assert "found version 2. Install a newer hf_trainweights" in verify_model(tmp_path).problems[DIGESTS]


# ---- what config.json says about the weights

EDITS: dict[str, Callable[[dict[str, Any]], object]] = {
    "format": lambda config: config["quantization_config"].update(format="float8_e4m3"),
    "version": lambda config: config["quantization_config"].update(version=2),
    "quant_method": lambda config: config["quantization_config"].pop("quant_method"),
    "group_size": lambda config: config["quantization_config"].update(group_size=32),
    "activations": lambda config: config["quantization_config"].update(activations="int8"),
    "another key": lambda config: config["quantization_config"].update(more=1),
    "no quantization_config": lambda config: config.pop("quantization_config"),
}


def edit_config(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    config = json.loads((directory / "config.json").read_bytes())
    change(config)
    (directory / "config.json").write_text(json.dumps(config))


@pytest.mark.slow
@pytest.mark.parametrize("name", EDITS)
def test_an_edit_of_the_quantization_config_is_found(name: str, directory: Path) -> None:
    assert verify_model(directory).covers_config
    edit_config(directory, EDITS[name])
    expected = {"config.json": "has another quantization_config than when the model was saved"}
    assert verify_model(directory).problems == expected


def test_the_rest_of_the_config_is_the_users_to_edit(directory: Path) -> None:
    edit_config(directory, lambda config: config.update(bos_token_id=5, more={"b": 1, "a": 2}))
    assert verify_model(directory).ok


@pytest.mark.slow
@pytest.mark.parametrize(
    ("put", "found"),
    [
        (lambda file: None, "has another quantization_config"),
        (lambda file: file.write_bytes(b"{"), "is JSONDecodeError"),
        (lambda file: file.write_bytes(b"[" * 100_000), "is RecursionError"),
        (lambda file: file.write_bytes(b"[]"), "is a list, not a JSON object"),
        (os.mkfifo, "is a FIFO, not a regular file"),
        (Path.mkdir, "is a directory, not a regular file"),
        (lambda file: file.symlink_to(file), "is a symbolic link in a circle, not a regular file"),
    ],
    ids=["missing", "cut", "deep", "a list", "FIFO", "directory", "loop"],
)
def test_a_config_that_cannot_be_read_is_a_problem(put: Callable[[Path], object], found: str, directory: Path) -> None:
    (directory / "config.json").unlink()
    put(directory / "config.json")
    (problem,) = verify_model(directory).problems.items()
    assert problem[0] == "config.json"
    assert problem[1].startswith(found)


def test_digests_of_an_earlier_version_do_not_cover_the_config_and_say_so(directory: Path) -> None:
    content = json.loads((directory / DIGESTS).read_bytes())
    del content["quantization_config_sha256"]
    sign(directory, **{**content, "sha256": ""})
    edit_config(directory, EDITS["format"])
    report = verify_model(directory)
    assert report.ok
    assert not report.covers_config


def test_a_variant_saved_with_another_config_leaves_the_others_not_described(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    model.save_pretrained(tmp_path)
    int4 = LLAMA.build()
    quantize_(int4, TrainWeightsConfig("int4", group_size=32))
    int4.save_pretrained(tmp_path, variant="int4")
    assert list(verify_model(tmp_path).problems) == ["config.json"]


@pytest.mark.parametrize("name", ["model-00002-of-00002.safetensors", DIGESTS])
def test_a_fifo_in_the_place_of_a_file_is_a_problem(name: str, small: Path) -> None:
    (small / name).unlink()
    os.mkfifo(small / name)
    assert "a FIFO" in verify_model(small).problems[name]


def test_links_are_followed(small: Path, tmp_path: Path) -> None:
    (tmp_path / "snapshot").mkdir()
    for file in [file for file in small.iterdir() if file.is_file()]:
        (tmp_path / "snapshot" / file.name).symlink_to(file)
    assert verify_model(tmp_path / "snapshot").ok
    flip(small / "model-00001-of-00002.safetensors", 5)
    assert list(verify_model(tmp_path / "snapshot").problems) == ["model-00001-of-00002.safetensors"]


@pytest.mark.parametrize(("name", "found"), [("", "none"), ("missing", "no directory")])
def test_a_directory_without_digests_is_refused(name: str, found: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"plain")
    with pytest.raises(ConfigError, match=rf"a directory with {DIGESTS}, found {found}\. Save the model with"):
        verify_model(tmp_path / name)


# ---- beside checkpoints


@pytest.mark.slow
@pytest.mark.parametrize("options", SERIALIZATIONS.values(), ids=SERIALIZATIONS)
def test_a_checkpoint_of_a_quantized_model_is_accepted_and_made_small(
    options: dict[str, Any], model: PreTrainedModel, tmp_path: Path
) -> None:
    directory = tmp_path / "checkpoint-5"
    model.save_pretrained(directory, **options)
    (directory / "trainer_state.json").write_text('{"global_step": 5, "epoch": 1.0}')
    assert latest(tmp_path) == str(directory)
    compress_directory(directory)
    # The manifest vouches for the new file; the digests were of files that are gone.
    assert not (directory / DIGESTS).exists()
    assert verify_checkpoint(directory).ok
    assert latest(tmp_path) == str(directory)
    reloaded = type(model).from_pretrained(directory)
    assert torch.equal(outputs(reloaded, LLAMA.make_inputs())[0], outputs(model, LLAMA.make_inputs())[0])


def test_weights_that_a_checkpoint_keeps_keep_their_digests(model: PreTrainedModel, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    compress_directory(tmp_path, keep_weights=True, weights_only=True)
    assert verify_checkpoint(tmp_path).ok
    assert verify_model(tmp_path).ok
