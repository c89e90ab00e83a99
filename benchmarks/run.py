"""Speed and memory, measured side by side, with `--peers` beside other quantizers that run on a CPU.

Run `python -m benchmarks.run --peers` on a machine that does nothing else; it takes about ten minutes, `--quick`
three. It needs the `bench` extra, writes `benchmarks/results/speed-<machine>-<date>.json` and draws `docs/speed.svg`
from it; then `python -m benchmarks.tables` writes the tables of the documents.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import platform
import re
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from logging import ERROR, getLogger
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers.utils import logging

from benchmarks.speed import generate, linear, loading
from benchmarks.speed.methods import FLOATS, OURS, methods
from benchmarks.speed.models import save_models
from benchmarks.speed.plot import DRAWING, draw

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("hf_trainweights", "torch", "transformers", "torchao", "bitsandbytes", "optimum-quanto")


def cpu_name() -> str:
    """Return what the processor calls itself."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def versions() -> dict[str, str]:
    """Return the versions of what is compared, as far as it is installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def measure(peers: bool, quick: bool) -> dict[str, Any]:
    """Return the whole report.

    Args:
        peers: Whether other quantizers are measured too.
        quick: Fewer rounds, one thread only, no compilation.
    """
    compared, failures = methods(peers), {}
    bf16 = [method for method in compared if method.dtype == torch.bfloat16]
    micro = [method for method in compared if not method.whole_model_only]
    report: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        paths = _part(report, "models", lambda: save_models(Path(directory)))
        del report["models"]
        # First, while this process holds no model: its parts run in forks of it.
        _part(report, "loading", lambda: loading.loading(paths["llama"], bf16, 1 if quick else 2, failures))
        threads = [1] if quick else sorted({1, min(2, os.cpu_count() or 1)})
        rounds = 3
        _part(report, "linear", lambda: linear.speed(micro, rounds, 0.02 if quick else 0.04, failures))
        _part(report, "errors", lambda: linear.errors(OURS, failures))
        _part(report, "quantization", lambda: linear.quantization(micro, rounds, failures))
        _part(report, "llama", lambda: generate.speed(paths["llama"], compared, threads, rounds, failures))
        ours = [method for method in (*FLOATS, *OURS) if method.dtype == torch.bfloat16]
        _part(report, "moe", lambda: generate.speed(paths["moe"], ours, [1], rounds, failures))
        few = [method for method in ours if method.name in ("bf16", "int8", "int4 g128")]
        _part(report, "generate", lambda: generate.generate(paths["small"], few, not quick, failures))
    return {**report, "failures": failures}


def _part(report: dict[str, Any], name: str, function: Any) -> Any:
    start = time.perf_counter()
    report[name] = function()
    gc.collect()
    print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
    return report[name]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", action="store_true", help="measure torchao, bitsandbytes and quanto as well")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, one thread, nothing compiled")
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    # bitsandbytes says at each product that it casts.
    for name in ("bitsandbytes", "hf_trainweights"):
        getLogger(name).setLevel(ERROR)
    torch.set_num_threads(1)
    today, machine = datetime.datetime.now(datetime.UTC).date(), f"{cpu_name()}, {os.cpu_count()} cores"
    report = {
        "machine": machine,
        "date": str(today),
        "quick": options.quick,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "versions": versions(),
        **measure(options.peers, options.quick),
    }
    short = re.sub(r"[^a-z0-9]+", "-", re.sub(r"\(.*?\)|processor|cpu|core", "", machine.lower())).strip("-")
    path = RESULTS / f"speed-{short}-{today}.json"
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    draw(report, DRAWING)
    print(path)


if __name__ == "__main__":
    main()
