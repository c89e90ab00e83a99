"""config.json and generation_config.json of a model that is written as another one than it is in memory."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_trainweights.models.host.checkpoints import save_remote_code


def write_config(
    model: PreTrainedModel, directory: Path, quantization_config: dict[str, Any] | None, dtype: torch.dtype
) -> None:
    """Write the configuration of a model, its generation configuration, and the files of its own code."""
    config = copy.deepcopy(model.config)
    vars(config).pop("quantization_config", None)
    if quantization_config is not None:
        config.quantization_config = quantization_config
    config.architectures = [type(model).__name__]
    config.dtype = dtype
    if model.is_remote_code():
        save_remote_code(model, directory, config)
    config.save_pretrained(directory)
    if model.can_generate():
        model.generation_config.save_pretrained(directory)
