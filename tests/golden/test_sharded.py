"""Runs of sharded checkpoints in every mode: the first one full, the weights of others differences.

In a run of three rounded ones the third is a difference to the second.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import zstandard
from golden.files import golden_directory, recorded
from golden.reader import AFresh
from golden.sharded_reader import load_sharded
from golden.test_checkpoints import EARLIER, STEPS, optimizer, weights
from torch.distributed.checkpoint import state_dict_saver

from hf_trainweights.checkpoint.planning.policy import MODES
from hf_trainweights.checkpoint.run.checkpoints import verify_checkpoint
from hf_trainweights.distributed import TrainWeightsWriter

RUNS = {**dict.fromkeys(MODES, STEPS), "near-lossless-chain": (1, 2, 3)}
ALL_RUNS = {**RUNS, **dict.fromkeys(EARLIER, STEPS)}
ZSTD_VERSION = ".".join(map(str, zstandard.ZSTD_VERSION))
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is .*uninitialized")


def state(step: int) -> dict[str, Any]:
    plain = optimizer(step)
    names = plain["param_groups"][0].pop("param_names")
    states = {name: plain["state"][index] for index, name in enumerate(names)}
    group = {**plain["param_groups"][0], "params": names}
    return {"model": weights(step), "optim": {"state": states, "param_groups": [group]}, "step": step}


def write(directory: Path, run: str) -> None:
    for step in RUNS[run]:
        anchor = directory / f"checkpoint-{step - 1}" if step > 1 else None
        mode = run.removesuffix("-chain")
        writer = TrainWeightsWriter(directory / f"checkpoint-{step}", mode, anchor=anchor, step=step)
        state_dict_saver.save(state(step), storage_writer=writer, no_dist=True)


def golden(run: str) -> Path:
    return golden_directory(
        f"sharded/{run}",
        lambda directory: write(directory, run),
        lambda directory: {"zstd": ZSTD_VERSION, "loaded": load_sharded(directory)},
    )


@pytest.mark.slow
@pytest.mark.parametrize("run", ALL_RUNS)
def test_earlier_sharded_checkpoints_load_as_ever_by_both_readers(run: str, afresh: AFresh) -> None:
    directory = golden(run)
    assert afresh(load_sharded, directory) == recorded(directory)["loaded"]


@pytest.mark.parametrize("run", ALL_RUNS)
def test_earlier_sharded_checkpoints_verify(run: str) -> None:
    assert all(verify_checkpoint(golden(run) / f"checkpoint-{step}").ok for step in ALL_RUNS[run])


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
def test_sharded_checkpoints_are_written_as_ever(run: str, tmp_path: Path) -> None:
    directory = golden(run)
    if recorded(directory)["zstd"] != ZSTD_VERSION:
        pytest.skip("another zstd writes other bytes")
    write(tmp_path, run)
    for step in RUNS[run]:
        old, new = (
            json.loads((path / f"checkpoint-{step}/trainweights.json").read_text()) for path in (directory, tmp_path)
        )
        assert rows(new) == rows(old)
        assert {**new["sharded"], "anchor": 0} == {**old["sharded"], "anchor": 0}


def rows(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the items of a manifest but for what depends on where the anchor lay, and on torch's pickles."""
    depends = {"bytes", "crc32", "anchor"}
    found = [row for entry in manifest["files"].values() for row in entry["report"].get("tensors", ())]
    return [
        {key: value for key, value in row.items() if key not in depends}
        for row in found
        if row["codec"] != "torch.save"
    ]
