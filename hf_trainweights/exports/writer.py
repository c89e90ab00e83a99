"""Quantized models written in layouts that others read without this package: all files or none, shard by shard."""

from __future__ import annotations

import os
from pathlib import Path

from transformers import PreTrainedModel

from hf_trainweights.exports import compressed_tensors
from hf_trainweights.files.staging import staged_files
from hf_trainweights.files.weight_shards import MAX_SHARD_SIZE, write_shards
from hf_trainweights.models.loading.saved_models import load_saved
from hf_trainweights.models.saving.companions import copy_companions
from hf_trainweights.models.saving.config_file import write_config
from hf_trainweights.models.saving.saved_tensors import whole_state_dict
from hf_trainweights.models.saving.saving import is_replaced


def export_compressed_tensors(
    model_or_directory: PreTrainedModel | str | os.PathLike[str],
    out: str | os.PathLike[str],
    max_shard_size: int | str = MAX_SHARD_SIZE,
) -> None:
    """Write a quantized model as a compressed-tensors checkpoint, which stock Transformers reads.

    Codes and scales are written as they are, so the weights that are read are those of `model.dequantize()`, bit for
    bit. Beside the model itself, one weight is in memory at a time, in the layout that is written.

    Args:
        model_or_directory: A quantized model, or the directory that one was saved to; of a directory the tokenizer
            and what else lies beside the weights is copied.
        out: The directory to write; made if missing. Weight files that are there are removed at the end.
        max_shard_size: Bytes of one weight file at most, or a text such as `"5GB"`.

    Raises:
        ConfigError: The directory holds no whole model of a class of Transformers, nothing in the model is quantized,
            or `max_shard_size` is no size.
        CorruptFileError: A weight file of the directory is damaged.
        UnsupportedError: The layout cannot hold a weight: embeddings, weights that a layer keeps transposed (GPT-2),
            experts that the checkpoint keeps in one tensor or that have several formats. Nothing was written.
        SaveError: `out` cannot be written, the disk is full, or another save into it is running; what was there
            before is untouched.
    """
    directory = None if isinstance(model_or_directory, PreTrainedModel) else Path(model_or_directory)
    model = model_or_directory if isinstance(model_or_directory, PreTrainedModel) else load_saved(model_or_directory)
    target = Path(out)
    tensors, quantization_config = compressed_tensors.lay_out(model, whole_state_dict(model))
    with staged_files(target, lambda name: is_replaced(name, variant=None)) as staged:
        if directory is not None:
            copy_companions(directory, staged.path)
        write_config(model, staged.path, quantization_config, model.dtype)
        write_shards(tensors, staged.path, max_shard_size)
