"""Checkpoints of ZeRO become small in place: nothing changes in lossless, all stays within bounds else."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.zero.zero_files import GROUPS, in_trainer, pretended_packages, write_run, write_zero
from safetensors.torch import save_file
from simulated_disk import replay
from torch import Tensor

from hf_trainweights import latest
from hf_trainweights.checkpoint import compress_directory, restore_directory, verify_checkpoint
from hf_trainweights.checkpoint.directory import collect_garbage, layout_of
from hf_trainweights.checkpoint.manifest import MANIFEST_NAME, read_manifest, total_rounding
from hf_trainweights.checkpoint.run.checkpoints import size_bytes
from hf_trainweights.checkpoint.zero.files import TagFiles
from hf_trainweights.errors import ConfigError, CorruptFileError, UnsupportedError

STAGES = (1, 2, 3)


def plain_content(tag: Path) -> dict[str, Any]:
    """Load all files as DeepSpeed does, with nothing but torch.load."""
    with pretended_packages():
        return {name: torch.load(tag / name, weights_only=False) for name in TagFiles(tag).names}


def differences(one: Any, other: Any, path: str = "") -> list[str]:
    """List the paths of tensors that differ; anything else must be the same, with its types."""
    assert type(one).__qualname__ == type(other).__qualname__, path
    if isinstance(one, Tensor):
        assert (one.dtype, one.shape, one.requires_grad) == (other.dtype, other.shape, other.requires_grad), path
        return [] if torch.equal(one, other) else [path]
    if isinstance(one, dict):
        assert [*one] == [*other], path
        return [each for key in one for each in differences(one[key], other[key], f"{path}.{key}")]
    if isinstance(one, list | tuple):
        assert len(one) == len(other), path
        return [
            each for i, pair in enumerate(zip(one, other, strict=True)) for each in differences(*pair, f"{path}.{i}")
        ]
    if type(one).__module__.startswith("deepspeed.") and not isinstance(one, int):
        return differences(vars(one), vars(other), path)
    assert one == other, path
    return []


@pytest.mark.parametrize("stage", STAGES)
def test_lossless_files_load_as_they_were_and_repeat_no_weight(tmp_path: Path, stage: int) -> None:
    tags = write_run(tmp_path, stage)
    before = {tag: (plain_content(tag), size_bytes(tag)) for tag in tags}
    for tag in tags:
        assert compress_directory(tag).step == int(tag.name.removeprefix("global_step"))
        content, plain_bytes = before[tag]
        assert differences(plain_content(tag), content) == []
        assert verify_checkpoint(tag).ok
        assert size_bytes(tag) < (0.95 if stage == 3 else 0.85) * plain_bytes
        if stage < 3:  # the weights of training follow from the float32 ones
            assert (tag / "mp_rank_00_model_states.pt").stat().st_size < 8000
    assert compress_directory(tags[-1]) == read_manifest(tags[-1])


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("mode", ["near-lossless", "compact"])
def test_lossy_files_keep_the_bounds_that_the_manifest_states(tmp_path: Path, stage: int, mode: str) -> None:
    tags = write_run(tmp_path, stage)
    before = {tag: plain_content(tag) for tag in tags}
    plain_bytes = size_bytes(tags[-1])
    for tag in tags:
        manifest = compress_directory(tag, mode=mode)
        bound = total_rounding(manifest)["weight"]
        assert 0 < bound < 1e-3
        key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
        for name, content in plain_content(tag).items():
            expected = before[tag][name]
            if "optim" in name:
                flats = zip(*(each["optimizer_state_dict"][key] for each in (content, expected)), strict=True)
                assert all(float((flat - old).detach().abs().max()) <= bound for flat, old in flats)
            for weight, old in () if stage == 3 or "optim" in name else zip(*_weights(content, expected), strict=True):
                assert ((weight.float() - old.float()).abs() <= bound + 2**-7 * old.float().abs()).all()
    assert size_bytes(tags[-1]) < plain_bytes / 4


def _weights(*contents: Any) -> list[list[Tensor]]:
    return [[content["module"][name] for group in GROUPS for name in group] for content in contents]


def test_objects_of_deepspeed_are_not_written_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tag,) = write_run(tmp_path, count=1)
    content = plain_content(tag)
    compress_directory(tag)
    monkeypatch.setattr("hf_trainweights.checkpoint.run.weight_files.missing_packages", lambda tree: {"deepspeed"})
    with pytest.raises(UnsupportedError, match="pip install deepspeed"):
        restore_directory(tag)
    assert differences(plain_content(tag), content) == []


def test_a_trainers_checkpoint_has_one_manifest_and_its_model_becomes_small(tmp_path: Path) -> None:
    for step in (2, 4):
        checkpoint = in_trainer(tmp_path, step)
        content = plain_content(checkpoint / f"global_step{step}")
        module = content["mp_rank_00_model_states.pt"]["module"]
        save_file(
            {name: tensor.contiguous().clone() for name, tensor in module.items()}, checkpoint / "model.safetensors"
        )
        assert latest(tmp_path) == str(checkpoint)
        manifest = compress_directory(checkpoint)
        assert manifest.step == step
        assert not (checkpoint / f"global_step{step}" / MANIFEST_NAME).exists()
        assert differences(plain_content(checkpoint / f"global_step{step}"), content) == []
        stored = torch.load(checkpoint / "pytorch_model.bin", weights_only=True)
        assert differences(dict(sorted(stored.items())), dict(sorted(module.items()))) == []
        assert not (checkpoint / "model.safetensors").exists()
        assert (checkpoint / "pytorch_model.bin").stat().st_size < 8000
        assert verify_checkpoint(checkpoint).ok
        assert latest(tmp_path) == str(checkpoint)
    with pretended_packages():
        restore_directory(checkpoint)
    assert differences(torch.load(checkpoint / "pytorch_model.bin", weights_only=True), stored) == []


@pytest.mark.parametrize("stage", [2, 3])
def test_frozen_weights_are_stored_once(tmp_path: Path, stage: int) -> None:
    frozen = {"base.weight": torch.randn(256, 128).bfloat16()}
    tags = write_run(tmp_path, stage, frozen=frozen)
    for tag in tags:
        content = plain_content(tag)
        compress_directory(tag)
        assert differences(plain_content(tag), content) == []
        assert max((tag / name).stat().st_size for name in TagFiles(tag).models) < 9000


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    (tag,) = write_run(tmp_path, count=1, tied={"tied.weight": "embed.weight"})
    compress_directory(tag)
    module = plain_content(tag)["mp_rank_00_model_states.pt"]["module"]
    assert module["tied.weight"].data_ptr() == module["embed.weight"].data_ptr()


@pytest.mark.parametrize("ranks", [1, 3, 7])
@pytest.mark.parametrize("stage", [2, 3])
def test_any_number_of_ranks_and_any_padding(tmp_path: Path, stage: int, ranks: int) -> None:
    (tag,) = write_run(tmp_path, stage, count=1, ranks=ranks, dtype=torch.float16, prefix="")
    content = plain_content(tag)
    compress_directory(tag, mode="lossless")
    assert differences(plain_content(tag), content) == []


@pytest.mark.parametrize("stage", [2, 3])
def test_a_missing_rank_is_a_typed_error_and_nothing_changes(tmp_path: Path, stage: int) -> None:
    checkpoint = in_trainer(tmp_path, 2, stage)
    missing = ["bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"]
    missing += ["zero_pp_rank_1_mp_rank_00_model_states.pt"] if stage == 3 else []
    for name in missing:
        broken = tmp_path / "checkpoint-4"
        shutil.copytree(checkpoint, broken)
        (broken / "global_step2" / name).unlink()
        before = {file: file.stat().st_mtime_ns for file in broken.rglob("*")}
        with pytest.raises(CorruptFileError, match="of rank 1"):
            compress_directory(broken)
        assert {file: file.stat().st_mtime_ns for file in broken.rglob("*")} == before
        with pytest.warns(UserWarning, match="of rank 1"):
            assert latest(tmp_path) == str(checkpoint)
        shutil.rmtree(broken)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["lossless", "near-lossless"])
def test_whenever_the_process_is_killed_every_file_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    root = tmp_path / "run"
    first, second = in_trainer(root, 2), in_trainer(root, 4)
    compress_directory(first, mode=mode)
    content = plain_content(second / "global_step4")

    for when in replay(root, lambda: compress_directory(second, mode=mode), monkeypatch):
        assert latest(root) == str(second), when
        found = differences(plain_content(second / "global_step4"), content)
        assert found == [] or mode != "lossless", when


@pytest.mark.slow
@pytest.mark.parametrize("rules", [{}, {"optimizer": "lossless"}])
@pytest.mark.parametrize("mode", ["lossless", "near-lossless"])
def test_a_killed_compression_is_taken_up_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, rules: dict[str, str]
) -> None:
    root = tmp_path / "run"
    checkpoint = in_trainer(root, 2)
    content = plain_content(checkpoint / "global_step2")
    compress_directory(shutil.copytree(checkpoint, tmp_path / "undisturbed"), mode=mode, rules=rules)
    expected = plain_content(tmp_path / "undisturbed" / "global_step2")

    def action() -> None:
        compress_directory(checkpoint, mode=mode, rules=rules)

    for count, when in enumerate(replay(root, action, monkeypatch)):
        if count % 15 == 0:
            manifest = compress_directory(checkpoint, mode=mode, rules=rules)
            assert verify_checkpoint(checkpoint).ok, when
            assert (total_rounding(manifest) == {}) == (mode == "lossless"), when
            if mode == "lossless":
                assert differences(plain_content(checkpoint / "global_step2"), content) == [], when
            states = [name for name in content if "optim" in name]
            actual = plain_content(checkpoint / "global_step2")
            assert all(differences(actual[name], expected[name]) == [] for name in states), when
            assert collect_garbage(root) == [], when


def test_content_that_is_unknown_stays_as_it_is(tmp_path: Path) -> None:
    (tag,) = write_run(tmp_path, count=1, client_state=Path("/somewhere"))
    with pytest.raises(CorruptFileError, match="mp_rank_00_model_states"):
        compress_directory(tag)
    tag = write_zero(tmp_path / "other")
    file = tag / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    torch.save({"optimizer_state_dict": {"param_slice_mappings": Path("/somewhere")}}, file)
    with pytest.warns(UserWarning, match="stays as it is"):
        compress_directory(tag)
    assert b"hf_trainweights" not in file.read_bytes()


def test_options_that_do_not_suit_are_typed_errors(tmp_path: Path) -> None:
    tag = write_zero(tmp_path / "run" / "any name")
    write_zero(tmp_path / "run" / "another name")
    with pytest.raises(ConfigError, match="one checkpoint"):
        compress_directory(tmp_path / "run")
    with pytest.raises(UnsupportedError, match="keep_weights"):
        compress_directory(tag, keep_weights=True)
    with pytest.raises(ConfigError, match="nothing"):
        compress_directory(tag, rules={"nothing": "lossless"})
    assert layout_of(tag).problem() is None


def test_rules_select_parameters(tmp_path: Path) -> None:
    (tag,) = write_run(tmp_path, count=1)
    manifest = compress_directory(tag, mode="near-lossless", rules={"embed": "lossless", "exp_avg": "lossless"})
    rows = [row for entry in manifest.files.values() for row in entry.report.get("tensors", ())]
    rounded = {(row["role"], row["name"].partition("[")[0]) for row in rows if row["bound"] is not None}
    assert rounded
    assert not [each for each in rounded if each in {("weight", "embed.weight")} or each[0] == "exp_avg"]
