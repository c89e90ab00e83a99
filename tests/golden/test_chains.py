"""A run of four rounded checkpoints: the first stands alone, each other one is a difference to the one before it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from golden.files import golden_directory, integers, recorded
from golden.reader import AFresh, load_checkpoints
from golden.test_checkpoints import structure
from torch import Tensor

from hf_trainweights.checkpoint.encoded.reader import load_file, register_anchor_directory
from hf_trainweights.checkpoint.loop.training_state import save_training_state
from hf_trainweights.checkpoint.manifest import read_manifest
from hf_trainweights.checkpoint.planning.optimizers import ADAM
from hf_trainweights.checkpoint.planning.policy import Policy
from hf_trainweights.checkpoint.run.checkpoints import verify_checkpoint

MODES = ("near-lossless", "compact")
STEPS = (10, 20, 30, 40)
WEIGHTS = "pytorch_model.bin"


def weight(step: int) -> Tensor:
    """Return a weight of 24 significant bits, half of whose rows move."""
    fixed = integers(64, 64, seed=1, count=2048) / 2**10 + integers(64, 64, seed=2, count=4096) / 2**23
    return fixed + sum(integers(64, 64, seed=each) for each in range(step // 10)) * moves() / 2**13


def moves() -> Tensor:
    return (torch.arange(64) % 2).view(64, 1)


def optimizer(step: int) -> dict[str, Any]:
    moment = integers(64, 64, seed=step // 10) * moves()
    state = {"step": torch.tensor(float(step)), "exp_avg": moment / 2**9, "exp_avg_sq": moments_squared()}
    return {"state": {0: state}, "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.999), "params": [0]}]}


def moments_squared() -> Tensor:
    return torch.ldexp(torch.ones(64, 64), torch.arange(64) % 4 - 12) * moves()


def write(run: Path, mode: str) -> None:
    for step in STEPS:
        names = {"buffers": [], "optimizer": {0: "w"}, "optimizer_class": ADAM}
        checkpoint = {"model": {"w": weight(step)}, "optimizer": optimizer(step), "step": step, "names": names}
        save_training_state(checkpoint, run / f"checkpoint-{step}", Policy(mode), anchor_every=8)


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    return request.param


def golden(mode: str) -> Path:
    return golden_directory(f"chains/{mode}", lambda directory: write(directory, mode), load_checkpoints)


@pytest.mark.slow
def test_a_fresh_process_loads_what_is_recorded(mode: str, afresh: AFresh) -> None:
    run = golden(mode)
    assert afresh(load_checkpoints, run) == recorded(run)


def test_every_checkpoint_verifies_and_keeps_its_bound(mode: str) -> None:
    for step in STEPS:
        path = golden(mode) / f"checkpoint-{step}"
        assert verify_checkpoint(path).ok
        register_anchor_directory(path)  # the recorded one is gone
        (report,) = read_manifest(path).files[WEIGHTS].report["tensors"]
        assert (load_file(path / WEIGHTS)["w"] - weight(step)).abs().max() <= report["bound"]


@pytest.mark.slow
def test_a_run_of_today_is_made_alike(mode: str, tmp_path: Path) -> None:
    write(tmp_path, mode)
    for step in STEPS:
        (old,), (new,) = (
            structure(run / f"checkpoint-{step}" / WEIGHTS)["storages"] for run in (golden(mode), tmp_path)
        )
        assert old["codec"] == new["codec"] == "delta-uniform"
        assert old["params"]["anchor"] == new["params"]["anchor"] == (step > STEPS[0])
        # The step comes from sums, whose last digit is that of the machine.
        assert new["params"]["step"] == pytest.approx(old["params"]["step"], rel=1e-5)
        anchors = [len(list((run / f"checkpoint-{step}").glob("*.anchor"))) for run in (golden(mode), tmp_path)]
        assert anchors == [STEPS.index(step)] * 2
