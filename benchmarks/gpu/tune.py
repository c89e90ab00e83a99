"""Finds the fastest kernel and tile for each kind of product on this GPU: the rules of `kernels/gpu_tables.py`.

`python -m benchmarks.gpu.tune --compile` compiles all candidates on all cores, so that the GPU does not wait for them.
`python -m benchmarks.gpu.tune --measure FOLDER` times them and writes `FOLDER/tuned.json` after each weight, and at the
end `FOLDER/<compute capability>.json`, which belongs into `hf_trainweights/kernels/tiles`. `--dry` goes through the
motions on a CPU: dequantized products stand for all kernels.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.machine import versions
from benchmarks.speed.methods import one_line
from hf_trainweights.formats.base import Format
from hf_trainweights.formats.int4 import Int4
from hf_trainweights.formats.int8 import Int8
from hf_trainweights.kernels import cuda, cuda_driver, few_rows, gpu_tables
from hf_trainweights.kernels.gpu_tables import Rule
from hf_trainweights.kernels.triton_launch import Stored

FORMS: tuple[Format, ...] = (Int4(128), Int8(), Int8(128), Int8(activations="int8"))
# The Linears of a Llama of 8B weights: Q and O; gate and up; down; K and V. Then one of 1B.
SHAPES = ((4096, 4096), (14336, 4096), (4096, 14336), (1024, 4096), (2048, 2048))
ROWS = (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)
# Weights of so many bytes are multiplied in turn, more than the caches hold.
ROTATED_BYTES = 256_000_000
# A result that is further off is wrong, and not a candidate.
MOST_ERROR = 0.02
# Only candidates that were so near to the fastest with the first weight are timed with the others.
KEPT_RATIO = 0.8
CUDA_GRAPH_REPLAYS = 5

_FEW = (
    {"ROW_TILES": r, "COLUMN_TILES": c, "WARPS": w, "STAGES": s, "BLOCKS": b}
    for c, r, w, s, b in itertools.product((1, 2), (1, 2), (4, 8, 16), (1, 2, 4), (1, 3))
    # 65,536 registers: 64 for each thread suffice for one tile, and tiles in flight take more.
    if w * b <= 24 and r * s <= 4 and not (b == 3 and r * c > 1)
)
_TILES = (
    *((16, 64, 256, 4, 3), (16, 32, 256, 4, 4), (16, 128, 128, 8, 3), (32, 64, 128, 4, 3), (32, 128, 64, 4, 4)),
    *((64, 128, 64, 4, 4), (64, 64, 128, 4, 4), (64, 128, 128, 8, 3), (128, 128, 64, 8, 3), (128, 128, 128, 8, 3)),
    *((128, 64, 64, 4, 4), (256, 128, 64, 8, 3), (256, 64, 64, 8, 4)),
)
_INTEGERS = ((64, 128, 128, 4, 3), (128, 128, 128, 8, 3), (128, 256, 128, 8, 3), (128, 128, 64, 4, 4))
_TRITON = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "num_warps", "num_stages")
CANDIDATES = (
    *(Rule("few_rows", tile) for tile in _FEW),
    *(Rule("row", {"BLOCK_N": n, "BLOCK_K": k, "num_warps": 4}) for n, k in ((2, 2048), (4, 1024), (8, 1024))),
    *(Rule("tiles", dict(zip(_TRITON, tile, strict=True))) for tile in _TILES),
    *(Rule("integers", {**dict(zip(_TRITON, tile, strict=True)), "GROUP_M": 8}) for tile in _INTEGERS),
    Rule("dequantize", {}),
)


@dataclass(frozen=True)
class Sizes:
    """How much is measured: `Sizes()` on a GPU, and something tiny to see that it runs."""

    shapes: Sequence[tuple[int, int]] = SHAPES
    rows: Sequence[int] = ROWS
    rotated_bytes: int = ROTATED_BYTES
    candidates: Sequence[Rule] = CANDIDATES


DRY = Sizes(((64, 256), (32, 256)), (1, 16, 600), 0, CANDIDATES[::6])


def suits(rule: Rule, form: Format, M: int) -> bool:
    """Return whether a candidate is worth a try for M rows."""
    if (rule.way == "integers") != (getattr(form, "activations", None) is not None and M >= 17):
        return False
    if rule.way == "few_rows":
        return M <= few_rows.MOST_ROWS and rule.tile["COLUMN_TILES"] == (1 if M <= 8 else 2)
    if rule.way == "tiles":
        return M / 4 <= rule.tile["BLOCK_M"] <= max(16, 2 * M)
    return rule.way == "integers" or (M == 1 if rule.way == "row" else M >= 32)


def compile_candidates(sizes: Sizes, architecture: int) -> list[str]:
    """Compile all candidates, CUDA C in threads and Triton in processes; return the errors."""
    macros = [
        {**kind, **rule.tile, "GROUPED": 0}
        for form, rule in itertools.product(FORMS[:3], sizes.candidates)
        if rule.way == "few_rows"
        and (kind := few_rows.macros_of(form, 4096, torch.bfloat16, torch.bfloat16)) is not None
    ]
    jobs = [
        (form, rule, M)
        for form, rule in itertools.product(FORMS, sizes.candidates)
        for M in [next((M for M in sizes.rows if suits(rule, form, M)), 0)]
        if M and rule.way not in ("few_rows", "dequantize")
    ]
    with (
        ThreadPoolExecutor(os.cpu_count()) as threads,
        ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as processes,
    ):
        triton = [processes.submit(_run_once, *job) for job in jobs]
        native = [threads.submit(cuda_driver.compiled, "few_rows", each, architecture) for each in macros]
        failures = [future.exception() for future in (*native, *triton)]
    return [one_line(error) for error in failures if isinstance(error, Exception)]


def _run_once(form: Format, rule: Rule, M: int) -> None:
    """Run a Triton kernel, whose compiler keeps its result for other processes."""
    K, tensors = 4096, {}
    for name, (shape, dtype) in form.tensor_specs((256, 4096), torch.bfloat16).items():
        tensors[name] = torch.zeros(shape, dtype=dtype, device="cuda")
    run = cuda._MAKE[rule.way](Stored(tensors, form, K), M, torch.bfloat16, rule.tile)
    run(torch.zeros(M, K, dtype=torch.bfloat16, device="cuda"), None)


def measure(
    device: str, sizes: Sizes, seconds: float, keep: Callable[[list[dict[str, Any]]], None]
) -> list[dict[str, Any]]:
    """Time all candidates until the time is up.

    Args:
        device: "cuda"; "cpu" only shows that it runs.
        sizes: How much.
        seconds: How long.
        keep: Gets the rows each time they have grown.

    Returns:
        A row for each weight, format and number of rows, with the time of each candidate in `ways`.
    """
    rows: list[dict[str, Any]] = []
    good: dict[tuple[str, int], list[Rule]] = {}
    end = time.monotonic() + seconds
    for (N, K), form in itertools.product(sizes.shapes, FORMS):
        weight = torch.randn(N, K, generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16)
        floats = [weight.clone() for _ in range(max(2, sizes.rotated_bytes // weight.nbytes))]
        tensors = form.quantize(weight)
        size_bytes = sum(tensor.nbytes for tensor in tensors.values())
        copies = [
            {name: tensor.clone() for name, tensor in tensors.items()}
            for _ in range(max(2, sizes.rotated_bytes // size_bytes))
        ]
        exact = form.dequantize_rows(tensors, K, torch.float32)
        for M in sizes.rows:
            if time.monotonic() > end:
                return rows
            x = torch.randn(M, K, generator=torch.Generator().manual_seed(1)).to(device, torch.bfloat16)
            wanted = x.float() @ exact.t()
            baseline = _seconds(device, [lambda x, w=w: F.linear(x, w) for w in floats], x)
            candidates = good.get((str(form), M), sizes.candidates)
            ways = [_time(device, rule, form, copies, x, wanted) for rule in candidates if suits(rule, form, M)]
            rows.append({"form": str(form), "N": N, "K": K, "M": M, "bf16_seconds": baseline, "ways": ways})
            right = [way for way in ways if way.get("error", math.inf) <= MOST_ERROR]
            fastest = min((way["seconds"] for way in right), default=0)
            kept = [way for way in right if way["seconds"] * KEPT_RATIO <= fastest]
            good.setdefault((str(form), M), [Rule(way["way"], way["tile"]) for way in kept])
            keep(rows)
    return rows


def _time(
    device: str, rule: Rule, form: Format, copies: Sequence[dict[str, Tensor]], x: Tensor, wanted: Tensor
) -> dict[str, Any]:
    """Return a candidate's seconds and error, or why it failed."""
    row: dict[str, Any] = {"way": rule.way, "tile": dict(rule.tile)}
    try:
        runs = [_make(device, rule, Stored(tensors, form, x.shape[1]), len(x)) for tensors in copies]
        error = (runs[0](x).float() - wanted).norm() / wanted.norm()
        return row | {"error": error.item(), "seconds": _seconds(device, runs, x)}
    except Exception as error:
        return row | {"failed": one_line(error)}


def _make(device: str, rule: Rule, weight: Stored, M: int) -> Callable[[Tensor], Tensor]:
    if device == "cpu":
        return lambda x: F.linear(x, weight.form.dequantize_rows(weight.tensors, weight.K, x.dtype))
    made = cuda._MAKE[rule.way](weight, M, torch.bfloat16, rule.tile)
    return (lambda x: F.linear(x, made())) if rule.way == "dequantize" else lambda x: made(x, None)


def _seconds(device: str, runs: Sequence[Callable[[Tensor], Tensor]], x: Tensor) -> float:
    """Return the seconds of one run: the least of some replays of a CUDA graph with all of them."""
    if device == "cpu":
        start = time.perf_counter()
        runs[0](x)
        return time.perf_counter() - start
    for run in runs[:2]:
        run(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run(x)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(CUDA_GRAPH_REPLAYS + 1):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / len(runs))
    return min(times[1:])


def rules_of(rows: Sequence[dict[str, Any]]) -> list[Rule]:
    """Return the rule of the fastest candidate for each kind of weight, its number of rows and that of x."""
    ratios: dict[tuple[int, bool, bool, int, int], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        form = next(form for form in FORMS if str(form) == row["form"])
        kind = 4 if isinstance(form, Int4) else 8, getattr(form, "group_size", None) is not None, "activ" in row["form"]
        for way in row["ways"]:
            if way.get("error", math.inf) <= MOST_ERROR:
                named = json.dumps([way["way"], way["tile"]])
                ratios[(*kind, row["N"], row["M"])][named].append(row["bf16_seconds"] / way["seconds"])
    rules = []
    for kind in sorted({key[:3] for key in ratios}):
        sizes = sorted({key[3] for key in ratios if key[:3] == kind})
        for N in sizes:
            fastest = [
                (M, _fastest(ratios[(*kind, N, M)])) for M in sorted(key[4] for key in ratios if key[:4] == (*kind, N))
            ]
            # Formats that round x have rules of their own from 17 rows on alone.
            fastest = [(M, way) for M, way in fastest if not kind[2] or way[0] == "integers"]
            for place, (M, way) in enumerate(fastest):
                is_last = place + 1 == len(fastest)
                if is_last or fastest[place + 1][1] != way:
                    limits = {"rows": None if is_last else M, "N": None if sizes[-1] == N else N}
                    rules.append(Rule(way[0], way[1], kind[0], kind[1], **limits))
    return rules


def _fastest(ratios: dict[str, list[float]]) -> tuple[str, dict[str, int]]:
    # Of candidates that were timed with as many weights as any, because others were left out as slow.
    most = max(map(len, ratios.values()))
    best = max((name for name in ratios if len(ratios[name]) == most), key=lambda name: math.prod(ratios[name]))
    way, tile = json.loads(best)
    return way, tile


def table_of(head: dict[str, Any], rules: Sequence[Rule]) -> str:
    """Return the text of a file of rules."""
    entries = [{name: value for name, value in asdict(rule).items() if value is not None} for rule in rules]
    lines = ",\n".join(f"  {json.dumps(entry)}" for entry in entries)
    return (
        "{\n"
        + "".join(f" {json.dumps(key)}: {json.dumps(value)},\n" for key, value in head.items())
        + f' "rules": [\n{lines}\n ]\n}}\n'
    )


def main() -> None:
    """Compile or measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", action="store_true", help="compile all candidates")
    parser.add_argument("--measure", type=Path, metavar="FOLDER", help="time them and write the results there")
    parser.add_argument("--seconds", type=float, default=120, help="how long to measure (default: 120)")
    parser.add_argument("--dry", action="store_true", help="on a CPU, with tiny weights")
    options = parser.parse_args()
    device, sizes = ("cpu", DRY) if options.dry else ("cuda", Sizes())
    major, minor = (0, 0) if options.dry else torch.cuda.get_device_capability()
    if options.compile and not options.dry:
        print(*compile_candidates(sizes, 10 * major + minor), sep="\n")
    if options.measure:
        gpu = "none" if options.dry else torch.cuda.get_device_name()
        head = {"gpu": gpu, "cuda": torch.version.cuda, "versions": versions("triton")}
        options.measure.mkdir(parents=True, exist_ok=True)

        def keep(rows: list[dict[str, Any]]) -> None:
            text = json.dumps(head | {"rows": rows}, indent=1)
            (options.measure / "tuned.json").write_text(text + "\n", encoding="utf-8")

        rules = rules_of(measure(device, sizes, options.seconds, keep))
        path = options.measure / f"{major}{minor}.json"
        path.write_text(table_of(head, rules), encoding="utf-8")
        print(path, len(gpu_tables.read(path)), "rules")


if __name__ == "__main__":
    main()
