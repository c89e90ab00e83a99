"""The classes of models that Transformers has, and a tiny one of each with random weights.

`tests/architectures.py` builds by hand the few of which a test says which weights are quantized and what they generate.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import transformers
from every_architecture.configurations import small_config
from torch import nn
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

# A model type is tried as the first of these that it has a class for; the body alone comes last.
_PREFERRED = (
    "FOR_MULTIMODAL_LM",
    "FOR_IMAGE_TEXT_TO_TEXT",
    "FOR_SEQ_TO_SEQ_CAUSAL_LM",
    "FOR_SPEECH_SEQ_2_SEQ",
    "FOR_TEXT_TO_WAVEFORM",
    "FOR_MASKED_LM",
    "FOR_CAUSAL_LM",
    "FOR_PRETRAINING",
    "FOR_ZERO_SHOT_IMAGE_CLASSIFICATION",
    "FOR_CTC",
    "FOR_IMAGE_CLASSIFICATION",
    "FOR_SEQUENCE_CLASSIFICATION",
)
MOST_PARAMETERS = 4_000_000


@dataclass(frozen=True, order=True)
class Architecture:
    """A class of models and a type of configuration that Transformers makes it from.

    Args:
        model_type: Key of `CONFIG_MAPPING`.
        class_name: Name of the class in `transformers`.
    """

    model_type: str
    class_name: str

    def __str__(self) -> str:
        return f"{self.model_type} {self.class_name}"

    def build(self) -> PreTrainedModel:
        """Return a tiny model in eval mode, always with the same weights.

        Raises:
            ValueError: It would be too large.
        """
        model_class = getattr(transformers, self.class_name)
        with torch.device("meta"):
            size = sum(parameter.numel() for parameter in model_class(small_config(self.model_type)).parameters())
        if size > MOST_PARAMETERS:
            raise ValueError(f"{size:,} parameters, more than {MOST_PARAMETERS:,}")
        torch.manual_seed(0)
        model = model_class(small_config(self.model_type))
        randomize(model)
        return model.eval()


@functools.cache
def architectures() -> list[Architecture]:
    """Return every class of models with each type that it serves, the preferred class of a type first."""
    found: dict[Architecture, None] = {}
    for task in sorted(_tasks(), key=lambda task: (_rank(task), task)):
        for model_type, names in getattr(modeling_auto, f"MODEL_{task}MAPPING_NAMES").items():
            for name in (names,) if isinstance(names, str) else names:
                found[Architecture(model_type, name)] = None
    return list(found)


def one_of_each_type() -> list[Architecture]:
    """Return the preferred class of each model type, language models first."""
    best: dict[str, Architecture] = {}
    for architecture in architectures():
        best.setdefault(architecture.model_type, architecture)
    return list(best.values())


def _tasks() -> Iterator[str]:
    for name in dir(modeling_auto):
        if name.startswith("MODEL_") and name.endswith("MAPPING_NAMES"):
            yield name.removeprefix("MODEL_").removesuffix("MAPPING_NAMES")


def _rank(task: str) -> int:
    task = task.removesuffix("_")
    return _PREFERRED.index(task) if task in _PREFERRED else len(_PREFERRED) + (not task)


@torch.no_grad()
def randomize(model: nn.Module) -> None:
    """Move every weight away from what its class starts it with, so that one that is not read shows."""
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point():
            continue
        if parameter.ndim >= 2 and not name.endswith("A_log"):
            fan_in = parameter[0].numel() if parameter.ndim > 2 else parameter.shape[-1]
            parameter.normal_(std=min(0.125, max(fan_in, 1) ** -0.5))
        else:
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
