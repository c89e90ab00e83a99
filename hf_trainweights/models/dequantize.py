"""Saved quantized models written as float models, which stock Transformers loads."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from hf_trainweights.models.directory import load_quantized, require_vacant_directory, write_directory


def dequantize_directory(
    source: str | os.PathLike[str], out: str | os.PathLike[str], *, dtype: torch.dtype | str = "auto"
) -> None:
    """Write a saved quantized model as a float model, which Transformers loads without this package.

    Its weights are those of `model.dequantize()`: what quantizing rounded stays rounded. Tokenizer, processor and
    generation configuration come with it. The source stays as it is. The float model must fit into memory.

    Args:
        source: Directory or Hub id of a quantized model.
        out: A new or empty directory.
        dtype: Of all weights; `"auto"` for the dtypes they were saved in.

    Raises:
        ConfigError: `out` is not empty; the source is missing, cannot be read, is not quantized by this package, or
            lacks weights.
        CorruptFileError: A file of the source is damaged.
        SaveError: `out` cannot be written.

    Examples:
        >>> dequantize_directory("llama-int8", "llama-float")
    """
    out = Path(out)
    require_vacant_directory(out)
    model = load_quantized(source)
    model.dequantize()
    if dtype != "auto":
        # torch's annotation of `to` is lost in Transformers' wrapper.
        model.to(getattr(torch, dtype) if isinstance(dtype, str) else dtype)  # type: ignore[arg-type]
    write_directory(model, source, out)
