"""What calibration costs: CPU time and memory of a Llama's blocks, at the shape of one of 1.2 billion weights.

Run `python -m benchmarks.calibration`; it needs no network and takes an hour on one core. All blocks of a Llama are
alike, so a few of them tell what all cost; the rest is in proportion. Weights and tokens are random, which changes no
cost. Memory is what the process holds beyond mapped files, above what it held before. The factor of second moments is
taken in float32 and in float64. It writes `benchmarks/results/calibration.json`, where rows of other shapes stay, each
with the CPU that it was measured on; with `--shapes` and no shape only the factors are measured.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.machine import commit, cpu_flags, cpu_name, versions
from benchmarks.memory import Peak
from hf_trainweights import TrainWeightsConfig
from hf_trainweights.models.calibration.feedback import Moments
from hf_trainweights.models.loading.saved_models import load_saved
from hf_trainweights.models.quantize_in_place import quantize_module

RESULTS = Path(__file__).parent / "results" / "calibration.json"
# Of Llama 3.2 1B and, for the cost of a block, Llama 2 7B.
SHAPES = {
    "1.2B": {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8},
    "7B": {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "num_key_value_heads": 32},
}
BLOCKS = {"1.2B": 16, "7B": 32}
FORMAT = {"format": "int4", "group_size": 128}
WINDOW, BATCH = 512, 8
# Inputs of the layers whose factors are compared, and how often they are taken.
FACTOR_INPUTS, FACTOR_RUNS = 2048, 3


def measure(shape: str, blocks: int, tokens: int) -> dict[str, Any]:
    """Return what some blocks of a shape cost with so many tokens."""
    config = transformers.LlamaConfig(
        **SHAPES[shape], num_hidden_layers=blocks, vocab_size=512, tie_word_embeddings=True
    )
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(512, (tokens // WINDOW, WINDOW), generator=generator)
    batches = [{"input_ids": part} for part in ids.split(BATCH)]
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as directory:
        path = Path(directory)
        model = transformers.LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(path / "float")
        del model
        loaded = load_saved(path / "float")
        with Peak() as peak:
            cpu, wall = time.process_time(), time.perf_counter()
            quantize_module(loaded, TrainWeightsConfig(**FORMAT), batches, path / "blocks")
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    cpu -= peak.own_seconds
    weights = sum(each.numel() for name, each in loaded.named_parameters() if "layers." in name)
    return {
        "shape": shape,
        "blocks": blocks,
        "tokens": tokens,
        "weights": weights,
        "cpu_seconds": round(cpu, 1),
        "wall_seconds": round(wall, 1),
        "cpu_seconds_of_all_blocks": round(cpu / blocks * BLOCKS[shape]),
        "peak_anonymous_bytes": peak.increase_bytes,
        **_measured_with(),
    }


def _measured_with() -> dict[str, Any]:
    """Return the CPU, the commit and the versions at hand, which rows that stay do not share."""
    return {"cpu": cpu_name(), "flags": cpu_flags(), "commit": commit(), "versions": versions()}


def factors() -> dict[str, Any]:
    """Return what the factor of second moments costs in float64, in times of float32, and how far they are apart."""
    K, generator = FACTOR_INPUTS, torch.Generator().manual_seed(0)
    # Columns that depend on one another and differ in size a thousandfold, as those of models do.
    mixed = torch.randn(2 * K, K // 8, generator=generator) @ torch.randn(K // 8, K, generator=generator)
    x = (mixed + 0.1 * torch.randn(2 * K, K, generator=generator)) * torch.logspace(-1.5, 1.5, K)
    moments = Moments(K, x.device)
    moments.add(x, x)
    narrow, wide = float("inf"), float("inf")
    for _ in range(FACTOR_RUNS):
        start = time.process_time()
        found = moments.factor()
        middle = time.process_time()
        exact = _exact_factor(moments)
        narrow, wide = min(narrow, middle - start), min(wide, time.process_time() - middle)
    difference = ((found - exact).norm() / exact.norm()).item()
    return {"K": K, "float64_over_float32": round(wide / narrow, 2), "difference": float(f"{difference:.1e}")}


def _exact_factor(moments: Moments) -> torch.Tensor:
    """Return the factor, taken in float64."""
    damped = moments.damped().flip(0, 1).double()
    lower = torch.linalg.cholesky(damped).flip(0, 1)
    return torch.linalg.solve_triangular(lower, torch.eye(len(lower), dtype=lower.dtype), upper=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES))
    arguments = parser.parse_args()
    report: dict[str, Any] = {"threads": torch.get_num_threads(), "format": "int4, groups of 128"}
    earlier = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}
    rows = earlier["rows"] if report.items() <= earlier.items() else []
    rows = [row for row in rows if row["shape"] not in arguments.shapes]
    rows += [measure(shape, arguments.blocks, arguments.tokens) for shape in arguments.shapes]
    report |= {"factors": factors() | _measured_with(), "rows": rows}
    RESULTS.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
