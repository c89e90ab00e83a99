"""Sharded checkpoints over 1, 2, 4 and 8 ranks: bytes, encoding seconds, and how long a save stops the training.

    python -m benchmarks.distributed [--megabytes 64] [--repeats 3]

Strong scaling divides one model by the ranks, weak scaling gives each rank as much. All ranks share this machine's
cores, so the seconds of an encoding are processor seconds of one rank, which is what a rank of its own would take. Each
save is followed by another one a little later, which is stored as a difference to it; what is measured is the second.
The standstill is how long `dcp.async_save` and `dcp.save` block, with this package's writer and with PyTorch's own, in
turns.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from benchmarks.machine import commit, cpu_name, versions
from hf_trainweights.distributed import TrainWeightsWriter

RESULTS = Path(__file__).parent / "results" / "distributed.json"
RANKS = (1, 2, 4, 8)
MODES = ("lossless", "near-lossless", "compact")
COLUMNS = 1024
# Of each parameter: a float32 weight and two float32 moments.
BYTES_PER_PARAMETER = 12


def state_of(megabytes: int, mesh: Any, seed: int) -> dict[str, Any]:
    """Return weights and Adam's moments as a trained model has them, sharded by rows."""
    generator = torch.Generator().manual_seed(0)
    rows = max(8, megabytes * 10**6 // (BYTES_PER_PARAMETER * COLUMNS * 4) // 8 * 8)
    model, states = {}, {}
    for layer in range(4):
        name = f"layers.{layer}.weight"
        weight = 0.02 * torch.randn(rows, COLUMNS, generator=generator)
        scale = torch.rand(rows, 1, generator=generator) * torch.rand(1, COLUMNS, generator=generator)
        mean = 1e-4 * scale * torch.randn(rows, COLUMNS, generator=generator)
        square = (1e-4 * scale) ** 2 * (0.5 + torch.rand(rows, COLUMNS, generator=generator))
        moved = torch.Generator().manual_seed(seed)
        if seed:
            weight = weight + 1e-5 * torch.randn(rows, COLUMNS, generator=moved)
        sharded = [distribute_tensor(each, mesh, [Shard(0)]) for each in (weight, mean, square)]
        model[name] = sharded[0]
        states[name] = {"step": torch.tensor(100.0), "exp_avg": sharded[1], "exp_avg_sq": sharded[2]}
    (group,) = torch.optim.AdamW([torch.zeros(1)], lr=1e-4).state_dict()["param_groups"]
    groups = [{**group, "params": list(states)}]
    return {"model": model, "optimizer": {"state": states, "param_groups": groups}}


def _rank(rank: int, ranks: int, root: str, megabytes: int, repeats: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{root}/store", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    first, second = state_of(megabytes, mesh, 0), state_of(megabytes, mesh, 1)
    base = Path(root)
    rows: dict[str, Any] = {mode: _measure_mode(mode, first, second, base, repeats) for mode in MODES}
    rows["plain"] = _measure_plain(second, base, repeats)
    rows["standstill"] = _measure_standstill(first, second, base, repeats)
    every: list[Any] = [None] * ranks
    dist.all_gather_object(every, rows)
    if rank == 0:
        (base / "rows.json").write_text(json.dumps(every))
    dist.barrier()
    # The threads of async_save hold gloo's sockets: taking the group apart with them alive aborts the process.
    os._exit(0)


def _measure_mode(mode: str, first: Any, second: Any, base: Path, repeats: int) -> dict[str, float]:
    anchor = base / f"{mode}-anchor"
    dcp.save(first, storage_writer=TrainWeightsWriter(anchor, mode, step=1))
    seconds = []
    for number in range(repeats):
        writer = TrainWeightsWriter(base / f"{mode}-{number}", mode, anchor=anchor, step=2)
        dist.barrier()
        start = time.process_time()
        dcp.save(second, storage_writer=writer)
        seconds.append(time.process_time() - start)
        dist.barrier()
    return {
        "full_bytes": _bytes_on_disk(anchor),
        "delta_bytes": _bytes_on_disk(base / f"{mode}-0"),
        "cpu_seconds": statistics.median(seconds),
    }


def _measure_plain(state: Any, base: Path, repeats: int) -> dict[str, float]:
    seconds = []
    for number in range(repeats):
        dist.barrier()
        start = time.process_time()
        dcp.save(state, storage_writer=dcp.FileSystemWriter(base / f"plain-{number}"))
        seconds.append(time.process_time() - start)
        dist.barrier()
    return {"bytes": _bytes_on_disk(base / "plain-0"), "cpu_seconds": statistics.median(seconds)}


def _measure_standstill(first: Any, second: Any, base: Path, repeats: int) -> dict[str, float]:
    """Return for how long a call blocks: ours and PyTorch's own, each in the background and in the foreground."""
    seconds: dict[str, list[float]] = {"ours_async": [], "plain": [], "plain_async": [], "ours": []}
    anchor = base / "near-lossless-anchor"
    group = dist.new_group()  # nothing else may talk over the group of a save in the background
    for number in range(repeats):
        for kind, of_kind in seconds.items():
            path = base / f"stand-{kind}-{number}"
            ours = kind.startswith("ours")
            writer: Any = (
                TrainWeightsWriter(path, "near-lossless", anchor=anchor) if ours else dcp.FileSystemWriter(path)
            )
            dist.barrier()
            start = time.perf_counter()
            pending = dcp.async_save(second, storage_writer=writer, process_group=group) if "async" in kind else None
            if pending is None:
                dcp.save(second, storage_writer=writer)
            of_kind.append(time.perf_counter() - start)
            if pending is not None:
                pending.result()
            dist.barrier()
    return {kind: statistics.median(of_kind) for kind, of_kind in seconds.items()}


def _bytes_on_disk(path: Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir() if file.suffix != ".anchor")


def measure(ranks: int, megabytes: int, repeats: int) -> dict[str, Any]:
    """Return what saves of a state cost on so many ranks."""
    with tempfile.TemporaryDirectory() as root:
        mp.start_processes(_rank, (ranks, root, megabytes, repeats), nprocs=ranks, start_method="forkserver")
        every = json.loads((Path(root) / "rows.json").read_text())
    plain = every[0]["plain"]
    modes = {}
    for mode in MODES:
        modes[mode] = {
            "ratio_full": plain["bytes"] / every[0][mode]["full_bytes"],
            "ratio_delta": plain["bytes"] / every[0][mode]["delta_bytes"],
            "cpu_seconds_per_rank": max(row[mode]["cpu_seconds"] for row in every),
        }
    stand = {kind: max(row["standstill"][kind] for row in every) for kind in every[0]["standstill"]}
    plain_seconds = max(row["plain"]["cpu_seconds"] for row in every)
    shown = {"ranks": ranks, "plain_bytes": plain["bytes"], "plain_cpu_seconds_per_rank": plain_seconds}
    return {**shown, "modes": modes, "standstill_seconds": stand}


def main() -> None:
    """Measure, print and store the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--megabytes", type=int, default=64, help="plain bytes of the state; with weak scaling, a rank's"
    )
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    multiprocessing.set_forkserver_preload(["hf_trainweights.distributed"])
    strong = [measure(ranks, options.megabytes, options.repeats) for ranks in RANKS]
    weak = [measure(ranks, options.megabytes // 4 * ranks, options.repeats) for ranks in RANKS]
    results = {
        "commit": commit(),
        "cpu": cpu_name(),
        "versions": versions(),
        "megabytes": options.megabytes,
        "strong": strong,
        "weak": weak,
    }
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
