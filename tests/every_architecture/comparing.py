"""Says in which tensors two models differ, and fails with their names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from pathlib import Path

import torch
from helpers import contents
from torch import Tensor, nn

from hf_trainweights import QuantizedTensor


class DifferenceError(Exception):
    """Two things that a promise calls equal are not."""


def require_same(actual: nn.Module, expected: nn.Module, ignored: Collection[str] = ()) -> None:
    """Check that two models hold the same bits, quantize the same weights and tie the same.

    Raises:
        DifferenceError: They do not.
    """
    names = sorted(differing(actual, expected) - set(ignored))
    if names:
        raise DifferenceError(f"{len(names)} tensors differ: {', '.join(names[:3])}")
    if _tied(actual) != _tied(expected):
        raise DifferenceError(f"ties differ: {sorted(map(sorted, _tied(actual) ^ _tied(expected)))[:2]}")


def differing(actual: nn.Module, expected: nn.Module) -> set[str]:
    """Return the names of the tensors that two models do not share to the bit."""
    found, wanted = dict(_tensors(actual)), dict(_tensors(expected))
    common = found.keys() & wanted.keys()
    return (found.keys() ^ wanted.keys()) | {name for name in common if not _is_same(found[name], wanted[name])}


def require_near(actual: list[Tensor], expected: list[Tensor], bound: float) -> None:
    """Check that outputs differ by no more than a share of their norm.

    Raises:
        DifferenceError: They do.
    """
    error = distance(actual, expected)
    if not error <= bound:
        raise DifferenceError(f"outputs differ by {error:.1g}")


def distance(actual: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest difference of an output relative to its norm."""
    if [each.shape for each in actual] != [each.shape for each in expected]:
        return float("inf")
    pairs = zip(actual, expected, strict=True)
    sizes = [((one.double() - other.double()).norm(), other.double().norm()) for one, other in pairs]
    return max((float(error / size) if size else float(error) for error, size in sizes), default=0.0)


def require_same_files(actual: Path, expected: Path) -> None:
    """Check that two directories hold the same bytes.

    Raises:
        DifferenceError: They do not.
    """
    found, wanted = contents(actual), contents(expected)
    names = sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
    if names:
        raise DifferenceError(f"files differ: {', '.join(names)}")


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield all parameters, tied ones by each of their names, and the buffers that are saved."""
    yield from model.named_parameters(remove_duplicate=False)
    saved = model.state_dict().keys()
    yield from ((name, buffer) for name, buffer in model.named_buffers(remove_duplicate=False) if name in saved)


def _is_same(one: Tensor, other: Tensor) -> bool:
    if isinstance(one, QuantizedTensor) or isinstance(other, QuantizedTensor):
        if type(one) is not type(other) or one.shape != other.shape:
            return False
        first, second = dict(one.tensors), dict(other.tensors)  # pyright: ignore[reportAttributeAccessIssue]
        return first.keys() == second.keys() and all(_is_same(first[name], second[name]) for name in first)
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.contiguous().flatten().view(torch.uint8), other.contiguous().flatten().view(torch.uint8))


def _tied(model: nn.Module) -> set[frozenset[str]]:
    names: defaultdict[int, set[str]] = defaultdict(set)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].add(name)
    return {frozenset(group) for group in names.values() if len(group) > 1}
