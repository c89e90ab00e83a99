"""What the model itself says of its weights: which experts are merged, and which weights are kept transposed."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from transformers import PretrainedConfig, PreTrainedModel

from hf_trainweights.models.checkpoint_rows import matrices_in_checkpoint
from hf_trainweights.models.host.models import base_prefix
from hf_trainweights.models.layers import is_experts, is_transposed

_Shapes = Mapping[str, tuple[int, ...]]


class Skeleton:
    """A model without weights.

    Args:
        cls: Its class.
        config: Its configuration.
    """

    def __init__(self, cls: type[PreTrainedModel], config: PretrainedConfig):
        config = copy.deepcopy(config)
        vars(config).pop("quantization_config", None)
        with torch.device("meta"):
            self._model = cls(config)

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

        Returns:
            Full name to the shape `[E, N, K]`, and the modules of its matrices in a checkpoint, each with its rows
            among those of all experts.

        Raises:
            UnsupportedError: The installed Transformers is not supported.
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
