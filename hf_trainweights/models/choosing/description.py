"""The configuration of a model that is composed of quantized parts, so that no single call has quantized it.

The configuration names the format of every weight, or leaves it in float. So the model loads and saves like any other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from torch import nn

from hf_trainweights.formats.base import Format
from hf_trainweights.models.choosing.config import TrainWeightsConfig
from hf_trainweights.models.choosing.config_values import shortest
from hf_trainweights.models.choosing.selection import AS_SAVED, LEFT_AS_SAVED, Choices, choose, is_weight
from hf_trainweights.models.choosing.summary import Choice
from hf_trainweights.tensor.distributed.placements import local_tensor
from hf_trainweights.tensor.modules import is_quantized
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor

# Arguments of a configuration that are also values of a format's own configuration.
_PARAMETERS = ("format", "group_size", "activations", "column_scale", "bits")


def is_described(module: nn.Module, config: TrainWeightsConfig) -> bool:
    """Return whether a configuration names the format of every weight of a module, and leaves out the float ones."""
    return not any(map(_is_other, choose(module, config).summary))


def describe(module: nn.Module, configs: Sequence[TrainWeightsConfig]) -> TrainWeightsConfig:
    """Return a configuration that names the format of every weight of a module, and leaves out the float ones.

    `configs` are the configurations of its parts. The result has their base model and calibration if all agree on it.
    """
    weights = dict(module.named_parameters())
    formats = {name: held.format for name, weight in weights.items() if (held := _quantized(weight)) is not None}
    sizes: Counter[Format] = Counter()
    for name, form in formats.items():
        sizes[form] += weights[name].numel()
    config = _of_format(sizes.most_common(1)[0][0], configs)
    # Both options may leave equally few weights as they are. Then `min` takes the first, which leaves embeddings alone.
    options = (config, config.but(include_embeddings=True))
    choices = min((choose(module, option) for option in options), key=_count_left)
    config = choices.config
    names = {choice.name: formats.get(choice.name) for choice in choices.summary if _is_other(choice)}
    overrides, float_names = {}, [name for name, form in names.items() if form is None]
    quantizable = _quantizable(module)
    for form in dict.fromkeys(form for form in names.values() if form is not None):
        of_form = {name for name, weight_form in names.items() if weight_form == form}
        overrides |= dict.fromkeys(_fewest_modules(of_form, quantizable - of_form), shortest(form))
    left_out = _fewest_modules(float_names, formats)
    return config.but(overrides=overrides, modules_to_not_convert=left_out or None)


def config_of(form: Format, **others: Any) -> TrainWeightsConfig:
    """Return a configuration of one format, without those of its parameters that no configuration has."""
    values = {name: value for name, value in form.get_config().items() if name in _PARAMETERS}
    return TrainWeightsConfig(**values, **others)


def _of_format(form: Format, configs: Sequence[TrainWeightsConfig]) -> TrainWeightsConfig:
    """Return a configuration of one format, with the base model and calibration that other configurations agree on."""
    origins = {(config.base_model, config.calibration_sha256) for config in configs}
    base_model, calibration_sha256 = origins.pop() if len(origins) == 1 else (None, None)
    compress = any(config.compress for config in configs)
    return config_of(form, compress=compress, base_model=base_model, calibration_sha256=calibration_sha256)


def _is_other(choice: Choice) -> bool:
    """Return whether a weight is not as the configuration chooses: in another format, or float but to be quantized."""
    if is_quantized(choice.weight):
        return choice.reason in (AS_SAVED, LEFT_AS_SAVED)
    return choice.format is not None


def _count_left(choices: Choices) -> int:
    return sum(choice.reason == LEFT_AS_SAVED for choice in choices.summary)


def _quantized(weight: nn.Parameter) -> QuantizedTensor | None:
    held = local_tensor(weight)
    return held if isinstance(held, QuantizedTensor) else None


def _quantizable(module: nn.Module) -> set[str]:
    """Return the names of all parameters that an override could quantize."""
    owners = dict(module.named_modules(remove_duplicate=False))
    split = ((name, *name.rpartition(".")[::2], parameter) for name, parameter in module.named_parameters())
    return {name for name, owner, leaf, parameter in split if is_weight(owners[owner], leaf, parameter)}


def _fewest_modules(names: Iterable[str], others: Collection[str]) -> list[str]:
    """Return the outermost modules that hold the named parameters, but none of the `others`."""
    selectors: list[str] = []
    for name in names:
        parts = name.removesuffix(".weight").split(".")
        prefixes = (".".join(parts[:count]) for count in range(1, len(parts)))
        free = (prefix for prefix in prefixes if not any(f".{prefix}." in f".{other}." for other in others))
        selectors.append(next(free, ".".join(parts)))
    return list(dict.fromkeys(selectors))
