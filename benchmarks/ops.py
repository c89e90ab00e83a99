"""What every op of PyTorch's op database makes of a quantized weight, beside what it makes of the dequantized one.

Run `python -m benchmarks.ops`; it takes minutes and writes `benchmarks/results/ops.json`. For each op and each way of
holding a weight: whether the result stays quantized, is a read-only view, is computed with or without the
dequantized weight, or whether the op refuses. `tests/tensor/test_op_database.py` runs one sample of each op.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import multiprocessing
import random
import sys
import types
import unittest
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from benchmarks.machine import versions
from hf_trainweights import QuantizedTensor
from hf_trainweights.errors import UnsupportedError
from hf_trainweights.formats import get_format
from hf_trainweights.tensor.dispatch import FALLBACKS
from hf_trainweights.tensor.read_only import ReadOnlyTensor

RESULTS = Path(__file__).parent / "results" / "ops.json"

WEIGHTS = ("int8", "int8 g32", "int4", "float8_e4m3")
# What the database calls its sizes, made such that groups of 32 divide them; larger samples than this are left out.
SIZE, LARGEST = 32, 1 << 16
# Samples of an op at most: as many take minutes, and the first are the most different.
MOST_SAMPLES = 4
# What these return is not initialised.
EMPTY = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")

# What an op makes of a weight.
QUANTIZED, VIEW, CODES, DEQUANTIZED, REFUSED, REFUSED_IN_PLACE = (
    "stays quantized",
    "read-only view",
    "no float weight",
    "dequantizes",
    "refuses",
    "refuses in place",
)


class WrongError(AssertionError):
    """An op gives for a quantized weight what it does not give for the dequantized one."""


@functools.cache
def database() -> dict[str, Any]:
    """Return the ops of PyTorch's op database that take float32 on a CPU, by name."""
    if "expecttest" not in sys.modules:
        # PyTorch's own tests need it, its op database does not.
        with contextlib.suppress(ImportError):
            import expecttest  # noqa: F401
        sys.modules.setdefault("expecttest", types.ModuleType("expecttest")).__dict__.setdefault(
            "TestCase", unittest.TestCase
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db

    ops = {}
    for op in op_db:
        name = f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name
        if op.supports_dtype(torch.float32, "cpu"):
            ops[name] = op
    return ops


@contextlib.contextmanager
def larger_samples() -> Iterator[None]:
    """Make the samples of the database as large as groups need, within the context."""
    modules = [module for name, module in sys.modules.items() if name.startswith("torch.testing._internal")]
    changed = [(vars(module), name) for module in modules for name in "SML" if type(vars(module).get(name)) is int]
    before = [namespace[name] for namespace, name in changed]
    try:
        for namespace, name in changed:
            namespace[name] = SIZE
        yield
    finally:
        for (namespace, name), size in zip(changed, before, strict=True):
            namespace[name] = size


def samples(op: Any) -> Iterator[Any]:
    """Yield the samples of an op whose first tensor can be a weight; an op that needs other sizes has none."""
    torch.manual_seed(0)
    random.seed(0)
    with larger_samples(), contextlib.suppress(Exception):
        for sample in op.sample_inputs("cpu", torch.float32, requires_grad=False):
            first = first_tensor(sample.input)
            if first is not None and first.dim() >= 2 and 0 < first.numel() <= LARGEST and takes(first):
                yield sample


def takes(tensor: Tensor) -> bool:
    plain = type(tensor) is Tensor and tensor.dtype == torch.float32 and tensor.layout == torch.strided
    return plain and not tensor.is_neg() and bool(tensor.isfinite().all())


def first_tensor(value: Any) -> Tensor | None:
    first = value[0] if isinstance(value, list | tuple) and value else value
    return first if isinstance(first, Tensor) else None


def make_weight(kind: str, values: Tensor, transposed: bool) -> QuantizedTensor | None:
    """Return the values as a weight of a kind, None where they have no shape for it."""
    name, _, rest = kind.partition(" ")
    group = {"group_size": 32} if name == "int4" or rest == "g32" else {}
    weight = QuantizedTensor.quantize(values, get_format({"format": name, **group}), transposed)
    if weight.format.name != name or getattr(weight.format, "group_size", None) != group.get("group_size"):
        return None
    return weight


def outcomes(op: Any, sample: Any, kind: str, transposed: bool) -> Iterator[str]:
    """Yield what each variant of an op makes of a weight.

    Raises:
        WrongError: Something else than it makes of the dequantized weight.
    """
    weight = make_weight(kind, first_tensor(sample.input), transposed)
    if weight is None:
        return
    for variant in (op.op, op.method_variant, op.inplace_variant):
        if variant is not None:
            outcome = compare(variant, sample, weight, op.name in EMPTY)
            if outcome is not None:
                in_place = outcome == REFUSED and variant is op.inplace_variant
                yield REFUSED_IN_PLACE if in_place else outcome


def compare(function: Callable[..., Any], sample: Any, weight: QuantizedTensor, is_empty: bool) -> str | None:
    """Return what a function makes of a weight, None where it takes no such tensor."""
    values = weight.dequantize()
    dense = torch.empty_strided(weight.shape, weight.stride(), dtype=weight.dtype).copy_(values)
    quantized = weight.clone()
    expected, error = attempt(function, sample, dense)
    FALLBACKS.clear()
    result, refusal = attempt(function, sample, quantized)
    if refusal is not None and error is None and not isinstance(refusal, UnsupportedError):
        raise WrongError(f"{type(refusal).__name__}: {refusal}")
    if refusal is not None:
        return REFUSED if error is None else None
    if error is not None:
        raise WrongError(f"takes what a float weight refuses: {error}")
    if dense.shape != values.shape or dense.stride() != weight.stride() or not torch.equal(dense, values):
        raise WrongError("the write is lost")
    return compare_results(tree_leaves(result), tree_leaves(expected), dense, is_empty)


def attempt(function: Callable[..., Any], sample: Any, weight: Tensor) -> tuple[Any, Exception | None]:
    """Return what a function gives for copies of a sample with another first tensor, or what it raises."""

    def copied(value: Any) -> Any:
        return value.clone() if isinstance(value, Tensor) else value

    given = sample.input
    first = type(given)([weight, *map(copied, given[1:])]) if isinstance(given, list | tuple) else weight
    torch.manual_seed(0)
    try:
        return function(first, *tree_map(copied, sample.args), **tree_map(copied, sample.kwargs)), None
    except Exception as error:
        return None, error


def compare_results(results: list[Any], expected: list[Any], dense: Tensor, is_empty: bool) -> str:
    """Return what an op made of a weight, from its results."""
    if len(results) != len(expected):
        raise WrongError(f"{len(results)} results instead of {len(expected)}")
    for result, wanted in zip(results, expected, strict=True):
        if isinstance(wanted, Tensor):
            compare_tensors(result, wanted, dense, is_empty)
        elif result != wanted and not (result != result and wanted != wanted):
            raise WrongError(f"{result!r} instead of {wanted!r}"[:200])
    kinds = {type(result) for result in results}
    if QuantizedTensor in kinds:
        return QUANTIZED
    if ReadOnlyTensor in kinds:
        return VIEW
    return DEQUANTIZED if FALLBACKS else CODES


def compare_tensors(result: Any, wanted: Tensor, dense: Tensor, is_empty: bool) -> None:
    shares = wanted.layout == torch.strided and wanted.numel() and same_memory(wanted, dense)
    if shares and type(result) not in (QuantizedTensor, ReadOnlyTensor):
        raise WrongError("a view is a copy that can be written to")
    if isinstance(result, QuantizedTensor):
        result = result.dequantize()
    kind = (result.shape, result.dtype, result.layout)
    if kind != (wanted.shape, wanted.dtype, wanted.layout):
        raise WrongError(f"{kind} instead of {(wanted.shape, wanted.dtype, wanted.layout)}")
    if wanted.layout != torch.strided:
        result, wanted = result.to_dense(), wanted.to_dense()
    if is_empty or wanted.numel() == 0 or wanted.is_quantized:
        return
    exact = not (wanted.is_floating_point() or wanted.is_complex())
    largest = 0.0 if exact else wanted.abs().nan_to_num(0, 0, 0).max().item()
    if not torch.allclose(result, wanted, rtol=0 if exact else 1e-4, atol=1e-5 * largest, equal_nan=True):
        raise WrongError("other values")


def same_memory(first: Tensor, second: Tensor) -> bool:
    return first.untyped_storage()._cdata == second.untyped_storage()._cdata


def check_op(name: str, most_samples: int, kinds: Sequence[str] = WEIGHTS) -> tuple[dict[str, list[str]], int]:
    """Return what an op makes of these kinds of weight, and how many comparisons that took.

    Raises:
        WrongError: Something else than it makes of the dequantized weight.
    """
    found: dict[str, set[str]] = defaultdict(set)
    count = 0
    op = database()[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for index, sample in enumerate(itertools.islice(samples(op), most_samples)):
            for kind, transposed in itertools.product(kinds, (False, True)):
                try:
                    results = list(outcomes(op, sample, kind, transposed))
                except WrongError as error:
                    where = f"{name}, {kind}{', transposed' * transposed}, sample {index}"
                    raise WrongError(f"{where}: {error}") from error
                count += len(results)
                found[kind].update(results)
    return {kind: sorted(results) for kind, results in found.items() if results}, count


def check_or_tell(name: str) -> tuple[dict[str, list[str]], int, str | None]:
    torch.set_num_threads(1)
    try:
        return *check_op(name, MOST_SAMPLES), None
    except Exception as error:
        return {}, 0, f"{name}: {type(error).__name__}: {error}"


def main() -> None:
    """Compare every op, and write what was found."""
    names = list(database())
    with multiprocessing.get_context("fork").Pool() as pool:
        found = dict(zip(names, pool.map(check_or_tell, names, chunksize=4), strict=True))
    tried = {name: summary(outcomes) for name, (outcomes, _, _) in sorted(found.items()) if outcomes}
    wrong = [error for _, _, error in found.values() if error]
    report = {
        "versions": versions(),
        "weights": WEIGHTS,
        "samples": MOST_SAMPLES,
        "comparisons": sum(count for _, count, _ in found.values()),
        "wrong": wrong,
        "not_for_weights": sorted(name for name, (outcomes, _, error) in found.items() if not outcomes and not error),
        "ops": tried,
    }
    RESULTS.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print("\n".join(wrong))
    print(f"{len(tried)} ops, {report['comparisons']} comparisons, {len(wrong)} ops wrong")


def summary(found: dict[str, list[str]]) -> list[str] | dict[str, list[str]]:
    """Return what an op makes of all weights, by kind only where that differs."""
    first = next(iter(found.values()))
    return first if all(results == first for results in found.values()) else found


if __name__ == "__main__":
    main()
