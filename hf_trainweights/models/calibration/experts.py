"""Experts: what each of them gets, seen in the products of its part of the weight, and their codes one after another.

A model keeps the weights of all experts of a layer in one parameter and multiplies by its parts, so that no module is
called whose input could be seen.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from hf_trainweights.files.spill import Spill
from hf_trainweights.formats.base import Format
from hf_trainweights.models.calibration.blocks import PRODUCTS
from hf_trainweights.models.calibration.feedback import quantize_with_feedback
from hf_trainweights.models.calibration.moments import Moments
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor


class ExpertInputs(TorchFunctionMode):
    """Within it, collects in `rows` what each expert of a layer's float weight `[E, *, *]` multiplies."""

    def __init__(self, weight: Tensor, spill: Spill):
        super().__init__()
        self._spill = spill
        self._weight = weight
        self._expert_bytes = weight.stride(0) * weight.element_size()
        self.rows: list[list[Tensor]] = [[] for _ in weight]

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Look at a product of float tensors, and let it be done."""
        if func in PRODUCTS and len(args) > 1 and not isinstance(args[1], QuantizedTensor):
            self._see(args[0], args[1])
        return func(*args, **(kwargs or {}))

    def _see(self, x: Tensor, weight: Tensor) -> None:
        expert, rest = divmod(weight.data_ptr() - self._weight.data_ptr(), self._expert_bytes)
        if rest or not 0 <= expert < len(self.rows):
            return
        if weight.shape == self._weight.shape:
            # All experts at once: tokens that are not meant for one of them come to it as zeros.
            for number, each in enumerate(x):
                self._keep(number, each[each.any(dim=-1)])
        elif weight.numel() == self._weight[0].numel():
            self._keep(expert, x.reshape(-1, x.shape[-1]))

    def _keep(self, expert: int, x: Tensor) -> None:
        with torch._C.DisableTorchFunction():
            self.rows[expert].append(self._spill.keep(x))


def quantize_experts_with_feedback(weight: Tensor, form: Format, rows: Sequence[Sequence[Tensor]]) -> dict[str, Tensor]:
    """Quantize finite experts `[E, N, K]`, each so that its products with its rows `[n, K]` change least."""
    E, _, K = weight.shape
    usual = Moments(K, weight.device)
    for parts in rows:
        for part in parts:
            usual.add(part, part)
    found = form.empty(weight.shape, weight.dtype, weight.device)
    for expert in range(E):
        moments = Moments(K, weight.device)
        for part in rows[expert]:
            moments.add(part, part)
        # What all experts get tells something of one that few tokens come to: as much as one token for each input.
        moments.blend(usual.mean, K)
        tensors = quantize_with_feedback(weight[expert], form, moments, moments.factor())
        assert tensors is not None
        for name, tensor in tensors.items():
            found[name][expert].copy_(tensor)
    return found


@contextlib.contextmanager
def one_by_one(module: nn.Module) -> Iterator[None]:
    """Let the models of Transformers in a module multiply by one expert after another, instead of all at once."""
    models = [each for each in module.modules() if isinstance(each, PreTrainedModel)]
    saved = [(model.config, dict(vars(model.config))) for model in models]
    try:
        for model in models:
            with contextlib.suppress(ValueError):  # a model that has no such choice
                model.set_experts_implementation("eager")
        yield
    finally:
        for config, values in saved:
            vars(config).update(values)
