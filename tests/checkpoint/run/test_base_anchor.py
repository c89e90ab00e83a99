"""Checkpoints of a run that are stored against weights outside it: every mode, restarts, and a base that is gone."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from bases import COMMIT, REPOSITORY, forget_directories, trainer_checkpoint, weights, write

from hf_trainweights.checkpoint.directory import collect_garbage, compress_directory, latest, restore_directory
from hf_trainweights.checkpoint.encoded import reader
from hf_trainweights.checkpoint.encoded.reader import load_file
from hf_trainweights.checkpoint.manifest import MANIFEST_NAME, Manifest, read_manifest
from hf_trainweights.checkpoint.run.checkpoints import BASE_PROBLEM, verify_checkpoint
from hf_trainweights.errors import ConfigError, CorruptFileError, MissingAnchorError
from hf_trainweights.files.reading import sign_json

MODES = ("lossless", "near-lossless", "compact")
COMMAND = f"hf download {REPOSITORY} --revision {COMMIT}"


@pytest.fixture(autouse=True)
def nothing_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_directories(monkeypatch)


def small(run: Path, step: int, anchor: Path | None, **options: Any) -> Manifest:
    return compress_directory(trainer_checkpoint(run, step), anchor=anchor, buffers=(), **options)


def codecs(manifest: Manifest) -> dict[str, str]:
    return {tensor["name"]: tensor["codec"] for tensor in manifest.files["pytorch_model.bin"].report["tensors"]}


def steps_of(manifest: Manifest) -> float:
    (tensor,) = (
        each for each in manifest.files["pytorch_model.bin"].report["tensors"] if each["name"] == "layer.weight"
    )
    return tensor["params"]["step"]


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_every_checkpoint_is_a_difference_to_the_base(snapshot: Path, tmp_path: Path, mode: str) -> None:
    run = tmp_path / "run"
    for step in (1, 2, 3):
        manifest = small(run, step, snapshot, mode=mode)
        assert codecs(manifest)["layer.weight"] == ("planes-delta" if mode == "lossless" else "delta-uniform")
        assert manifest.base is not None
        assert (manifest.base.repository, manifest.base.commit) == (REPOSITORY, COMMIT)
        assert manifest.anchor is not None
        assert (manifest.anchor["sha256"], manifest.anchor["saves"]) == (manifest.base.sha256, step)
        assert not list((run / f"checkpoint-{step}").glob("*.anchor"))
    for step in (1, 2, 3):
        loaded = load_file(run / f"checkpoint-{step}" / "pytorch_model.bin")
        # Half of the coarsest step: the rms of the first difference.
        bound = 0.0 if mode == "lossless" else 0.51e-4
        torch.testing.assert_close(loaded["layer.weight"], weights(step)["layer.weight"], rtol=0, atol=bound)
        assert torch.equal(loaded["layer.bias"], weights(step)["layer.bias"])


def test_a_run_goes_on_with_its_base_where_the_caller_no_longer_names_it(snapshot: Path, tmp_path: Path) -> None:
    small(tmp_path, 1, snapshot)
    assert small(tmp_path, 2, None).base == read_manifest(tmp_path / "checkpoint-1").base


def test_a_base_serves_any_number_of_saves_and_until_deltas_have_grown_by_two_bits(
    snapshot: Path, tmp_path: Path
) -> None:
    for step in (1, 2, 3):
        assert small(tmp_path, step, snapshot, anchor_every=1, mode="near-lossless").base is not None
    path = trainer_checkpoint(tmp_path, 4, weights(100))
    aged = compress_directory(path, mode="near-lossless", buffers=())
    assert aged.base is not None
    assert small(tmp_path, 5, snapshot, mode="near-lossless").base is None
    assert small(tmp_path, 6, snapshot, mode="near-lossless").base is None


def test_plain_checkpoints_of_an_old_run_are_joined_and_small_ones_keep_their_anchor(
    snapshot: Path, tmp_path: Path
) -> None:
    trainer_checkpoint(tmp_path / "plain", 1)
    assert small(tmp_path / "plain", 2, snapshot).base is not None
    small(tmp_path / "small", 1, None)
    joined = small(tmp_path / "small", 2, snapshot)
    assert joined.base is None
    assert len(list((tmp_path / "small" / "checkpoint-2").glob("*.anchor"))) == 1


def test_steps_follow_the_interval_between_saves_and_not_the_age_of_the_run(snapshot: Path, tmp_path: Path) -> None:
    young = small(tmp_path / "young", 100, snapshot, mode="near-lossless")  # its trainer_state.json has save_steps=1
    trainer_checkpoint(tmp_path / "old", 50)
    old = small(tmp_path / "old", 100, snapshot, mode="near-lossless")
    assert steps_of(old) == pytest.approx(50 * steps_of(young))
    assert old.anchor is not None
    assert old.anchor["interval_steps"] == 50


@pytest.mark.parametrize("mode", MODES)
def test_a_weight_that_did_not_begin_at_the_base_is_exact(snapshot: Path, tmp_path: Path, mode: str) -> None:
    state = {**weights(1), "layer.weight": torch.randn(64, 80, generator=torch.Generator().manual_seed(9))}
    path = trainer_checkpoint(tmp_path, 1, state)
    compress_directory(path, mode=mode, anchor=snapshot, buffers=())
    assert torch.equal(load_file(path / "pytorch_model.bin")["layer.weight"], state["layer.weight"])


def test_a_base_without_the_weights_of_the_model_is_warned_of(snapshot: Path, tmp_path: Path) -> None:
    path = trainer_checkpoint(tmp_path, 1, {"other": torch.randn(64, 80)})
    with pytest.warns(UserWarning, match="has no weight of this checkpoint's names and shapes"):
        assert compress_directory(path, anchor=snapshot, buffers=()).base is None


def test_a_base_that_vanished_between_saves_is_warned_of_and_the_next_checkpoint_is_full(
    snapshot: Path, tmp_path: Path
) -> None:
    small(tmp_path, 1, snapshot)
    shutil.rmtree(snapshot)
    with pytest.warns(UserWarning, match=f"stored without its base.*{COMMAND}"):
        assert small(tmp_path, 2, None).base is None
    assert latest(tmp_path) == str(tmp_path / "checkpoint-2")


def test_a_run_does_not_begin_where_its_base_is_gone(snapshot: Path, tmp_path: Path) -> None:
    shutil.rmtree(snapshot)
    path = trainer_checkpoint(tmp_path, 1)
    with pytest.raises(ConfigError, match="anchor: expected a directory with"):
        compress_directory(path, anchor=snapshot, buffers=())
    assert torch.equal(load_file_of(path)["layer.weight"], weights(1)["layer.weight"])


def test_an_anchor_without_weights_is_refused_also_where_the_run_has_one_already(tmp_path: Path) -> None:
    small(tmp_path, 1, None)
    with pytest.raises(ConfigError, match="anchor: expected a directory with"):
        small(tmp_path, 2, tmp_path / "nowhere")
    assert not (tmp_path / "checkpoint-2" / MANIFEST_NAME).exists()


def test_without_an_anchor_there_is_nothing_to_keep(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="keep_base: expected an anchor to keep"):
        small(tmp_path, 1, None, keep_base=True)


def load_file_of(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file as load_safetensors

    return load_safetensors(path / "model.safetensors")


def test_verify_restore_and_latest_name_repository_and_commit_of_a_base_that_is_gone(
    snapshot: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    small(run, 1, snapshot)
    snapshot.rename(snapshot.with_name("gone"))
    report = verify_checkpoint(run / "checkpoint-1")
    assert COMMAND in report.problems[BASE_PROBLEM]
    with pytest.raises(MissingAnchorError, match=COMMAND):
        restore_directory(run / "checkpoint-1")
    with pytest.raises(MissingAnchorError, match=COMMAND):
        load_file(run / "checkpoint-1" / "pytorch_model.bin")
    # A fresh start would write over the run.
    with pytest.warns(UserWarning, match="passed over"), pytest.raises(MissingAnchorError, match=COMMAND):
        latest(run)
    snapshot.with_name("gone").rename(snapshot)
    assert latest(run) == str(run / "checkpoint-1")
    assert restore_directory(run / "checkpoint-1").base is None
    loaded = torch.load(run / "checkpoint-1" / "pytorch_model.bin", weights_only=True)
    assert torch.equal(loaded["layer.weight"], weights(1)["layer.weight"])


def test_a_base_of_other_content_is_never_decoded_against(snapshot: Path, tmp_path: Path) -> None:
    small(tmp_path, 1, snapshot)
    write((snapshot / "model.safetensors").resolve(), weights(7))
    with pytest.raises(CorruptFileError, match=f"{REPOSITORY} at commit {COMMIT}"):
        load_file(tmp_path / "checkpoint-1" / "pytorch_model.bin")
    assert BASE_PROBLEM in verify_checkpoint(tmp_path / "checkpoint-1").problems


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cache", "local"])
def test_with_keep_base_any_directory_may_be_deleted_and_the_base_too(
    snapshot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    base = snapshot
    if kind == "local":
        base = tmp_path / "mine"
        base.mkdir()
        write(base / "model.safetensors", weights())
    run = tmp_path / "run"
    small(run, 1, base, keep_base=True)
    small(run, 2, None)  # what is kept stays kept
    small(run, 3, base, keep_base=True)
    kept = [next((run / f"checkpoint-{step}").glob("*.anchor")) for step in (1, 2, 3)]
    assert len({file.stat().st_ino for file in kept}) == 1
    original = (base / "model.safetensors").stat().st_ino
    assert (kept[0].stat().st_ino == original) == (kind == "cache")  # others may write over a local base where it is
    assert collect_garbage(run) == []
    shutil.rmtree(base)
    monkeypatch.setattr(reader, "_base_directories", {})
    for gone in (1, 3):
        shutil.rmtree(run / f"checkpoint-{gone}")
        for path in run.iterdir():
            assert verify_checkpoint(path).ok
            loaded = load_file(path / "pytorch_model.bin")
            step = int(path.name.partition("-")[2])
            assert torch.equal(loaded["layer.weight"], weights(step)["layer.weight"])
    assert latest(run) == str(run / "checkpoint-2")
    shutil.move(run, tmp_path / "moved")
    restore_directory(tmp_path / "moved" / "checkpoint-2")


def test_a_damaged_file_that_is_kept_is_found(snapshot: Path, tmp_path: Path) -> None:
    small(tmp_path, 1, snapshot, keep_base=True)
    kept = next((tmp_path / "checkpoint-1").glob("*.anchor"))
    content = bytearray(kept.read_bytes())
    content[len(content) // 2] ^= 1
    os.unlink(kept)
    kept.write_bytes(content)
    assert kept.name in verify_checkpoint(tmp_path / "checkpoint-1").problems


@pytest.mark.parametrize(
    "change",
    [
        {"repository": "../../../etc"},
        {"commit": "../../.."},
        {"files": {"../../etc/passwd.bin": "0" * 64}},
        {"files": {"/etc/passwd.bin": "0" * 64}},
        {"path": "/etc"},
    ],
    ids=repr,
)
def test_a_manifest_that_names_a_base_elsewhere_is_refused(
    snapshot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    small(tmp_path, 1, snapshot)
    path = tmp_path / "checkpoint-1" / MANIFEST_NAME
    content = json.loads(path.read_text())
    content["base"] |= change
    path.write_bytes(sign_json(content))
    monkeypatch.setattr(reader, "sha256_once", lambda opened: pytest.fail(f"{opened} was opened"))
    with pytest.raises(CorruptFileError, match="base"):
        read_manifest(tmp_path / "checkpoint-1")
    assert not verify_checkpoint(tmp_path / "checkpoint-1").intact


def test_a_path_in_a_manifest_is_shown_and_never_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    write(mine / "model.safetensors", weights())
    small(tmp_path, 1, mine)
    monkeypatch.setattr(reader, "_base_directories", {})
    with pytest.raises(MissingAnchorError, match=f"weights of {mine}.*register_base"):
        load_file(tmp_path / "checkpoint-1" / "pytorch_model.bin")
