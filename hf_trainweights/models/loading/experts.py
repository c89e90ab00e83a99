"""Experts quantized one by one while they load, so that no merged float weight is ever in memory.

Experts are quantized independently, and rows too, except in formats in which the rows of an expert share something. So
stacking and concatenating rows of codes gives the very tensors that quantizing the merged weight gives.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_trainweights.errors import CorruptFileError
from hf_trainweights.files.spill import Spill
from hf_trainweights.formats.base import Format
from hf_trainweights.models.host.checkpoints import NamedLoad
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor


def quantize_experts(
    name: str,
    shape: torch.Size,
    form: Format,
    parts: Sequence[Sequence[NamedLoad]],
    count: int | None = None,
    spill: Spill | None = None,
) -> QuantizedTensor:
    """Quantize the experts of a weight `[E, N, K]` one by one and put them together.

    `parts` are concatenated along N, each of them one tensor per expert; one of another rank loads None. `count` is the
    number of experts that all ranks hold together, E if None.
    """
    E, N, K = shape
    _check_count(name, E if count is None else count, parts)
    merged: dict[str, Tensor] = {}
    dtype, expert = torch.float32, 0
    for sources in zip(*parts, strict=True):
        loaded = [(source_name, load()) for source_name, load in sources]
        weights = [(source_name, weight) for source_name, weight in loaded if weight is not None]
        if not weights:
            continue
        _check_expert(weights, N, K)
        if not form.has_independent_rows and len(weights) > 1:
            # What the rows of an expert share is chosen by all of them.
            weights = [(_names(weights), torch.cat([weight for _, weight in weights]))]
        row = 0
        for source_name, weight in weights:
            stored = form.quantize(weight, source_name)
            if not merged:
                dtype = weight.dtype
                if spill is None or weight.device.type != "cpu":
                    merged = form.empty(shape, dtype, weight.device)
                else:
                    merged = {key: spill.empty(*spec) for key, spec in form.tensor_specs(shape, dtype).items()}
            for key, tensor in stored.items():
                rows = slice(None) if key in form.shared_names else slice(row, row + weight.shape[0])
                merged[key][expert, rows].copy_(tensor)
            row += weight.shape[0]
        expert += 1
    return QuantizedTensor(merged, form, shape, dtype)


def rows_of_experts(name: str, shape: Sequence[int], parts: Sequence[Sequence[NamedLoad]], numbers: Tensor) -> Tensor:
    """Return new float rows `[n, K]` of experts `[E, N, K]`, read expert by expert.

    `numbers` are theirs among the rows of all experts, in order.
    """
    E, N, K = shape
    _check_count(name, E, parts)
    found = []
    for expert in range(E):
        wanted = numbers[numbers // N == expert] % N
        if len(wanted):
            loaded = [(source_name, load()) for source_name, load in (part[expert] for part in parts)]
            weights = [(source_name, weight) for source_name, weight in loaded if weight is not None]
            _check_expert(weights, N, K)
            found.append(torch.cat([weight for _, weight in weights])[wanted])
    return torch.cat(found)


def _check_count(name: str, E: int, parts: Sequence[Sequence[NamedLoad]]) -> None:
    if any(len(part) != E for part in parts):
        counts = " and ".join(str(len(part)) for part in parts)
        next_step = "A shard is missing; download or save the model and its config.json again."
        raise CorruptFileError(name, f"{E} experts", counts, next_step)


def _check_expert(weights: Sequence[tuple[str, Tensor]], N: int, K: int) -> None:
    shapes = [tuple(weight.shape) for _, weight in weights]
    if {shape[1:] for shape in shapes} != {(K,)} or sum(shape[0] for shape in shapes) != N:
        raise wrong_shape(_names(weights), (N, K), " and ".join(map(str, shapes)))


def _names(weights: Sequence[tuple[str, Tensor]]) -> str:
    return " and ".join(source_name for source_name, _ in weights)


def wrong_shape(name: str, shape: tuple[int, ...], found: str) -> CorruptFileError:
    """Return the error for a weight that has another shape than the model's."""
    return CorruptFileError(
        name,
        f"shape {shape}, as config.json has it",
        found,
        "Weights and config.json belong to different models; download or save both again.",
    )
