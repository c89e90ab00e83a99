from __future__ import annotations

import json
import math
import os
import re
from collections import UserDict
from pathlib import Path

import pytest
import torch
from trees import ADAM_SETTINGS, each_flipped_bit

from hf_trainweights.checkpoint.directory import compress_directory, restore_directory
from hf_trainweights.checkpoint.manifest import (
    MANIFEST_NAME,
    FileEntry,
    Manifest,
    is_safe_name,
    read_manifest,
    require_json,
    shown_mode,
    total_rounding,
    write_manifest,
)
from hf_trainweights.checkpoint.run.checkpoints import verify_checkpoint
from hf_trainweights.checkpoint.run.in_place import rewriting
from hf_trainweights.errors import ConfigError, CorruptFileError, SaveError
from hf_trainweights.files.reading import sign_json

SHA256 = "0" * 64


def tensor(**changes):
    """A tensor as a manifest reports it."""
    sizes = {"bytes_in": 8, "bytes_out": 4}
    return {"path": "w", "name": "w", "role": "weight", "codec": "raw", "params": {}, "bound": None, **sizes} | changes


def signed(**changes):
    """A manifest whose digest is right and whose content is `changes`."""
    manifest = Manifest({"a": FileEntry(1, SHA256)}, "lossless")
    for name, value in changes.items():
        object.__setattr__(manifest, name, value)
    return manifest.to_bytes()


def test_manifest_comes_back_as_it_was_written(tmp_path):
    report = {"tensors": [tensor(bound=1e-7, params={"step": 0.1})], "anchor": SHA256}
    manifest = Manifest(
        files={"pytorch_model.bin": FileEntry(12, SHA256, report), "sub/ä.bin": FileEntry(0, SHA256)},
        mode="compact",
        step=10**12,
        epoch=1.1,
        metrics={"loss": -math.inf, "ok": True, "text": "\u2028"},
        metadata={"nested": [1, [None, {"a": 0.1}]]},
        anchor={"sha256": SHA256, "saves": 3},
        rounded_before={"pytorch_model.bin": {"weight": 1e-3}},
    )
    write_manifest(tmp_path, manifest)
    assert read_manifest(tmp_path) == manifest


def test_metrics_may_be_nan(tmp_path):
    write_manifest(tmp_path, Manifest({}, "lossless", metrics={"loss": math.nan}))
    assert math.isnan(read_manifest(tmp_path).metrics["loss"])


def test_versions_and_time_are_recorded(tmp_path):
    write_manifest(tmp_path, Manifest({}, "lossless"))
    written = json.loads((tmp_path / MANIFEST_NAME).read_text())
    assert written["torch_version"]
    assert written["package_version"]
    assert written["created"].endswith("+00:00")


def manifest_is_refused(directory):
    try:
        read_manifest(directory)
    except CorruptFileError as error:
        return MANIFEST_NAME in str(error)
    return False


@pytest.mark.slow
def test_any_flipped_bit_of_the_manifest_is_found(tmp_path):
    (tmp_path / MANIFEST_NAME).write_bytes(signed(metrics={"loss": 2.5}))
    for position in each_flipped_bit(tmp_path / MANIFEST_NAME):
        assert manifest_is_refused(tmp_path), position
    assert read_manifest(tmp_path).metrics == {"loss": 2.5}


def test_any_truncation_of_the_manifest_is_found(tmp_path):
    content = signed()
    for length in range(0, len(content), 7):
        (tmp_path / MANIFEST_NAME).write_bytes(content[:length])
        assert manifest_is_refused(tmp_path), length


HOSTILE_NAMES = [
    "../x",
    "/etc/passwd",
    "a/../../x",
    "",
    ".",
    "..",
    "a//b",
    "a/",
    "a\\b",
    "c:x",
    "a\x00b",
    "a\nb",
    "a\ud800b",
    "./a",
]


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_a_name_that_leaves_the_directory_is_refused(tmp_path, name):
    assert not is_safe_name(name)
    (tmp_path / MANIFEST_NAME).write_bytes(signed(files={name: FileEntry(1, SHA256)}))
    with pytest.raises(CorruptFileError, match="relative file names"):
        read_manifest(tmp_path)


def entry(**changes):
    return {"a": {"size_bytes": 1, "sha256": SHA256, "report": {}} | changes}


def report(**changes):
    return entry(report={"anchor": None, "tensors": [tensor()]} | changes)


def tensors(**changes):
    return report(tensors=[tensor(), tensor(**changes)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"files": entry(size_bytes=-1)}, "files['a'].size_bytes"),
        ({"files": entry(size_bytes=True)}, "files['a'].size_bytes"),
        ({"files": entry(size_bytes=1.0)}, "files['a'].size_bytes"),
        ({"files": entry(size_bytes=2**63)}, "files['a'].size_bytes"),
        ({"files": entry(sha256="f" * 63)}, "files['a'].sha256"),
        ({"files": entry(sha256="F" * 64)}, "files['a'].sha256"),
        ({"files": entry(sha256=None)}, "files['a'].sha256"),
        ({"files": entry(report=[])}, "files['a'].report"),
        ({"files": {"a": 1}}, "files['a']: expected an object"),
        ({"files": [1]}, "the manifest.files"),
        ({"files": report(anchor="../x")}, "files['a'].report.anchor"),
        ({"files": report(tensors=None)}, "files['a'].report.tensors: expected a list"),
        ({"files": report(tensors=["x"])}, "files['a'].report.tensors[0]: expected an object"),
        ({"files": report(tensors=[{}])}, "files['a'].report.tensors[0].path: expected a text, found nothing"),
        ({"files": tensors(bytes_in=-1)}, "files['a'].report.tensors[1].bytes_in"),
        ({"files": tensors(bytes_out=10**30)}, "files['a'].report.tensors[1].bytes_out"),
        ({"files": tensors(bound=math.nan)}, "files['a'].report.tensors[1].bound"),
        ({"files": tensors(bound=-1.0)}, "files['a'].report.tensors[1].bound"),
        ({"files": tensors(bound=10**400)}, "files['a'].report.tensors[1].bound"),
        ({"files": tensors(role=["weight"])}, "files['a'].report.tensors[1].role"),
        ({"files": tensors(codec=None)}, "files['a'].report.tensors[1].codec"),
        ({"files": {"x" * 5000: 1}}, "files['xxx"),
        ({"mode": None}, "the manifest.mode"),
        ({"step": "7"}, "the manifest.step"),
        ({"step": True}, "the manifest.step"),
        ({"epoch": [1]}, "the manifest.epoch"),
        ({"metrics": []}, "the manifest.metrics"),
        ({"metadata": 1}, "the manifest.metadata"),
        ({"anchor": []}, "the manifest.anchor"),
        ({"created": 5}, "the manifest.created"),
        ({"rounded_before": []}, "rounded_before: expected an object"),
        ({"rounded_before": {"a": 1}}, "rounded_before['a']: expected an object"),
        ({"rounded_before": {"a": {"weight": math.nan}}}, "rounded_before['a']['weight']"),
    ],
    ids=str,
)
def test_a_value_of_a_wrong_type_or_range_is_refused_with_its_key(tmp_path, changes, key):
    fields = {**json.loads(signed()), **changes}
    (tmp_path / MANIFEST_NAME).write_bytes(sign_json(fields))
    with pytest.raises(CorruptFileError, match=re.escape(f"{tmp_path / MANIFEST_NAME}, {key}")) as caught:
        read_manifest(tmp_path)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"null\n",
        b"[]\n",
        b"{}\n",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"\xff\xfe",
        b'{"sha256": {}}\n',
        b"1" * 10_000,
        b"PK\x03\x04",
    ],
)
def test_what_is_no_manifest_is_refused(tmp_path, content):
    (tmp_path / MANIFEST_NAME).write_bytes(content)
    with pytest.raises(CorruptFileError, match=MANIFEST_NAME):
        read_manifest(tmp_path)


def test_a_key_twice_is_refused(tmp_path):
    content = signed().replace(b'  "mode": "lossless",\n', b'  "mode": "lossless",\n  "mode": "lossless",\n')
    (tmp_path / MANIFEST_NAME).write_bytes(content)
    with pytest.raises(CorruptFileError, match="digest"):
        read_manifest(tmp_path)


def test_a_newer_version_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("hf_trainweights.checkpoint.manifest._FORMAT_VERSION", 99)
    write_manifest(tmp_path, Manifest({}, "lossless"))
    monkeypatch.undo()
    with pytest.raises(CorruptFileError, match=r"expected 'trainweights-checkpoint' version 1, found .* version 99"):
        read_manifest(tmp_path)


def test_an_enormous_manifest_is_refused_before_it_is_read(tmp_path):
    (tmp_path / MANIFEST_NAME).touch()
    os.truncate(tmp_path / MANIFEST_NAME, 1 << 40)
    with pytest.raises(CorruptFileError, match="at most 1073741824 bytes"):
        read_manifest(tmp_path)


def test_no_manifest_is_written_that_readers_refuse_for_its_length(tmp_path, monkeypatch):
    monkeypatch.setattr("hf_trainweights.checkpoint.manifest._MAX_MANIFEST_BYTES", len(signed()))
    write_manifest(tmp_path, Manifest({"a": FileEntry(1, SHA256)}, "lossless"))
    read_manifest(tmp_path)
    with pytest.raises(SaveError, match=rf"{MANIFEST_NAME}: expected at most {len(signed())} bytes"):
        write_manifest(tmp_path, Manifest({"ab": FileEntry(1, SHA256)}, "lossless"))
    read_manifest(tmp_path)


def test_a_linked_manifest_is_not_followed(checkpoint):
    (checkpoint / MANIFEST_NAME).rename(checkpoint.parent / "outside")
    (checkpoint / MANIFEST_NAME).symlink_to(checkpoint.parent / "outside")
    assert list(verify_checkpoint(checkpoint).problems) == [MANIFEST_NAME]


CIRCLE: list = []
CIRCLE.append(CIRCLE)


@pytest.mark.parametrize(
    ("value", "key"),
    [
        ({"a": {1: 2}}, r"config\['a'\]"),
        ({"a": [0, {1, 2}]}, r"config\['a'\]\[1\]"),
        ({"a": b"x"}, r"config\['a'\]"),
        ({"a": UserDict(b=1)}, r"config\['a'\]: expected .*, found UserDict"),
        (CIRCLE, r"config(\[0\])+: expected .*, found deeper ones, or one within itself"),
    ],
)
def test_what_json_cannot_hold_is_named_by_its_key(value, key):
    with pytest.raises(ConfigError, match=key):
        require_json(value, "config")


INT8 = {"weight": "int8"}


@pytest.fixture
def weight() -> torch.Tensor:
    return torch.randn(64, 64, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def path(tmp_path: Path, weight: torch.Tensor) -> Path:
    torch.save({"w": weight}, tmp_path / "pytorch_model.bin")
    torch.save({"state": {}, "param_groups": []}, tmp_path / "optimizer.pt")
    return tmp_path


def error(path: Path, weight: torch.Tensor) -> float:
    stored = torch.load(path / "pytorch_model.bin", weights_only=True)["w"]
    return (stored - weight).abs().max().item()


def test_exact_weights_are_called_lossless_and_the_manifest_has_no_further_key(path: Path) -> None:
    assert shown_mode(compress_directory(path)) == "lossless"
    assert shown_mode(restore_directory(path)) == "plain"
    assert "rounded_before" not in json.loads((path / "trainweights.json").read_bytes())


def test_what_a_mode_has_rounded_is_called_by_it_also_after_a_finer_mode_left_it_alone(path: Path) -> None:
    (path / "pytorch_model.bin").unlink()
    lossy = compress_lossy(path, mode="compact")
    assert total_rounding(lossy)
    again = compress_directory(path, mode="lossless")
    assert (shown_mode(again), total_rounding(again)) == ("compact", total_rounding(lossy))
    assert read_manifest(path) == again
    assert compress_directory(path, mode="near-lossless").mode == "compact"


def compress_lossy(path: Path, mode: str) -> Manifest:
    """Compress two moments of Adam, which a lossy mode rounds at the first save already."""
    moments = {"step": torch.tensor(3.0), "exp_avg": torch.randn(64, 64), "exp_avg_sq": torch.rand(64, 64)}
    group = {"params": [0], "lr": 1e-3, "betas": (0.9, 0.999), **ADAM_SETTINGS}
    torch.save({"state": {0: moments}, "param_groups": [group]}, path / "optimizer.pt")
    return compress_directory(path, mode=mode)


def test_restored_weights_are_not_called_exact_afterwards(path: Path, weight: torch.Tensor) -> None:
    int8 = compress_directory(path, rules=INT8)
    bound = total_rounding(int8)["weight"]
    off = error(path, weight)
    assert 0 < off <= bound
    note = f"(weights off by up to {bound:.1e})"
    assert shown_mode(int8) == f"lossless {note}"
    assert shown_mode(restore_directory(path)) == f"plain {note}"
    assert shown_mode(compress_directory(path)) == f"lossless {note}"
    assert shown_mode(restore_directory(path)) == f"plain {note}"
    assert error(path, weight) == off


def test_errors_of_weights_that_are_rounded_twice_add_up(path: Path, weight: torch.Tensor) -> None:
    first = total_rounding(compress_directory(path, rules=INT8))["weight"]
    restore_directory(path)
    second = compress_directory(path, rules={"weight": "float8_e4m3"})
    assert total_rounding(second)["weight"] > first
    assert error(path, weight) <= total_rounding(second)["weight"]


def test_without_a_manifest_the_files_themselves_say_what_they_have_lost(path: Path) -> None:
    bound = total_rounding(compress_directory(path, rules=INT8))["weight"]
    with rewriting(path):
        pass  # it was interrupted before the manifest came back
    assert shown_mode(compress_directory(path)) == f"lossless (weights off by up to {bound:.1e})"
    with rewriting(path):
        pass
    assert shown_mode(restore_directory(path)) == f"plain (weights off by up to {bound:.1e})"


def test_only_the_optimizer_may_be_rounded() -> None:
    files, lost = {"optimizer.pt": FileEntry(1, "0" * 64)}, {"optimizer.pt": {"exp_avg": 0.1}}
    manifest = Manifest(files, "lossless", rounded_before=lost)
    assert shown_mode(manifest) == "lossless (optimizer states rounded)"
