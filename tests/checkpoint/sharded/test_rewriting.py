"""Sharded checkpoints are made small and plain where they lie, by one process or by ranks, any of which may die."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint.sharded.states import save, without_process_group
from checkpoint.sharded_states import load_stock_trainer, sample_state, save_as_trainer, save_plain
from checkpoint.test_callback_kills import KILLED, DyingDisk
from covering import by_default, exhaustive
from ranks import outcomes_of_ranks, run_ranks
from simulated_disk import FailingDisk
from torch.utils._pytree import tree_map
from trees import ADAM_SETTINGS, fingerprint

from hf_trainweights.checkpoint import collect_garbage, compress_directory, latest, restore_directory, verify_checkpoint
from hf_trainweights.checkpoint.dcp.reader import ShardedContents
from hf_trainweights.checkpoint.directory import layout_of
from hf_trainweights.checkpoint.encoded import reader
from hf_trainweights.checkpoint.manifest import read_manifest, total_rounding
from hf_trainweights.checkpoint.planning.policy import Policy
from hf_trainweights.checkpoint.run.checkpoints import size_bytes
from hf_trainweights.checkpoint.run.job import RewriteJob
from hf_trainweights.checkpoint.run.ranks import Ranks
from hf_trainweights.errors import ConfigError, CorruptFileError, SaveError, UnsupportedError
from hf_trainweights.files import disk

pytestmark = pytest.mark.slow  # many start ranks

RANKS = 2
MODES = ("lossless", "near-lossless", "compact")


def moved(state: Any, by: float = 1e-4) -> Any:
    """Return a state a few steps later: weights have moved a little."""
    generator = torch.Generator().manual_seed(1)

    def move(value: Any) -> Any:
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() > 0
        return value + by * torch.randn(value.shape, generator=generator) if is_float else value

    return {"model": tree_map(move, state["model"]), "optimizer": state["optimizer"]}


def exact(state: Any, checkpoint: Path) -> bool:
    return fingerprint(load_stock_trainer(state, checkpoint)) == fingerprint(state)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of two checkpoints, as a Trainer leaves them."""
    save_as_trainer(sample_state(), tmp_path / "checkpoint-7", RANKS, step=7)
    save_as_trainer(moved(sample_state()), tmp_path / "checkpoint-8", RANKS, step=8)
    return tmp_path


@pytest.mark.parametrize("optimizer", [None, "AdamW", "package.Other"])
def test_weights_are_rounded_by_moments_in_the_directory_beside_them(tmp_path: Path, optimizer: str | None) -> None:
    state = sample_state()
    for values in state["optimizer"]["state"].values():
        values["step"] = torch.tensor(1000.0)
    save_as_trainer(state, tmp_path / "checkpoint-7", RANKS)
    save_plain(state, tmp_path / "together", RANKS)
    bounds = []
    for path in (tmp_path / "checkpoint-7", tmp_path / "together"):
        compress_directory(path, mode="compact", optimizer=optimizer)
        manifest = read_manifest(path if path.name == "together" else path / "pytorch_model_fsdp_0")
        rows = [row for entry in manifest.files.values() for row in entry.report.get("tensors", ())]
        bounds.append({(row["path"], row.get("shard")): row["bound"] for row in rows if row["role"] == "weight"})
    assert bounds[0].items() <= bounds[1].items()
    assert any(bounds[0].values()) == (optimizer != "package.Other")


def test_a_dcp_directory_by_itself_becomes_small_and_plain_again(tmp_path: Path) -> None:
    state = sample_state()
    save_plain(state, tmp_path / "dcp", ranks=3)
    before = size_bytes(tmp_path / "dcp")
    assert compress_directory(tmp_path / "dcp").sharded
    assert size_bytes(tmp_path / "dcp") < before
    contents = ShardedContents(tmp_path / "dcp")
    assert torch.equal(contents.read_tensor("model.embed.weight"), state["model"]["embed.weight"])
    assert restore_directory(tmp_path / "dcp").mode == "plain"
    assert torch.equal(
        ShardedContents(tmp_path / "dcp").read_tensor("model.embed.weight"), state["model"]["embed.weight"]
    )


@pytest.mark.parametrize("rewrite", [compress_directory, restore_directory])
def test_a_first_save_that_was_killed_before_its_last_file_is_called_so(tmp_path: Path, rewrite: Any) -> None:
    with without_process_group():
        save(tmp_path, sample_state(), "lossless")
    (tmp_path / ".metadata").unlink()
    with pytest.raises(CorruptFileError, match="which is written last, found none"):
        rewrite(tmp_path)


def test_a_dcp_directory_by_itself_remembers_what_was_lost_and_what_was_said_of_it(tmp_path: Path) -> None:
    with without_process_group():
        save(tmp_path / "dcp", one_weight(5), step=5, metadata={"note": "mine"})
    small = compress_directory(tmp_path / "dcp", mode="compact", metrics={"loss": 2.5})
    restored = restore_directory(tmp_path / "dcp")
    exact = compress_directory(tmp_path / "dcp")
    assert [each.mode for each in (small, restored, exact)] == ["compact", "plain", "lossless"]
    assert total_rounding(small) == total_rounding(restored) == total_rounding(exact) != {}
    assert [(each.step, each.metrics) for each in (small, restored, exact)] == [(5, {"loss": 2.5})] * 3
    assert all(each.metadata["note"] == "mine" for each in (small, restored, exact))
    assert read_manifest(tmp_path / "dcp") == exact


def test_restoring_what_is_plain_writes_nothing(run: Path) -> None:
    compress_directory(run / "checkpoint-7")
    restored = restore_directory(run / "checkpoint-7")
    files = {path: path.stat().st_ino for path in run.rglob("*")}
    assert restore_directory(run / "checkpoint-7") == restored
    assert {path: path.stat().st_ino for path in run.rglob("*")} == files


def test_weights_that_are_to_stay_plain_are_refused(run: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"in whole files with `keep_weights`, found a sharded one"):
        compress_directory(run / "checkpoint-7", mode="near-lossless", keep_weights=True)
    assert exact(sample_state(), run / "checkpoint-7")


def test_rules_name_weights_wherever_they_lie_and_a_wrong_name_changes_nothing(run: Path) -> None:
    rules = {"weight/embed.weight": "raw", "buffer/norm.running_mean": "raw"}
    manifest = compress_directory(run / "checkpoint-7", rules=rules)
    rows = [row for entry in manifest.files.values() for row in entry.report.get("tensors", ())]
    assert {row["codec"] for row in rows if row["name"] == "embed.weight" and row["role"] == "weight"} == {"raw"}
    files = sorted(path.name for path in (run / "checkpoint-8").rglob("*"))
    with pytest.raises(ConfigError, match=r"no\.such\.weight"):
        compress_directory(run / "checkpoint-8", rules={"weight/no.such.weight": "raw"})
    assert sorted(path.name for path in (run / "checkpoint-8").rglob("*")) == files


def test_garbage_of_killed_rewritings_goes_after_a_day_and_the_checkpoint_stays(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stray = run / "checkpoint-7" / "optimizer_0" / "__0_5.distcp"
    stray.write_bytes(b"left by a killed rank")
    compress_directory(run / "checkpoint-8")
    anchor = run / "checkpoint-8" / "pytorch_model_fsdp_0" / f"{'0' * 64}.anchor"
    anchor.write_bytes(b"nobody needs it")
    assert collect_garbage(run) == []  # a save may still run
    monkeypatch.setattr(disk, "_ABANDONED_SECONDS", -1)
    assert collect_garbage(run, dry_run=True) == sorted([stray, anchor])
    assert collect_garbage(run) == sorted([stray, anchor])
    assert exact(sample_state(), run / "checkpoint-7")
    assert verify_checkpoint(run / "checkpoint-8").ok


def test_a_damaged_item_is_an_error_and_nothing_changes(run: Path) -> None:
    shard = run / "checkpoint-7" / "optimizer_0" / "__1_0.distcp"
    content = bytearray(shard.read_bytes())
    content[200:400] = bytes(200)
    shard.write_bytes(content)
    with pytest.raises(CorruptFileError, match=r"__1_0\.distcp"):
        compress_directory(run / "checkpoint-7")
    assert shard.read_bytes() == content
    assert (run / "checkpoint-7" / "optimizer_0" / ".metadata").exists()


@pytest.mark.parametrize("where", ["pytorch_model_fsdp_0", "optimizer_0"])
def test_a_flipped_bit_is_found_before_a_manifest_calls_it_whole(run: Path, where: str) -> None:
    directory = run / "checkpoint-7" / where
    contents = ShardedContents(directory)
    name, _ = max(contents.tensors.items(), key=lambda item: item[1].size.numel())
    place = next(place for index, place in contents.places.items() if index.fqn == name)
    shard = directory / place.file
    content = bytearray(shard.read_bytes())
    content[(place.start + place.stop) // 2] ^= 0x40
    shard.write_bytes(content)
    with pytest.raises(CorruptFileError, match=rf"{place.file}, from byte {place.start} on: .* Bad CRC-32"):
        compress_directory(run / "checkpoint-7")
    assert shard.read_bytes() == content
    assert not (run / "checkpoint-7" / "trainweights.json").exists()
    assert not (directory / "trainweights.json").exists()


def test_a_checkpoint_that_lacks_its_anchor_is_passed_over_with_and_without_a_manifest_of_all(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (7, 8):
        compress_directory(run / f"checkpoint-{step}")
    shutil.move(run / "checkpoint-8", tmp_path / "elsewhere" / "checkpoint-8")
    shutil.rmtree(run / "checkpoint-7")
    monkeypatch.setattr(reader, "_directories", {})
    moved = list((tmp_path / "elsewhere").rglob("*.anchor"))
    assert moved
    for anchor in moved:
        anchor.unlink()
    for _ in range(2):
        with pytest.warns(UserWarning, match=rf"is passed over: .*{moved[0].name}"):
            assert latest(tmp_path / "elsewhere") is None
        (tmp_path / "elsewhere" / "checkpoint-8" / "trainweights.json").unlink(missing_ok=True)


def one_weight(step: int) -> dict[str, Any]:
    noise = torch.randn(64, 80, generator=torch.Generator().manual_seed(step))
    states = {"w": {"exp_avg": noise, "exp_avg_sq": noise.square(), "step": torch.tensor(float(step))}}
    optimizer = {"state": states, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), **ADAM_SETTINGS, "params": ["w"]}]}
    return {"model": {"w": torch.ones(64, 80) + 1e-3 * noise}, "optimizer": optimizer}


class FailsToChange(FailingDisk):
    """A disk that fails at one of the calls that change something."""

    def __getattribute__(self, name: str) -> Any:
        return disk.FileSystem.read if name == "read" else super().__getattribute__(name)


REWRITINGS = {
    "compress again, rounded": lambda path: compress_directory(path, mode="near-lossless"),
    "compress again, without the anchor": lambda path: compress_directory(path, rules={"weight": "raw"}),
    "restore": restore_directory,
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*stored without reference")
@pytest.mark.parametrize("rewriting", by_default(("compress again, without the anchor", "restore"), REWRITINGS))
def test_whichever_call_fails_while_a_small_checkpoint_is_rewritten_it_loads_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rewriting: str
) -> None:
    whole = tmp_path / "whole"
    for step in (7, 8):
        save_as_trainer(one_weight(step), whole / f"checkpoint-{step}", step=step)
        compress_directory(whole / f"checkpoint-{step}")
    assert list((whole / "checkpoint-8").rglob("*.anchor"))
    fail_at = errors = 0
    for fail_at in range(1, 1000):
        copy, alone = tmp_path / "copy", tmp_path / "alone"
        shutil.copytree(whole, copy)
        failing = FailsToChange(fail_at, errno.EIO, for_good=False)
        with monkeypatch.context() as patch:
            patch.setattr(disk, "file_system", failing)
            try:
                REWRITINGS[rewriting](copy / "checkpoint-8")
            except SaveError:
                errors += 1
        shutil.move(copy / "checkpoint-8", alone / "checkpoint-8")
        shutil.rmtree(copy)
        monkeypatch.setattr(reader, "_directories", {})
        assert latest(alone) == str(alone / "checkpoint-8")
        loaded = load_stock_trainer(one_weight(8), alone / "checkpoint-8")
        torch.testing.assert_close(loaded["model"], one_weight(8)["model"], atol=1e-3, rtol=0)
        shutil.rmtree(alone)
        if failing.count < fail_at:
            break
    assert errors > 20


class RefusesTimes(disk.FileSystem):
    """A disk on which nobody may set times."""

    def set_times(self, path: Path, accessed_ns: int, modified_ns: int) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))


def test_times_that_cannot_be_set_are_no_error(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = run / "checkpoint-7" / "optimizer_0" / "__1_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-1])
    monkeypatch.setattr(disk, "file_system", RefusesTimes())
    with pytest.raises(CorruptFileError, match=r"__1_0\.distcp: expected \d+ bytes"):
        compress_directory(run / "checkpoint-7")
    compress_directory(run / "checkpoint-8")
    assert verify_checkpoint(run / "checkpoint-8").ok


def compress_together(path: Path, ranks: Ranks) -> list[str]:
    """Make a checkpoint small together with the other ranks; return the names of its files."""
    job = RewriteJob(path, Policy("lossless"), 8, ranks=ranks)
    return ranks.decide(lambda: sorted(layout_of(path).compress(job).files))


def compress_as_rank(rank: int, path: Path, dying_rank: int | None = None, die_at: int | None = None) -> Any:
    """Make a checkpoint small together with the other ranks; one of them may die at a call of the disk."""
    system = DyingDisk(die_at if rank == dying_rank else None)
    disk.file_system = system
    system.counts = True
    compress_together(path, Ranks(dist.group.WORLD))
    return system.count


def test_ranks_share_the_work_and_write_what_one_process_writes(run: Path, tmp_path: Path) -> None:
    alone = shutil.copytree(run, tmp_path / "alone")
    for step in (7, 8):
        run_ranks(RANKS, compress_as_rank, run / f"checkpoint-{step}")
        assert verify_checkpoint(run / f"checkpoint-{step}").ok
        compress_directory(alone / f"checkpoint-{step}")
    assert exact(moved(sample_state()), run / "checkpoint-8")
    assert {path.name[:3] for path in (run / "checkpoint-8" / "optimizer_0").glob("*.distcp")} == {"__0", "__1"}
    assert size_bytes(run / "checkpoint-8") < 1.1 * size_bytes(alone / "checkpoint-8")


@pytest.mark.parametrize("dying_rank", exhaustive(*range(RANKS)))
def test_whenever_a_rank_is_killed_all_ranks_find_a_whole_checkpoint(
    run: Path, tmp_path: Path, dying_rank: int
) -> None:
    compress_directory(run / "checkpoint-7")
    whole = shutil.copytree(run, tmp_path / "whole")
    count = run_ranks(RANKS, compress_as_rank, whole / "checkpoint-8")[dying_rank]
    for die_at in sorted({1, count // 3, count // 2, 3 * count // 4, count - 3, count}):
        copy = shutil.copytree(run, tmp_path / str(die_at))
        outcomes = outcomes_of_ranks(RANKS, compress_as_rank, copy / "checkpoint-8", dying_rank, die_at)
        # How many calls a rank makes differs from run to run: with fewer it is through before it would die.
        died = str(KILLED) in outcomes[dying_rank].text
        assert died or outcomes[dying_rank].value < die_at
        assert exact(moved(sample_state()), copy / "checkpoint-8")
        assert latest(copy) == str(copy / "checkpoint-8")
        collect_garbage(copy)
        compress_directory(copy / "checkpoint-8")
        assert verify_checkpoint(copy / "checkpoint-8").ok
        assert exact(moved(sample_state()), copy / "checkpoint-8")


class FullDisk(disk.FileSystem):
    """A disk that takes no more bytes."""

    def write(self, descriptor: int, data: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def compress_on_full_disk(rank: int, path: Path) -> None:
    """Make a checkpoint small while the disk of the last rank is full."""
    if rank == RANKS - 1:
        disk.file_system = FullDisk()
    compress_together(path, Ranks(dist.group.WORLD))


def test_a_rank_that_runs_out_of_disk_is_a_typed_error_on_every_rank(run: Path) -> None:
    outcomes = outcomes_of_ranks(RANKS, compress_on_full_disk, run / "checkpoint-8")
    assert [type(outcome.error) for outcome in outcomes] == [SaveError] * RANKS
    assert exact(moved(sample_state()), run / "checkpoint-8")
    assert latest(run) == str(run / "checkpoint-8")
