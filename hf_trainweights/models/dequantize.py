"""Saved quantized models written as float models, which stock Transformers loads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_trainweights.errors import ConfigError
from hf_trainweights.files.safetensors_file import TensorToWrite, write_shards
from hf_trainweights.files.spill import Spill
from hf_trainweights.models.host.checkpoints import checkpoint_tensors, names_not_saved
from hf_trainweights.models.loading.saved_models import load_quantized
from hf_trainweights.models.saving.new_directories import (
    copy_companions,
    new_directory,
    require_vacant_directory,
    write_config,
)
from hf_trainweights.models.saving.saved_tensors import matrices_in_checkpoint, whole_state_dict
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor


def dequantize_directory(
    source: str | os.PathLike[str], out: str | os.PathLike[str], *, dtype: torch.dtype | str = "auto"
) -> None:
    """Write a saved quantized model as a float model, which Transformers loads without this package.

    Its weights are those of `model.dequantize(dtype)`: what quantizing rounded stays rounded. Tokenizer, processor and
    generation configuration come with it. The source stays as it is. Beside the quantized model, one float weight is in
    memory at a time.

    Args:
        source: Directory or Hub id of a quantized model.
        out: A new or empty directory.
        dtype: Of all weights; `"auto"` for the dtypes they were saved in.

    Raises:
        ConfigError: `out` is not empty; the source is missing, cannot be read, is not quantized by this package, or
            lacks weights; or `dtype` is no float dtype.
        CorruptFileError: A file of the source is damaged.
        SaveError: `out` cannot be written.

    Examples:
        >>> dequantize_directory("llama-int8", "llama-float")
    """
    out = Path(out)
    require_vacant_directory(out)
    target = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype != "auto" and not (isinstance(target, torch.dtype) and target.is_floating_point):
        next_step = 'Pass torch.bfloat16, or "auto" for the dtypes that the weights were saved in.'
        raise ConfigError("dtype", "a float dtype of torch", repr(dtype), next_step)
    model = load_quantized(source, Spill(out.parent))
    with new_directory(out) as temporary:
        copy_companions(source, temporary)
        write_config(model, temporary, None, target or model.dtype)
        write_shards(_float_tensors(model, target), temporary)


def _float_tensors(model: PreTrainedModel, dtype: torch.dtype | None) -> dict[str, TensorToWrite]:
    """Return the tensors of the float model by their names in a checkpoint, quantized ones made when asked for."""
    left_out = names_not_saved(model)
    state = {name: tensor for name, tensor in whole_state_dict(model).items() if name not in left_out}
    quantized = {name: tensor for name, tensor in state.items() if isinstance(tensor, QuantizedTensor)}
    lazy = {name: _whole_or_in_matrices(name, weight, model, dtype) for name, weight in quantized.items()}
    # What a checkpoint splits within a matrix, merges or reorders is made at once.
    others = {
        name: tensor.dequantize(dtype) if isinstance(tensor, QuantizedTensor) else tensor
        for name, tensor in state.items()
        if not lazy.get(name)
    }
    tensors = {saved: _cast(tensor, dtype) for saved, tensor in checkpoint_tensors(model, others).items()}
    return dict(sorted({**tensors, **{k: v for each in lazy.values() for k, v in each.items()}}.items()))


def _whole_or_in_matrices(
    name: str, weight: QuantizedTensor, model: PreTrainedModel, dtype: torch.dtype | None
) -> dict[str, TensorToWrite]:
    """Return the tensors that a checkpoint has of a weight: itself, or the matrices of its experts; else none."""
    stand_in = torch.empty(weight.shape, device="meta")
    dtype = dtype or weight.dtype
    saved = checkpoint_tensors(model, {name: stand_in})
    if [tensor is stand_in for tensor in saved.values()] == [True]:
        return dict.fromkeys(saved, TensorToWrite(tuple(weight.shape), dtype, lambda: weight.dequantize(dtype)))
    if weight.transposed or weight.dim() != 3:
        return {}
    matrices = matrices_in_checkpoint(model, {name: weight.stored_shape})[name] or {}
    return {saved_name: _matrix(weight, rows, dtype) for saved_name, rows in matrices.items()}


def _matrix(weight: QuantizedTensor, rows: slice, dtype: torch.dtype) -> TensorToWrite:
    """Return a matrix of one expert, whose rows are given among those of all experts."""
    N, K = weight.stored_shape[-2:]
    expert, start = divmod(rows.start, N)
    stop = start + rows.stop - rows.start

    def make() -> Tensor:
        matrix: Any = weight[expert]
        return matrix.dequantize(dtype)[start:stop]

    return TensorToWrite((stop - start, K), dtype, make)


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> TensorToWrite:
    """Return a tensor to be written in a dtype, if it is a float tensor."""
    dtype = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    return TensorToWrite(tuple(tensor.shape), dtype, lambda: tensor.to(dtype))
