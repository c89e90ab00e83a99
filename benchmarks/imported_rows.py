"""One token by the compiled products with weights of other programs, beside int4 in groups of 32.

Run `python -m benchmarks.imported_rows`, a minute. It writes `benchmarks/results/imported_rows.json`: by shape, the
best CPU time of int4 in groups of 32 in microseconds, and that of each format as a multiple of it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.machine import commit, cpu_name, versions
from hf_trainweights.formats.affine import Affine
from hf_trainweights.formats.base import Format
from hf_trainweights.formats.float8_e4m3 import Float8E4M3
from hf_trainweights.formats.int4 import Int4
from hf_trainweights.formats.int8 import Int8
from hf_trainweights.formats.table4 import Table4
from hf_trainweights.kernels import compiled

RESULTS = Path(__file__).parent / "results" / "imported_rows.json"
SHAPES = ((896, 4864), (4096, 4096))
ROUNDS = 25
FIRST = "int4 g32"
FORMATS: dict[str, Format] = {
    FIRST: Int4(32),
    "int8 g32": Int8(32),
    "affine4 g128 (AWQ, GPTQ)": Affine(4, 128),
    "affine4 g32 bias (Q4_1, MLX)": Affine(4, 32, "plain", "bias"),
    "Q4_K": Affine(4, 32, "k4", "none"),
    "Q5_K": Affine(5, 32, "k4", "none"),
    "Q6_K": Affine(6, 16, "k6", "none"),
    "Q3_K": Affine(3, 16, "k3", "none"),
    "Q2_K": Affine(2, 16, "k2", "none"),
    "Q5_1": Affine(5, 32, "plain", "bias"),
    "affine8 g64": Affine(8, 64),
    "MXFP4": Table4(32, "e8m0"),
    "NVFP4": Table4(16, "e4m3"),
    "IQ4_XS": Table4(32, "iq4_xs"),
    "NF4": Table4(64, "nested"),
    "float8": Float8E4M3(),
    "float8 g128": Float8E4M3(128),
}


def product_of(name: str, N: int, K: int) -> Callable[[], object]:
    """Return a function that multiplies a token with a weight of any codes, and scales of the usual size."""
    form = FORMATS[name]
    stored = form.empty((N, K), torch.float16, "cpu")
    for key, tensor in stored.items():
        if key == "scale" and tensor.dtype in (torch.uint8, torch.float8_e4m3fn):
            tensor.view(torch.uint8).fill_(120)
        elif tensor.is_floating_point() and key != "qdata":
            tensor.fill_(0.01)
        else:
            tensor.view(torch.uint8).random_(0, 100)
    if "table" in stored:
        # Values of NF4 are not integers, and take a second digit.
        integers = torch.arange(-8, 8).float()
        stored["table"].copy_(integers.sinh() if name == "NF4" else integers)
    product = compiled.find(form, N, K, torch.bfloat16, stored["scale"].dtype)
    assert product is not None
    qdata, scale, *others = (stored[key] for key in form.tensor_names)
    x = torch.randn(1, K).bfloat16()
    return lambda: product(qdata, scale, tuple(others), x, None)


def measure(N: int, K: int) -> dict[str, float]:
    """Return the time of int4, and of each format as a multiple of it, from rounds that take turns."""
    calls, best = {name: product_of(name, N, K) for name in FORMATS}, dict.fromkeys(FORMATS, float("inf"))
    for _ in range(ROUNDS):
        for name, call in calls.items():
            call()
            start = time.thread_time()
            call()
            best[name] = min(best[name], time.thread_time() - start)
    ratios = {name: round(seconds / best[FIRST], 2) for name, seconds in best.items() if name != FIRST}
    return {f"{FIRST}, us": round(best[FIRST] * 1e6, 1)} | ratios


def main() -> None:
    """Measure, and write the results."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shapes = {f"{N}x{K}": measure(N, K) for N, K in SHAPES}
    found = {"cpu": cpu_name(), "library": compiled.instructions(), "commit": commit(), "versions": versions()}
    RESULTS.write_text(json.dumps({**found, "one_token": shapes}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
