"""Advice at the moment when a module gets its weights: some multiply slowly on a CPU, or a float head stays large."""

from __future__ import annotations

import logging

import torch
from torch import nn

from hf_trainweights import kernels
from hf_trainweights.models.choosing.config import TrainWeightsConfig
from hf_trainweights.models.choosing.summary import Summary
from hf_trainweights.tensor.distributed.placements import local_tensor
from hf_trainweights.tensor.modules import parameter_places
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor

_logger = logging.getLogger(__name__)

# Warnings that this process has shown.
_told: set[str] = set()


def say_if_slow(module: nn.Module, config: TrainWeightsConfig) -> None:
    """Warn in one line of quantized weights whose products take longer than those of float weights, once in a process.

    There is no warning of formats that were chosen for a budget, or of embeddings, whose rows are looked up. Beside an
    accelerator there is none at all, because the weights may still move to it.
    """
    if config.plan is not None or torch.accelerator.is_available():
        return
    slow = []
    for places in parameter_places(module).values():
        weight = local_tensor(getattr(*places[0]))
        is_multiplied = not all(isinstance(owner, nn.Embedding) for owner, _ in places)
        if isinstance(weight, QuantizedTensor) and weight.device.type == "cpu" and is_multiplied:
            slow.append(kernels.slowness(weight.format, weight.dtype))
    _tell([text for text in dict.fromkeys(slow) if text])


def say_if_head_is_large(summary: Summary) -> None:
    """Warn in one line, once in a process, if a float output head is a large share of the bytes that a token reads."""
    if summary.large_head:
        _tell([f"{summary.large_head[0].upper()}{summary.large_head[1:]}."])


def _tell(texts: list[str]) -> None:
    new = [text for text in texts if text not in _told]
    if new:
        _told.update(new)
        _logger.warning("%s", " ".join(new))
