"""Saved models: quantized from one directory into another, made float again, or pushed from a directory.

Neither a whole file nor a whole model is in memory. The shards of the source are memory-mapped. Each weight is
quantized as it is read, and waits on the disk until it is saved. So the process needs memory for the largest weight.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import CommitInfo
from torch import Tensor
from transformers import PreTrainedModel

from hf_trainweights.errors import ConfigError
from hf_trainweights.files.digests import CONFIG_NAME
from hf_trainweights.files.safetensors_file import TensorToWrite, write_shards
from hf_trainweights.files.spill import Spill
from hf_trainweights.models.calibration.batches import batches_of_texts, written_by
from hf_trainweights.models.calibration.finished import remove_blocks
from hf_trainweights.models.choosing.config import FormatName, TrainWeightsConfig
from hf_trainweights.models.choosing.summary import Summary
from hf_trainweights.models.host.checkpoints import checkpoint_tensors, names_not_saved
from hf_trainweights.models.loading.saved_models import load_quantized, load_saved, load_tokenizer, read_config
from hf_trainweights.models.quantize_in_place import quantize_module
from hf_trainweights.models.saving.hub import CARD_NAME, begin_push, calibrated_of, choose_card, read_card
from hf_trainweights.models.saving.new_directories import (
    companions,
    copy_companions,
    new_directory,
    require_vacant_directory,
    write_config,
)
from hf_trainweights.models.saving.saved_tensors import matrices_in_checkpoint, whole_state_dict
from hf_trainweights.models.saving.saving import is_replaced
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor


def quantize_directory(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    config: TrainWeightsConfig | FormatName | Mapping[str, Any],
    *,
    dtype: torch.dtype | str = "auto",
    calibration: Sequence[str] | Literal["self"] | None = None,
) -> Summary:
    """Quantize a saved model into another directory, with its tokenizer, processor and generation configuration.

    If it is not calibrated, `save_pretrained(out)` writes the weights that the class of the saved model has after
    `from_pretrained(source, dtype=dtype, quantization_config=config)`. The source stays as it is.

    Args:
        source: Directory or Hub id of a float model.
        out: A new or empty directory.
        config: Which weights to quantize, and to which format; the format's name alone for all weights.
        dtype: The dtype of scales and of parameters that stay float; `"auto"` for the dtype of the source.
        calibration: Texts such as the model will read, some hundred of them, with which `quantize_` chooses the codes;
            or `"self"` to let a causal language model write them. Finished blocks lie in `OUT.calibration` until `out`
            is written; after an interruption the same call goes on there.

    Returns:
        The choice for each parameter, and the gain of calibration.

    Raises:
        ConfigError: `out` is not empty; the source is missing, cannot be read, has an adapter, is quantized already, is
            of no class of Transformers, or lacks weights; or nothing would be quantized; or `calibration` does not fit
            the model.
        CorruptFileError: A file of the source is damaged.
        QuantizationError: A weight holds NaN or Inf.
        SaveError: `out` cannot be written.
        UnsupportedError: A layer of the class has no place for a tensor of the files that is not zero, such as a bias.

    Examples:
        >>> print(quantize_directory("llama", "llama-small", "int8"))
        quantized: 7 int8; ...
    """
    out, config = Path(out), TrainWeightsConfig.of(config)
    require_vacant_directory(out)
    _require_float(source)
    if calibration is None:
        model = load_saved(source, quantization_config=config, dtype=dtype, spill=Spill(out.parent))
        quantizer: Any = model.hf_quantizer
        summary = quantizer.summary()
    else:
        model = load_saved(source, dtype=dtype)
        summary = quantize_module(model, config, _batches(model, source, calibration), _finished_blocks(out))
    with new_directory(out) as temporary:
        copy_companions(source, temporary)
        model.save_pretrained(temporary)
    if calibration is not None:
        remove_blocks(_finished_blocks(out))
    return summary


def _require_float(source: str | os.PathLike[str]) -> None:
    if getattr(read_config(source), "quantization_config", None) is not None:
        problem = "a quantization_config in its config.json, as quantized models have"
        next_step = (
            "Quantize the float model it was made from, or what dequantize_directory makes of it. If its weights are "
            "float, take that entry out of config.json."
        )
        raise ConfigError(str(source), "a float model", problem, next_step)


def _finished_blocks(out: Path) -> Path:
    """Return the directory in which calibration keeps finished blocks."""
    return out.absolute().with_name(f"{out.absolute().name}.calibration")


def _batches(
    model: PreTrainedModel, source: str | os.PathLike[str], calibration: Sequence[str] | Literal["self"]
) -> list[dict[str, torch.Tensor]]:
    """Return the inputs that a model is calibrated with."""
    if calibration == "self":
        return written_by(model)
    if isinstance(calibration, str):
        raise ConfigError("calibration", 'a list of texts or "self"', repr(calibration)[:80], "Pass one of these.")
    next_step = "Save its tokenizer there, or load the model and pass batches to quantize_."
    return batches_of_texts(model, load_tokenizer(source, "calibration", next_step), calibration)


def dequantize_directory(
    source: str | os.PathLike[str], out: str | os.PathLike[str], *, dtype: torch.dtype | str = "auto"
) -> None:
    """Write a saved quantized model as a float model, which Transformers loads without this package.

    Its weights are those of `model.dequantize(dtype)`: values that quantizing has rounded stay rounded. Tokenizer,
    processor and generation configuration are copied too. The source stays as it is. Beside the quantized model, one
    float weight is in memory at a time.

    Args:
        source: Directory or Hub id of a quantized model.
        out: A new or empty directory.
        dtype: The dtype of all weights; `"auto"` for the dtypes they were saved in.

    Raises:
        ConfigError: `out` is not empty; the source is missing, cannot be read, has an adapter, is not quantized by
            this package, or lacks weights; or `dtype` is no float dtype.
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
    """Return the tensors of the float model by their names in a checkpoint; most are dequantized when written."""
    left_out = names_not_saved(model)
    state = {name: tensor for name, tensor in whole_state_dict(model).items() if name not in left_out}
    quantized = {name: tensor for name, tensor in state.items() if isinstance(tensor, QuantizedTensor)}
    lazy = {name: _whole_or_in_matrices(name, weight, model, dtype) for name, weight in quantized.items()}
    # Weights that a checkpoint splits within a matrix, merges or reorders are dequantized now, not when written.
    others = {
        name: tensor.dequantize(dtype) if isinstance(tensor, QuantizedTensor) else tensor
        for name, tensor in state.items()
        if not lazy.get(name)
    }
    tensors = {saved: _cast(tensor, dtype) for saved, tensor in checkpoint_tensors(model, others).items()}
    return dict(sorted({**tensors, **{k: v for matrices in lazy.values() for k, v in matrices.items()}}.items()))


def _whole_or_in_matrices(
    name: str, weight: QuantizedTensor, model: PreTrainedModel, dtype: torch.dtype | None
) -> dict[str, TensorToWrite]:
    """Return the tensors that a checkpoint has of a weight: itself, or the matrices of its experts; else {}."""
    stand_in = torch.empty(weight.shape, device="meta")
    dtype = dtype or weight.dtype
    saved = checkpoint_tensors(model, {name: stand_in})
    # If a checkpoint has the weight alone and unchanged, `checkpoint_tensors` returns this very tensor.
    if [tensor is stand_in for tensor in saved.values()] == [True]:
        return dict.fromkeys(saved, TensorToWrite(tuple(weight.shape), dtype, lambda: weight.dequantize(dtype)))
    if weight.transposed or weight.dim() != 3:
        return {}
    matrices = matrices_in_checkpoint(model, {name: weight.stored_shape})[name] or {}
    return {saved_name: _matrix(weight, rows, dtype) for saved_name, rows in matrices.items()}


def _matrix(weight: QuantizedTensor, rows: slice, dtype: torch.dtype) -> TensorToWrite:
    """Return a matrix of one expert; `rows` counts through the rows of all experts."""
    N, K = weight.stored_shape[-2:]
    expert, start = divmod(rows.start, N)
    stop = start + rows.stop - rows.start

    def make() -> Tensor:
        matrix: Any = weight[expert]
        return matrix.dequantize(dtype)[start:stop]

    return TensorToWrite((stop - start, K), dtype, make)


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> TensorToWrite:
    """Return a tensor to write, in the dtype `dtype` if it is a float tensor."""
    dtype = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    return TensorToWrite(tuple(tensor.shape), dtype, lambda: tensor.to(dtype))


def push_directory(directory: str | os.PathLike[str], repo_id: str, **options: Any) -> CommitInfo:
    """Push a saved quantized model to the Hub with its tokenizer, processor and a model card, in one commit.

    A card that someone wrote or edited is kept: the card on the Hub, else the card in the directory. Weight files of an
    earlier push are removed in the same commit. Training state and other files in the directory are not pushed.
    """
    directory = Path(directory)
    model = load_quantized(directory)
    push = begin_push(repo_id, **options)
    weights = [path.name for path in directory.iterdir() if is_replaced(path.name, variant=None)]
    names = [*weights, CONFIG_NAME, *(path.relative_to(directory).as_posix() for path in companions(directory))]
    card = choose_card(model, push, read_card(directory / CARD_NAME), calibrated_of(model))
    stale = (name for name in push.present if is_replaced(name, variant=None))
    return push.commit(directory, names, card, remove=stale)
