"""Quantizing Llamas of 1.2 and 3.2 billion weights from directory to directory: memory and CPU time.

Run `python -m benchmarks.scale`; it needs no network, 15 GB of disk in TMPDIR and about ten minutes. Weights are
random, which changes no cost. Each call has a process of its own, on one thread. Memory is what the process holds at
its peak that no file backs, above what it held after its imports. It writes `benchmarks/results/scale.json`, where rows
of other shapes stay if the machine is the same.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from benchmarks.machine import commit, cpu_name, versions
from benchmarks.memory import Peak
from hf_trainweights import TrainWeightsConfig, quantize_directory

RESULTS = Path(__file__).parent / "results" / "scale.json"
# Of Llama 3.2.
SHAPES: dict[str, dict[str, Any]] = {
    "1.2B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64},
    "3.2B": {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "head_dim": 128},
}
COMMON: dict[str, Any] = {"num_key_value_heads": 8, "vocab_size": 128_256, "tie_word_embeddings": True}
CONFIGS: dict[str, dict[str, Any]] = {
    "int8": {"format": "int8"},
    "int4": {"format": "int4", "group_size": 128},
    "bits=4.0": {"bits": 4.0},
}
SHARD_TENSORS = 40


def write_model(shape: str, directory: Path) -> int:
    """Write a bfloat16 model of random weights, a shard at a time, and return how many weights it has."""
    sizes = SHAPES[shape]
    heads = sizes["hidden_size"] // sizes["head_dim"]
    config = LlamaConfig(
        **COMMON, **sizes, num_attention_heads=heads, architectures=["LlamaForCausalLM"], dtype="bfloat16"
    )
    config.save_pretrained(directory)
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in LlamaForCausalLM(config).state_dict().items()}
    names = [name for name in shapes if name != "lm_head.weight"]
    shards = [names[start : start + SHARD_TENSORS] for start in range(0, len(names), SHARD_TENSORS)]
    files = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    generator = torch.Generator().manual_seed(0)
    for file, parts in zip(files, shards, strict=True):
        made = {name: torch.randn(shapes[name], generator=generator).mul_(0.02).bfloat16() for name in parts}
        save_file(made, directory / file, {"format": "pt"})
    weight_map = {name: file for file, parts in zip(files, shards, strict=True) for name in parts}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return sum(shapes[name].numel() for name in names)


def quantize(source: Path, out: Path, config: str) -> dict[str, Any]:
    """Quantize a directory and load the result, in this process; return what both took."""
    torch.set_num_threads(1)
    with Peak() as peak:
        start = time.process_time()
        quantize_directory(source, out, TrainWeightsConfig(**CONFIGS[config]))
        cpu_seconds = time.process_time() - start
    with Peak() as loading:
        model = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert model.dtype == torch.bfloat16
    return {
        "cpu_seconds": round(cpu_seconds - peak.own_seconds, 1),
        "peak_bytes": peak.increase_bytes,
        "reload_bytes": loading.increase_bytes,
        "written_bytes": sum(path.stat().st_size for path in out.glob("*.safetensors")),
    }


def measure(shape: str, directory: Path) -> list[dict[str, Any]]:
    """Return a row for each configuration."""
    source = directory / shape
    weights, rows = write_model(shape, source), []
    for config in CONFIGS:
        with tempfile.TemporaryDirectory(dir=directory) as out:
            command = [sys.executable, "-m", "benchmarks.scale", "--one", str(source), f"{out}/out", config]
            environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
            done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, env=environment)
            found = json.loads(done.stdout.splitlines()[-1])
        rows.append({"shape": shape, "weights": weights, "config": config, **found})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--one", nargs=3, metavar=("SOURCE", "OUT", "CONFIG"), help="what a process of its own does")
    arguments = parser.parse_args()
    if arguments.one:
        source, out, config = arguments.one
        print(json.dumps(quantize(Path(source), Path(out), config)))
        return
    report: dict[str, Any] = {"cpu": cpu_name()}
    earlier = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}
    rows = earlier["rows"] if report.items() <= earlier.items() else []
    rows = [row for row in rows if row["shape"] not in arguments.shapes]
    for shape in arguments.shapes:
        with tempfile.TemporaryDirectory() as directory:
            rows += measure(shape, Path(directory))
    report |= {"commit": commit(), "versions": versions(), "rows": sorted(rows, key=lambda row: row["weights"])}
    RESULTS.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
