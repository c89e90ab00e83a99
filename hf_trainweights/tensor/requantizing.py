"""Changes of quantized weights: they are dequantized, changed in float, and quantized again in their format.

Only rows whose values changed get new codes.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from hf_trainweights.formats.arithmetic import FLOAT_DTYPES, as_bytes
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor


@dataclass
class Rounding:
    """The error of quantizing again, summed over weights. The wanted values are those before rounding.

    Args:
        count: The number of weights that were quantized again.
        formats: Their formats.
        error: Sum of the squared differences between the new weights and the wanted values.
        change: Sum of the squared differences between the old weights and the wanted values.
        size: Sum of the squares of the wanted values.
    """

    count: int = 0
    formats: set[str] = field(default_factory=set)
    error: float = 0.0
    change: float = 0.0
    size: float = 0.0

    def add(self, before: QuantizedTensor, wanted: Tensor, after: QuantizedTensor) -> None:
        """Count one weight."""
        values = wanted.detach().float()
        self.count += 1
        self.formats.add(str(after.format))
        self.error += (after.dequantize(torch.float32) - values).square().sum().item()
        self.change += (before.dequantize(torch.float32) - values).square().sum().item()
        self.size += values.square().sum().item()

    def __str__(self) -> str:
        error, change = (self.error / max(other, 1e-38) for other in (self.size, self.change))
        return (
            f"{self.count} quantized weights were changed and rounded to {', '.join(sorted(self.formats))} again. "
            f"The relative error of rounding is {error**0.5:.2g}, which is {change**0.5:.2g} times the change itself."
        )


_ROUNDING: ContextVar[Rounding | None] = ContextVar("_ROUNDING", default=None)


@contextlib.contextmanager
def rounding_said_once() -> Iterator[Rounding]:
    """Sum up the error of quantizing again within this context; at the end of the outermost one, warn of it once."""
    outermost = _ROUNDING.get()
    if outermost is not None:
        yield outermost
        return
    rounding = Rounding()
    token = _ROUNDING.set(rounding)
    try:
        yield rounding
    finally:
        _ROUNDING.reset(token)
    if rounding.count:
        warnings.warn(
            f"{rounding} To change weights without rounding, call hf_trainweights.dequantize_(model) first.",
            stacklevel=2,
        )


def requantize(weight: QuantizedTensor, values: Tensor) -> QuantizedTensor:
    """Quantize new values of a weight in its format; rows with the same values keep their codes and scales bit by bit.

    A weight whose format is import-only gets the format `for_new_values`, and all its rows new codes. The new values
    may have another number of rows, or of columns if the weight is stored transposed.
    """
    form = weight.format.for_new_values()
    dtype = weight.scale_dtype if form == weight.format else weight.dtype
    plain = values.detach().to(dtype if dtype in FLOAT_DTYPES else torch.float32)
    quantized = QuantizedTensor.quantize(plain, form, weight.transposed, beside=weight.held.tensors)
    if form == weight.format:
        _keep_equal_rows_(quantized, weight, plain)
    return quantized.map(lambda stored: stored, weight.dtype)


def _keep_equal_rows_(quantized: QuantizedTensor, weight: QuantizedTensor, values: Tensor) -> None:
    """Copy codes and scales from `weight` to `quantized` for the rows that have the same values in both."""
    new, old = values, weight.dequantize(values.dtype)
    if weight.transposed:
        new, old = new.mT, old.mT
    rows = min(new.shape[-2], old.shape[-2])
    equal = (new[..., :rows, :] == old[..., :rows, :]).all(dim=-1, keepdim=True)
    for name, stored in weight.tensors.items():
        if name in quantized.format.shared_names:
            continue
        target, source = (as_bytes(tensor)[..., :rows, :] for tensor in (quantized.held.tensors[name], stored))
        target.copy_(torch.where(equal, source, target))


@contextlib.contextmanager
def in_float(module: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Replace quantized weights of a module by float weights within the context; changed ones are quantized again.

    The parameters stay the same objects afterwards, so ties hold. After an error in the context, or in quantizing, no
    weight is changed.
    """
    weights = {name: getattr(module, name) for name in names}
    for name, weight in weights.items():
        _put(module, name, nn.Parameter(weight.dequantize(), requires_grad=False))
    try:
        yield
        wanted = {name: getattr(module, name) for name in names}
    finally:
        for name, weight in weights.items():
            _put(module, name, weight)
    changed = {name: values for name, values in wanted.items() if not _is_same(weights[name], values)}
    quantized = {name: requantize(weights[name], values) for name, values in changed.items()}
    with rounding_said_once() as rounding:
        for name, weight in quantized.items():
            rounding.add(weights[name], changed[name], weight)
            weights[name].data = weight


def _put(module: nn.Module, name: str, parameter: Tensor) -> None:
    # `setattr` would fail in a parametrized module, which keeps its parameters elsewhere.
    module._parameters[name] = parameter  # type: ignore[assignment]


def _is_same(weight: QuantizedTensor, values: Tensor) -> bool:
    return values.dtype == weight.dtype and torch.equal(weight.dequantize(), values)
