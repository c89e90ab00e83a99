"""The weights of a model in memory or on disk, and those of another one that are their counterparts.

Weights on disk are views of the mapped files, so none is in memory before it is looked at. Only a file that is encoded
is decoded as a whole.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from torch import nn

from hf_trainweights.checkpoint.run.checkpoints import checkpoint_directories
from hf_trainweights.errors import ConfigError
from hf_trainweights.inspection.listing import configured_format, fold_weights
from hf_trainweights.inspection.stored_tensors import StoredTensor, find_parts, read_part
from hf_trainweights.models.loading.saved_models import load_saved

Source = nn.Module | str | os.PathLike[str]


def read_weights(source: Source) -> dict[str, StoredTensor]:
    """Return the weights of a model by name, a tied weight once."""
    if isinstance(source, nn.Module):
        return {name: StoredTensor.of(name, parameter) for name, parameter in source.named_parameters()}
    path = existing(source)
    stored = dict(read_part(find_parts(path).get("weights", []), "weights"))
    default = configured_format(path if path.is_dir() else path.parent)
    return {each.name: each for each in fold_weights(stored, default)}


def read_counterparts(source: Source, names: Iterable[str]) -> dict[str, StoredTensor]:
    """Return the weights of another model that may be compared with weights of these names, and perhaps others.

    If the source's files have other names, it is loaded as Transformers does, which merges experts and renames what a
    quantized model was saved with.
    """
    weights = read_weights(source)
    if isinstance(source, nn.Module) or set(names) <= weights.keys() or not (Path(source) / "config.json").is_file():
        return weights
    return read_weights(load_saved(source)) | weights


def existing(source: str | os.PathLike[str]) -> Path:
    """Return the path of a source on disk; ConfigError: there is nothing."""
    path = Path(source)
    if not path.exists():
        next_step = "Give a directory; huggingface_hub.snapshot_download(...) returns that of a model on the Hub."
        raise ConfigError(str(path), "a model, a checkpoint, a run or a weight file", "nothing", next_step)
    return path


def is_run(source: Source) -> bool:
    """Return whether a source is a directory of checkpoints."""
    return not isinstance(source, nn.Module) and bool(checkpoint_directories(Path(source)))
