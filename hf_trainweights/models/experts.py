"""Experts quantized one by one while they load, so that no merged float weight is ever in memory.

Rows, or at least experts, are quantized independently, so stacking codes gives the very tensors that quantizing the
merged weight gives.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_trainweights.errors import CorruptFileError
from hf_trainweights.formats.base import Format
from hf_trainweights.models.host.converters import NamedLoad
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor


def quantize_experts(
    name: str, shape: torch.Size, form: Format, parts: Sequence[Sequence[NamedLoad]]
) -> QuantizedTensor:
    """Quantize experts one by one and put them together.

    Args:
        name: Full name of the merged weight.
        shape: Its shape, `[E, N, K]`.
        form: The format to quantize to.
        parts: The tensors that are concatenated along N, for each part one per expert.

    Raises:
        CorruptFileError: An expert is missing, or a tensor has another shape.
        QuantizationError: A tensor holds NaN or Inf.
    """
    E, N, K = shape
    if any(len(part) != E for part in parts):
        counts = " and ".join(str(len(part)) for part in parts)
        raise CorruptFileError(
            name, f"{E} experts", counts, "A shard is missing; download or save the model and its config.json again."
        )
    merged: dict[str, Tensor] = {}
    dtype = torch.float32
    for expert in range(E):
        weights = [(source_name, load()) for source_name, load in (part[expert] for part in parts)]
        _check_expert(weights, N, K)
        if not form.has_independent_rows:
            weights = [(" and ".join(source_name for source_name, _ in weights), torch.cat([w for _, w in weights]))]
        row = 0
        for source_name, weight in weights:
            stored = form.quantize(weight, source_name)
            if not merged:
                dtype = weight.dtype
                merged = form.empty(shape, dtype, weight.device)
            for key, tensor in stored.items():
                merged[key][expert, row : row + weight.shape[0]].copy_(tensor)
            row += weight.shape[0]
    return QuantizedTensor(merged, form, shape, dtype)


def _check_expert(weights: Sequence[tuple[str, Tensor]], N: int, K: int) -> None:
    shapes = [tuple(weight.shape) for _, weight in weights]
    if {shape[1:] for shape in shapes} != {(K,)} or sum(shape[0] for shape in shapes) != N:
        names = " and ".join(source_name for source_name, _ in weights)
        raise wrong_shape(names, (N, K), " and ".join(map(str, shapes)))


def wrong_shape(name: str, shape: tuple[int, ...], found: str) -> CorruptFileError:
    """Return the error for a weight that has another shape than the model's.

    Args:
        name: Name of the weight, or several names.
        shape: The shape in the model.
        found: The shape that was found, or several shapes.
    """
    return CorruptFileError(
        name,
        f"shape {shape}, as config.json has it",
        found,
        "Weights and config.json belong to different models; download or save both again.",
    )
