"""`trainweights checkpoint` on runs whose checkpoints are stored against weights outside them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from bases import COMMIT, REPOSITORY, forget_directories, put_into_cache, trainer_checkpoint, weights, write
from command_line import run, run_json, unwrapped

from hf_trainweights.checkpoint.encoded import reader


@pytest.fixture(autouse=True)
def nothing_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_directories(monkeypatch)


@pytest.fixture
def plain_run(tmp_path: Path) -> Path:
    for step in (1, 2):
        trainer_checkpoint(tmp_path / "run", step)
    return tmp_path / "run"


@pytest.mark.slow
def test_compress_ls_verify_and_restore_with_a_base_of_the_hub(
    plain_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = put_into_cache(tmp_path / "cache", monkeypatch, weights())
    run_json("checkpoint", "compress", plain_run, "--anchor", snapshot)
    rows = run_json("checkpoint", "ls", plain_run)
    assert [row["base"]["repository"] for row in rows] == [REPOSITORY] * 2
    assert [row["needs"] for row in rows] == [f"{REPOSITORY} at commit {COMMIT}"] * 2
    assert f"base: {REPOSITORY} at commit {COMMIT}" in unwrapped(run("checkpoint", "ls", plain_run).stdout)
    assert all(row["ok"] for row in run_json("checkpoint", "verify", plain_run))
    snapshot.rename(snapshot.with_name("gone"))
    (first, _) = run_json("checkpoint", "verify", plain_run, exit_code=1)
    assert f"hf download {REPOSITORY} --revision {COMMIT}" in first["problems"]["its base"]
    snapshot.with_name("gone").rename(snapshot)
    run_json("checkpoint", "restore", plain_run)
    loaded = torch.load(plain_run / "checkpoint-2" / "pytorch_model.bin", weights_only=True)
    assert torch.equal(loaded["layer.weight"], weights(2)["layer.weight"])


@pytest.mark.slow
def test_a_local_base_is_named_again_or_kept(plain_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    write(mine / "model.safetensors", weights())
    run_json("checkpoint", "compress", plain_run, "--anchor", mine / "model.safetensors")
    monkeypatch.setattr(reader, "_base_directories", {})
    run_json("checkpoint", "verify", plain_run, exit_code=1)
    run_json("checkpoint", "verify", plain_run, "--base", mine)
    monkeypatch.setattr(reader, "_base_directories", {})
    run_json("checkpoint", "restore", plain_run, "--base", mine)
    run_json("checkpoint", "compress", plain_run, "--anchor", mine, "--keep-base")
    (mine / "model.safetensors").unlink()
    monkeypatch.setattr(reader, "_base_directories", {})
    assert run_json("checkpoint", "ls", plain_run)[1]["needs"] == f"weights of {mine}, kept in the run"
    run_json("checkpoint", "verify", plain_run)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--anchor", "base"), "name that model"),
        (("--keep-base",), "nothing to keep without --anchor"),
    ],
)
def test_what_cannot_be_a_base_is_a_usage_error(plain_run: Path, options: tuple[str, ...], message: str) -> None:
    result = run("checkpoint", "compress", plain_run, *options)
    assert result.exit_code == 2
    assert message in unwrapped(result.stderr)
