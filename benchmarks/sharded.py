"""Sharded checkpoints of a training run on two ranks beside those in whole files: how small each save is, part by part.

Run `python -m benchmarks.sharded`; it writes `benchmarks/results/sharded.json` within minutes of one core. A Llama of
7.5 million parameters trains on bytes with AdamW in one process, which keeps its state every 50 steps. Two ranks save
these states cut by rows: with DCP as a Trainer does under FSDP, which puts weights and optimizer into two directories,
and with `TrainWeightsWriter` into one. The same states are saved in whole files. All become small, near-lossless, in
their order. What is neither weights nor moments is what describes them: manifests, DCP's index, and a head and a tail
of each shard.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.checkpoints.optimizers import text_rows
from benchmarks.machine import commit, cpu_name, versions
from hf_trainweights.checkpoint import compress_directory
from hf_trainweights.checkpoint.manifest import MANIFEST_NAME, read_manifest
from hf_trainweights.checkpoint.run.checkpoints import size_bytes
from hf_trainweights.distributed import TrainWeightsWriter

RESULTS = Path(__file__).parent / "results" / "sharded.json"
RANKS = 2
MODE = "near-lossless"
SAVES = (50, 100, 150, 200, 250)
_SCHEDULE_STEPS, _WARMUP_STEPS, _LEARNING_RATE, _BATCH = 300, 40, 1e-3, 4
# Where a Trainer puts them under FSDP.
_WEIGHTS, _OPTIMIZER = "pytorch_model_fsdp_0", "optimizer_0"

State = dict[str, Any]


def train(root: Path) -> None:
    """Train, and keep the state of some steps in `root`: weights, and states by the names of parameters."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 320, "intermediate_size": 864, "num_hidden_layers": 6, "num_attention_heads": 5}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, tie_word_embeddings=True, use_cache=False, **sizes))
    names = [name for name, _ in model.named_parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    rows = text_rows((SAVES[-1] + 1) * _BATCH)
    rows = rows[torch.randperm(len(rows))]
    for step in range(1, SAVES[-1] + 1):
        for group in optimizer.param_groups:
            group["lr"] = _LEARNING_RATE * min(step / _WARMUP_STEPS, 1) * (1 - step / _SCHEDULE_STEPS)
        batch = rows[step * _BATCH : (step + 1) * _BATCH]
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in SAVES:
            saved = optimizer.state_dict()
            states = {names[index]: values for index, values in saved["state"].items()}
            groups = [{**saved["param_groups"][0], "params": names}]
            torch.save({"model": dict(model.named_parameters()), "state": states, "groups": groups}, _file(root, step))


def save_from_rank(rank: int, root: Path) -> None:
    """Save the states from one rank, in one directory and in two."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{root}/store", rank=rank, world_size=RANKS)
    mesh, previous = init_device_mesh("cpu", (RANKS,)), None
    for step in SAVES:
        state = _cut(torch.load(_file(root, step)), mesh)
        path = root / "by a Trainer" / f"checkpoint-{step}"
        for name, key in ((_WEIGHTS, "model"), (_OPTIMIZER, "optimizer")):
            dcp.save({key: state[key]}, storage_writer=dcp.FileSystemWriter(path / name))
        together = root / "in one directory" / f"checkpoint-{step}"
        dcp.save(state, storage_writer=TrainWeightsWriter(together, MODE, anchor=previous, step=step))
        previous = together
    dist.barrier()
    os._exit(0)  # threads of gloo may still hold its sockets


def save_whole(root: Path, step: int) -> Path:
    """Save a state in whole files, as one process does."""
    state, path = torch.load(_file(root, step)), root / "whole files" / f"checkpoint-{step}"
    path.mkdir(parents=True)
    names = state["groups"][0]["params"]
    groups = [{**state["groups"][0], "params": [*range(len(names))]}]
    torch.save(state["model"], path / "pytorch_model.bin")
    states = {index: state["state"][name] for index, name in enumerate(names)}
    torch.save({"state": states, "param_groups": groups}, path / "optimizer.pt")
    return path


def measure(root: Path) -> dict[str, list[dict[str, Any]]]:
    """Return a row for each save of each layout; files go to `root`."""
    train(root)
    mp.start_processes(save_from_rank, (root,), nprocs=RANKS, start_method="spawn")
    found: dict[str, list[dict[str, Any]]] = {"whole files": [], "by a Trainer": [], "in one directory": []}
    for step in SAVES:
        by_trainer = root / "by a Trainer" / f"checkpoint-{step}"
        progress = {"global_step": step, "epoch": 1.0}
        (by_trainer / "trainer_state.json").write_text(json.dumps(progress), encoding="utf-8")
        plain_bytes = size_bytes(by_trainer)
        whole = save_whole(root, step)
        (whole / "trainer_state.json").write_text(json.dumps(progress), encoding="utf-8")
        names = dict(enumerate(torch.load(_file(root, step))["groups"][0]["params"]))
        compress_directory(whole, mode=MODE, optimizer_names=names)
        compress_directory(by_trainer, mode=MODE)
        for layout, rows in found.items():
            rows.append(_row(root / layout / f"checkpoint-{step}", step, plain_bytes))
    return found


def _row(path: Path, step: int, plain_bytes: int) -> dict[str, Any]:
    # The manifest of a Trainer's checkpoint repeats the reports of its directories.
    manifests = [file.parent for file in path.rglob(MANIFEST_NAME) if file.parent != path] or [path]
    entries = [entry for directory in manifests for entry in read_manifest(directory).files.values()]
    rows = [row for entry in entries for row in entry.report.get("tensors", ())]
    weights = sum(row["bytes_out"] for row in rows if row["role"] == "weight")
    states = sum(row["bytes_out"] for row in rows) - weights
    small_bytes = size_bytes(path)
    parts = {"weights_bytes": weights, "states_bytes": states, "other_bytes": small_bytes - weights - states}
    return {"step": step, "ratio": plain_bytes / small_bytes, "plain_bytes": plain_bytes, **parts, "items": len(rows)}


def _cut(state: Mapping[str, Any], mesh: DeviceMesh) -> State:
    def cut(tensor: Tensor) -> Tensor:
        return distribute_tensor(tensor, mesh, [Shard(0)]) if tensor.dim() else tensor

    model = {name: cut(weight.detach()) for name, weight in state["model"].items()}
    states = {name: {key: cut(value) for key, value in values.items()} for name, values in state["state"].items()}
    return {"model": model, "optimizer": {"state": states, "param_groups": state["groups"]}}


def _file(root: Path, step: int) -> Path:
    return root / f"state-{step}.pt"


def main() -> None:
    """Measure, print and store the results."""
    argparse.ArgumentParser(prog="python -m benchmarks.sharded", description=__doc__).parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as root:
        layouts = measure(Path(root))
    results = {"commit": commit(), "cpu": cpu_name(), "versions": versions(), "ranks": RANKS, "layouts": layouts}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
