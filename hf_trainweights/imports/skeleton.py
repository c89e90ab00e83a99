"""What the model itself says of its weights: which experts are merged, and which weights are kept transposed."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from hf_trainweights.errors import CorruptFileError, UnsupportedError
from hf_trainweights.files.model_config import CONFIG_NAME
from hf_trainweights.models.choosing.layers import is_experts, is_transposed
from hf_trainweights.models.host.models import base_prefix
from hf_trainweights.models.saving.checkpoint_rows import matrices_in_checkpoint

_Shapes = Mapping[str, tuple[int, ...]]

# Numbers of modules in a configuration, as models name them, and how many of them need no tensor to be believed.
_COUNTS = re.compile(r".*(layer|expert).*")
_SOME = 1000


def check_counts(config: Mapping[str, Any], most: int, where: str) -> None:
    """Check that a configuration asks for no more layers or experts than files can fill.

    A model is built before anything is read, and one of 10^9 layers keeps a process busy until its memory ends.
    """
    for key, value in config.items():
        if isinstance(value, Mapping):
            check_counts(value, most, f"{where}: {key}")
        elif type(value) is int and value > max(most, _SOME) and _COUNTS.fullmatch(key):
            expected = f"a number of modules that {most} tensors can fill"
            raise CorruptFileError(f"{where}: {key}", expected, f"{value}", "Download config.json again.")


class Skeleton:
    """A model without weights; UnsupportedError: its class cannot be built of its configuration."""

    def __init__(self, cls: type[PreTrainedModel], config: PretrainedConfig):
        config = copy.deepcopy(config)
        vars(config).pop("quantization_config", None)
        try:
            with torch.device("meta"):
                self._model = cls(config)
        except Exception as error:
            # What is wrong in a configuration, Transformers tells by whatever error that leads to.
            expected, found = f"what {cls.__name__} can be built of", f"{type(error).__name__}: {error}"[:200]
            raise UnsupportedError(CONFIG_NAME, expected, found, "Download config.json again.") from error

    def names_in_checkpoint(self, names: Iterable[str]) -> dict[str, str]:
        """Return under which name a checkpoint holds each of some matrices, where that is another one.

        UnsupportedError: the configuration names sizes that no memory holds.
        """
        parameters = dict(self._model.named_parameters())
        shapes = {name: tuple(parameters[name].shape) for name in names if name in parameters}
        shapes = {name: shape for name, shape in shapes.items() if len(shape) == 2}
        try:
            found = matrices_in_checkpoint(self._model, shapes) if shapes else {}
        except RuntimeError as error:  # PyTorch's, of memory that it does not get
            expected, next_step = "sizes that fit the weights", "Download config.json again."
            raise UnsupportedError(CONFIG_NAME, expected, str(error)[:200], next_step) from error
        alone = {name: next(iter(each)) for name, each in found.items() if each is not None and len(each) == 1}
        return {name: saved for name, saved in alone.items() if saved != name}

    def transposed_modules(self) -> set[str]:
        """Return the modules that keep their weight transposed, with and without the prefix of the base model."""
        names = {
            name
            for name, module in self._model.named_modules()
            for parameter in module.parameters(recurse=False)
            if parameter.dim() == 2 and is_transposed(module, parameter)
        }
        return names | {name.removeprefix(base_prefix(self._model)) for name in names}

    def merged_experts(self) -> dict[str, tuple[tuple[int, ...], dict[str, slice]]]:
        """Return the weights that a checkpoint holds expert by expert.

        By full name, these are the shape `[E, N, K]` and the modules of the matrices, each with its rows among those of
        all experts.
        """
        shapes: dict[str, tuple[int, ...]] = {}
        for module_name, module in self._model.named_modules():
            for leaf, parameter in module.named_parameters(recurse=False):
                if is_experts(module, parameter) and not is_transposed(module, parameter):
                    shapes[f"{module_name}.{leaf}"] = tuple(parameter.shape)
        matrices = matrices_in_checkpoint(self._model, shapes) if shapes else {}
        return {
            name: (shapes[name], {saved.removesuffix(".weight"): rows for saved, rows in each.items()})
            for name, each in matrices.items()
            if each is not None
        }
