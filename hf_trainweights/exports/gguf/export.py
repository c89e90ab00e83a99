"""`export_gguf`: write a quantized model as one file for llama.cpp."""

from __future__ import annotations

import os
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_trainweights.errors import ConfigError
from hf_trainweights.exports.refusals import require
from hf_trainweights.exports.sources import model_of


def export_gguf(
    model_or_directory: PreTrainedModel | str | os.PathLike[str],
    out: str | os.PathLike[str],
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> None:
    """Write a quantized decoder or sentence encoder as a GGUF file, which llama.cpp reads, and Transformers too.

    int8 becomes Q8_0 and int4 becomes Q4_0, code by code, and weights that were imported from a GGUF file get the bytes
    back that they came from. So a reader gets the weights of `model.dequantize()` before they are rounded to the
    model's dtype. One weight at a time is converted, so beside the model little is in memory.

    Args:
        model_or_directory: A quantized model, or the directory that one was saved to.
        out: The file to write, `*.gguf`. An earlier file is replaced at once, at the end.
        tokenizer: The tokenizer; None for the tokenizer in the directory.

    Raises:
        ConfigError: `out` is no name of a GGUF file; the directory holds no complete model of a class of Transformers;
            no weight of the model is quantized; the tokenizer is missing, or is for another vocabulary; or the file of
            a sentence encoder's pooling is damaged.
        CorruptFileError: A weight file of the directory is damaged.
        UnsupportedError: llama.cpp does not support the architecture, a weight's format, groups or scales, the
            tokenizer or the pooling; or the package gguf is not installed. No file was written.
        SaveError: `out` cannot be written or the disk is full. An earlier file there is untouched.

    Examples:
        >>> export_gguf("models/llama-int8", "llama-int8.gguf")  # doctest: +SKIP
    """
    target = Path(out)
    if target.suffix != ".gguf" or target.is_dir():
        fault = "a directory" if target.is_dir() else "another name"
        file = target / "model.gguf" if target.is_dir() else target.with_suffix(".gguf")
        raise ConfigError(str(out), "the name of a file, *.gguf", fault, f"Name a file, as {file}.")
    require("gguf", "gguf")
    from hf_trainweights.exports.gguf import writer

    source = None if isinstance(model_or_directory, PreTrainedModel) else model_or_directory
    writer.write_model(model_of(model_or_directory), tokenizer, source, target)
