"""Products with weights of other programs: one token beside int4 in groups of 32, many tokens beside float weights.

Run `python -m benchmarks.imported_rows`, a minute. It writes `benchmarks/results/imported_rows.json`: by shape, the
best CPU time of one token with int4 in groups of 32 in microseconds, and that of each format as a multiple of it; then
the time of 32, 64 and 256 tokens as a multiple of that with the float weight. If bitsandbytes is installed, one token
of its `Linear4bit` in NF4 is timed as a multiple of NF4 here.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.machine import commit, cpu_name, versions
from hf_trainweights.formats.affine import Affine
from hf_trainweights.formats.base import Format
from hf_trainweights.formats.float8_e4m3 import Float8E4M3
from hf_trainweights.formats.int4 import Int4
from hf_trainweights.formats.int8 import Int8
from hf_trainweights.formats.table4 import Table4
from hf_trainweights.imports.layouts.bitsandbytes import BitsAndBytes
from hf_trainweights.kernels import compiled, stored

RESULTS = Path(__file__).parent / "results" / "imported_rows.json"
SHAPES = ((896, 4864), (4096, 4096))
TOKENS = (32, 64, 256)
ROUNDS, ROUNDS_OF_MANY = 25, 7
FIRST = "int4 g32"
Call = Callable[[], object]
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


def weight_of(name: str, N: int, K: int) -> dict[str, Tensor]:
    """Return a weight of any codes, and scales of the usual size."""
    tensors = FORMATS[name].empty((N, K), torch.float16, "cpu")
    for key, tensor in tensors.items():
        if key == "scale" and tensor.dtype in (torch.uint8, torch.float8_e4m3fn):
            tensor.view(torch.uint8).fill_(120)
        elif tensor.is_floating_point() and key != "qdata":
            tensor.fill_(0.01)
        else:
            tensor.view(torch.uint8).random_(0, 100)
    if "table" in tensors:
        # Values of NF4 are not integers, and take a second digit.
        integers = torch.arange(-8, 8).float()
        tensors["table"].copy_(integers.sinh() if name == "NF4" else integers)
    return tensors


def product_of(form: Format, tensors: Mapping[str, Tensor], x: Tensor) -> Call:
    """Return a function that multiplies one token."""
    qdata, scale, *others = (tensors[key] for key in form.tensor_names)
    product = compiled.find(form, *form.shape_of(qdata), x.dtype, scale.dtype)
    assert product is not None
    return lambda: product(qdata, scale, tuple(others), x, None)


def best_times(calls: Mapping[str, Call], rounds: int) -> dict[str, float]:
    """Return the best CPU time of each call in seconds, from rounds in which they take turns."""
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, call in calls.items():
            call()
            start = time.thread_time()
            call()
            best[name] = min(best[name], time.thread_time() - start)
    return best


def one_token(N: int, K: int) -> dict[str, float]:
    """Return the time of int4, and of each format as a multiple of it."""
    x = torch.randn(1, K).bfloat16()
    best = best_times({name: product_of(form, weight_of(name, N, K), x) for name, form in FORMATS.items()}, ROUNDS)
    ratios = {name: round(seconds / best[FIRST], 2) for name, seconds in best.items() if name != FIRST}
    return {f"{FIRST}, us": round(best[FIRST] * 1e6, 1)} | ratios


def many_tokens(N: int, K: int, M: int) -> dict[str, float]:
    """Return the time of M tokens in each format, as a multiple of that with a weight in bfloat16."""
    x, dense = torch.randn(M, K).bfloat16(), torch.randn(N, K).bfloat16()
    calls: dict[str, Call] = {"": lambda: F.linear(x, dense)}
    for name, form in FORMATS.items():
        tensors = weight_of(name, N, K)
        calls[name] = lambda tensors=tensors, form=form: stored.linear(x, tensors, form)
    best = best_times(calls, ROUNDS_OF_MANY)
    return {name: round(seconds / best[""], 2) for name, seconds in best.items() if name}


def beside_bitsandbytes(N: int, K: int) -> float:
    """Return the time of a token by `Linear4bit`, with the same codes, as a multiple of that here."""
    from bitsandbytes.nn import Linear4bit

    layer = Linear4bit(K, N, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4")
    layer.weight.data = torch.randn(N, K).bfloat16()
    layer = layer.to("cpu").eval()
    state = {leaf.removeprefix("weight."): tensor.clone() for leaf, tensor in layer.state_dict().items()}
    leaves = {"weight": state.pop("weight"), **{f"weight.{leaf}": tensor for leaf, tensor in state.items()}}
    weight = BitsAndBytes({"load_in_4bit": True}, {}).weight("layer", leaves)
    x = torch.randn(1, K).bfloat16()
    with torch.no_grad():
        best = best_times({"peer": lambda: layer(x), "here": product_of(weight.format, weight.tensors, x)}, ROUNDS)
    return round(best["peer"] / best["here"], 2)


def main() -> None:
    """Measure, and write the results."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    report = {"cpu": cpu_name(), "library": compiled.instructions(), "commit": commit(), "versions": versions()}
    report["one_token"] = {f"{N}x{K}": one_token(N, K) for N, K in SHAPES}
    report["many_tokens"] = {f"{N}x{K}": {str(M): many_tokens(N, K, M) for M in TOKENS} for N, K in SHAPES}
    if find_spec("bitsandbytes"):
        report["bitsandbytes"] = {f"{N}x{K}": beside_bitsandbytes(N, K) for N, K in SHAPES}
    RESULTS.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
