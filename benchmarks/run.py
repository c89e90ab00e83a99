"""Speed and memory, measured side by side, with `--peers` beside other quantizers that run on a CPU.

Run `python -m benchmarks.run --peers` on a machine that does nothing else; it takes about half an hour, `--quick` ten
minutes. It needs the `bench` and `test` extras, writes `benchmarks/results/speed-<machine>-<date>.json` after each part
and, on a CPU without AMX, draws `docs/speed.svg` from it; then `python -m benchmarks.tables` writes the tables of the
documents, those about AMX from the results of CPUs that have it and all others from the rest. `--only PART...` measures
parts again; the others keep what was measured on the same day with the same options. Where the encoders or a language
model were interrupted, the same command goes on.

`ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 python -m benchmarks.run --only llama` shows what is left without AMX, and
`AVX512_CORE_VNNI` what is left without instructions for bfloat16 too: `limited-<limit>-<machine>-<date>.json`. For a
CPU without AVX512 limit the other libraries as well: `ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2
ONEDNN_MAX_CPU_ISA=AVX2`, or `AVX2_VNNI` for laptops and desktops since 2021.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from logging import ERROR, getLogger
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers.utils import logging

from benchmarks.machine import cpu_flags, cpu_name, versions
from benchmarks.speed import encoders, generate, linear, loading, startup
from benchmarks.speed.encoder_methods import encoder_methods
from benchmarks.speed.encoder_models import ENCODERS
from benchmarks.speed.methods import FLOATS, OURS, methods
from benchmarks.speed.models import save_models
from benchmarks.speed.plot import DRAWING, draw
from benchmarks.speed.tables import uses_amx

RESULTS = Path(__file__).parent / "results"
# The first runs in forks of this process, while it holds no model.
PARTS = (
    "loading",
    "linear",
    "gradients",
    "bandwidth",
    "casting",
    "errors",
    "quantization",
    "llama",
    "moe",
    "generate",
    "encoders",
    "startup",
)
# What reads the saved models.
OF_MODELS = {"loading", "llama", "moe", "generate"}
Row = dict[str, Any]
# The newest instructions that oneDNN may use, None for all that there are.
LIMIT = os.environ.get("ONEDNN_MAX_CPU_ISA")


def measure(
    name: str, paths: Mapping[str, Path], peers: bool, quick: bool, failures: dict[str, str], known: Sequence[Row]
) -> Iterable[Row]:
    """Return the rows of one part.

    Args:
        name: One of `PARTS`.
        paths: The saved models.
        peers: Whether other quantizers are measured too.
        quick: Less time for each Linear, one thread only, two encoders, no compilation.
        failures: Filled with what could not run, and why.
        known: Rows of the same part that a run measured before it was interrupted.
    """
    compared = methods(peers)
    bf16 = [method for method in compared if method.dtype == torch.bfloat16]
    micro = [method for method in compared if not method.whole_model_only]
    ours = [method for method in (*FLOATS, *OURS) if method.dtype == torch.bfloat16]
    alone = [method for method in OURS if not method.whole_model_only]
    few = [method for method in ours if method.name in ("bf16", "int8", "int4 g128")]
    threads = [1] if quick else sorted({1, min(2, os.cpu_count() or 1)})
    rounds, seconds = 3, 0.02 if quick else 0.04
    parts: dict[str, Callable[[], Iterable[Row]]] = {
        "loading": lambda: loading.loading(paths["llama"], bf16, 1 if quick else 2, failures),
        "linear": lambda: linear.speed(micro, rounds, seconds, failures),
        "gradients": lambda: linear.gradients([*FLOATS, *alone], rounds, seconds, failures),
        "bandwidth": lambda: linear.bandwidth([*FLOATS, *alone], rounds, seconds, failures),
        "casting": lambda: linear.casting(rounds),
        "errors": lambda: linear.errors(alone, failures),
        "quantization": lambda: linear.quantization(micro, rounds, failures),
        "llama": lambda: generate.speed(paths["llama"], compared, threads, rounds, failures, known),
        "moe": lambda: generate.speed(paths["moe"], ours, [1], rounds, failures, known),
        "generate": lambda: generate.generate(paths["small"], few, not quick, failures),
        "encoders": lambda: encoders.speed(
            ENCODERS[: 2 if quick else None], encoder_methods(peers), threads, rounds, seconds, failures, known
        ),
        "startup": lambda: startup.startup([method.name for method in (*FLOATS, *alone)], 1 if quick else 3, failures),
    }
    return parts[name]()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", action="store_true", help="measure torchao, bitsandbytes and quanto as well")
    parser.add_argument(
        "--quick", action="store_true", help="less time for each, one thread, two encoders, nothing compiled"
    )
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=f"of {', '.join(PARTS)}"
    )
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    # bitsandbytes says at each product that it casts.
    for name in ("bitsandbytes", "hf_trainweights"):
        getLogger(name).setLevel(ERROR)
    torch.set_num_threads(1)
    path, report = begin(options.quick)
    with tempfile.TemporaryDirectory() as directory:
        paths = save_models(Path(directory)) if OF_MODELS & set(options.only) else {}
        for part in options.only:
            start = time.perf_counter()
            rows = report["unfinished"].setdefault(part, [])
            failures = report["failures"][part] = {}
            for row in measure(part, paths, options.peers, options.quick, failures, tuple(rows)):
                rows.append(row)
                write(path, report)
            report[part] = report["unfinished"].pop(part)
            write(path, report)
            gc.collect()
            print(f"{part}: {time.perf_counter() - start:.0f} s", flush=True)
    # The picture stands beside the tables, which are of a CPU without AMX.
    if "llama" in report and LIMIT is None and not uses_amx(report):
        draw(report, DRAWING)
    print(path)


def write(path: Path, report: dict[str, Any]) -> None:
    """Write a result file; what no part has left unfinished has no such entry."""
    kept = {key: value for key, value in report.items() if key != "unfinished" or any(value.values())}
    path.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def begin(quick: bool) -> tuple[Path, dict[str, Any]]:
    """Return today's result file of this machine and what it holds; parts measured anew replace theirs."""
    today, machine = datetime.datetime.now(datetime.UTC).date(), f"{cpu_name()}, {os.cpu_count()} cores"
    short = re.sub(r"[^a-z0-9]+", "-", re.sub(r"\(.*?\)|processor|cpu|core", "", machine.lower())).strip("-")
    kind = "speed" if LIMIT is None else f"limited-{LIMIT.lower().replace('_', '-')}"
    path = RESULTS / f"{kind}-{short}-{today}.json"
    head = {
        "machine": machine,
        "limit": LIMIT,
        "date": str(today),
        "quick": quick,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "flags": cpu_flags(),
        "versions": versions("onnxruntime"),
        "failures": {},
        "unfinished": {},
    }
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    # Figures of another set of rounds or versions are not to stand beside these.
    same = all(found.get(key) == value for key, value in head.items() if key not in ("failures", "unfinished"))
    return path, {"unfinished": {}, **found} if same else head


if __name__ == "__main__":
    main()
