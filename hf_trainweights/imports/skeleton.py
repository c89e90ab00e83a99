"""What the model itself says of its weights: which experts are merged, and which weights are kept transposed."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from hf_trainweights.errors import CorruptFileError, UnsupportedError
from hf_trainweights.files.digests import CONFIG_NAME
from hf_trainweights.models.choosing.selection import is_experts, is_transposed
from hf_trainweights.models.host.models import base_prefix
from hf_trainweights.models.saving.saved_tensors import matrices_in_checkpoint

_Shapes = Mapping[str, tuple[int, ...]]

# Sizes and numbers of modules in a configuration, as models name them, and which of them need no file to be believed.
_SIZES = re.compile(r".*(size|dim|d_model|d_ff|embd|inner|head|channel|position|rank).*")
_MODULES = re.compile(r".*(layer|expert).*")
_LARGE, _MANY = 1 << 27, 1000
# Codes have 2 bits or more, and a tied weight that files hold once is counted twice.
_WEIGHTS_PER_BYTE = 8
_AGAIN = "Download config.json again."


def check_config(config: Mapping[str, Any], tensors: int, size_bytes: int, where: str) -> None:
    """Check that a configuration asks for no larger layers, and no more layers or experts, than files can fill.

    A model is built before anything is read, and one of 10^9 layers keeps a process busy until its memory ends.
    """
    for key, value in config.items():
        if isinstance(value, Mapping):
            check_config(value, tensors, size_bytes, f"{where}: {key}")
        elif type(value) is not int:
            continue
        elif _SIZES.fullmatch(key) and value > max(size_bytes, _LARGE):
            expected = f"a size that {size_bytes} bytes of weights can fill"
            raise CorruptFileError(f"{where}: {key}", expected, f"{value}", _AGAIN)
        elif _MODULES.fullmatch(key) and not _SIZES.fullmatch(key) and value > max(tensors, _MANY):
            expected = f"a number of modules that {tensors} tensors can fill"
            raise CorruptFileError(f"{where}: {key}", expected, f"{value}", _AGAIN)


class Skeleton:
    """A model without weights, whose files have so many bytes.

    UnsupportedError: its class cannot be built of its configuration; CorruptFileError: the files are too small for it.
    """

    def __init__(self, cls: type[PreTrainedModel], config: PretrainedConfig, size_bytes: int):
        config = copy.deepcopy(config)
        vars(config).pop("quantization_config", None)
        try:
            with torch.device("meta"):
                self._model = cls(config)
        except Exception as error:
            # What is wrong in a configuration, Transformers tells by whatever error that leads to.
            expected, found = f"what {cls.__name__} can be built of", f"{type(error).__name__}: {error}"[:200]
            raise UnsupportedError(CONFIG_NAME, expected, found, _AGAIN) from error
        count = self._model.num_parameters()
        if count > _WEIGHTS_PER_BYTE * size_bytes:
            name, largest = max(self._model.named_parameters(), key=lambda named: named[1].numel())
            expected = f"a model whose weights {size_bytes} bytes can hold"
            found = f"{count} weights, most of them in {name} of shape {tuple(largest.shape)}"
            raise CorruptFileError(CONFIG_NAME, expected, found, _AGAIN)

    def names_in_checkpoint(self, names: Iterable[str]) -> dict[str, str]:
        """Return under which name a checkpoint holds each of some matrices, where that is another one."""
        parameters = dict(self._model.named_parameters())
        shapes = {name: tuple(parameters[name].shape) for name in names if name in parameters}
        shapes = {name: shape for name, shape in shapes.items() if len(shape) == 2}
        found = matrices_in_checkpoint(self._model, shapes) if shapes else {}
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
