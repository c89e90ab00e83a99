"""One Linear alone: speed over shapes and rows, distance from the exact product, and quantization speed."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.speed.methods import Method, guarded
from benchmarks.speed.rounds import Run, interleave, repeats_for, significant, timed
from hf_trainweights import QuantizedTensor

# N, K: square and not, in the caches of no CPU and in those of some.
SHAPES = [(1024, 1024), (4864, 896), (4096, 4096)]
ROWS = [1, 4, 32, 256]
# The Linears of the Llama, and the rows of its prompt.
LAYER_SHAPES = [(896, 896), (4864, 896), (896, 4864)]
PROMPT_ROWS = 256
GRADIENT_ROWS = 128
# The Linears of a Llama of 1.2 billion weights: products of one token wait for memory there.
LARGE_SHAPES = [(2048, 2048), (8192, 2048), (2048, 8192)]
# One weight is used after the other, so that a product reads its weight from memory as a model does.
_ROTATED_BYTES = 64_000_000
# More than the caches of any CPU hold.
_READ_BYTES = 256_000_000


def speed(methods: Sequence[Method], rounds: int, seconds: float, failures: dict[str, str]) -> list[dict[str, Any]]:
    """Time products.

    Args:
        methods: What is compared.
        rounds: Interleaved rounds.
        seconds: Roughly how long one method takes in one round.
        failures: Filled with what could not run, and why.

    Returns:
        One row per shape, number of activation rows M, and method.
    """
    rows: list[dict[str, Any]] = []
    for N, K in SHAPES:
        layers = {method: guarded(failures, method.name, _layers, method, N, K) for method in methods}
        for M in ROWS:
            runs: dict[str, Run] = {}
            for method, rotated in layers.items():
                if rotated is not None:
                    run = guarded(failures, method.name, _run, rotated, _rows(M, K, method.dtype), seconds)
                    runs |= {method.name: run} if run else {}
            for versus in ("bf16", "fp32"):
                chosen = {m.name: runs[m.name] for m in layers if m.versus == versus and m.name in runs}
                rows += [{"N": N, "K": K, "M": M, **row} for row in interleave(chosen, rounds, versus)]
    return rows


def _weight(N: int, K: int, dtype: torch.dtype) -> Tensor:
    return (torch.randn(N, K, generator=torch.Generator().manual_seed(1)) / K**0.5).to(dtype)


def _rows(M: int, K: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(M, K, generator=torch.Generator().manual_seed(0)).to(dtype)


def _layer(method: Method, weight: Tensor) -> nn.Module:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta", dtype=weight.dtype)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    holder = nn.Sequential(layer)
    method.apply(holder)
    return holder[0]


def _layers(method: Method, N: int, K: int, rotated_bytes: int = _ROTATED_BYTES) -> list[nn.Module]:
    weight = _weight(N, K, method.dtype)
    first = _layer(method, weight)
    others = range(max(1, rotated_bytes * 8 // (N * K * method.bits) - 1))
    try:
        return [first, *(copy.deepcopy(first) for _ in others)]
    except RuntimeError:  # quanto's weights refuse deepcopy
        return [first, *(_layer(method, weight.clone()) for _ in others)]


def _run(layers: list[nn.Module], x: Tensor, seconds: float) -> Run:
    @torch.no_grad()
    def call(index: int) -> Tensor:
        return layers[index % len(layers)](x)

    return timed(call, repeats_for(call, seconds, at_most=2000))


def gradients(methods: Sequence[Method], rounds: int, seconds: float, failures: dict[str, str]) -> list[dict[str, Any]]:
    """Time the gradient of x through a weight that stays as it is, as an adapter below it is trained.

    Args:
        methods: What is compared; those that allow no gradient are among the failures.
        rounds: Interleaved rounds.
        seconds: Roughly how long one method takes in one round.
        failures: Filled with what could not run, and why.

    Returns:
        One row per shape and method, of `GRADIENT_ROWS` rows of x.
    """
    rows: list[dict[str, Any]] = []
    for N, K in LAYER_SHAPES:
        runs: dict[str, Run] = {}
        for method in methods:
            run = guarded(failures, f"{method.name}, gradient", _gradient, method, N, K, seconds)
            runs |= {method.name: run} if run else {}
        for versus in ("bf16", "fp32"):
            chosen = {method.name: runs[method.name] for method in methods if method.versus == versus}
            rows += [{"N": N, "K": K, "M": GRADIENT_ROWS, **row} for row in interleave(chosen, rounds, versus)]
    return rows


def _gradient(method: Method, N: int, K: int, seconds: float) -> Run:
    layer = _layer(method, _weight(N, K, method.dtype))
    x = _rows(GRADIENT_ROWS, K, method.dtype).requires_grad_()
    out = layer(x)
    given = torch.ones_like(out)

    def call(_: int) -> Tensor:
        return torch.autograd.grad(out, x, given, retain_graph=True)[0]

    return timed(call, repeats_for(call, seconds, at_most=2000))


def bandwidth(methods: Sequence[Method], rounds: int, seconds: float, failures: dict[str, str]) -> list[dict[str, Any]]:
    """Measure how fast products of one token read their weights, beside a sum, which does little but read.

    Args:
        methods: What is measured.
        rounds: Interleaved rounds.
        seconds: Roughly how long one method takes in one round.
        failures: Filled with what could not run, and why.

    Returns:
        One row per shape and method, and one called `read`: `share` is of the bytes that `read` has in a second, and
        `ratio`, as everywhere, compares the seconds of one call.
    """
    rows: list[dict[str, Any]] = []
    memory = torch.ones(_READ_BYTES // 4)
    for N, K in LARGE_SHAPES:
        runs: dict[str, Run] = {"read": timed(lambda _: memory.sum(), 1)}
        sizes = {"read": memory.nbytes}
        for method in methods:
            layers = guarded(failures, f"{method.name}, bandwidth", _layers, method, N, K, _READ_BYTES)
            if layers is not None:
                weight = layers[0].weight
                sizes[method.name] = weight.stored_bytes if isinstance(weight, QuantizedTensor) else weight.nbytes
                runs[method.name] = _run(layers, _rows(1, K, method.dtype), seconds)
        found = interleave(runs, rounds, "read")
        rows += [
            {"N": N, "K": K, **row, "share": significant(row["ratio"] * sizes[row["name"]] / memory.nbytes)}
            for row in found
        ]
    return rows


@torch.no_grad()
def errors(methods: Sequence[Method], failures: dict[str, str]) -> list[dict[str, Any]]:
    """Measure how far products are from those of the dequantized weight in float64.

    Args:
        methods: What is measured; those of this package.
        failures: Filled with what could not run, and why.

    Returns:
        One row per method, shape and M: the relative L2 error, and `floor`, that of F.linear with the
        dequantized weight in the activations' dtype.
    """
    rows = []
    for method in methods:
        for N, K in SHAPES:
            layer = guarded(failures, method.name, _layer, method, _weight(N, K, method.dtype))
            if layer is None:
                continue
            weight = layer.weight
            assert isinstance(weight, QuantizedTensor)
            for M in ROWS:
                x = torch.randn(M, K, generator=torch.Generator().manual_seed(2)).to(method.dtype)
                exact = x.double() @ weight.dequantize(torch.float64).t()
                products = {"error": layer(x), "floor": F.linear(x, weight.dequantize())}
                relative = {name: ((y.double() - exact).norm() / exact.norm()).item() for name, y in products.items()}
                rounded = {name: significant(value) for name, value in relative.items()}
                rows.append({"name": method.name, "N": N, "K": K, "M": M, **rounded})
    return rows


def quantization(methods: Sequence[Method], rounds: int, failures: dict[str, str]) -> list[dict[str, Any]]:
    """Time how long it takes to quantize one Linear of 4096 x 4096.

    Args:
        methods: What is compared.
        rounds: Interleaved rounds.
        failures: Filled with what could not run, and why.

    Returns:
        One row per method: seconds, and gigabytes of float weight a second.
    """
    N = K = 4096
    runs: dict[str, Run] = {}
    for method in methods:
        if method.config is None or method.dtype != torch.bfloat16:
            continue
        weight = _weight(N, K, method.dtype)
        if guarded(failures, f"{method.name}, quantization", _layer, method, weight) is not None:
            runs[method.name] = timed(lambda _, m=method, w=weight: _layer(m, w), 1)
    rows = interleave(runs, rounds, next(iter(runs)))
    gigabytes = N * K * 2 / 1e9
    return [{**row, "gigabytes_per_second": significant(gigabytes / row["seconds"])} for row in rows]


@torch.no_grad()
def casting(rounds: int) -> list[dict[str, Any]]:
    """Time what a product with int8 codes in memory cannot do without where there is no product of integers.

    The codes are cast into memory that is used again; a bfloat16 product with what lies there follows, from the side
    on which it is faster.

    Args:
        rounds: Interleaved rounds.

    Returns:
        Per shape a row `linear`, F.linear with a bfloat16 weight, a row `cast`, the cast alone, and the products with
        the cast weight on the `right` and on the `left`, where the result comes out transposed.
    """
    rows = []
    for N, K in LAYER_SHAPES:
        weight, x = _weight(N, K, torch.bfloat16), torch.randn(PROMPT_ROWS, K).bfloat16()
        count = _ROTATED_BYTES // (N * K)
        codes = [torch.randint(-127, 128, (N, K), dtype=torch.int8) for _ in range(count)]
        weights = [weight.clone() for _ in range(count)]
        buffer, out = weight.clone(), torch.empty(PROMPT_ROWS, N, dtype=torch.bfloat16)
        transposed = torch.empty(N, PROMPT_ROWS, dtype=torch.bfloat16)

        def cast(index: int, codes: list[Tensor] = codes, buffer: Tensor = buffer) -> None:
            buffer.copy_(codes[index % len(codes)])

        def linear(index: int, weights: list[Tensor] = weights, x: Tensor = x) -> Tensor:
            return F.linear(x, weights[index % len(weights)])

        def right(_: int, x: Tensor = x, weight: Tensor = weight, out: Tensor = out) -> None:
            torch.mm(x, weight.t(), out=out)

        def left(_: int, x: Tensor = x, weight: Tensor = weight, out: Tensor = transposed) -> None:
            torch.mm(weight, x.t(), out=out)

        timings = {"linear": linear, "cast": cast, "right": right, "left": left}
        runs = {name: timed(function, count) for name, function in timings.items()}
        rows += [{"N": N, "K": K, "M": PROMPT_ROWS, **row} for row in interleave(runs, rounds, "linear")]
    return rows
