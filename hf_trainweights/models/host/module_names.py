"""Tensor names in a model's files and in its modules, for callers that load a state dict by themselves."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_trainweights.models.host import private
from hf_trainweights.models.host.checkpoints import WeightConverter, checkpoint_tensors
from hf_trainweights.models.host.models import base_prefix, has_adapters
from hf_trainweights.tensor.guards import is_guard, name_for_transformers, name_in_file
from hf_trainweights.tensor.stored_names import parse_stored_name


def converted_names(module: nn.Module) -> set[str]:
    """Return the names in a model's files whose tensors are renamed, split, merged or transposed ones of the modules.

    The result is empty for a quantized model, whose `ModuleNames` undo all this, for a model that saves only its
    adapters, and for a model of another library.
    """
    if not isinstance(module, PreTrainedModel) or getattr(module, "hf_quantizer", None) or has_adapters(module):
        return set()
    state = _float_state(module)
    return {name for name, tensor in checkpoint_tensors(module, state).items() if state.get(name) is not tensor}


def renamed_tensors(module: nn.Module) -> dict[str, str]:
    """Return the module's name of each float tensor that a quantized model's files rename, by its name in the files.

    A tensor that the files split, merge or transpose has no such name.
    """
    if not isinstance(module, PreTrainedModel) or not getattr(module, "hf_quantizer", None) or has_adapters(module):
        return {}
    state = _float_state(module)
    names = {id(tensor): name for name, tensor in state.items()}
    saved = {name: names.get(id(tensor), name) for name, tensor in checkpoint_tensors(module, state).items()}
    return {name: in_module for name, in_module in saved.items() if name != in_module}


def _float_state(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the tensors of a model on the meta device, except quantized weights, which have a class of their own."""
    return {name: tensor.to("meta") for name, tensor in model.state_dict().items() if type(tensor) is Tensor}


class ModuleNames:
    """A load_state_dict pre-hook that lets a model take tensors that its own files rename, split or merge.

    A Trainer resumes by `model.load_state_dict(tensors, strict=False)`, shard by shard. It would leave such parameters
    at their starting values if there were no hook. Tensors that make one parameter together wait until all have come.
    """

    def __init__(self) -> None:
        # By the first parameter that is to be made: the converter, and by name in files the pattern and the tensor.
        self._waiting: dict[str, tuple[WeightConverter, dict[str, tuple[str, Any]]]] = {}

    def __call__(self, module: PreTrainedModel, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        """Replace tensors that no module has by the tensors that a load from files makes of them, in place."""
        tensors = {key.removeprefix(prefix): tensor for key, tensor in state_dict.items() if key.startswith(prefix)}
        names = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        names |= {name for name, _ in module.named_buffers(remove_duplicate=False)}
        unknown, prefix_of_base = {name for name in tensors if _weight_of(name) not in names}, base_prefix(module)
        for conversions in _conversions_of(module) if unknown else ():
            for name in sorted(unknown, key=private("core_model_loading", "dot_natural_key")):
                target, converter, pattern = _made_of(name, tensors[name], conversions)
                # A load also removes or adds the base model's prefix if that gives a name of the model.
                others = (target.removeprefix(prefix_of_base), prefix_of_base + target) if converter is None else ()
                target = next((option for option in (target, *others) if _weight_of(option) in names), None)
                if target is None:
                    continue
                unknown.remove(name)
                tensor = state_dict.pop(prefix + name)
                if converter is None:
                    state_dict[prefix + target] = tensor
                    continue
                if target not in self._waiting:
                    self._waiting[target] = copy.deepcopy(converter), {}
                self._waiting[target][1][name] = pattern, tensor
            for target in self._complete(module, conversions):
                state_dict |= {prefix + name: tensor for name, tensor in self._convert(module, target).items()}

    def _complete(self, model: PreTrainedModel, conversions: Sequence[Any]) -> list[str]:
        """Return the waiting targets whose tensors have all come."""
        if not self._waiting:
            return []
        saved = checkpoint_tensors(model, _float_state(model))
        counts = Counter(_made_of(name, tensor, conversions)[0] for name, tensor in saved.items())
        return [target for target, (_, parts) in self._waiting.items() if len(parts) == counts[target]]

    def _convert(self, model: PreTrainedModel, target: str) -> dict[str, Tensor]:
        """Return the parameters that a converter makes of the tensors that waited for a target."""
        converter, parts = self._waiting.pop(target)
        for name in sorted(parts, key=private("core_model_loading", "dot_natural_key")):
            converter.add_tensor(target, name, *parts[name])
        made: dict[str, Any] = converter.convert(target, model=model, config=model.config)
        return {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in made.items()}


def _weight_of(name: str) -> str:
    """Return the name of the weight that a tensor of a file belongs to, its own name if it is no stored tensor."""
    return (parse_stored_name(name) or (name,))[0]


def _conversions_of(model: PreTrainedModel) -> Iterator[list[Any]]:
    """Yield the conversions that a save of a model reverts, as copies because they note their use, then its class's."""
    used: list[Any] | None = getattr(model, "_weight_conversions", None)
    if used:
        yield copy.deepcopy(used)
    yield private("conversion_mapping", "get_model_conversion_mapping")(model)


def _made_of(name: str, tensor: Tensor, conversions: Sequence[Any]) -> tuple[str, WeightConverter | None, str]:
    """Return the first parameter that is made of a tensor in a file, the converter that makes it, and the pattern.

    The converter is None if the tensor is only renamed, as stored tensors of quantized weights and guards are.
    """
    renamed = name_for_transformers(name) if is_guard(tensor) else name
    for renaming in conversions:
        if not isinstance(renaming, WeightConverter):
            renamed, _ = renaming.rename_source_key(renamed)
    if is_guard(tensor) or parse_stored_name(renamed):
        return name_in_file(renamed), None, ""
    for converter in conversions:
        if isinstance(converter, WeightConverter):
            target, pattern = converter.rename_source_key(renamed)
            if pattern is not None:
                return target, converter, pattern
    return renamed, None, ""
